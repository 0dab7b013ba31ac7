//! What a run on GPUs may set, by its flags or by the environment, so that one visit to a machine can try several ways.

use super::attention_code::AttentionCode;
use super::matmul_precision::on_threads_of_rank;
use candle_core::{Result, bail};
use std::cell::Cell;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::OnceLock;

/// How this process computes on GPUs; `docs/gpu` has a table of the variables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuSettings {
    /// Whether two runs give the same bits. Only cuDNN's backward pass of attention is slower for it and takes more memory.
    pub deterministic: bool,
    /// What must compute attention in bf16 and f16; without it cuDNN where it can.
    pub attention: Option<AttentionCode>,
    /// Which of the configurations that cuDNN suggests for the forward pass and for the backward pass to run; without it the
    /// first that works.
    pub cudnn_config: Option<[usize; 2]>,
    /// A folder of compiled kernels that replace those in this program.
    pub kernels: Option<PathBuf>,
    /// Rows of logits that exist at once, forward and backward.
    pub head_chunk_rows: Option<NonZeroUsize>,
}

/// Those of the process, once they are known.
static SETTINGS: OnceLock<GpuSettings> = OnceLock::new();

thread_local! {
    static IS_DETERMINISTIC: Cell<bool> = const { Cell::new(false) };
}

impl GpuSettings {
    /// Those of this thread: what the environment says, and [what was asked for](Self::make_deterministic).
    ///
    /// # Errors
    /// When a variable has a value that means nothing.
    pub fn get() -> Result<Self> {
        let mut settings = match SETTINGS.get() {
            Some(settings) => settings.clone(),
            None => {
                let from_env = Self::from_variables(|name| std::env::var(name).ok())?;
                SETTINGS.get_or_init(|| from_env).clone()
            }
        };
        settings.deterministic |= IS_DETERMINISTIC.get();
        Ok(settings)
    }

    /// Asks for the same bits in two runs, or for no more than the environment does: of all threads of the pool that this thread works in, or
    /// of this thread alone.
    pub fn make_deterministic(is_asked: bool) {
        on_threads_of_rank(|| IS_DETERMINISTIC.set(is_asked));
    }

    fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        // Set to nothing is not set: a script can leave a variable out so.
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        // The value by its meaning, if it has one.
        fn parsed<T>(
            (name, value): (&str, Option<String>),
            expected: &str,
            parse: impl Fn(&str) -> Option<T>,
        ) -> Result<Option<T>> {
            match value.map(|value| parse(&value).ok_or(value)) {
                None => Ok(None),
                Some(Ok(value)) => Ok(Some(value)),
                Some(Err(value)) => bail!("{name}: expected {expected}, got `{value}`"),
            }
        }
        let of = |name| (name, variable(name));
        let deterministic = parsed(of("CANDLE_TRAIN_DETERMINISTIC"), "0 or 1", |v| match v {
            "0" => Some(false),
            "1" => Some(true),
            _ => None,
        })?;
        let attention = parsed(of("CANDLE_TRAIN_ATTENTION"), "own or cudnn", |v| match v {
            "own" => Some(AttentionCode::Own),
            "cudnn" => Some(AttentionCode::Cudnn),
            _ => None,
        })?;
        Ok(Self {
            deterministic: deterministic.unwrap_or(false),
            attention,
            cudnn_config: parsed(
                of("CANDLE_TRAIN_CUDNN_CONFIG"),
                "a number from 0, or one for each pass as in `0,2`",
                |v| {
                    let (forward, backward) = v.split_once(',').unwrap_or((v, v));
                    Some([forward.parse().ok()?, backward.parse().ok()?])
                },
            )?,
            kernels: variable("CANDLE_TRAIN_KERNELS").map(PathBuf::from),
            head_chunk_rows: parsed(of("CANDLE_TRAIN_HEAD_CHUNK"), "a number from 1", |v| {
                v.parse().ok()
            })?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::GpuSettings;
    use crate::settings::attention_code::AttentionCode;
    use candle_core::Result;
    use std::num::NonZeroUsize;

    fn of(variables: &[(&str, &str)]) -> Result<GpuSettings> {
        GpuSettings::from_variables(|name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| value.to_string())
        })
    }

    #[test]
    fn variables_set_what_their_names_say() -> Result<()> {
        assert_eq!(of(&[("CANDLE_TRAIN_KERNELS", "")])?, GpuSettings::default());
        let all = of(&[
            ("CANDLE_TRAIN_DETERMINISTIC", "1"),
            ("CANDLE_TRAIN_ATTENTION", "cudnn"),
            ("CANDLE_TRAIN_CUDNN_CONFIG", "2"),
            ("CANDLE_TRAIN_KERNELS", "mended"),
            ("CANDLE_TRAIN_HEAD_CHUNK", "8192"),
        ])?;
        let expected = GpuSettings {
            deterministic: true,
            attention: Some(AttentionCode::Cudnn),
            cudnn_config: Some([2, 2]),
            kernels: Some("mended".into()),
            head_chunk_rows: NonZeroUsize::new(8192),
        };
        assert_eq!(all, expected);
        let of_passes = of(&[("CANDLE_TRAIN_CUDNN_CONFIG", "0,3")])?;
        assert_eq!(of_passes.cudnn_config, Some([0, 3]));
        Ok(())
    }

    #[test]
    fn a_value_that_means_nothing_is_named() {
        for (name, value) in [
            ("CANDLE_TRAIN_DETERMINISTIC", "yes"),
            ("CANDLE_TRAIN_ATTENTION", "flash"),
            ("CANDLE_TRAIN_CUDNN_CONFIG", "-1"),
            ("CANDLE_TRAIN_CUDNN_CONFIG", "1,"),
            ("CANDLE_TRAIN_HEAD_CHUNK", "0"),
        ] {
            let error = of(&[(name, value)]).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains(value), "{error}");
        }
    }
}
