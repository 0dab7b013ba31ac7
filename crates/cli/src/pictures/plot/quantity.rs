//! What a number of a metrics file is called in a picture, and in which unit it is drawn.

use candle_core::{Result, bail};

/// Units of bytes, from the largest.
const BYTES: [(&str, f64); 3] = [
    ("GiB", (1u64 << 30) as f64),
    ("MiB", (1u64 << 20) as f64),
    ("KiB", 1024.0),
];

/// A number of a metrics file, as it is drawn.
#[derive(Debug, PartialEq)]
pub(super) struct Quantity {
    /// In the file.
    pub(super) name: String,
    /// In the picture: the name without its unit.
    pub(super) label: String,
    /// `None`: a mere number.
    unit: Option<String>,
    /// What the file's numbers are divided by.
    pub(super) divisor: f64,
}

impl Quantity {
    /// That of this name, where the largest number of the picture is `greatest`.
    pub(super) fn named(name: &str, greatest: f64) -> Self {
        let of = |label: &str, unit: Option<String>, divisor: f64| Self {
            name: name.to_string(),
            label: label.to_string(),
            unit,
            divisor,
        };
        if let Some(label) = name.strip_suffix("_bytes") {
            let fits = |(_, divisor): &&(&str, f64)| greatest >= *divisor;
            let (unit, divisor) = BYTES.iter().find(fits).copied().unwrap_or(("bytes", 1.0));
            return of(label, Some(unit.to_string()), divisor);
        }
        if let Some(label) = name.strip_suffix("_per_sec") {
            let unit = match label {
                "gflops" => "GFLOP/s".to_string(),
                _ => format!("{label} per second"),
            };
            return of(label.trim_start_matches("gflops"), Some(unit), 1.0);
        }
        if let Some(label) = name.strip_suffix("_secs") {
            return of(label, Some("seconds".to_string()), 1.0);
        }
        let unit = matches!(name, "loss" | "eval_loss").then(|| "nats per token".to_string());
        of(name, unit, 1.0)
    }

    /// For an axis of its own.
    fn with_unit(&self) -> String {
        match &self.unit {
            None => self.label.clone(),
            // "tokens (tokens per second)" says it twice.
            Some(unit) if unit.starts_with(&self.label) || self.label.is_empty() => unit.clone(),
            Some(unit) => format!("{} ({unit})", self.label),
        }
    }
}

/// What stands beside the axis of all these.
///
/// # Errors
/// They have different units.
pub(super) fn axis_label(quantities: &[Quantity]) -> Result<String> {
    let mut with_unit = quantities.iter().filter(|quantity| quantity.unit.is_some());
    let first = with_unit.next();
    if let Some(first) = first
        && let Some(other) = with_unit.find(|other| other.unit != first.unit)
    {
        let unit = |quantity: &Quantity| quantity.unit.clone().unwrap_or_default();
        bail!(
            "{} is in {} and {} in {}, and a picture has one axis\nhint: draw a picture of each",
            first.name,
            unit(first),
            other.name,
            unit(other)
        );
    }
    let is_same = quantities.iter().all(|quantity| quantity.unit.is_some());
    Ok(match (quantities, first) {
        ([quantity], _) => quantity.with_unit(),
        (_, Some(first)) if is_same => {
            let labels: Vec<&str> = quantities.iter().map(|it| it.label.as_str()).collect();
            let unit = first.unit.as_deref().unwrap_or_default();
            format!("{} ({unit})", labels.join(", "))
        }
        _ => {
            let labels: Vec<String> = quantities.iter().map(Quantity::with_unit).collect();
            labels.join(", ")
        }
    })
}

#[cfg(test)]
mod tests {
    use super::{Quantity, axis_label};

    fn label(names: &[&str], greatest: f64) -> Result<String, String> {
        let quantities = names.iter().map(|name| Quantity::named(name, greatest));
        let quantities: Vec<Quantity> = quantities.collect();
        axis_label(&quantities).map_err(|err| err.to_string())
    }

    #[test]
    fn axes_have_names_and_units() {
        for (names, greatest, expected) in [
            (&["loss"][..], 3.0, "loss (nats per token)"),
            (
                &["loss", "eval_loss"],
                3.0,
                "loss, eval_loss (nats per token)",
            ),
            (
                &["loss", "grad_norm"],
                3.0,
                "loss (nats per token), grad_norm",
            ),
            (&["tokens_per_sec"], 3e4, "tokens per second"),
            (&["gflops_per_sec"], 3e4, "GFLOP/s"),
            (&["step_secs"], 3.0, "step (seconds)"),
            (&["memory/weights_bytes"], 5e6, "memory/weights (MiB)"),
            (&["memory/weights_bytes"], 5e10, "memory/weights (GiB)"),
            (&["memory/weights_bytes"], 7.0, "memory/weights (bytes)"),
            (&["mfu"], 0.5, "mfu"),
        ] {
            assert_eq!(label(names, greatest).as_deref(), Ok(expected));
        }
        let error = label(&["loss", "mfu", "step_secs"], 1.0).unwrap_err();
        let said = "loss is in nats per token and step_secs in seconds";
        assert!(error.contains(said), "{error}");
    }
}
