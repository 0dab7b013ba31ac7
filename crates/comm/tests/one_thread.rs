//! Ranks that share cores keep candle from starting threads of its own: in a process that has one thread, which no test harness
//! gives. The program starts itself once more for each case.

use std::process::Command;

use candle_comm::launch;
use candle_core::utils::barrier_pool;

const ROLE: &str = "CANDLE_COMM_TEST_THREADS";

fn main() {
    if let Ok(expected) = std::env::var(ROLE) {
        let workers = launch::threads(2, |_| Ok(barrier_pool().n_workers())).unwrap();
        assert_eq!(workers, [expected.parse::<usize>().unwrap(); 2]);
        return;
    }
    // More than one thread on every machine; what the user has set stays.
    for (variable, expected) in [("RAYON_NUM_THREADS", "0"), ("CANDLE_NUM_THREADS", "2")] {
        let ended = Command::new(std::env::current_exe().unwrap())
            .env_remove("CANDLE_NUM_THREADS")
            .env(variable, "3")
            .env(ROLE, expected)
            .status();
        assert!(ended.unwrap().success(), "with {variable}=3");
    }
}
