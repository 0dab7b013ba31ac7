//! Loss scaling: what is scaled comes out as if it had not been, an overflow on one rank is skipped by all, and the scale follows.

use candle_comm::Mesh;
use candle_core::{DType, Result, Tensor};
use candle_parallel::{
    AdamWConfig, DistributedOptimizer, Gradients, LossScaling, ModelPart, ParamStore, Pipeline,
    Schedule, StepReport, ZeroStage,
};

use crate::chain::{Chain, local_bits, one_target};
use crate::check::{ZERO_STAGES, assert_says, message, on_mesh, random};
use crate::device::device;

fn part(mesh: &Mesh, zero: ZeroStage) -> Result<ModelPart> {
    let chain = Chain {
        dtype: DType::F16,
        ..Chain::default()
    };
    chain.part(mesh, &ParamStore::init(5).with_data_parallel(zero))
}

struct Run {
    part: ModelPart,
    gradients: Gradients,
    optimizer: DistributedOptimizer,
    mesh: Mesh,
}

impl Run {
    fn new(mesh: &Mesh, zero: ZeroStage, scaling: Option<LossScaling>) -> Result<Self> {
        let part = part(mesh, zero)?;
        let config = AdamWConfig::default();
        let optimizer = DistributedOptimizer::adamw(part.params(), mesh, config)?;
        Ok(Self {
            gradients: Gradients::new(part.params(), mesh)?,
            optimizer: match scaling {
                Some(scaling) => optimizer.with_loss_scaling(scaling)?,
                None => optimizer,
            },
            part,
            mesh: mesh.clone(),
        })
    }

    /// A step with gradients that `seed` gives, times the loss scale; with `overflow` one value on one rank is infinite.
    fn step(&mut self, seed: u64, overflow: bool) -> Result<StepReport> {
        let scale = self.optimizer.loss_scale();
        self.gradients.set_loss_scale(scale);
        let is_bad = overflow && self.mesh.dp.rank() == 1 && self.mesh.tp.rank() == 1;
        for (index, param) in self.part.params().iter().enumerate() {
            let seed = 100 * seed + 10 * self.mesh.dp.rank() as u64 + index as u64;
            let mut grad = (random(seed, param.local_shape())? * scale)?;
            if is_bad && param.name == "layers.2.down.weight" {
                grad = Tensor::full(f32::INFINITY, grad.shape(), &device())?;
            }
            self.gradients.accumulate(index, &grad)?;
        }
        let gradients = one_target(&mut self.gradients, &self.mesh);
        self.optimizer.step(gradients, 0.01, Some(1.0))
    }
}

#[test]
fn an_overflow_on_one_rank_is_skipped_by_all_and_leaves_no_trace_but_the_scale() {
    let scaling = LossScaling {
        init: 8.0,
        window: 2,
    };
    // The steps that overflow, and the scale before each step.
    let steps = [
        (false, 8.0),
        (true, 8.0),
        (true, 4.0),
        (false, 2.0),
        (false, 2.0),
        (false, 4.0),
        (true, 4.0),
        (false, 2.0),
    ];
    for zero in ZERO_STAGES {
        on_mesh((2, 2, 2), |mesh| {
            let mut scaled = Run::new(&mesh, zero, Some(scaling))?;
            let mut plain = Run::new(&mesh, zero, None)?;
            for (step, (overflow, scale)) in (0..).zip(steps) {
                assert_eq!(scaled.optimizer.loss_scale(), scale, "step {step}");
                let report = scaled.step(step, overflow)?;
                assert_eq!(report.is_skipped, overflow, "step {step}");
                if !overflow {
                    let want = plain.step(step, false)?;
                    assert_eq!(report, want, "step {step}");
                }
                assert_eq!(
                    local_bits(&scaled.part),
                    local_bits(&plain.part),
                    "step {step}"
                );
            }
            assert_eq!(scaled.optimizer.num_steps(), plain.optimizer.num_steps());
            assert_eq!(scaled.optimizer.num_skipped_steps(), 3);
            Ok(())
        });
    }
}

#[test]
fn an_overflow_without_a_scale_to_halve_is_an_error_that_names_the_parameter() {
    let said = on_mesh((1, 2, 2), |mesh| {
        let scaling = LossScaling {
            init: 2.0,
            window: 2,
        };
        let mut run = Run::new(&mesh, ZeroStage::One, Some(scaling))?;
        assert!(run.step(0, true)?.is_skipped);
        let before = local_bits(&run.part);
        let said = message(run.step(1, true));
        assert_eq!(local_bits(&run.part), before, "the weights moved");
        Ok(said)
    });
    for said in said {
        assert_says(
            &said,
            &["the loss scale is 1 already", "layers.2.down.weight"],
        );
    }
}

/// The passes' own gradients, of one scale and another: what they would lose below the smallest number of f16 is nothing here.
#[test]
fn passes_scale_what_the_reduction_divides() {
    on_mesh((2, 1, 2), |mesh| {
        let mut norms = Vec::new();
        for scale in [1.0, 64.0] {
            let part = part(&mesh, ZeroStage::One)?;
            let mut gradients = Gradients::new(part.params(), &mesh)?;
            gradients.set_loss_scale(scale);
            let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, &mesh);
            let batches = Chain::default().micro_batches(1, 2)?;
            pipeline.forward_backward(&part, &batches, &mut gradients)?;
            norms.push(gradients.reduce()?.norm());
        }
        assert!((norms[0] - norms[1]).abs() <= 1e-3 * norms[0], "{norms:?}");
        Ok(())
    });
}
