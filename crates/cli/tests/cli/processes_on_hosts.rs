//! Ranks as processes of two hosts, of which one is cut off, or is lost and comes back.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::{Duration, Instant};

use super::launch::launching::{self, Launching};
use super::processes::{assert_failed, is_open_mpi, layout};
use super::program::Program;
use super::two_hosts::TwoHosts;
use super::workspace::Workspace;

#[test]
fn two_hosts_train_as_one_and_a_cut_link_ends_both() {
    if !is_open_mpi() {
        eprintln!("not tested: how hosts are given to mpirun is written for Open MPI");
        return;
    }
    let Some(hosts) = TwoHosts::new() else { return };
    let (here, there) = (Workspace::new(), Workspace::new());
    let degrees = (2, 1, 2);
    layout(here.finetune(), degrees).succeeds();
    let program = layout(there.finetune(), degrees).under(hosts.mpirun());
    program.succeeds();
    let weights =
        |workspace: &Workspace| fs::read(workspace.output().join("model.safetensors")).unwrap();
    assert!(weights(&here) == weights(&there));

    let mut cut = None;
    let mut took = None;
    let outcome = program.flag("--steps", 100_000).run_and(|stderr| {
        if cut.is_none() && stderr.contains("step 1/") {
            hosts.cut();
            cut = Some(Instant::now());
        }
        // Open MPI's own processes wait for each other until the link is back.
        let is_over = |_: &Instant| (0..4).all(|rank| there.process_of_rank(rank).is_none());
        if took.is_none() && cut.as_ref().is_some_and(is_over) {
            took = cut.map(|cut| cut.elapsed());
            hosts.kill_all();
        }
    });
    let took = took.expect("all ranks have ended");
    assert!(took < Duration::from_secs(15), "{took:?}");
    // What the other host says cannot cross the link.
    let said = [
        "rank 0 on host host-a stops: rank",
        "on host host-b",
        "has not been heard of",
        "its last operation",
        "step ",
    ];
    assert_failed(&outcome, &said);
}

/// Starts a launcher on a host, with as many ranks; the one on host a leads.
fn launch((hosts, host, num_ranks): (&TwoHosts, char, &str), program: &Program) -> Launching {
    let folder = tempfile::TempDir::new().unwrap();
    let secret = folder.path().join("secret");
    fs::write(&secret, "hush").unwrap();
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
    let mut words = hosts.enter(host);
    words.extend([env!("CARGO_BIN_EXE_candle-train"), "launch"].map(str::to_string));
    let rdzv = format!("{}:29512", hosts.address('a'));
    let options = "--short-secret --nnodes 1:2 --max-restarts 1 --grace-secs 5 --silence-secs 3";
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).args(options.split(' '));
    command.args(["--nproc-per-node", num_ranks, "--rdzv", &rdzv]);
    command.args(program.words()).envs(hosts.mpi_variables());
    command.env("CANDLE_TRAIN_RUN_TOKEN_FILE", secret);
    launching::spawn(folder, command, &|_| {})
}

/// Two ranks share each layer, so a third one has no place.
#[test]
fn ranks_go_on_without_a_host_that_does_not_fit() {
    if !is_open_mpi() {
        return eprintln!("not tested: how hosts are given to mpirun is written for Open MPI");
    }
    let Some(hosts) = TwoHosts::new() else { return };
    let workspace = Workspace::new();
    let saves = workspace.path("saves");
    let program = workspace.finetune().flag("--pp", 1).flag("--tp", 2);
    let program = program.without("--dp").flag("--steps", 300);
    let program = program.flag("--save-every", 20);
    let program = program.flag("--save-dir", saves.display());
    let first = launch((&hosts, 'a', "2"), &program);
    let is_saved = || saves.join("step-000020").exists();
    launching::wait_until("a checkpoint", is_saved);
    let second = launch((&hosts, 'b', "1"), &program);
    let ended = first.wait().exited(0);
    let said = "exit code 87; the ranks go on without what came last: host host-b\n";
    assert_eq!(ended.err.matches(said).count(), 1, "{}", ended.err);
    assert_eq!(second.wait().code, Some(0));
}

/// Three ranks on two hosts, of which the second is lost and comes back: the ranks are 3, then 2, then 3 again.
#[test]
fn a_host_that_leaves_and_comes_back_changes_no_loss() {
    if !is_open_mpi() {
        return eprintln!("not tested: how hosts are given to mpirun is written for Open MPI");
    }
    let Some(hosts) = TwoHosts::new() else { return };
    let (here, there) = (Workspace::new(), Workspace::new());
    let path = |workspace: &Workspace| workspace.path("metrics.jsonl");
    let program = |workspace: &Workspace| {
        let program = workspace.finetune().flag("--pp", 1).flag("--tp", 1);
        let program = program
            .without("--dp")
            .flag("--lr", 1e-4)
            .flag("--steps", 300);
        let program = program.flag("--gradient-accumulation-steps", 3);
        let program = program.without("--global-batch-size").flag("--seq-len", 32);
        program.flag("--metrics", path(workspace).display())
    };
    // Of three replicas with three micro-batches each: two have shares of five and four.
    program(&here).flag("--dp", 3).succeeds();
    let saving = program(&there).flag("--save-every", 20);
    let saving = saving.flag("--save-dir", there.path("saves").display());
    let launch = |host, num_ranks| launch((&hosts, host, num_ranks), &saving);
    let first = launch('a', "2");
    let second = launch('b', "1");
    // How often as many replicas have begun.
    let begun = |dp: usize| {
        let said = fs::read_to_string(first.path("stdout")).unwrap();
        said.matches(&format!("pp 1 x dp {dp} x tp 1")).count()
    };
    let is_saved = |step: usize| there.path(&format!("saves/step-{step:06}")).exists();
    launching::wait_until("a checkpoint of both hosts", || is_saved(20));
    assert_eq!(begun(3), 1);
    hosts.kill_all_on('b');
    launching::wait_until("ranks on one host", || begun(2) == 1);
    launching::wait_until("steps on one host", || is_saved(80));
    let third = launch('b', "1");
    let ended = first.wait();
    let said = String::from_utf8_lossy(&ended.out).into_owned();
    assert_eq!(ended.code, Some(0), "{said} {}", ended.err);
    assert_eq!(
        said.matches("pp 1 x dp 3 x tp 1").count(),
        2,
        "{said} {}",
        ended.err
    );
    assert_eq!(third.wait().code, Some(0));
    drop(second);
    let losses = |workspace: &Workspace| -> Vec<(u64, f64)> {
        let steps = super::training::metrics(&path(workspace)).into_iter();
        let numbers = |step: serde_json::Map<String, serde_json::Value>| {
            Some((step.get("step")?.as_u64()?, step.get("loss")?.as_f64()?))
        };
        steps.filter_map(numbers).collect()
    };
    let (want, got) = (losses(&here), losses(&there));
    assert_eq!((want.len(), got.len()), (300, 300));
    for ((step, want), (same_step, got)) in want.into_iter().zip(got) {
        assert_eq!(step, same_step);
        assert!(
            (want - got).abs() <= 1e-5 * want,
            "step {step}: {got}, expected {want}"
        );
    }
}
