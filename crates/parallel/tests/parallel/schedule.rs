//! Every schedule over up to 8 ranks, 16 micro-batches and 4 stages a rank, without a model.

use std::collections::{BTreeMap, HashMap, HashSet};

use candle_parallel::{
    Instruction, Instructions, Message, PipelineLayout, Plan, Schedule, StageTimes, Times, Unit,
};

use Instruction::{Backward, Forward, InputGrad, WeightGrad};

use crate::check::message;

/// Forward pass, input gradient and weight gradient.
const TIMES: [[f64; 3]; 4] = [
    [1.0, 1.0, 1.0],
    [1.0, 1.2, 0.8],
    [1.0, 1.5, 0.5],
    [1.0, 0.9, 1.1],
];

#[derive(Clone, Copy, Debug)]
struct Case {
    schedule: Schedule,
    p: usize,
    v: usize,
    m: usize,
}

fn cases() -> impl Iterator<Item = Case> {
    let all = Schedule::ALL.into_iter().flat_map(|schedule| {
        let numbers = (1..=8).flat_map(|p| (1..=4).map(move |v| (p, v)));
        let numbers = numbers.flat_map(|(p, v)| (1..=16).map(move |m| (p, v, m)));
        numbers.map(move |(p, v, m)| Case { schedule, p, v, m })
    });
    all.filter(|it| it.schedule.placement(it.p, it.v).is_ok())
        .filter(|it| it.schedule != Schedule::DualPipeV || it.m >= 2 * it.p)
}

/// A block in each stage.
fn layout(schedule: Schedule, p: usize, v: usize) -> PipelineLayout {
    let ranks = schedule.placement(p, v).unwrap();
    PipelineLayout::new(&vec![1; ranks.len()], &ranks).unwrap()
}

fn plan(Case { schedule, p, v, m }: Case) -> Plan {
    Plan::new(&schedule, &layout(schedule, p, v), m).unwrap()
}

/// Micro-batches of the largest group.
fn group(p: usize, m: usize) -> usize {
    m.div_ceil((m / p).max(1))
}

/// Each unit once on its rank, and nothing before what it needs: seen without the library's check.
#[test]
fn every_unit_once_and_after_what_it_needs() {
    let mut num_cases = 0;
    for case in cases() {
        let plan = plan(case);
        let num_stages = case.p * case.v;
        let mut next = vec![0; case.p];
        let mut done: HashSet<Instruction> = HashSet::new();
        let is_back = |done: &HashSet<Instruction>, unit| {
            done.contains(&Backward(unit)) || done.contains(&InputGrad(unit))
        };
        loop {
            let before = next.clone();
            for (rank, list) in plan.ranks().iter().enumerate() {
                while let Some(&instruction) = list.get(next[rank]) {
                    let unit = instruction.unit();
                    assert_eq!(plan.layout().rank_of(unit.stage), rank, "{case:?}");
                    let at = |stage| Unit { stage, ..unit };
                    let is_ready = match instruction {
                        Forward(_) => {
                            unit.stage == 0 || done.contains(&Forward(at(unit.stage - 1)))
                        }
                        WeightGrad(_) => done.contains(&InputGrad(unit)),
                        _ => {
                            done.contains(&Forward(unit))
                                && (unit.stage + 1 == num_stages
                                    || is_back(&done, at(unit.stage + 1)))
                        }
                    };
                    if !is_ready {
                        break;
                    }
                    assert!(done.insert(instruction), "{case:?}: {instruction} twice");
                    next[rank] += 1;
                }
            }
            if next == before {
                break;
            }
        }
        for stage in 0..num_stages {
            for micro_batch in 0..case.m {
                let unit = Unit { stage, micro_batch };
                assert!(done.contains(&Forward(unit)), "{case:?} {unit:?}");
                let halves = (
                    done.contains(&InputGrad(unit)),
                    done.contains(&WeightGrad(unit)),
                );
                let is_whole = done.contains(&Backward(unit));
                assert_eq!(halves, (!is_whole, !is_whole), "{case:?} {unit:?}");
            }
        }
        num_cases += 1;
    }
    // zb-2p and zbv 128 each, gpipe, 1f1b and zb-h1 512 each, dualpipev those with m >= 2p.
    assert_eq!(num_cases, 2 * 128 + 3 * 512 + 64);
}

/// The most units that rank `rank` may hold.
fn most_held(Case { schedule, p, v, m }: Case, rank: usize) -> usize {
    let (after, ahead) = (p - 1 - rank, (v - 1) * group(p, m));
    let most = match schedule {
        Schedule::GPipe => v * m,
        Schedule::OneForwardOneBackward if v == 1 => after + 1,
        Schedule::OneForwardOneBackward => 2 * after + ahead + 1,
        Schedule::ZeroBubbleH1 => ahead + p,
        Schedule::ZeroBubble2p => 2 * p - 1,
        Schedule::ZeroBubbleV => 2 * p,
        Schedule::DualPipeV => 2 * p + 1,
        other => panic!("{other:?} has no formula here"),
    };
    most.min(v * m)
}

#[test]
fn no_rank_holds_more_than_the_formula_says() {
    let mut reached: BTreeMap<&str, usize> = BTreeMap::new();
    for case in cases() {
        let plan = plan(case);
        for rank in 0..case.p {
            let (peak, most) = (plan.peak(rank), most_held(case, rank));
            assert!(peak <= most, "{case:?} rank {rank}: {peak} > {most}");
            *reached.entry(case.schedule.name()).or_default() += usize::from(peak == most);
        }
    }
    // A bound that nothing reaches says nothing.
    assert_eq!(reached.len(), 6, "{reached:?}");
}

/// The time in which a rank does nothing, in a step whose end all ranks await.
fn bubble(Case { schedule, p, v, .. }: Case, [f, b, w]: [f64; 3]) -> f64 {
    let ahead = (p - 1) as f64;
    match schedule {
        Schedule::GPipe | Schedule::OneForwardOneBackward => ahead * (f + b + w) / v as f64,
        Schedule::ZeroBubbleH1 => ahead * (f + (b - w).max(0.0)) / v as f64,
        Schedule::ZeroBubble2p => ahead * f,
        Schedule::ZeroBubbleV => ahead * f / 2.0,
        // That of interleaved ZB-H1, but for these.
        Schedule::DualPipeV => {
            let exception = DUAL_PIPE_V.iter().find(|it| (it.0, it.1) == (p, [f, b, w]));
            exception.map_or(ahead * (f + (b - w).max(0.0)) / 2.0, |it| it.2)
        }
        other => panic!("{other:?} has no formula here"),
    }
}

/// Ranks, times, and the time in which a rank does nothing: where long input gradients hold up what depends on them.
const DUAL_PIPE_V: [(usize, [f64; 3], f64); 7] = [
    (4, TIMES[2], 3.25),
    (5, TIMES[2], 4.5),
    (6, TIMES[2], 5.75),
    (7, TIMES[1], 4.3),
    (7, TIMES[2], 7.0),
    (8, TIMES[1], 5.1),
    (8, TIMES[2], 8.25),
];

#[test]
fn a_step_takes_the_time_of_the_closed_form() {
    let mut num_compared = 0;
    for case in cases() {
        let is_for_equal_times = matches!(
            case.schedule,
            Schedule::ZeroBubble2p | Schedule::ZeroBubbleV
        );
        if case.m
            < if is_for_equal_times {
                2 * case.p - 1
            } else {
                case.p
            }
        {
            continue;
        }
        for times in TIMES {
            if is_for_equal_times && times != TIMES[0] {
                continue;
            }
            let plan = plan(case);
            let of_rank = StageTimes {
                forward: times[0],
                input_grad: times[1],
                weight_grad: times[2],
            };
            let simulation = plan.simulate(&Times::even(of_rank, plan.layout())).unwrap();
            let expected = case.m as f64 * times.iter().sum::<f64>() + bubble(case, times);
            assert!(
                (simulation.makespan - expected).abs() < 1e-9 * expected,
                "{case:?} {times:?}: {} instead of {expected}",
                simulation.makespan
            );
            let idle = simulation.idle_share(case.p - 1);
            assert!(
                (idle - bubble(case, times) / expected).abs() < 1e-9,
                "{case:?}"
            );
            num_compared += 1;
        }
    }
    assert!(num_compared > 2500, "{num_compared}");
}

/// On each way between two ranks messages are sent in the order in which they are asked for; and with the channels that there are no rank
/// waits for ever, whatever the number of receives that are posted ahead.
#[test]
fn messages_come_in_order_and_nobody_waits_for_ever() {
    for case in cases() {
        let plan = plan(case);
        for ahead in [0, 1, 5] {
            plan.check_ends(ahead, |link| link).unwrap();
            let mut sent: BTreeMap<_, Vec<Unit>> = BTreeMap::new();
            let mut asked: BTreeMap<_, Vec<Unit>> = BTreeMap::new();
            for rank in 0..case.p {
                for instruction in plan.with_messages(rank, ahead) {
                    let unit = instruction.unit();
                    let beside = |what, is_next: bool| {
                        let forward = (what == Message::Activation) == is_next;
                        let stage = if forward {
                            unit.stage + 1
                        } else {
                            unit.stage - 1
                        };
                        Unit { stage, ..unit }
                    };
                    let rank_of = |unit: Unit| plan.layout().rank_of(unit.stage);
                    match instruction {
                        Instruction::Send(_, what) => {
                            let to = beside(what, true);
                            let link = (rank, rank_of(to), what);
                            sent.entry(link).or_default().push(to);
                        }
                        Instruction::Recv(_, what) => {
                            let from = rank_of(beside(what, false));
                            asked.entry((from, rank, what)).or_default().push(unit);
                        }
                        _ => {}
                    }
                }
            }
            assert_eq!(sent, asked, "{case:?}");
            let num_sent = sent.values().map(Vec::len).sum::<usize>();
            let ranks = plan.layout().ranks();
            let num_borders = ranks.windows(2).filter(|ends| ends[0] != ends[1]).count();
            assert_eq!(num_sent, 2 * num_borders * case.m, "{case:?}");
        }
    }
}

/// Fewer channels would not do: with one for both kinds of message of a direction, or one for both directions of a kind, ranks wait for
/// each other in some cases.
#[test]
fn fewer_channels_end_in_waiting() {
    let (mut kinds, mut directions) = (HashMap::new(), HashMap::new());
    for case in cases() {
        let plan = plan(case);
        let name = match case.schedule {
            Schedule::OneForwardOneBackward if case.v > 1 => "interleaved",
            other => other.name(),
        };
        let merged = plan.check_ends(1, |(from, to, _)| (from, to));
        *kinds.entry(name).or_insert(0) += usize::from(merged.is_err());
        let merged = plan.check_ends(1, |(from, to, what)| (from.min(to), from.max(to), what));
        *directions.entry(name).or_insert(0) += usize::from(merged.is_err());
        if let Err(err) = merged {
            let said = err.to_string();
            assert!(
                said.contains("ranks of the pipeline wait for what nobody gives them, rank "),
                "{said}"
            );
        }
    }
    for name in ["interleaved", "zbv", "dualpipev"] {
        assert!(
            kinds[name] > 0 && directions[name] > 0,
            "{name}: {kinds:?} {directions:?}"
        );
    }
    assert_eq!((kinds["1f1b"], directions["1f1b"]), (0, 0));
}

/// What is said of the lists of four micro-batches of 1f1b or zb-h1 on two ranks when one list was changed.
fn refusal(schedule: Schedule, rank: usize, change: impl Fn(&mut Vec<Instruction>)) -> String {
    let layout = layout(schedule, 2, 1);
    let lists = (0..2).map(|rank| schedule.of_rank(&layout, rank, 4).unwrap());
    let mut lists: Vec<_> = lists.collect();
    Plan::of_lists(&layout, 4, lists.clone()).unwrap();
    change(&mut lists[rank]);
    message(Plan::of_lists(&layout, 4, lists))
}

fn place(list: &[Instruction], wanted: Instruction) -> usize {
    list.iter().position(|it| *it == wanted).unwrap()
}

const fn unit(stage: usize, micro_batch: usize) -> Unit {
    Unit { stage, micro_batch }
}

const F1B: Schedule = Schedule::OneForwardOneBackward;
const H1: Schedule = Schedule::ZeroBubbleH1;

#[test]
fn an_instruction_that_is_there_twice_is_refused() {
    let said = refusal(F1B, 1, |list| {
        let place = place(list, Forward(unit(1, 2)));
        list.insert(place + 1, Forward(unit(1, 2)));
    });
    let expected = "the forward pass of micro-batch 2 in stage 1 on rank 1 of the pipeline after the forward pass";
    assert!(said.contains(expected), "{said}");
}

#[test]
fn an_instruction_that_is_missing_is_refused() {
    let said = refusal(H1, 1, |list| {
        let place = place(list, WeightGrad(unit(1, 3)));
        list.remove(place);
    });
    let expected = "does not have the weight gradient of micro-batch 3 in stage 1 on rank 1";
    assert!(said.contains(expected), "{said}");
}

#[test]
fn an_instruction_on_a_wrong_rank_is_refused() {
    let said = refusal(F1B, 0, |list| list.push(Forward(unit(1, 0))));
    assert!(
        said.contains("on rank 0 of the pipeline; expected units of its stages, [0]"),
        "{said}"
    );
}

#[test]
fn a_micro_batch_that_there_is_not_is_refused() {
    let said = refusal(F1B, 0, |list| list.push(Forward(unit(0, 4))));
    assert!(said.contains("expected micro-batches below 4"), "{said}");
}

#[test]
fn swapped_instructions_are_refused() {
    let said = refusal(H1, 1, |list| {
        let (first, second) = (InputGrad(unit(1, 1)), WeightGrad(unit(1, 1)));
        let (first, second) = (place(list, first), place(list, second));
        list.swap(first, second);
    });
    assert!(
        said.contains("the weight gradient of micro-batch 1 in stage 1"),
        "{said}"
    );
    // Each rank's list is whole, and the other rank needs the messages in another order.
    let said = refusal(F1B, 0, |list| {
        let (first, second) = (Forward(unit(0, 0)), Forward(unit(0, 1)));
        let (first, second) = (place(list, first), place(list, second));
        list.swap(first, second);
    });
    assert!(
        said.contains("rank 0 of the pipeline send to rank 1 in another order"),
        "{said}"
    );
    // The order of each kind of message is right, and both ranks wait: the gradient of micro-batch 0 comes after its own output.
    let said = refusal(F1B, 1, |list| {
        list.sort_by_key(|it| matches!(it, Backward(_)))
    });
    assert!(
        said.contains("ranks of the pipeline wait for what nobody gives them"),
        "{said}"
    );
}

#[test]
fn halves_beside_a_whole_backward_pass_are_refused() {
    let said = refusal(F1B, 1, |list| list.push(WeightGrad(unit(1, 0))));
    let expected = "the weight gradient of micro-batch 0 in stage 1 on rank 1 of the pipeline after the backward pass";
    assert!(said.contains(expected), "{said}");
    let said = refusal(F1B, 1, |list| list.push(InputGrad(unit(1, 0))));
    assert!(
        said.contains("the input gradient of micro-batch 0 in stage 1"),
        "{said}"
    );
}

/// As many instructions of each kind as there should be, whose micro-batches have the right sum: 0, 1, 2 and 3 against 1, 1, 1 and 3, and one with
/// a whole backward pass and an input gradient where another one has none.
#[test]
fn numbers_and_sums_that_hide_a_mistake_are_refused() {
    let said = refusal(F1B, 1, |list| {
        for instruction in list.iter_mut() {
            *instruction = match *instruction {
                Forward(it) if it.micro_batch % 2 == 0 && it.micro_batch < 3 => Forward(unit(1, 1)),
                other => other,
            };
        }
    });
    assert!(said.contains("before its forward pass"), "{said}");
    let said = refusal(H1, 1, |list| {
        let at = place(list, WeightGrad(unit(1, 0)));
        list[at] = Backward(unit(1, 1));
    });
    assert!(said.contains("micro-batch 1 in stage 1"), "{said}");
}

/// `zb1p_2rank_2stagep_compute.csv` of torch's tests as a description: interleaved ZB-H1 of 8 micro-batches on two ranks with two stages each, in the
/// letters of earlier versions. Warm-up, then forward pass, input gradient and weight gradient in turn.
#[test]
fn interleaved_zb_h1_is_that_of_torch() {
    let row = |forward: &str, warm_up: usize, backward: &str, lag: usize| {
        let forward: Vec<&str> = forward.split(' ').collect();
        let backward: Vec<&str> = backward.split(' ').collect();
        let mut cells: Vec<String> = forward[..warm_up].iter().map(ToString::to_string).collect();
        for (index, unit) in backward.iter().enumerate() {
            cells.extend(forward.get(warm_up + index).map(ToString::to_string));
            cells.push(unit.replace('x', "B"));
            let late = index.checked_sub(lag).map(|late| backward[late]);
            cells.extend(late.map(|late| late.replace('x', "W")));
        }
        let rest = &backward[backward.len() - lag..];
        cells.extend(rest.iter().map(|late| late.replace('x', "W")));
        cells.join(",")
    };
    let of = |first: usize| {
        let units = |letter: char, turns: [usize; 2]| {
            let cells = (0..4).flat_map(|pair| {
                turns.into_iter().flat_map(move |stage| {
                    (2 * pair..2 * pair + 2).map(move |index| format!("{stage}{letter}{index}"))
                })
            });
            cells.collect::<Vec<_>>().join(" ")
        };
        (
            units('F', [first, first + 2]),
            units('x', [first + 2, first]),
        )
    };
    let ((f0, b0), (f1, b1)) = (of(0), of(1));
    let text = format!("{}\n,{}\n", row(&f0, 3, &b0, 0), row(&f1, 2, &b1, 1));
    let read = Plan::from_csv(&text).unwrap();
    let case = Case {
        schedule: H1,
        p: 2,
        v: 2,
        m: 8,
    };
    assert_eq!(read.ranks(), plan(case).ranks());
    assert_eq!(Plan::from_csv(&read.to_csv()).unwrap(), read);
}

/// `dualpipev_4rank_10mb.csv` of torch's tests as a description: the phases of DualPipeV with the numbers of ten micro-batches on four ranks.
#[test]
fn dualpipev_is_that_of_torch() {
    // Of each rank phases, how often and what: F, I, B and W of its first stage (0) and second stage (1), W of whichever waits longest, and
    // pairs that torch runs at the same time.
    let phases: [[(usize, &str); 8]; 4] = [
        [
            (6, "F0"),
            (1, "F0 F1"),
            (3, "I1 W F1"),
            (3, "F0+B1 F1+B0"),
            (3, "B1 F1+B0"),
            (1, "B1 I0"),
            (3, "W I0"),
            (1, "W"),
        ],
        [
            (4, "F0"),
            (2, "F0 F1"),
            (2, "I1 W F1"),
            (4, "F0+B1 F1+B0"),
            (2, "B1 F1+B0"),
            (1, "B1 B0 I1 I0"),
            (2, "W I0"),
            (2, "W"),
        ],
        [
            (2, "F0"),
            (3, "F0 F1"),
            (1, "I1 W F1"),
            (5, "F0+B1 F1+B0"),
            (1, "B1 F1+B0"),
            (1, "B1 B0 B1 I0 I1 I0"),
            (1, "W I0"),
            (3, "W"),
        ],
        [
            (0, "F0"),
            (4, "F0 F1"),
            (0, "I1 W F1"),
            (6, "F0+B1 F1+B0"),
            (0, "B1 F1+B0"),
            (1, "B1 B0 B1 B0 I1 I0 I1 I0"),
            (0, "W I0"),
            (4, "W"),
        ],
    ];
    let rows = phases.iter().enumerate().map(|(rank, phases)| {
        let stages = [rank, 7 - rank];
        let (mut forwards, mut backwards) = ([0; 2], [0; 2]);
        let mut waiting = std::collections::VecDeque::new();
        let mut cell = |what: &str| {
            let (letter, which) = what.split_at(1);
            let Ok(which) = which.parse::<usize>() else {
                let longest: String = waiting.pop_front().unwrap();
                return longest.replace('I', "W");
            };
            let next = if letter == "F" {
                &mut forwards
            } else {
                &mut backwards
            };
            let text = format!("{}{letter}{}", stages[which], next[which]);
            next[which] += 1;
            if letter == "I" {
                waiting.push_back(text.clone());
            }
            text
        };
        let mut cells = Vec::new();
        for (times, what) in phases {
            for _ in 0..*times {
                for what in what.split(' ') {
                    cells.push(match what.split_once('+') {
                        Some((a, b)) => format!("({};{})OVERLAP_F_B", cell(a), cell(b)),
                        None => cell(what),
                    });
                }
            }
        }
        cells.join(",")
    });
    let text = rows.collect::<Vec<_>>().join("\n");
    assert!(
        text.starts_with("0F0,0F1,0F2,0F3,0F4,0F5,0F6,7F0,7I0,7W0,7F1"),
        "{text}"
    );
    let case = Case {
        schedule: Schedule::DualPipeV,
        p: 4,
        v: 2,
        m: 10,
    };
    assert_eq!(Plan::from_csv(&text).unwrap(), plan(case));
}

#[test]
fn a_csv_that_is_no_schedule_is_an_error_with_its_place() {
    for (text, expected) in [
        ("0F0,0X0", "row 1, column 2: \"0X0\" is no instruction"),
        ("0F0,F0", "row 1, column 2"),
        ("0F0,0B", "row 1, column 2"),
        ("0F0\n1F0,(1F1;1B0)TOGETHER", "row 2, column 2"),
        ("0F99999999999999999999", "row 1, column 1"),
        ("0F4000000000", "row 1, column 1"),
        (
            "0F0,0B0\n0F1,0B1",
            "row 2 has the forward pass of micro-batch 1 in stage 0, and row 1",
        ),
        ("0F0,0B0\n2F0,2B0", "no row has work of stage 1"),
        ("", "there is no row of instructions"),
        (
            "\n0F0,0B0\n\n0F1,0B1",
            "row 4 has the forward pass of micro-batch 1 in stage 0, and row 2",
        ),
        ("(0F0;0B0;0F1;0B1)OVERLAP_F_B", "row 1, column 1"),
        ("0F0,0SEND_F+1", "row 1, column 2"),
        (
            "0F0,0B0,0F2,0B2",
            "does not have the forward pass of micro-batch 1",
        ),
        (
            "0F0,0I0,0W0,0B0",
            "the backward pass of micro-batch 0 in stage 0",
        ),
    ] {
        let said = message(Plan::from_csv(text));
        assert!(said.contains(expected), "{text:?}: {said}");
    }
}

/// Of each stage the passes of all micro-batches follow each other, in their order.
#[test]
fn gpipe_takes_all_micro_batches_through_a_stage_before_the_next() {
    for (p, v, m) in [(1, 4, 3), (2, 3, 5), (3, 2, 2)] {
        let plan = plan(Case {
            schedule: Schedule::GPipe,
            p,
            v,
            m,
        });
        for (rank, list) in plan.ranks().iter().enumerate() {
            let stages: Vec<usize> = plan.layout().stages_of(rank).collect();
            let units = |stage: &usize| {
                let stage = *stage;
                (0..m).map(move |micro_batch| Unit { stage, micro_batch })
            };
            let forward = stages.iter().flat_map(units).map(Forward);
            let backward = stages.iter().rev().flat_map(units).map(Backward);
            let expected: Vec<Instruction> = forward.chain(backward).collect();
            assert_eq!(*list, expected, "p {p}, v {v}, m {m}, rank {rank}");
        }
    }
}

#[test]
fn numbers_that_a_schedule_is_not_made_for_are_errors_with_the_next_that_it_is() {
    for (schedule, v, expected) in [
        (
            Schedule::ZeroBubble2p,
            3,
            "has 1 stage on each rank, got 3\nhint: virtual stages 1 (--virtual-stages 1)",
        ),
        (
            Schedule::ZeroBubbleV,
            1,
            "has 2 stages on each rank, got 1\nhint: virtual stages 2 (--virtual-stages 2)",
        ),
        (Schedule::DualPipeV, 4, "has 2 stages on each rank, got 4"),
        (
            Schedule::OneForwardOneBackward,
            0,
            "has 1 stage or more on each rank, got 0",
        ),
    ] {
        let said = message(schedule.placement(4, v));
        assert!(said.contains(expected), "{said}");
    }
    let v_form = layout(Schedule::DualPipeV, 4, 2);
    let said = message(Plan::new(&Schedule::DualPipeV, &v_form, 7));
    assert!(
        said.contains("needs two micro-batches for each rank: 8 or more for pp 4, got 7\nhint: "),
        "{said}"
    );
    let said = message(Plan::new(&Schedule::ZeroBubbleV, &layout(H1, 4, 2), 7));
    assert!(
        said.contains("not what the schedule zbv is made for"),
        "{said}"
    );
    let said = message(Plan::new(&H1, &layout(H1, 2, 1), 0));
    assert!(
        said.contains("without micro-batches; expected 1 or more"),
        "{said}"
    );
    let mut times = Times::even(
        StageTimes {
            forward: 1.0,
            input_grad: 1.0,
            weight_grad: f64::NAN,
        },
        &v_form,
    );
    let plan = Plan::new(&Schedule::DualPipeV, &v_form, 8).unwrap();
    assert!(message(plan.simulate(&times)).contains("expected 0 or more"));
    times.stages.pop();
    assert!(message(plan.simulate(&times)).contains("times of 7 stages; expected those of 8"));
}
