//! The rule by which parameters are updated, and what it gets.

use std::ops::Range;

use candle_core::{Result, Tensor, bail};

use super::param_matrix::ParamMatrix;
use crate::params::Param;

/// The rule by which an optimizer updates parameters: [`AdamW`](crate::AdamW), or one of your own.
///
/// A [`DistributedOptimizer`](crate::DistributedOptimizer) keeps its state, one f32 value of each name for each value of a parameter that the rank updates,
/// and calls it for a bucket of parameters at a time, with ZeRO-3 for a parameter. A [`ParamGroup`](crate::ParamGroup) may have another rule than the rest.
///
/// A rule with constants says them in [`Self::describe`], which ranks compare.
pub trait Optimizer: Send {
    /// The rule with its constants, which every rank must have alike: compared in each update, as it was when the rule
    /// was given to the optimizer. Override it with the constants, as by `format!("{self:?}")` of a `Debug` form: without
    /// that it is the type and the kinds of state, and another constant on one rank is not found.
    fn describe(&self) -> String {
        let name = std::any::type_name::<Self>();
        format!("{name} with the state {:?}", self.state_names())
    }

    /// Names of the kinds of state, which begin as zeros: `exp_avg` and `exp_avg_sq` for AdamW.
    fn state_names(&self) -> &'static [&'static str];

    /// Whether [`Self::update`] takes [remainders](candle_ops::split_master) in place of masters of bf16 weights: 2 bytes for each weight
    /// in place of 4.
    fn takes_remainders(&self) -> bool {
        false
    }

    /// What an update of `param` needs: the same on every rank and in every step.
    fn needs(&self, _param: &Param) -> Needs {
        Needs::Slice
    }

    /// Updates the weights of `slice` in place, and its state: those of parameters that need no more.
    ///
    /// # Errors
    /// What its operations return.
    fn update(&self, slice: &ParamSlice<'_>, step: &UpdateStep) -> Result<()>;

    /// Updates the part of a parameter that this rank updates, and its state, if the parameter [needs](Self::needs) its matrix. Every rank
    /// with values of the matrix calls it, for the same matrix at the same time; also one that updates none of them.
    ///
    /// # Errors
    /// What its operations return.
    fn update_matrix(&self, matrix: &ParamMatrix<'_>, _step: &UpdateStep) -> Result<()> {
        bail!(
            "the rule says that it needs the matrix of parameter {}, but has no update of matrices\nhint: implement \
             Optimizer::update_matrix",
            matrix.param().name
        )
    }

    /// An error that names the first constant which is out of its range.
    ///
    /// # Errors
    /// The first constant out of its range.
    fn validate(&self) -> Result<()>;
}

/// What a rule needs to update a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Needs {
    /// The values that the rank updates, whichever those are: [`Optimizer::update`].
    Slice,
    /// What all ranks have of a matrix, a parameter of two or more dims: [`Optimizer::update_matrix`].
    Matrix,
}

/// Parameters of one [`ParamGroup`](crate::ParamGroup) in the part of a bucket that a rank updates. All flat tensors have the same length, and a
/// weight's values have the same places in each of them.
#[non_exhaustive]
pub struct ParamSlice<'a> {
    /// Gradients, f32, to be multiplied by [`UpdateStep::grad_scale`].
    pub grad: &'a Tensor,
    /// The weights in f32, if the model's are narrower: these are to be updated, and rounded to the model's. If the rule
    /// [takes them](Optimizer::takes_remainders), the remainders of bf16 weights, I16.
    pub master: Option<&'a Tensor>,
    /// A tensor for each of [`Optimizer::state_names`], f32.
    pub state: &'a [Tensor],
    /// The model's weights.
    pub weights: &'a [SliceWeight<'a>],
}

/// A part of one parameter.
#[non_exhaustive]
pub struct SliceWeight<'a> {
    /// The parameter: its name, shape and placement.
    pub param: &'a Param,
    /// The part, as row-major offsets into the [local](Param::local_shape) values.
    pub range: Range<usize>,
    /// The model's weights, flat, to be written in place.
    pub values: Tensor,
    /// Place of the first in the flat tensors of the slice.
    pub start: usize,
}

impl SliceWeight<'_> {
    /// Whether the parameter has two or more dims: norms and biases have one, and are not decayed unless a group says so.
    pub fn is_matrix(&self) -> bool {
        self.param.global_shape.rank() >= 2
    }
}

/// The numbers of an update.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct UpdateStep {
    /// Number of the update, from 1.
    pub number: usize,
    /// The group's learning rate.
    pub lr: f64,
    /// The group's decay, for all of its parameters; `None`: the optimizer's own, for matrices.
    pub weight_decay: Option<f64>,
    /// The gradients' factor: one over the number of targets and over the loss scale, and what clipping asks for.
    pub grad_scale: f64,
}
