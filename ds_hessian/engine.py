"""A DeepSpeed engine's Hessian: `initialize`, `attach`, and the object they hang on the engine.

    engine, optimizer, _, scheduler = ds_hessian.initialize(model=model, config=config, ...)
    spectrum = engine.hessian_spectrum(batches)

`initialize` is `deepspeed.initialize`: same arguments, same return value. If the config has no
`"hessian"` section (or one with `"enabled": false`), nothing else happens.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hessian.analyses import Analyses, cost_of
from ds_hessian.backends.objective import LossFn, Objective
from ds_hessian.backends.zero import ZeroBackend, refuse_unsupported, shape
from ds_hessian.config import HessianConfig
from ds_hessian.errors import ConfigError
from ds_hessian.krylov import LanczosRun, slq
from ds_hessian.operators import FiniteDifferenceHessian, Product
from ds_hessian.provenance import describe_run
from ds_hessian.results import HessianSpectrum, SpectrumProgress
from ds_hessian.schedule import Schedule
from ds_hessian.vectors import ProbeKind, random_vector, together


class HessianEngine(Analyses):
    """The Hessian of one DeepSpeed engine; `engine.hessian`.

    Every method is collective: all ranks call it, in the same order, outside of a forward/backward
    pair. The training state is bit for bit the same after it, also when it raises.

    Args:
        engine: From `deepspeed.initialize`.
        config: Defaults for everything.

    Raises:
        UnsupportedError: the engine uses a feature on which products would be wrong.
    """

    def __init__(self, engine: Any, config: HessianConfig | None = None) -> None:
        refuse_unsupported(engine)
        self.engine = engine
        self.config = config or HessianConfig()
        self.backend = ZeroBackend(engine)
        self._operator: FiniteDifferenceHessian | None = None
        self._objective: Objective | None = None

    # ---- what H is

    def use(self, batches: Iterable[Any], loss_fn: LossFn | None = None) -> HessianEngine:
        """Fix the micro-batches (this rank's own) and the loss that define H; returns self.

        Args:
            batches: Micro-batches; all of them count, whatever `num_micro_batches` says.
            loss_fn: `loss_fn(model, batch)` returning the mean loss of a micro-batch, or a pair
                (summed loss, count) for token-weighted averaging. None where the model returns its
                loss as a scalar, first in a tuple, or as `.loss`.

        Raises:
            ConfigError: no batches, or different numbers of them on different ranks.
            MeasurementError: the iterable raised on some rank.
        """
        with together("reading the batches", device=self.backend.device):
            objective = Objective(batches, loss_fn)
        self.backend.use(objective)
        self._objective = objective
        return self

    @property
    def rank(self) -> int:
        """This process's rank in the job."""
        return self.backend.space.rank

    @property
    def ready(self) -> bool:
        """True once `use` (or a first spectrum) has fixed the micro-batches."""
        return self._objective is not None

    @contextmanager
    def measuring(self, **overrides: Any) -> Iterator[FiniteDifferenceHessian]:
        """Guard several products at once: the gradient at the weights is evaluated only once.

        Inside, training must not go on; `matvec` uses the open operator, which is also yielded.

        Args:
            overrides: Config values for this measurement, such as `displacement=1e-3`.

        Raises:
            ConfigError: `use` was not called, or an override is unknown.
        """
        if self._objective is None:
            raise ConfigError("no micro-batches yet: call hessian.use(batches) first")
        if self._operator is not None:
            raise ConfigError("a measurement is open already: leave `measuring()` first")
        config = self.config.with_overrides(**overrides)
        self.backend.use(self._objective, config.dropout, config.finite_difference.precision)
        with self.backend.measuring():
            self._operator = FiniteDifferenceHessian(
                self.backend, config.finite_difference.displacement
            )
            try:
                yield self._operator
            finally:
                self._operator = None

    # ---- vectors

    def random_vector(self, seed: int = 0, kind: ProbeKind = "gaussian", probe: int = 0) -> Tensor:
        """A random unit vector, `(n_local,)` fp32; the same one in every layout."""
        return random_vector(self.backend.layout, self.backend.space, seed, probe, kind)

    def dot(self, a: Tensor, b: Tensor) -> float:
        """Global inner product, summed in fp64; the same bits on every rank."""
        return self.backend.space.dot(a, b)

    def gather(self, v: Tensor) -> dict[str, Tensor] | None:
        """`{parameter name: tensor in its unsharded shape}` on rank 0, None elsewhere.

        For small models, tests and export: parameters travel one by one, in full.
        """
        full = {name: self._whole(v, name, p) for name, p in self._parameters()}
        return full if self.rank == 0 else None

    def _whole(self, v: Tensor, name: str, p: Any) -> Tensor:
        """A parameter's coordinates of v in its unsharded shape, on rank 0."""
        tensor = torch.zeros(shape(p).numel(), dtype=torch.float32, device=self.backend.device)
        for fragment, part in self.backend.layout:
            if fragment.name == name and fragment.owned:
                tensor[fragment.start : fragment.start + fragment.numel] = v[part]
        dist.reduce(tensor, dst=0)
        return tensor.reshape(shape(p))

    def scatter(self, full: Mapping[str, Tensor] | None) -> Tensor:
        """The reverse of `gather`: rank 0 passes the tensors, the others None.

        Raises:
            MeasurementError: a trainable parameter is missing, or has another shape.
        """
        v = self.backend.space.zeros()
        for name, p in self._parameters():
            tensor = torch.zeros(shape(p).numel(), dtype=torch.float32, device=self.backend.device)
            with together(f"scattering parameter {name!r}", device=self.backend.device):
                if self.rank == 0:
                    tensor.copy_(_expect(full, name, shape(p)).reshape(-1))
            self._deal(v, name, tensor)
        return v

    def _deal(self, v: Tensor, name: str, whole: Tensor) -> None:
        """Write rank 0's values of a parameter into every rank's part of v."""
        flat = whole.reshape(-1)
        dist.broadcast(flat, src=0)
        for fragment, part in self.backend.layout:
            if fragment.name == name:
                v[part] = flat[fragment.start : fragment.start + fragment.numel]

    def _parameters(self) -> list[tuple[str, Any]]:
        return [(n, p) for n, p in self.engine.module.named_parameters() if p.requires_grad]

    # ---- measurements

    def matvec(self, v: Tensor) -> Product:
        """`H v` and its diagnostics; see `Product`.

        Alone it costs three gradients (one at the weights); inside `measuring()`, two.

        Raises:
            NumericsError: v is zero, or something is not finite.
            MeasurementError: the model or the loss raised on some rank.
        """
        if self._operator is not None:
            return self._operator.matvec(v)
        with self.measuring() as operator:
            return operator.matvec(v)

    def spectrum(
        self,
        batches: Iterable[Any] | None = None,
        loss_fn: LossFn | None = None,
        **overrides: Any,
    ) -> HessianSpectrum:
        """Spectral density, extreme eigenvalues and trace by stochastic Lanczos quadrature.

        Args:
            batches: As for `use`; None for those of the last `use`.
            loss_fn: As for `use`.
            overrides: Config values for this call: `num_matvecs=`, `num_probes=`, `seed=`, ...

        Returns:
            The record, the same on every rank. Nothing is written to disk.

        Raises:
            ConfigError: a bad override, or no batches.
            NumericsError: a loss, gradient or product is not finite.
            MeasurementError: batches, model or loss raised on some rank.
        """
        config = self.config.with_overrides(**overrides)
        if batches is not None:
            self.use(batches, loss_fn)
        started, all_reduces = time.perf_counter(), self.backend.space.all_reduces
        total = config.num_matvecs * config.num_probes
        with ExitStack() as stack:
            operator = stack.enter_context(self.measuring(**overrides))
            first = self.rank == 0
            progress = stack.enter_context(SpectrumProgress(total, config.progress and first))
            runs = slq(
                operator,
                self.backend.layout,
                config.num_matvecs,
                config.num_probes,
                config.seed,
                config.probe,
                progress.update,
            )
            gradient_norm = operator.gradient_norm
        seconds = time.perf_counter() - started
        all_reduces = self.backend.space.all_reduces - all_reduces
        return self._record(config, runs, operator, gradient_norm, seconds, all_reduces)

    def _record(
        self,
        config: HessianConfig,
        runs: list[LanczosRun],
        operator: FiniteDifferenceHessian,
        gradient_norm: float,
        seconds: float,
        all_reduces: int,
    ) -> HessianSpectrum:
        cost = cost_of(operator, seconds, all_reduces)
        assert self._objective is not None
        provenance = describe_run(self.engine, self.backend, self._objective, config)
        return HessianSpectrum.from_runs(
            runs,
            n=self.backend.space.n,
            cost=cost,
            provenance=provenance,
            loss=self.backend.loss,
            gradient_norm=gradient_norm,
        )

    def save(self, spectrum: HessianSpectrum, folder: str | Path | None = None) -> Path:
        """Write figures and picture of a spectrum on rank 0.

        Args:
            spectrum: What to write.
            folder: Where to; None for `<output_path>/step_<global step>`.

        Raises:
            MeasurementError: rank 0 could not write.
        """
        if folder is None:
            folder = Path(self.config.output_path) / f"step_{spectrum.provenance.step:06d}"
        folder = Path(folder)
        with together(f"writing results to {folder}", device=self.backend.device):
            if self.rank == 0:
                spectrum.save(folder)
                if self.config.plot:
                    spectrum.plot(folder / "spectrum.png")
        return folder


def attach(
    engine: Any, config: HessianConfig | Mapping[str, Any] | str | Path | None = None
) -> HessianEngine:
    """Give an existing DeepSpeed engine its Hessian.

    Sets `engine.hessian` (also returned) and `engine.hessian_spectrum`. With an `interval` in the
    config, spectra are then taken by themselves; see `ds_hessian.schedule`.

    Args:
        engine: From `deepspeed.initialize`.
        config: The settings: a `HessianConfig`, or a whole DeepSpeed config (dict or path) with a
            `"hessian"` section. None for the section of the engine's own config, or defaults.

    Raises:
        ConfigError: the section has an unknown key or an impossible value.
        UnsupportedError: the engine uses a feature on which products would be wrong.
    """
    if getattr(engine, "hessian", None) is not None:
        raise ConfigError("this engine has its Hessian already: use engine.hessian")
    if not isinstance(config, HessianConfig):
        source = engine._config._param_dict if config is None else config
        config = HessianConfig.from_deepspeed(source) or HessianConfig()
    hessian = HessianEngine(engine, config)
    engine.hessian = hessian
    engine.hessian_spectrum = hessian.spectrum
    if config.interval:
        Schedule(hessian).install()
    return hessian


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """`deepspeed.initialize` with the same arguments and return value.

    If the config has an enabled `"hessian"` section, the engine comes with its Hessian attached.
    The section is checked before DeepSpeed builds anything.

    Raises:
        ConfigError: the section has an unknown key or an impossible value.
        UnsupportedError: the engine uses a feature on which products would be wrong.
    """
    import deepspeed

    section = _section(args, kwargs)
    result: tuple[Any, Any, Any, Any] = deepspeed.initialize(*args, **kwargs)
    if section is not None and section.enabled:
        attach(result[0], section)
    return result


def _section(args: tuple[Any, ...], kwargs: dict[str, Any]) -> HessianConfig | None:
    """The hessian section of the config that `deepspeed.initialize` will use."""
    import inspect

    import deepspeed

    bound = inspect.signature(deepspeed.initialize).bind(*args, **kwargs).arguments
    config = bound.get("config") or bound.get("config_params")
    if config is None:
        config = getattr(bound.get("args"), "deepspeed_config", None)
    return HessianConfig.from_deepspeed(config)


def _expect(full: Mapping[str, Tensor] | None, name: str, shape: torch.Size) -> Tensor:
    if full is None or name not in full:
        raise ConfigError(f"rank 0 must pass a tensor for parameter {name!r}; it is missing")
    if tuple(full[name].shape) != tuple(shape):
        raise ConfigError(
            f"parameter {name!r} has shape {tuple(shape)}, got a tensor of shape "
            f"{tuple(full[name].shape)}"
        )
    return full[name]
