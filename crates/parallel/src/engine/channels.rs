//! Activations and gradients between neighbouring stages of different ranks.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};

use candle_comm::{P2p, Pending, ProcessGroup};
use candle_core::{DType, Error, Result, Shape, Tensor, bail};
use candle_ops::GpuState;

use crate::memory::{MemoryCategory, MemoryGuard, MemoryMeter};
use crate::pipeline_layout::PipelineLayout;
use crate::schedule::{Link, Message, links};

/// A channel for each neighbour, direction and kind: messages of one never wait for those of another, and the first that is sent over a
/// channel is for the first receive. On GPUs each is a communicator of its own.
pub(super) struct Channels {
    rank: usize,
    groups: HashMap<Link, ProcessGroup>,
    /// The stages that they are for.
    pub layout: PipelineLayout,
    /// Counts the GPU memory that they take.
    _memory: MemoryGuard,
    /// Whether passes use them; if they have failed, what they have sent may be there still.
    is_in_use: AtomicBool,
}

/// How many hardware queues CUDA has for the streams of a GPU; 8 without it.
const MAX_CONNECTIONS: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
/// With so many channels there are queues for them and for the other streams of a rank.
const FEW_STREAMS: usize = 2;

/// How many sends are kept under way; of earlier ones it is enough that they are not needed any more.
const MAX_SENDS: usize = 4;

/// Sends under way, until they are over.
#[derive(Default)]
pub(super) struct Sends(VecDeque<Pending<Vec<Tensor>>>);

impl Channels {
    /// The channels that `layout` needs. Every rank of `pp` must call it.
    ///
    /// # Errors
    /// A layout of another number of ranks than `pp` has, and failures of ranks.
    pub fn new(pp: &ProcessGroup, layout: &PipelineLayout, meter: &MemoryMeter) -> Result<Self> {
        layout.check_ranks(pp.world_size())?;
        let links = links(layout);
        let used = || Ok::<_, Error>(GpuState::of(pp.device())?.map_or(0, |gpu| gpu.used));
        let used_before = used()?;
        let mut groups = HashMap::new();
        for link in links {
            let (src, dst, _) = link;
            let is_end = pp.rank() == src || pp.rank() == dst;
            let color = if is_end { 0 } else { 1 + pp.rank() };
            let group = pp.split(color, usize::from(pp.rank() == dst))?;
            if is_end {
                groups.insert(link, group.counted_with(pp));
            }
        }
        if pp.device().is_cuda()
            && groups.len() > FEW_STREAMS
            && std::env::var_os(MAX_CONNECTIONS).is_none()
        {
            tracing::warn!(
                "a rank has {} channels to its neighbours, each a stream of its GPU, and {MAX_CONNECTIONS} is not set: streams that share one of CUDA's \
                 8 queues wait for each other, in the worst case for ever\nhint: start the ranks with {MAX_CONNECTIONS}=32",
                groups.len()
            );
        }
        // Without channels others' allocations on the same GPU would count.
        let num_bytes = match groups.is_empty() {
            true => 0,
            false => used()?.saturating_sub(used_before) as usize,
        };
        Ok(Self {
            rank: pp.rank(),
            groups,
            _memory: meter.hold(MemoryCategory::Buffers, num_bytes),
            layout: layout.clone(),
            is_in_use: AtomicBool::new(false),
        })
    }

    /// Says that passes begin.
    ///
    /// # Errors
    /// As [`Self::check`].
    pub fn begin(&self) -> Result<()> {
        self.check()?;
        let is_in_use = !self.groups.is_empty();
        self.is_in_use.store(is_in_use, Ordering::Relaxed);
        Ok(())
    }

    /// An error if earlier passes have failed: what they had sent would be taken for what the next ones send.
    pub fn check(&self) -> Result<()> {
        if self.is_in_use.load(Ordering::Relaxed) {
            bail!(
                "an earlier pass has failed on this rank of the pipeline, and what its stages had sent to each other may be on its way still\n\
                 hint: begin again from a checkpoint"
            );
        }
        Ok(())
    }

    /// Says that passes have come to their end.
    pub fn end(&self) {
        self.is_in_use.store(false, Ordering::Relaxed);
    }

    fn group(&self, link: Link) -> Result<&ProcessGroup> {
        match self.groups.get(&link) {
            Some(group) => Ok(group),
            None => bail!(
                "there is no channel {link:?} on rank {} of the pipeline",
                self.rank
            ),
        }
    }

    /// Sends to rank `dst` without waiting: what is under way stays in `sends`.
    pub fn send(&self, xs: &Tensor, dst: usize, what: Message, sends: &mut Sends) -> Result<()> {
        let group = self.group((self.rank, dst, what))?;
        let xs = xs.contiguous()?;
        let dst = 1;
        let send = group.start_batch_send_recv(&[P2p::Send { xs: &xs, dst }])?;
        sends.0.retain(|send| !send.is_complete());
        sends.0.push_back(send);
        if sends.0.len() > MAX_SENDS {
            drop(sends.0.pop_front());
        }
        Ok(())
    }

    /// Posts a receive of a tensor from rank `src`.
    pub fn recv(
        &self,
        src: usize,
        what: Message,
        shape: Shape,
        dtype: DType,
    ) -> Result<Pending<Vec<Tensor>>> {
        let group = self.group((src, self.rank, what))?;
        let src = 0;
        group.start_batch_send_recv(&[P2p::Recv { shape, dtype, src }])
    }
}

impl Sends {
    /// Waits until all are over.
    ///
    /// # Errors
    /// Failures of ranks.
    pub fn finish(self) -> Result<()> {
        self.0
            .into_iter()
            .try_for_each(|send| send.wait().map(drop))
    }
}
