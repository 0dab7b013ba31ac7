//! Flags that do nothing on these ranks and devices, or in so few steps, and would in other runs: one file of flags starts a run on one device
//! and on eight, so the run goes on, and says which they are.

use candle_comm::{Degrees, RunConfig};
use candle_core::Device;
use candle_ops::PackedWeight;
use candle_trainer::{LrSchedule, counted};

use crate::args::choices::{PackChoice, name_of};
use crate::args::training::TrainingArgs;

impl TrainingArgs {
    /// Warnings of flags that ask for something after more steps than the run has.
    pub(crate) fn never_reached(&self, schedule: &LrSchedule) -> Vec<String> {
        let num_steps = schedule.num_steps;
        let run = counted(num_steps, "step");
        let (evaluation, checkpoints) = (&self.evaluation, &self.checkpoints);
        let is_never = |every: &usize| *every > num_steps && num_steps > 0;
        let mut lines = Vec::new();
        // Steps of a batch ramp count as parts.
        let is_longer = |warmup: &usize| *warmup as f64 > schedule.progress(num_steps);
        let warmup = self.optimizer.warmup_steps.filter(is_longer);
        if let Some(warmup) = warmup.filter(|_| num_steps > 0) {
            lines.push(format!(
                "the learning rate never gets to --lr {}: --warmup-steps {warmup} is more than the run's {run}, the last of which has {:.2e}",
                schedule.lr,
                schedule.at(num_steps - 1)
            ));
        }
        if let Some(every) = evaluation.eval_every.filter(is_never) {
            lines.push(format!(
                "--eval-every {every} never comes in the run's {run}: there is one evaluation, after the last step"
            ));
        }
        if let Some(every) = checkpoints.save_every.filter(is_never) {
            lines.push(format!(
                "--save-every {every} never comes in the run's {run}: there is no checkpoint but where the run is stopped{}",
                if evaluation.has_data() { " or evaluated" } else { "" }
            ));
        }
        lines
    }

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
        let rule = |does_nothing: bool, is_given: bool, flag: String, why: &str| {
            (does_nothing && is_given).then(|| format!("{flag} ({why})"))
        };
        let rules = [
            rule(
                is_alone,
                layout.zero != default.layout.zero,
                format!("--zero {}", layout.zero),
                // Who gives it may believe that a device holds less.
                if layout.zero > 1 {
                    "one replica, so memory is not divided"
                } else {
                    "one replica"
                },
            ),
            rule(
                is_alone && !comes_by_tiles,
                layout.no_overlap,
                "--no-overlap".to_string(),
                "one replica",
            ),
            rule(
                cp == 1,
                context.cp_method != no_context.cp_method,
                format!("--cp-method {}", name_of(&context.cp_method)),
                "whole sequences",
            ),
            rule(
                num_stages == 1,
                pipeline.order.schedule() != no_pipeline.order.schedule(),
                format!("--schedule {}", pipeline.order.schedule().name()),
                "one stage",
            ),
            rule(
                pp == 1,
                pipeline.pipeline_prefetch != no_pipeline.pipeline_prefetch,
                format!("--pipeline-prefetch {}", pipeline.pipeline_prefetch),
                "one stage",
            ),
            rule(
                run.env.world_size() == 1,
                ranks.rank_timeout != default.ranks.rank_timeout,
                format!("--rank-timeout {}", ranks.rank_timeout),
                "no processes",
            ),
            rule(
                !on_cpus || is_apart || !is_packed,
                layout.pack_weights == PackChoice::On,
                "--pack-weights on".to_string(),
                match (on_cpus, has_servers, is_apart) {
                    (false, ..) => "no CPU computes",
                    (true, true, _) => "workers of parameter servers pack nothing",
                    (true, false, true) => "weights are not here between uses",
                    (true, false, false) => "products of this processor pack nothing",
                },
            ),
            rule(
                on_cpus,
                ranks.deterministic,
                "--deterministic".to_string(),
                "a CPU",
            ),
            rule(
                on_cpus,
                layout.offload.is_some() && layout.offload().dirs.is_empty(),
                format!("--offload {}", layout.offload()),
                "a CPU, whose memory is the host's: --offload-dir names a folder",
            ),
        ];
        let idle: Vec<String> = rules.into_iter().flatten().collect();
        (!idle.is_empty()).then(|| format!("without effect here: {}", idle.join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use candle_trainer::LrSchedule;

    use super::TrainingArgs;

    #[test]
    fn what_comes_after_the_last_step_only_is_told() {
        let mut training = TrainingArgs::default();
        training.optimizer.warmup_steps = Some(100);
        training.evaluation.eval_every = Some(13);
        training.checkpoints.save_every = Some(50);
        let said = |num_steps| {
            let schedule = LrSchedule {
                warmup_steps: 100,
                ..LrSchedule::constant(0.5, num_steps)
            };
            training.never_reached(&schedule)
        };
        let lines = said(12);
        assert_eq!(lines.len(), 3, "{lines:?}");
        assert!(
            lines[0].contains("--warmup-steps 100 is more than the run's 12 steps"),
            "{lines:?}"
        );
        assert!(
            lines[0].ends_with("the last of which has 6.00e-2"),
            "{lines:?}"
        );
        assert!(
            lines[1].starts_with("--eval-every 13 never comes in the run's 12 steps"),
            "{lines:?}"
        );
        assert!(
            lines[2].starts_with("--save-every 50 never comes"),
            "{lines:?}"
        );
        assert_eq!(said(50).len(), 1);
        assert_eq!(said(100), [""; 0]);
        // A model that is saved as it is.
        assert_eq!(said(0), [""; 0]);
    }
}
