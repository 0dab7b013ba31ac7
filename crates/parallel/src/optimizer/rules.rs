//! Which rule updates which parameter, and where its state of a bucket lies.
//!
//! ```text
//! a rank's slice of a bucket   | q k v o, gate up down        | norms .. |
//! momentum (of one rule)       |..............................|
//! exp_avg, exp_avg_sq                                         |..........|
//! ```
//! A rule has state from the first to the last value that it updates in the slice. The largest parameters of a bucket come first, so
//! rules that divide the parameters by size hardly overlap.

use std::ops::Range;

use candle_core::{Result, bail};

use super::optimizer::{Needs, Optimizer};
use super::param_group::ParamGroup;
use super::state_store::{BucketShape, master_dtype};
use crate::params::{Bucket, Parameters, SLICE_ALIGNMENT, Slot};
use crate::placement::{intersect, offset_by};

/// The rules of an optimizer: one for all parameters, and those of groups.
pub(super) struct Rules {
    main: Box<dyn Optimizer>,
    groups: Vec<ParamGroup>,
    /// Of each parameter of this rank, its group.
    group_of: Vec<Option<usize>>,
    /// Of each bucket, the state that rules have.
    spans: Vec<Vec<RuleSpan>>,
    /// The rule of all parameters, and the groups, in words.
    described: [String; 2],
}

/// What one rule has of a bucket.
pub(super) struct RuleSpan {
    /// The group whose rule it is; `None`: the rule of all parameters.
    group: Option<usize>,
    /// Place in the rank's slice of the bucket.
    pub range: Range<usize>,
    /// Place of its kinds among the bucket's tensors of state.
    pub kinds: Range<usize>,
}

impl Rules {
    /// # Errors
    /// Numbers that are out of range, a group without parameters, and a rule that needs a matrix of what is none.
    pub fn new(
        main: Box<dyn Optimizer>,
        groups: Vec<ParamGroup>,
        params: &Parameters,
    ) -> Result<Self> {
        main.validate()?;
        groups.iter().try_for_each(ParamGroup::validate)?;
        check_all_have_parameters(&groups, params)?;
        let group_of = params.iter().map(|param| first_match(&groups, &param.name));
        let mut rules = Self {
            group_of: group_of.collect(),
            spans: Vec::new(),
            described: Default::default(),
            main,
            groups,
        };
        rules.check_matrices(params)?;
        rules.described = [rules.main.describe(), rules.describe(params)];
        let buckets = params.layout().buckets.iter();
        rules.spans = buckets.map(|bucket| rules.find(bucket, params)).collect();
        Ok(rules)
    }

    /// The same rule for all parameters, with other groups.
    pub fn with_groups(self, groups: Vec<ParamGroup>, params: &Parameters) -> Result<Self> {
        Self::new(self.main, groups, params)
    }

    /// Whether a group has a rule of its own.
    pub fn differ(&self) -> bool {
        self.groups.iter().any(|group| group.rule().is_some())
    }

    /// The group of parameter `param`.
    pub fn group(&self, param: usize) -> Option<&ParamGroup> {
        self.groups.get(self.group_of[param]?)
    }

    /// The rule of parameter `param`.
    pub fn of(&self, param: usize) -> &dyn Optimizer {
        let own = self.group(param).and_then(ParamGroup::rule);
        own.unwrap_or(&*self.main)
    }

    /// What the rule of parameter `param` has of bucket `index`, in which that is.
    pub fn span(&self, index: usize, param: usize) -> Result<&RuleSpan> {
        let group = self.rule_group(param);
        match self.spans[index].iter().find(|span| span.group == group) {
            Some(span) => Ok(span),
            None => bail!("parameter {param} is not in bucket {index}"),
        }
    }

    /// The parameters of a bucket by their groups.
    pub fn by_group<'a>(&self, bucket: &'a Bucket) -> Vec<Vec<&'a Slot>> {
        let mut by_group: Vec<Vec<&Slot>> = Vec::new();
        by_group.resize_with(self.groups.len() + 1, Vec::new);
        for slot in &bucket.slots {
            by_group[self.group_of[slot.param].unwrap_or(self.groups.len())].push(slot);
        }
        by_group.retain(|slots| !slots.is_empty());
        by_group
    }

    /// The state of bucket `index`.
    pub fn shape(&self, index: usize, params: &Parameters) -> Result<BucketShape> {
        let bucket = &params.layout().buckets[index];
        let mut slots = bucket.slots.iter();
        let take_slices = slots.all(|slot| {
            let (rule, param) = (self.of(slot.param), params.get(slot.param));
            rule.needs(param) == Needs::Slice
        });
        let mut slots = bucket.slots.iter();
        let take_remainders = slots.all(|slot| self.of(slot.param).takes_remainders());
        let kinds = self.spans[index].iter();
        let first = bucket.slots.first();
        let name = first.map_or("", |slot| &params.get(slot.param).name);
        Ok(BucketShape {
            len: params.groups().own_range(bucket.len).len(),
            kinds: kinds
                .flat_map(|span| span.kinds.clone().map(|_| span.range.len()))
                .collect(),
            master: master_dtype(bucket.dtype, name, take_remainders && take_slices)?,
            is_divisible: self.spans[index].len() == 1 && take_slices,
        })
    }

    /// The rule of all parameters and of the groups, which all ranks must have alike.
    pub fn described(&self) -> &[String; 2] {
        &self.described
    }

    fn describe(&self, params: &Parameters) -> String {
        let names = params.catalog().iter().map(|entry| entry.name.as_str());
        let places: Vec<_> = names.map(|name| first_match(&self.groups, name)).collect();
        let groups = self.groups.iter().enumerate().map(|(index, group)| {
            let num_params = places.iter().filter(|place| **place == Some(index)).count();
            format!(
                "{num_params} parameters with lr_scale {}, weight_decay {:?}, rule {}",
                group.lr_scale,
                group.weight_decay,
                group
                    .rule()
                    .map_or("of all".to_string(), Optimizer::describe)
            )
        });
        format!("[{}]", groups.collect::<Vec<_>>().join("; "))
    }

    /// Names of all kinds of state, each once.
    pub fn state_names(&self) -> Vec<&'static str> {
        let mut names = self.main.state_names().to_vec();
        for name in (self.groups.iter().filter_map(ParamGroup::rule))
            .flat_map(|rule| rule.state_names().iter().copied())
        {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }

    /// The group whose rule parameter `param` has; `None`: the rule of all.
    fn rule_group(&self, param: usize) -> Option<usize> {
        self.group_of[param].filter(|&group| self.groups[group].rule().is_some())
    }

    fn find(&self, bucket: &Bucket, params: &Parameters) -> Vec<RuleSpan> {
        let own = params.groups().own_range(bucket.len);
        let groups = bucket.slots.iter().map(|slot| self.rule_group(slot.param));
        let mut groups: Vec<Option<usize>> = groups.collect();
        groups.sort_unstable();
        groups.dedup();
        let mut next_kind = 0;
        let mut spans = Vec::new();
        for &group in &groups {
            let slots = bucket.slots.iter();
            let slots = slots.filter(|slot| self.rule_group(slot.param) == group);
            let mine = slots.clone().map(|slot| intersect(&slot.range, &own));
            let mine = mine.filter(|mine| !mine.is_empty());
            let mine = mine.map(|mine| offset_by(&mine, own.start));
            let hull = mine.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end));
            // A GPU has no tensor without values.
            let hull = hull.unwrap_or(0..SLICE_ALIGNMENT);
            let end = hull.end.next_multiple_of(SLICE_ALIGNMENT).min(own.len());
            let rule = slots.map(|slot| self.of(slot.param)).next();
            let num_kinds = rule.map_or(0, |rule| rule.state_names().len());
            spans.push(RuleSpan {
                group,
                range: match groups.len() {
                    1 => 0..own.len(),
                    _ => hull.start / SLICE_ALIGNMENT * SLICE_ALIGNMENT..end,
                },
                kinds: next_kind..next_kind + num_kinds,
            });
            next_kind += num_kinds;
        }
        spans
    }

    /// An error if a rule needs a matrix of a parameter that is none.
    fn check_matrices(&self, params: &Parameters) -> Result<()> {
        let all = params.iter().enumerate();
        for (index, param) in all.filter(|(_, param)| param.trainable) {
            let (needs, shape) = (self.of(index).needs(param), &param.global_shape);
            if needs == Needs::Matrix && shape.rank() < 2 {
                bail!(
                    "the rule of parameter {} needs a matrix, but its shape is {shape:?}; expected two or more dims\nhint: give the rule \
                     to a ParamGroup of matrices, and the rest another one",
                    param.name
                );
            }
        }
        Ok(())
    }
}

/// The first group that a parameter matches.
fn first_match(groups: &[ParamGroup], name: &str) -> Option<usize> {
    groups.iter().position(|group| group.matches(name))
}

/// An error that names the first group to which no parameter of the model belongs: the same on every rank.
fn check_all_have_parameters(groups: &[ParamGroup], params: &Parameters) -> Result<()> {
    let names = || params.catalog().iter().map(|entry| entry.name.as_str());
    for (index, group) in groups.iter().enumerate() {
        if names().any(|name| first_match(groups, name) == Some(index)) {
            continue;
        }
        let (place, num_groups) = (index + 1, groups.len());
        match names().find(|name| group.matches(name)) {
            Some(name) => bail!(
                "parameter group {place} of {num_groups} has no parameter: groups before it have all that it matches, such as \
                 {name}\nhint: the first group that a parameter matches counts"
            ),
            None => bail!(
                "parameter group {place} of {num_groups} matches none of the {} parameters of the model\nhint: names are those of the \
                 model's files, such as {}",
                names().count(),
                names().next().unwrap_or_default()
            ),
        }
    }
    Ok(())
}
