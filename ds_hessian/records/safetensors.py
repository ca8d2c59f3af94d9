"""Vectors on disk in the safetensors format, one parameter at a time.

Files are read by the package `safetensors`. They are written here: the package takes all tensors
at once, and a model's vectors need not fit into one rank's memory. The format: the length of the
header (8 bytes, little endian), the header (JSON: dtype, shape and byte range of each tensor), the
bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ds_hessian.errors import ResultError
from ds_hessian.records.files import opened, replacing

Shapes = Mapping[str, tuple[int, ...]]


class Writer:
    """A writer of fp32 tensors in the order of their shapes; the file appears whole, or not at all.

    Args:
        path: The file to write.
        shapes: {name: shape} of all tensors.
        metadata: Strings to keep beside them.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, shapes: Shapes, metadata: Mapping[str, str]) -> None:
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        offset = 0
        for name, shape in shapes.items():
            stop = offset + 4 * math.prod(shape)
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, stop]}
            offset = stop
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        self.path = path

    def append(self, tensor: Tensor) -> None:
        """Write the next tensor."""
        self._file.write(tensor.detach().cpu().float().contiguous().numpy().tobytes())

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._file = stack.enter_context(replacing(self.path))
            self._file.write(self._header)
            self._opened = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._opened.__exit__(kind, error, trace)


class Reader:
    """A reader of fp32 tensors of a safetensors file by name, with the package of that name.

    Raises:
        ResultError: the file is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            opened(path).close()
            self._file = safe_open(path, framework="pt")
        except OSError as error:
            raise ResultError(f"cannot read {path}: {error}") from error
        except SafetensorError as error:
            raise ResultError(f"{path} is truncated or damaged: {error}") from error
        slices = {name: self._file.get_slice(name) for name in self._file.keys()}
        self.metadata: dict[str, str] = self._file.metadata() or {}
        self.shapes = {name: tuple(found.get_shape()) for name, found in slices.items()}
        self._dtypes = {name: found.get_dtype() for name, found in slices.items()}

    def read(self, name: str) -> Tensor:
        """Return one tensor, mapped from the file: its pages are read when they are first used.

        Writing to it leaves the file as it is.

        Raises:
            ResultError: there is none of that name, or it is not fp32.
        """
        kind = self._dtypes.get(name, "missing")
        if kind != "F32":
            raise ResultError(f"{self.path} must hold an F32 tensor for parameter {name!r}: {kind}")
        tensor: Tensor = self._file.get_tensor(name)
        return tensor
