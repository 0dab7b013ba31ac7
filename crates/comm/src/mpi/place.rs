//! Where parts of a collective's result go: into a new vector, or by way of a buffer into a tensor that the caller gave.

use std::ops::{Deref, DerefMut};

use super::in_flight::InFlight;
use super::part::Part;
use crate::Error;
use crate::element::Element;

/// Where a part of the result goes that has not begun to come.
pub(super) enum Room<T> {
    Part(Part<T>),
    /// (first element of the given tensor, number of elements)
    Given(usize, usize),
}

/// A part of the result on its way.
pub(super) enum Place<T> {
    Part(Part<T>),
    /// The first element of the given tensor, and what goes there.
    Given(usize, Vec<T>),
}

/// Vectors to be used again.
pub(super) struct Buffers<T>(Vec<Vec<T>>);

impl<T> Default for Buffers<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: Element> Buffers<T> {
    /// A vector of `len` elements, of whatever values.
    pub fn take(&mut self, len: usize) -> Vec<T> {
        match self.0.iter().rposition(|vec| vec.len() == len) {
            Some(index) => self.0.swap_remove(index),
            None => T::zeros(len),
        }
    }

    pub fn give_back(&mut self, buffer: Vec<T>) {
        if !buffer.is_empty() {
            self.0.push(buffer);
        }
    }
}

impl<T: Element> Room<T> {
    /// Memory for it.
    pub fn open(self, buffers: &mut Buffers<T>) -> Place<T> {
        match self {
            Self::Part(part) => Place::Part(part),
            Self::Given(first, len) => Place::Given(first, buffers.take(len)),
        }
    }
}

impl<T: Element> Place<T> {
    /// Takes note that the values are here.
    pub fn fill(&self, in_flight: &InFlight) -> Result<(), Error> {
        match self {
            Self::Part(_) => Ok(()),
            Self::Given(first, values) => in_flight.write(*first, values),
        }
    }

    /// The buffer, if it had one.
    pub fn close(self, buffers: &mut Buffers<T>) {
        if let Self::Given(_, buffer) = self {
            buffers.give_back(buffer);
        }
    }
}

impl<T> Deref for Place<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Self::Part(part) => part,
            Self::Given(_, values) => values,
        }
    }
}

impl<T> DerefMut for Place<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Self::Part(part) => part,
            Self::Given(_, values) => values,
        }
    }
}
