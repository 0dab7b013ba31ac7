//! Every schedule over up to 8 stages and 16 micro-batches, without a model.

use std::collections::HashSet;

use candle_parallel::{Instruction, Instructions, PipelineLayout, Schedule, Unit};

use Instruction::{Backward, Forward};

const SCHEDULES: [Schedule; 2] = [Schedule::GPipe, Schedule::OneForwardOneBackward];

fn cases() -> impl Iterator<Item = (Schedule, usize, usize)> {
    SCHEDULES
        .into_iter()
        .flat_map(|s| (1..=8).flat_map(move |p| (1..=16).map(move |m| (s, p, m))))
}

/// What each of `p` ranks does, one stage on each.
fn lists(schedule: Schedule, p: usize, m: usize) -> Vec<Vec<Instruction>> {
    let layout = PipelineLayout::new(&vec![1; p], &(0..p).collect::<Vec<_>>()).unwrap();
    (0..p)
        .map(|rank| schedule.of_rank(&layout, rank, m))
        .collect()
}

/// All ranks run until each waits for what no other has sent; whether they come to their end.
#[test]
fn no_rank_waits_for_ever_and_messages_come_in_the_order_in_which_they_are_needed() {
    for (schedule, p, m) in cases() {
        let what = format!("{schedule:?} p={p} m={m}");
        let lists = lists(schedule, p, m);
        let mut next = vec![0; p];
        let mut done: HashSet<Instruction> = HashSet::new();
        loop {
            let before = next.clone();
            for rank in 0..p {
                while let Some(&instruction) = lists[rank].get(next[rank]) {
                    let Unit { stage, micro_batch } = instruction.unit();
                    assert_eq!(stage, rank, "{what}");
                    let beside = |stage| Unit { stage, micro_batch };
                    let needs = match instruction {
                        Forward(_) => stage.checked_sub(1).map(|stage| Forward(beside(stage))),
                        _ => (stage + 1 < p).then(|| Backward(beside(stage + 1))),
                    };
                    if needs.is_some_and(|needs| !done.contains(&needs)) {
                        break;
                    }
                    done.insert(instruction);
                    next[rank] += 1;
                }
            }
            if next == before {
                break;
            }
        }
        assert_eq!(done.len(), 2 * p * m, "{what}");
        for pair in lists.windows(2) {
            let order = |list: &[Instruction], is_forward: bool| -> Vec<usize> {
                let own = list.iter();
                let own = own.filter(|i| matches!(i, Forward(_)) == is_forward);
                own.map(|i| i.unit().micro_batch).collect()
            };
            for is_forward in [false, true] {
                assert_eq!(order(&pair[0], is_forward), order(&pair[1], is_forward));
            }
        }
    }
}

#[test]
fn each_micro_batch_once_in_order_with_few_in_flight() {
    for (schedule, p, m) in cases() {
        for (stage, list) in lists(schedule, p, m).into_iter().enumerate() {
            let what = format!("{schedule:?} p={p} m={m} stage={stage}");
            let mut in_flight = HashSet::new();
            let mut most = 0;
            let (mut forwards, mut backwards) = (Vec::new(), Vec::new());
            for instruction in list {
                let index = instruction.unit().micro_batch;
                match instruction {
                    Forward(_) => {
                        assert!(in_flight.insert(index), "{what}");
                        forwards.push(index);
                    }
                    _ => {
                        assert!(in_flight.remove(&index), "{what}: backward before forward");
                        backwards.push(index);
                    }
                }
                most = most.max(in_flight.len());
            }
            let all: Vec<usize> = (0..m).collect();
            assert_eq!(forwards, all, "{what}");
            assert_eq!(backwards, all, "{what}");
            let limit = match schedule {
                Schedule::GPipe => m,
                _ => m.min(p - stage),
            };
            assert_eq!(most, limit, "{what}");
        }
    }
}
