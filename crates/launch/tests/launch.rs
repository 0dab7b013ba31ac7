//! Everything a run of several processes needs, tried with real processes.

mod launch {
    mod control;
    mod launch_dry_run;
    mod launch_env;
    mod launch_failure;
    mod launch_hosts;
    mod launch_options;
    mod launch_orphans;
    mod launch_output;
    mod launch_signals;
    mod launching;
    mod rank_env;
    mod rank_env_slurm;
}
