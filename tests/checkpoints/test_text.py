"""Files of data become the same micro-batches, whatever their kind and the number of ranks."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_hessian.checkpoints.text import IGNORED, Sequences, read_micro_batches
from ds_hessian.errors import ConfigError
from tests.tiers import needs

pytestmark = needs("datasets")
TOKENS = [list(range(1, n + 1)) for n in (5, 2, 1, 11, 3)]


def tokenize(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    import datasets

    table = datasets.Dataset.from_list(rows)
    if path.suffix == ".parquet":
        table.to_parquet(str(path))
    elif path.suffix == ".csv":
        table.to_csv(str(path))
    elif ".jsonl" in path.name.lower():
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    else:
        if "input_ids" in table.column_names:
            table.set_format("torch")
        table.save_to_disk(str(path))
    return path


def same(a: list[dict[str, torch.Tensor]], b: list[dict[str, torch.Tensor]]) -> bool:
    return len(a) == len(b) and all(
        x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)
        for x, y in zip(a, b, strict=True)
    )


def test_every_kind_of_file_gives_the_same_sequences(tmp_path: Path) -> None:
    texts = [{"text": " ".join(map(str, tokens))} for tokens in TOKENS]
    found = [
        read_micro_batches(write(tmp_path / name, texts), tokenize=tokenize, context=4)
        for name in ("a.jsonl", "A.JSONL", "a.jsonl.gz", "a.parquet", "a.csv", "folder")
    ]
    for name in ("ids.jsonl", "ids"):
        ids = write(tmp_path / name, [{"input_ids": tokens} for tokens in TOKENS])
        found.append(read_micro_batches(ids, context=4))
    assert all(same(found[0], each) for each in found[1:])
    # Cut at 4 tokens; a sequence of a single token has nothing to predict.
    kept = [[1, 2, 3, 4], [1, 2], [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11], [1, 2, 3]]
    rows = [
        row[mask.bool()].tolist()
        for batch in found[0]
        for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    assert rows == kept
    for batch in found[0]:
        ignored = batch["attention_mask"] == 0
        assert bool((batch["labels"][ignored] == IGNORED).all())
        assert torch.equal(batch["labels"][~ignored], batch["input_ids"][~ignored])


def test_a_text_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("1 2 3\n4 5\n\n6 7")
    (batch,) = read_micro_batches(path, Sequences(length=5), tokenize)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5], [6, 7, 0, 0, 0]]


def test_ranks_have_the_same_sequences_together_as_one(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"x": [i, 1], "y": 0.5 * i} for i in range(12)])
    wanted = Sequences(samples=12, micro_batch_size=2)
    alone = read_micro_batches(path, wanted)
    dealt = [read_micro_batches(path, wanted, rank=r, ranks=3) for r in range(3)]
    assert same(alone, [dealt[i % 3][i // 3] for i in range(6)])
    assert alone[1]["x"].tolist() == [[2, 1], [3, 1]] and alone[1]["y"].tolist() == [1.0, 1.5]


def test_masked_tokens_and_given_labels_keep_their_weights(tmp_path: Path) -> None:
    rows = [
        {"input_ids": [1, 2, 3], "attention_mask": [0, 1, 1], "labels": None},
        {"input_ids": [4, 5, 6], "attention_mask": [1, 1, 1], "labels": [-100, -100, 6]},
    ]
    (batch,) = read_micro_batches(write(tmp_path / "a.jsonl", rows))
    assert batch["labels"].tolist() == [[-100, 2, 3], [-100, -100, 6]]
    assert batch["attention_mask"].tolist() == [[0, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"text": "1 2"}\n{"text', "cannot read"),
        (
            "a.jsonl",
            '{"prompt": "1 2", "answer": "3"}\n',
            r"has the columns prompt \(str\), answer",
        ),
        (
            "a.jsonl",
            '{"text": "1 2"}\n{"text": null}\n',
            r"row 1, has the columns text \(NoneType\)",
        ),
        ("a.jsonl", '{"messages": [{"content": "1 2"}]}\n', r"columns messages \(list\)"),
        ("a.jsonl", '{"text": "1"}\n', "no sequence of two tokens"),
        ("a.jsonl", '{"input_ids": [1, 2], "labels": [1]}\n', "labels must be a list of 2"),
        ("a.jsonl", '{"input_ids": ["a", "b"]}\n', "must hold integers"),
        ("a.jsonl", '{"x": [1.0]}\n{"x": [1.0, 2.0]}\n', "same columns and sizes"),
        ("a.parquet", "no parquet", "cannot read"),
        ("a.xyz", "1 2", "ends in none of"),
        ("a.txt", " ", "no sequence of two tokens"),
        ("a.jsonl", "", "is empty"),
    ],
)
def test_unusable_data_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_micro_batches(tmp_path / name, tokenize=tokenize)
    assert capfd.readouterr().err == ""


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"x": [1.0]}] * 3)
    with pytest.raises(ConfigError, match=re.escape("3 of the 4 sequences of 2 ranks")):
        read_micro_batches(path, Sequences(micro_batch_size=2), ranks=2)
    with pytest.raises(ConfigError, match="no such data"):
        read_micro_batches(tmp_path / "b.jsonl")
    with pytest.raises(ConfigError, match="takes 4 at most"):
        read_micro_batches(path, Sequences(length=5), context=4)
    text = write(tmp_path / "t.jsonl", [{"text": "1 2"}])
    with pytest.raises(ConfigError, match="no tokenizer"):
        read_micro_batches(text)
