"""Micro-batches from files of text, of tokens, or of any columns of numbers.

Files are read by the package `datasets`, row by row and no further than needed: `.txt`, `.jsonl`,
`.json`, `.parquet`, `.arrow`, `.csv`, or a folder of its `save_to_disk`. A row is

* tokens, in a column `input_ids` (maybe with `labels` and `attention_mask`);
* or text, made into tokens by the model's own tokenizer;
* or numbers: each column becomes a tensor, which the model takes as an argument of that name.

Rows of tokens that are longer than a sequence are cut into sequences, shorter ones are padded; what
is padded has no weight in attention and loss. Micro-batch i is that of rank i modulo the number of
ranks: together the ranks have the same sequences, however many they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hessian.checkpoints.sources import reading
from ds_hessian.errors import ConfigError

logger = logging.getLogger(__name__)

Tokenize = Callable[[str], Sequence[int]]
MicroBatch = dict[str, Tensor]

READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".txt": ("text", {"sample_by": "document"}),
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
    ".arrow": ("arrow", {}),
    ".csv": ("csv", {}),
}

IGNORED = -100
"""Label of a token that has no weight in the loss (torch.nn.functional.cross_entropy)."""

USUAL_LENGTH = 1024
"""Tokens of a sequence, where neither the model nor the user asks for fewer (GPT-2's context)."""


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """The part of a file that is measured.

    Attributes:
        samples: Sequences (rows, where the columns are numbers), over all ranks.
        micro_batch_size: Sequences of a micro-batch.
        length: Tokens of a sequence at most; None for the model's context, at most 1024.
        column: Name of the column of text.
    """

    samples: int = 32
    micro_batch_size: int = 4
    length: int | None = None
    column: str = "text"


def read_micro_batches(
    data: str | Path,
    sequences: Sequences | None = None,
    tokenize: Tokenize | None = None,
    context: int | None = None,
    rank: int = 0,
    ranks: int = 1,
) -> list[MicroBatch]:
    """Return this rank's micro-batches of a file.

    Args:
        data: The file.
        sequences: Which part of it; None for the defaults.
        tokenize: Returns the tokens of a text; None where there is no tokenizer.
        context: Tokens that the model takes at most, where it is known.
        rank: This rank.
        ranks: Their number.

    Raises:
        ConfigError: the file is missing, damaged, too short, or has no usable column.
        ImportError: `datasets` is not installed.
    """
    wanted, path = sequences or Sequences(), Path(data)
    length = _length(wanted.length, context)
    size = wanted.micro_batch_size
    samples = list(islice(_samples(path, wanted, tokenize, length), wanted.samples))
    if not samples:
        raise ConfigError(f"{path} holds no sequence of two tokens or more, and no row of numbers")
    groups = [samples[i : i + size] for i in range(0, len(samples), size)]
    if ranks > 1:  # all have equal numbers
        groups = [group for group in groups if len(group) == size]
        groups = groups[: len(groups) // ranks * ranks]
    if not groups:
        raise ConfigError(
            f"{path} has {len(samples)} of the {ranks * size} sequences of {ranks} ranks with a "
            f"micro-batch of {size} each: give more data, or take fewer ranks or a smaller size"
        )
    used = sum(map(len, groups))
    if used < wanted.samples and rank == 0:
        logger.warning("sequences measured of %s: %d, not %d", path, used, wanted.samples)
    return [_collated(group, path) for group in groups[rank::ranks]]


def _length(asked: int | None, context: int | None) -> int:
    if asked is None:
        return min(USUAL_LENGTH, context or USUAL_LENGTH)
    if context is not None and asked > context:
        raise ConfigError(f"sequences of {asked} tokens: the model takes {context} at most")
    return asked


def _samples(
    path: Path, wanted: Sequences, tokenize: Tokenize | None, length: int
) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(_rows(path)):
        if "input_ids" in row:
            yield from _cut(_token_row(row, f"{path}, row {number}"), length)
        elif isinstance(row.get(wanted.column), str):
            if tokenize is None:
                raise ConfigError(
                    f"{path} is text, and there is no tokenizer beside the model: name its folder"
                )
            ids = list(tokenize(row[wanted.column]))
            yield from _cut({"input_ids": ids, "labels": ids}, length)
        elif row and all(map(_is_of_numbers, row.values())):
            yield row
        else:
            kinds = ", ".join(f"{name} ({type(value).__name__})" for name, value in row.items())
            raise ConfigError(
                f"{path}, row {number}, has the columns {kinds}: expected input_ids, a text in "
                f"column {wanted.column!r}, or numbers alone; name the column of text"
            )


def _is_of_numbers(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_of_numbers, value))
    return isinstance(value, (int, float))


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file as dictionaries.

    Raises:
        ConfigError: the file is missing, damaged, or of an unknown kind.
    """
    try:
        import datasets  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise ImportError(
            "files of data are read by the package datasets: pip install datasets"
        ) from error
    if not path.exists():
        raise ConfigError(f"no such data: {path}")
    name = path.with_suffix("") if path.suffix == ".gz" else path  # datasets unpacks it
    suffix = name.suffix.lower()
    if path.is_file() and suffix not in READERS:
        raise ConfigError(f"{path} ends in none of {', '.join(READERS)}, with or without .gz")
    if path.is_file() and path.stat().st_size == 0:
        raise ConfigError(f"{path} is empty")
    with reading(path, ConfigError), _quiet(datasets.utils.logging):
        if path.is_dir():
            found = datasets.load_from_disk(str(path))
        else:
            kind, options = READERS[suffix]
            found = datasets.load_dataset(
                kind, data_files=str(path.resolve()), split="train", streaming=True, **options
            )
        if isinstance(found, Mapping):
            raise ConfigError(f"{path} holds several splits: name the folder of one")
        for row in found.with_format(None):  # a folder may say that its rows are tensors
            yield dict(row)


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Keep back what datasets logs of an error that it raises too."""
    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _token_row(row: Mapping[str, Any], place: str) -> dict[str, Sequence[int]]:
    ids, mask = row["input_ids"], row.get("attention_mask")
    labels = row.get("labels")
    if labels is None:
        labels = ids if mask is None else [t if m else IGNORED for t, m in zip(ids, mask)]  # noqa: B905
    found = {"input_ids": ids, "labels": labels}
    if mask is not None:
        found["attention_mask"] = mask
    for name, values in found.items():
        if not isinstance(values, Sequence) or len(values) != len(ids):
            raise ConfigError(f"{place}: {name} must be a list of {len(ids)} numbers")
        if not all(isinstance(value, int) for value in values):
            raise ConfigError(f"{place}: {name} must hold integers")
    return found


def _cut(row: Mapping[str, Sequence[int]], length: int) -> Iterator[dict[str, Any]]:
    """Yield a row's sequences that have a token to predict: its first one is not predicted."""
    for start in range(0, len(row["input_ids"]), length):
        part = {name: values[start : start + length] for name, values in row.items()}
        if any(label != IGNORED for label in part["labels"][1:]):
            yield part


def _collated(group: Sequence[Mapping[str, Any]], path: Path) -> MicroBatch:
    if "input_ids" not in group[0]:
        try:
            return {name: torch.tensor([row[name] for row in group]) for name in group[0]}
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path}: rows of numbers must have the same columns and sizes: {error}"
            ) from error
    longest = max(len(row["input_ids"]) for row in group)
    padding = {"input_ids": 0, "labels": IGNORED, "attention_mask": 0}
    batch = {name: torch.full((len(group), longest), fill) for name, fill in padding.items()}
    for i, row in enumerate(group):
        count = len(row["input_ids"])
        for name in batch:
            values = row.get(name, [1] * count)  # a mask that is not given
            batch[name][i, :count] = torch.tensor(values)
    return batch


def require_known_tokens(batches: Sequence[MicroBatch], count: int, source: object) -> None:
    """Refuse tokens, or labels that count, which are not below the number that a model knows.

    Raises:
        ConfigError: there is one.
    """
    for batch in batches:
        labels = batch["labels"]
        for found in (batch["input_ids"], labels[labels != IGNORED]):
            unknown = found[(found < 0) | (found >= count)]
            if unknown.numel():
                raise ConfigError(
                    f"{source} has the token {int(unknown[0])}, the model knows 0 to {count - 1}: "
                    "take the tokenizer that it was trained with"
                )


def token_mean(model: Callable[..., Any], batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return the summed loss of a causal language model, and the number of predicted tokens.

    A `loss_fn` whose mean over micro-batches weighs every token alike, however they are padded.

    Args:
        model: Returns `.loss`, the mean over the predicted tokens.
        batch: With `labels`, of which the model predicts all but the first of each sequence.
    """
    count = (batch["labels"][:, 1:] != IGNORED).sum()
    return model(**batch).loss * count, count
