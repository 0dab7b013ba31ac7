//! Forward passes without backward passes: lists of instructions, as training has them.

use std::sync::atomic::Ordering;

use candle_core::{Result, Tensor, bail};

use super::eval_sums::EvalSums;
use super::executor::Executor;
use super::input_check::HowRun;
use super::pipeline::Pipeline;
use super::units::{Inference, Units};
use crate::agreement::gather;
use crate::checksums::checksum;
use crate::layers::Head;
use crate::pass::{Early, Loss, Pass};
use crate::pipeline::ModelPart;
use crate::program::{Lowering, Passes, Setup};
use crate::schedule::Plan;

/// Sees what each block gives, by its index.
type Observe<'a> = &'a mut dyn FnMut(usize, &Tensor) -> Result<()>;
/// Asks the head, and gives a tensor of what it says to be seen.
type AskHead<'a> = &'a mut dyn FnMut(&dyn Head, &Tensor, &Pass) -> Result<Tensor>;

impl Pipeline {
    /// The logits of some rows of a micro-batch, given by their indices in (b · t): (rows, vocab), in the model's type, the same
    /// on every rank of the pipeline and of the tensor-parallel group. The head computes these rows alone.
    ///
    /// # Errors
    /// A row that the micro-batch does not have, what blocks return, and failures of ranks.
    pub fn logits(&self, part: &ModelPart, pass: &Pass, rows: &[usize]) -> Result<Tensor> {
        part.begin();
        let (b, t) = pass.dims()?;
        if let Some(row) = rows.iter().find(|&&row| row >= b * t) {
            bail!("logits of row {row} of a micro-batch of {b} x {t} rows; rows count from 0");
        }
        let mut logits = None;
        self.run_forward(
            part,
            std::slice::from_ref(pass),
            &mut |_, _| Ok(()),
            &mut |head, xs, pass| {
                let given = head.logits(xs, rows, pass)?.contiguous()?;
                Ok(logits.insert(given).clone())
            },
        )?;
        self.on_all_ranks(part, logits)
    }

    /// A tensor that only the rank with the last stage gives, on all ranks of the pipeline.
    fn on_all_ranks(&self, part: &ModelPart, of_last: Option<Tensor>) -> Result<Tensor> {
        let layout = part.layout();
        let root = layout.rank_of(layout.num_stages() - 1);
        // The others do not know the shape.
        let dims = of_last.as_ref().map_or(&[][..], Tensor::dims);
        let mut all: Vec<Vec<usize>> = gather(&self.pp, &dims)?;
        let dims = all.swap_remove(root);
        let xs = match of_last {
            Some(xs) => xs,
            None => Tensor::zeros(dims, part.dtype(), part.device())?,
        };
        self.pp.broadcast(&xs, root)
    }

    /// Forward passes of micro-batches with targets, without backward passes: the losses, added up on the rank of the last
    /// stage; zeros on the others. Every rank of a replica must be given the same micro-batches; with ZeRO-3 all replicas must be
    /// given as many. The first batch of all is evaluated twice.
    ///
    /// # Errors
    /// Ranks of a replica that are given different micro-batches, with ZeRO-3 replicas that are given unequal numbers of them; a block
    /// that gives other bits for the same batch the second time, as one does that still drops values at random; what `batches` and
    /// blocks return, and failures of ranks.
    pub fn evaluate(
        &self,
        part: &ModelPart,
        batches: impl IntoIterator<Item = Result<Pass>>,
    ) -> Result<EvalSums> {
        let mut sums = EvalSums::default();
        part.begin();
        let mut batches = batches.into_iter();
        // A rank with several stages works on as many micro-batches at once as there are ranks.
        let layout = part.layout();
        let at_once = match layout.num_stages() > layout.num_ranks() {
            true => layout.num_ranks(),
            false => 1,
        };
        loop {
            let passes = batches.by_ref().take(at_once);
            let passes = passes.map(|pass| Ok(pass?.evaluating()));
            let passes = passes.collect::<Result<Vec<_>>>()?;
            if let Some(check) = &self.input_check {
                let counts_are_equal = part.params().groups().moves_in_passes(false);
                check.run(&passes, HowRun::default(), counts_are_equal)?;
            }
            if passes.is_empty() {
                return Ok(sums);
            }
            let passes = passes.iter().map(|pass| pass.cut(&self.cp));
            let passes = passes.collect::<Result<Vec<_>>>()?;
            let losses = match self.evaluates_alike.swap(true, Ordering::Relaxed) {
                true => self.losses(part, &passes, &mut |_, _| Ok(()))?,
                false => self.losses_twice(part, &passes)?,
            };
            for loss in losses {
                sums = sums + EvalSums::of(&loss)?;
            }
        }
    }

    /// The losses of some micro-batches, on the rank of the last stage.
    fn losses(&self, part: &ModelPart, passes: &[Pass], observe: Observe<'_>) -> Result<Vec<Loss>> {
        let mut losses = Vec::new();
        self.run_forward(part, passes, observe, &mut |head, xs, pass| {
            let loss = head.evaluate(xs, pass)?.checked()?;
            let sum = loss.sum.clone();
            losses.push(loss);
            Ok(sum)
        })?;
        Ok(losses)
    }

    /// [`Self::losses`], or an error that names a block of this rank which gives other bits when it runs again.
    fn losses_twice(&self, part: &ModelPart, passes: &[Pass]) -> Result<Vec<Loss>> {
        let mut first = Vec::new();
        let losses = self.losses(part, passes, &mut |_, xs| {
            first.push(checksum(xs)?);
            Ok(())
        })?;
        let mut first = first.into_iter();
        self.losses(part, passes, &mut |block, xs| {
            if first.next() == Some(checksum(xs)?) {
                return Ok(());
            }
            bail!(
                "block {block} gives other values when the same batch is evaluated again: its loss would be one of many\nhint: a block \
                 that draws random numbers, as for dropout, must not do so while the model is evaluated; Pass::is_training tells, and \
                 Pass::dropout asks it"
            )
        })?;
        Ok(losses)
    }

    /// The forward passes of micro-batches, on the rank of the last stage with what `head` does with the model's head.
    fn run_forward(
        &self,
        part: &ModelPart,
        passes: &[Pass],
        observe: Observe<'_>,
        head: AskHead<'_>,
    ) -> Result<()> {
        let (params, plan) = (part.params(), Plan::forwards(part.layout(), passes.len()));
        let mut lowering = Lowering::new(Setup::of_rank(params, false));
        if let Some(sharded) = params.sharded() {
            lowering = lowering.with_copies(sharded.copies());
        }
        let program = lowering.passes(&Passes {
            plan: &plan,
            list: &self.list(&plan),
            trains: false,
        })?;
        let inference = Some(Inference { observe, head });
        let mut executor = Executor {
            units: Some(Units::new(self, part, passes, Early::default(), inference)?),
            ..Executor::new(params)
        };
        executor.run(&program)?;
        let units = executor.units.take();
        units.map_or(Ok(()), |units| units.finish().map(drop))
    }
}
