use candle_trainer::{LrDecay, LrSchedule};

use crate::assert_error;

#[test]
fn warm_up_then_cosine() {
    let schedule = LrSchedule {
        lr: 1e-3,
        min_lr_ratio: 0.1,
        warmup_steps: 2,
        num_steps: 10,
        decay: LrDecay::Cosine,
        ramp: Vec::new(),
    };
    // From Python: lr*(s+1)/w, then lo + (lr - lo) * (1 + math.cos(math.pi * (s - w) / max(1, steps - w))) / 2.
    let expected = [
        0.0005,
        0.001,
        0.001,
        9.65745789630079e-4,
        0.0008681980515339465,
        0.0007222075445642905,
        0.00055,
        3.777924554357096e-4,
        0.0002318019484660536,
        1.34254210369921e-4,
    ];
    for (step, expected) in expected.into_iter().enumerate() {
        assert!(
            (schedule.at(step) - expected).abs() < 1e-15,
            "step {step}: {}",
            schedule.at(step)
        );
    }
    assert_eq!(schedule.at(10), 1e-4);
    assert_eq!(schedule.at(1000), 1e-4);
}

#[test]
fn corner_cases() {
    let schedule = |warmup_steps, num_steps| LrSchedule {
        lr: 2.0,
        min_lr_ratio: 0.0,
        warmup_steps,
        num_steps,
        decay: LrDecay::Cosine,
        ramp: Vec::new(),
    };
    assert_eq!(schedule(0, 1).at(0), 2.0);
    assert_eq!(schedule(4, 3).at(2), 1.5);
    assert_eq!(schedule(3, 3).at(3), 2.0);
    assert_eq!(schedule(0, 0).at(0), 2.0);
}

#[test]
fn impossible_numbers_are_refused() {
    let schedule = |lr, min_lr_ratio| {
        LrSchedule {
            lr,
            min_lr_ratio,
            warmup_steps: 0,
            num_steps: 1,
            decay: LrDecay::Cosine,
            ramp: Vec::new(),
        }
        .validate()
    };
    schedule(1e-3, 1.0).unwrap();
    assert_error(schedule(f64::NAN, 0.1), &["lr is NaN"]);
    assert_error(schedule(-1.0, 0.1), &["lr is -1"]);
    assert_error(schedule(1.0, 1.5), &["min_lr_ratio is 1.5"]);
    assert_error(schedule(1.0, f64::NAN), &["min_lr_ratio is NaN"]);
}

#[test]
fn other_decays() {
    let rates = |decay| {
        let schedule = LrSchedule {
            lr: 2.0,
            min_lr_ratio: 0.5,
            warmup_steps: 2,
            num_steps: 10,
            decay,
            ramp: Vec::new(),
        };
        schedule.validate().unwrap();
        (0..12).map(|step| schedule.at(step)).collect::<Vec<_>>()
    };
    let linear = [
        1.0, 2.0, 2.0, 1.875, 1.75, 1.625, 1.5, 1.375, 1.25, 1.125, 1.0, 1.0,
    ];
    assert_eq!(rates(LrDecay::Linear), linear);
    let constant = [vec![1.0], vec![2.0; 11]].concat();
    assert_eq!(rates(LrDecay::Constant), constant);
    let wsd = [vec![1.0], vec![2.0; 6], vec![1.75, 1.5, 1.25, 1.0, 1.0]].concat();
    assert_eq!(rates(LrDecay::Wsd(0.4)), wsd);
    assert_eq!(rates(LrDecay::Wsd(1.0)), linear);
    assert_eq!(rates(LrDecay::Wsd(0.0))[..10], constant[..10]);
    let schedule = LrSchedule {
        lr: 1.0,
        min_lr_ratio: 0.0,
        warmup_steps: 0,
        num_steps: 1,
        decay: LrDecay::Wsd(1.5),
        ramp: Vec::new(),
    };
    assert_error(schedule.validate(), &["a WSD schedule takes 1.5"]);
}

#[test]
fn steps_of_a_batch_ramp_count_as_the_parts_that_they_are() {
    let plain = LrSchedule {
        lr: 2.0,
        min_lr_ratio: 0.0,
        warmup_steps: 1,
        num_steps: 4,
        decay: LrDecay::Linear,
        ramp: Vec::new(),
    };
    // Steps of a quarter, a quarter, a half and a whole batch, and three of whole ones.
    let grown = LrSchedule {
        num_steps: 6,
        ramp: vec![0.25, 0.5, 1.0, 2.0],
        ..plain.clone()
    };
    let rates: Vec<f64> = (0..6).map(|step| grown.at(step)).collect();
    assert_eq!(rates[..3], [0.5, 1.0, 2.0]);
    let same: Vec<f64> = (1..4).map(|step| plain.at(step)).collect();
    assert_eq!(rates[3..], same);
    assert_eq!((grown.progress(6), grown.at(6)), (4.0, plain.at(4)));
}

#[test]
fn without_a_ramp_no_bit_depends_on_it() {
    // A product with a third that is rounded up, over the highest rate.
    let schedule = LrSchedule {
        lr: 3e-3,
        min_lr_ratio: 0.1,
        warmup_steps: 3,
        num_steps: 20,
        decay: LrDecay::Wsd(0.33),
        ramp: Vec::new(),
    };
    assert_eq!(schedule.at(2), 3e-3 * 3.0 / 3.0);
    assert!(schedule.at(2) > 3e-3);
    assert_eq!(schedule.at(14), 3e-4 + (3e-3 - 3e-4) * (1.0 - 1.0 / 7.0));
    // A run that ends within its ramp comes to its lowest rate, too.
    let short = LrSchedule {
        warmup_steps: 0,
        num_steps: 3,
        ramp: vec![0.1, 0.2, 0.3, 0.4],
        decay: LrDecay::Linear,
        ..schedule
    };
    assert!((short.at(3) - 3e-4).abs() < 1e-12);
    assert!((short.at(1) - (3e-4 + 2.7e-3 * 2.0 / 3.0)).abs() < 1e-12);
}
