"""What a Hessian is good for beyond its spectrum: the analyses of a `HessianEngine`.

Each is one guarded measurement: it runs a method of `ds_hessian.krylov` on the finite-difference
operator and returns its record with cost and provenance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Literal

import numpy as np
from torch import Tensor

from ds_hessian import krylov
from ds_hessian.backends import Objective, Passes, Session
from ds_hessian.backends.objective import LossFn
from ds_hessian.config import HessianConfig
from ds_hessian.errors import ConfigError, NumericsError, UnsupportedError
from ds_hessian.measurement import Measurement, plan_or_refuse
from ds_hessian.operators import Congruent, LinearOperator
from ds_hessian.operators.sampling import micro_batch_curvatures, standard_error
from ds_hessian.plan import storage_of
from ds_hessian.records import (
    Estimate,
    HessianBlockCoupling,
    HessianEigenpairs,
    HessianInfluence,
    HessianOffBlockShare,
    HessianSharpness,
    HessianSolution,
    HessianTrace,
)
from ds_hessian.resume import Journal
from ds_hessian.vector_files import R, Records
from ds_hessian.vectors import Partition, by_layer, by_pattern, random_vector

Draw = Callable[[int], Tensor]
Blocks = Literal["layers", "parameters"] | Mapping[str, str]


class Analyses(Records):
    """The part of a `HessianEngine` that is here; every method is collective.

    All methods need `use` (or a first spectrum) to have fixed the micro-batches. `overrides` are
    config values for the call, such as `seed=`, `displacement=` or `resume=`; where a basis is
    stored, `dtype=`, `device=` and `folder=` say how. The memory plan is logged before the run, and
    a `ConfigError` if it does not fit.
    """

    _top: tuple[Tensor, ...] = ()  # what the next `sharpness` starts from

    # ---- analyses

    def eigenpairs(
        self,
        k: int = 1,
        which: krylov.Which = "LM",
        tolerance: float = 1e-3,
        max_matvecs: int = 300,
        basis_size: int | None = None,
        start: Tensor | None = None,
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
            overrides: See the class.

        Raises:
            NumericsError: k or basis_size is impossible, or something is not finite.
        """
        config = self.config.with_overrides(**overrides)

        def analysis(operator: LinearOperator, draw: Draw) -> dict[str, Any]:
            # By name: a packed argument list would keep the start vector until the end.
            found = krylov.eigenpairs(
                operator,
                draw(0) if start is None else start,
                k,
                draw,
                which=which,
                tolerance=tolerance,
                max_matvecs=max_matvecs,
                basis_size=basis_size,
                storage=storage_of(config),
            )
            names = self._partition("parameters")
            shares = names.dots([(v, v) for v in found.vectors])
            by_name = dict(zip(names.names, shares, strict=True))
            hessian = self._operator
            assert hessian is not None
            errors = [
                standard_error(micro_batch_curvatures(hessian.session, y, float(h)))
                for y, h in zip(found.vectors, found.displacements, strict=True)
                if config.sampling
            ]
            sampled = {"sampling_errors": np.array(errors, dtype=np.float64)}
            return {**vars(found), "concentrations": by_name, **sampled}

        call = {"k": k, "which": which, "tolerance": tolerance, "basis_size": basis_size}
        call |= {"max_matvecs": max_matvecs}
        return self._measure("eigenpairs", HessianEigenpairs, analysis, overrides, call)

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
        config = self.config.with_overrides(**overrides)
        methods = {"hutch++": krylov.hutch_plus_plus, "xtrace": krylov.xtrace}
        if method != "hutchinson" and (method not in methods or blocks is not None):
            raise ConfigError(
                f'method must be "hutchinson" (the only one with blocks), "hutch++" or "xtrace", '
                f"got {method!r} with blocks = {blocks!r}"
            )
        products = config.num_matvecs if num_matvecs is None else num_matvecs

        def analysis(operator: LinearOperator, draw: Draw) -> dict[str, Any]:
            if method == "hutchinson":
                partition = None if blocks is None else self._partition(blocks)
                return vars(krylov.hutchinson(operator, draw, products, partition))
            return vars(methods[method](operator, draw, products, storage_of(config)))

        call = {"method": method, "num_matvecs": products}
        return self._measure("trace", HessianTrace, analysis, overrides, call)

    def solve(
        self,
        b: Tensor,
        dampings: Sequence[float],
        method: krylov.SolveMethod = "cg",
        tolerance: float = 1e-3,
        num_matvecs: int | None = None,
        preconditioner: Tensor | Literal["adam"] | None = None,
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
            overrides: See the class.

        Raises:
            ConfigError: `adam`, and the optimizer is another or has not made a step yet.
            NumericsError: b is zero, no dampings, or something is not finite.
        """
        options = method, tolerance, num_matvecs, preconditioner
        return self._solve("solve", b, dampings, *options, overrides)

    def _solve(
        self,
        plan: str | None,
        b: Tensor,
        dampings: Sequence[float],
        method: krylov.SolveMethod,
        tolerance: float,
        num_matvecs: int | None,
        kind: Tensor | Literal["adam"] | None,
        overrides: Mapping[str, Any],
    ) -> HessianSolution:
        """See `solve`; `plan` is the analysis whose memory plan is made, None for none."""
        config = self.config.with_overrides(**overrides)
        if isinstance(kind, str) and kind != "adam":
            raise ConfigError(f'the preconditioner is a diagonal or "adam", got {kind!r}')
        diagonal = self._adam()[0] if isinstance(kind, str) else kind
        products = config.num_matvecs if num_matvecs is None else num_matvecs

        def analysis(operator: LinearOperator, draw: Draw) -> dict[str, Any]:
            limits = method, tolerance, products, diagonal, storage_of(config)
            return vars(krylov.solve(operator, b, dampings, draw, *limits))

        call: dict[str, Any] = {
            "method": method,
            "num_matvecs": products,
            "tolerance": tolerance,
            "dampings": list(map(float, dampings)),
            "preconditioner": "diagonal" if isinstance(kind, Tensor) else kind,
        }
        return self._measure(plan, HessianSolution, analysis, overrides, call)

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
            NumericsError: the query's gradient is zero, no dampings, or something is not finite.
            MeasurementError: batches, model or loss raised on some rank.
        """
        if self._objective is None:
            raise ConfigError("no micro-batches yet: call hessian.use(batches) first")
        config, space = self.config.with_overrides(**overrides), self.backend.space
        limits = {"dampings": list(map(float, dampings)), "num_matvecs": num_matvecs}
        plan_or_refuse(self, config, "influence", limits)
        asked, given = (
            self.backend.objective(batches, loss_fn, like=self._objective)
            for batches in (query, examples)
        )
        gradient = space.zeros()
        with self._on(asked, config) as session:
            session.add_gradient(gradient, range(session.num_micro_batches))
            assert session.gradient_scale is not None
            gradient *= session.gradient_scale
            loss = session.loss
        options = method, tolerance, num_matvecs, None
        found = self._solve(None, gradient, dampings, *options, overrides)
        dots = []
        with self._on(given, config) as session:
            count = session.num_micro_batches
            for i in range(count):
                gradient.zero_()
                session.add_gradient(gradient, range(i, i + 1))
                pairs = [(x, gradient) for x in found.x]
                dots.append(space.dots([*pairs, (gradient, gradient)]).numpy())
            assert session.gradient_scale is not None
            scale = session.gradient_scale * count
        *scores, squares = np.array(dots).T
        systems = {f.name: getattr(found, f.name) for f in fields(krylov.DampedSystems)}
        return HessianInfluence(
            **systems,
            scores=scale * np.array(scores),
            errors=found.errors[:, None] * scale * np.sqrt(squares),
            query_loss=loss,
            cost=found.cost,
            provenance=found.provenance,
        )

    @contextmanager
    def _on(self, objective: Objective, config: HessianConfig) -> Iterator[Session]:
        """Guard evaluations of another loss, at the weights."""
        passes = Passes(config.dropout, config.finite_difference.precision)
        with self.backend.measuring(objective, passes) as session:
            session.displace(None, 0.0)
            yield session

    def sharpness(
        self,
        preconditioned: bool | None = True,
        tolerance: float = 0.05,
        max_matvecs: int = 5,
        **overrides: Any,
    ) -> HessianSharpness:
        """Top eigenvalues of H and of Adam's preconditioned H, and curvatures along the way.

        Cheap enough to be repeated during training: at most `max_matvecs` products once there is an
        earlier measurement to start from (see `ds_hessian.krylov.sharpness`). The first one finds
        its start by Lanczos, with some tens of products more. Keeps two vectors between calls.

        Args:
            preconditioned: Also for `D^-1/2 H D^-1/2`, with Adam's D, and along Adam's last step;
                None for where the optimizer is an Adam that has made a step.
            tolerance: Of the residuals, relative to the eigenvalue, whose own error is quadratic in
                it for an eigenvalue that stands alone.
            max_matvecs: Products at most, beyond those of the first measurement's start.
            overrides: See the class.

        Raises:
            ConfigError: too few products, or no Adam that has made a step: pass
                `preconditioned=False`.
            NumericsError: the gradient is zero, or something is not finite.
        """
        if preconditioned is None:
            preconditioned = self._has_adam()
        least = 4 if preconditioned else 2
        if max_matvecs < least:
            raise ConfigError(f"max_matvecs must be at least {least} here, got {max_matvecs}")
        adam = self._adam() if preconditioned else None
        metrics = [None] if adam is None else [None, adam[0]]
        config, warm = self.config.with_overrides(**overrides), len(self._top) >= len(metrics)

        def analysis(operator: LinearOperator, draw: Draw) -> dict[str, Any]:
            hessian, space = self._operator, self.backend.space
            assert hessian is not None
            gradient = hessian.gradient
            if not space.norm(gradient):
                raise NumericsError(
                    "the gradient is zero, so there is no curvature along it: measure the spectrum "
                    "instead"
                )
            kept = storage_of(config)
            starts = (
                self._top if warm else [_top(operator, draw, d, tolerance, kept) for d in metrics]
            )
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
                "gradient_norm": hessian.gradient_norm,
                "loss": hessian.session.loss,
                "warm": warm,
                "num_matvecs": hessian.cost.products,
            }

        call = {
            "tolerance": tolerance,
            "max_matvecs": max_matvecs,
            "preconditioned": preconditioned,
            "warm": warm,
        }
        return self._measure("sharpness", HessianSharpness, analysis, overrides, call)

    def block_coupling(self, blocks: Blocks = "layers", **overrides: Any) -> HessianBlockCoupling:
        """How far from block diagonal H is: the paper's masked-probe test, B + 1 products.

        Args:
            blocks: `layers`, `parameters`, or {block: regular expression of names}.
            overrides: See the class.
        """

        def analysis(operator: LinearOperator, draw: Draw) -> dict[str, Any]:
            return vars(krylov.block_coupling(operator, self._partition(blocks), draw(0)))

        call = {"blocks": blocks, "num_blocks": len(self._partition(blocks).names)}
        return self._measure("block_coupling", HessianBlockCoupling, analysis, overrides, call)

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

        def analysis(operator: LinearOperator, draw: Draw) -> dict[str, Any]:
            partition = self._partition(blocks)
            return vars(krylov.off_block_share(operator, partition, draw, num_probes, seed))

        call = {"blocks": blocks, "num_probes": num_probes}
        return self._measure("off_block_share", HessianOffBlockShare, analysis, overrides, call)

    # ---- what they share

    def _adam(self) -> tuple[Tensor, Tensor]:
        """What Adam divides by, and its last step."""
        return self.backend.adam()

    def _has_adam(self) -> bool:
        """Whether the optimizer is an Adam that has made a step."""
        try:
            self._adam()
        except (ConfigError, UnsupportedError):  # the same on every rank
            return False
        return True

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
        plan: str | None,
        record: type[R],
        analysis: Callable[[LinearOperator, Draw], dict[str, Any]],
        overrides: Mapping[str, Any],
        call: Mapping[str, Any],
    ) -> R:
        """A record of the memory plan `plan`; `call` are the method's arguments, JSON values."""
        run = Measurement[Journal](self, overrides, plan, call)
        config = run.config

        def draw(number: int) -> Tensor:
            layout, space = self.backend.layout, self.backend.space
            return random_vector(layout, space, config.seed, number, config.probe)

        with run.open(record, Journal, {"call": dict(call)}):
            figures = analysis(run.saved or run.operator, draw)
        measured = record(**figures, cost=run.cost(), provenance=self._describe(config))
        run.finished()
        return measured


def _top(
    operator: LinearOperator,
    draw: Draw,
    metric: Tensor | None,
    tolerance: float,
    storage: krylov.Storage,
) -> Tensor:
    """A first x for `sharpness`, from Lanczos."""
    scale = None if metric is None else metric.rsqrt()
    view = operator if scale is None else Congruent(operator, scale)
    found = krylov.eigenpairs(view, draw(0), 1, draw, "LA", tolerance, storage=storage)
    return found.vectors[0] if scale is None else found.vectors[0] * scale
