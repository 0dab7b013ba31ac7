//! Samples of combinations in which every pair of values occurs, and small random numbers.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::sync::Mutex;
use std::thread;

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

/// A sample of the cases of all values; where the environment has `variable`, all that `is_of_all` chooses.
pub fn cases<C, const N: usize>(
    variable: &str,
    factors: [usize; N],
    of: impl Fn(&[usize; N]) -> Option<C>,
    is_of_all: impl Fn(&C) -> bool,
) -> Vec<C> {
    let all = all(factors, |values| of(values).is_some());
    if std::env::var_os(variable).is_some() {
        all.iter().filter_map(of).filter(is_of_all).collect()
    } else {
        sample(&all, 7).iter().filter_map(of).collect()
    }
}

/// Compares each case with a run of its `reference`, which is made once for all that have the same, two references at a time. A number in the
/// environment's `variable` says how many an earlier call has compared; then they are compared in turn.
pub fn compare<C: Copy + Debug + Sync, R>(
    variable: &str,
    cases: &[C],
    reference: impl Fn(C) -> C + Sync,
    run: impl Fn(C) -> R + Sync,
    check: impl Fn(C, &R) + Sync,
) {
    let mut by_reference: BTreeMap<String, Vec<C>> = BTreeMap::new();
    for case in cases {
        let reference = format!("{:?}", reference(*case));
        by_reference.entry(reference).or_default().push(*case);
    }
    let variable = std::env::var(variable).ok();
    let num_to_skip = variable.as_ref().and_then(|number| number.parse().ok());
    let mut num_done = 0;
    let groups = by_reference.values().filter_map(|cases_of_one| {
        let is_done = num_done < num_to_skip.unwrap_or(0);
        num_done += cases_of_one.len();
        (!is_done).then_some((num_done, cases_of_one))
    });
    let groups = Mutex::new(groups);
    let work = || {
        loop {
            let Some((num_done, cases_of_one)) = groups.lock().unwrap().next() else {
                return;
            };
            let reference = run(reference(cases_of_one[0]));
            for case in cases_of_one {
                check(*case, &reference);
            }
            if variable.is_some() {
                eprintln!("{num_done} of {} cases", cases.len());
            }
        }
    };
    let num_threads = if variable.is_some() { 1 } else { 2 };
    thread::scope(|scope| {
        for _ in 0..num_threads {
            scope.spawn(work);
        }
    });
    eprintln!("{} cases, {} references", cases.len(), by_reference.len());
    assert!(cases.len() > 30);
}
