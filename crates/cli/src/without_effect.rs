//! Flags that do nothing on these ranks and devices, and would on others: one file of flags starts a run on one device and on eight, so the
//! run goes on, and says which they are.

use candle_comm::{Degrees, RunConfig};
use candle_core::Device;
use candle_parallel::Offload;

use crate::flags::Flags;
use crate::training_args::TrainingArgs;

/// A flag, and where it does nothing.
struct Rule {
    flag: &'static str,
    is_idle: bool,
    why: &'static str,
    /// Whether who gives it may believe that a device holds less.
    saves_memory: bool,
}

impl TrainingArgs {
    /// The flags that do nothing in this run, each with the reason, if there are any: those that were given something else than their
    /// default.
    pub(crate) fn without_effect(&self, flags: &Flags, run: &RunConfig) -> Option<String> {
        let Degrees { pp, dp, cp, .. } = self.layout.degrees();
        let placement = self.layout.pipeline.order.placement(pp);
        let num_stages = placement.map_or(0, |ranks| ranks.len());
        let is_alone = dp * cp == 1 && self.strategy.num_servers() == 0;
        let on_cpus = run.devices.iter().all(Device::is_cpu);
        let is_offloaded = self.layout.offload == Some(Offload::Host);
        let rule = |flag, is_idle, why| Rule {
            flag,
            is_idle,
            why,
            saves_memory: false,
        };
        let rules = [
            Rule {
                saves_memory: self.layout.zero > 1,
                ..rule("--zero", is_alone, "one replica")
            },
            rule("--no-overlap", is_alone, "one replica"),
            rule("--cp-method", cp == 1, "whole sequences"),
            rule("--schedule", num_stages == 1, "one stage"),
            rule("--pipeline-prefetch", pp == 1, "one stage"),
            rule("--rank-timeout", run.env.world_size() == 1, "no processes"),
            rule("--deterministic", on_cpus, "a CPU"),
            Rule {
                saves_memory: true,
                ..rule("--offload", on_cpus && is_offloaded, "a CPU")
            },
        ];
        let idle = rules
            .iter()
            .filter(|rule| rule.is_idle && flags.is_changed(rule.flag));
        let idle = idle.map(
            |Rule {
                 flag,
                 why,
                 saves_memory,
                 ..
             }| {
                let value = flags.value(flag).filter(|value| *value != "true");
                let value = value.map_or(String::new(), |value| format!(" {value}"));
                let memory = if *saves_memory {
                    ", so memory is not divided"
                } else {
                    ""
                };
                format!("{flag}{value} ({why}{memory})")
            },
        );
        let idle: Vec<String> = idle.collect();
        (!idle.is_empty()).then(|| format!("without effect here: {}", idle.join(", ")))
    }
}
