"""What transformers makes of small templates: `tests/fixtures/chat/language.jsonl`, a line for each, with the text or null where it refuses.

python scripts/reference/template_language.py (transformers 5.24, Python 3.11)
"""

import json
import pathlib

from transformers.utils.chat_template_utils import render_jinja_template

MESSAGE = {
    "role": "user",
    "content": "hi",
    "extra": {"text": "one two three", "small": 2e-07, "big": 1e16, "huge": 12345678901234567890123, "m": {"z": 1}},
}
TEMPLATES = pathlib.Path(__file__).with_suffix(".txt").read_text().splitlines()
OUTPUT = pathlib.Path(__file__).parents[2] / "tests/fixtures/chat/language.jsonl"

with OUTPUT.open("w") as output:
    for template in filter(None, TEMPLATES):
        # A line break within a template.
        template = template.replace("\N{RETURN SYMBOL}", "\n")
        try:
            [text], _ = render_jinja_template([[MESSAGE]], chat_template=template)
        except Exception:
            text = None
        output.write(json.dumps({"template": template, "text": text}, ensure_ascii=False) + "\n")
