//! The order of samples in each epoch: that of the data, or a permutation of it.

use std::sync::{Arc, Mutex, PoisonError};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// One epoch's permutation of the samples.
type Epoch = (usize, Arc<[usize]>);

/// Maps places in an epoch to samples; the same on every rank.
#[derive(Debug)]
pub(crate) struct SampleOrder {
    num_samples: usize,
    shuffle: bool,
    seed: u64,
    /// The permutation used last. It only saves time: every permutation is a function of (seed, epoch).
    last: Mutex<Option<Epoch>>,
}

impl SampleOrder {
    /// The order of `num_samples` >= 1 samples.
    pub(crate) fn new(num_samples: usize, shuffle: bool, seed: u64) -> Self {
        Self {
            num_samples,
            shuffle,
            seed,
            last: Mutex::new(None),
        }
    }

    /// The sample that is `place`th in `epoch`, `place` < the number of samples.
    pub(crate) fn sample(&self, epoch: usize, place: usize) -> usize {
        match self.shuffle {
            true => self.permutation(epoch)[place],
            false => place,
        }
    }

    fn permutation(&self, epoch: usize) -> Arc<[usize]> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        match &*last {
            Some((known, permutation)) if *known == epoch => permutation.clone(),
            _ => {
                let permutation: Arc<[usize]> =
                    permutation(self.num_samples, self.seed, epoch as u64).into();
                *last = Some((epoch, permutation.clone()));
                permutation
            }
        }
    }
}

/// Fisher-Yates over ChaCha8 keyed with (seed, epoch). Written out, so that neither the platform's word size nor a new
/// version of a library can change the order of a run that is resumed.
pub(crate) fn permutation(num_samples: usize, seed: u64, epoch: u64) -> Vec<usize> {
    let mut key = [0u8; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..16].copy_from_slice(&epoch.to_le_bytes());
    let mut rng = ChaCha8Rng::from_seed(key);
    let mut permutation: Vec<usize> = (0..num_samples).collect();
    for i in (1..num_samples).rev() {
        // The high half of a 64 x 64 bit product is a uniform index in 0..=i, up to a bias of i / 2^64.
        let j = (u128::from(rng.next_u64()) * (i as u128 + 1)) >> 64;
        permutation.swap(i, j as usize);
    }
    permutation
}
