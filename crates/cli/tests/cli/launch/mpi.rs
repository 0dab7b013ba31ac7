//! Ranks that mpirun starts, told by the launcher. Without `mpirun` most tests say so and pass.

use std::process::Command;

use super::launching::{Ended, Launching, run_script, start, start_in, write_script};
use crate::cli::program::AssertText;
use crate::cli::two_hosts::TwoHosts;
use nix::sys::signal::Signal;
use tempfile::TempDir;

/// What a program does that mpirun has to start.
const ASKS: &str = "[ -n \"$OMPI_COMM_WORLD_RANK$PMI_RANK\" ] || exit 86\n";

fn has_mpirun() -> bool {
    let has = Command::new("mpirun").arg("--version").output().is_ok();
    if !has {
        eprintln!("not tested: there is no mpirun");
    }
    has
}

/// The end of a script's ranks that ask for MPI; `None` without mpirun.
fn run_asking(num_ranks: usize, options: &[&str], script: &str) -> Option<Ended> {
    has_mpirun().then(|| run_script(num_ranks, options, &format!("{ASKS}{script}")))
}

#[test]
fn ranks_that_ask_for_mpi_are_started_by_mpirun() {
    let script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE is ${OMPI_COMM_WORLD_RANK-$PMI_RANK} $GIVEN; echo words >&2";
    let options = ["--env", "GIVEN=x", "--log-dir", "logs"];
    let Some(ended) = run_asking(3, &options, script) else {
        return;
    };
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    let line = |rank: usize| format!("{rank}/3 {rank}/3 is {rank} x");
    let lines = [0, 1, 2].map(|rank| format!("[rank {rank}] {}", line(rank)));
    assert_eq!(ended.sorted_lines(), lines);
    for rank in 0..3 {
        let log = |kind| std::fs::read_to_string(ended.path(&format!("logs/rank-{rank}.{kind}")));
        assert_eq!(log("out").unwrap(), line(rank) + "\n");
        assert_eq!(log("err").unwrap(), "words\n");
    }
    // Nothing but what the ranks said.
    assert_eq!(ended.err.lines().count(), 3, "{}", ended.err);
}

#[test]
fn the_rank_that_failed_first_is_named_and_ends_the_others() {
    for (end, code, how) in [
        ("exit 7", 7, "exit code 7"),
        ("kill -9 $$", 137, "killed by SIGKILL"),
    ] {
        let script = format!("[ $RANK = 1 ] || exec sleep 1000; echo why >&2; {end}");
        let Some(ended) = run_asking(3, &[], &script) else {
            return;
        };
        assert_eq!(ended.code, Some(code), "{}", ended.err);
        let sentence = ended.sentence();
        assert!(sentence.starts_with("candle-train: rank 1 (host "));
        let words = format!("failed first: {how}\nthe last lines it wrote to stderr:\n    why\n");
        sentence.assert_has(&[&words]);
    }
}

#[test]
fn they_are_started_again_through_mpirun() {
    let script = "echo $CANDLE_TRAIN_RESTART_COUNT; [ $CANDLE_TRAIN_RESTART_COUNT = 2 ] || exit 3";
    let Some(ended) = run_asking(2, &["--max-restarts", "2"], script) else {
        return;
    };
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    let lines =
        ["0", "1", "2"].map(|count| [format!("[rank 0] {count}"), format!("[rank 1] {count}")]);
    let mut lines = lines.concat();
    lines.sort();
    assert_eq!(ended.sorted_lines(), lines);
    assert_eq!(
        ended.sentence(),
        "candle-train: the run is complete, after 2 restarts\n"
    );
}

#[test]
fn signals_reach_ranks_of_mpirun() {
    if !has_mpirun() {
        return;
    }
    let script =
        format!("{ASKS}trap 'sleep 2; echo got; exit 1' TERM; touch up$RANK; sleep 1000 & wait");
    let args = ["--nproc-per-node", "2", "sh", "-c", &script];
    let launching = start(&args);
    launching.await_files(&["up0", "up1"]);
    launching.signal(Signal::SIGTERM);
    let ended = launching.wait();
    // mpirun by itself would have killed them after a moment.
    assert_eq!(ended.sorted_lines(), ["[rank 0] got", "[rank 1] got"]);
    assert_eq!(ended.code, Some(143), "{}", ended.err);
}

#[test]
fn no_rank_outlives_an_mpirun_that_is_killed_or_its_launcher() {
    if !has_mpirun() {
        return;
    }
    let script = format!("{ASKS}trap '' TERM HUP; touch up$RANK; while :; do sleep 1000; done");
    let args = [
        "--nproc-per-node",
        "2",
        "--grace-secs",
        "0.2",
        "sh",
        "-c",
        &script,
    ];
    let pid_of_mpirun = |launching: &Launching| {
        let processes = launching.processes().into_iter();
        let mut pids = processes.filter(|(_, command)| command.starts_with("mpirun "));
        pids.next().expect("an mpirun").0
    };
    let launching = start(&args);
    launching.await_files(&["up0", "up1"]);
    nix::sys::signal::kill(pid_of_mpirun(&launching), Signal::SIGKILL).unwrap();
    let ended = launching.wait();
    assert_ne!(ended.code, Some(0), "{}", ended.err);

    let mut launching = start(&args);
    launching.await_files(&["up0", "up1"]);
    launching.signal(Signal::SIGKILL);
    launching.wait_until_nobody_left();
}

#[test]
fn an_mpirun_that_is_missing_or_fails() {
    let sh = ["/bin/sh", "-c", "exit 86"];
    let ranks = ["--nproc-per-node", "2"];
    let args = [&ranks[..], &sh].concat();
    let ended = start_in(TempDir::new().unwrap(), &args, &|command| {
        command.env("PATH", "/nowhere").env_remove("SLURM_JOB_ID");
    })
    .exits(2);
    assert_eq!(
        ended.sentence(),
        "candle-train: the ranks speak MPI, and program \"mpirun\" is not in any folder of PATH\n\
         hint: install the MPI library that the program was built with (Debian: apt-get install openmpi-bin), or say how it \
         starts ranks: --mpirun COMMAND\n"
    );
    for (mpirun, says) in [
        (
            "no-such-mpirun",
            "program \"no-such-mpirun\" is not in any folder of PATH",
        ),
        (
            "false",
            "false did not start the ranks: 2 of 2 are missing, false has ended (exit status: 1)",
        ),
        ("", "--mpirun: expected a command, got nothing"),
    ] {
        let ended =
            start(&[&ranks[..], &["--mpirun", mpirun], &["touch", "started"]].concat()).wait();
        assert_eq!(ended.code, Some(2), "{}", ended.err);
        ended.sentence().assert_has(&[says]);
        assert!(!ended.path("started").exists());
    }
}

/// It starts them with nothing by which they find MPI.
#[test]
fn ranks_that_still_ask_for_mpi_are_not_started_again() {
    let folder = TempDir::new().unwrap();
    let mpirun = "n=$2; shift 2; rank=0\n\
                  while [ $rank -lt $n ]; do RANK=$rank WORLD_SIZE=$n LOCAL_RANK=$rank LOCAL_WORLD_SIZE=$n MASTER_ADDR=localhost \
                  MASTER_PORT=1 \"$@\" & rank=$((rank + 1)); done; wait";
    write_script(&folder.path().join("mpirun"), mpirun);
    let args = ["--nproc-per-node", "2", "--mpirun", "./mpirun"];
    let args = [
        &args[..],
        &["--max-restarts", "3"],
        &["sh", "-c", "exit 86"],
    ]
    .concat();
    let ended = start_in(folder, &args, &|_| {}).exits(86);
    ended
        .sentence()
        .assert_has(&["the ranks ask for MPI, though MPI has started them"]);
}

/// Slurm's is told what mpirun is told, and sets variables of its own.
#[test]
fn in_an_allocation_srun_starts_them() {
    let folder = TempDir::new().unwrap();
    let srun = "echo \"$@\" | cut -d/ -f1 > words; shift 2; n=$2; shift 2; rank=0\n\
                while [ $rank -lt $n ]; do SLURM_STEP_ID=0 SLURM_NTASKS=$n SLURM_PROCID=$rank SLURM_LOCALID=$rank \
                SLURM_STEP_TASKS_PER_NODE=$n PMIX_RANK=$rank \"$@\" & rank=$((rank + 1)); done; wait";
    std::fs::create_dir(folder.path().join("bin")).unwrap();
    write_script(&folder.path().join("bin/srun"), srun);
    let path = format!(
        "{}:{}",
        folder.path().join("bin").display(),
        std::env::var("PATH").unwrap()
    );
    let script = "[ -n \"$PMIX_RANK\" ] || exit 86; echo $PMIX_RANK is $RANK; \"$0\" env";
    let program = env!("CARGO_BIN_EXE_candle-train");
    let args = ["--nproc-per-node", "2", "sh", "-c", script, program];
    let ended = start_in(folder, &args, &|command| {
        command.env("PATH", &path).env("SLURM_JOB_ID", "7");
    })
    .exits(0);
    let lines = ended.sorted_lines();
    for rank in 0..2 {
        assert!(
            lines.contains(&format!("[rank {rank}] {rank} is {rank}")),
            "{lines:?}"
        );
        let said = format!("[rank {rank}] rank {rank} of 2 on ");
        let said = lines.iter().find(|line| line.starts_with(&said));
        assert!(
            said.unwrap().contains("started by Slurm's srun"),
            "{lines:?}"
        );
    }
    let words = std::fs::read_to_string(ended.path("words")).unwrap();
    assert_eq!(words, "--mpi=pmix --nodes=1 -n 2 \n");
}

#[test]
fn ranks_of_mpirun_on_two_hosts() {
    if !has_mpirun() {
        return;
    }
    let Some(hosts) = TwoHosts::new() else { return };
    let start = |script: &str, options: &[&str]| {
        let script = format!("{ASKS}{script}");
        let binary = env!("CARGO_BIN_EXE_candle-train");
        let ssh = hosts.agent().display().to_string();
        let words = [
            &hosts.enter('a')[..],
            &[binary.to_string(), "launch".into()],
        ]
        .concat();
        let options = [
            &["--hostfile", "hosts", "--ssh", &ssh, "--silence-secs", "5"][..],
            options,
        ];
        let mut command = Command::new(&words[0]);
        command
            .args(&words[1..])
            .args(options.concat())
            .args(["sh", "-c", &script]);
        command.envs(hosts.mpi_variables());
        let folder = TempDir::new().unwrap();
        std::fs::write(folder.path().join("hosts"), hosts.hostfile()).unwrap();
        super::launching::spawn(folder, command, &|_| {})
    };
    let script = "echo $RANK $LOCAL_RANK on $(hostname) $GIVEN";
    let ended = start(script, &["--env", "GIVEN=x"]).exits(0);
    let lines = [
        "0 0 on host-a x",
        "1 1 on host-a x",
        "2 0 on host-b x",
        "3 1 on host-b x",
    ];
    let lines: Vec<String> = (0..)
        .zip(lines)
        .map(|(rank, line)| format!("[rank {rank}] {line}"))
        .collect();
    assert_eq!(ended.sorted_lines(), lines);

    // The other host is gone, with all that runs there.
    let launching = start("touch up$RANK; exec sleep 1000", &[]);
    launching.await_files(&["up0", "up1", "up2", "up3"]);
    hosts.kill_all_on('b');
    let ended = launching.exits(1);
    ended.sentence().assert_begins("candle-train: lost host ");
}
