//! Which files of a data set are for what: by the names of files and folders, as Python's `datasets` infers splits.

/// What data is read for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DataUse {
    /// To be trained on.
    Training,
    /// To measure what was learned.
    Evaluation,
}

/// A part of a data set: what it is called.
type Split = &'static [&'static str];

const TRAIN: Split = &["train", "training"];
const VALIDATION: Split = &["validation", "valid", "val", "dev"];
const TEST: Split = &["test", "testing", "eval", "evaluation"];

/// The split whose name is a word of the path, the outermost folder first.
fn split_of(path: &str) -> Option<Split> {
    let mut words = path.split(|c: char| !c.is_alphabetic());
    words.find_map(|word| {
        let is_named = |names: &Split| names.iter().any(|name| word.eq_ignore_ascii_case(name));
        [TRAIN, VALIDATION, TEST].into_iter().find(is_named)
    })
}

impl DataUse {
    /// Divides files, of which `path` tells the path, into those for this use and others. For training are those of the split train, for
    /// evaluation those of validation, else of test; and where there are none, those whose paths name no split.
    pub(super) fn choose<T>(self, files: Vec<T>, path: impl Fn(&T) -> &str) -> (Vec<T>, Vec<T>) {
        let preferred: &[Option<Split>] = match self {
            Self::Training => &[Some(TRAIN), None],
            Self::Evaluation => &[Some(VALIDATION), Some(TEST), None],
        };
        let is_there =
            |split: &&Option<Split>| files.iter().any(|file| split_of(path(file)) == **split);
        let Some(&split) = preferred.iter().find(is_there) else {
            return (Vec::new(), files);
        };
        files
            .into_iter()
            .partition(|file| split_of(path(file)) == split)
    }
}

#[cfg(test)]
mod tests {
    use super::DataUse;

    fn choose(usage: DataUse, files: &[&'static str]) -> Vec<&'static str> {
        usage.choose(files.to_vec(), |file| file).0
    }

    #[test]
    fn files_are_chosen_by_the_words_of_their_paths() {
        use DataUse::{Evaluation, Training};
        let files = [
            "data/train-00000-of-00002.parquet",
            "data/train-00001-of-00002.parquet",
            "data/validation-00000-of-00001.parquet",
            "data/test-00000-of-00001.parquet",
        ];
        assert_eq!(choose(Training, &files), files[..2]);
        assert_eq!(choose(Evaluation, &files), files[2..3]);
        assert_eq!(choose(Evaluation, &files[3..]), files[3..]);
        for (train, evaluation) in [
            ("train.jsonl", "dev.jsonl"),
            ("my_train_file.json", "my-valid.json"),
            ("train1.txt", "test1.txt"),
            ("Training/a.txt", "Eval/a.txt"),
            ("train/test.txt", "test/train.txt"),
            ("a.txt", "validation.txt"),
            // Parts of words are no names.
            ("trainer.txt", "val.txt"),
            ("contest.txt", "test.txt"),
        ] {
            assert_eq!(choose(Training, &[evaluation, train]), [train]);
            assert_eq!(choose(Evaluation, &[evaluation, train]), [evaluation]);
        }
        assert_eq!(choose(Evaluation, &["a.txt", "train.txt"]), ["a.txt"]);
        assert!(choose(Training, &["test.txt", "val.txt"]).is_empty());
        assert!(choose(Evaluation, &["train.txt"]).is_empty());
    }
}
