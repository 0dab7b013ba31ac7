//! The numbers of a [`MemoryMeter`](super::MemoryMeter), as they are written to files.

use std::collections::BTreeMap;

use candle_core::{Error, bail};
use serde::{Deserialize, Serialize};

use super::category::MemoryCategory;

/// Bytes of one category.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryUse {
    /// Held now.
    pub now: u64,
    /// The most held at a time.
    pub peak: u64,
}

/// The bytes that a rank holds, now and at their peak, by category. Files have two fields of each that is measured: `weights_bytes` and
/// `weights_peak_bytes`, and so on with the names of [`MemoryCategory`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "Fields", try_from = "Fields")]
pub struct MemoryReport {
    of: [MemoryUse; MemoryCategory::ALL.len()],
    /// Whether nobody has measured activations.
    lacks_activations: bool,
}

type Fields = BTreeMap<String, u64>;

impl MemoryReport {
    /// A report of what `of` tells of each category.
    pub(crate) fn new(of: impl Fn(MemoryCategory) -> MemoryUse) -> Self {
        Self {
            of: MemoryCategory::ALL.map(of),
            lacks_activations: false,
        }
    }

    /// The same where activations are measured only if `is_measured`.
    pub(crate) fn with_activations(self, is_measured: bool) -> Self {
        Self {
            lacks_activations: !is_measured,
            ..self
        }
    }

    /// The bytes of a category, 0 of activations that nobody has measured.
    pub fn of(&self, category: MemoryCategory) -> MemoryUse {
        self.of[category as usize]
    }

    /// The bytes of a category, if they are measured, as activations are not in every program: see
    /// [`count_memory_with`](crate::count_memory_with).
    pub fn measured(&self, category: MemoryCategory) -> Option<MemoryUse> {
        let is_missing = category == MemoryCategory::Activations && self.lacks_activations;
        (!is_missing).then(|| self.of(category))
    }

    /// What `bytes` tells of all categories that are memory of the device, together.
    pub fn on_device(&self, bytes: impl Fn(MemoryUse) -> u64) -> u64 {
        let categories = MemoryCategory::ALL.into_iter();
        let on_device = categories.filter(|category| category.is_on_device());
        on_device.map(|category| bytes(self.of(category))).sum()
    }

    /// Of each number the larger one.
    pub fn max(&self, other: &Self) -> Self {
        let largest = Self::new(|category| MemoryUse {
            now: self.of(category).now.max(other.of(category).now),
            peak: self.of(category).peak.max(other.of(category).peak),
        });
        largest.with_activations(!(self.lacks_activations && other.lacks_activations))
    }
}

impl From<MemoryReport> for Fields {
    fn from(report: MemoryReport) -> Self {
        let all = MemoryCategory::ALL.into_iter();
        let measured = all.filter_map(|category| Some((category, report.measured(category)?)));
        let fields = measured.flat_map(|(category, MemoryUse { now, peak })| {
            let [now_name, peak_name] = names(category);
            [(now_name, now), (peak_name, peak)]
        });
        fields.collect()
    }
}

impl TryFrom<Fields> for MemoryReport {
    type Error = Error;

    fn try_from(mut fields: Fields) -> Result<Self, Error> {
        let mut report = Self::default();
        for category in MemoryCategory::ALL {
            let [now, peak] = names(category).map(|name| fields.remove(&name));
            let (Some(now), Some(peak)) = (now, peak) else {
                if category == MemoryCategory::Activations {
                    report.lacks_activations = true;
                    continue;
                }
                // Files of before know nothing of these.
                if category == MemoryCategory::Packed || !category.is_on_device() {
                    continue;
                }
                bail!("the bytes of {category} are missing from a report of memory");
            };
            report.of[category as usize] = MemoryUse { now, peak };
        }
        match fields.keys().next() {
            None => Ok(report),
            Some(name) => bail!("a report of memory has no field {name}"),
        }
    }
}

fn names(category: MemoryCategory) -> [String; 2] {
    [
        format!("{category}_bytes"),
        format!("{category}_peak_bytes"),
    ]
}

#[cfg(test)]
mod tests {
    use super::{MemoryCategory, MemoryReport, MemoryUse};

    #[test]
    fn the_fields_of_a_file_are_flat_and_come_back() {
        let report = MemoryReport::new(|category| MemoryUse {
            now: category as u64,
            peak: 10 + category as u64,
        });
        let json = serde_json::to_value(report).unwrap();
        let fields = json.as_object().unwrap();
        assert_eq!(fields.len(), 2 * MemoryCategory::ALL.len());
        assert_eq!(fields["weights_bytes"], 0);
        assert_eq!(fields["gradients_peak_bytes"], 11);
        assert_eq!(fields["optimizer_bytes"], 2);
        assert_eq!(fields["activations_bytes"], 3);
        assert_eq!(fields["gathered_peak_bytes"], 14);
        assert_eq!(fields["buffers_peak_bytes"], 15);
        assert_eq!(fields["packed_peak_bytes"], 16);
        assert_eq!(fields["host_bytes"], 7);
        assert_eq!(fields["disk_peak_bytes"], 18);
        let again: MemoryReport = serde_json::from_value(json.clone()).unwrap();
        assert_eq!(again, report);
        let is_new = |name: &str| {
            ["host_", "disk_", "packed_"]
                .iter()
                .any(|new| name.starts_with(new))
        };
        let of_before = (fields.clone().into_iter()).filter(|(name, _)| !is_new(name));
        let of_before: serde_json::Map<_, _> = of_before.collect();
        let of_before: MemoryReport = serde_json::from_value(of_before.into()).unwrap();
        assert_eq!(of_before.of(MemoryCategory::Host), MemoryUse::default());
        assert_eq!(of_before.of(MemoryCategory::Packed), MemoryUse::default());
        assert_eq!(of_before.on_device(|of| of.now), 15);
        assert_eq!(report.on_device(|of| of.now), 15 + 6);
        // What nobody has measured is no number.
        let unmeasured = report.with_activations(false);
        assert_eq!(unmeasured.measured(MemoryCategory::Activations), None);
        assert!(report.measured(MemoryCategory::Activations).is_some());
        let json = serde_json::to_value(unmeasured).unwrap();
        assert!(json.get("activations_bytes").is_none() && json.get("weights_bytes").is_some());
        let read: MemoryReport = serde_json::from_value(json).unwrap();
        assert_eq!(read.measured(MemoryCategory::Activations), None);
        let both = read.max(&report);
        assert_eq!(
            both.measured(MemoryCategory::Activations),
            report.measured(MemoryCategory::Activations)
        );
        assert_eq!(read.max(&read).measured(MemoryCategory::Activations), None);
        let mut more = fields.clone();
        more.insert("cache_bytes".into(), 1.into());
        let error = serde_json::from_value::<MemoryReport>(more.into()).unwrap_err();
        assert!(
            error.to_string().contains("no field cache_bytes"),
            "{error}"
        );
        let error = serde_json::from_str::<MemoryReport>("{}").unwrap_err();
        assert!(
            error.to_string().contains("bytes of weights are missing"),
            "{error}"
        );
    }
}
