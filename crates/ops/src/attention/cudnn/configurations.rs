//! The configurations of kernels that cuDNN suggests for a pass, best first.

use super::descriptor::{Descriptor, Value};
use super::graph::Graph;
use super::plan::Plan;
use super::sizes::{Direction, Sizes};
use super::{backward, forward};
use crate::cuda::cudnn_library::{Library, Opaque, is_out_of_memory};
use candle_core::Result;

/// What a plan is made for: the GPU of a handle, or, in tests, one that is only described.
#[derive(Clone, Copy)]
pub(super) enum Target {
    Handle(Opaque),
    #[cfg(test)]
    Properties(Opaque),
}

// SAFETY: a handle may be used by any thread, by one at a time, and handles are never closed; the lock of the plans sees to that.
unsafe impl Send for Target {}

/// cuDNN's heuristics: A, the best guesses first; then what takes the most sizes.
const MODES: [i32; 2] = [3, 2];

/// The suggestions for a graph.
pub(super) struct Configurations {
    library: &'static Library,
    target: Target,
    graph: Descriptor,
    /// What the graph refers to.
    _parts: Vec<Descriptor>,
    /// What a call of it must bring along.
    arguments: Vec<i64>,
    found: Vec<Descriptor>,
    /// Modes that were asked.
    num_asked: usize,
}

impl Configurations {
    /// Describes the pass; asks for nothing yet.
    pub(super) fn new(library: &'static Library, target: Target, sizes: Sizes) -> Result<Self> {
        let mut graph = Graph::new(library, sizes)?;
        match sizes.pass {
            Direction::Forward => forward::describe(&mut graph)?,
            Direction::Backward | Direction::DeterministicBackward => {
                backward::describe(&mut graph, sizes.pass)?;
            }
        }
        let of_graph = match target {
            Target::Handle(handle) => vec![(800, Value::Handle(handle))],
            #[cfg(test)]
            Target::Properties(_) => vec![],
        };
        Ok(Self {
            library,
            target,
            graph: graph.finish(&of_graph)?,
            _parts: graph.descriptors,
            arguments: graph.arguments,
            found: Vec::new(),
            num_asked: 0,
        })
    }

    /// How many there are.
    ///
    /// # Errors
    /// When cuDNN has none, in its words; when memory is missing.
    pub(super) fn count(&mut self) -> Result<usize> {
        self.ask_for(usize::MAX)?;
        Ok(self.found.len())
    }

    /// A plan of the configuration of this number; none beyond the last.
    ///
    /// # Errors
    /// When cuDNN cannot carry it out, or has no suggestion at all, in its words; when memory is missing.
    pub(super) fn plan(&mut self, number: usize) -> Result<Option<Plan>> {
        self.ask_for(number)?;
        let Some(config) = self.found.get(number) else {
            return Ok(None);
        };
        let config = [config.raw()];
        let mut attributes = vec![(401, Value::Descriptors(&config))];
        match self.target {
            Target::Handle(handle) => attributes.insert(0, (400, Value::Handle(handle))),
            #[cfg(test)]
            Target::Properties(_) => (),
        }
        let plan = Descriptor::of(self.library, 5, &attributes)?;
        Plan::new(self.library, plan, self.arguments.clone()).map(Some)
    }

    /// Asks one mode after the other until the configuration of this number is found.
    fn ask_for(&mut self, number: usize) -> Result<()> {
        let mut refusal = None;
        while number >= self.found.len() && self.num_asked < MODES.len() {
            let mode = MODES[self.num_asked];
            self.num_asked += 1;
            match self.suggested(mode) {
                Ok(more) => self.found.extend(more),
                Err(err) if is_out_of_memory(&err) => return Err(err),
                Err(err) => refusal = Some(err),
            }
        }
        match refusal {
            Some(err) if self.found.is_empty() => Err(err),
            _ => Ok(()),
        }
    }

    fn suggested(&self, mode: i32) -> Result<Vec<Descriptor>> {
        let graph = [self.graph.raw()];
        let mut attributes = vec![(200, Value::HeuristicMode(mode))];
        #[cfg(test)]
        let properties;
        #[cfg(test)]
        if let Target::Properties(raw) = self.target {
            properties = [raw];
            attributes.push((204, Value::Descriptors(&properties)));
        }
        attributes.push((201, Value::Descriptors(&graph)));
        Descriptor::of(self.library, 4, &attributes)?.descriptors(202, 3)
    }
}
