use candle_trainer::{Sampler, SamplingConfig};

use crate::assert_error;

fn sampler(temperature: f64, top_p: f64, seed: u64) -> Sampler {
    Sampler::new(SamplingConfig {
        temperature,
        top_p,
        seed,
        ..SamplingConfig::default()
    })
    .unwrap()
}

/// How often each of `logits.len()` tokens is drawn.
fn counts(mut sampler: Sampler, logits: &[f32], num_draws: usize) -> Vec<usize> {
    let mut counts = vec![0; logits.len()];
    for _ in 0..num_draws {
        counts[sampler.sample(logits, &[]).unwrap() as usize] += 1;
    }
    counts
}

#[test]
fn temperature_zero_takes_the_first_of_the_best() {
    let mut greedy = sampler(0.0, 1.0, 0);
    assert_eq!(greedy.sample(&[0.0, 3.0, -1.0, 3.0], &[]).unwrap(), 1);
    assert_eq!(greedy.sample(&[f32::NEG_INFINITY, -5.0], &[]).unwrap(), 1);
}

#[test]
fn draws_follow_the_probabilities() {
    // p = 0.5, 0.25, 0.25 and 0; at temperature 0.5 the squares: 2/3, 1/6, 1/6.
    let logits = [2f32.ln(), 0.0, 0.0, f32::NEG_INFINITY];
    for (temperature, expected) in [
        (1.0, [0.5, 0.25, 0.25]),
        (0.5, [2.0 / 3.0, 1.0 / 6.0, 1.0 / 6.0]),
    ] {
        let counts = counts(sampler(temperature, 1.0, 3), &logits, 20_000);
        for (count, p) in counts.iter().zip(expected) {
            assert!((*count as f64 / 20_000.0 - p).abs() < 0.02, "{counts:?}");
        }
        assert_eq!(counts[3], 0);
    }
}

#[test]
fn top_p_keeps_the_smallest_set_that_reaches_it() {
    // p = 0.1, 0.6, 0.3.
    let logits = [0.1f32.ln(), 0.6f32.ln(), 0.3f32.ln()];
    let drawn = |top_p| {
        counts(sampler(1.0, top_p, 1), &logits, 500)
            .iter()
            .map(|c| *c > 0)
            .collect::<Vec<_>>()
    };
    assert_eq!(drawn(0.5), [false, true, false]);
    assert_eq!(drawn(0.7), [false, true, true]);
    assert_eq!(drawn(0.95), [true, true, true]);
    assert_eq!(drawn(1e-9), [false, true, false]);
}

/// As in transformers: top-k first, with those that are as likely as the last, and top-p of what is left.
#[test]
fn top_k_keeps_the_most_likely_and_top_p_is_of_these() {
    let drawn = |probabilities: [f32; 4], top_k, top_p| {
        let sampler = Sampler::new(SamplingConfig {
            temperature: 1.0,
            top_k,
            top_p,
            seed: 2,
            ..SamplingConfig::default()
        });
        let counts = counts(sampler.unwrap(), &probabilities.map(f32::ln), 500);
        counts.iter().map(|c| *c > 0).collect::<Vec<_>>()
    };
    let falling = [0.1, 0.2, 0.4, 0.3];
    assert_eq!(drawn(falling, 1, 1.0), [false, false, true, false]);
    assert_eq!(drawn(falling, 3, 1.0), [false, true, true, true]);
    assert_eq!(drawn(falling, 0, 1.0), [true; 4]);
    assert_eq!(drawn(falling, 9, 1.0), [true; 4]);
    // Of two tokens 4/7 and 3/7.
    assert_eq!(drawn(falling, 2, 0.55), [false, false, true, false]);
    assert_eq!(drawn(falling, 2, 0.6), [false, false, true, true]);
    assert_eq!(
        drawn([0.1, 0.4, 0.4, 0.1], 1, 1.0),
        [false, true, true, false]
    );
}

#[test]
fn tokens_that_were_there_are_penalized_once() {
    let mut sampler = Sampler::new(SamplingConfig {
        repetition_penalty: 2.0,
        ..SamplingConfig::default()
    })
    .unwrap();
    for (logits, earlier, chosen) in [
        ([2.0, 1.5], &[][..], 0),
        ([2.0, 1.5], &[0], 1),
        ([2.0, 0.9], &[0, 0, 0], 0),
        ([-1.0, -1.5], &[0], 1),
        ([2.0, 1.5], &[0, 1, 7], 0),
    ] {
        assert_eq!(
            sampler.sample(&logits, earlier).unwrap(),
            chosen,
            "{logits:?} {earlier:?}"
        );
    }
}

#[test]
fn a_seed_determines_the_tokens() {
    let logits: Vec<f32> = (0..50).map(|i| (i % 7) as f32 * 0.3).collect();
    let tokens = |seed| {
        let mut sampler = sampler(0.8, 0.9, seed);
        (0..40)
            .map(|_| sampler.sample(&logits, &[]).unwrap())
            .collect::<Vec<_>>()
    };
    assert_eq!(tokens(5), tokens(5));
    assert_ne!(tokens(5), tokens(6));
}

#[test]
fn bad_numbers_are_refused() {
    for temperature in [0.0, 1.0] {
        let mut sampler = sampler(temperature, 1.0, 0);
        assert_error(
            sampler.sample(&[0.0, f32::NAN], &[]),
            &["token 1 is NaN", "hint:"],
        );
        assert_error(sampler.sample(&[f32::INFINITY], &[]), &["token 0 is inf"]);
        assert_error(
            sampler.sample(&[f32::NEG_INFINITY; 3], &[]),
            &["none of the 3 tokens"],
        );
        assert_error(sampler.sample(&[], &[]), &["none of the 0 tokens"]);
        // The smallest numbers there are still give a token.
        assert_eq!(sampler.sample(&[-1e30, -2e30], &[]).unwrap(), 0);
    }
    let new = |temperature, top_p| {
        Sampler::new(SamplingConfig {
            temperature,
            top_p,
            ..SamplingConfig::default()
        })
    };
    assert_error(new(-1.0, 1.0), &["temperature is -1"]);
    assert_error(new(f64::NAN, 1.0), &["temperature is NaN"]);
    assert_error(new(1.0, 0.0), &["top_p is 0"]);
    assert_error(new(1.0, 1.1), &["top_p is 1.1"]);
    let penalized = Sampler::new(SamplingConfig {
        repetition_penalty: 0.0,
        ..SamplingConfig::default()
    });
    assert_error(penalized, &["repetition_penalty is 0"]);
}
