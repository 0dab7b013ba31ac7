//! Optimizer state on the host and in files: the same bits, three buckets in memory, nothing left behind, and errors in time.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};

use candle_comm::Mesh;
use candle_core::{DType, Error, Result};
use candle_parallel::{
    AdamW, AdamWConfig, DataParallel, DistributedOptimizer, Gradients, MemoryCategory, ModelPart,
    Offload, Optimizer, OptimizerState, ParamStore, Pipeline, PipelineLayout, Recompute, Schedule,
    ZeroStage,
};
use tempfile::tempdir;

use crate::chain::{Bits, Chain, HIDDEN, local_bits};
use crate::check::{ZERO_STAGES, assert_says, message, on_mesh, single_mesh};
use crate::device::device;
use crate::optimizer_rule::Momentum;
use crate::save_failures::{folder_of_child, in_prepared_shell};

fn adamw() -> AdamW {
    AdamW(AdamWConfig::default())
}

fn steps(
    chain: Chain,
    mesh: &Mesh,
    part: &ModelPart,
    optimizer: &mut DistributedOptimizer,
) -> Result<()> {
    let mut gradients = Gradients::new(part.params(), mesh)?;
    let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, mesh);
    let (rank, dp) = (mesh.dp.rank(), mesh.dp.world_size());
    for step in 0..3 {
        let batches = chain.micro_batches(50 * step, 6)?;
        let batches = &batches[rank * 6 / dp..(rank + 1) * 6 / dp];
        // In one call, and in two.
        for batches in batches.chunks(6 / dp / if step == 1 { 2 } else { 1 }) {
            pipeline.forward_backward(part, batches, &mut gradients)?;
        }
        optimizer.step(&mut gradients, 0.01, Some(1.0))?;
    }
    Ok(())
}

/// The most that a bucket's part of a rank takes, of `bytes_per_value`: one bucket per block, each part padded to 64 values.
fn largest_bucket_bytes(
    part: &ModelPart,
    dp: usize,
    zero: ZeroStage,
    bytes_per_value: usize,
) -> usize {
    let mut by_block: BTreeMap<usize, usize> = BTreeMap::new();
    for param in part.params().iter() {
        *by_block.entry(param.blocks[0]).or_default() += param.num_values();
    }
    let lens = by_block.into_values();
    let parts = lens.map(|len| match zero {
        ZeroStage::Zero => len.next_multiple_of(64 * dp),
        _ => len.next_multiple_of(64 * dp) / dp,
    });
    parts.max().unwrap() * bytes_per_value
}

/// Trains and returns every rank's weights and state.
fn trained<R: Optimizer + 'static>(
    layout: (usize, usize, usize),
    replicas: DataParallel,
    (chain, offload): (Chain, &Offload),
    rule: fn() -> R,
) -> Vec<(Bits, Vec<OptimizerState>)> {
    on_mesh(layout, |mesh| {
        let store = ParamStore::init(5).with_data_parallel(replicas);
        let part = chain.part(&mesh, &store.with_offload(offload.clone()))?;
        let params = part.params();
        let mut optimizer = DistributedOptimizer::new(params, &mesh, rule())?;
        steps(chain, &mesh, &part, &mut optimizer)?;
        // What a look has read is not taken for what comes after, and does not stay.
        optimizer.state()?;
        local_bits(&part);
        steps(chain, &mesh, &part, &mut optimizer)?;
        let state = optimizer.state()?;
        let num_buckets = match (offload.dirs.is_empty(), mesh.world.device().is_cpu()) {
            _ if !offload.optimizer => usize::MAX,
            (true, true) => usize::MAX,
            _ => 3,
        };
        if num_buckets < usize::MAX {
            // Two moments of AdamW, and the remainders of bf16 weights.
            let bytes = 8 + if chain.dtype == DType::BF16 { 2 } else { 0 };
            let largest = largest_bucket_bytes(&part, layout.1, replicas.zero, bytes);
            let peak = params.meter().report().of(MemoryCategory::Optimizer).peak;
            let most = (num_buckets * largest) as u64;
            assert!(peak <= most, "{peak} of {num_buckets} {largest}");
        }
        if offload.params && !offload.dirs.is_empty() {
            let weights = params.meter().report().of(MemoryCategory::Weights).peak;
            assert_eq!(weights, 0, "weights that never leave");
        }
        if offload.gradients && !offload.dirs.is_empty() {
            let gradients = params.meter().report().of(MemoryCategory::Gradients);
            assert_eq!(gradients.now, 0, "gradients that never leave");
            assert!(gradients.peak > 0, "gradients that nobody has counted");
        }
        Ok((local_bits(&part), state))
    })
}

#[test]
fn bits_are_the_same_wherever_the_state_is() {
    let dir = tempdir().unwrap();
    let in_file = |offload: Offload| offload.in_dir(dir.path());
    let params = || Offload {
        params: true,
        ..Offload::default()
    };
    let gradients = || Offload {
        gradients: true,
        ..Offload::default()
    };
    let places = [
        Offload::default(),
        Offload::all(),
        in_file(Offload::optimizer()),
        in_file(params()),
        in_file(gradients()),
        in_file(Offload::all()),
        // Buckets in parts, the last of them shorter.
        in_file(Offload {
            update_values: 100,
            ..Offload::all()
        }),
    ];
    for (layout, dtype, tied) in [
        ((1, 1, 1), DType::F32, false),
        ((1, 3, 1), DType::BF16, false),
        ((2, 1, 2), DType::BF16, true),
        ((2, 2, 2), DType::F32, true),
    ] {
        for (zero, overlap) in ZERO_STAGES.into_iter().zip([true, false, true, true]) {
            let replicas = DataParallel {
                zero,
                overlap,
                ..DataParallel::default()
            };
            let chain = Chain {
                dtype,
                tied,
                ..Chain::default()
            };
            let trained = |offload| trained(layout, replicas, (chain, offload), adamw);
            let want = trained(&places[0]);
            assert!(want.iter().any(|(_, state)| !state.is_empty()));
            let what = format!("{layout:?} {dtype:?} {replicas:?}");
            for place in &places[1..] {
                assert!(trained(place) == want, "{what}: {place:?}");
            }
        }
    }
    let trained = |offload: &Offload| {
        trained(
            (1, 3, 1),
            DataParallel::default(),
            (Chain::default(), offload),
            || Momentum,
        )
    };
    assert!(
        trained(&in_file(Offload::all())) == trained(&Offload::default()),
        "a rule of one's own"
    );
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// Every rank's weights after steps of six micro-batches, the losses of an evaluation, and the most that was away.
fn with_activations(
    (pp, dp, tp): (usize, usize, usize),
    schedule: Schedule,
    num_blocks: &[usize],
    chain: Chain,
    offload: &Offload,
) -> Vec<(Bits, f64, u64)> {
    on_mesh((pp, dp, tp), |mesh| {
        let store = ParamStore::init(5).with_offload(offload.clone());
        let vb = store.builder(chain.dtype, &device());
        let ranks: Vec<usize> = (0..num_blocks.len()).map(|stage| stage % pp).collect();
        let layout = PipelineLayout::new(num_blocks, &ranks)?;
        let part = ModelPart::build_stages(&mesh, &vb, layout, HIDDEN, |index, vb| {
            chain.block(index, &mesh.tp, &vb)
        })?;
        let part = part.with_recompute(|_| Recompute::Full);
        let mut optimizer = DistributedOptimizer::new(part.params(), &mesh, adamw())?;
        let mut gradients = Gradients::new(part.params(), &mesh)?;
        let pipeline = Pipeline::new(schedule, &mesh);
        let mut loss = 0.0;
        for step in 0..3 {
            let batches = chain.micro_batches(50 * step + mesh.dp.rank() as u64, 6)?;
            // Fewer than before, too.
            let batches = &batches[..6 - 2 * (step as usize % 2)];
            pipeline.forward_backward(&part, batches, &mut gradients)?;
            optimizer.step(&mut gradients, 0.01, Some(1.0))?;
            let evaluated = pipeline.evaluate(&part, batches.iter().cloned().map(Ok))?;
            loss += evaluated.loss();
        }
        let away = part.params().meter().report().of(MemoryCategory::Disk).peak;
        Ok((local_bits(&part), loss, away))
    })
}

#[test]
fn activations_that_were_away_are_what_they_were() {
    let dir = tempdir().unwrap();
    let places = [
        Offload {
            activations: true,
            ..Offload::default()
        },
        Offload::all(),
    ];
    // Layouts, schedules, and of each stage how many of the five blocks it has.
    for (layout, schedule, num_blocks) in [
        ((1, 1, 1), Schedule::OneForwardOneBackward, &[5][..]),
        ((1, 1, 1), Schedule::GPipe, &[1, 1, 1, 1, 1]),
        ((1, 2, 1), Schedule::GPipe, &[2, 1, 2]),
        ((2, 1, 2), Schedule::OneForwardOneBackward, &[1, 2, 1, 1]),
        ((2, 1, 1), Schedule::ZeroBubbleH1, &[3, 2]),
    ] {
        for dtype in [DType::F32, DType::BF16] {
            let chain = Chain {
                dtype,
                ..Chain::default()
            };
            assert_eq!(chain.num_blocks(), 5);
            let trained =
                |offload: &Offload| with_activations(layout, schedule, num_blocks, chain, offload);
            let want = trained(&Offload::default());
            let same = |place: &Offload| -> Vec<u64> {
                let got = trained(&place.clone().in_dir(dir.path()));
                let ranks = want.iter().zip(got);
                let same = |(want, (bits, loss, away)): (&(Bits, f64, u64), (Bits, f64, u64))| {
                    assert!(
                        (&want.0, want.1) == (&bits, loss),
                        "{layout:?} {schedule:?}"
                    );
                    away
                };
                ranks.map(same).collect()
            };
            let [all_leave, with_others] = places.each_ref().map(same);
            assert!(with_others.iter().all(|&away| away > 0));
            // One has so many bytes.
            let some_leave = same(&Offload {
                kept_activations: 36 * dtype.size_in_bytes() as u64,
                ..places[0].clone()
            });
            for (some, all) in some_leave.iter().zip(&all_leave) {
                assert!(some < all, "{layout:?} {schedule:?}: {some} of {all}");
            }
            // A stage may have no more than that one.
            assert!(some_leave.iter().any(|&away| away > 0));
        }
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn values_that_were_looked_at_stay_what_they_were() -> Result<()> {
    let (dir, mesh, chain) = (tempdir().unwrap(), single_mesh(), Chain::default());
    let store = ParamStore::init(5).with_offload(Offload::all().in_dir(dir.path()));
    let part = chain.part(&mesh, &store)?;
    let mut optimizer = DistributedOptimizer::new(part.params(), &mesh, adamw())?;
    for index in 0..part.params().len() {
        let looked_at = part.params().values(index)?.flatten_all()?;
        let before = looked_at.to_vec1::<f32>()?;
        steps(chain, &mesh, &part, &mut optimizer)?;
        assert_eq!(looked_at.to_vec1::<f32>()?, before);
        let after = part.params().values(index)?.flatten_all()?;
        assert_ne!(after.to_vec1::<f32>()?, before, "nothing was trained");
    }
    Ok(())
}

#[test]
fn state_moves_from_one_place_to_another() -> Result<()> {
    let (dir, mesh) = (tempdir().unwrap(), single_mesh());
    let places = [
        Offload::default(),
        Offload::all(),
        Offload::optimizer().in_dir(dir.path()),
        Offload::all().in_dir(dir.path()),
    ];
    let chain = Chain {
        dtype: DType::BF16,
        ..Chain::default()
    };
    let make = |offload: &Offload| {
        let part = chain.part(&mesh, &ParamStore::init(5).with_offload(offload.clone()))?;
        let optimizer = DistributedOptimizer::new(part.params(), &mesh, adamw())?;
        Ok::<_, Error>((part, optimizer))
    };
    let (part, mut first) = make(&places[0])?;
    steps(chain, &mesh, &part, &mut first)?;
    let want = first.state()?;
    for place in &places {
        let (_part, mut other) = make(place)?;
        assert!(other.state()? != want);
        for state in &want {
            assert_eq!(other.load_state(state)?, state.values.len());
        }
        assert!(other.state()? == want, "{place:?}");
    }
    Ok(())
}

#[test]
fn places_have_names() {
    let parse = |text: &str| text.parse::<Offload>();
    assert_eq!(parse("optimizer").unwrap(), Offload::optimizer());
    let both = Offload {
        gradients: false,
        activations: false,
        ..Offload::all()
    };
    assert_eq!(parse("params, optimizer").unwrap(), both);
    let words = "activations,gradients,params,optimizer";
    assert_eq!(parse(words).unwrap(), Offload::all());
    assert_eq!(parse("all").unwrap(), Offload::all());
    let dir = Offload::optimizer().in_dir("/a:b");
    assert_eq!(parse("nvme:/a:b").unwrap(), dir);
    for offload in [Offload::optimizer(), both, Offload::all(), dir] {
        assert_eq!(parse(&offload.to_string()).unwrap(), offload);
    }
    for text in [
        "",
        "nvme",
        "nvme:",
        "cpu",
        "optimizer:",
        "params,",
        "all,disk",
    ] {
        let words = [
            "`optimizer`, `gradients`, `params` and `activations`, or `all`",
            &format!("`{text}`"),
        ];
        assert_says(&message(parse(text)), &words);
    }
}

/// An optimizer of 13 kB of state in `dir`.
fn in_folder(dir: &Path) -> Result<(Chain, Mesh, ModelPart, DistributedOptimizer)> {
    let (chain, mesh) = (
        Chain {
            vocab: 200,
            ..Chain::default()
        },
        single_mesh(),
    );
    let store = ParamStore::init(5).with_offload(Offload::optimizer().in_dir(dir));
    let part = chain.part(&mesh, &store)?;
    let optimizer = DistributedOptimizer::new(part.params(), &mesh, adamw())?;
    Ok((chain, mesh, part, optimizer))
}

/// The message when an optimizer cannot be made in `dir`, which tells the bytes that it needs.
fn refused(dir: &Path) -> String {
    let mesh = single_mesh();
    let part = Chain {
        vocab: 200,
        ..Chain::default()
    }
    .part(&mesh, &ParamStore::init(5))
    .unwrap();
    let _resident = DistributedOptimizer::new(part.params(), &mesh, adamw()).unwrap();
    let said = message(in_folder(dir).map(drop));
    let held = part.params().meter().report();
    assert_eq!(held.of(MemoryCategory::Disk).now, 0);
    let bytes = held.of(MemoryCategory::Optimizer).now;
    let bytes = format!("cannot keep {bytes} bytes");
    assert_says(&said, &[&bytes, &dir.display().to_string(), "hint:"]);
    said
}

#[test]
fn a_folder_that_is_missing_or_not_writable_is_an_error_at_once() {
    let dir = tempdir().unwrap();
    std::fs::write(dir.path().join("file"), "x").unwrap();
    refused(&dir.path().join("missing"));
    refused(&dir.path().join("file"));
    let closed = dir.path().join("closed");
    std::fs::create_dir(&closed).unwrap();
    let mut permissions = std::fs::metadata(&closed).unwrap().permissions();
    permissions.set_readonly(true);
    std::fs::set_permissions(&closed, permissions).unwrap();
    match tempfile::tempfile_in(&closed) {
        Err(_) => assert_says(&refused(&closed), &["ermission"]),
        // This user may write everywhere: another one tries.
        Ok(_) => {
            let test = "offload::a_folder_that_this_user_may_not_write_to";
            let other = ["setpriv", "--reuid", "65534", "--clear-groups"];
            in_prepared_shell(test, &other, "test -x \"$0\"", &closed);
        }
    }
}

#[test]
fn a_folder_that_this_user_may_not_write_to() {
    if let Some(dir) = folder_of_child() {
        assert_says(&refused(&dir), &["ermission"]);
    }
}

#[test]
fn a_limit_of_file_size_is_an_error_at_once() {
    if let Some(dir) = folder_of_child() {
        assert_says(&refused(&dir), &["large"]);
        return;
    }
    let dir = tempdir().unwrap();
    let test = "offload::a_limit_of_file_size_is_an_error_at_once";
    in_prepared_shell(test, &["env"], "trap '' XFSZ && ulimit -f 8", dir.path());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_full_disk_is_an_error_at_once() {
    if let Some(dir) = folder_of_child() {
        assert_says(&refused(&dir), &["space"]);
        return;
    }
    let dir = tempdir().unwrap();
    let test = "offload::a_full_disk_is_an_error_at_once";
    let mount = "mount -t tmpfs -o size=8k none \"$SAVE_FAILURES_FOLDER\"";
    in_prepared_shell(test, &["unshare", "-Urm"], mount, dir.path());
}

#[test]
fn a_file_that_cannot_be_written_to_any_more_ends_the_run() {
    if let Some(dir) = folder_of_child() {
        let (chain, mesh, part, mut optimizer) = in_folder(&dir).unwrap();
        let limit = Command::new("prlimit")
            .arg("--fsize=4096")
            .args(["--pid", &std::process::id().to_string()])
            .status();
        assert!(limit.unwrap().success());
        let said = message(steps(chain, &mesh, &part, &mut optimizer));
        let words = [
            "cannot write the optimizer's state to the file",
            &dir.display().to_string(),
            "large",
        ];
        assert_says(&said, &words);
        assert_says(&message(optimizer.state()), &words);
        return;
    }
    let dir = tempdir().unwrap();
    let test = "offload::a_file_that_cannot_be_written_to_any_more_ends_the_run";
    in_prepared_shell(
        test,
        &["env"],
        "trap '' XFSZ && prlimit --version",
        dir.path(),
    );
}

#[test]
fn nothing_is_left_of_a_process_that_was_killed() {
    if let Some(dir) = folder_of_child() {
        let (chain, mesh, part, mut optimizer) = in_folder(&dir).unwrap();
        steps(chain, &mesh, &part, &mut optimizer).unwrap();
        // The end of the process without any chance to tidy up.
        std::process::abort();
    }
    let dir = tempdir().unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "offload::nothing_is_left_of_a_process_that_was_killed",
        ])
        .env("SAVE_FAILURES_FOLDER", dir.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    assert_eq!(child.unwrap().code(), None, "ended by a signal");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}
