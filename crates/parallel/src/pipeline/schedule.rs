//! Pipeline schedules as lists of instructions: pure functions of (stage, number of stages, number of micro-batches).

use serde::{Deserialize, Serialize};

/// One thing that a stage does for a micro-batch, given by its index.
///
/// Neighbouring sends and receives of a list are issued as one batch: they are started together and then waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Instruction {
    /// Receive the input from the stage before.
    RecvForward(usize),
    /// Run the blocks.
    Forward(usize),
    /// Send the output to the stage after.
    SendForward(usize),
    /// Receive the gradient of the output from the stage after.
    RecvBackward(usize),
    /// Run the blocks' backward pass.
    Backward(usize),
    /// Send the gradient of the input to the stage before.
    SendBackward(usize),
}

/// The order in which a stage works on its micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Schedule {
    /// All forward passes, then all backward passes (arXiv:1811.06965): every micro-batch's activations are alive at once.
    GPipe,
    /// One forward, one backward (PipeDream-Flush, arXiv:2104.04473, section 2.2): stage s of p holds the activations of at
    /// most min(p - s, m) of m micro-batches.
    OneForwardOneBackward,
}

impl Schedule {
    /// The instructions of stage `stage` of `num_stages` for `num_micro_batches` micro-batches.
    pub fn instructions(
        self,
        stage: usize,
        num_stages: usize,
        num_micro_batches: usize,
    ) -> Vec<Instruction> {
        let mut list = InstructionList {
            is_first: stage == 0,
            is_last: stage + 1 == num_stages,
            instructions: Vec::with_capacity(6 * num_micro_batches),
        };
        let num_ahead = match self {
            Self::GPipe => num_micro_batches,
            Self::OneForwardOneBackward => (num_stages - 1 - stage).min(num_micro_batches),
        };
        (0..num_ahead).for_each(|index| list.forward(index));
        for index in num_ahead..num_micro_batches {
            list.forward(index);
            list.backward(index - num_ahead);
        }
        (num_micro_batches - num_ahead..num_micro_batches).for_each(|index| list.backward(index));
        list.instructions
    }
}

struct InstructionList {
    is_first: bool,
    is_last: bool,
    instructions: Vec<Instruction>,
}

impl InstructionList {
    fn forward(&mut self, index: usize) {
        if !self.is_first {
            self.instructions.push(Instruction::RecvForward(index));
        }
        self.instructions.push(Instruction::Forward(index));
        if !self.is_last {
            self.instructions.push(Instruction::SendForward(index));
        }
    }

    fn backward(&mut self, index: usize) {
        if !self.is_last {
            self.instructions.push(Instruction::RecvBackward(index));
        }
        self.instructions.push(Instruction::Backward(index));
        if !self.is_first {
            self.instructions.push(Instruction::SendBackward(index));
        }
    }
}
