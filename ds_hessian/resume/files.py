"""Files of a state: JSON with a checksum, and vectors whose checksum also covers what they are.

A vector's file says of which run, rank and layout it is, and which vector; the checksum is of this
and of the coordinates. So a file in the place of another one is noticed, and named.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from ds_hessian.errors import ResultError
from ds_hessian.records.fields import Json
from ds_hessian.records.files import opened, replacing
from ds_hessian.records.safetensors import Reader, Writer


@dataclass(frozen=True)
class Origin:
    """What the file of a vector is.

    Attributes:
        run: The id of the run that wrote it.
        rank: The rank that did.
        vector: The name of the vector.
        layout: The digest of the layout of the rank's vectors.
    """

    run: str
    rank: int
    vector: str
    layout: str

    def digest(self, v: Tensor) -> str:
        """Return the checksum of a vector `(n_local,)` of this origin."""
        found = hashlib.blake2b(json.dumps(asdict(self)).encode(), digest_size=16)
        found.update(v.numpy().data)
        return found.hexdigest()

    def __str__(self) -> str:
        return f"vector {self.vector} of rank {self.rank} in {self.run}"


class Entries(dict[str, Any]):
    """A JSON object of a state, in which a missing entry is damage: files of another version, or
    that were changed by hand.
    """

    def __missing__(self, name: str) -> NoReturn:
        raise ResultError(f"the state is damaged: it has no entry {name!r}")


def write_vector(path: Path, v: Tensor, origin: Origin) -> None:
    """Write a vector `(n_local,)`; the file appears whole, or not at all."""
    wide = v.detach().to("cpu", torch.float32).contiguous()
    said = {"blake2b": origin.digest(wide), "origin": json.dumps(asdict(origin))}
    with Writer(path, {"vector": tuple(wide.shape)}, said) as writer:
        writer.append(wide)


def read_vector(path: Path, origin: Origin, n_local: int) -> Tensor:
    """Return the vector in a file, `(n_local,)` fp32, mapped.

    Raises:
        ResultError: the file is missing or damaged, has another size, or is of another origin.
    """
    reader = Reader(path)
    v = reader.read("vector")
    try:
        found = Origin(**json.loads(reader.metadata["origin"]))
        right = found.digest(v) == reader.metadata["blake2b"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ResultError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if not right:
        raise ResultError(f"{path} is damaged: its checksum differs")
    if found != origin:
        other = f"{found}" if f"{found}" != f"{origin}" else f"{found}, in another layout"
        raise ResultError(f"{path} holds {other}, not {origin}: files have been exchanged")
    if tuple(v.shape) != (n_local,):
        raise ResultError(f"{path} is damaged: it has shape {tuple(v.shape)}, not ({n_local},)")
    return v


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a JSON object with its checksum; the file appears whole, or not at all."""
    text = json.dumps(content)
    with replacing(path) as file:
        file.write(f'{{"blake2b": "{text_digest(text)}", "content": {text}}}'.encode())


def read_json(path: Path) -> Json:
    """Return the JSON object in a file.

    Raises:
        ResultError: the file is missing or damaged.
    """
    try:
        with opened(path) as file:
            whole = json.loads(file.read().decode(), object_hook=Entries)
        content, digest = Entries(whole["content"]), whole["blake2b"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ResultError(f"{path} is missing or damaged: {error}") from error
    if text_digest(json.dumps(content)) != digest:
        raise ResultError(f"{path} is damaged: its checksum differs")
    return content


def text_digest(text: str) -> str:
    """Return the checksum of a text."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
