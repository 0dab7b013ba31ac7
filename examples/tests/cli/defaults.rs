//! Programs that have a model and texts with them.

use crate::example;
use crate::program::AssertText;

#[test]
fn the_bundled_model_and_texts_are_the_defaults_and_may_be_replaced() {
    let finetune = example("finetune_llama").flag("--steps", 0);
    let finetune = finetune.flag("--sample-tokens", 1);
    let help = finetune.clone().switch("--help").succeeds().stdout;
    help.assert_has(&[
        "shakespeare-llama]",
        "alice.txt]",
        "Usage: finetune_llama [OPTIONS]",
    ]);
    // Its own run is on 2 x 2 x 2 ranks in f32; of another model, as candle-train finetune has it.
    let output = tempfile::tempdir().unwrap();
    let out = output.path().join("out");
    let finetune_bundled = example("finetune_llama").flag("--steps", 0);
    let said = finetune_bundled
        .clone()
        .flag("--output", out.display())
        .succeeds()
        .stdout;
    said.assert_has(&[
        "sequences of 128 tokens; 8 ranks as threads: pp 2 x dp 2 x tp 2",
        "--- before\nThe Queen",
    ]);
    let again = finetune_bundled.flag("--model", out.display());
    let said = again
        .flag("--output", output.path().join("again").display())
        .succeeds()
        .stdout;
    said.assert_has(&[
        "1 rank as a thread: pp 1 x dp 1 x tp 1",
        "chosen for you: --dp 1 --seq-len 512",
    ]);
    assert!(!said.contains("--- before"), "{said}");
    // The folder of the output is in the way, so nothing is written: here.
    let in_the_way = finetune.clone().flag("--output", "/dev/null");
    in_the_way.fails(&["/dev/null"]);
    let third = output.path().join("third");
    let missing = finetune.flag("--output", third.display());
    let missing = missing.flag("--data", "no/such/text.txt");
    missing.fails(&["no/such/text.txt"]);
    // Samples of another model want a prompt.
    let missing = in_the_way
        .flag("--model", "no/such/model")
        .flag("--prompt", "a");
    missing.fails(&["no/such/model"]);
    let help = example("pretrain_llama").switch("--help").succeeds().stdout;
    let default = "tinyshakespeare.txt]";
    assert!(help.contains(default), "{default} is not in {help}");
}
