//! Collectives on tensors.

use std::sync::Arc;

use candle_core::{Device, Shape, Tensor};

use super::bytes;
use super::collective::{Status, Task};
use super::context::Context;
use super::header::INLINE_BYTES;
use super::in_flight::InFlight;
use super::movement::Movement;
use super::route::Route;
use crate::Error;
use crate::call::Operation;
use crate::element::{Element, reduce};
use crate::plan::Plan;

type Result<T> = std::result::Result<T, Error>;

/// A collective on tensors of elements `T`. With few bytes each rank sends its whole input with its first message, and
/// all compute their own output; else the data move as the [`Route`] says.
pub(super) struct Exchange<T> {
    in_flight: Arc<InFlight<Tensor>>,
    operation: Operation,
    shape: Shape,
    movement: Option<Movement<T>>,
}

impl<T: Element> Exchange<T> {
    pub fn new(in_flight: Arc<InFlight<Tensor>>, operation: Operation, shape: Shape) -> Self {
        Self {
            in_flight,
            operation,
            shape,
            movement: None,
        }
    }

    fn is_small(&self) -> bool {
        self.shape.elem_count() * size_of::<T>() <= INLINE_BYTES
    }

    /// This rank's output, from all inputs.
    fn reduce_here(&self, rank: usize, data: &[Vec<u8>]) -> Result<Tensor> {
        let Plan { dims, op, pieces } = Plan::new(&self.operation, &self.shape, data.len());
        let mut output = T::zeros(dims.iter().product());
        let num_elements = self.shape.elem_count();
        let inputs: Result<Vec<Vec<T>>> = data
            .iter()
            .enumerate()
            .map(|(source, data)| {
                bytes::to_elements(data, num_elements).ok_or_else(|| {
                    let (call, got) = (&self.in_flight.call, data.len());
                    let expected = num_elements * size_of::<T>();
                    Error::Backend(format!(
                        "{call}: rank {source} of the group sent {got} bytes, expected {expected}"
                    ))
                })
            })
            .collect();
        let inputs = inputs?;
        for piece in &pieces {
            let to = piece.destinations.iter().find(|(to, _)| *to == rank);
            let Some((_, to)) = to else { continue };
            let sources: Vec<&[T]> = piece
                .sources
                .iter()
                .map(|(from, first)| &inputs[*from][*first..first + piece.len])
                .collect();
            reduce(op, &sources, &mut [&mut output[*to..to + piece.len]]);
        }
        self.in_flight.write(0, &output)?;
        match self.in_flight.place() {
            Some(place) => Ok(place),
            None => Tensor::from_vec(output, dims, &Device::Cpu).map_err(Error::of_backend),
        }
    }
}

impl<T: Element> Task for Exchange<T> {
    type Output = Tensor;

    fn data(&self) -> Result<Vec<u8>> {
        match self.is_small() {
            true => (self.in_flight).read(0, self.shape.elem_count(), |xs: &[T]| {
                bytes::of(xs).to_vec()
            }),
            false => Ok(Vec::new()),
        }
    }

    fn start(
        &mut self,
        ctx: &mut Context,
        (group, seq): (usize, u64),
        data: Vec<Vec<u8>>,
    ) -> Result<Status<Tensor>> {
        let rank = ctx.groups[group].rank;
        if self.is_small() {
            return Ok(Status::Done(self.reduce_here(rank, &data)?));
        }
        let route = Route::new(&self.operation, &self.shape, data.len(), size_of::<T>());
        let movement = Movement::new(route, (group, seq), rank, &self.in_flight)?;
        self.movement = Some(movement);
        Ok(Status::Working)
    }

    fn poll(&mut self, ctx: &mut Context) -> Result<(bool, Status<Tensor>)> {
        let Some(movement) = &mut self.movement else {
            return Ok((false, Status::Working));
        };
        let moved = movement.poll(ctx, &self.in_flight)?;
        if !movement.is_over() {
            return Ok((moved, Status::Working));
        }
        let output = match self.movement.take() {
            Some(movement) => movement.into_output(&self.in_flight)?,
            None => return Ok((moved, Status::Working)),
        };
        Ok((true, Status::Done(output)))
    }
}
