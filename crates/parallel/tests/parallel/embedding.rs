//! The vocabulary-parallel embedding against a lookup in the whole table.

use candle_comm::ProcessGroup;
use candle_core::{DType, Device, Result, Tensor};
use candle_parallel::{Layer, ParamStore, Pass, VocabParallelEmbedding, vocab_parallel_embedding};

use crate::check::{assert_close, assert_says, grads, message, own_part, random, random_ids};
use crate::device::{device, on_ranks};

const VOCAB: usize = 11;
const HIDDEN: usize = 5;

fn build(tp: &ProcessGroup) -> Result<VocabParallelEmbedding> {
    let vb = ParamStore::init(7).builder(DType::F32, &device());
    vocab_parallel_embedding(VOCAB, HIDDEN, tp, vb.pp("embed_tokens"))
}

#[test]
fn equals_a_lookup_in_the_whole_table() {
    let whole = build(&ProcessGroup::single(device())).unwrap();
    // Some tokens come twice, some never.
    let ids = Tensor::from_vec(random_ids(3, 14, VOCAB), (2, 7), &Device::Cpu).unwrap();
    let dy = random(4, (2, 7, HIDDEN)).unwrap();
    let table = whole.weight();
    let rows = ids.flatten_all().unwrap().to_device(&device()).unwrap();
    let y = table.index_select(&rows, 0).unwrap();
    let y = y.reshape((2, 7, HIDDEN)).unwrap();
    let [dw] = grads(&y, &dy, [table]).unwrap();
    for tp in 1..=4 {
        on_ranks(tp, |tp| {
            let layer = build(&tp)?;
            assert_close("table", layer.weight(), &own_part(table, 0, &tp)?);
            let mine = layer.apply(&ids, &Pass::infer(ids.clone()))?;
            assert_close("y", &mine, &y);
            let [grad] = grads(&mine, &dy, [layer.weight()])?;
            assert_close("dw", &grad, &own_part(&dw, 0, &tp)?);
            Ok(())
        });
    }
}

#[test]
fn the_padding_token_is_looked_up_but_its_row_gets_no_gradient() {
    let ids = Tensor::new(&[[3u32, 9, 3], [0, 3, 10]], &Device::Cpu).unwrap();
    let dy = random(4, (2, 3, HIDDEN)).unwrap();
    for tp in 1..=4 {
        on_ranks(tp, |tp| {
            let plain = build(&tp)?;
            let padded = build(&tp)?.with_padding_idx(Some(3));
            let (y, mine) = (
                plain.apply(&ids, &Pass::infer(ids.clone()))?,
                padded.apply(&ids, &Pass::infer(ids.clone()))?,
            );
            assert_close("y", &mine, &y);
            let [want] = grads(&y, &dy, [plain.weight()])?;
            let [got] = grads(&mine, &dy, [padded.weight()])?;
            let (want, got) = (want.to_vec2::<f32>()?, got.to_vec2::<f32>()?);
            let first = own_part(&Tensor::arange(0u32, VOCAB as u32, &device())?, 0, &tp)?;
            for (row, id) in first.to_vec1::<u32>()?.into_iter().enumerate() {
                match id {
                    3 => assert!(want[row] != got[row] && got[row].iter().all(|x| *x == 0.0)),
                    _ => assert_eq!(want[row], got[row]),
                }
            }
            Ok(())
        });
    }
}

#[test]
fn a_token_beyond_the_vocabulary_is_an_error_on_every_rank() {
    on_ranks(3, |tp| {
        let layer = build(&tp)?;
        let ids = Tensor::new(&[[0u32, 1, 2], [3, 11, 4]], &Device::Cpu)?;
        let said = message(layer.apply(&ids, &Pass::infer(ids.clone())));
        let words = ["token id 11", "sequence 1, position 1", "11 tokens", "hint"];
        assert_says(&said, &words);
        Ok(())
    });
}

#[test]
fn more_ranks_than_tokens_is_an_error() {
    on_ranks(12, |tp| {
        assert_says(&message(build(&tp)), &["11", "12 tensor-parallel ranks"]);
        Ok(())
    });
}
