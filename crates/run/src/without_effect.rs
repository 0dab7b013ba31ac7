//! Flags that do nothing on these ranks and devices, and would on others: one file of flags starts a run on one device and on eight, so the
//! run goes on, and says which they are.

use candle_comm::{Degrees, RunConfig};
use candle_core::Device;
use candle_ops::PackedWeight;

use crate::args::choices::{Choice, PackChoice};
use crate::args::training::TrainingArgs;

impl TrainingArgs {
    /// The flags that do nothing in this run, each with the reason, if there are any: those that have another value than their default.
    pub(crate) fn without_effect(&self, run: &RunConfig) -> Option<String> {
        let Degrees { pp, dp, cp, .. } = self.layout.degrees();
        let placement = self.layout.pipeline.order.placement(pp);
        let num_stages = placement.map_or(0, |ranks| ranks.len());
        let is_alone = dp * cp == 1 && self.strategy.num_servers() == 0;
        let on_cpus = run.devices.iter().all(Device::is_cpu);
        let (layout, ranks, default) = (&self.layout, &self.ranks, Self::default());
        let comes_by_tiles = layout.tile_linears > 1 && layout.offload().params;
        let (is_divided, has_servers) = (
            layout.zero == 3 && !is_alone,
            self.strategy.num_servers() > 0,
        );
        let is_apart = is_divided || has_servers || layout.offload().params;
        let is_packed = PackedWeight::num_bytes((1 << 10, 1 << 10), layout.dtype()) > 0;
        let (pipeline, context) = (&layout.pipeline, &layout.context);
        let (no_pipeline, no_context) = (default.layout.pipeline, default.layout.context);
        let with = |is_changed: bool, text: String| is_changed.then_some(text);
        // Where each does nothing, its text if it has another value, and why it does nothing.
        let rules = [
            (
                is_alone,
                with(
                    layout.zero != default.layout.zero,
                    format!("--zero {}", layout.zero),
                ),
                match layout.zero > 1 {
                    // Who gives it may believe that a device holds less.
                    true => "one replica, so memory is not divided",
                    false => "one replica",
                },
            ),
            (
                is_alone && !comes_by_tiles,
                with(layout.no_overlap, "--no-overlap".to_string()),
                "one replica",
            ),
            (
                cp == 1,
                with(
                    context.cp_method != no_context.cp_method,
                    format!("--cp-method {}", context.cp_method.name_of()),
                ),
                "whole sequences",
            ),
            (
                num_stages == 1,
                with(
                    pipeline.order.schedule() != no_pipeline.order.schedule(),
                    format!("--schedule {}", pipeline.order.schedule().name_of()),
                ),
                "one stage",
            ),
            (
                pp == 1,
                with(
                    pipeline.pipeline_prefetch != no_pipeline.pipeline_prefetch,
                    format!("--pipeline-prefetch {}", pipeline.pipeline_prefetch),
                ),
                "one stage",
            ),
            (
                run.env.world_size() == 1,
                with(
                    ranks.rank_timeout != default.ranks.rank_timeout,
                    format!("--rank-timeout {}", ranks.rank_timeout),
                ),
                "no processes",
            ),
            (
                !on_cpus || is_apart || !is_packed,
                with(
                    layout.pack_weights == PackChoice::On,
                    "--pack-weights on".to_string(),
                ),
                match (on_cpus, has_servers, is_apart) {
                    (false, ..) => "no CPU computes",
                    (true, true, _) => "workers of parameter servers pack nothing",
                    (true, false, true) => "weights are not here between uses",
                    (true, false, false) => "products of this processor pack nothing",
                },
            ),
            (
                on_cpus,
                with(ranks.deterministic, "--deterministic".to_string()),
                "a CPU",
            ),
            (
                on_cpus,
                with(
                    layout.offload.is_some() && layout.offload().dirs.is_empty(),
                    format!("--offload {}", layout.offload()),
                ),
                "a CPU, whose memory is the host's: --offload-dir names a folder",
            ),
        ];
        let idle = rules.into_iter().filter(|(is_idle, ..)| *is_idle);
        let idle = idle.filter_map(|(_, flag, why)| Some(format!("{} ({why})", flag?)));
        let idle: Vec<String> = idle.collect();
        (!idle.is_empty()).then(|| format!("without effect here: {}", idle.join(", ")))
    }
}
