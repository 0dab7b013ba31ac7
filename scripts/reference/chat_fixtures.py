#!/usr/bin/env python3
"""Writes tests/fixtures/chat: what transformers makes of conversations and texts with the formats of several families.

    python3 scripts/reference/chat_fixtures.py tests/fixtures/chat

Each folder is a checkpoint without a model: a small BPE trained here with the family's special tokens, and its chat format.
    cases.jsonl       {"messages", "tools", "text", "ids", "assistant"}: apply_chat_template, and the mask of the assistant's tokens
    texts.jsonl       {"text", "ids", "plain_ids"}: the tokenizer with and without add_special_tokens
    marked.jinja      the template with {% generation %} tags, which the mask comes from; the checkpoint's own has none
"""
import json, pathlib, sys
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers, Regex
from transformers import AutoTokenizer

TEXT = ["What is the capital of France? The capital of France is Paris.", "You are a helpful assistant.", "Hello, how are you today?",
        "system user assistant tool", "I am fine, thank you. And you?", "def f(x):\n    return x + 1\n", '{"name": "weather", "city": "Paris"}',
        "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n", "naïve café, 漢字, emoji 🦀 and the rest  of it\n\n"] * 3

# Beginning and end of what the assistant writes become tags, or nothing.
B, E = "@BEGIN@", "@END@"

CHATML = """{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}@BEGIN@{{ m['content'] + '<|im_end|>' }}@END@{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

ZEPHYR = """{% for m in messages %}
{% if m['role'] == 'assistant' %}
{{ '<|assistant|>\\n' }}@BEGIN@{{ m['content'] + eos_token }}@END@{{ '' }}
{% else %}
{{ '<|' + m['role'] + '|>\\n' + m['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set turns = messages[1:] %}{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}{% else %}{% set turns = messages %}{% set system = '' %}{% endif %}
{%- for m in turns -%}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate: user, assistant, user, ..') }}{% endif -%}
{%- if loop.index0 == 0 %}{% set content = system + m['content'] %}{% else %}{% set content = m['content'] %}{% endif -%}
{%- if m['role'] == 'user' -%}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{%- elif m['role'] == 'assistant' -%}@BEGIN@{{ ' ' + content.strip() + ' ' + eos_token }}@END@
{%- endif -%}
{%- endfor -%}"""

LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{%- if not day is defined %}{%- set day = '26 Jul 2024' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\nToday Date: ' + day + '\\n\\n' }}
{%- if tools is not none %}
    {{- 'You have these functions:\\n\\n' }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- '\\n\\n' }}
    {%- endfor %}
{%- endif %}
{{- system + '<|eot_id|>' }}
{%- for m in messages %}
    {%- if 'tool_calls' in m %}
        {%- if not m.tool_calls | length == 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}@BEGIN@{{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}@END@
    {%- elif m.role == 'tool' or m.role == 'ipython' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if m.content is mapping or m.content is iterable and m.content is not string %}{{- m.content | tojson }}{%- else %}{{- m.content }}{%- endif %}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}{%- if m['role'] == 'assistant' %}@BEGIN@{{- m['content'] | trim + '<|eot_id|>' }}@END@{%- else %}{{- m['content'] | trim + '<|eot_id|>' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}{%- set turns = messages[1:] %}{%- else %}{%- set turns = messages %}{%- endif %}
{{- bos_token }}
{%- for m in turns %}
    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('Roles must alternate: user, assistant, user, ..') }}{%- endif %}
    {%- if m['role'] == 'user' %}
        {%- if loop.last and system is defined %}
            {{- '[INST] ' + system + '\\n\\n' + m['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + m['content'] + '[/INST]' }}
        {%- endif %}
    {%- elif m['role'] == 'assistant' %}
        {{- '' }}@BEGIN@{{- ' ' + m['content'] + eos_token }}@END@
    {%- endif %}
{%- endfor %}
"""

QWEN_TOOLS = """    {{- '# Tools\\n\\nYou may call one or more functions.\\n\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
"""
QWEN_CALLS = """{%- for call in m.tool_calls %}
                {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
                {{- '\\n<tool_call>\\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}{{- call.arguments | tojson }}{{- '}\\n</tool_call>' }}
            {%- endfor %}"""
QWEN_RESPONSE = """{%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != 'tool') %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- m.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != 'tool') %}{{- '<|im_end|>\\n' }}{%- endif %}"""

QWEN25 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] + '\\n\\n' }}{%- else %}{{- 'You are a helpful assistant.\\n\\n' }}{%- endif %}
""" + QWEN_TOOLS + """{%- else %}
    {%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}{%- else %}{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- for m in messages %}
    {%- if (m.role == 'user') or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}@BEGIN@{%- if m.content %}{{- m.content }}{%- endif %}
            """ + QWEN_CALLS + """
        {{- '<|im_end|>' }}@END@{{- '\\n' }}
    {%- elif m.role == 'tool' %}
        """ + QWEN_RESPONSE + """
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
""" + QWEN_TOOLS + """{%- else %}
    {%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- set ns = namespace(searching=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == 'user' and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.content is string %}{%- set content = m.content %}{%- else %}{%- set content = '' %}{%- endif %}
    {%- if (m.role == 'user') or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set thoughts = '' %}
        {%- if m.reasoning_content is string %}
            {%- set thoughts = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + m.role + '\\n' }}@BEGIN@
        {%- if loop.index0 > ns.last_query and (loop.last or (not loop.last and thoughts)) %}
            {{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- if m.tool_calls %}
            """ + QWEN_CALLS + """
        {%- endif %}
        {{- '<|im_end|>' }}@END@{{- '\\n' }}
    {%- elif m.role == 'tool' %}
        """ + QWEN_RESPONSE + """
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""


def plain(template):
    return template.replace(B, "").replace(E, "")


def marked(template):
    # A tag swallows the line break after it, which the text around it must not lose.
    return template.replace(B, "{% generation %}").replace(E, "{% endgeneration %}")


def byte_level(special, bos=None, pattern=None):
    t = Tokenizer(models.BPE())
    split = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    t.pre_tokenizer = pre_tokenizers.Sequence(split + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern)])
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=380, special_tokens=[AddedToken(s, special=True) for s in special], show_progress=False,
                                                    initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    post = processors.ByteLevel(trim_offsets=False)
    if bos:
        first = processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, t.token_to_id(bos))])
        post = processors.Sequence([post, first])
    t.post_processor = post
    return t


def sentencepiece(special, bos):
    """As Llama 2's: spaces are letters, one comes first, and bytes stand in for unknown letters."""
    t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    letters = sorted(set("".join(TEXT[:5]).replace(" ", "▁")))
    t.train_from_iterator([x.replace("\n", "<0x0A>") for x in TEXT[:5] * 3], trainers.BpeTrainer(
        vocab_size=460, special_tokens=special + [f"<0x{i:02X}>" for i in range(256)], initial_alphabet=letters, show_progress=False, max_token_length=8))
    # The bytes are tokens of the model, not added ones.
    data = json.loads(t.to_str())
    data["added_tokens"] = [a for a in data["added_tokens"] if a["content"] in special]
    t = Tokenizer.from_str(json.dumps(data))
    t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    t.post_processor = processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, t.token_to_id(bos))])
    return t


SPM = ["<unk>", "<s>", "</s>"]
IM = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
HEADERS = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
FAMILIES = {
    "llama2": (LLAMA2, sentencepiece(SPM, "<s>"), {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "llama3": (LLAMA3, byte_level(HEADERS, "<|begin_of_text|>", PATTERN), {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}),
    "qwen2.5": (QWEN25, byte_level(IM, None, PATTERN), {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}),
    "qwen3": (QWEN3, byte_level(IM, None, PATTERN), {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "added_tokens_decoder": {
        str(380 + i): {"content": c, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": False}
        for i, c in enumerate(["<tool_call>", "</tool_call>", "<think>", "</think>"])}}),
    "mistral": (MISTRAL, sentencepiece(SPM + ["[INST]", "[/INST]"], "<s>"), {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "chatml": (CHATML, byte_level(IM), {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}),
    "zephyr": (ZEPHYR, sentencepiece(SPM, "<s>"), {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "additional_special_tokens": ["<|user|>", "<|assistant|>"]}),
    # Tokenizers whose configuration says more than tokenizer.json.
    "split": (CHATML, byte_level(IM), {"eos_token": "<|im_end|>", "split_special_tokens": True}),
    "added": (CHATML, byte_level(["<|endoftext|>"]), {"eos_token": "<|endoftext|>", "add_bos_token": True, "bos_token": "<|endoftext|>", "pad_token": "<pad>", "added_tokens_decoder": {
        "0": {"content": "<|endoftext|>", "lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True},
        "380": {"content": "<|im_start|>", "lstrip": False, "rstrip": True, "single_word": False, "normalized": False, "special": True},
        "381": {"content": "<|im_end|>", "lstrip": True, "rstrip": False, "single_word": False, "normalized": False, "special": True},
        "382": {"content": "Paris", "lstrip": False, "rstrip": False, "single_word": True, "normalized": True, "special": False}}}),
}
user = lambda content: {"role": "user", "content": content}
bot = lambda content, **more: {"role": "assistant", "content": content, **more}
system = lambda content: {"role": "system", "content": content}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The weather of a city, e.g. Zürich", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 1}}, "required": ["city"]}}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2, "exact": True, "unit": None, "at": [], "x": 0.5}}}
CASES = [
    ([user("What is the capital of France?"), bot("Paris.")], None),
    ([system("You are a helpful assistant."), user("Hello"), bot("Hello, how are you today?")], None),
    ([user("Hello"), bot("I am fine"), user("And you?"), bot("the rest\n\n  of it "), user("naïve"), bot("漢字 🦀")], None),
    ([system("  spaces  "), user("  leading and trailing \n"), bot(" \n so has this ")], None),
    ([user(""), bot("an answer to nothing")], None),
    ([user("nothing"), bot("")], None),
    ([user("café 漢字"), bot("🦀🦀 emoji, and 1234567 numbers's")], None),
    ([user("a</s> b<|im_end|> c<|eot_id|> d"), bot("spelled <s> out <|im_start|>user"), user("x"), bot("y")], None),
    ([user("no answer yet")], None),
    ([system("You are a helpful assistant."), user("one"), bot("two"), user("three"), bot("four")], None),
]
THOUGHTS = [
    ([user("q"), bot("<think>\nlong thoughts\n</think>\n\nan answer"), user("again"), bot("<think>\nmore\n</think>\n\nanother")], None),
    ([user("q"), bot("an answer", reasoning_content="thoughts apart"), user("again"), bot("another")], None),
]
CALLS = [([system("You are a helpful assistant."), user("What is the weather?"), bot("", tool_calls=[CALL]),
           {"role": "tool", "name": "weather", "content": "sunny"}, bot("Sunny."), user("Hello"), bot("Hello")], TOOLS)]
TEXTS = ["", "Hello", " Hello  Paris Parisian ", "naïve 漢字\n\n🦀", "a <|im_start|>  b  <|im_end|> c</s>d<s> <pad> <|begin_of_text|>", "<|user|>\nx"]


def main():
    out = pathlib.Path(sys.argv[1])
    for name, (template, tokenizer, config) in FAMILIES.items():
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}
        # One of each way in which checkpoints have their template.
        for file in ("chat_template.jinja", "chat_template.json"):
            (folder / file).unlink(missing_ok=True)
        if name in ("llama2", "zephyr"):
            config["chat_template"] = plain(template)
        elif name == "qwen2.5":
            config["chat_template"] = [{"name": "default", "template": plain(template)}]
        else:
            (folder / "chat_template.jinja").write_text(plain(template))
        (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=1) + "\n")
        (folder / "marked.jinja").write_text(marked(template))
        t = AutoTokenizer.from_pretrained(folder)
        cases = CASES + (THOUGHTS if name == "qwen3" else []) + (CALLS if name in ("qwen2.5", "qwen3", "llama3") else [])
        with open(folder / "cases.jsonl", "w") as file:
            for messages, tools in cases:
                text = t.apply_chat_template(messages, tools=tools, tokenize=False)
                ids = t.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=False)
                with_marks = t.apply_chat_template(messages, tools=tools, chat_template=marked(template), tokenize=False)
                assert with_marks == text, (name, with_marks, text)
                got = t.apply_chat_template(messages, tools=tools, chat_template=marked(template), tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
                assert got["input_ids"] == ids
                case = {"messages": messages, "tools": tools, "text": text, "ids": ids, "assistant": got["assistant_masks"]}
                file.write(json.dumps(case, ensure_ascii=False) + "\n")
        with open(folder / "texts.jsonl", "w") as file:
            for text in TEXTS:
                case = {"text": text, "ids": t(text)["input_ids"], "plain_ids": t(text, add_special_tokens=False)["input_ids"]}
                file.write(json.dumps(case, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
