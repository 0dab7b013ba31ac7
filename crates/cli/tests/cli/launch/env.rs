//! What ranks find when they start.

use super::launching::{run_script, start_in, write_script};
use nix::sys::signal::Signal;
use tempfile::TempDir;

#[test]
fn each_rank_has_torchruns_variables() {
    let script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE $NODE_RANK $MASTER_ADDR";
    let ended = run_script(3, &[], script).exited(0);
    assert_eq!(
        ended.sorted_lines(),
        [
            "[rank 0] 0/3 0/3 0/1 0 127.0.0.1",
            "[rank 1] 1/3 1/3 0/1 0 127.0.0.1",
            "[rank 2] 2/3 2/3 0/1 0 127.0.0.1",
        ]
    );
    assert_eq!(ended.err, "");
}

#[test]
fn ranks_share_a_port_and_a_token_which_the_next_run_does_not_have() {
    let tokens = || {
        let ended = run_script(2, &[], "echo $MASTER_PORT,$CANDLE_TRAIN_RUN_TOKEN");
        let lines = ended.sorted_lines();
        let values: Vec<&str> = lines
            .iter()
            .map(|line| &line["[rank 0] ".len()..])
            .collect();
        assert_eq!(values[0], values[1]);
        let (port, token) = values[0].split_once(',').unwrap();
        assert!(port.parse::<u16>().unwrap() >= 1024, "{port}");
        assert_eq!(token.len(), 32, "{token}");
        token.to_string()
    };
    assert_ne!(tokens(), tokens());
}

#[test]
fn stdin_is_empty_and_the_folder_is_ours() {
    // Ours is a pipe that nobody closes: a rank that had it would wait.
    let ended = run_script(2, &[], "cat; pwd -P; readlink /proc/self/fd/0");
    let folder = std::fs::canonicalize(ended.path("")).unwrap();
    let folder = folder.display();
    assert_eq!(
        ended.sorted_lines(),
        [
            "[rank 0] /dev/null".to_string(),
            format!("[rank 0] {folder}"),
            "[rank 1] /dev/null".to_string(),
            format!("[rank 1] {folder}"),
        ]
    );
}

#[test]
fn variables_are_inherited_given_and_replaced() {
    let args = [
        "--nproc-per-node",
        "1",
        "--env",
        "GIVEN=a=b",
        "--env",
        "HERE",
    ];
    let script = "echo $GIVEN $HERE $INHERITED $RANK $TORCHELASTIC_USE_AGENT_STORE.";
    let args = [&args[..], &["sh", "-c", script]].concat();
    let ended = start_in(TempDir::new().unwrap(), &args, &|command| {
        command.env("INHERITED", "yes").env("HERE", "here");
        // As if the launcher had been started by torchrun.
        command
            .env("RANK", "7")
            .env("TORCHELASTIC_USE_AGENT_STORE", "True");
    });
    let ended = ended.wait();
    assert_eq!(
        ended.sorted_lines(),
        ["[rank 0] a=b here yes 0 ."],
        "{}",
        ended.err
    );
}

#[test]
fn arguments_arrive_as_they_are() {
    let args = [
        "--nproc-per-node",
        "1",
        "sh",
        "-c",
        "printf '<%s>' \"$@\"",
        "-",
        "--grace-secs",
        "a b",
        "",
        "'$x\"",
        "-h",
    ];
    let ended = super::launching::start(&args).wait();
    assert_eq!(
        ended.sorted_lines(),
        ["[rank 0] <--grace-secs><a b><><'$x\"><-h>"]
    );
}

#[test]
fn ranks_read_what_the_launcher_set() {
    let program = env!("CARGO_BIN_EXE_candle-train");
    let args = ["--nproc-per-node", "2", program, "env"];
    let ended = super::launching::start(&args).wait();
    let host = nix::unistd::gethostname().unwrap();
    for (rank, line) in ended.sorted_lines().iter().enumerate() {
        let expected = format!(
            "[rank {rank}] rank {rank} of 2 on {} (local rank {rank} of 2), started by candle-train launch; the ranks meet at 127.0.0.1, port ",
            host.display()
        );
        assert!(line.starts_with(&expected), "{line}");
    }
    assert_eq!(ended.sorted_lines().len(), 2, "{}", ended.err);
}

/// On this host and, with a stand-in for ssh, on another one.
#[test]
fn the_secret_is_on_no_command_line() {
    let folder = TempDir::new().unwrap();
    std::fs::write(
        folder.path().join("hosts"),
        "localhost slots=1\nb slots=1\n",
    )
    .unwrap();
    write_script(&folder.path().join("ssh"), "shift; exec sh -c \"$*\"");
    let script =
        "printf %s $CANDLE_TRAIN_RUN_TOKEN > new-$RANK; mv new-$RANK token-$RANK; exec sleep 1000";
    let rdzv = "127.0.0.1:29501";
    let options = ["--hostfile", "hosts", "--ssh", "./ssh", "--rdzv", rdzv];
    let args = [&options[..], &["sh", "-c", script]].concat();
    let launching = start_in(folder, &args, &|_| {});
    launching.await_files(&["token-0", "token-1"]);
    let secret = std::fs::read_to_string(launching.path("token-0")).unwrap();
    assert_eq!(secret.len(), 32);
    let mut num_seen = 0;
    for process in std::fs::read_dir("/proc").unwrap().flatten() {
        let Ok(line) = std::fs::read(process.path().join("cmdline")) else {
            continue;
        };
        num_seen += 1;
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        assert!(!line.contains(&secret), "{line}");
    }
    assert!(num_seen > 4);
    launching.signal(Signal::SIGTERM);
    launching.wait();
}
