//! The training loop of the examples: trainer, progress bar, metrics file.

use candle_comm::Mesh;
use candle_core::{Device, Result};
use candle_parallel::Stage;
use candle_train::{Batches, Metrics, Progress, Tokens, TrainConfig, Trainer};

use crate::training_args::TrainingArgs;

/// Trains this rank's stage on the tokens; the first rank shows progress and writes metrics.
pub fn fit(
    args: &TrainingArgs,
    config: &TrainConfig,
    mesh: &Mesh,
    stage: Stage,
    tokens: &Tokens,
) -> Result<Trainer> {
    let (dp_rank, dp_world_size) = (mesh.dp.rank(), mesh.dp.world_size());
    let batches = Batches::new(
        tokens,
        args.batch_config(),
        dp_rank,
        dp_world_size,
        &Device::Cpu,
    )?;
    let is_first = mesh.world.rank() == 0;
    let mut metrics = match &args.metrics {
        Some(path) if is_first => Some(Metrics::create(path)?),
        _ => None,
    };
    let num_steps = config.lr_schedule.num_steps;
    let mut progress = is_first.then(|| Progress::new(num_steps));
    let mut trainer = Trainer::new(config.clone(), mesh, stage)?;
    trainer.train(&batches, |step| {
        if let Some(metrics) = &mut metrics {
            metrics.log(step)?;
        }
        if let Some(progress) = &mut progress {
            progress.update(step);
        }
        Ok(())
    })?;
    if let Some(progress) = &mut progress {
        progress.finish();
    }
    mesh.world.set_step(trainer.step(), "after training");
    Ok(trainer)
}
