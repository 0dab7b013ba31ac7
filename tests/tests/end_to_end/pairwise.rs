//! Samples of combinations in which every pair of values occurs, and small random numbers.

use std::collections::BTreeSet;

/// A small generator of numbers (xorshift64*).
pub struct Random(u64);

impl Random {
    pub fn new(seed: usize) -> Self {
        let mut random = Self((seed as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        for _ in 0..4 {
            random.below(2);
        }
        random
    }

    pub fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % end
    }
}

/// Two values of two factors.
type Pair = ((usize, usize), (usize, usize));

fn pairs<const N: usize>(values: &[usize; N]) -> impl Iterator<Item = Pair> + '_ {
    (0..N).flat_map(move |b| (0..b).map(move |a| ((a, values[a]), (b, values[b]))))
}

/// Of each factor a value, all combinations that `exists` says there are.
pub fn all<const N: usize>(
    factors: [usize; N],
    exists: impl Fn(&[usize; N]) -> bool,
) -> Vec<[usize; N]> {
    let num_all: usize = factors.iter().product();
    let values = |mut index: usize| {
        factors.map(|num_values| {
            let value = index % num_values;
            index /= num_values;
            value
        })
    };
    let all = (0..num_all).map(values);
    all.filter(|values| exists(values)).collect()
}

/// Some of `all` in which each pair of values occurs that any of them has, by chance and by what is still missing.
pub fn sample<const N: usize>(all: &[[usize; N]], seed: usize) -> Vec<[usize; N]> {
    let mut missing: BTreeSet<Pair> = BTreeSet::new();
    for values in all {
        missing.extend(pairs(values));
    }
    let mut random = Random::new(seed);
    let mut sample = Vec::new();
    while !missing.is_empty() {
        let candidates = (0..200).map(|_| all[random.below(all.len())]);
        let num_new =
            |values: &[usize; N]| pairs(values).filter(|pair| missing.contains(pair)).count();
        let best = candidates.max_by_key(num_new).unwrap();
        // When chance finds nothing more, the first one that has a pair which is missing.
        let best = match num_new(&best) {
            0 => *all.iter().find(|values| num_new(values) > 0).unwrap(),
            _ => best,
        };
        for pair in pairs(&best) {
            missing.remove(&pair);
        }
        sample.push(best);
    }
    sample
}
