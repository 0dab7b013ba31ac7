//! Lists of random layouts are right, and no list is right any more with an action left out, done twice, or in the place of another that works on the
//! same.

use candle_comm::{Degrees, ProcessGroup};
use candle_core::{DType, Device, Result};

use super::check::Check;
use super::lower::Uses;
use super::{Action, Item, Lowering, Passes, Program, Setup};
use crate::params::ReplicaGroups;
use crate::{
    DataParallel, ModelSpec, ParamStore, PipelineLayout, Plan, RankSpec, Schedule, ZeroStage,
    column_parallel_linear, layer_block,
};

const NUM_BLOCKS: usize = 5;

struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.0 >> 33) as usize % end
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }
}

/// Settings of a rank.
#[derive(Debug)]
struct Case {
    schedule: Schedule,
    layout: PipelineLayout,
    degrees: Degrees,
    replicas: DataParallel,
    num_micro_batches: usize,
    num_frozen: usize,
    is_tied: bool,
    offloads_weights: bool,
    sums_are_away: bool,
    state_is_away: bool,
    trains: bool,
}

impl Case {
    fn random(random: &mut Random) -> Result<Self> {
        let schedules = [
            (Schedule::OneForwardOneBackward, 1),
            (Schedule::GPipe, 1),
            (Schedule::OneForwardOneBackward, 2),
            (Schedule::ZeroBubbleH1, 1),
            (Schedule::ZeroBubbleV, 2),
        ];
        let (schedule, virtual_stages) = random.one_of(&schedules);
        let pp = if virtual_stages == 2 {
            2
        } else {
            random.one_of(&[1, 2])
        };
        let ranks = schedule.placement(pp, virtual_stages)?;
        let layers =
            (0..ranks.len()).map(|stage| crate::part(NUM_BLOCKS, stage, ranks.len()).len());
        let dp = random.one_of(&[1, 2, 4]);
        let zero = random.one_of(&[
            ZeroStage::Zero,
            ZeroStage::One,
            ZeroStage::Two,
            ZeroStage::Three,
        ]);
        let secondary = (zero == ZeroStage::Three && dp == 4).then_some(2);
        let mut is = |one_in| random.below(one_in) == 0;
        Ok(Self {
            layout: PipelineLayout::new(&layers.collect::<Vec<_>>(), &ranks)?,
            degrees: Degrees {
                pp,
                dp,
                ..Degrees::default()
            },
            replicas: DataParallel {
                overlap: is(2),
                zero_secondary: secondary.filter(|_| is(2)),
                ..DataParallel::from(zero)
            },
            num_frozen: if is(3) { 2 } else { 0 },
            is_tied: is(2),
            offloads_weights: is(3),
            sums_are_away: is(3),
            state_is_away: is(3),
            trains: !is(6),
            num_micro_batches: random.one_of(&[1, 2, 5]),
            schedule,
        })
    }

    fn spec(&self, rank: usize) -> Result<RankSpec> {
        let store = ParamStore::init(0).with_data_parallel(self.replicas);
        let num_frozen = self.num_frozen;
        let store = store.freeze(move |name| {
            (0..num_frozen).any(|index| name.starts_with(&format!("{index}.")))
        });
        let vb = store.builder(DType::F32, &Device::Cpu);
        let spec = ModelSpec::describe(self.layout.clone(), self.degrees, &vb, |index, vb| {
            let is_tied = self.is_tied && (index == 2 || index + 1 == NUM_BLOCKS);
            let vb = if is_tied {
                vb.tied().pp("tied")
            } else {
                vb.pp(index)
            };
            let linear =
                column_parallel_linear(8, 8, false, ProcessGroup::single(Device::Cpu), vb)?;
            Ok(layer_block(linear))
        })?;
        Ok(spec.of_rank(rank))
    }
}

/// What a list of actions is of.
#[derive(Clone, Copy, Debug)]
enum Part {
    Passes,
    Reduce,
    Update,
}

/// What actions work on: two of them that work on the same are in an order that matters.
#[derive(Debug, PartialEq)]
enum Object {
    Weights(u32),
    /// What blocks write to.
    Sum(u32),
    /// What was added of it over the ranks.
    Reduced(u32),
    Item(Item),
}

fn objects(action: Action, uses: &Uses) -> Vec<Object> {
    let buckets = |all: &[usize]| all.iter().map(|bucket| *bucket as u32).collect::<Vec<_>>();
    let weights = |block: u32| {
        buckets(uses.gathered(block as usize))
            .into_iter()
            .map(Object::Weights)
    };
    let sums = |block: u32| {
        buckets(uses.written(block as usize))
            .into_iter()
            .map(Object::Sum)
    };
    match action {
        Action::Forward(block) | Action::Infer(block) | Action::InputGrad(block) => {
            weights(block).collect()
        }
        Action::Backward(block) => weights(block).chain(sums(block)).collect(),
        Action::WeightGrad(block) => sums(block).collect(),
        Action::Gather(bucket)
        | Action::GatherCopy(bucket)
        | Action::Arrive(bucket)
        | Action::ArriveAndCopy(bucket)
        | Action::Free(bucket) => vec![Object::Weights(bucket)],
        // The sum that is added may be an earlier one, of which two are under way.
        Action::MakeGradients(bucket) | Action::Reduce(bucket) => vec![Object::Sum(bucket)],
        Action::AddReduced(bucket) => vec![Object::Reduced(bucket)],
        Action::Square(bucket) | Action::Settle(bucket) => {
            vec![Object::Sum(bucket), Object::Reduced(bucket)]
        }
        Action::Fetch(item) | Action::Put(item) | Action::Drop(item) => vec![Object::Item(item)],
        _ => Vec::new(),
    }
}

/// The list with its actions in the order of these places.
fn with_order(program: &Program, places: &[usize]) -> Program {
    Program {
        actions: places.iter().map(|place| program.actions[*place]).collect(),
        ..program.clone()
    }
}

/// Mutants of a list, each with what was done to it.
fn mutants(program: &Program, uses: &Uses, random: &mut Random) -> Vec<(String, Program)> {
    let num_actions = program.actions.len();
    let mut all = Vec::new();
    // A rank with nothing to train has no actions after its passes.
    for _ in 0..num_actions.min(12) {
        let at = random.below(num_actions);
        let action = program.actions[at];
        for (what, num_times) in [("left out", 0), ("done twice", 2)] {
            let mut mutant = program.clone();
            mutant.actions.splice(at..=at, vec![action; num_times]);
            for (_, end) in mutant.phases.iter_mut().filter(|(_, end)| *end > at) {
                *end = *end + num_times - 1;
            }
            all.push((format!("{action:?} at {at} {what}"), mutant));
        }
        let own = objects(action, uses);
        let shares = |other: &usize| {
            objects(program.actions[*other], uses)
                .iter()
                .any(|object| own.contains(object))
        };
        let next = (at + 1..num_actions).find(shares);
        if let Some(next) = next.filter(|next| program.actions[*next] != action) {
            let mut places: Vec<usize> = (0..num_actions).collect();
            places.swap(at, next);
            let what = format!(
                "{action:?} at {at} and {:?} at {next} swapped",
                program.actions[next]
            );
            all.push((what, with_order(program, &places)));
        }
    }
    all
}

#[test]
fn lists_of_random_layouts_are_right_and_their_mutants_are_refused() -> Result<()> {
    let mut random = Random(7);
    let mut num_mutants = 0;
    for _ in 0..400 {
        let case = Case::random(&mut random)?;
        let spec = case.spec(random.below(case.degrees.pp * case.degrees.dp))?;
        let groups = ReplicaGroups::unconnected(
            case.replicas,
            case.offloads_weights,
            spec.replica,
            spec.num_replicas,
        )?;
        let state_parts: Vec<usize> = (spec.layout.buckets.iter())
            .map(|_| 1 + random.below(2))
            .collect();
        let setup = Setup {
            spec: &spec,
            groups: &groups,
            sums_are_away: case.sums_are_away,
            state_parts: &state_parts,
            state_is_away: case.state_is_away,
        };
        let plan = if case.trains {
            Plan::new(&case.schedule, &case.layout, case.num_micro_batches)?
        } else {
            Plan::forwards(&case.layout, case.num_micro_batches)
        };
        let passes = Passes {
            plan: &plan,
            list: &plan.joined(spec.pp_rank),
            trains: case.trains,
        };
        let uses = Uses::new(&setup);
        let mut lowering = Lowering::new(setup);
        let places = lowering.places();
        let mut step = vec![(Part::Passes, lowering.passes(&passes)?)];
        if case.trains {
            step.push((Part::Reduce, lowering.reduce()?));
            step.push((Part::Update, lowering.update()?));
        }
        let check = |step: &[(Part, Program)]| {
            let mut check = Check::new(setup, &uses, places.clone());
            step.iter().try_for_each(|(part, program)| match part {
                Part::Passes => check.passes(program, &passes),
                Part::Reduce => check.reduce(program),
                Part::Update => check.update(program),
            })
        };
        check(&step).map_err(|err| {
            err.context(format!(
                "{case:?} {:?}",
                step.iter()
                    .map(|(_, program)| &program.actions)
                    .collect::<Vec<_>>()
            ))
        })?;
        for index in 0..step.len() {
            for (what, mutant) in mutants(&step[index].1, &uses, &mut random) {
                let mut mutated = step.clone();
                mutated[index].1 = mutant;
                let part = step[index].0;
                let is_refused = check(&mutated).is_err();
                assert!(
                    is_refused,
                    "{what} is not refused in the {part:?} of {case:?}"
                );
                num_mutants += 1;
            }
        }
    }
    assert!(num_mutants > 5_000, "{num_mutants}");
    Ok(())
}
