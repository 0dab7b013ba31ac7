//! `--date`: what a chat template that asks for the date takes for today, on this day and on later ones.

use std::fs;

use serde_json::json;

use super::folder::read_checkpoint;
use super::program::{AssertText, Program};
use super::workspace::{Workspace, candle_train};

const WITH_DATE: &str = "{{ 'Today is ' + strftime_now('%d %b %Y') + '\\n' }}{% for m in messages %}{{ m.role + '\\n' + m.content + eos_token + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant\\n' }}{% endif %}";

fn workspace_with_dates() -> Workspace {
    let workspace = Workspace::new();
    fs::write(workspace.model("chat_template.jinja"), WITH_DATE).unwrap();
    let records = (0..9).map(|index| {
        let answer = "a ".repeat(index + 1);
        json!({"messages": [{"role": "user", "content": "Words"}, {"role": "assistant", "content": answer}]}).to_string()
    });
    let lines: Vec<String> = records.collect();
    fs::write(workspace.path("chat.jsonl"), lines.join("\n")).unwrap();
    workspace
}

fn finetune(workspace: &Workspace) -> Program {
    workspace
        .finetune()
        .flag("--tp", 1)
        .flag("--pp", 1)
        .flag("--seq-len", 64)
        .switch("--train-on-prompt")
        .flag("--data", workspace.path("chat.jsonl").display())
}

fn preview(workspace: &Workspace) -> Program {
    candle_train("preview")
        .flag("--model", workspace.path("model").display())
        .flag("--data", workspace.path("chat.jsonl").display())
}

#[test]
fn the_date_of_a_run_is_kept_with_its_flags() {
    let workspace = workspace_with_dates();
    let text = preview(&workspace).flag("--date", "2020-01-02");
    let text = text.succeeds().stdout;
    text.assert_has(&["Today is 02 Jan 2020\n"]);

    let outcome = finetune(&workspace).succeeds();
    outcome.prints(&["chosen for you: ", "--date 20"]);
    let of_today = read_checkpoint(&workspace.output());
    let file = workspace.output().join("candle_train.toml");
    let text = fs::read_to_string(&file).unwrap();
    text.assert_has(&["date = \"20"]);

    finetune(&workspace).flag("--date", "2020-01-02").succeeds();
    let text = fs::read_to_string(&file).unwrap();
    text.assert_has(&["date = \"2020-01-02\"\n"]);
    let want = read_checkpoint(&workspace.output());
    assert!(want != of_today);
    let again = workspace.path("again");
    let with_config = |file: &std::path::Path| {
        candle_train("finetune")
            .flag("--config", file.display())
            .flag("--output", again.display())
    };
    with_config(&file).succeeds();
    assert!(read_checkpoint(&again) == want);
    // Written without quotes it is a date of TOML.
    let text = text.replace("\"2020-01-02\"", "2020-01-02");
    fs::write(workspace.path("run.toml"), text).unwrap();
    let run = with_config(&workspace.path("run.toml"));
    run.switch("--overwrite").succeeds();
    assert!(read_checkpoint(&again) == want);
}

#[test]
fn a_run_that_is_resumed_has_the_date_of_its_checkpoint() {
    let workspace = workspace_with_dates();
    let saves = workspace.path("saves");
    let program = finetune(&workspace)
        .flag("--steps", 3)
        .flag("--save-every", 1)
        .flag("--save-dir", saves.display())
        .flag("--keep", 9);
    let dated = program.clone().flag("--date", "2020-01-02");
    dated.succeeds();
    let want = read_checkpoint(&workspace.output());
    fs::remove_dir_all(saves.join("step-000003")).unwrap();
    let resumed = program.clone().flag("--resume", "latest").succeeds();
    resumed.prints(&["--date 2020-01-02"]);
    assert!(read_checkpoint(&workspace.output()) == want);
    let other = dated
        .flag("--date", "2020-01-03")
        .flag("--resume", saves.join("step-000001").display());
    workspace.run_refused(
        &other,
        &["--date is 2020-01-03, and 2020-01-02 in the checkpoint"],
    );
}

#[test]
fn a_date_that_nothing_asks_for_is_refused() {
    let workspace = workspace_with_dates();
    let dated = |program: Program| program.flag("--date", "2020-01-02");
    let of_text = dated(workspace.finetune());
    workspace.refuses(
        &of_text,
        &["--date 2020-01-02", "nothing asks for the date"],
    );
    let generate = candle_train("generate")
        .flag("--model", workspace.path("model").display())
        .flag("--prompt", "Hello")
        .flag("--max-new-tokens", 2);
    dated(generate.clone()).fails(&["--date is given without --chat"]);
    let refusing = "{% if strftime_now('%Y') == '2020' %}{{ raise_exception('a bad year') }}{% endif %}{{ messages[0].content }}";
    fs::write(workspace.model("chat_template.jinja"), refusing).unwrap();
    let chat = generate.switch("--chat");
    chat.succeeds();
    dated(chat.clone()).fails(&["a bad year"]);
    let bad = chat.clone().flag("--date", "2020-02-30");
    bad.fails(&["--date"]);
    let undated = WITH_DATE.replace("strftime_now('%d %b %Y')", "'someday'");
    fs::write(workspace.model("chat_template.jinja"), undated).unwrap();
    dated(chat).fails(&["the model's chat template prints no date"]);
    dated(preview(&workspace)).fails(&["nothing asks for the date"]);
}
