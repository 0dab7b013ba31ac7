//! A chat template as Ollama has them: text of Go's text/template, with the messages of a conversation. What a template of Jinja writes around
//! messages is found by rendering short conversations; whether that is all it does, by rendering longer ones.

use serde_json::json;

use super::chat_template::ChatTemplate;
use super::conversation::Chat;

/// What is written around messages.
#[derive(Debug, Default)]
struct Pieces {
    /// Before a conversation that has no system message.
    head: String,
    /// Before and behind the system message.
    system: Option<(String, String)>,
    /// Whether that is a part of the first user's message.
    is_system_in_user: bool,
    user: (String, String),
    assistant: (String, String),
    /// Before an answer that is to be written.
    header: String,
}

const SYSTEM: &str = "Ssystemtext";
const TURNS: [&str; 3] = ["Uquestion", "Aanswer", "Vquestion"];

impl ChatTemplate {
    /// The same template for a Modelfile, without `bos` at its start, which Ollama puts there itself; `None` if it does more than to write
    /// something around messages, such as the date.
    pub fn to_ollama(&self, bos: Option<&str>) -> Option<String> {
        if self.date().is_some() {
            return None;
        }
        let render = |messages: &[(&str, &str)], prompts: bool| {
            let messages: Vec<_> = messages
                .iter()
                .map(|(role, content)| json!({"role": role, "content": content}))
                .collect();
            let chat = Chat::from_json(&messages).ok()?;
            let text = self.text(&chat, chat.messages(), prompts).ok()?;
            let text = bos.and_then(|bos| text.strip_prefix(bos)).unwrap_or(&text);
            Some(text.to_string())
        };
        let pieces = Pieces::find(&render).filter(|pieces| pieces.explain(&render));
        pieces.and_then(|pieces| pieces.to_go())
    }
}

/// What a template makes of messages (role, content), perhaps with the header of an answer.
type Render<'a> = dyn Fn(&[(&str, &str)], bool) -> Option<String> + 'a;

impl Pieces {
    fn find(render: &Render<'_>) -> Option<Self> {
        let [question, answer, second] = TURNS;
        let user = ("user", question);
        let turns = [user, ("assistant", answer), ("user", second)];
        let asked = render(&turns[..1], false)?;
        let (before, user_end) = asked.split_once(question)?;
        let prompted = render(&turns[..1], true)?;
        let header = prompted.strip_prefix(&asked)?;
        let answered = render(&turns[..2], false)?;
        let (answered, assistant_end) = answered.split_once(answer)?;
        let assistant_start = answered.strip_prefix(&asked)?;
        let again = render(&turns, false)?;
        let (_, between) = again.split_once(answer)?;
        let (between, _) = between.split_once(second)?;
        let user_start = between.strip_prefix(assistant_end)?;
        let head = before.strip_suffix(user_start)?;
        let mut pieces = Self {
            head: head.to_string(),
            user: (user_start.to_string(), user_end.to_string()),
            assistant: (assistant_start.to_string(), assistant_end.to_string()),
            header: header.to_string(),
            ..Self::default()
        };
        let with_system = render(&[("system", SYSTEM), user], false);
        let around = with_system
            .as_deref()
            .and_then(|text| text.split_once(SYSTEM));
        if let Some((start, rest)) = around {
            let (end, _) = rest.split_once(question)?;
            pieces.system = match end.strip_suffix(user_start) {
                Some(end) => Some((start.to_string(), end.to_string())),
                None => {
                    pieces.is_system_in_user = true;
                    Some((start.strip_suffix(user_start)?.to_string(), end.to_string()))
                }
            };
        }
        Some(pieces)
    }

    /// What follows from the pieces for a conversation, with the header of an answer.
    fn render(&self, messages: &[(&str, &str)]) -> String {
        let mut text = String::new();
        let mut system = None;
        for (index, (role, content)) in messages.iter().enumerate() {
            match (*role, &self.system) {
                ("system", Some((start, end))) => {
                    text += start;
                    match self.is_system_in_user {
                        true => system = Some((*content, end)),
                        false => text += &format!("{content}{end}"),
                    }
                }
                ("user", _) => {
                    if index == 0 {
                        text += &self.head;
                    }
                    text += &self.user.0;
                    if let Some((content, end)) = system.take() {
                        text += &format!("{content}{end}");
                    }
                    text += &format!("{content}{}", self.user.1);
                }
                _ => text += &format!("{}{content}{}", self.assistant.0, self.assistant.1),
            }
        }
        text + &self.header
    }

    /// Whether the pieces are all that the template does to conversations.
    fn explain(&self, render: &Render<'_>) -> bool {
        let turns = [
            ("system", "Be brief."),
            ("user", "One?"),
            ("assistant", "1"),
            ("user", "And\ntwo?"),
            ("assistant", "2, then."),
            ("user", "Three?"),
        ];
        let ends = [2, 4, 6];
        let starts = if self.system.is_some() { 0..2 } else { 1..2 };
        let mut all = starts.flat_map(|start| ends.map(|end| &turns[start..end]));
        all.all(|messages| render(messages, true).is_some_and(|text| text == self.render(messages)))
    }

    /// As Ollama executes it: `.System` is the system message, `.Messages` are all.
    fn to_go(&self) -> Option<String> {
        let Self {
            head,
            system,
            user,
            assistant,
            header,
            ..
        } = self;
        let parts = [head, &user.0, &user.1, &assistant.0, &assistant.1, header];
        let of_system = system.iter().flat_map(|(start, end)| [start, end]);
        let mut parts = parts.into_iter().chain(of_system);
        // What a Modelfile or Go's templates would read otherwise.
        if parts.any(|part| part.contains("{{") || part.ends_with('{') || part.contains("\"\"\"")) {
            return None;
        }
        let (first, in_user) = match (system, self.is_system_in_user) {
            (None, _) => (head.clone(), String::new()),
            (Some((start, end)), false) => (
                format!(
                    "{{{{ if .System }}}}{start}{{{{ .System }}}}{end}{{{{ else }}}}{head}{{{{ end }}}}"
                ),
                String::new(),
            ),
            (Some((start, end)), true) => (
                format!(
                    "{{{{ if .System }}}}{start}{{{{ else }}}}{head}{{{{ end }}}}{{{{ $first := true }}}}"
                ),
                format!(
                    "{{{{ if and $first $.System }}}}{{{{ $.System }}}}{end}{{{{ end }}}}{{{{ $first = false }}}}"
                ),
            ),
        };
        let ((user_start, user_end), (answer_start, answer_end)) = (user, assistant);
        Some(format!(
            "{first}{{{{ range $i, $message := .Messages }}}}{{{{ $last := eq (len (slice $.Messages $i)) 1 }}}}\
             {{{{ if eq .Role \"user\" }}}}{user_start}{in_user}{{{{ .Content }}}}{user_end}\
             {{{{ else if eq .Role \"assistant\" }}}}{answer_start}{{{{ .Content }}}}{{{{ if not $last }}}}{answer_end}{{{{ end }}}}{{{{ end }}}}\
             {{{{ if and $last (ne .Role \"assistant\") }}}}{header}{{{{ end }}}}{{{{ end }}}}"
        ))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use crate::chat::chat_template::ChatTemplate;
    use crate::chat::template_source::TemplateSource;

    fn ollama(template: &str) -> Option<String> {
        let source = TemplateSource::new("template".into(), template, None);
        let tokens = [
            ("bos_token".to_string(), "<s>".to_string()),
            ("eos_token".to_string(), "</s>".to_string()),
        ];
        let template = ChatTemplate::of_source(source, BTreeMap::from(tokens)).unwrap();
        template.to_ollama(Some("<s>"))
    }

    #[test]
    fn templates_become_those_of_go() {
        let chatml = include_str!("templates/chatml.jinja");
        assert_eq!(
            ollama(chatml).unwrap(),
            "{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n{{ else }}{{ end }}{{ range $i, $message := .Messages }}{{ $last := eq (len \
             (slice $.Messages $i)) 1 }}{{ if eq .Role \"user\" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n{{ else if eq .Role \"assistant\" \
             }}<|im_start|>assistant\n{{ .Content }}{{ if not $last }}<|im_end|>\n{{ end }}{{ end }}{{ if and $last (ne .Role \"assistant\") \
             }}<|im_start|>assistant\n{{ end }}{{ end }}"
        );
        for template in [
            include_str!("templates/llama3.jinja"),
            include_str!("templates/qwen.jinja"),
            include_str!("templates/mistral.jinja"),
            include_str!("templates/gemma.jinja"),
            include_str!("templates/zephyr.jinja"),
        ] {
            assert!(
                ollama(template).is_some_and(|go| !go.contains("<s>")),
                "{template}"
            );
        }
    }

    /// What depends on more than the role of a message.
    #[test]
    fn others_are_left_out() {
        let by_number =
            "{% for m in messages %}{{ loop.index }} {{ m.role }}: {{ m.content }}\n{% endfor %}";
        assert_eq!(ollama(by_number), None);
        let dated = "{% for m in messages %}{{ strftime_now('%Y') }} {{ m.role }}: {{ m.content }}\n{% endfor %}";
        assert_eq!(ollama(dated), None);
        let braces = "{% for m in messages %}{{ '{{' }}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}{{ '{{' }}assistant: {% endif %}";
        assert_eq!(ollama(braces), None);
    }
}
