//! Who a process is in a Slurm job.

use super::rank_env::{error, numbers, read};
use candle_launch::StartedBy;

fn step<'a>(changes: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    let base = [
        ("SLURM_JOB_ID", "4711"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_PROCID", "4"),
        ("SLURM_NTASKS", "5"),
        ("SLURM_LOCALID", "0"),
        ("SLURM_NODEID", "2"),
        ("SLURM_STEP_TASKS_PER_NODE", "2(x2),1"),
        ("SLURM_JOB_NODELIST", "node[08-10]"),
    ];
    [changes, &base].concat()
}

#[test]
fn a_task_of_a_step() {
    let env = read(&step(&[])).unwrap();
    assert_eq!(numbers(&env), [4, 5, 0, 1]);
    assert_eq!(env.started_by(), StartedBy::Slurm);
    assert_eq!(env.secret().as_str(), "slurm.4711.0");
    let (address, port) = env.master().unwrap();
    assert_eq!(address, "node08");
    // All ranks of a step derive the same port, another step another one.
    let first = read(&step(&[("SLURM_PROCID", "0"), ("SLURM_NODEID", "0")])).unwrap();
    assert_eq!(numbers(&first), [0, 5, 0, 2]);
    assert_eq!(first.master().unwrap().1, port);
    let next = read(&step(&[("SLURM_STEP_ID", "1")])).unwrap();
    assert_ne!(next.master().unwrap().1, port);
    // A step on fewer hosts than the job's meets on the first of its own.
    let part = read(&step(&[("SLURM_STEP_NODELIST", "node10")])).unwrap();
    assert_eq!(part.master().unwrap().0, "node10");
}

#[test]
fn srun_with_pmi2() {
    let env = read(&step(&[("PMI_RANK", "4"), ("PMI_SIZE", "5")])).unwrap();
    assert_eq!(numbers(&env), [4, 5, 0, 1]);
    assert_eq!(env.master().unwrap().0, "node08");
    assert_eq!(env.secret().as_str(), "slurm.4711.0");
}

#[test]
fn node_lists() {
    for (list, first) in [
        ("a", "a"),
        ("a,b", "a"),
        ("node[01-03,7],other", "node01"),
        ("node[7,01-03]", "node7"),
        ("rack[1-2]n[098-101]-ib", "rack1n098-ib"),
    ] {
        let env = read(&step(&[("SLURM_JOB_NODELIST", list)])).unwrap();
        assert_eq!(env.master().unwrap().0, first, "{list}");
    }
    for list in [",a", "a[", "a]", "a[1-", "a[-1]", "a[]", "a[x-2]"] {
        let sentence = error(&step(&[("SLURM_JOB_NODELIST", list)]));
        assert!(
            sentence.starts_with("SLURM_JOB_NODELIST: expected names like"),
            "{list}: {sentence}"
        );
    }
}

#[test]
fn tasks_per_node() {
    for (list, node, tasks) in [("3", "0", 3), ("1(x2),4", "2", 4), ("2,3(x2)", "1", 3)] {
        let env = read(&step(&[
            ("SLURM_STEP_TASKS_PER_NODE", list),
            ("SLURM_NODEID", node),
        ]))
        .unwrap();
        assert_eq!(env.local_world_size(), tasks, "{list}");
    }
    let sentence = error(&step(&[("SLURM_NODEID", "3")]));
    assert!(
        sentence.contains("has 3 nodes, but SLURM_NODEID says this is node 3"),
        "{sentence}"
    );
    for list in ["x", "2(x", "2(x2", "2(y2)", "2(x2),"] {
        let sentence = error(&step(&[
            ("SLURM_STEP_TASKS_PER_NODE", list),
            ("SLURM_NODEID", "9"),
        ]));
        assert!(
            sentence.starts_with("SLURM_STEP_TASKS_PER_NODE: expected counts like"),
            "{list}: {sentence}"
        );
    }
}

#[test]
fn a_batch_script_is_no_task() {
    let script = [
        ("SLURM_JOB_ID", "1"),
        ("SLURM_PROCID", "0"),
        ("SLURM_LOCALID", "0"),
        ("SLURM_NODEID", "0"),
    ];
    assert_eq!(numbers(&read(&script).unwrap()), [0, 1, 0, 1]);
    let of_four = [&script[..], &[("SLURM_NTASKS", "4")]].concat();
    let sentence = error(&of_four);
    assert!(
        sentence.contains("SLURM_NTASKS=4") && sentence.contains("hint: put `srun` in front"),
        "{sentence}"
    );
    // The shell of an allocation has no task number at all.
    let shell = [("SLURM_JOB_ID", "1"), ("SLURM_NTASKS", "4")];
    assert_eq!(numbers(&read(&shell).unwrap()), [0, 1, 0, 1]);
}
