//! The command as a user runs it: what it prints, what it writes, how it refuses bad input, and which processes it starts and ends.

mod cli {
    mod adapter_base;
    mod chat;
    mod chosen_template;
    mod config;
    mod config_file;
    mod contexts;
    mod conversations;
    mod cut_files;
    mod data;
    mod date;
    mod disk_full;
    mod divergence;
    mod dry_run;
    mod docs {
        mod commands;
        mod links;
        mod messages;
        mod pages;
        mod reference;
    }
    mod early_checks;
    mod evaluation;
    mod export;
    mod flags;
    mod folder;
    mod generate;
    mod gguf;
    mod gguf_file;
    mod gguf_models;
    mod gguf_readers;
    mod gguf_refusals;
    mod gguf_sources;
    mod half_precision;
    mod help;
    mod hub;
    #[path = "../../../data/tests/data/hub_server.rs"]
    mod hub_server;
    mod launch {
        mod dry_run;
        mod env;
        mod failure;
        mod hosts;
        pub mod launching;
        mod led;
        mod led_silence;
        mod mpi;
        mod options;
        mod orphans;
        mod output;
        mod relay;
        mod restart;
        mod signals;
    }
    mod large;
    mod layout;
    mod leftovers;
    mod limits;
    mod llama_cpp;
    mod lora;
    mod memory;
    mod metrics_file;
    mod offload;
    mod output;
    mod parameter_server;
    mod plot;
    #[cfg(feature = "mpi")]
    mod processes;
    #[cfg(feature = "mpi")]
    mod processes_on_hosts;
    mod program;
    mod restart;
    mod resume;
    mod schedules;
    mod spellings;
    mod stop;
    mod timeline;
    mod tokenizer;
    mod trace;
    mod training;
    mod two_hosts;
    mod weights;
    mod workspace;
}
