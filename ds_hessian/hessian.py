"""The Hessian of a job: its definition, products, vectors, analyses and records.

The class is the same on every host. What a host is stands in `ds_hessian.backends`, what an
analysis is in `ds_hessian.analyses`; `ds_hessian.hosts` puts the two together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from torch import Tensor
from torch.optim import Optimizer

from ds_hessian.analyses import (
    Alignment,
    BlockCoupling,
    Blocks,
    BlockSpectra,
    Curvatures,
    Decomposition,
    Eigenpairs,
    Followed,
    Influence,
    Kronecker,
    OffBlockShare,
    SelfTest,
    Sharpness,
    Solve,
    Spectrum,
    Sweep,
    Trace,
    measure,
)
from ds_hessian.backends.restricted import Choice
from ds_hessian.job_measuring import Batches, JobMeasuring, Loss, as_exact_as
from ds_hessian.krylov import SolveMethod, Which
from ds_hessian.krylov.traces import Method
from ds_hessian.operators.kronecker import Adapter, Kind
from ds_hessian.records import (
    DisplacementSweep,
    HessianAlignment,
    HessianBlockCoupling,
    HessianBlockSpectra,
    HessianCurvatures,
    HessianDecomposition,
    HessianEigenpairs,
    HessianInfluence,
    HessianKronecker,
    HessianOffBlockShare,
    HessianSharpness,
    HessianSolution,
    HessianSpectrum,
    HessianTrace,
)
from ds_hessian.records import SelfTest as Verdict
from ds_hessian.show.progress import SpectrumProgress

__all__ = ["Batches", "Hessian", "Loss"]


class Hessian(JobMeasuring):
    """The Hessian of one training job.

    Every method but `memory_plan` is collective: all ranks call it, in the same order, outside of a
    forward/backward pair. The training state is bit for bit the same after it, also when it raises.

    Analyses need `use` (or a first spectrum) to have fixed the micro-batches. Their `overrides` are
    values of the configuration for this call, such as `seed=`, `displacement=` or `resume=`; where
    a basis is stored, `dtype=`, `device=` and `folder=` say how. With `parameters=` (a regular
    expression, or names) they measure the block of these parameters, P H P: vectors still cover all
    parameters, but only the chosen part of an argument counts, and results are zero outside of it.
    The memory plan is logged before the run, and one that does not fit is refused with a
    `ConfigError` that says what would.

    Args:
        backend: The job.
        config: The settings; None for the defaults.

    Attributes:
        backend: The job.
        config: The settings.
        output: The folder of the results.
        used: Called after each `use`; a schedule sets it to measure before the first step.
    """

    def spectrum(
        self, batches: Batches | None = None, loss_fn: Loss = None, **overrides: object
    ) -> HessianSpectrum:
        """Measure spectral density, extreme eigenvalues and trace by stochastic Lanczos quadrature.

        Args:
            batches: As for `use`; None for those of the last `use`.
            loss_fn: As for `use`.
            overrides: Values of the configuration: `num_matvecs=`, `num_probes=`, `seed=`, ...

        Returns:
            The record, the same on every rank. Nothing is left on disk.

        Raises:
            ConfigError: a bad override, no batches, too little memory on some rank, or `resume` has
                the state of another measurement, or a damaged one.
            NumericsError: a loss, gradient or product is not finite.
            MeasurementError: batches, model or loss raised on some rank, or one could not write.
        """
        self._use_if(batches, loss_fn)
        return self._measure(Spectrum, lambda: Spectrum(show=SpectrumProgress), overrides)

    def eigenpairs(
        self,
        k: int = Eigenpairs.k,
        which: Which = Eigenpairs.which,
        tolerance: float = Eigenpairs.tolerance,
        max_matvecs: int = Eigenpairs.max_matvecs,
        basis_size: int | None = Eigenpairs.basis_size,
        start: Tensor | None = None,
        **overrides: object,
    ) -> HessianEigenpairs:
        """Compute the k extreme eigenpairs, with true residuals (`ds_hessian.krylov.eigenpairs`).

        The arguments are those of `ds_hessian.analyses.Eigenpairs`; with `scheme="auto"`, products
        have the same tolerance.

        Raises:
            NumericsError: k or basis_size is impossible, or something is not finite.
        """
        space = self.backend.space
        return self._measure(
            Eigenpairs,
            lambda: Eigenpairs(
                k=k,
                which=which,
                tolerance=tolerance,
                max_matvecs=max_matvecs,
                basis_size=basis_size,
                start=None if start is None else space.vector(start, "start"),
            ),
            as_exact_as(tolerance, overrides),
        )

    def trace(
        self,
        method: Method = Trace.method,
        num_matvecs: int | None = Trace.num_matvecs,
        blocks: Blocks | None = None,
        **overrides: object,
    ) -> HessianTrace:
        """Estimate the trace with its standard error (`ds_hessian.krylov.traces`).

        The arguments are those of `ds_hessian.analyses.Trace`.

        Raises:
            ConfigError: an unknown method, or blocks with a method other than Hutchinson.
            NumericsError: too few products, or something is not finite.
        """
        return self._measure(
            Trace, lambda: Trace(method=method, num_matvecs=num_matvecs, blocks=blocks), overrides
        )

    def solve(
        self,
        b: Tensor,
        dampings: Sequence[float],
        method: SolveMethod = Solve.method,
        tolerance: float = Solve.tolerance,
        num_matvecs: int | None = Solve.num_matvecs,
        preconditioner: Tensor | Literal["adam", "ekfac"] | None = None,
        **overrides: object,
    ) -> HessianSolution:
        """Solve (H + damping I) x = b for each damping (`ds_hessian.krylov.solve`).

        The arguments are those of `ds_hessian.analyses.Solve`; a preconditioner of one's own is its
        diagonal `(n_local,)`.

        Raises:
            ConfigError: `adam`, and the optimizer is another or has not made a step yet.
            NumericsError: b is zero, no dampings, or something is not finite.
        """
        diagonal = preconditioner if isinstance(preconditioner, Tensor) else None
        space = self.backend.space
        return self._measure(
            Solve,
            lambda: Solve(
                dampings=dampings,
                method=method,
                tolerance=tolerance,
                num_matvecs=num_matvecs,
                preconditioner="diagonal" if isinstance(preconditioner, Tensor) else preconditioner,
                b=space.vector(b, "b"),
                diagonal=diagonal,
            ),
            overrides,
        )

    def influence(
        self,
        query: Batches,
        examples: Batches,
        dampings: Sequence[float],
        loss_fn: Loss = None,
        method: SolveMethod = Influence.method,
        tolerance: float = Influence.tolerance,
        num_matvecs: int | None = Influence.num_matvecs,
        preconditioner: Literal["adam", "ekfac"] | None = Influence.preconditioner,
        **overrides: object,
    ) -> HessianInfluence:
        """Estimate the influence of training examples on the loss of a query.

        One solve with the query's gradient, then one gradient for each example (`cost` is that of
        the solve).

        Args:
            query: Micro-batches whose mean loss is the target, as for `use`.
            examples: Micro-batches, each an example. Number i of all ranks together is one: give
                every rank the same ones for examples of a single micro-batch.
            dampings: In loss per squared parameter; all from one Krylov space.
            loss_fn: As for `use`, of query and examples; None for that of `use`.
            method: As for `solve`.
            tolerance: As for `solve`.
            num_matvecs: As for `solve`.
            preconditioner: As for `solve`; then a Krylov space for each damping.
            overrides: Values of the configuration for this call.

        Raises:
            ConfigError: no batches, or different numbers of them on different ranks.
            NumericsError: the query's gradient is zero, no dampings, or something is not finite.
            MeasurementError: batches, model or loss raised on some rank.
        """

        def make() -> Influence:
            return Influence(
                dampings=dampings,
                method=method,
                tolerance=tolerance,
                num_matvecs=num_matvecs,
                preconditioner=preconditioner,
            )

        with self._calling(Influence, make, overrides):
            subject = self._subject(overrides)
            asked, given = (
                self.backend.objective(batches, loss_fn, like=self._objective, apart=True)
                for batches in (query, examples)
            )
            return measure(replace(make(), query=asked, examples=given), subject)

    def sharpness(
        self,
        preconditioned: bool | None = Sharpness.preconditioned,
        tolerance: float = Sharpness.tolerance,
        max_matvecs: int = Sharpness.max_matvecs,
        **overrides: object,
    ) -> HessianSharpness:
        """Measure the top eigenvalues of H and of Adam's preconditioned H, and curvatures along
        gradient and step.

        Cheap enough to be repeated during training: at most `max_matvecs` products once there is an
        earlier measurement to start from (`ds_hessian.krylov.sharpness`). The first one finds its
        start by Lanczos, with some tens of products more. Two vectors are kept between calls.

        The arguments are those of `ds_hessian.analyses.Sharpness`; with `scheme="auto"`, products
        have the same tolerance.

        Raises:
            ConfigError: too few products, or no Adam that has made a step: pass
                `preconditioned=False`.
            NumericsError: the gradient is zero, or something is not finite.
        """
        overrides = dict(as_exact_as(tolerance, overrides))

        def make() -> Sharpness:
            return Sharpness(
                preconditioned=preconditioned, tolerance=tolerance, max_matvecs=max_matvecs
            )

        with self._calling(Sharpness, make, overrides):
            subject = self._subject(overrides)
            config, loss = subject.config, subject.objective.loss_code
            matrix = repr((config.operator, config.parameters, loss))
            followed = self._followed.setdefault(matrix, Followed())
            return measure(replace(make(), followed=followed), subject)

    def block_coupling(
        self, blocks: Blocks = BlockCoupling.blocks, **overrides: object
    ) -> HessianBlockCoupling:
        """Measure how far from block diagonal H is: the paper's masked-probe test, B + 1 products.

        The arguments are those of `ds_hessian.analyses.BlockCoupling`.
        """
        return self._measure(BlockCoupling, lambda: BlockCoupling(blocks=blocks), overrides)

    def off_block_share(
        self,
        blocks: Blocks = OffBlockShare.blocks,
        num_probes: int = OffBlockShare.num_probes,
        **overrides: object,
    ) -> HessianOffBlockShare:
        """Estimate the share of the off-diagonal blocks in |H|_F^2, two products a probe.

        The arguments are those of `ds_hessian.analyses.OffBlockShare`.

        Raises:
            NumericsError: fewer than 2 blocks.
        """
        return self._measure(
            OffBlockShare,
            lambda: OffBlockShare(blocks=blocks, num_probes=num_probes),
            overrides,
        )

    def block_spectra(
        self, blocks: Blocks = BlockSpectra.blocks, **overrides: object
    ) -> HessianBlockSpectra:
        """Measure the spectrum of each diagonal block of H, and how far apart they are.

        The arguments are those of `ds_hessian.analyses.BlockSpectra`.
        """
        return self._measure(BlockSpectra, lambda: BlockSpectra(blocks=blocks), overrides)

    def kronecker(
        self,
        kinds: Sequence[Kind] = Kronecker.kinds,
        layers: Choice | None = Kronecker.layers,
        basis: int = Kronecker.basis,
        probes: int = Kronecker.probes,
        extremes: int = Kronecker.extremes,
        damping: float = Kronecker.damping,
        draws: int = Kronecker.draws,
        adapter: Adapter | Optimizer | None = None,
        layers_at_once: int | None = Kronecker.layers_at_once,
        **overrides: object,
    ) -> HessianKronecker:
        """Measure how close optimizers' Kronecker factors are to H (`analyses.Kronecker`).

        Raises:
            ConfigError: an argument is impossible, or there is no Adam that has made a step.
            UnsupportedError: a weight is not that of one linear layer.
        """
        return self._measure(
            Kronecker,
            lambda: Kronecker(
                kinds=kinds,
                layers=layers,
                basis=basis,
                probes=probes,
                extremes=extremes,
                damping=damping,
                draws=draws,
                adapter=adapter,
                layers_at_once=layers_at_once,
            ),
            overrides,
        )

    def alignment(
        self,
        k: int = Alignment.k,
        earlier: Tensor | str | Path | None = None,
        which: Which = Alignment.which,
        update: bool | None = Alignment.update,
        tolerance: float = Alignment.tolerance,
        max_matvecs: int = Alignment.max_matvecs,
        basis_size: int | None = Alignment.basis_size,
        **overrides: object,
    ) -> HessianAlignment:
        """Measure the share of the gradient and of Adam's last step in the top-k eigenspace, with
        bars.

        The products are those of `eigenpairs` for k pairs and for one more. Save the record to
        compare a later step's space with this one's.

        The arguments are those of `ds_hessian.analyses.Alignment`.

        Raises:
            ConfigError: `update` is asked for without an Adam that has made a step, or the earlier
                vectors have another shape.
            NumericsError: k or basis_size is impossible, the earlier vectors are linearly
                dependent, or something is not finite.
            ResultError: the file of the earlier space is missing, damaged, or of another model.
        """
        return self._measure(
            Alignment,
            lambda: Alignment(
                k=k,
                which=which,
                tolerance=tolerance,
                max_matvecs=max_matvecs,
                basis_size=basis_size,
                update=update,
                earlier=earlier,
            ),
            overrides,
        )

    def curvatures(
        self,
        directions: Sequence[str] | None = Curvatures.directions,
        vectors: Mapping[str, Tensor] | str | Path | None = None,
        **overrides: object,
    ) -> HessianCurvatures:
        """Measure `v'Cv / v'v` along the gradient, Adam's last step and vectors of one's own.

        With `operator="ggn"` each costs two forwards, two thirds of a gradient, and nothing is kept
        for a backward; beside them the gradient at the weights is evaluated once.

        The arguments are those of `ds_hessian.analyses.Curvatures`.

        Raises:
            ConfigError: an unknown direction, or no Adam that has made a step.
            NumericsError: a direction is zero, or something is not finite.
            ResultError: the file of vectors is missing, damaged, or of another model.
        """
        return self._measure(
            Curvatures, lambda: Curvatures(directions=directions, vectors=vectors), overrides
        )

    def decomposition(
        self, batches: Batches | None = None, loss_fn: Loss = None, **overrides: object
    ) -> HessianDecomposition:
        """Measure the spectra of H, of its Gauss-Newton part G, and of the residual R = H - G.

        The probes are the same, so that the traces and the densities compare. Takes what `spectrum`
        takes but an operator, in three times its time, and raises what it raises.

        Raises:
            UnsupportedError: the model's outputs have no single Gauss-Newton matrix.
        """
        self._use_if(batches, loss_fn)
        # The operator of the job's own measurements says nothing of this one.
        settings = {"operator": "hessian", **overrides}
        return self._measure(Decomposition, lambda: Decomposition(show=SpectrumProgress), settings)

    def displacement_sweep(
        self,
        directions: Sequence[str] | Mapping[str, Tensor] = Sweep.directions,
        displacements: Sequence[float] | None = Sweep.displacements,
        batches: Batches | None = None,
        loss_fn: Loss = None,
        **overrides: object,
    ) -> DisplacementSweep:
        """Measure `v'Hv` and the product's diagnostics over a range of displacements: curvature at
        scale h.

        Costs a product for each direction and displacement, and ten more for `"top"`.

        Args:
            directions: Among `"random"` (a unit Gaussian vector), `"top"` (the largest eigenvalue's
                vector, from ten Lanczos steps) and `"gradient"`; or vectors of one's own by name.
            displacements: Ascending; None for three in each decade from rounding noise to |w|.
            batches: As for `use`; None for those of the last `use`.
            loss_fn: As for `use`.
            overrides: Values of the configuration; the displacement is that of `"top"`'s products.

        Raises:
            ConfigError: a bad override or direction, or no batches.
            NumericsError: a loss, gradient or product is not finite: take smaller displacements.
            MeasurementError: batches, model or loss raised on some rank.
        """
        self._use_if(batches, loss_fn)

        def make() -> Sweep:
            if isinstance(directions, Mapping):
                return Sweep(directions=(), displacements=displacements, vectors=directions)
            return Sweep(directions=directions, displacements=displacements)

        return self._measure(Sweep, make, overrides)

    def self_test(
        self, batches: Batches | None = None, loss_fn: Loss = None, **overrides: object
    ) -> Verdict:
        """Test whether this job's Hessian can be trusted, and suggest settings if not; five
        products' time.

        `ds_hessian.analyses.self_test` says what is tested. Takes what `spectrum` takes, and raises
        what it raises; a check that fails is a finding in the record.
        """
        self._use_if(batches, loss_fn)
        return self._measure(SelfTest, SelfTest, overrides)
