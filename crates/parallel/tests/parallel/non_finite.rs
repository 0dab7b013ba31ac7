//! NaN and infinite gradients: the first parameter is named on every rank, and no weight moves.

use candle_core::Tensor;
use candle_parallel::{AdamWConfig, DistributedOptimizer, Gradients, ParamStore};

use crate::chain::{Chain, local_bits, one_target};
use crate::check::{ZERO_STAGES, assert_says, message, on_mesh, random};
use crate::device::device;

#[test]
fn the_first_parameter_in_name_order_is_named_on_every_rank() {
    for zero in ZERO_STAGES {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let said = on_mesh((2, 3, 2), |mesh| {
                let part =
                    Chain::default().part(&mesh, &ParamStore::init(5).with_data_parallel(zero))?;
                let before = local_bits(&part);
                let config = AdamWConfig::default();
                let mut optimizer = DistributedOptimizer::adamw(part.params(), &mesh, config)?;
                let mut gradients = Gradients::new(part.params(), &mesh)?;
                for (index, param) in part.params().iter().enumerate() {
                    let mut grad = random(index as u64, param.local_shape())?;
                    // One replica, one tensor-parallel rank, the last stage; two parameters, the last value of one.
                    let is_bad = mesh.dp.rank() == 1
                        && mesh.tp.rank() == 1
                        && ["layers.2.up.weight", "layers.2.down.weight"]
                            .contains(&param.name.as_str());
                    if is_bad {
                        let mut values = grad.flatten_all()?.to_vec1::<f32>()?;
                        *values.last_mut().unwrap() = value;
                        grad = Tensor::from_vec(values, grad.shape(), &device())?;
                    }
                    gradients.accumulate(index, &grad)?;
                }
                let said =
                    message(optimizer.step(one_target(&mut gradients, &mesh), 0.1, Some(1.0)));
                assert_eq!(local_bits(&part), before, "the weights moved");
                assert_eq!(optimizer.num_steps(), 0);
                // The next step works.
                for (index, param) in part.params().iter().enumerate() {
                    gradients.accumulate(index, &random(1, param.local_shape())?)?;
                }
                optimizer.step(one_target(&mut gradients, &mesh), 0.1, Some(1.0))?;
                Ok(said)
            });
            for said in said {
                assert_says(&said, &["gradient norm is", "layers.2.down.weight", "hint"]);
            }
        }
    }
}
