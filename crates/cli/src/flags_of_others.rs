//! What people type who know another program, and what it is here.

use std::sync::LazyLock;

use clap::Command;
use regex::Regex;

use crate::config_file::find;

/// Flags of other programs that mean the same.
struct Others {
    names: &'static [&'static str],
    /// What a tip says of them.
    here: &'static str,
}

const fn others(names: &'static [&'static str], here: &'static str) -> Others {
    Others { names, here }
}

const SEQ_LEN: &str = "the length of a sequence is --seq-len here";
const FUSED: &str = "operations are fused always; leave it out";
const ADAMW: &str = "the optimizer is AdamW, with --adam-beta1, --adam-beta2, --adam-eps and --weight-decay; leave it out";

/// The flags most typed for transformers' Trainer, TRL, LLaMA-Factory, axolotl, torchtune, unsloth, DeepSpeed and Megatron-LM, which
/// have another name here or do not exist. Flags of the same name, and aliases, are not among them.
const TABLE: &[Others] = &[
    // Model
    others(
        &[
            "model-name-or-path",
            "base-model",
            "model-name",
            "model-id",
            "model-path",
            "pretrained-model-name-or-path",
            "checkpoint-dir",
            "hf-path",
        ],
        "the model is --model here, a folder or org/name on the Hugging Face hub",
    ),
    others(
        &[
            "tokenizer-name",
            "tokenizer-name-or-path",
            "tokenizer-path",
            "use-fast-tokenizer",
            "use-fast",
        ],
        "the tokenizer is that of --model; leave it out",
    ),
    others(
        &["trust-remote-code"],
        "code that comes with a model is never run; leave it out",
    ),
    others(
        &["cache-dir", "hf-home"],
        "the environment variable HF_HOME names the cache",
    ),
    others(
        &[
            "hf-token",
            "hub-token",
            "hf-hub-token",
            "token",
            "use-auth-token",
        ],
        "the environment variable HF_TOKEN has the token",
    ),
    others(
        &[
            "torch-dtype",
            "compute-dtype",
            "compute-type",
            "precision",
            "mixed-precision",
            "model-dtype",
            "params-dtype",
            "dtype-compute",
        ],
        "types are --dtype f32, bf16 or f16 here",
    ),
    others(&["fp32", "float32"], "this is --dtype f32 here"),
    others(&["bfloat16", "pure-bf16"], "this is --dtype bf16 here"),
    others(&["float16", "half"], "this is --dtype f16 here"),
    others(
        &["tf32", "allow-tf32"],
        "this is --matmul-precision high here",
    ),
    others(
        &[
            "flash-attn",
            "flash-attention",
            "use-flash-attn",
            "attn-implementation",
            "sdp-attention",
            "xformers-attention",
            "torch-compile",
            "compile",
            "use-liger-kernel",
            "liger-kernel",
            "enable-liger-kernel",
        ],
        FUSED,
    ),
    // Data
    others(
        &[
            "dataset",
            "datasets",
            "dataset-name",
            "dataset-dir",
            "dataset-path",
            "data-path",
            "train-file",
            "train-files",
            "train-data",
            "train-data-path",
            "train-dataset",
        ],
        "data is --data here: files, folders, or hub://datasets/org/name",
    ),
    others(
        &[
            "validation-file",
            "valid-file",
            "eval-file",
            "eval-dataset",
            "eval-data-path",
            "valid-data-path",
            "test-datasets",
            "val-dataset",
        ],
        "this is --eval-data here",
    ),
    others(
        &[
            "val-set-size",
            "val-size",
            "validation-split-percentage",
            "test-size",
            "eval-split-ratio",
            "split-dataset-ratio",
            "validation-split",
        ],
        "this is --eval-fraction here, such as 0.05",
    ),
    others(
        &[
            "dataset-text-field",
            "text-column",
            "text-field",
            "prompt-column",
            "response-column",
            "column-mapping",
            "column-map",
            "field-messages",
            "messages",
        ],
        "columns are named with --columns here, such as --columns prompt=question,completion=answer",
    ),
    others(
        &[
            "max-samples",
            "max-train-samples",
            "num-train-samples",
            "dataset-percentage",
        ],
        "a number after a colon takes a part of the data: --data FILE:0.3",
    ),
    others(
        &[
            "cutoff-len",
            "max-length",
            "max-seq-length",
            "model-max-length",
            "sequence-len",
            "sequence-length",
            "seq-length",
            "block-size",
            "context-length",
            "max-sequence-length",
        ],
        SEQ_LEN,
    ),
    others(
        &[
            "packing",
            "sample-packing",
            "neat-packing",
            "eval-packing",
            "group-by-length",
            "pad-to-sequence-len",
            "pad-to-max-length",
        ],
        "records share sequences without seeing each other, unless --no-packing is given",
    ),
    others(
        &["train-on-inputs", "train-on-input"],
        "this is --train-on-prompt here",
    ),
    others(
        &[
            "completion-only-loss",
            "assistant-only-loss",
            "train-on-responses-only",
            "train-on-completions-only",
            "mask-prompt",
            "masked-prompt",
        ],
        "loss is on completions and on what the assistant says, unless --train-on-prompt is given; leave it out",
    ),
    others(
        &[
            "template",
            "chat-template-path",
            "chat-template-name",
            "conversation-template",
            "chat-format",
        ],
        "this is --chat-template here",
    ),
    others(
        &[
            "dataloader-num-workers",
            "preprocessing-num-workers",
            "dataset-num-proc",
            "dataset-processes",
            "dataset-prepared-path",
            "num-workers",
            "num-proc",
            "overwrite-cache",
            "dataloader-pin-memory",
        ],
        "data is tokenized on all cores and kept in a cache; leave it out",
    ),
    others(
        &["shuffle", "disable-shuffling", "shuffle-dataset"],
        "data is shuffled, unless --no-shuffle is given",
    ),
    others(
        &["data-seed", "random-seed", "manual-seed"],
        "this is --seed here",
    ),
    // Batches
    others(
        &[
            "batch-size",
            "train-micro-batch-size-per-gpu",
            "per-gpu-train-batch-size",
            "micro-batch",
            "local-batch-size",
        ],
        "this is --micro-batch-size here; --global-batch-size has all sequences of a step",
    ),
    others(
        &[
            "train-batch-size",
            "total-batch-size",
            "effective-batch-size",
        ],
        "this is --global-batch-size here",
    ),
    others(
        &[
            "per-device-eval-batch-size",
            "eval-batch-size",
            "per-gpu-eval-batch-size",
            "eval-accumulation-steps",
        ],
        "evaluations take as many sequences at once as --micro-batch-size says; leave it out",
    ),
    others(
        &[
            "gradient-accumulation",
            "accumulation-steps",
            "grad-accum-steps",
            "accumulate-grad-batches",
            "grad-accumulation-steps",
        ],
        "this is --gradient-accumulation-steps here",
    ),
    others(
        &["num-epochs", "n-epochs", "max-epochs", "epoch"],
        "this is --epochs here",
    ),
    others(
        &[
            "train-iters",
            "max-iters",
            "num-steps",
            "max-train-steps",
            "train-steps",
            "total-steps",
            "num-training-steps",
            "training-steps",
        ],
        "this is --steps here",
    ),
    others(
        &["max-time", "max-hours"],
        "this is --max-secs here, in seconds",
    ),
    others(
        &["auto-find-batch-size"],
        "no batch size is searched for; the memory that a run expects is printed at its start; leave it out",
    ),
    // Optimizer
    others(
        &["optim", "optimizer", "optim-args", "optimizer-type"],
        ADAMW,
    ),
    others(
        &["base-lr", "peak-lr", "max-lr", "optimizer-lr"],
        "this is --lr here",
    ),
    others(
        &[
            "lr-scheduler",
            "lr-decay-style",
            "scheduler",
            "lr-scheduler-name",
            "scheduler-type",
        ],
        "this is --lr-schedule here: cosine, linear, constant or wsd",
    ),
    others(
        &[
            "lr-scheduler-kwargs",
            "cosine-min-lr-ratio",
            "min-lr",
            "min-lr-rate",
        ],
        "this is --min-lr-ratio here, a part of --lr",
    ),
    others(
        &[
            "num-warmup-steps",
            "lr-warmup-steps",
            "lr-warmup-iters",
            "warmup-iters",
        ],
        "this is --warmup-steps here",
    ),
    others(
        &["lr-warmup-fraction", "warmup-fraction", "warmup-proportion"],
        "this is --warmup-ratio here",
    ),
    others(
        &[
            "gradient-clipping",
            "gradient-clip-val",
            "clip-grad",
            "clip-grad-norm",
            "grad-clip",
            "max-norm",
            "max-gradient-norm",
        ],
        "this is --max-grad-norm here",
    ),
    others(
        &["adam-epsilon", "optimizer-eps", "eps"],
        "this is --adam-eps here",
    ),
    others(&["beta1", "optimizer-beta1"], "this is --adam-beta1 here"),
    others(&["beta2", "optimizer-beta2"], "this is --adam-beta2 here"),
    others(
        &[
            "neftune-noise-alpha",
            "label-smoothing-factor",
            "label-smoothing",
            "loraplus-lr-ratio",
            "use-galore",
        ],
        "there is no such thing here; leave it out",
    ),
    // Adapters
    others(
        &[
            "lora-r",
            "lora",
            "rank",
            "lora-dim",
            "use-lora",
            "use-peft",
            "finetuning-type",
            "peft-type",
            "tuner-type",
            "train-type",
        ],
        "--lora-rank 16 trains adapters here, and without it all weights are trained",
    ),
    others(
        &[
            "lora-target",
            "lora-target-modules",
            "target-modules",
            "lora-attn-modules",
        ],
        "this is --lora-targets here",
    ),
    others(
        &["lora-target-linear", "lora-target-all"],
        "this is --lora-targets all-linear here, which is what is taken without it",
    ),
    others(&["use-rslora"], "this is --rslora here"),
    others(
        &["use-dora", "dora"],
        "DoRA is not supported; --lora-rank trains LoRA, and with --rslora rsLoRA",
    ),
    others(
        &[
            "modules-to-save",
            "lora-modules-to-save",
            "additional-target",
            "additional-trainable-params",
        ],
        "beside adapters no other weight is trained; without --lora-rank all are, but for those that --freeze names",
    ),
    others(
        &[
            "adapter-name-or-path",
            "lora-model-dir",
            "peft-model-id",
            "lora-checkpoint",
            "adapters",
        ],
        "this is --adapter here",
    ),
    others(
        &[
            "load-in-4bit",
            "quantization-bit",
            "use-qlora",
            "qlora",
            "bnb-4bit-compute-dtype",
            "quant-bits",
        ],
        "this is --base-dtype q4k here, beside --lora-rank; for 8 bits --base-dtype q8_0",
    ),
    others(
        &["load-in-8bit"],
        "this is --base-dtype q8_0 here, beside --lora-rank",
    ),
    others(
        &[
            "freeze-trainable-layers",
            "freeze-layers",
            "unfrozen-parameters",
            "freeze-vision-tower",
            "freeze-parameters",
        ],
        "--freeze has a regular expression for the names of what is not trained",
    ),
    // Memory and layout
    others(
        &[
            "gradient-checkpointing",
            "use-gradient-checkpointing",
            "gradient-checkpointing-kwargs",
            "activation-checkpointing",
            "enable-activation-checkpointing",
            "recompute-activations",
            "recompute-granularity",
            "grad-checkpointing",
        ],
        "this is --recompute full here",
    ),
    others(
        &[
            "deepspeed",
            "deepspeed-config",
            "ds-config",
            "zero-stage",
            "sharding-strategy",
        ],
        "what replicas divide is --zero 1, 2 or 3 here, and batches and types have flags of their own",
    ),
    others(
        &[
            "fsdp",
            "fsdp-config",
            "fsdp-version",
            "fsdp-transformer-layer-cls-to-wrap",
            "use-distributed-optimizer",
        ],
        "this is --zero 3 here",
    ),
    others(
        &[
            "cpu-offload",
            "fsdp-cpu-offload",
            "offload-optimizer",
            "optimizer-cpu-offload",
            "offload-optimizer-device",
            "fsdp-offload-params",
        ],
        "this is --offload optimizer here",
    ),
    others(
        &[
            "tensor-parallel-size",
            "tensor-model-parallel-size",
            "tensor-parallel-degree",
            "tp-size",
            "tp-degree",
        ],
        "this is --tp here",
    ),
    others(
        &[
            "pipeline-parallel-size",
            "pipeline-model-parallel-size",
            "pipeline-parallel-degree",
            "pp-size",
            "pp-degree",
        ],
        "this is --pp here",
    ),
    others(
        &[
            "data-parallel-size",
            "dp-size",
            "dp-degree",
            "num-gpus",
            "num-processes",
            "world-size",
            "nproc-per-node",
            "data-parallel-replicate-degree",
        ],
        "replicas are --dp here; candle-train launch --nproc-per-node N starts processes",
    ),
    others(
        &[
            "local-rank",
            "node-rank",
            "master-port",
            "master-addr",
            "ddp-find-unused-parameters",
            "ddp-timeout",
            "ddp-backend",
            "distributed-backend",
        ],
        "ranks know each other by what their launcher sets in the environment; leave it out",
    ),
    // Checkpoints and output
    others(
        &[
            "save-steps",
            "save-interval",
            "save-freq",
            "checkpointing-steps",
            "saves-per-epoch",
            "save-strategy",
            "checkpoint-interval",
        ],
        "this is --save-every here, a number of steps, with --save-dir",
    ),
    others(
        &["save-total-limit", "keep-last-n-checkpoints", "save-limit"],
        "this is --keep here",
    ),
    others(
        &["save", "checkpoint-path", "ckpt-dir"],
        "this is --save-dir here",
    ),
    others(
        &[
            "resume-from-checkpoint",
            "resume-from",
            "auto-resume-from-checkpoints",
            "load",
            "load-checkpoint",
        ],
        "this is --resume latest here, with --save-dir, or --resume DIR",
    ),
    others(&["overwrite-output-dir"], "this is --overwrite here"),
    others(
        &["save-safetensors", "save-only-model", "save-on-each-node"],
        "models are saved as safetensors, and checkpoints to resume from beside them; leave it out",
    ),
    others(
        &["push-to-hub", "hub-model-id", "hub-strategy"],
        "nothing is sent to a hub; huggingface_hub's command uploads the folder of --output",
    ),
    // Evaluation and logs
    others(
        &[
            "eval-strategy",
            "evaluation-strategy",
            "eval-steps",
            "evals-per-epoch",
            "eval-interval",
            "do-eval",
            "eval-freq",
            "val-check-interval",
        ],
        "this is --eval-every here, a number of steps, with --eval-fraction or --eval-data",
    ),
    others(
        &[
            "load-best-model-at-end",
            "early-stopping-patience",
            "metric-for-best-model",
            "early-stopping",
        ],
        "--patience ends a run that gets no better, and saves the best weights",
    ),
    others(
        &[
            "report-to",
            "logging-dir",
            "log-with",
            "wandb-project",
            "use-wandb",
            "wandb-name",
            "run-name",
            "tensorboard-dir",
            "logger",
        ],
        "--tensorboard writes curves for TensorBoard here, and --metrics JSON lines",
    ),
    others(
        &[
            "logging-steps",
            "log-interval",
            "log-every-n-steps",
            "logging-strategy",
            "logging-first-step",
            "log-freq",
            "disable-tqdm",
        ],
        "every step is written to --metrics and --tensorboard; leave it out",
    ),
    others(
        &["plot-loss"],
        "candle-train plot draws what --metrics writes",
    ),
    others(
        &["log-level", "verbose", "verbosity", "debug"],
        "RUST_LOG=debug in the environment tells more",
    ),
    others(
        &["profile", "profiler", "use-profiler"],
        "--trace writes what Perfetto shows",
    ),
    others(
        &["do-train", "task", "do-predict", "predict-with-generate"],
        "fine-tuning is what this command does; leave it out",
    ),
    others(
        &[
            "stage",
            "dpo",
            "pref-beta",
            "pref-loss",
            "beta",
            "rl",
            "reward-model",
        ],
        "supervised fine-tuning is what there is, and no DPO, KTO or reward models; leave it out",
    ),
    others(
        &[
            "remove-unused-columns",
            "rope-scaling",
            "max-prompt-length",
            "ddp-bucket-cap-mb",
        ],
        "there is no need for it: what the data and config.json say holds; leave it out",
    ),
    others(
        &[
            "no-cuda",
            "cpu",
            "use-cpu",
            "gpus",
            "gpu",
            "device-map",
            "devices",
        ],
        "where a run computes is --device cpu, cuda or cuda:N here",
    ),
    // Writing texts
    others(
        &["max-tokens", "max-length", "n-predict"],
        "this is --max-new-tokens here",
    ),
    others(
        &["do-sample", "greedy", "num-beams"],
        "--temperature above 0 samples, and 0 takes the most likely token",
    ),
    others(
        &["system-prompt", "default-system"],
        "this is --system here",
    ),
    others(&["interactive", "conversation"], "this is --chat here"),
    others(
        &[
            "output-path",
            "output-file",
            "out",
            "save-path",
            "export-dir",
            "out-dir",
            "output-folder",
        ],
        "this is --output here",
    ),
];

/// A flag in a tip.
static FLAG: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new("--([a-z0-9-]+)").ok());

/// What the flag of another program is here, if it is known and the command has what the tip names; `name` has no dashes before it.
pub(crate) fn tip(command: &Command, name: &str) -> Option<&'static str> {
    let name = name.replace('_', "-");
    let mut others = TABLE.iter().filter(|others| others.names.contains(&&*name));
    let is_here =
        |others: &&Others| flags_of(others.here).all(|flag| find(command, flag).is_some());
    others.find(is_here).map(|others| others.here)
}

/// The flags that a tip says belong to the command itself.
fn flags_of(tip: &'static str) -> impl Iterator<Item = &'static str> {
    let own = tip.split("; candle-train").next().unwrap_or_default();
    let found = FLAG.iter().flat_map(move |flag| flag.captures_iter(own));
    found
        .filter_map(|found| found.get(1))
        .map(|flag| flag.as_str())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::program::command;

    #[test]
    fn every_tip_names_flags_that_exist_and_every_name_is_one_of_others() {
        let command = command();
        let commands: Vec<&Command> = ["finetune", "generate"]
            .iter()
            .filter_map(|name| command.find_subcommand(name))
            .collect();
        assert_eq!(commands.len(), 2);
        for others in TABLE {
            let has =
                |command: &Command| flags_of(others.here).all(|flag| find(command, flag).is_some());
            assert!(
                commands.iter().any(|command| has(command)),
                "{}",
                others.here
            );
            for name in others.names {
                let of_another = commands.iter().find(|command| has(command));
                assert!(
                    of_another.is_some_and(|command| find(command, name).is_none()),
                    "{name} is a flag"
                );
            }
        }
        let mut seen = BTreeSet::new();
        let twice = TABLE
            .iter()
            .flat_map(|others| others.names)
            .filter(|name| !seen.insert(**name));
        // One of a sequence, one of an answer.
        assert_eq!(twice.collect::<Vec<_>>(), [&"max-length"]);
    }

    #[test]
    fn a_tip_fits_the_command() {
        let command = command();
        let tip = |name, flag| tip(command.find_subcommand(name).unwrap_or(&command), flag);
        assert_eq!(tip("finetune", "max_length"), Some(SEQ_LEN));
        assert!(tip("generate", "max-length").is_some_and(|tip| tip.contains("--max-new-tokens")));
        assert_eq!(tip("generate", "save-steps"), None);
        assert_eq!(tip("finetune", "no-such-flag"), None);
    }
}
