//! Who a process is, from the variables of each launcher.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;

use candle_launch::{RankEnv, Result, StartedBy};

/// The rank that these variables describe, on a host called `box`.
pub fn read(vars: &[(&str, &str)]) -> Result<RankEnv> {
    RankEnv::from_lookup("box", &|name| {
        let (_, value) = vars.iter().find(|(key, _)| *key == name)?;
        Some(value.to_string())
    })
}

/// The error these variables give.
pub fn error(vars: &[(&str, &str)]) -> String {
    match read(vars) {
        Ok(env) => panic!("no error, but {env:?}"),
        Err(error) => error.to_string(),
    }
}

/// Rank, world size, local rank, local world size.
pub fn numbers(env: &RankEnv) -> [usize; 4] {
    [
        env.rank(),
        env.world_size(),
        env.local_rank(),
        env.local_world_size(),
    ]
}

const TORCHRUN: [(&str, &str); 9] = [
    ("RANK", "5"),
    ("WORLD_SIZE", "8"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "4"),
    ("MASTER_ADDR", "10.0.0.1"),
    ("MASTER_PORT", "29500"),
    ("TORCHELASTIC_RUN_ID", "none"),
    ("TORCHELASTIC_RESTART_COUNT", "2"),
    ("TORCHELASTIC_USE_AGENT_STORE", "True"),
];

fn with<'a>(
    base: &[(&'a str, &'a str)],
    changes: &[(&'a str, &'a str)],
) -> Vec<(&'a str, &'a str)> {
    [changes, base].concat()
}

fn without<'a>(base: &[(&'a str, &'a str)], name: &str) -> Vec<(&'a str, &'a str)> {
    let others = base.iter().filter(|(key, _)| *key != name);
    others.copied().collect()
}

#[test]
fn nothing_set_is_one_process() {
    let env = read(&[("PATH", "/bin")]).unwrap();
    assert_eq!(numbers(&env), [0, 1, 0, 1]);
    assert_eq!(env.started_by(), StartedBy::Nobody);
    assert_eq!(env.host(), "box");
    let sentence = env.master().unwrap_err().to_string();
    assert!(sentence.contains("MASTER_PORT is not set"), "{sentence}");
}

/// Kubernetes sets `MASTER_PORT` to a URL for a service called "master", and batch scripts leave variables empty.
#[test]
fn what_a_process_that_is_alone_does_not_need_is_no_error() {
    let empty = [
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "MASTER_ADDR",
        "MASTER_PORT",
    ];
    let empty: Vec<_> = empty.iter().map(|name| (*name, "")).collect();
    let service = [("MASTER_PORT", "tcp://10.3.0.1:29500")];
    let one = [("RANK", "0"), ("WORLD_SIZE", "1"), service[0]];
    for vars in [&empty[..], &service, &one, &with(&empty, &service)] {
        let env = read(vars).unwrap();
        assert_eq!(numbers(&env), [0, 1, 0, 1], "{vars:?}");
    }
    let two = [
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_RANK", "0"),
        ("LOCAL_WORLD_SIZE", "2"),
    ];
    let emptied = error(&[("RANK", ""), ("WORLD_SIZE", ""), ("MASTER_ADDR", "node1")]);
    assert!(emptied.starts_with("RANK is set to nothing"), "{emptied}");
    let said = error(&with(&two, &service));
    assert!(said.starts_with("MASTER_PORT: expected a port"), "{said}");
}

#[test]
fn torchrun() {
    let env = read(&TORCHRUN).unwrap();
    assert_eq!(numbers(&env), [5, 8, 1, 4]);
    assert_eq!(env.started_by(), StartedBy::Torchrun);
    // Its agent listens on the port it names.
    assert_eq!(env.master().unwrap(), ("10.0.0.1".to_string(), 29501));
    assert_eq!(env.secret().as_str(), "torchrun.none.2.10.0.0.1.29500");
    let own_port = with(&TORCHRUN, &[("CANDLE_TRAIN_MASTER_PORT", "4000")]);
    assert_eq!(read(&own_port).unwrap().master().unwrap().1, 4000);
    let no_store = without(&TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE");
    assert_eq!(read(&no_store).unwrap().master().unwrap().1, 29500);
    let last_port = error(&with(&TORCHRUN, &[("MASTER_PORT", "65535")]));
    assert!(
        last_port.contains("CANDLE_TRAIN_MASTER_PORT"),
        "{last_port}"
    );
}

#[test]
fn two_runs_differ_in_their_tokens() {
    let token = |changes: &[(&str, &str)]| {
        read(&with(&TORCHRUN, changes))
            .unwrap()
            .secret()
            .as_str()
            .to_string()
    };
    let other_ranks = [("RANK", "0"), ("LOCAL_RANK", "0")];
    assert_eq!(token(&[]), token(&other_ranks));
    assert_ne!(token(&[]), token(&[("TORCHELASTIC_RESTART_COUNT", "3")]));
    assert_ne!(token(&[]), token(&[("MASTER_PORT", "29600")]));
}

#[test]
fn our_own_launcher() {
    let own = [
        ("CANDLE_TRAIN_RUN_TOKEN", "0123456789abcdef"),
        ("CANDLE_TRAIN_RESTART_COUNT", "0"),
        ("CANDLE_TRAIN_HOST", "gpu7"),
    ];
    let plain: Vec<_> = TORCHRUN[..6].to_vec();
    let env = read(&with(&plain, &own)).unwrap();
    assert_eq!(env.started_by(), StartedBy::CandleTrain);
    assert_eq!(
        (env.secret().as_str(), env.is_guessable()),
        ("0123456789abcdef", false)
    );
    assert_eq!(env.host(), "gpu7");
    assert_eq!(env.master().unwrap(), ("10.0.0.1".to_string(), 29500));
}

#[test]
fn variables_by_hand() {
    let env = read(&TORCHRUN[..6]).unwrap();
    assert_eq!(env.started_by(), StartedBy::Variables);
    assert_eq!(
        (env.secret().as_str(), env.is_guessable()),
        ("10.0.0.1:29500", true)
    );
    let alone = read(&[("RANK", "0"), ("WORLD_SIZE", "1")]).unwrap();
    assert_eq!(numbers(&alone), [0, 1, 0, 1]);
}

#[test]
fn a_secret_is_given_by_a_variable_or_by_a_file_that_nobody_else_can_read() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(b"  from the file of the run\n").unwrap();
    let path = file.path().to_str().unwrap().to_string();
    let named = with(&TORCHRUN, &[("CANDLE_TRAIN_RUN_TOKEN_FILE", path.as_str())]);
    let env = read(&named).unwrap();
    assert_eq!(
        (env.secret().as_str(), env.is_guessable()),
        ("from the file of the run", false)
    );
    assert_eq!(env.started_by(), StartedBy::Torchrun);
    let both = with(&named, &[("CANDLE_TRAIN_RUN_TOKEN", "given by a variable")]);
    assert_eq!(
        read(&both).unwrap().secret().as_str(),
        "given by a variable"
    );
    let empty = error(&with(&TORCHRUN, &[("CANDLE_TRAIN_RUN_TOKEN", " ")]));
    assert_eq!(
        empty,
        "CANDLE_TRAIN_RUN_TOKEN: expected a secret, got nothing"
    );
    for mode in [0o640, 0o604, 0o666] {
        let permissions = std::fs::Permissions::from_mode(mode);
        file.as_file().set_permissions(permissions).unwrap();
        let refused = error(&named);
        assert!(refused.contains(&format!("(mode {mode:o})")), "{refused}");
        assert!(refused.contains(&path) && !refused.contains("from the file of the run"));
    }
    file.as_file()
        .set_permissions(std::fs::Permissions::from_mode(0o400))
        .unwrap();
    assert_eq!(
        read(&named).unwrap().secret().as_str(),
        "from the file of the run"
    );
    drop(file);
    assert!(error(&named).contains(&path));
}

#[test]
fn a_short_secret_is_refused_unless_it_is_meant() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(b"fifteen bytes..\n").unwrap();
    let path = file.path().to_str().unwrap();
    let by_file = ("CANDLE_TRAIN_RUN_TOKEN_FILE", path);
    for given in [("CANDLE_TRAIN_RUN_TOKEN", "fifteen bytes.."), by_file] {
        let short = with(&TORCHRUN, &[given]);
        let refused = error(&short);
        let said =
            ": expected a secret of at least 16 bytes, got 15, which others may guess\nhint: ";
        assert!(
            refused.contains(given.0) && refused.contains(said),
            "{refused}"
        );
        assert!(!refused.contains("fifteen"), "{refused}");
        let meant = with(&short, &[("CANDLE_TRAIN_SHORT_SECRET", "1")]);
        assert_eq!(read(&meant).unwrap().secret().as_str(), "fifteen bytes..");
        error(&with(&short, &[("CANDLE_TRAIN_SHORT_SECRET", "0")]));
    }
}

#[test]
fn open_mpi() {
    let vars = [
        ("OMPI_COMM_WORLD_RANK", "3"),
        ("OMPI_COMM_WORLD_SIZE", "4"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "3"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
        ("OMPI_MCA_ess_base_jobid", "1039990785"),
        ("PMIX_NAMESPACE", "1039990785"),
    ];
    let env = read(&vars).unwrap();
    assert_eq!(numbers(&env), [3, 4, 3, 4]);
    assert_eq!(env.started_by(), StartedBy::OpenMpi);
    assert_eq!(env.secret().as_str(), "ompi.1039990785");
    // One host: it is this one, and the job's number gives the port.
    let (address, port) = env.master().unwrap();
    assert_eq!(address, "127.0.0.1");
    assert!((20000..32000).contains(&port), "{port}");

    let two_hosts = with(
        &vars,
        &[
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ],
    );
    let sentence = read(&two_hosts).unwrap().master().unwrap_err().to_string();
    assert!(
        sentence.starts_with(
            "rank 3 of 4 on box does not know where the ranks meet: MASTER_ADDR is not set"
        ),
        "{sentence}"
    );
    assert!(
        sentence.contains("Open MPI's mpirun") && sentence.contains("\nhint: "),
        "{sentence}"
    );
    let passed_on = with(&two_hosts, &[("MASTER_ADDR", "head")]);
    assert_eq!(
        read(&passed_on).unwrap().master().unwrap(),
        ("head".to_string(), port)
    );
}

#[test]
fn pmi() {
    let vars = [
        ("PMI_RANK", "1"),
        ("PMI_SIZE", "4"),
        ("MPI_LOCALRANKID", "1"),
        ("MPI_LOCALNRANKS", "2"),
    ];
    let env = read(&vars).unwrap();
    assert_eq!(numbers(&env), [1, 4, 1, 2]);
    assert_eq!(env.started_by(), StartedBy::Pmi);
    assert!(env.master().is_err());
    let half = error(&without(&vars, "MPI_LOCALNRANKS"));
    assert!(
        half.starts_with("MPI_LOCALNRANKS is not set, but PMI_SIZE=4 is"),
        "{half}"
    );
}

#[test]
fn the_innermost_launcher_counts() {
    let outer = [
        ("SLURM_PROCID", "0"),
        ("SLURM_NTASKS", "1"),
        ("OMPI_COMM_WORLD_RANK", "0"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ];
    assert_eq!(read(&outer).unwrap().started_by(), StartedBy::OpenMpi);
    assert_eq!(
        numbers(&read(&with(&outer, &TORCHRUN)).unwrap()),
        [5, 8, 1, 4]
    );
    // Our launcher leaves no variables of an outer mpirun, so these are of an inner one.
    let ours = with(&TORCHRUN, &[("CANDLE_TRAIN_RESTART_COUNT", "0")]);
    assert_eq!(numbers(&read(&ours).unwrap()), [5, 8, 1, 4]);
    assert_eq!(numbers(&read(&with(&ours, &outer)).unwrap()), [0, 2, 0, 2]);
}

#[test]
fn the_number_of_restarts() {
    assert_eq!(read(&[]).unwrap().num_restarts(), 0);
    assert_eq!(read(&TORCHRUN).unwrap().num_restarts(), 2);
    let own = with(&TORCHRUN, &[("CANDLE_TRAIN_RESTART_COUNT", "3")]);
    assert_eq!(read(&own).unwrap().num_restarts(), 3);
    let sentence = error(&[("CANDLE_TRAIN_RESTART_COUNT", "x")]);
    assert!(
        sentence.contains("CANDLE_TRAIN_RESTART_COUNT"),
        "{sentence}"
    );
}

#[test]
fn half_set_names_both_variables() {
    for (missing, present) in [
        ("RANK", "WORLD_SIZE"),
        ("WORLD_SIZE", "RANK"),
        ("LOCAL_RANK", "WORLD_SIZE=8"),
        ("LOCAL_WORLD_SIZE", "WORLD_SIZE=8"),
    ] {
        let sentence = error(&without(&TORCHRUN, missing));
        let expected = format!("{missing} is not set, but {present} is\nhint: ");
        assert!(sentence.starts_with(&expected), "{sentence}");
    }
    let sentence = error(&[("OMPI_COMM_WORLD_SIZE", "2")]);
    assert!(
        sentence.starts_with("OMPI_COMM_WORLD_RANK is not set, but OMPI_COMM_WORLD_SIZE is"),
        "{sentence}"
    );
}

#[test]
fn numbers_out_of_range_or_not_numbers() {
    for (name, value, expected) in [
        ("RANK", "x", "RANK: expected a whole number, got \"x\""),
        ("RANK", "-1", "RANK: expected a whole number, got \"-1\""),
        ("WORLD_SIZE", "", "WORLD_SIZE is not set, but RANK is"),
        (
            "RANK",
            "8",
            "RANK: expected a number below WORLD_SIZE=8, got 8",
        ),
        (
            "WORLD_SIZE",
            "0",
            "RANK: expected a number below WORLD_SIZE=0, got 5",
        ),
        (
            "LOCAL_RANK",
            "4",
            "LOCAL_RANK: expected a number below LOCAL_WORLD_SIZE=4, got 4",
        ),
        (
            "LOCAL_WORLD_SIZE",
            "9",
            "LOCAL_WORLD_SIZE=9 is more than WORLD_SIZE=8",
        ),
        (
            "MASTER_PORT",
            "0",
            "MASTER_PORT: expected a port from 1 to 65535, got \"0\"",
        ),
        (
            "MASTER_PORT",
            "70000",
            "MASTER_PORT: expected a port from 1 to 65535, got \"70000\"",
        ),
    ] {
        let sentence = error(&with(&TORCHRUN, &[(name, value)]));
        assert!(sentence.starts_with(expected), "{name}={value}: {sentence}");
    }
}
