//! Every schedule over up to 8 stages and 16 micro-batches, without a model: a simulation in which a send ends only when
//! its receive has been posted, as over a link without buffers.

use std::collections::HashSet;

use candle_parallel::{Instruction, Schedule};

use Instruction::{Backward, Forward, RecvBackward, RecvForward, SendBackward, SendForward};

const SCHEDULES: [Schedule; 2] = [Schedule::GPipe, Schedule::OneForwardOneBackward];

fn cases() -> impl Iterator<Item = (Schedule, usize, usize)> {
    SCHEDULES
        .into_iter()
        .flat_map(|s| (1..=8).flat_map(move |p| (1..=16).map(move |m| (s, p, m))))
}

/// One way between neighbours, first in, first out.
#[derive(Default)]
struct Channel {
    sent: Vec<usize>,
    received: Vec<usize>,
}

/// Where an instruction goes: (channel, position in it). Channel 2 i leads from stage i to i + 1, 2 i + 1 back.
fn post(instruction: Instruction, stage: usize, channels: &mut [Channel]) -> (usize, usize, bool) {
    let (channel, is_send, index) = match instruction {
        SendForward(index) => (2 * stage, true, index),
        RecvForward(index) => (2 * (stage - 1), false, index),
        SendBackward(index) => (2 * (stage - 1) + 1, true, index),
        RecvBackward(index) => (2 * stage + 1, false, index),
        Forward(_) | Backward(_) => unreachable!("not a message"),
    };
    let queue = match is_send {
        true => &mut channels[channel].sent,
        false => &mut channels[channel].received,
    };
    queue.push(index);
    (channel, queue.len() - 1, is_send)
}

fn is_matched(&(channel, position, is_send): &(usize, usize, bool), channels: &[Channel]) -> bool {
    let other = match is_send {
        true => &channels[channel].received,
        false => &channels[channel].sent,
    };
    position < other.len()
}

/// Runs all stages; whether they come to their end. With `batched`, neighbouring messages are posted together.
fn completes(
    schedule: Schedule,
    num_stages: usize,
    num_micro_batches: usize,
    batched: bool,
) -> bool {
    let lists: Vec<Vec<Instruction>> = (0..num_stages)
        .map(|stage| schedule.instructions(stage, num_stages, num_micro_batches))
        .collect();
    let is_compute = |i: &Instruction| matches!(i, Forward(_) | Backward(_));
    let mut channels: Vec<Channel> = (0..2 * num_stages).map(|_| Channel::default()).collect();
    let mut next = vec![0; num_stages];
    let mut posted: Vec<Vec<(usize, usize, bool)>> = vec![Vec::new(); num_stages];
    loop {
        let mut progress = false;
        for stage in 0..num_stages {
            if !posted[stage].is_empty() {
                if !posted[stage].iter().all(|op| is_matched(op, &channels)) {
                    continue;
                }
                next[stage] += posted[stage].len();
                posted[stage].clear();
                progress = true;
            }
            let rest = &lists[stage][next[stage]..];
            let num_computed = rest.iter().take_while(|i| is_compute(i)).count();
            next[stage] += num_computed;
            let messages = rest[num_computed..].iter().take_while(|i| !is_compute(i));
            let limit = if batched { usize::MAX } else { 1 };
            for &message in messages.take(limit) {
                posted[stage].push(post(message, stage, &mut channels));
                progress = true;
            }
            progress |= num_computed > 0;
        }
        if !progress {
            break;
        }
    }
    let all_done = (0..num_stages).all(|stage| next[stage] == lists[stage].len());
    if all_done {
        for channel in &channels {
            assert_eq!(channel.sent, channel.received, "messages in another order");
        }
    }
    all_done
}

#[test]
fn batched_messages_never_deadlock_and_match_in_order() {
    for (schedule, p, m) in cases() {
        assert!(completes(schedule, p, m, true), "{schedule:?} p={p} m={m}");
    }
}

#[test]
fn messages_one_at_a_time_deadlock_in_most_1f1b_cases() {
    let one_by_one = |schedule| {
        let of_schedule = cases().filter(move |(s, ..)| *s == schedule);
        of_schedule
            .filter(|&(s, p, m)| !completes(s, p, m, false))
            .count()
    };
    assert_eq!(one_by_one(Schedule::OneForwardOneBackward), 105);
    assert_eq!(one_by_one(Schedule::GPipe), 0);
}

#[test]
fn each_micro_batch_once_in_order_with_few_in_flight() {
    for (schedule, p, m) in cases() {
        for stage in 0..p {
            let what = format!("{schedule:?} p={p} m={m} stage={stage}");
            let mut in_flight = HashSet::new();
            let mut most = 0;
            let (mut forwards, mut backwards) = (Vec::new(), Vec::new());
            for instruction in schedule.instructions(stage, p, m) {
                match instruction {
                    Forward(index) => {
                        assert!(in_flight.insert(index), "{what}");
                        forwards.push(index);
                    }
                    Backward(index) => {
                        assert!(in_flight.remove(&index), "{what}: backward before forward");
                        backwards.push(index);
                    }
                    _ => {}
                }
                most = most.max(in_flight.len());
            }
            let all: Vec<usize> = (0..m).collect();
            assert_eq!(forwards, all, "{what}");
            assert_eq!(backwards, all, "{what}");
            let limit = match schedule {
                Schedule::GPipe => m,
                Schedule::OneForwardOneBackward => m.min(p - stage),
            };
            assert_eq!(most, limit, "{what}");
        }
    }
}

#[test]
fn each_message_is_received_before_and_sent_after_the_work_on_it() {
    for (schedule, p, m) in cases() {
        for stage in 0..p {
            let list = schedule.instructions(stage, p, m);
            let what = format!("{schedule:?} p={p} m={m} stage={stage}");
            let position = |wanted: Instruction| list.iter().position(|i| *i == wanted);
            for index in 0..m {
                let forward = position(Forward(index)).unwrap();
                let backward = position(Backward(index)).unwrap();
                let (first, last) = (stage == 0, stage + 1 == p);
                let before = |recv, work, absent: bool| match position(recv) {
                    Some(at) => assert!(!absent && at < work, "{what}"),
                    None => assert!(absent, "{what}"),
                };
                let after = |send, work, absent: bool| match position(send) {
                    Some(at) => assert!(!absent && at > work, "{what}"),
                    None => assert!(absent, "{what}"),
                };
                before(RecvForward(index), forward, first);
                after(SendForward(index), forward, last);
                before(RecvBackward(index), backward, last);
                after(SendBackward(index), backward, first);
            }
        }
    }
}
