use candle_data::{EncodedRecord, Overlong, RecordKind, SampleConfig, Samples, Tokens};
use candle_ops::IGNORE_INDEX;

use crate::assert_error;

/// Records of these lengths with ids 1000 r + i, all of which are learned but the first.
fn tokens(kind: RecordKind, lens: &[u32]) -> Tokens {
    let records = lens.iter().zip(1..).map(|(&len, record)| EncodedRecord {
        kind,
        ids: (0..len).map(|index| 1000 * record + index).collect(),
        has_loss: (0..len).map(|index| index > 0).collect(),
    });
    Tokens::from_records(&records.collect::<Vec<_>>()).unwrap()
}

fn ids(samples: &Samples) -> Vec<Vec<u32>> {
    let samples = (0..samples.len()).map(|index| samples.get(index).unwrap().input_ids);
    samples.collect()
}

#[test]
fn texts_are_cut_without_a_loss_and_what_is_left_of_them_is_packed() {
    let tokens = tokens(RecordKind::Text, &[10, 3, 4, 9]);
    let samples = Samples::new(&tokens, SampleConfig::new(4)).unwrap();
    // Of the last text one token is left, which has no target.
    let want: [&[u32]; 6] = [
        &[1000, 1001, 1002, 1003],
        &[1004, 1005, 1006, 1007],
        &[1008, 1009],
        &[2000, 2001, 2002],
        &[3000, 3001, 3002, 3003],
        &[4000, 4001, 4002, 4003],
    ];
    assert_eq!(ids(&samples)[..6], want);
    assert_eq!(ids(&samples)[6..], [[4004, 4005, 4006, 4007]]);
    let whole = Samples::new(&tokens, SampleConfig::new(6)).unwrap();
    assert_eq!(
        ids(&whole),
        [
            vec![1000, 1001, 1002, 1003, 1004, 1005],
            vec![1006, 1007, 1008, 1009],
            vec![2000, 2001, 2002, 4006, 4007, 4008],
            vec![3000, 3001, 3002, 3003],
            vec![4000, 4001, 4002, 4003, 4004, 4005],
        ]
    );
    let third = whole.get(2).unwrap();
    assert_eq!(
        third.targets,
        [2001, 2002, IGNORE_INDEX, 4007, 4008, IGNORE_INDEX]
    );
    assert_eq!(third.document_starts, [0, 0, 0, 3, 3, 3]);
    assert_eq!(third.has_loss, [false, true, true, true, true, true]);
    assert_eq!(third.piece_lens, [3, 3]);
    // Every token but the first of each text is a target once.
    let mut targets: Vec<u32> = (0..whole.len())
        .flat_map(|index| whole.get(index).unwrap().targets)
        .collect();
    targets.retain(|&id| id != IGNORE_INDEX);
    targets.sort_unstable();
    let want: Vec<u32> = [(1, 10), (2, 3), (3, 4), (4, 9)]
        .iter()
        .flat_map(|&(text, len)| 1000 * text + 1..1000 * text + len)
        .collect();
    assert_eq!(targets, want);
}

#[test]
fn records_are_packed_first_fit_or_each_alone() {
    let tokens = tokens(RecordKind::Whole, &[5, 6, 3, 2, 8, 2]);
    let lens = |config: SampleConfig| {
        let samples = Samples::new(&tokens, config).unwrap();
        let lens = (0..samples.len()).map(|index| samples.get(index).unwrap().piece_lens);
        lens.collect::<Vec<_>>()
    };
    let packed = SampleConfig::new(8);
    assert_eq!(
        lens(packed.clone()),
        [vec![5, 3], vec![6, 2], vec![8], vec![2]]
    );
    let alone = SampleConfig {
        packing: false,
        ..packed.clone()
    };
    assert_eq!(lens(alone), [[5], [6], [3], [2], [8], [2]]);
    let unmasked = SampleConfig {
        document_mask: false,
        ..packed
    };
    let first = Samples::new(&tokens, unmasked).unwrap().get(0).unwrap();
    assert_eq!(first.document_starts, [0; 8]);
    assert_eq!(first.targets[4], IGNORE_INDEX);
}

#[test]
fn first_fit_is_that_of_the_slow_search() {
    let mut seed = 12345u32;
    let mut random = |below: u32| {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (seed >> 8) % below
    };
    for num_records in [1, 2, 3, 7, 64, 201] {
        let lens: Vec<u32> = (0..num_records).map(|_| 2 + random(30)).collect();
        let mut bins: Vec<Vec<usize>> = Vec::new();
        for &len in &lens {
            let fits = |bin: &Vec<usize>| bin.iter().sum::<usize>() + len as usize <= 31;
            match bins.iter().position(fits) {
                Some(bin) => bins[bin].push(len as usize),
                None => bins.push(vec![len as usize]),
            }
        }
        let samples =
            Samples::new(&tokens(RecordKind::Whole, &lens), SampleConfig::new(31)).unwrap();
        let packed: Vec<Vec<usize>> = (0..samples.len())
            .map(|index| samples.get(index).unwrap().piece_lens)
            .collect();
        assert_eq!(packed, bins);
    }
}

#[test]
fn records_that_are_too_long_are_cut_left_out_or_an_error() {
    let tokens = tokens(RecordKind::Whole, &[3, 9, 2]);
    let samples = |overlong| {
        let config = SampleConfig {
            overlong,
            packing: false,
            ..SampleConfig::new(4)
        };
        Samples::new(&tokens, config)
    };
    let cut = samples(Overlong::Truncate).unwrap();
    assert_eq!(
        ids(&cut),
        [
            vec![1000, 1001, 1002],
            vec![2000, 2001, 2002, 2003],
            vec![3000, 3001]
        ]
    );
    assert_eq!(
        cut.get(1).unwrap().targets,
        [2001, 2002, 2003, IGNORE_INDEX]
    );
    assert_eq!(cut.num_overlong(), 1);
    let dropped = samples(Overlong::Drop).unwrap();
    assert_eq!(ids(&dropped), [vec![1000, 1001, 1002], vec![3000, 3001]]);
    assert_error(
        samples(Overlong::Error),
        &["record 2", "9 tokens", "sequence of 4", "hint:"],
    );
}

#[test]
fn a_record_whose_targets_are_cut_off_is_left_out_and_nothing_left_is_an_error() {
    let prompt = EncodedRecord {
        kind: RecordKind::Whole,
        ids: (0..9).collect(),
        has_loss: (0..9).map(|index| index > 5).collect(),
    };
    let tokens = Tokens::from_records(&[prompt]).unwrap();
    assert!(Samples::new(&tokens, SampleConfig::new(7)).is_ok());
    assert_error(
        Samples::new(&tokens, SampleConfig::new(6)),
        &[
            "nothing to learn is left",
            "1 records",
            "1 are longer than 6",
        ],
    );
    assert_error(
        Samples::new(&Tokens::from_ids(vec![]).unwrap(), SampleConfig::new(6)),
        &["nothing to learn is left"],
    );
}

#[test]
fn a_weight_is_how_often_the_samples_of_a_part_are_in_an_epoch() {
    let tokens = tokens(RecordKind::Whole, &[3; 10]);
    let count = |weight: f64| {
        let config = SampleConfig {
            weights: vec![weight],
            packing: false,
            ..SampleConfig::new(4)
        };
        let firsts: Vec<u32> = ids(&Samples::new(&tokens, config).unwrap())
            .iter()
            .map(|ids| ids[0] / 1000)
            .collect();
        let mut counts = vec![0; 10];
        for first in &firsts {
            counts[*first as usize - 1] += 1;
        }
        counts.sort_unstable();
        counts
    };
    assert_eq!(count(1.0), [1; 10]);
    assert_eq!(count(0.3), [0, 0, 0, 0, 0, 0, 0, 1, 1, 1]);
    assert_eq!(count(2.5), [2, 2, 2, 2, 2, 3, 3, 3, 3, 3]);
    assert_eq!(count(0.001), [0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
}

/// What is held out is a part of the records, however few sequences they are packed into.
#[test]
fn records_are_held_out_before_they_are_packed() {
    let tokens = tokens(RecordKind::Whole, &[3; 20]);
    let samples = Samples::new(&tokens, SampleConfig::new(60)).unwrap();
    assert_eq!((samples.len(), samples.num_pieces()), (1, 20));
    let records = |samples: &Samples| {
        let firsts = ids(samples).concat().into_iter().step_by(3);
        firsts.map(|id| id / 1000).collect::<Vec<u32>>()
    };
    let mut seen = Vec::new();
    for seed in [1, 2, 3] {
        let [trained, held_out] = samples.hold_out(0.1, seed).unwrap();
        assert_eq!((trained.len(), held_out.len()), (1, 1));
        let chosen = records(&held_out);
        assert_eq!(chosen.len(), 2);
        let mut all = [records(&trained), chosen.clone()].concat();
        all.sort_unstable();
        assert!(all.into_iter().eq(1..=20));
        assert_eq!(records(&samples.hold_out(0.1, seed).unwrap()[1]), chosen);
        seen.push(chosen);
    }
    assert!(seen.windows(2).any(|seeds| seeds[0] != seeds[1]));
    // At least one.
    let [trained, held_out] = samples.hold_out(0.001, 1).unwrap();
    assert_eq!((trained.num_pieces(), held_out.num_pieces()), (19, 1));
    assert_error(
        samples.hold_out(0.99, 1),
        &["0.99 of 20 records leaves none to train on", "hint: "],
    );
    // Of a text its sequences.
    let text = tokens_of_one_text(100);
    let samples = Samples::new(&text, SampleConfig::new(10)).unwrap();
    let [trained, held_out] = samples.hold_out(0.2, 1).unwrap();
    assert_eq!((trained.len(), held_out.len()), (8, 2));
    let mut all = [ids(&trained), ids(&held_out)].concat();
    all.sort_unstable();
    assert_eq!(all.concat(), (1000..1100).collect::<Vec<u32>>());
}

fn tokens_of_one_text(len: u32) -> Tokens {
    tokens(RecordKind::Text, &[len])
}

#[test]
fn records_that_are_held_out_and_trained_on_are_counted() {
    let records = |ids: &[u32]| {
        let records = ids.iter().map(|&id| EncodedRecord {
            kind: RecordKind::Whole,
            ids: vec![id, id + 1, id + 2],
            has_loss: vec![false, true, true],
        });
        let tokens = Tokens::from_records(&records.collect::<Vec<_>>()).unwrap();
        Samples::new(&tokens, SampleConfig::new(8)).unwrap()
    };
    let (trained, evaluated) = (records(&[1, 2, 3, 3, 4]), records(&[9, 3, 4, 3, 8]));
    assert_eq!(evaluated.num_shared_with(&trained), 3);
    assert_eq!(trained.num_shared_with(&evaluated), 3);
    assert_eq!(evaluated.num_shared_with(&records(&[7, 6])), 0);
    // Each record twice: whatever is held out is shared unless both are.
    let ids: Vec<u32> = (0..50).chain(0..50).collect();
    let [trained, held_out] = records(&ids).hold_out(0.1, 5).unwrap();
    assert!(held_out.num_shared_with(&trained) >= 8);
    // A text twice has the same sequences twice; one text has none twice.
    let text = tokens_of_one_text(100);
    let [trained, held_out] = Samples::new(&text, SampleConfig::new(10))
        .unwrap()
        .hold_out(0.2, 1)
        .unwrap();
    assert_eq!(held_out.num_shared_with(&trained), 0);
    let one = text.record(0).unwrap();
    let twice = Tokens::from_records(&[one.clone(), one]).unwrap();
    let [trained, held_out] = Samples::new(&twice, SampleConfig::new(10))
        .unwrap()
        .hold_out(0.1, 1)
        .unwrap();
    assert_eq!(held_out.num_pieces(), 2);
    assert_eq!(held_out.num_shared_with(&trained), 2);
}
