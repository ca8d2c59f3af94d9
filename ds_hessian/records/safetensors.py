"""Vectors on disk in the safetensors format, one parameter at a time.

The format: the length of the header (8 bytes, little endian), the header (JSON: dtype, shape and
byte range of each tensor), the bytes. Written here rather than by the package of that name, which
takes all tensors at once: a model's vectors need not fit into one rank's memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor

from ds_hessian.errors import ResultError

Shapes = Mapping[str, tuple[int, ...]]


class Writer:
    """Writes fp32 tensors in the order of their shapes; the file appears whole, or not at all.

    Args:
        path: Of the file.
        shapes: {name: shape} of all tensors.
        metadata: Strings to keep beside them.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, shapes: Shapes, metadata: Mapping[str, str]) -> None:
        self.path, self._temporary = path, path.with_name(f".{path.name}.{os.getpid()}.tmp")
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        offset = 0
        for name, shape in shapes.items():
            stop = offset + 4 * math.prod(shape)
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, stop]}
            offset = stop
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._temporary.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def append(self, tensor: Tensor) -> None:
        """The next tensor."""
        self._file.write(tensor.detach().cpu().float().contiguous().numpy().tobytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()
        if kind is None:
            os.replace(self._temporary, self.path)
        else:
            self._temporary.unlink(missing_ok=True)


class Reader:
    """Reads fp32 tensors of a safetensors file by name.

    Raises:
        ResultError: the file is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                self._header = json.loads(file.read(size))
            self._start = 8 + size
            self.metadata: dict[str, str] = self._header.pop("__metadata__", {})
            self.shapes = {name: tuple(entry["shape"]) for name, entry in self._header.items()}
            end = max((entry["data_offsets"][1] for entry in self._header.values()), default=0)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ResultError(f"{path} is not a readable safetensors file: {error}") from error
        if path.stat().st_size != self._start + end:
            raise ResultError(
                f"{path} is truncated or damaged: it has {path.stat().st_size} bytes, its header "
                f"tells of {self._start + end}"
            )

    def read(self, name: str) -> Tensor:
        """One tensor, mapped from the file: its pages are read when they are first used.

        Writing to it leaves the file as it is.

        Raises:
            ResultError: there is none of that name, or it is not fp32.
        """
        entry = self._header.get(name)
        if entry is None or entry["dtype"] != "F32":
            kind = "missing" if entry is None else entry["dtype"]
            raise ResultError(f"{self.path} must hold an F32 tensor for parameter {name!r}: {kind}")
        first, stop = entry["data_offsets"]
        if first == stop:
            return torch.zeros(entry["shape"])
        at, shape = self._start + first, tuple(entry["shape"])
        return torch.from_numpy(np.memmap(self.path, "<f4", mode="c", offset=at, shape=shape))
