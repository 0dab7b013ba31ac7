//! Whether all ranks have alike what they must in a step: compared by numbers of the sum that the step makes, and named if not.

use std::collections::BTreeMap;

use candle_core::{Result, bail};

use super::accumulate::Gradients;
use super::reduce::{NUM_COMPARED, NUM_SUMS};
use super::reduced::{ReducedBuckets, UpdateNotice, compare_update};
use crate::agreement::{Comparison, Facts, gather};
use crate::pass::Reported;

impl Gradients {
    /// This rank's summand of the comparison of updates over all ranks, of numbers of targets over the ranks of a replica, and of weights
    /// that were set over data-parallel ranks. The sum is 0 if they are alike.
    pub(super) fn compared_update(&self, update: Option<&UpdateNotice>) -> f64 {
        let (mesh, said) = (&self.mesh, self.totals.said_targets);
        let says = update.map_or(0, |update| update.facts.hash());
        let says = says ^ self.loss_scale.to_bits() ^ u64::from(said.is_some());
        let (replica, part) = ([mesh.dp.rank()], [mesh.pp.rank(), mesh.tp.rank()]);
        let set = self.params.set_since_update();
        Comparison::over(&mesh.world, &[]).summand(says)
            + Comparison::over_replica(mesh, &replica).summand(said.map_or(0, f64::to_bits))
            + Comparison::over(&mesh.replicas, &part).summand(set)
    }

    /// An error on every rank that names two ranks which were told other numbers of targets, if there are. Every rank
    /// must call it.
    fn blame_targets(&self) -> Result<()> {
        let own = (self.mesh.dp.rank(), self.totals.said_targets);
        let all: Vec<(usize, Option<f64>)> = gather(&self.mesh.world, &own)?;
        let in_words =
            |said: Option<f64>| said.map_or("nothing".to_string(), |said| said.to_string());
        for (rank, &(replica, said)) in all.iter().enumerate() {
            let is_other = |&(of, other): &(usize, Option<f64>)| {
                other.is_some() != said.is_some() || of == replica && other != said
            };
            if let Some(mate) = all.iter().position(is_other) {
                bail!(
                    "Gradients::set_num_targets was told {} on rank {mate} and {} on rank {rank}\nhint: all ranks are told a number in a step, or \
                     none; the ranks of a replica the same",
                    in_words(all[mate].1),
                    in_words(said)
                );
            }
        }
        Ok(())
    }

    /// An error on every rank if ranks do not have alike what they must.
    pub(super) fn judge(
        &mut self,
        reduced: &ReducedBuckets,
        sums: &[f64; NUM_SUMS],
        update: Option<&UpdateNotice>,
    ) -> Result<()> {
        let params = self.params.clone();
        let [squares, loss_sum, .., copies, said, written] = *sums;
        if written > 0.0 {
            let written = update.and_then(|update| update.written.as_ref());
            params.blame_written(&self.mesh, written)?;
        }
        let mut when = "in this step";
        if copies != 0.0 {
            // Before what comes of it.
            self.blame_losses(when)?;
        }
        // What has overflowed says nothing.
        let is_finite = squares.is_finite() && loss_sum.is_finite();
        if let Some(borders) = self.first_steps.borders.as_ref().filter(|_| is_finite) {
            if self.first_steps.num_compared == 0 {
                when = "in the first step";
                params.check_copies(&self.mesh, when, |index| params.values(index))?;
                if let Some(sharded) = params.sharded() {
                    sharded.slices.forget_read();
                }
            }
            borders.compare(&self.mesh, when)?;
            self.first_steps.num_compared += 1;
            if self.first_steps.num_compared == NUM_COMPARED {
                self.first_steps.borders = None;
            }
        }
        if copies != 0.0 {
            self.blame_copies(reduced, when)?;
        }
        if said != 0.0 {
            self.blame_targets()?;
            params.blame_set(&self.mesh)?;
            let mut says = update.map_or_else(Facts::default, |update| update.facts.clone());
            says.add("the loss scale", self.loss_scale);
            compare_update(&self.mesh, &says)?;
        }
        Ok(())
    }
}

/// A rank's place in the pipeline, among the replicas and in the tensor-parallel group, and what its blocks have reported.
pub(super) type OfRank = ((usize, usize, usize), BTreeMap<String, Reported>);

/// The first name under which tensor-parallel ranks have not reported the same.
pub(super) fn reported_unlike(of_ranks: &[OfRank]) -> Option<&str> {
    let firsts = of_ranks.iter().filter(|((_, _, tp), _)| *tp == 0);
    let firsts: BTreeMap<(usize, usize), _> = firsts
        .map(|((pp, replica, _), reported)| ((*pp, *replica), reported))
        .collect();
    of_ranks.iter().find_map(|((pp, replica, _), reported)| {
        let first = firsts.get(&(*pp, *replica))?;
        let condensed = |of: &BTreeMap<String, Reported>, name: &str| {
            of.get(name).map(|reported| reported.condensed(name))
        };
        let mut names = first.keys().chain(reported.keys());
        let name = names.find(|name| condensed(first, name) != condensed(reported, name))?;
        Some(name.as_str())
    })
}
