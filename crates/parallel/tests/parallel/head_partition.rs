//! All divisions of up to 12 heads.

use candle_parallel::HeadPartition;

use crate::check::{assert_says, message};
use crate::device::on_ranks;

fn divisors(n: usize) -> impl Iterator<Item = usize> {
    (1..=n).filter(move |d| n.is_multiple_of(*d))
}

/// Every rank's partition, for all heads of `tp..=12` and all key/value heads that divide them.
fn partitions(tp: usize) -> Vec<Vec<(usize, usize, HeadPartition)>> {
    on_ranks(tp, |group| {
        (tp..=12)
            .flat_map(|heads| divisors(heads).map(move |kv| (heads, kv)))
            .map(|(heads, kv)| Ok((heads, kv, HeadPartition::new(heads, kv, &group)?)))
            .collect()
    })
}

#[test]
fn every_head_has_one_rank_and_every_rank_what_it_reads() {
    for tp in 1..=12 {
        let by_rank = partitions(tp);
        for case in 0..by_rank[0].len() {
            let (heads, kv, _) = by_rank[0][case];
            let what = format!("{heads} heads, {kv} kv heads, tp {tp}");
            let (mut next_query, mut next_held) = (0, 0);
            for rank in &by_rank {
                let partition = &rank[case].2;
                let (query, key_value) = (&partition.query, &partition.key_value);
                assert_eq!(query.start(), next_query, "{what}");
                assert!(!query.is_empty(), "{what}");
                next_query = query.start() + query.len();
                assert_eq!((query.global(), key_value.global()), (heads, kv), "{what}");

                // In rank order no key/value head is left out.
                assert!(key_value.start() <= next_held, "{what}");
                next_held = next_held.max(key_value.start() + key_value.len());

                // What the local query heads read, by the model's definition, is what is held: no more, no less.
                let groups = partition.groups;
                groups.validate(query.len(), key_value.len()).unwrap();
                let reads = |head: usize| key_value.start() + groups.kv_head(head);
                for head in 0..query.len() {
                    let expected = (query.start() + head) / (heads / kv);
                    assert_eq!(reads(head), expected, "{what}");
                }
                assert_eq!(reads(0), key_value.start(), "{what}");
                assert_eq!(
                    reads(query.len() - 1) + 1,
                    key_value.start() + key_value.len(),
                    "{what}"
                );
            }
            assert_eq!((next_query, next_held), (heads, kv), "{what}");
        }
        let lens = |case: usize| by_rank.iter().map(move |rank| rank[case].2.query.len());
        for case in 0..by_rank[0].len() {
            assert!(lens(case).max().unwrap() - lens(case).min().unwrap() <= 1);
        }
    }
}

#[test]
fn heads_that_do_not_fit_are_errors_with_the_numbers() {
    on_ranks(5, |tp| {
        let too_few = message(HeadPartition::new(4, 2, &tp));
        assert_says(&too_few, &["tp(5)", "num_attention_heads(4)", "tp <= 4"]);
        let uneven = message(HeadPartition::new(6, 4, &tp));
        assert_says(&uneven, &["num_attention_heads (6)", "(4)"]);
        assert_says(&message(HeadPartition::new(6, 0, &tp)), &["(0)"]);
        Ok(())
    });
}
