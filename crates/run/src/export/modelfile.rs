//! Ollama's Modelfile: the GGUF file, the chat template, what ends an answer and how tokens are chosen.

use std::fmt::Write;

use crate::export::generation_config::GenerationFile;
use crate::export::gguf::Parts;

impl Parts {
    /// The text of a Modelfile that begins with `from`, FROM and, of an adapter alone, ADAPTER; and what is to be known
    /// of it. `adds_bos`: llama.cpp puts the first token before a text by itself.
    pub fn modelfile(&self, from: &str, adds_bos: bool) -> (String, Option<String>) {
        let mut text = format!("{from}\n");
        let bos = self.tokenizer.bos_id().filter(|_| adds_bos);
        let bos = bos.and_then(|id| self.tokenizer.token(id));
        let template = self.template.as_ref();
        let go = template.map(|template| template.to_ollama(bos.as_deref()));
        let mut missing = None;
        match go {
            None => {}
            Some(Some(go)) => {
                let _ = writeln!(text, "TEMPLATE \"\"\"{go}\"\"\"");
            }
            Some(None) => {
                missing = Some(
                    "the Modelfile has no TEMPLATE, as the chat template does more than to write something around messages: Ollama has one of its own for a \
                     few well-known templates, and writes nothing around messages for others"
                        .to_string(),
                );
            }
        }
        for stop in self.stops() {
            // What is between quotes is taken as it is.
            let quote = if stop.contains('"') { "\"\"\"" } else { "\"" };
            let _ = writeln!(text, "PARAMETER stop {quote}{stop}{quote}");
        }
        let file = &self.generation;
        let is_drawn = file.do_sample;
        // Ollama has other numbers than transformers where nothing is said.
        let numbers = [
            ("temperature", Some(file.temperature())),
            ("top_k", is_drawn.then(|| file.top_k() as f64)),
            ("top_p", is_drawn.then(|| file.top_p.unwrap_or(1.0))),
            (
                "repeat_penalty",
                Some(file.repetition_penalty.unwrap_or(1.0)),
            ),
        ];
        // A model without the file is left to Ollama.
        if *file != GenerationFile::default() {
            for (name, number) in numbers {
                if let Some(number) = number {
                    let _ = writeln!(text, "PARAMETER {name} {number}");
                }
            }
        }
        (text, missing)
    }

    /// Spellings of what ends an answer.
    fn stops(&self) -> Vec<String> {
        let template = self.template.as_ref();
        let fit = template.map(|template| template.fit(&self.tokenizer));
        let mut ids = vec![self.tokenizer.eos_id()];
        ids.extend(fit.as_ref().and_then(|fit| fit.end_of_turn_id));
        ids.extend(&self.generation.eos_ids);
        let mut stops = Vec::new();
        let spellings = ids.into_iter().filter_map(|id| self.tokenizer.token(id));
        for stop in spellings.chain(fit.and_then(|fit| fit.end_of_turn)) {
            if !stops.contains(&stop) {
                stops.push(stop);
            }
        }
        stops
    }
}
