//! Evaluation: what is printed and written, when training ends early, which checkpoint stays.

use std::fs;

use serde_json::{Map, Value};

use super::folder::{names, read_checkpoint};
use super::program::Program;
use super::training::{metrics, without_times};
use super::workspace::{Workspace, candle_train};

/// Six steps, of which each is evaluated.
fn evaluated(workspace: &Workspace) -> Program {
    workspace
        .finetune()
        .flag("--steps", 6)
        .flag("--eval-fraction", 0.1)
        .flag("--eval-every", 1)
        .flag("--metrics", workspace.path("metrics.jsonl").display())
}

fn evaluations(workspace: &Workspace) -> Vec<Map<String, Value>> {
    let mut lines = metrics(&workspace.path("metrics.jsonl"));
    lines.retain(|line| line.contains_key("eval_loss"));
    lines
}

fn losses(workspace: &Workspace) -> Vec<f64> {
    let lines = evaluations(workspace).into_iter();
    lines
        .map(|line| line["eval_loss"].as_f64().unwrap())
        .collect()
}

#[test]
fn evaluations_are_printed_and_logged_and_the_same_on_every_layout() {
    let workspace = Workspace::new();
    let run = evaluated(&workspace).flag("--eval-every", 4);
    let outcome = run.succeeds();
    outcome.prints(&[" sequences not trained on\n"]);
    let said: Vec<&str> = outcome
        .stderr
        .lines()
        .filter(|line| line.starts_with("evaluation "))
        .collect();
    assert_eq!(said.len(), 2, "{said:?}");
    assert!(
        said[0].starts_with("evaluation after step 4: loss "),
        "{said:?}"
    );
    assert!(
        said[1].starts_with("evaluation after step 6: loss "),
        "{said:?}"
    );
    assert!(
        said[1].contains(", perplexity ") && said[1].contains(", accuracy "),
        "{said:?}"
    );
    let lines = evaluations(&workspace);
    assert_eq!(lines[1]["step"], 5);
    let (loss, perplexity) = (&lines[1]["eval_loss"], &lines[1]["eval_perplexity"]);
    assert_eq!(loss.as_f64().unwrap().exp(), perplexity.as_f64().unwrap());
    // A tenth of 455 sequences of 16 tokens, of which the last one is shorter.
    let num_tokens = lines[1]["eval_num_tokens"].as_u64().unwrap();
    assert!(
        num_tokens > 45 * 16 && num_tokens <= 46 * 16,
        "{num_tokens}"
    );
    let want = losses(&workspace);
    for (pp, dp, tp, micro) in [(1, 1, 1, 4), (1, 4, 1, 1), (2, 1, 2, 2)] {
        let run = run
            .clone()
            .flag("--pp", pp)
            .flag("--dp", dp)
            .flag("--tp", tp);
        run.flag("--micro-batch-size", micro).succeeds();
        for (loss, want) in losses(&workspace).iter().zip(&want) {
            assert!((loss - want).abs() < 1e-5 * want, "{loss} {want}");
        }
    }
}

#[test]
fn other_data_is_evaluated_and_training_is_the_same_without() {
    let workspace = Workspace::new();
    fs::write(workspace.path("other.txt"), "Another text. ".repeat(40)).unwrap();
    let plain = workspace.finetune().flag("--steps", 3);
    plain.succeeds();
    let want = read_checkpoint(&workspace.output());
    let run = plain.flag("--eval-data", workspace.path("other.txt").display());
    let outcome = run.flag("--eval-every", 1).succeeds();
    outcome.says(&["evaluation after step 1: loss "]);
    assert!(read_checkpoint(&workspace.output()) == want);
}

#[test]
fn training_ends_when_evaluations_do_not_improve_and_the_best_checkpoint_stays() {
    let workspace = Workspace::new();
    let saves = workspace.path("saves");
    let run = evaluated(&workspace)
        .flag("--lr", 0)
        .flag("--patience", 2)
        .flag("--save-every", 1)
        .flag("--keep", 1)
        .flag("--save-dir", saves.display());
    let outcome = run.succeeds();
    let losses = losses(&workspace);
    let (least, best) = (losses[0], 1);
    assert_eq!(losses, [least; 3]);
    let said = format!(
        "stopped after step {} of 6: 2 evaluations without improvement; the least loss, {least:.4}, was that after step {best}\n",
        best + 2
    );
    assert!(outcome.stdout.contains(&said), "{said}{}", outcome.stdout);
    let step = |step| format!("step-{step:06}");
    assert_eq!(names(&saves), [step(best), step(best + 2)]);
    // A resumed run knows of the earlier evaluations, and the same ones end it.
    let numbers = without_times(metrics(&workspace.path("metrics.jsonl")));
    let weights = read_checkpoint(&workspace.output());
    fs::remove_dir_all(saves.join(step(best + 2))).unwrap();
    let outcome = run.flag("--resume", "latest").succeeds();
    outcome.prints(&[&said]);
    let again = without_times(metrics(&workspace.path("metrics.jsonl")));
    assert_eq!(again, numbers);
    assert!(read_checkpoint(&workspace.output()) == weights);
    assert_eq!(names(&saves), [step(best), step(best + 2)]);
}

/// Four steps of a rate at which the loss rises after some of them, and the number of steps after which it was the least.
fn with_a_best_step(workspace: &Workspace) -> (Program, usize) {
    let run = evaluated(workspace)
        .flag("--steps", 4)
        .flag("--lr", 0.05)
        .flag("--lr-schedule", "constant")
        .flag("--warmup-steps", 0);
    run.succeeds();
    let losses = losses(workspace);
    let least = losses.iter().copied().fold(f64::INFINITY, f64::min);
    let best = 1 + losses.iter().position(|loss| *loss == least).unwrap();
    assert!(best < 4, "{losses:?}");
    (run, best)
}

#[test]
fn with_patience_the_output_gets_the_best_weights() {
    let workspace = Workspace::new();
    let (run, best) = with_a_best_step(&workspace);
    let output = || read_checkpoint(&workspace.output());
    let last = output();
    for (flags, folder) in [
        (vec![], None),
        (vec![("--save-every", "5"), ("--keep", "1")], Some("saves")),
    ] {
        for (patience, steps, zero, lora) in [(1, 6, 1, false), (9, 4, 3, false), (9, 4, 2, true)] {
            let run = run.clone().flag("--zero", zero);
            let run = if lora {
                run.flag("--lora-rank", 2)
            } else {
                run
            };
            let (run, best) = match lora {
                false => (run, best),
                true => {
                    run.succeeds();
                    let losses = losses(&workspace);
                    let least = losses.iter().copied().fold(f64::INFINITY, f64::min);
                    (
                        run,
                        1 + losses.iter().position(|loss| *loss == least).unwrap(),
                    )
                }
            };
            run.clone().flag("--steps", best).succeeds();
            let want = output();
            let run = run.flag("--patience", patience).flag("--steps", steps);
            let run = run.flags(&flags);
            let run = match folder {
                Some(folder) => run.flag("--save-dir", workspace.path(folder).display()),
                None => run,
            };
            let outcome = run.succeeds();
            let said = format!("the weights after step {best}, with the least evaluation loss, ");
            assert!(
                outcome.stdout.contains(&said) || best == steps,
                "{said}{}",
                outcome.stdout
            );
            assert!(
                output() == want,
                "patience {patience}, ZeRO-{zero}, {folder:?}"
            );
            assert!(lora || want != last);
            if let Some(folder) = folder {
                let kept = names(&workspace.path(folder));
                assert!(kept.contains(&format!("step-{best:06}")), "{kept:?}");
                fs::remove_dir_all(workspace.path(folder)).unwrap();
            }
            assert!(!workspace.path(".output.best").exists());
        }
    }
}

#[test]
fn the_best_checkpoint_is_kept_whatever_the_steps_between_saves() {
    let workspace = Workspace::new();
    let (run, best) = with_a_best_step(&workspace);
    let saves = workspace.path("saves");
    let run = run.flag("--save-dir", saves.display()).flag("--keep", 1);
    run.clone().flag("--save-every", 4).succeeds();
    let step = |step| format!("step-{step:06}");
    assert_eq!(names(&saves), [step(best), step(4)]);
    fs::remove_dir_all(&saves).unwrap();
    // The same without any.
    run.succeeds();
    assert_eq!(names(&saves), [step(best)]);
}

#[test]
fn flags_that_contradict_each_other_are_refused() {
    let workspace = Workspace::new();
    let run = workspace.finetune();
    for (flags, parts) in [
        (
            vec![("--eval-every", "1")],
            vec!["--eval-every is given without", "hint:"],
        ),
        (
            vec![("--patience", "1")],
            vec!["--patience is given without"],
        ),
        (
            vec![("--patience", "1"), ("--eval-fraction", "0.5")],
            vec!["--patience is given without --eval-every"],
        ),
        (
            vec![("--eval-fraction", "0.999")],
            vec!["leaves none to train on", "hint:"],
        ),
        (
            vec![("--eval-fraction", "1")],
            vec!["--eval-fraction", "> 0 and < 1"],
        ),
        (vec![("--eval-data", "nowhere.txt")], vec!["nowhere.txt"]),
        (
            vec![("--eval-data", "a.txt"), ("--eval-fraction", "0.5")],
            vec!["--eval-data", "cannot be used with"],
        ),
    ] {
        let run = run.clone().flags(&flags);
        workspace.refuses(&run, &parts);
    }
}

#[test]
fn checkpoints_of_a_resumed_run_know_the_best_before_its_next_evaluation() {
    let workspace = Workspace::new();
    let saves = workspace.path("saves");
    let run = evaluated(&workspace)
        .flag("--eval-every", 3)
        .flag("--patience", 9)
        .flag("--save-every", 1)
        .flag("--keep", 9)
        .flag("--save-dir", saves.display());
    run.succeeds();
    let folder = |step: usize| saves.join(format!("step-{step:06}"));
    let known = |step| {
        let text = fs::read_to_string(folder(step).join("manifest.json")).unwrap();
        let manifest: Value = serde_json::from_str(&text).unwrap();
        manifest["manifest"]["record"]["evaluation"]["best"].clone()
    };
    let at_3 = known(3);
    assert_eq!(at_3[1], 3);
    assert_eq!(known(4), at_3);
    for step in 4..=6 {
        fs::remove_dir_all(folder(step)).unwrap();
    }
    run.flag("--resume", "latest").succeeds();
    assert_eq!(known(4), at_3);
}

#[test]
fn best_weights_beside_the_output_stay_until_a_run_that_is_not_refused() {
    let workspace = Workspace::new();
    let best = workspace.path(".output.best");
    // It is stopped in its second step, when the first has been evaluated.
    let run = evaluated(&workspace).flag("--patience", 9);
    let outcome = run
        .clone()
        .flag("--steps", 100_000)
        .flag("--max-secs", 2)
        .succeeds();
    outcome.prints(&["the weights with the least evaluation loss, "]);
    let of_run = names(&best);
    assert!(!of_run.is_empty());
    let checkpoint = best.join(of_run.last().unwrap());
    outcome.prints(&[&checkpoint.display().to_string()]);
    let refused = run
        .clone()
        .flag("--trace", workspace.path("text.txt").display());
    refused.fails(&["is no trace"]);
    run.clone()
        .flag("--resume", workspace.path("nowhere").display())
        .fails(&["nowhere"]);
    assert_eq!(names(&best), of_run);
    let exported = workspace.path("exported");
    let export = candle_train("export").argument(checkpoint.display());
    export.argument(exported.display()).succeeds();
    assert!(exported.join("model.safetensors").is_file());
    run.succeeds();
    assert!(!best.exists());
}
