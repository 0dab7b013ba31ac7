//! Gradients and weights that move in 8 bits, with tensor parallelism: what several ranks hold stays the same on all of them.

use candle_comm::Mesh;
use candle_core::DType;
use candle_parallel::checkpoint::{HfSave, sidecar_files};
use candle_parallel::{DataParallel, ParamStore, ReduceType, ZeroStage};
use candle_train_models::CausalLm;
use candle_trainer::Trainer;

use crate::fixture::Fixture;
use crate::run::{Layout, batches, launch};

#[test]
fn tensor_parallel_ranks_keep_equal_copies() {
    // Key/value heads that several ranks hold, and norms of heads.
    for name in ["gqa", "qwen3", "tied_bias"] {
        let fixture = Fixture::new(name);
        let mut run = fixture.run.clone();
        (run.steps, run.seq_len, run.global_batch_size) = (2, 12, 4);
        run.micro_batch_size = 1;
        for zero in [ZeroStage::One, ZeroStage::Two, ZeroStage::Three] {
            for (pp, dp, tp) in [(1, 2, 2), (1, 2, 3), (1, 2, 4), (2, 2, 2)] {
                let layout = Layout::new(pp, dp, tp);
                let output = tempfile::tempdir().unwrap();
                let sidecars = sidecar_files(&fixture.model_dir()).unwrap();
                let save = HfSave::new(output.path().join("model"), sidecars);
                let result = launch(layout, |world| {
                    let mesh = Mesh::new(world, layout.degrees())?;
                    let store = ParamStore::from_pretrained(fixture.model_dir())?;
                    let store = store.with_data_parallel(DataParallel {
                        zero,
                        reduce: ReduceType::Int8,
                        quantize_weights: zero == ZeroStage::Three,
                        ..DataParallel::default()
                    });
                    let vb = store.builder(DType::F32, mesh.world.device());
                    let part = CausalLm::part(&fixture.config(), &mesh, &vb)?;
                    let mut trainer = Trainer::new(run.train_config(layout), &mesh, part)?;
                    trainer.train(&batches(&fixture, &run, &mesh)?, |_| Ok(()))?;
                    trainer.save_hf(&save)
                });
                result.unwrap_or_else(|err| panic!("{name} {zero:?} {layout:?}: {err}"));
            }
        }
    }
}
