"""A DeepSpeed engine's Hessian: `initialize`, `attach`, and the object they hang on the engine.

    engine, optimizer, _, scheduler = ds_hessian.initialize(model=model, config=config, ...)
    spectrum = engine.hessian_spectrum(batches)

`initialize` is `deepspeed.initialize`: same arguments, same return value. If the config has no
`"hessian"` section (or one with `"enabled": false`), nothing else happens.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ds_hessian.analyses import Analyses
from ds_hessian.backends import Backend, Objective, Passes
from ds_hessian.backends.objective import LossFn
from ds_hessian.backends.zero import ZeroBackend, refuse_unsupported, settings_of
from ds_hessian.config import HessianConfig
from ds_hessian.errors import ConfigError
from ds_hessian.krylov import LanczosRun, LanczosState, ritz_vectors, slq
from ds_hessian.measurement import Measurement
from ds_hessian.memory import MemoryPlan, place_of
from ds_hessian.operators import Curvature, Product, curvature, default_range, sweep
from ds_hessian.operators.sampling import (
    micro_batch_curvatures,
    require_several,
    standard_error,
)
from ds_hessian.plan import (
    DIRECTIONS,
    TOP_STEPS,
    Share,
    arguments_of,
    lanczos_options,
    plan_analysis,
)
from ds_hessian.provenance import describe_run
from ds_hessian.ranks import together
from ds_hessian.records import (
    DisplacementSweep,
    HessianSpectrum,
    Provenance,
    SamplingErrors,
    SelfTest,
)
from ds_hessian.resume import SavedSpectrum, identity_of
from ds_hessian.schedule import Schedule
from ds_hessian.self_test import self_test
from ds_hessian.show.progress import SpectrumProgress
from ds_hessian.vectors import ProbeKind, random_vector

logger = logging.getLogger(__name__)


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
        self.backend: Backend = ZeroBackend(engine)
        self._operator: Curvature | None = None
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
        self._objective = self.backend.objective(batches, loss_fn)
        return self

    @property
    def rank(self) -> int:
        """This process's rank in the job."""
        return self.backend.space.rank

    @property
    def modules(self) -> Sequence[Any]:
        """What holds this rank's parameters."""
        return self.backend.modules

    @property
    def ready(self) -> bool:
        """True once `use` (or a first spectrum) has fixed the micro-batches."""
        return self._objective is not None

    @contextmanager
    def measuring(self, **overrides: Any) -> Iterator[Curvature]:
        """Guard several products at once: the gradient at the weights is evaluated only once.

        Inside, training must not go on; `matvec` uses the open operator, which is also yielded.

        Args:
            overrides: Config values for this measurement, such as `displacement=1e-3`.

        Raises:
            ConfigError: `use` was not called, an override is unknown, or `sampling` is on with a
                single micro-batch.
        """
        if self._objective is None:
            raise ConfigError("no micro-batches yet: call hessian.use(batches) first")
        if self._operator is not None:
            raise ConfigError("a measurement is open already: leave `measuring()` first")
        config = self.config.with_overrides(**overrides)
        passes = Passes(config.dropout, config.finite_difference.precision)
        with self.backend.measuring(self._objective, passes) as session:
            if config.sampling:
                require_several(session)
            self._operator = curvature(session, config.finite_difference)
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
        full = {name: self._whole(v, name, whole) for name, whole in self._parameters()}
        return full if self.rank == 0 else None

    def _whole(self, v: Tensor, name: str, whole: torch.Size) -> Tensor:
        """A parameter's coordinates of v in its unsharded shape, on rank 0."""
        tensor = torch.zeros(whole.numel(), dtype=torch.float32, device=self.backend.space.device)
        for fragment, part in self.backend.layout:
            if fragment.name == name and fragment.owned:
                tensor[fragment.index(device=tensor.device)] = v[part]
        dist.reduce(tensor, dst=0)
        return tensor.reshape(whole)

    def scatter(self, full: Mapping[str, Tensor] | None) -> Tensor:
        """The reverse of `gather`: rank 0 passes the tensors, the others None.

        Raises:
            MeasurementError: a trainable parameter is missing, or has another shape.
        """
        v = self.backend.space.zeros()
        for name, whole in self._parameters():
            tensor = torch.zeros(whole.numel(), dtype=torch.float32, device=v.device)
            with together(f"scattering parameter {name!r}", device=self.backend.space.device):
                if self.rank == 0:
                    tensor.copy_(_expect(full, name, whole).reshape(-1))
            self._deal(v, name, tensor)
        return v

    def _deal(self, v: Tensor, name: str, whole: Tensor) -> None:
        """Write rank 0's values of a parameter into every rank's part of v."""
        flat = whole.reshape(-1)
        dist.broadcast(flat, src=0)
        for fragment, part in self.backend.layout:
            if fragment.name == name:
                v[part] = flat[fragment.index(device=flat.device)]

    def _parameters(self) -> list[tuple[str, torch.Size]]:
        """Names and unsharded shapes, the same list on every rank."""
        return list(self.backend.parameters)

    # ---- measurements

    def matvec(self, v: Tensor) -> Product:
        """`H v` and its diagnostics; see `Product`.

        Alone it costs three gradients (one at the weights; from 16 micro-batches on two more, for
        the noise) and some trials of h; each further one inside `measuring()` two, and some trials.

        Raises:
            NumericsError: v is zero, or something is not finite.
            MeasurementError: the model or the loss raised on some rank.
        """
        if self._operator is not None:
            return self._operator.matvec(v)
        with self.measuring() as operator:
            return operator.matvec(v)

    def memory_plan(self, analysis: str = "spectrum", **settings: Any) -> MemoryPlan:
        """What a spectrum or an analysis would need on this rank beyond training's memory.

        Not collective.

        Args:
            analysis: Name of the method: `spectrum`, `eigenpairs`, `trace`, `solve`, ...
            settings: As the method takes them: config values, and its own arguments, of which
                those count that the memory depends on (see `ds_hessian.plan.plan_analysis`).

        Raises:
            ConfigError: there is no such analysis, or a setting is unknown or impossible.
        """
        own, others = arguments_of(analysis, settings)
        known = inspect.signature(getattr(self, analysis)).parameters
        overrides = {name: value for name, value in others.items() if name not in known}
        return plan_analysis(analysis, self._share(), self.config.with_overrides(**overrides), own)

    def _share(self) -> Share:
        """Of this rank, for memory plans."""
        space = self.backend.space
        return Share(space.n, space.n_local, place_of(space.device), self.backend.memory)

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
            The record, the same on every rank. Nothing is left on disk.

        Raises:
            ConfigError: a bad override, no batches, too little memory on some rank, or `resume` has
                the state of another measurement, or a damaged one.
            NumericsError: a loss, gradient or product is not finite.
            MeasurementError: batches, model or loss raised on some rank, or one could not write.
        """
        if batches is not None:
            self.use(batches, loss_fn)
        run = Measurement[SavedSpectrum](self, overrides, "spectrum")
        config = run.config
        with ExitStack() as stack:
            stack.enter_context(run.open(HessianSpectrum, SavedSpectrum))
            saved = run.saved
            total = config.num_matvecs * config.num_probes - (saved.products if saved else 0)
            first = self.rank == 0
            progress = stack.enter_context(SpectrumProgress(total, config.progress and first))

            complete = list[LanczosState]()  # the last probe's run, whose basis sampling needs

            def report(probe: int, state: LanczosState) -> None:
                if state.done and probe == config.num_probes - 1:
                    complete.append(state)  # and nothing to save: there are no more products
                elif saved is not None:
                    saved.save(probe, state)
                progress.update(probe, state)

            runs = slq(
                run.operator,
                self.backend.layout,
                config.num_matvecs,
                config.num_probes,
                config.seed,
                config.probe,
                report,
                lanczos_options(config),
                before=saved.runs if saved else (),
                restore=saved.restore if saved else None,
            )
            gradient_norm = run.operator.gradient_norm
            sampling = None
            if config.sampling:
                sampling = self._sampling_errors(run.operator, complete.pop(), runs, config)
        spectrum = HessianSpectrum.from_runs(
            runs,
            n=self.backend.space.n,
            cost=run.cost(),
            provenance=self._describe(config),
            loss=run.operator.session.loss,
            gradient_norm=gradient_norm,
            sampling=sampling,
        )
        run.finished()
        if self.rank == 0:
            for warning in spectrum.warnings:
                logger.warning("Hessian spectrum: %s", warning)
        return spectrum

    def _sampling_errors(
        self,
        operator: Curvature,
        last: LanczosState,
        runs: Sequence[LanczosRun],
        config: HessianConfig,
    ) -> SamplingErrors:
        """From the last probe's extreme Ritz vectors, and all probes."""
        displacement = float(np.median(runs[-1].displacements))
        extremes = [
            standard_error(micro_batch_curvatures(operator.session, y, displacement))
            for y in ritz_vectors(last, [-1, 0])
        ]
        forms = []
        for p, run in enumerate(runs):
            v = self.random_vector(config.seed, config.probe, p)
            forms.append(micro_batch_curvatures(operator.session, v, float(run.displacements[0])))
        trace = self.backend.space.n * np.mean(forms, axis=0)
        largest, smallest = extremes
        return SamplingErrors(largest, smallest, standard_error(trace), len(trace))

    def self_test(
        self,
        batches: Iterable[Any] | None = None,
        loss_fn: LossFn | None = None,
        **overrides: Any,
    ) -> SelfTest:
        """Whether this job's Hessian can be trusted, and what to set if not; five products' time.

        See `ds_hessian.self_test` for what is tested. Takes what `spectrum` takes, and raises what
        it raises; a check that fails is a finding in the record.
        """
        if batches is not None:
            self.use(batches, loss_fn)
        return self_test(self, **overrides)

    def displacement_sweep(
        self,
        directions: Sequence[str] | Mapping[str, Tensor] = DIRECTIONS,
        displacements: Sequence[float] | None = None,
        batches: Iterable[Any] | None = None,
        loss_fn: LossFn | None = None,
        **overrides: Any,
    ) -> DisplacementSweep:
        """`v'Hv` and the product's diagnostics over a range of displacements: curvature at scale h.

        Costs a product for each direction and displacement, and ten more for `"top"`.

        Args:
            directions: Among `"random"` (a unit Gaussian vector), `"top"` (the largest eigenvalue's
                vector, from ten Lanczos steps) and `"gradient"`; or vectors of one's own by name.
            displacements: Ascending; None for three in each decade from rounding noise to |w|.
            batches: As for `use`; None for those of the last `use`.
            loss_fn: As for `use`.
            overrides: Config values for this call; the displacement is that of `"top"`'s products.

        Raises:
            ConfigError: a bad override or direction, or no batches.
            NumericsError: a loss, gradient or product is not finite: take smaller displacements.
            MeasurementError: batches, model or loss raised on some rank.
        """
        if batches is not None:
            self.use(batches, loss_fn)
        names = () if isinstance(directions, Mapping) else tuple(directions)
        run = Measurement[Any](self, overrides, "displacement_sweep", {"directions": names})
        with run.open(DisplacementSweep):
            vectors = self._directions(run.operator, directions, run.config.seed)
            h = displacements or default_range(run.operator.session)
            points = [sweep(run.operator, v, h) for v in vectors.values()]
            gradient_norm = run.operator.gradient_norm

        def stack(name: str) -> NDArray[np.float64]:
            return np.array([[getattr(point, name) for point in row] for row in points])

        return DisplacementSweep(
            n=self.backend.space.n,
            directions=tuple(vectors),
            displacements=np.array(h),
            curvatures=stack("curvature"),
            norms=stack("norm"),
            changes=stack("change"),
            nonlinearities=stack("nonlinearity"),
            fidelities=stack("fidelity"),
            loss=run.operator.session.loss,
            gradient_norm=gradient_norm,
            cost=run.cost(),
            provenance=self._describe(run.config),
        )

    def _directions(
        self,
        operator: Curvature,
        directions: Sequence[str] | Mapping[str, Tensor],
        seed: int,
    ) -> dict[str, Tensor]:
        if isinstance(directions, Mapping):
            return dict(directions)
        vectors = {}
        for name in directions:
            if name == "random":
                vectors[name] = self.random_vector(seed)
            elif name == "gradient":
                vectors[name] = operator.gradient.clone()
            elif name == "top":
                vectors[name] = self._top_direction(operator, seed)
            else:
                raise ConfigError(
                    f'no direction {name!r}: "random", "top", "gradient", or a mapping of vectors'
                )
        return vectors

    def _top_direction(self, operator: Curvature, seed: int) -> Tensor:
        state = LanczosState(
            operator, self.random_vector(seed), TOP_STEPS, lambda k: self.random_vector(k)
        )
        while not state.done:
            state.step()
        top: Tensor = ritz_vectors(state, [-1])[0]
        return top

    def _identity(self, operator: Curvature, config: HessianConfig) -> dict[str, Any]:
        """What a measurement made now is of, whatever the layout."""
        assert self._objective is not None
        step = self._describe(config).step
        return identity_of(operator, self._objective, config, step, self._parameters())

    def _describe(self, config: HessianConfig) -> Provenance:
        """What a measurement made now is made on."""
        assert self._objective is not None
        return describe_run(self.backend, self._objective, config)


def attach(
    engine: Any, config: HessianConfig | Mapping[str, Any] | str | Path | None = None
) -> HessianEngine:
    """Give an existing DeepSpeed engine its Hessian.

    Sets `engine.hessian` (also returned) and `engine.hessian_spectrum`. With an `interval` in the
    config, measurements are then taken by themselves; see `ds_hessian.schedule`.

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
        source = settings_of(engine) if config is None else config
        config = HessianConfig.from_deepspeed(source) or HessianConfig()
    hessian = HessianEngine(engine, config)
    engine.hessian = hessian
    engine.hessian_spectrum = hessian.spectrum
    if config.scheduled:
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
    launched = hasattr(result[0], "hessian")  # by ds_hessian.launch, which runs any script
    if section is not None and section.enabled and not launched:
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
