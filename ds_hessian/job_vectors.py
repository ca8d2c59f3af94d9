"""The vectors and records of a job: drawn, multiplied, gathered, saved and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn, TypeVar

from torch import Tensor

from ds_hessian import ops, vector_files
from ds_hessian.backends.protocol import Backend
from ds_hessian.config import HessianConfig
from ds_hessian.config.messages import shown
from ds_hessian.errors import ConfigError, UnsupportedError
from ds_hessian.ranks import collective, summed, together
from ds_hessian.records import HessianDecomposition, HessianSpectrum, Savable
from ds_hessian.records.base import Record
from ds_hessian.records.files import path_of
from ds_hessian.show.page import SHOWN, PageKeeper
from ds_hessian.vectors import ProbeKind, random_vector, refuse_impossible_probe

S = TypeVar("S", bound=Savable)

SET = ("backend", "config", "step", "used")
"""Attributes of a `Hessian` that may be set, beside its own and methods."""


class JobVectors:
    """What a `Hessian` does with vectors and records, without measuring.

    Every method is collective.

    Args:
        backend: The job.
        config: The settings.

    Attributes:
        backend: The job.
        config: The settings; others may be set between measurements, on all ranks alike.
        output: The folder of the results.
    """

    def __init__(self, backend: Backend, config: HessianConfig) -> None:
        self.backend, self._config = backend, config
        self._scheduled = config.scheduled  # then `attach` has made a schedule
        self._output = vector_files.Output(backend, Path(config.output_path))
        self._page = PageKeeper()

    def __setattr__(self, name: str, value: object) -> None:
        method = callable(getattr(type(self), name, None))
        if not (name.startswith("_") or name in SET or method):
            raise ConfigError(
                f"hessian.{name} cannot be set: settings are set by hessian.config = "
                "hessian.config.with_overrides(...), micro-batches by hessian.use(...)"
            )
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UnsupportedError(
            "ds_hessian does not support copying or pickling a job's Hessian, which belongs to the "
            "running job: attach() gives another job its own; records can be copied and pickled"
        )

    @property
    def config(self) -> HessianConfig:
        """The settings of measurements."""
        return self._config

    @config.setter
    def config(self, config: HessianConfig) -> None:
        if not isinstance(config, HessianConfig):
            raise ConfigError(
                f"config must be a HessianConfig, got {shown(config)}: "
                "hessian.config.with_overrides(...) makes one that differs from this one"
            )
        if config.scheduled and not self._scheduled:
            raise ConfigError(
                "hessian.config has intervals or steps, and this job was attached without any: "
                "give them to attach() or initialize(), which follow its optimizer steps"
            )
        self._config = config

    @property
    def output(self) -> vector_files.Output:
        """The folder of the results, that of the settings."""
        folder = Path(self._config.output_path)
        if self._output.folder != folder:
            self._output = vector_files.Output(self.backend, folder)
        return self._output

    @property
    def rank(self) -> int:
        """The rank of this process in the job."""
        return self.backend.space.rank

    # ---- vectors

    def random_vector(self, seed: int = 0, kind: ProbeKind = "gaussian", probe: int = 0) -> Tensor:
        """Return a random unit vector, `(n_local,)` fp32; the same one in every layout.

        Raises:
            ConfigError: seed or probe is no integer of at least 0, or the kind is unknown.
        """
        backend, given = self.backend, {"seed": seed, "kind": kind, "probe": probe}
        with collective("drawing a random vector", backend.space.device, given=lambda: given):
            refuse_impossible_probe(seed, probe, kind)
            return random_vector(backend.layout, backend.space, seed, probe, kind)

    def dot(self, a: Tensor, b: Tensor) -> float:
        """Return the global inner product, summed in fp64; the same bits on every rank."""
        space = self.backend.space
        space.all_reduces += 1

        def partial() -> float:
            return float(ops.dots([(space.vector(a), space.vector(b))], space.n_owned)[0])

        return summed("taking an inner product", partial, space.device)

    def gather(self, v: Tensor) -> dict[str, Tensor] | None:
        """Return `{parameter name: tensor in its unsharded shape}` on rank 0, None elsewhere.

        For small models, tests and export: parameters travel one by one, in full.
        """
        return vector_files.gather(self.backend, v)

    def scatter(self, full: Mapping[str, Tensor] | None) -> Tensor:
        """Return the vector of rank 0's tensors, the inverse of `gather`; other ranks pass None.

        Raises:
            ConfigError: on rank 0 a trainable parameter is missing, or has another shape; the other
                ranks raise MeasurementError.
        """
        return vector_files.scatter(self.backend, full)

    def save_vectors(
        self, vectors: Tensor, path: str | Path, metadata: Mapping[str, object] | None = None
    ) -> Path:
        """Write vectors `(k, n_local)` as `{parameter name: (k, *unsharded shape)}`, safetensors.

        Parameters travel to rank 0 one by one; any layout can load the file.

        Args:
            vectors: Vectors such as the eigenvectors of `eigenpairs`.
            path: Path of the file.
            metadata: Kept beside them, as JSON.

        Raises:
            MeasurementError: rank 0 could not write.
        """
        return vector_files.save_vectors(self.backend, vectors, path, metadata)

    def load_vectors(self, path: str | Path) -> Tensor:
        """Return the vectors that `save_vectors` wrote, `(k, n_local)`, in this job's layout.

        Raises:
            ResultError: on rank 0 the file is missing, damaged, or of another model; the other
                ranks raise MeasurementError.
        """
        return vector_files.load_vectors(self.backend, path)

    # ---- records

    def save(self, record: Savable, folder: str | Path | None = None) -> Path:
        """Write a record: `<kind>.json` and `<kind>.npz` on rank 0, its vectors, a picture.

        Eigenvectors and solutions go to `<kind>.safetensors`, as `save_vectors` writes them; the
        picture shows a spectrum or decomposition, unless `plot` is off. In a folder of the run, its
        page is written too: `<output_path>/<name of that folder>.html`.

        Args:
            record: What to write.
            folder: Where to; None for `<output_path>/step_<global step>`, with the name of the
                operator after it where that is not the Hessian.

        Raises:
            ConfigError: another job uses the `output_path`.
            MeasurementError: rank 0 could not write.
        """
        device = self.backend.space.device
        with collective("saving a record", device, given=lambda: {"record": record.kind}):
            source = record.provenance
            found = path_of(folder) if folder else self.output.of_step(source.step, source.operator)
            vector_files.save_record(self.backend, record, found)
            drawn = isinstance(record, (HessianSpectrum, HessianDecomposition))
            if self.config.plot and drawn:
                picture = found / f"{record.kind}.png"
                with together(f"drawing {picture}", device=device):
                    if self.rank == 0:
                        record.plot(picture)
            on_page = isinstance(record, SHOWN) and found.parent == self.output.folder
            if self.config.plot and self.rank == 0 and on_page:
                self._page.update(self.output.folder)
            return found

    def load(self, record: type[S], folder: str | Path) -> S:
        """Return the record of a kind that `save` wrote, its vectors in this job's layout.

        Raises:
            ResultError: files are missing, damaged, of another schema, another model, or of
                different records; on ranks that do not read them, MeasurementError.
        """
        if not (isinstance(record, type) and issubclass(record, Record)):
            raise ConfigError(
                f"load() takes a class of records, such as HessianSpectrum, got {shown(record)}"
            )
        return vector_files.load_record(self.backend, record, folder)
