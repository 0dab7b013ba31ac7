//! Everything a run of several processes needs, tried with real processes.

mod launch {
    mod control;
    mod rank_env;
    mod rank_env_slurm;
    mod waiting;
}
