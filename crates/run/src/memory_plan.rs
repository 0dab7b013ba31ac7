//! The memory that a run will take, before it is there.

use candle_core::Result;
use candle_parallel::{
    AdamW, AdamWConfig, MemoryPlan, PipelineLayout, Plan, PlannedPasses, PlannedUpdate,
    PlannedWork, RankSpec, Schedule,
};
use candle_train_models::CausalLm;

use crate::training_run::TrainingRun;

impl TrainingRun<'_> {
    /// What a rank with `spec` of the model, whose stages are those of `layout`, will hold. Of a run with parameter servers it is one of these,
    /// which compute no passes.
    pub(crate) fn memory_plan(
        &self,
        spec: &RankSpec,
        layout: &PipelineLayout,
        on_gpu: bool,
    ) -> Result<MemoryPlan> {
        let (batches, parts) = (&self.training.batches, &self.training.layout);
        let degrees = parts.degrees();
        let per_rank = batches.global_batch_size().div_ceil(degrees.dp);
        let num_micro_batches = per_rank.div_ceil(batches.micro_batch_size);
        let schedule = Schedule::from(parts.pipeline.order.schedule);
        // Of a micro-batch that context-parallel ranks divide.
        let num_tokens = batches.micro_batch_size * batches.sequences.seq_len();
        let num_tokens = num_tokens.div_ceil(degrees.cp);
        let tape_bytes = |block| {
            let of_token = CausalLm::tape_bytes_of_blocks(
                &self.config,
                std::iter::once(block),
                parts.dtype().into(),
                degrees.tp,
                parts.context.sequence_parallel,
                parts.recompute.into(),
            );
            num_tokens * of_token
        };
        let plan = match self.training.strategy.num_servers() {
            0 => Some(Plan::new(&schedule, layout, num_micro_batches)?),
            _ => None,
        };
        let passes = plan.as_ref().map(|plan| PlannedPasses {
            plan,
            tape_bytes: &tape_bytes,
            // As the head keeps its input.
            border_bytes: tape_bytes(layout.num_blocks() - 1),
        });
        let update = PlannedUpdate {
            rule: &AdamW(AdamWConfig::default()),
            offload: &parts.offload.clone().unwrap_or_default(),
            on_gpu,
        };
        let work = PlannedWork {
            replicas: self.training.data_parallel(),
            passes,
            update: Some(update),
        };
        MemoryPlan::new(spec, &work)
    }
}
