"""Writes tests/fixtures/parquet: small Parquet files as pyarrow writes them, and their rows as JSON lines.

    python scripts/reference/parquet_fixtures.py

Needs pyarrow; the files in the repository are from pyarrow 26.0.1.
"""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

OUT = Path(__file__).resolve().parents[2] / "tests/fixtures/parquet"

TEXTS = [{"text": text, "score": score, "url": None} for text, score in [
    ("The first text.", 0.5), ("Ein zweiter — “schöner” Text\nmit Zeilen.", None), ("", 1.0), ("🦀" * 9, -2.0), (None, 3.0)
]]

TEXT_TYPE = pa.schema([("text", pa.string()), ("score", pa.float64()), ("url", pa.string())])

MESSAGES = [
    {"messages": [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes."}], "id": 1},
    {"messages": [{"role": role, "content": f"turn {turn}"} for turn in range(3) for role in ("user", "assistant")], "id": 2},
    {"messages": [], "id": 3},
    {"messages": [{"role": "user", "content": None}, {"role": "assistant", "content": "ö"}], "id": 4},
    {"messages": None, "id": None},
]

MESSAGE = pa.struct([("role", pa.string()), ("content", pa.large_string())])
MESSAGES_TYPE = pa.schema([("messages", pa.list_(MESSAGE)), ("id", pa.int64())])

COMPLETIONS = [{"prompt": f"{a} + {a} = ", "completion": f"{2 * a}", "labels": [a, 2 * a]} for a in range(40)]

COMPLETIONS_TYPE = pa.schema([("prompt", pa.string()), ("completion", pa.string()), ("labels", pa.list_(pa.int32()))])


def write(name, rows, schema, **options):
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), OUT / f"{name}.parquet", **options)


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    for name, rows in [("texts", TEXTS), ("messages", MESSAGES), ("completions", COMPLETIONS)]:
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        (OUT / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for codec in ["none", "snappy", "gzip", "brotli", "lz4", "zstd"]:
        write(f"messages-{codec}", MESSAGES, MESSAGES_TYPE, compression=codec)
    write("texts-plain", TEXTS, TEXT_TYPE, use_dictionary=False, data_page_version="2.0", compression="snappy")
    # Several groups of rows, as of a large file.
    write("completions-groups", COMPLETIONS, COMPLETIONS_TYPE, row_group_size=13)


main()
