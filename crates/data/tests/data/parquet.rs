//! Parquet files as pyarrow writes them: `scripts/reference/parquet_fixtures.py`.

use candle_data::hub::DataUse;
use candle_data::{Data, DataSpec};

#[cfg(not(feature = "parquet"))]
#[test]
fn a_build_without_parquet_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.parquet");
    std::fs::write(&path, "PAR1").unwrap();
    let data = Data::find(&[DataSpec::new(&path)], DataUse::Training).unwrap();
    crate::assert_error(data.texts(), &["a.parquet", "--features parquet"]);
}

#[cfg(feature = "parquet")]
mod with_feature {
    use std::fs;
    use std::path::{Path, PathBuf};

    use candle_core::Result;
    use candle_data::{EncoderConfig, RecordEncoder, Tokenizer, Tokens};

    use super::*;
    use crate::assert_error;

    const CHATML: &str = "{% for m in messages %}{{ m.role + ' ' + m.content + eos_token + '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant {% endif %}";

    fn fixture(name: &str) -> PathBuf {
        PathBuf::from(env!("CARGO_MANIFEST_DIR"))
            .join("../../tests/fixtures/parquet")
            .join(name)
    }

    /// Ids and losses of all records of a file, and what is said of others.
    type Read = (Vec<(Vec<u32>, Vec<bool>)>, Vec<String>);

    fn read(path: &Path) -> Result<Read> {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("chat_template.jinja"), CHATML).unwrap();
        let tokenizer = Tokenizer::train_bpe(["the cat sat on the mat\n"].into_iter(), 280)?;
        let encoder = RecordEncoder::new(&tokenizer, Some(dir.path()), EncoderConfig::default())?;
        let data = Data::find(&[DataSpec::new(path)], DataUse::Training)?;
        let tokens = Tokens::encode(&data, &encoder, None)?;
        let records = (0..tokens.num_records()).map(|index| {
            let record = tokens.record(index)?;
            Ok((record.ids, record.has_loss))
        });
        // Without the place: lines are counted with the empty ones.
        let skipped = tokens.report().malformed.iter();
        let skipped = skipped.map(|skipped| skipped.reason.clone()).collect();
        Ok((records.collect::<Result<_>>()?, skipped))
    }

    #[test]
    fn rows_are_records_as_lines_of_json_are() {
        for (file, lines, num_records) in [
            ("texts-plain", "texts", 4),
            ("messages-none", "messages", 2),
            ("messages-snappy", "messages", 2),
            ("messages-gzip", "messages", 2),
            ("messages-brotli", "messages", 2),
            ("messages-lz4", "messages", 2),
            ("completions-groups", "completions", 40),
        ] {
            let (rows, skipped) = read(&fixture(&format!("{file}.parquet"))).unwrap();
            let of_lines = read(&fixture(&format!("{lines}.jsonl"))).unwrap();
            assert_eq!((&rows, &skipped), (&of_lines.0, &of_lines.1), "{file}");
            assert!(
                rows.len() >= num_records,
                "{file}: {} {skipped:?}",
                rows.len()
            );
        }
    }

    #[test]
    fn a_codec_that_is_not_built_in_is_named_with_a_way_out() {
        assert_error(
            read(&fixture("messages-zstd.parquet")),
            &[
                "messages-zstd.parquet",
                "compressed with zstd",
                "hint: write it again",
            ],
        );
    }

    #[test]
    fn a_damaged_file_is_an_error_and_no_panic() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.parquet");
        for name in ["messages-snappy", "messages-gzip", "completions-groups"] {
            let whole = fs::read(fixture(&format!("{name}.parquet"))).unwrap();
            for len in (0..whole.len()).step_by(97).chain([whole.len() - 1]) {
                fs::write(&path, &whole[..len]).unwrap();
                assert_error(read(&path), &["cannot read data file", "a.parquet"]);
            }
            for place in (0..whole.len()).step_by(31) {
                let mut flipped = whole.clone();
                flipped[place] ^= 1 << (place % 8);
                fs::write(&path, flipped).unwrap();
                // Of a text it may change a letter.
                if let Err(err) = read(&path) {
                    assert!(err.to_string().contains("a.parquet"), "{place}: {err}");
                }
            }
        }
    }
}
