//! What a run learns from, read: samples, and what is to be said of them.

use std::path::{Path, PathBuf};

use candle_comm::{RunConfig, start_threads};
use candle_core::{Result, bail};
use candle_trainer::hub::DataUse;
use candle_trainer::{
    ChatTemplate, Columns, Data, DataSpec, Overlong, RecordEncoder, Samples, TokenCache, Tokenizer,
    Tokens, counted,
};
use jiff::civil::Date;

use crate::args::data::{DataArgs, in_words};
use crate::args::sequences::SequenceArgs;
use crate::args::training::TrainingArgs;

/// What was read.
pub struct TrainingData {
    /// What is trained on.
    pub samples: Samples,
    /// What is evaluated on, if there is an evaluation.
    pub eval_samples: Option<Samples>,
    /// What is left out, a line each.
    pub warnings: Vec<String>,
    /// Files and folders that were read.
    pub inputs: Vec<PathBuf>,
    /// Whether there are conversations, rendered with a chat template.
    pub has_conversations: bool,
    /// The date in the conversations, if the chat template prints it.
    pub date: Option<Date>,
    /// The chat template, if it is not the model's own.
    pub chosen_template: Option<ChatTemplate>,
}

impl TrainingData {
    /// How much of what is evaluated on is trained on, too, in words.
    fn shared(&self) -> Option<String> {
        let evaluated = self.eval_samples.as_ref()?;
        let num_shared = evaluated.num_shared_with(&self.samples);
        let records = counted(num_shared, "record");
        (num_shared > 0).then(|| {
            format!(
                "trained on and evaluated on: {records} of the {} to evaluate on, which the data has more than once (of a text its sequences count); their \
                 loss says nothing about what was not seen\nhint: leave repeated records and files out of --data, and the files of --eval-data",
                evaluated.num_pieces()
            )
        })
    }
}

/// The model that data is read for.
#[derive(Clone, Copy)]
pub struct DataModel<'a> {
    /// Its tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// Its folder, with its chat template.
    pub dir: Option<&'a Path>,
    /// Folder of the adapter that training goes on with.
    pub adapter: Option<&'a Path>,
}

/// How records are read.
struct Reader<'a> {
    encoder: RecordEncoder<'a>,
    /// The chat template, if it is not the model's own.
    chosen_template: Option<ChatTemplate>,
    columns: Columns,
    sequences: &'a SequenceArgs,
    seed: u64,
    /// Tokens that were made before.
    cache: Option<TokenCache>,
}

impl DataArgs {
    /// The samples of a run. The date of the chat template is that of the checkpoint from which the run goes on, if it does.
    pub(crate) fn read(
        &self,
        model: DataModel,
        training: &TrainingArgs,
        ranks: &RunConfig,
        cache: Option<TokenCache>,
    ) -> Result<TrainingData> {
        let (batches, evaluation) = (&training.batches, &training.evaluation);
        let seed = batches.seed;
        let is_restart = ranks.env.num_restarts() > 0;
        let noted = || training.checkpoints.noted_date(is_restart);
        let date = self.date.or_else(noted);
        let reader = self.reader(model, (&batches.sequences, seed), date, cache)?;
        let mut read = reader.read(&self.data, DataUse::Training)?;
        if let Some(fraction) = evaluation.eval_fraction {
            let num_records = read.samples.num_pieces();
            let [trained, held_out] = read.samples.hold_out(fraction, seed)?;
            if fraction * (num_records as f64) < 0.5 {
                let part = 100.0 / num_records as f64;
                read.warnings.push(format!(
                    "--eval-fraction {fraction} of {} is none: one is held out, {part:.1}% of them",
                    counted(num_records, "record")
                ));
            }
            read.eval_samples = Some(held_out);
            read.samples = trained;
        } else if !evaluation.eval_data.is_empty() {
            let of_evaluation = reader.read(&evaluation.eval_data, DataUse::Evaluation)?;
            read.date = read.date.or(of_evaluation.date);
            read.has_conversations |= of_evaluation.has_conversations;
            read.eval_samples = Some(of_evaluation.samples);
            read.warnings.extend(of_evaluation.warnings);
            read.inputs.extend(of_evaluation.inputs);
        }
        read.warnings.extend(read.shared());
        self.check(&batches.sequences, &read)?;
        reader.note_template(model.tokenizer, &mut read);
        Ok(read)
    }

    /// The samples that are shown where nothing is trained.
    ///
    /// # Errors
    /// Data that cannot be read, or has nothing to learn; flags that have nothing to do with it.
    pub fn preview(
        &self,
        model: DataModel,
        sequences: (&SequenceArgs, u64),
    ) -> Result<TrainingData> {
        let reader = self.reader(model, sequences, self.date, TokenCache::from_env())?;
        let mut read = reader.read(&self.data, DataUse::Training)?;
        self.check(sequences.0, &read)?;
        reader.note_template(model.tokenizer, &mut read);
        Ok(read)
    }

    /// What reads records, with the chat template that these flags choose, or that of the adapter.
    fn reader<'a>(
        &self,
        DataModel {
            tokenizer,
            dir,
            adapter,
        }: DataModel<'a>,
        (sequences, seed): (&'a SequenceArgs, u64),
        date: Option<Date>,
        cache: Option<TokenCache>,
    ) -> Result<Reader<'a>> {
        let choice = self.chat_template.as_deref();
        let chosen_template = ChatTemplate::in_place_of_own(dir, choice, adapter, tokenizer)?;
        // The model's own is not asked for then, as it may be why another one is chosen.
        let dir = dir.filter(|_| chosen_template.is_none());
        let mut encoder = RecordEncoder::new(tokenizer, dir, sequences.encoder_config())?;
        if let Some(template) = chosen_template.clone() {
            encoder = encoder.with_template(template);
        }
        if let Some(date) = date {
            encoder = encoder.with_date(date);
        }
        if let Some(kwargs) = &self.chat_template_kwargs {
            encoder = encoder.with_template_kwargs(kwargs)?;
        }
        Ok(Reader {
            encoder,
            chosen_template,
            columns: self.columns(),
            sequences,
            seed,
            cache,
        })
    }

    /// An error if a flag about conversations is given, and has nothing to do with what was read.
    fn check(&self, sequences: &SequenceArgs, read: &TrainingData) -> Result<()> {
        if sequences.mask_history && !read.has_conversations {
            bail!(
                "--mask-history is given, and the data has no conversations, which alone have a history"
            );
        }
        if let Some(choice) = self
            .chat_template
            .as_ref()
            .filter(|_| !read.has_conversations)
        {
            bail!(
                "--chat-template {choice} is given, and the data has no conversations: texts, and prompts with completions, are learned as they \
                 are\nhint: --columns instruction=question,output=answer makes conversations of such columns"
            );
        }
        if self.chat_template_kwargs.is_some() && !read.has_conversations {
            bail!(
                "--chat-template-kwargs is given, and the data has no conversations, which alone are rendered"
            );
        }
        match (self.date, read.date) {
            (Some(date), None) => bail!(
                "--date {date} is given, and nothing asks for the date: the data has no conversations, or the chat template prints none"
            ),
            _ => Ok(()),
        }
    }
}

impl Reader<'_> {
    /// Adds the chat template to what was read, if it is not the model's own, and what to warn of it.
    fn note_template(self, tokenizer: &Tokenizer, read: &mut TrainingData) {
        read.chosen_template = self.chosen_template;
        let template = read.chosen_template.as_ref();
        let warning = template.and_then(|template| template.fit(tokenizer).warning());
        read.warnings.extend(warning);
    }

    /// The samples of what is named.
    fn read(&self, specs: &[DataSpec], usage: DataUse) -> Result<TrainingData> {
        let data = Data::find(specs, usage)?.with_columns(&self.columns);
        self.samples(&data)
            .map_err(|err| err.context(format!("the data {}", in_words(specs))))
    }

    fn samples(&self, data: &Data) -> Result<TrainingData> {
        start_threads()?;
        let tokens = Tokens::encode(data, &self.encoder, self.cache.as_ref())?;
        let (seq_len, overlong) = (self.sequences.seq_len(), self.sequences.overlong);
        if let (Overlong::Error, Some(record)) = (overlong, tokens.first_longer_than(seq_len)) {
            bail!(
                "{} has {} tokens, more than a sequence of {seq_len}, and --overlong is error\nhint: choose a longer --seq-len, or --overlong truncate or drop",
                tokens.place_of(record, data),
                tokens.record(record)?.ids.len()
            );
        }
        let samples = Samples::new(&tokens, self.sequences.config(data.specs(), self.seed))?;
        let mut warnings = tokens.report().warnings(data);
        if samples.num_overlong() > 0 {
            let became = match overlong {
                Overlong::Truncate => "truncated",
                Overlong::Drop | Overlong::Error => "dropped",
            };
            let records = counted(samples.num_overlong(), "record");
            let mut warning = format!("{became} {records} longer than {seq_len} tokens");
            if samples.num_cut_tokens() > 0 {
                let tokens = counted(samples.num_cut_tokens(), "token");
                warning += &format!(", and left out {tokens} of them");
            }
            warnings.push(warning);
        }
        if samples.num_cut_off() > 0 {
            let records = counted(samples.num_cut_off(), "record");
            warnings.push(format!(
                "of these left out {records} with nothing to learn within {seq_len} tokens"
            ));
        }
        let template = self.encoder.template();
        let of_conversations = template.filter(|_| tokens.has_conversations());
        let named = data.specs().iter().map(|spec| spec.path.as_path());
        let inputs = named.chain(data.files()).filter(|path| path.exists());
        Ok(TrainingData {
            inputs: inputs.map(Path::to_path_buf).collect(),
            samples,
            eval_samples: None,
            warnings,
            has_conversations: of_conversations.is_some(),
            date: of_conversations.and_then(ChatTemplate::date),
            chosen_template: None,
        })
    }
}
