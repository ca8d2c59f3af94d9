"""What a Hessian is good for beyond its spectrum: the analyses of a `HessianEngine`.

Each is one guarded measurement: it runs a method of `ds_hessian.krylov` on the finite-difference
operator and returns its record with cost and provenance.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from ds_hessian import krylov
from ds_hessian.backends.objective import LossFn, Objective
from ds_hessian.config import HessianConfig
from ds_hessian.errors import ConfigError, NumericsError, ResultError, UnsupportedError
from ds_hessian.operators import Congruent, FiniteDifferenceHessian
from ds_hessian.results import (
    Cost,
    Estimate,
    HessianBlockCoupling,
    HessianEigenpairs,
    HessianInfluence,
    HessianOffBlockShare,
    HessianSharpness,
    HessianSolution,
    HessianTrace,
    Provenance,
)
from ds_hessian.results.safetensors import Reader, Writer
from ds_hessian.vectors import Partition, by_layer, by_pattern, random_vector, together

Draw = Callable[[int], Tensor]
Blocks = Literal["layers", "parameters"] | Mapping[str, str]
R = TypeVar("R")


def cost_of(operator: FiniteDifferenceHessian, seconds: float, all_reduces: int) -> Cost:
    """What a finished measurement took."""
    spent = operator.cost
    return Cost(
        seconds_total=seconds,
        seconds_per_product=spent.product_seconds / max(spent.products, 1),
        seconds_per_gradient=spent.gradient_seconds,
        products=spent.products,
        gradient_evaluations=spent.gradient_evaluations,
        trials=spent.trials,
        all_reduces=all_reduces,
    )


class Analyses:
    """The part of a `HessianEngine` that is here; every method is collective.

    All methods need `use` (or a first spectrum) to have fixed the micro-batches. `overrides` are
    config values for the call, such as `seed=` or `displacement=`.
    """

    engine: Any
    backend: Any
    config: HessianConfig
    _objective: Objective | None
    _top: tuple[Tensor, ...] = ()  # what the next `sharpness` starts from

    def measuring(self, **overrides: Any) -> AbstractContextManager[FiniteDifferenceHessian]:
        """See `HessianEngine.measuring`."""
        raise NotImplementedError

    def _parameters(self) -> list[tuple[str, torch.Size]]:
        raise NotImplementedError

    def _describe(self, config: HessianConfig) -> Provenance:
        raise NotImplementedError

    def _whole(self, v: Tensor, name: str, whole: torch.Size) -> Tensor:
        raise NotImplementedError

    def _deal(self, v: Tensor, name: str, whole: Tensor) -> None:
        raise NotImplementedError

    # ---- analyses

    def eigenpairs(
        self,
        k: int = 1,
        which: krylov.Which = "LM",
        tolerance: float = 1e-3,
        max_matvecs: int = 300,
        basis_size: int | None = None,
        start: Tensor | None = None,
        storage: krylov.Storage | None = None,
        **overrides: Any,
    ) -> HessianEigenpairs:
        """The k extreme eigenpairs, with true residuals; see `ds_hessian.krylov.eigenpairs`.

        Args:
            k: Pairs wanted.
            which: `LM` largest magnitude, `LA` largest, `SA` smallest.
            tolerance: Of the residuals, relative to the largest eigenvalue in magnitude.
            max_matvecs: Products at most, before one for each pair's residual.
            basis_size: Vectors kept; None for 2 k + 20.
            start: Unit start vector `(n_local,)`, such as an eigenvector of an earlier step; None
                for a random one.
            storage: Of the basis.
            overrides: See the class.

        Raises:
            NumericsError: k or basis_size is impossible, or something is not finite.
        """

        def analysis(operator: FiniteDifferenceHessian, draw: Draw) -> dict[str, Any]:
            first = draw(0) if start is None else start
            found = krylov.eigenpairs(
                operator, first, k, draw, which, tolerance, max_matvecs, basis_size, storage
            )
            names = self._partition("parameters")
            shares = names.dots([(v, v) for v in found.vectors])
            by_name = dict(zip(names.names, shares, strict=True))
            return {**vars(found), "concentrations": by_name}

        return self._measure(HessianEigenpairs, analysis, overrides)

    def trace(
        self,
        method: Literal["hutchinson", "hutch++", "xtrace"] = "hutchinson",
        num_matvecs: int | None = None,
        blocks: Blocks | None = None,
        **overrides: Any,
    ) -> HessianTrace:
        """The trace with its standard error; see `ds_hessian.krylov.traces`.

        Args:
            method: `hutchinson` stores one vector, `hutch++` num_matvecs / 3, `xtrace` half.
            num_matvecs: Products; None for the config's.
            blocks: Traces of diagonal blocks as well, from the same products (Hutchinson only):
                `layers`, `parameters`, or {block: regular expression of names}.
            overrides: See the class.

        Raises:
            ConfigError: an unknown method, or blocks with a method other than Hutchinson.
            NumericsError: too few products, or something is not finite.
        """
        methods = {"hutch++": krylov.hutch_plus_plus, "xtrace": krylov.xtrace}
        if method != "hutchinson" and (method not in methods or blocks is not None):
            raise ConfigError(
                f'method must be "hutchinson" (the only one with blocks), "hutch++" or "xtrace", '
                f"got {method!r} with blocks = {blocks!r}"
            )
        products = self.config.num_matvecs if num_matvecs is None else num_matvecs

        def analysis(operator: FiniteDifferenceHessian, draw: Draw) -> dict[str, Any]:
            if method == "hutchinson":
                partition = None if blocks is None else self._partition(blocks)
                return vars(krylov.hutchinson(operator, draw, products, partition))
            return vars(methods[method](operator, draw, products))

        return self._measure(HessianTrace, analysis, overrides)

    def solve(
        self,
        b: Tensor,
        dampings: Sequence[float],
        method: krylov.SolveMethod = "cg",
        tolerance: float = 1e-3,
        num_matvecs: int | None = None,
        preconditioner: Tensor | Literal["adam"] | None = None,
        storage: krylov.Storage | None = None,
        **overrides: Any,
    ) -> HessianSolution:
        """Solutions x of (H + damping I) x = b, for each damping; see `ds_hessian.krylov.solve`.

        Args:
            b: Right-hand side `(n_local,)`.
            dampings: In loss per squared parameter; all from one Krylov space.
            method: `cg`, which stops at negative curvature and says so, or `minres`.
            tolerance: Of the relative residual.
            num_matvecs: Products at most for a Krylov space, which is stored; None for the
                config's.
            preconditioner: Positive diagonal `(n_local,)`, or `adam` for what Adam divides by,
                `sqrt(v) + eps` (bias-corrected); then one Krylov space for each damping.
            storage: Of the basis.
            overrides: See the class.

        Raises:
            ConfigError: `adam`, and the optimizer is another or has not made a step yet.
            NumericsError: b is zero, no dampings, or something is not finite.
        """
        diagonal = preconditioner
        if isinstance(diagonal, str):
            if diagonal != "adam":
                raise ConfigError(f'the preconditioner is a diagonal or "adam", got {diagonal!r}')
            diagonal = self._adam()[0]
        products = self.config.num_matvecs if num_matvecs is None else num_matvecs

        def analysis(operator: FiniteDifferenceHessian, draw: Draw) -> dict[str, Any]:
            return vars(
                krylov.solve(
                    operator,
                    b,
                    dampings,
                    draw,
                    method,
                    tolerance,
                    products,
                    diagonal,
                    storage,
                )
            )

        return self._measure(HessianSolution, analysis, overrides)

    def influence(
        self,
        query: Iterable[Any],
        examples: Iterable[Any],
        dampings: Sequence[float],
        loss_fn: LossFn | None = None,
        method: krylov.SolveMethod = "minres",
        tolerance: float = 1e-3,
        num_matvecs: int | None = None,
        **overrides: Any,
    ) -> HessianInfluence:
        """Influence of training examples on the loss of a query; see `HessianInfluence`.

        One solve with the query's gradient, then one gradient for each example (`cost` is that of
        the solve).

        Args:
            query: Micro-batches whose mean loss is asked about, as for `use`.
            examples: Micro-batches, each an example. Number i of all ranks together is one: give
                every rank the same ones for examples of a single micro-batch.
            dampings: In loss per squared parameter; all from one Krylov space.
            loss_fn: As for `use`, of query and examples; None for that of `use`.
            method: See `solve`.
            tolerance: See `solve`.
            num_matvecs: See `solve`.
            overrides: See the class.

        Raises:
            ConfigError: no batches, or different numbers of them on different ranks.
            UnsupportedError: not an engine of DeepSpeed.
            NumericsError: the query's gradient is zero, no dampings, or something is not finite.
            MeasurementError: batches, model or loss raised on some rank.
        """
        if type(self._objective) is not Objective:
            raise UnsupportedError("influence needs a DeepSpeed engine, and use(batches) before it")
        config, space = self.config.with_overrides(**overrides), self.backend.space
        own = self._objective.loss_fn if loss_fn is None else loss_fn
        with together("reading query and examples", device=self.backend.device):
            asked, given = Objective(query, own), Objective(examples, own)
        gradient = space.zeros()
        with self._on(asked, config):
            self.backend.add_gradient(gradient, range(len(asked)))
            gradient *= self.backend.gradient_scale
            loss = self.backend.loss
        found = self.solve(gradient, dampings, method, tolerance, num_matvecs, **overrides)
        dots = []
        with self._on(given, config):
            for i in range(len(given)):
                gradient.zero_()
                self.backend.add_gradient(gradient, range(i, i + 1))
                pairs = [(x, gradient) for x in found.x]
                dots.append(space.dots([*pairs, (gradient, gradient)]).numpy())
            scale = self.backend.gradient_scale * len(given)
        *scores, squares = np.array(dots).T
        return HessianInfluence(
            dampings=found.dampings,
            scores=scale * np.array(scores),
            errors=found.errors[:, None] * scale * np.sqrt(squares),
            residuals=found.residuals,
            converged=found.converged,
            negative_curvature=found.negative_curvature,
            query_loss=loss,
            num_matvecs=found.num_matvecs,
            cost=found.cost,
            provenance=found.provenance,
        )

    @contextmanager
    def _on(self, objective: Objective, config: HessianConfig) -> Iterator[None]:
        """Guard evaluations of another loss, at the weights."""
        self.backend.use(objective, config.dropout, config.finite_difference.precision)
        try:
            with self.backend.measuring():
                self.backend.displace(None, 0.0)
                yield
        finally:
            self.backend.use(self._objective)

    def sharpness(
        self,
        preconditioned: bool = True,
        tolerance: float = 0.05,
        max_matvecs: int = 5,
        **overrides: Any,
    ) -> HessianSharpness:
        """Top eigenvalues of H and of Adam's preconditioned H, and curvatures along the way.

        Cheap enough to be repeated during training: at most `max_matvecs` products once there is an
        earlier measurement to start from (see `ds_hessian.krylov.sharpness`). The first one finds
        its start by Lanczos, with some tens of products more. Keeps two vectors between calls.

        Args:
            preconditioned: Also for `D^-1/2 H D^-1/2`, with Adam's D, and along Adam's last step.
            tolerance: Of the residuals, relative to the eigenvalue, whose own error is quadratic in
                it for an eigenvalue that stands alone.
            max_matvecs: Products at most, beyond those of the first measurement's start.
            overrides: See the class.

        Raises:
            ConfigError: too few products, or no Adam that has made a step: pass
                `preconditioned=False`.
            NumericsError: the gradient is zero, or something is not finite.
        """
        least = 4 if preconditioned else 2
        if max_matvecs < least:
            raise ConfigError(f"max_matvecs must be at least {least} here, got {max_matvecs}")
        adam = self._adam() if preconditioned else None
        metrics = [None] if adam is None else [None, adam[0]]

        def analysis(operator: FiniteDifferenceHessian, draw: Draw) -> dict[str, Any]:
            space, gradient = self.backend.space, operator.gradient
            if not space.norm(gradient):
                raise NumericsError(
                    "the gradient is zero, so there is no curvature along it: measure the spectrum "
                    "instead"
                )
            warm = len(self._top) >= len(metrics)
            starts = self._top if warm else [_top(operator, draw, d, tolerance) for d in metrics]
            subspace = krylov.Subspace(operator)
            along = subspace.add(gradient)
            step = None if adam is None else subspace.add(adam[1])
            for _, start in zip(metrics, starts, strict=False):
                subspace.add(start)
            pairs = krylov.refine(subspace, metrics, tolerance, max_matvecs)
            self._top = tuple(pair.x for pair in pairs)
            estimates = [Estimate(pair.value, pair.error) for pair in pairs]
            return {
                "eigenvalue_max": estimates[0],
                "preconditioned": None if adam is None else estimates[1],
                "converged": tuple(pair.converged(tolerance) for pair in pairs),
                "gradient_curvature": along,
                "update_curvature": step,
                "update_norm": None if adam is None else space.norm(adam[1]),
                "gradient_norm": operator.gradient_norm,
                "loss": self.backend.loss,
                "warm": warm,
                "num_matvecs": operator.cost.products,
            }

        return self._measure(HessianSharpness, analysis, overrides)

    def block_coupling(self, blocks: Blocks = "layers", **overrides: Any) -> HessianBlockCoupling:
        """How far from block diagonal H is: the paper's masked-probe test, B + 1 products.

        Args:
            blocks: `layers`, `parameters`, or {block: regular expression of names}.
            overrides: See the class.
        """

        def analysis(operator: FiniteDifferenceHessian, draw: Draw) -> dict[str, Any]:
            return vars(krylov.block_coupling(operator, self._partition(blocks), draw(0)))

        return self._measure(HessianBlockCoupling, analysis, overrides)

    def off_block_share(
        self, blocks: Blocks = "layers", num_probes: int = 4, **overrides: Any
    ) -> HessianOffBlockShare:
        """Share of the off-diagonal blocks in |H|_F^2, two products a probe.

        Args:
            blocks: As for `block_coupling`.
            num_probes: Pairs of products.
            overrides: See the class.

        Raises:
            NumericsError: fewer than 2 blocks.
        """
        seed = self.config.with_overrides(**overrides).seed

        def analysis(operator: FiniteDifferenceHessian, draw: Draw) -> dict[str, Any]:
            partition = self._partition(blocks)
            return vars(krylov.off_block_share(operator, partition, draw, num_probes, seed))

        return self._measure(HessianOffBlockShare, analysis, overrides)

    # ---- vectors on disk

    def save_vectors(
        self, vectors: Tensor, path: str | Path, metadata: Mapping[str, Any] | None = None
    ) -> Path:
        """Write vectors `(k, n_local)` as `{parameter name: (k, *unsharded shape)}`, safetensors.

        Parameters travel to rank 0 one by one; any layout can load the file.

        Args:
            vectors: Such as the eigenvectors of `eigenpairs`.
            path: Of the file.
            metadata: To keep beside them, as JSON.

        Raises:
            MeasurementError: rank 0 could not write.
        """
        path, first = Path(path), self.backend.space.rank == 0
        doing, device = f"writing vectors to {path}", self.backend.device
        named = self._parameters()
        shapes = {name: (len(vectors), *whole) for name, whole in named}
        kept = {key: json.dumps(value) for key, value in (metadata or {}).items()}
        with ExitStack() as stack:
            writer = None
            with together(doing, device=device):
                if first:
                    writer = stack.enter_context(Writer(path, shapes, kept))
            for name, whole in named:
                parts = [self._whole(v, name, whole) for v in vectors]
                with together(doing, device=device):
                    if writer is not None:
                        for part in parts:
                            writer.append(part)
            with together(doing, device=device):
                stack.close()
        return path

    def load_vectors(self, path: str | Path) -> Tensor:
        """The vectors that `save_vectors` wrote, `(k, n_local)`, in this job's layout.

        Raises:
            ResultError: on rank 0 the file is missing, damaged, or of another model; the other
                ranks raise MeasurementError.
        """
        doing, device = f"reading vectors from {path}", self.backend.device
        space, named, reader, count = self.backend.space, self._parameters(), None, 0
        with together(doing, device=device):
            if space.rank == 0:
                reader = Reader(Path(path))
                count = _expect_shapes(reader, {name: tuple(whole) for name, whole in named})
        count = int(space.reduce(torch.tensor([float(count)], dtype=torch.float64))[0])
        vectors = torch.zeros(count, space.n_local, device=space.device)
        for name, whole in named:
            parts = torch.zeros((count, *whole), device=device)
            with together(doing, device=device):
                if reader is not None:
                    parts.copy_(reader.read(name))
            for v, part in zip(vectors, parts, strict=True):
                self._deal(v, name, part)
        return vectors

    # ---- what they share

    def _adam(self) -> tuple[Tensor, Tensor]:
        """What Adam divides by, and its last step."""
        if not hasattr(self.backend, "adam"):
            raise UnsupportedError(
                "Adam's moments are read from DeepSpeed's optimizers only: give solve a "
                "preconditioner of your own, and sharpness preconditioned=False"
            )
        found: tuple[Tensor, Tensor] = self.backend.adam()
        return found

    def _partition(self, blocks: Blocks) -> Partition:
        names = [name for name, _ in self._parameters()]
        if isinstance(blocks, Mapping):
            groups = by_pattern(names, blocks)
        elif blocks in ("layers", "parameters"):
            groups = by_layer(names) if blocks == "layers" else {name: name for name in names}
        else:
            raise ConfigError(
                f'blocks must be "layers", "parameters" or a mapping of patterns, got {blocks!r}'
            )
        return Partition(self.backend.layout, self.backend.space, groups)

    def _measure(
        self,
        record: Callable[..., R],
        analysis: Callable[[FiniteDifferenceHessian, Draw], dict[str, Any]],
        overrides: Mapping[str, Any],
    ) -> R:
        config, space = self.config.with_overrides(**overrides), self.backend.space
        started, all_reduces = time.perf_counter(), space.all_reduces

        def draw(number: int) -> Tensor:
            return random_vector(self.backend.layout, space, config.seed, number, config.probe)

        with self.measuring(**overrides) as operator:
            figures = analysis(operator, draw)
        seconds = time.perf_counter() - started
        return record(
            **figures,
            cost=cost_of(operator, seconds, space.all_reduces - all_reduces),
            provenance=self._describe(config),
        )


def _top(
    operator: FiniteDifferenceHessian, draw: Draw, metric: Tensor | None, tolerance: float
) -> Tensor:
    """A first x for `sharpness`, from Lanczos."""
    if metric is None:
        return krylov.eigenpairs(operator, draw(0), 1, draw, "LA", tolerance).vectors[0]
    scale = metric.rsqrt()
    found = krylov.eigenpairs(Congruent(operator, scale), draw(0), 1, draw, "LA", tolerance)
    return found.vectors[0] * scale


def _expect_shapes(reader: Reader, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Number of vectors in the file, which must be of this model."""
    counts = {found[0] if found else -1 for found in reader.shapes.values()}
    expected = {name: (*counts, *sizes) for name, sizes in shapes.items()}
    if len(counts) != 1 or reader.shapes != expected:
        wrong = sorted(
            name
            for name in reader.shapes.keys() | shapes.keys()
            if reader.shapes.get(name, ())[1:] != shapes.get(name)
        )
        raise ResultError(
            f"{reader.path} is not of this model: other names or shapes for {wrong[:5]} "
            f"({len(wrong)} parameters)"
        )
    return int(counts.pop())
