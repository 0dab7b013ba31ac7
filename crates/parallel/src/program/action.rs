//! The actions of which a step of a rank is made.

/// Values that may be kept away from the device, each fetched and put back as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Item {
    /// This rank's slice of a bucket of weights.
    Weights(u32),
    /// The sum of a bucket of gradients, or this rank's slice of it.
    Sum(u32),
    /// A part of the optimizer's state.
    State(u32),
}

impl Item {
    /// Its kind, as a place in an array of all three, and its number among those of its kind.
    pub fn place(self) -> [usize; 2] {
        let (kind, index) = match self {
            Self::Weights(index) => (0, index),
            Self::Sum(index) => (1, index),
            Self::State(index) => (2, index),
        };
        [kind, index as usize]
    }
}

/// One thing that a rank does. Numbers are those of blocks of the model, of buckets of the rank's layout and of items. What takes long is started by one
/// action and awaited by another, so overlap is an order and no mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Action {
    /// The forward pass of a block, whose tape is kept.
    Forward(u32),
    /// The forward pass of a block, of which nothing is kept.
    Infer(u32),
    /// The whole backward pass of a block.
    Backward(u32),
    /// The input half of a block's backward pass.
    InputGrad(u32),
    /// Its weight half.
    WeightGrad(u32),

    /// Waits for the updated weights of this block and of those before it.
    AwaitBlock(u32),
    /// Waits until the updated weights of at most so many buckets are on their way.
    AwaitAllBut(u32),
    /// Starts to gather a bucket of weights from the slices of all ranks.
    Gather(u32),
    /// Starts to gather it from the second copy.
    GatherCopy(u32),
    /// Puts the weights of a bucket in their places.
    Arrive(u32),
    /// Puts them there, and keeps this rank's part of a second copy.
    ArriveAndCopy(u32),
    /// Frees the weights of a bucket.
    Free(u32),
    /// Frees all weights but the slices: second copies, too, and what passes that failed have left.
    FreeAll,

    /// Makes a whole bucket of gradients, to be divided after this micro-batch.
    MakeGradients(u32),
    /// Starts the sum of a bucket of gradients over the ranks.
    Reduce(u32),
    /// Adds the sum of a micro-batch's gradients to this rank's slice, and frees the whole bucket.
    AddReduced(u32),
    /// Notes the squares of a sum that nothing is added to any more.
    Square(u32),
    /// Ends the sum of a bucket, over the stages that share it, too.
    Settle(u32),
    /// Sums norm and loss over all ranks.
    Norm,

    /// Starts to fetch an item.
    Fetch(Item),
    /// Starts to put an item back.
    Put(Item),
    /// Frees an item that need not be put back.
    Drop(Item),
    /// Waits until all sums that were put back are where they are kept.
    FlushSums,
    /// Waits until all weights and state that were put back are where they are kept.
    FlushUpdates,

    /// Updates the weights that an item of the optimizer's state is for.
    Update(u32),
    /// Starts to gather the updated weights of a bucket from the ranks that updated them.
    Spread(u32),
}

impl Action {
    /// Whether the ranks of a group do it together.
    pub fn is_collective(self) -> bool {
        matches!(
            self,
            Self::Gather(_)
                | Self::GatherCopy(_)
                | Self::Reduce(_)
                | Self::Settle(_)
                | Self::Norm
                | Self::Spread(_)
        )
    }

    /// Whether it may follow the pass of a block before the next block begins: weights go, and sums of gradients.
    pub fn ends_block(self) -> bool {
        matches!(
            self,
            Self::Free(_)
                | Self::Reduce(_)
                | Self::AddReduced(_)
                | Self::Square(_)
                | Self::Settle(_)
                | Self::Fetch(Item::Sum(_))
                | Self::Put(_)
                | Self::Drop(_)
        )
    }

    /// Whether it is a pass of a block, or a half of one.
    pub fn is_pass(self) -> bool {
        matches!(
            self,
            Self::Forward(_)
                | Self::Infer(_)
                | Self::Backward(_)
                | Self::InputGrad(_)
                | Self::WeightGrad(_)
        )
    }
}
