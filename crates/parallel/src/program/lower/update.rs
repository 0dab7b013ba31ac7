//! The update: bucket by bucket in the order in which the next forward pass needs them.

use super::{Action, Ahead, Item, Lowering};

impl Lowering<'_> {
    pub(super) fn update_buckets(&mut self) {
        let (spec, groups) = (self.setup.spec, self.setup.groups);
        if groups.spreads_weights() {
            self.push(Action::AwaitAllBut(0));
        }
        // Weights that were gathered before are old after the update.
        self.free_all_weights();
        let max_spreads = groups.max_spreads();
        let mut on_the_way = 0;
        let [mut sums, mut weights, mut states] = [const { Ahead(None) }; 3];
        // The first item of each bucket.
        let firsts = self.setup.state_parts.iter().scan(0, |next, num_parts| {
            let first = *next;
            *next += num_parts;
            Some(first)
        });
        let firsts: Vec<usize> = firsts.collect();
        let order = spec.layout.in_forward_order();
        for (place, &index) in order.iter().enumerate() {
            let (bucket, next) = (index as u32, order.get(place + 1).copied());
            let next_bucket = next.map(|next| next as u32);
            if self.setup.sums_are_away {
                sums.begin(Item::Sum(bucket), next_bucket.map(Item::Sum), &mut self.out);
            }
            if groups.offloads_weights {
                let next = next_bucket.map(Item::Weights);
                weights.begin(Item::Weights(bucket), next, &mut self.out);
            }
            let end = firsts[index] + self.setup.state_parts[index];
            for part in firsts[index]..end {
                let next = Some(part + 1).filter(|next| *next < end);
                let next = next.or(next_bucket.map(|next| firsts[next as usize]));
                if self.setup.state_is_away {
                    let next = next.map(|next| Item::State(next as u32));
                    states.begin(Item::State(part as u32), next, &mut self.out);
                }
                self.push(Action::Update(part as u32));
                if self.setup.state_is_away {
                    self.push(Action::Put(Item::State(part as u32)));
                }
            }
            if self.setup.sums_are_away {
                self.push(Action::Drop(Item::Sum(bucket)));
            }
            if groups.offloads_weights {
                self.push(Action::Put(Item::Weights(bucket)));
            }
            if groups.spreads_weights() {
                // Room for the one that comes.
                self.await_all_but(max_spreads.saturating_sub(1), &mut on_the_way);
                self.push(Action::Spread(bucket));
                on_the_way += 1;
                self.await_all_but(max_spreads, &mut on_the_way);
            }
        }
        if !order.is_empty() && (groups.offloads_weights || self.setup.state_is_away) {
            self.push(Action::FlushUpdates);
        }
    }

    fn await_all_but(&mut self, num: u32, on_the_way: &mut u32) {
        if *on_the_way > num {
            self.push(Action::AwaitAllBut(num));
            *on_the_way = num;
        }
    }
}
