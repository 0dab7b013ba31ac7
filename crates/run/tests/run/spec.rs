//! What arithmetic tells of a run before it is there.

use std::fs;
use std::ops::Range;

use candle_comm::message_of;
use candle_core::Result;
use candle_train_models::ModelConfig;
use candle_train_run::{Finetune, Observers};
use tempfile::tempdir;

use super::library::fixture;

/// The fixture's model: 4 layers, 4 heads, 2 of keys and values.
fn config() -> ModelConfig {
    ModelConfig::from_file(fixture("gqa/model/config.json")).unwrap()
}

/// A run with these flags, as a file has them.
fn run(flags: &str) -> Result<Finetune> {
    let model = fixture("gqa/model");
    let data = fixture("text.txt");
    let all = format!("model = {model:?}\ndata = [{data:?}]\nseq-len = 16\nsteps = 1\n{flags}");
    Finetune::from_table(&toml::from_str(&all).unwrap())
}

/// Of these flags on so many ranks what is said, and the flags in which that is mended, which are then taken.
#[test]
fn what_is_refused_comes_with_the_nearest_value_that_is_taken() {
    for (flags, num_ranks, hint, mended) in [
        ("tp = 7", 1, "use tp <= 4", "tp = 4"),
        ("pp = 7", 1, "use pp <= 4", "pp = 4"),
        ("tp = 3", 4, "--dp 1 takes 3 of them", "tp = 2"),
        ("tp = 2\ndp = 3", 4, "--dp 2", "tp = 2\ndp = 2"),
        ("pp = 2\ntp = 4", 4, "smaller --tp, --pp or --cp", "tp = 4"),
        (
            "pp = 2\nvirtual-stages = 4",
            1,
            "2 virtual stages or fewer",
            "pp = 2\nvirtual-stages = 2",
        ),
        (
            "pp = 2\nschedule = 'zbv'\nvirtual-stages = 1",
            1,
            "--virtual-stages 2",
            "pp = 2\nschedule = 'zbv'\nvirtual-stages = 2",
        ),
        (
            "pp = 2\nschedule = 'dualpipev'\nglobal-batch-size = 2",
            1,
            "or the schedule zbv",
            "pp = 2\nschedule = 'zbv'\nglobal-batch-size = 2",
        ),
        (
            "pp = 2\npipeline-layout = '1,1'",
            1,
            "--pipeline-layout 2,2",
            "pp = 2\npipeline-layout = '2,2'",
        ),
        ("cp = 17", 1, "--cp 16 at most", "cp = 16"),
        (
            "cp = 8\nulysses = 3",
            1,
            "--ulysses 4",
            "cp = 8\nulysses = 4",
        ),
        (
            "cp = 4\nulysses = 4\ntp = 2",
            1,
            "--ulysses 2",
            "cp = 4\nulysses = 2\ntp = 2",
        ),
        (
            "sequence-parallel = true",
            1,
            "--tp 2 or more",
            "sequence-parallel = true\ntp = 2",
        ),
        (
            "dp = 3\nglobal-batch-size = 16",
            1,
            "such as 15",
            "dp = 3\nglobal-batch-size = 15",
        ),
        (
            "dp = 2\nmicro-batch-size = 3\nglobal-batch-size = 2",
            1,
            "such as 6",
            "dp = 2\nmicro-batch-size = 3\nglobal-batch-size = 6",
        ),
        (
            "batch-ramp = '3,5,100'",
            1,
            "such as 1,",
            "batch-ramp = '1,5,100'",
        ),
        (
            "dp = 2\nbatch-ramp = '5,1,100'",
            1,
            "such as 6",
            "dp = 2\nbatch-ramp = '6,2,100'",
        ),
        (
            "dp = 6\nglobal-batch-size = 12\nzero-group = 4",
            1,
            "such as 3",
            "dp = 6\nglobal-batch-size = 12\nzero-group = 3",
        ),
        (
            "dp = 2\nquantize-weights = 'int8'",
            1,
            "use ZeRO stage 3",
            "dp = 2\nquantize-weights = 'int8'\nzero = 3",
        ),
        (
            "tile-linears = 4",
            1,
            "use ZeRO stage 3",
            "tile-linears = 4\nzero = 3",
        ),
        (
            "lora-rank = 2\nlora-targets = ['foo']",
            1,
            "q_proj",
            "lora-rank = 2\nlora-targets = ['q_proj']",
        ),
        (
            "freeze = 'foo'",
            1,
            "such as lm_head.weight",
            "freeze = 'embed_tokens'",
        ),
        (
            "lora-alpha = 2.0",
            1,
            "give --lora-rank too, such as 16",
            "lora-alpha = 2.0\nlora-rank = 16",
        ),
        (
            "save-every = 2",
            1,
            "--save-dir names the folder",
            "save-every = 2\nsave-dir = 'nowhere'",
        ),
        (
            "eval-every = 2",
            1,
            "--eval-fraction holds out",
            "eval-every = 2\neval-fraction = 0.1",
        ),
    ] {
        let check = |flags: &str| run(flags)?.spec(&config(), num_ranks)?.check();
        let refused = check(flags).unwrap_err().to_string();
        assert!(refused.contains("hint: "), "{flags}: {refused}");
        assert!(refused.contains(hint), "{flags}: {refused}");
        check(mended).unwrap_or_else(|err| panic!("{mended}: {err}"));
    }
}

/// Nothing about layouts, batches and schedules is found later than in the check, and nothing that it refuses could be trained.
#[test]
fn a_run_that_is_checked_is_one_that_starts() {
    let mut state = 7u64;
    let mut any = |range: Range<usize>| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        range.start + state as usize % range.len()
    };
    let (mut num_taken, mut num_refused) = (0, 0);
    for _ in 0..80 {
        let [pp, dp, cp, tp] = [any(1..4), any(1..4), any(1..3), any(1..4)];
        let micro = any(1..3);
        let global = micro * dp * any(1..5) + any(0..6) / 5;
        let mut flags = format!(
            "pp = {pp}\ndp = {dp}\ncp = {cp}\ntp = {tp}\nzero = {}\nmicro-batch-size = {micro}\nglobal-batch-size = {global}\n",
            any(0..4),
        );
        let schedules = ["1f1b", "gpipe", "zb-h1", "zb-2p", "zbv", "dualpipev"];
        flags += &format!("schedule = '{}'\n", schedules[any(0..6)]);
        for (flag, value, one_in) in [
            ("virtual-stages", "2", 4),
            ("sequence-parallel", "true", 4),
            ("zero-group", "2", 9),
            ("tile-linears", "3", 9),
            ("quantize-gradients", "'int8'", 9),
            ("quantize-weights", "'int8'", 9),
            ("ulysses", "2", 6),
            ("cp-method", "'all-gather'", 6),
            ("batch-ramp", "'2,2,8'", 9),
            ("lora-rank", "2", 4),
            ("recompute", "'full'", 4),
            ("dtype", "'bf16'", 4),
        ] {
            if any(0..one_in) == 0 {
                flags += &format!("{flag} = {value}\n");
            }
        }
        let dir = tempdir().unwrap();
        let Ok(run) = run(&flags) else { continue };
        let run = run.output(dir.path().join("out"));
        let checked = run.spec(&config(), 1).unwrap().check();
        let trained = run.train_with(Observers::none());
        match (checked, trained) {
            (Ok(()), Ok(_)) => num_taken += 1,
            (Err(checked), Err(refused)) => {
                assert_eq!(message_of(&checked), message_of(&refused), "{flags}");
                assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
                num_refused += 1;
            }
            (Ok(()), Err(refused)) => panic!("{flags}: {refused}"),
            (Err(checked), Ok(_)) => panic!("{flags}: it trains, and {checked}"),
        }
    }
    assert!(
        num_taken > 10 && num_refused > 10,
        "{num_taken} {num_refused}"
    );
}

#[test]
fn a_dry_run_of_a_library_tells_what_it_would_do() {
    let dir = tempdir().unwrap();
    let run = run("pp = 2").unwrap().output(dir.path().join("out"));
    let told = run.dry_run_with(Observers::none()).unwrap();
    assert_eq!(told.steps, Some(1));
    assert_eq!(told.parameters, told.trained_parameters);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    run.train_with(Observers::none()).unwrap();
    // What is there now is no model of another run, and is replaced.
    assert_eq!(run.dry_run_with(Observers::none()).unwrap(), told);
    let other = run.lr(1e-3).dry_run_with(Observers::none());
    let refused = other.unwrap_err().to_string();
    assert!(
        refused.contains("cannot write to the output folder"),
        "{refused}"
    );
}

#[test]
fn a_value_of_the_library_that_no_flag_takes_is_named() {
    let mut run = run("").unwrap();
    run.training.layout.dtype = Some(candle_core::DType::I64);
    let refused = run.check().unwrap_err().to_string();
    assert!(refused.contains("I64 is no value of the flag"), "{refused}");
    assert!(refused.contains("f32, bf16, f16"), "{refused}");
}

/// Of these flags the order of micro-batches and the layers of stages.
fn order_of(flags: &str, config: &ModelConfig) -> String {
    let spec = run(flags).unwrap().spec(config, 1).unwrap();
    spec.check().unwrap();
    let pipeline = &spec.training().layout.pipeline;
    let stages = &pipeline.order.virtual_stages;
    let layers = &pipeline.pipeline_layout;
    format!("{} {stages:?} {layers}", pipeline.order.schedule().name())
}

#[test]
fn offloaded_weights_are_read_once_a_pass_where_flags_leave_the_order_open() {
    let dir = tempdir().unwrap();
    let files = format!("offload-dir = [{:?}]\nglobal-batch-size = 8", dir.path());
    let all = format!("offload = 'all'\nrecompute = 'full'\n{files}");
    let config = config();
    assert_eq!(order_of(&all, &config), "gpipe Some(6) 0,1,1,1,1,0");
    assert_eq!(
        order_of(&format!("pp = 2\n{all}"), &config),
        "gpipe Some(3) 0,1,1,1,1,0"
    );
    for open in [
        format!("schedule = '1f1b'\n{all}"),
        format!("micro-batch-size = 8\n{all}"),
        format!("offload = 'all'\n{files}"),
        format!("offload = 'params,gradients'\nrecompute = 'full'\n{files}"),
        // Stages of several blocks, and tiles, are read for each micro-batch.
        format!("pp = 4\n{all}"),
        format!("tile-linears = 2\n{all}"),
        format!("strategy = 'parameter-server'\nservers = 1\n{all}"),
        // In the host's memory, which is the device's.
        "offload = 'all'\nrecompute = 'full'\nglobal-batch-size = 8".to_string(),
    ] {
        assert_eq!(order_of(&open, &config), "1f1b None auto", "{open}");
    }
    // Whose sums would be in another order.
    let mut tied = config.clone();
    tied.tie_word_embeddings = true;
    assert_eq!(order_of(&all, &tied), "1f1b None auto");
    let given = format!("virtual-stages = 2\nschedule = 'gpipe'\n{all}");
    assert_eq!(order_of(&given, &config), "gpipe Some(2) auto");
}
