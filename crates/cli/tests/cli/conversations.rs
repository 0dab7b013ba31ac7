//! Conversations: what of them is learned, by flags and by what records say, and how much of the data is trained on.

use std::fs;

use serde_json::{Value, json};

use super::program::{AssertText, Program};
use super::workspace::{Workspace, candle_train};

const TEMPLATE: &str = "{% for m in messages %}{{ m.role + '\\n' + m.content }}{% for call in m.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant\\n' }}{% endif %}";

/// Conversations of two answers, the second of which has one word more in each record.
fn workspace_of(num_records: usize) -> Workspace {
    let workspace = Workspace::new();
    fs::write(workspace.model("chat_template.jinja"), TEMPLATE).unwrap();
    let records = (1..=num_records).map(|index| {
        json!({"messages": [
            {"role": "user", "content": "Begin"}, {"role": "assistant", "content": "one"},
            {"role": "user", "content": "Go on"}, {"role": "assistant", "content": "a ".repeat(index)}
        ]})
    });
    write(&workspace, &records.collect::<Vec<_>>());
    workspace
}

fn write(workspace: &Workspace, records: &[Value]) {
    let lines: Vec<String> = records.iter().map(ToString::to_string).collect();
    fs::write(workspace.path("chat.jsonl"), lines.join("\n")).unwrap();
}

fn preview(workspace: &Workspace) -> Program {
    candle_train("preview")
        .flag("--model", workspace.path("model").display())
        .flag("--data", workspace.path("chat.jsonl").display())
        .variable("CANDLE_TRAIN_CACHE", workspace.path("cache").display())
}

fn finetune(workspace: &Workspace) -> Program {
    workspace
        .finetune()
        .flag("--tp", 1)
        .flag("--pp", 1)
        .flag("--seq-len", 64)
        .switch("--no-packing")
        .flag("--data", workspace.path("chat.jsonl").display())
}

#[test]
fn a_masked_history_is_shown_kept_with_the_flags_and_compared() {
    let workspace = workspace_of(6);
    let shown = preview(&workspace).flag("--num", 1).succeeds().stdout;
    shown.assert_has(&["⟦one<|end_of_text|>⟧"]);
    let masked = preview(&workspace).switch("--mask-history");
    let shown = masked.flag("--num", 1).succeeds().stdout;
    shown.assert_has(&["assistant\none<|end_of_text|>", "⟦a <|end_of_text|>⟧"]);

    let run = finetune(&workspace)
        .flag("--save-every", 1)
        .flag("--save-dir", workspace.path("saves").display());
    run.clone().switch("--mask-history").succeeds();
    let flags = fs::read_to_string(workspace.output().join("candle_train.toml")).unwrap();
    flags.assert_has(&["mask-history = true\n"]);
    let resumed = run.flag("--resume", workspace.path("saves/step-000001").display());
    workspace.run_refused(
        &resumed,
        &["--mask-history is not given, and true in the checkpoint"],
    );
}

#[test]
fn a_masked_history_that_means_nothing_is_refused() {
    let workspace = workspace_of(2);
    let masked = |program: Program| program.switch("--mask-history");
    workspace.refuses(
        &masked(finetune(&workspace)).switch("--train-on-prompt"),
        &["--mask-history is given beside --train-on-prompt, which learns all messages"],
    );
    workspace.refuses(
        &masked(workspace.finetune()),
        &["--mask-history is given, and the data has no conversations"],
    );
}

#[test]
fn records_that_ask_for_something_else_end_the_run_or_are_told() {
    let workspace = workspace_of(0);
    let answer = |more: Value| {
        let mut answer = json!({"role": "assistant", "content": "b"});
        answer
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        json!({"messages": [{"role": "user", "content": "q"}, answer]})
    };
    let plain = answer(json!({}));
    write(&workspace, &[plain.clone(), answer(json!({"weight": 0.5}))]);
    let parts = [
        "chat.jsonl line 2: message 1 has weight 0.5",
        "expected 0 or 1",
    ];
    preview(&workspace).fails(&parts);
    let call = json!({"tool_calls": [{"function": {"name": "f", "arguments": "{\"x\": 1}"}}]});
    write(&workspace, &[plain, answer(call)]);
    for _ in 0..2 {
        let outcome = preview(&workspace).succeeds_with_warnings();
        outcome.prints(&["⟦b{\"x\": 1}"]);
        assert_eq!(outcome.stderr.matches("--keep-argument-strings").count(), 1);
        outcome.says(&["1 record, the first "]);
    }
    let kept = preview(&workspace)
        .switch("--keep-argument-strings")
        .succeeds();
    kept.prints(&[r#"⟦b"{\"x\": 1}""#]);
    assert_eq!(kept.stderr, "");

    fs::write(
        workspace.model("chat_template.jinja"),
        TEMPLATE.replace(
            "{{ m.role",
            "{% if m.role == 'developer' %}{% continue %}{% endif %}{{ m.role",
        ),
    )
    .unwrap();
    let hidden = json!({"messages": [{"role": "developer", "content": "b"}, {"role": "user", "content": "bb"}, {"role": "assistant", "content": "b"}]});
    write(&workspace, &[hidden]);
    let parts = [
        "line 1",
        "chat_template.jinja does not show message 0, of the role \"developer\"",
        "hint: ",
    ];
    preview(&workspace).fails(&parts);
}

/// The numbers in what `line` says before a word: records, tokens and sequences.
fn counts(line: &str) -> [usize; 3] {
    ["record", "token", "sequence"].map(|noun| {
        let (before, _) = line.split_once(&format!(" {noun}")).unwrap();
        before.rsplit(' ').next().unwrap().parse().unwrap()
    })
}

#[test]
fn the_first_line_counts_what_is_trained_on() {
    let workspace = workspace_of(20);
    let outcome = finetune(&workspace)
        .flag("--seq-len", 48)
        .flag("--eval-fraction", 0.25)
        .flag("--overlong", "drop")
        .succeeds_with_warnings();
    let line = |part: &str| {
        let mut lines = outcome.stdout.lines().chain(outcome.stderr.lines());
        lines
            .find(|line| line.contains(part))
            .unwrap_or_else(|| panic!("{part}: {}", outcome.stdout))
    };
    let trained = counts(line("chat.jsonl: ").split_once(": ").unwrap().1);
    let held_out = counts(line("evaluation on "));
    let [dropped, _, _] = counts(&format!("{} 0 token 0 sequence", line("dropped ")));
    assert!(dropped > 0 && held_out[0] > 0);
    assert_eq!(trained[0] + held_out[0] + dropped, 20);
    assert_eq!((trained[0], held_out[0]), (trained[2], held_out[2]));
    let shown = preview(&workspace)
        .flag("--seq-len", 48)
        .flag("--overlong", "drop")
        .switch("--no-packing")
        .succeeds_with_warnings();
    let all = counts(shown.stdout.lines().next().unwrap());
    assert_eq!(trained[1] + held_out[1], all[1]);
    // Of truncated records the tokens that are left count.
    let cut = preview(&workspace)
        .flag("--seq-len", 48)
        .switch("--no-packing")
        .succeeds_with_warnings();
    let kept = counts(cut.stdout.lines().next().unwrap());
    let whole = preview(&workspace).flag("--seq-len", 512).succeeds();
    let whole = counts(whole.stdout.lines().next().unwrap());
    let left_out = cut.stderr.split_once("and left out ").unwrap().1;
    let left_out: usize = left_out.split(' ').next().unwrap().parse().unwrap();
    assert_eq!(kept[1] + left_out, whole[1]);
    assert_eq!(kept[1], all[1] + 48 * dropped);
}

#[test]
fn variables_for_the_template_are_those_of_flag_and_record() {
    let workspace = workspace_of(0);
    let template = format!("{{% if mood is defined %}}{{{{ mood }}}} {{% endif %}}{TEMPLATE}");
    fs::write(workspace.model("chat_template.jinja"), template).unwrap();
    let turns = json!([{"role": "user", "content": "q"}, {"role": "assistant", "content": "b"}]);
    let sad = json!({"messages": turns, "chat_template_kwargs": {"mood": "sad"}});
    write(&workspace, &[json!({"messages": turns}), sad]);
    let gay = |program: Program| program.flag("--chat-template-kwargs", r#"{"mood":"gay"}"#);
    let shown = preview(&workspace).succeeds().stdout;
    assert!(
        !shown.contains("gay") && shown.contains("sad user"),
        "{shown}"
    );
    let shown = gay(preview(&workspace)).succeeds().stdout;
    shown.assert_has(&["gay user", "sad user"]);

    workspace.refuses(
        &gay(workspace.finetune()),
        &["--chat-template-kwargs is given, and the data has no conversations"],
    );
    let wrong = |json: &str| finetune(&workspace).flag("--chat-template-kwargs", json);
    workspace.refuses(&wrong(r#"{"tone": 1}"#), &["does not read tone"]);
    for json in ["mood", "[1]", r#"{"messages": []}"#] {
        wrong(json).fails(&["--chat-template-kwargs"]);
    }

    gay(finetune(&workspace)).flag("--steps", 1).succeeds();
    let flags = fs::read_to_string(workspace.output().join("candle_train.toml")).unwrap();
    flags.assert_has(&[r#"chat-template-kwargs = '{"mood":"gay"}'"#]);

    // In a chat they decide what is continued.
    let refusing = "{% if mood == 'gay' %}{{ raise_exception('no gaiety') }}{% endif %}{{ messages[0].content }}";
    fs::write(workspace.model("chat_template.jinja"), refusing).unwrap();
    let generate = candle_train("generate")
        .flag("--model", workspace.path("model").display())
        .flag("--prompt", "Hello")
        .flag("--max-new-tokens", 2);
    let chat = generate.clone().switch("--chat");
    chat.succeeds();
    gay(chat).fails(&["no gaiety"]);
    gay(generate).fails(&["--chat-template-kwargs is given without --chat"]);
}
