//! Texts that are generated with a cache are those generated without, on every layout.

use std::ops::ControlFlow;
use std::sync::Mutex;

use candle_comm::Mesh;
use candle_core::Result;
use candle_parallel::{Pipeline, Schedule, ZeroStage};
use candle_trainer::{GenerateConfig, Sampler, SamplingConfig, generate};

use crate::fixture::{ALL, Fixture};
use crate::run::{Layout, Variant, launch, load_variant};

const PROMPT: [u32; 7] = [5, 9, 2, 40, 17, 3, 33];

/// The tokens after the prompt, and how many of them each call of `on_token` saw.
fn text(
    fixture: &Fixture,
    layout: Layout,
    (use_cache, max_context): (bool, usize),
) -> Result<(Vec<u32>, Vec<usize>)> {
    let text = Mutex::new(None);
    launch(layout, |world| {
        let mesh = Mesh::new(world, layout.degrees())?;
        let part = load_variant(fixture, &mesh, (layout, Variant::default()))?;
        let config = GenerateConfig {
            max_context,
            max_new_tokens: 24,
            eos_ids: vec![],
            use_cache,
        };
        // Hot, so that a small difference shows.
        let mut sampler = Sampler::new(SamplingConfig {
            temperature: 2.0,
            seed: 3,
            ..SamplingConfig::default()
        })?;
        let mut seen = Vec::new();
        let pipeline = Pipeline::new(Schedule::GPipe, &mesh);
        let ids = generate(&pipeline, &part, &PROMPT, &config, &mut sampler, |ids| {
            seen.push(ids.len());
            Ok(ControlFlow::Continue(()))
        })?;
        if mesh.world.rank() == 0 {
            *text.lock().unwrap() = Some((ids, seen));
        }
        Ok(())
    })?;
    Ok(text.into_inner().unwrap().unwrap())
}

#[test]
fn a_cache_changes_no_token() {
    // Frequencies that depend on the length turn what is in a cache otherwise, as in transformers.
    for name in ALL.into_iter().filter(|&name| name != "mistral_dynamic") {
        let fixture = Fixture::new(name);
        let (expected, _) = text(&fixture, Layout::new(1, 1, 1), (false, 64)).unwrap();
        assert_eq!(expected.len(), 24);
        for (pp, dp, tp) in [(1, 1, 1), (1, 1, 2), (2, 1, 1), (1, 2, 1), (2, 1, 3)] {
            let layout = Layout {
                zero: ZeroStage::Three,
                ..Layout::new(pp, dp, tp)
            };
            let (ids, seen) = text(&fixture, layout, (true, 64)).unwrap();
            assert_eq!(ids, expected, "{name} {layout:?}");
            assert!(seen.into_iter().eq(1..=24), "{name} {layout:?}");
        }
    }
}

#[test]
fn a_text_that_outgrows_the_context_goes_on_without_the_cache() {
    let fixture = Fixture::new("gqa");
    let layout = Layout::new(1, 1, 1);
    let [with, without] = [true, false].map(|cache| text(&fixture, layout, (cache, 16)).unwrap().0);
    assert_eq!(with, without);
    assert_ne!(with, text(&fixture, layout, (true, 64)).unwrap().0);
}
