"""A Kronecker-factored curvature K against the true one C of the same weight, from products C v.

Lanczos from the gradient b gives an orthonormal Q, and W = C Q; Gaussian probes z, made orthogonal
to Q (Z = P z), give Y = C Z. The same products serve every K:

    <C, K>        =  <W, K Q>  +  E <Y, K Z>
    |C|_F^2       =  |W|^2  +  E |Y|^2
    diag(C)       =  diag of Q W' + W Q' - Q (Q'W) Q'  +  E Z * P Y       in any orthonormal basis
    (C + l)^-1 b  =  Q y with y the least-squares solution of (W + l Q) y = b          (MINRES)

where l is a share of the largest eigenvalue, beyond the smallest one where that is negative, so
that C + l is definite: near an eigenvalue of -l a solution is anything.

The first terms are exact and hold what dominates, so that few probes suffice where plain ones are
useless (docs/krylov.md). |diag(C)|^2 takes pairs of independent probes, so that it is unbiased. The
largest eigenvalue of (K + d)^-1/2 C (K + d)^-1/2 takes a Lanczos run of its own for each K, which
starts from the likeliest vector that these products show.

Errors are those of the probes and three times the products' own, all together in units of |C|_F: a
product of a vector that C maps to almost nothing has a large error of its own, and no part in that.
That of the probes is the jackknife's, or by pairs of them where that is more: a mean of `z'Mz` over
p Gaussian z has the variance 2 |M|_F^2 / p, and `(z'Mz')^2` is |M|_F^2 in the mean, so that the
p (p - 1) / 2 pairs tell it from more figures than p. K is known, so that <C, K> needs no pairs:
M is the symmetric part of P C K P, and |M|^2 at most the mean of `|P K C z|^2`.

Cost: `basis` + `probes` products, and `extremes` for each K; on the owner of the layer twice as
many matrices of its shape, fp32.

Source: Meyer, Musco, Musco, Woodruff, SOSA 2021 (Hutch++), for the splitting of a trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ds_hessian.krylov.lanczos import BREAKDOWN, absolute_error
from ds_hessian.krylov.records import COVERAGE, ROUNDOFF
from ds_hessian.operators import LinearOperator
from ds_hessian.operators.kronecker import Eigenform
from ds_hessian.operators.kronecker.spaces import LayerSpace
from ds_hessian.ranks import together

Draw = Callable[[int], Tensor]
Value = tuple[float, float]
"""A figure and its error."""
UNKNOWN: Value = (math.nan, math.nan)
APART = 0.1
"""Length of the random part of the start from which a largest eigenvalue is sought, in units of the
other part."""
TURNS = 3
"""Other bases of eigenvectors in which a share on the diagonal is taken, where there are others."""


@dataclass(frozen=True)
class Effort:
    """The products of a comparison.

    Attributes:
        basis: Steps of Lanczos from the gradient.
        probes: Random probes, at least 2.
        extremes: Steps of Lanczos for the largest eigenvalue of each K^-1/2 C K^-1/2; 0 for none.
        damping: The least eigenvalue of C + l, in units of C's largest one in magnitude, in the
            damped solutions of C and K.
        ridge: Added to K before its root, in units of its mean eigenvalue.
    """

    basis: int = 16
    probes: int = 8
    extremes: int = 8
    damping: float = 0.1
    ridge: float = 1e-2

    def products(self, kinds: int) -> int:
        """Return the products for so many K."""
        return self.basis + self.probes + kinds * self.extremes


@dataclass(frozen=True)
class Compared:
    """One K beside C.

    Attributes:
        cosine: `<C, K> / |C| |K|`.
        scale: The factor c at which c K is closest to C.
        share: Share of |C|^2 on the diagonal of K's eigenbasis. Where eigenvalues of K are equal to
            rounding it has others, and the error has how far the share is from theirs.
        extreme: The largest eigenvalue of (K + d)^-1/2 C (K + d)^-1/2.
        solve: The cosine of `(c K + l)^-1 b` and `(C + l)^-1 b`; NaN where c is not positive, and
            where nothing is known of it. Its error has what that of c makes of it, and the angle of
            the second solution x to the exact one, of which `|x - exact|` is at most the residual,
            with the products' errors, over the least eigenvalue of C + l.
    """

    cosine: Value
    scale: Value
    share: Value
    extreme: Value
    solve: Value


@dataclass(frozen=True)
class Comparison:
    """All K beside the C of one layer.

    Attributes:
        kinds: By name of K.
        norm: `|C|_F`.
        top: The largest eigenvalue of C in magnitude, from below.
        damping: l, with which C + l is definite.
        share: Share of |C|^2 on the diagonal, in the basis of the parameters.
        residual: `|b - (C + l) x| / |b|` of the damped solution x.
    """

    kinds: Mapping[str, Compared]
    norm: Value
    top: float
    damping: float
    share: Value
    residual: float


def compare(
    operator: LinearOperator,
    space: LayerSpace,
    forms: Mapping[str, Eigenform],
    kinds: Sequence[str],
    gradient: Tensor | None,
    rounding: float,
    draw: Draw,
    effort: Effort,
) -> Comparison:
    """Compare the K of a layer with C.

    Args:
        operator: C, of the layer's weight alone.
        space: Its vectors.
        forms: Each K, on the layer's owner.
        kinds: The names of all K, on every rank.
        gradient: b, `(m, n)`, on the owner.
        rounding: A bound on its error.
        draw: Random unit vectors by number.
        effort: The products.

    Collective.
    """
    run = _Products(operator, space, draw)
    basis, images = run.lanczos(_start(space, gradient, draw), effort.basis)
    probes, answers = run.probes(effort.probes, basis)
    errors = list(run.errors)
    known = [*basis, *probes], [*images, *answers]
    tops = {k: run.extreme(forms.get(k), effort, *known) for k in kinds}
    found = [math.nan] * (7 + 8 * len(kinds))
    with together("comparing Kronecker factors", device=space.space.device):
        if space.owns:
            assert gradient is not None
            dense = _Dense(basis, images, probes, answers, gradient, errors, rounding)
            with np.errstate(divide="ignore", invalid="ignore"):  # of a weight without a gradient
                found = dense.figures([forms[k] for k in kinds], effort.damping)
    norm, norm_error, top, shift, residual, *rest = space.known(found)
    compared = {}
    for i, kind in enumerate(kinds):
        mine = rest[2 + 8 * i : 10 + 8 * i]
        cosine, scale, share, solve = zip(mine[::2], mine[1::2], strict=True)
        compared[kind] = Compared(cosine, scale, share, tops[kind], solve)
    return Comparison(compared, (norm, norm_error), top, shift, (rest[0], rest[1]), residual)


def _start(space: LayerSpace, gradient: Tensor | None, draw: Draw) -> Tensor | None:
    """Return the unit vector of the gradient on the owner, a random one where it is zero."""
    (size,) = space.known([0.0 if gradient is None else float(gradient.norm())])
    if size:
        return None if gradient is None else (gradient / gradient.norm()).float()
    return space.gather(draw(0))


class _Products:
    """Products with vectors that are whole on the owner.

    Attributes:
        errors: Of each product so far, relative.
        lengths: Of each product, on the owner.
    """

    def __init__(self, operator: LinearOperator, space: LayerSpace, draw: Draw) -> None:
        self.operator, self.space, self.draw = operator, space, draw
        self.errors, self.lengths = list[float](), list[float]()

    def of(self, x: Tensor | None) -> Tensor | None:
        """Return `C x` on the owner, for an x `(m, n)` of length other than zero there."""
        product = self.operator.matvec(self.space.scatter(x))
        self.errors.append(absolute_error(product) / max(product.norm, 1e-300))
        found = self.space.gather(product.vector)
        self.lengths.append(0.0 if found is None else _length(found))
        return found

    def lanczos(self, start: Tensor | None, steps: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return an orthonormal basis of the Krylov space, and its products; empty elsewhere."""
        basis, images = list[Tensor](), list[Tensor]()
        steps, x, largest = min(steps, self.space.space.n), start, 0.0
        for step in range(steps):
            image = self.of(x)
            rest, size = None, 0.0
            if x is not None and image is not None:
                basis.append(x)
                images.append(image)
                rest = _orthogonal(image, basis)
                size, largest = _length(rest), max(largest, _length(image))
            size, scale = self.space.known([size, largest])
            if step + 1 == steps or size <= BREAKDOWN * max(scale, 1e-300):
                break
            x = None if rest is None else rest / size
        return basis, images

    def probes(self, count: int, basis: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return Gaussian vectors orthogonal to a basis, and their products; empty elsewhere."""
        probes, answers = list[Tensor](), list[Tensor]()
        n = self.space.space.n
        (used,) = self.space.known([float(len(basis))])
        if used >= n:
            return probes, answers
        for number in range(1, count + 1):
            z = self.space.gather(self.draw(number))
            if z is not None:
                z = _orthogonal(z * math.sqrt(n), basis)
                probes.append(z)
            answer = self.of(z)
            if answer is not None:
                answers.append(answer)
        return probes, answers

    def extreme(
        self,
        form: Eigenform | None,
        effort: Effort,
        vectors: Sequence[Tensor] = (),
        images: Sequence[Tensor] = (),
    ) -> Value:
        """Return the largest eigenvalue of S C S with S = (K + d)^-1/2, and its residual.

        Args:
            form: K, on the owner.
            effort: The products.
            vectors: Others, on the owner, whose products are known.
            images: These products.
        """
        (mean,) = self.space.known([0.0 if form is None else form.mean])
        if not effort.extremes or not mean > 0:
            return UNKNOWN
        scaled, before = _Scaled(self, form, effort.ridge), len(self.errors)
        start = self.space.gather(self.draw(0))
        if start is not None and vectors:
            # A random vector may have so little of the first eigenvector that Lanczos takes the
            # second for it, and is sure; of all vectors that are known, hardly ever all have.
            start = APART * start + scaled.likely(vectors, images)
            start = start / _length(start)
        basis, products = scaled.lanczos(start, effort.extremes)
        found = [0.0, 0.0]
        if basis:
            assert form is not None
            q, w = torch.stack(basis).double().flatten(1), torch.stack(products).double().flatten(1)
            t = q @ w.T
            values, axes = torch.linalg.eigh((t + t.T) / 2)
            y = axes[:, -1]
            residual = float((w.T @ y - values[-1] * (q.T @ y)).norm())
            # What errors d of the products C S q make of y' Q' S C S Q y is |S Q y| |d y| at most.
            wrong = np.array(self.errors[before:]) * np.array(self.lengths[before:])
            top = torch.einsum("i,imn->mn", y.to(basis[0]), torch.stack(basis))
            reach, value = scaled.length(top), float(values[-1])
            wrong = COVERAGE * reach * float(np.linalg.norm(wrong * y.cpu().numpy()))
            # K and d are off by a share of themselves, beyond what fp32 sums make of K.
            sums = ROUNDOFF * float(form.values.max()) * reach**2
            found = [value, math.hypot(residual, wrong, value * (form.rounding + sums))]
        value, error = self.space.known(found)
        return value, error


class _Scaled(_Products):
    """Products of S C S."""

    def __init__(self, plain: _Products, form: Eigenform | None, ridge: float) -> None:
        super().__init__(plain.operator, plain.space, plain.draw)
        self.plain, self.form, self.ridge = plain, form, ridge

    def of(self, x: Tensor | None) -> Tensor | None:
        """Return `S C S x` on the owner."""
        image = self.plain.of(self._root(x))
        return self._root(image)

    def likely(self, vectors: Sequence[Tensor], images: Sequence[Tensor]) -> Tensor:
        """Return a vector near the first eigenvector, of length 1 or 0, on the owner: S C x, with
        the x of the largest `x'Cx / x'(K + d)x` among combinations of vectors.
        """
        assert self.form is not None
        count, ridge = len(vectors), self.ridge * self.form.mean
        inner, metric = torch.zeros(2, count, count, dtype=torch.float64)
        for i, (x, y) in enumerate(zip(vectors, images, strict=True)):
            moved = self.form.apply(x.to(self.form.values), lambda v: v + ridge).float()
            for j, other in enumerate(vectors[: i + 1]):  # a start needs no more than fp32
                inner[i, j] = inner[j, i] = torch.dot(y.flatten(), other.flatten())
                metric[i, j] = metric[j, i] = torch.dot(moved.flatten(), other.flatten())
        sizes, axes = torch.linalg.eigh(metric)
        kept = sizes > BREAKDOWN * sizes[-1]
        axes = axes[:, kept] * sizes[kept].rsqrt()
        best = axes @ torch.linalg.eigh(axes.T @ inner @ axes)[1][:, -1]
        along = torch.zeros_like(images[0])
        for share, y in zip(best.tolist(), images, strict=True):
            along.add_(y, alpha=share)
        found = self._root(along)
        assert found is not None
        return found / max(_length(found), 1e-300)

    def length(self, x: Tensor) -> float:
        """Return `|S x|`, on the owner."""
        root = self._root(x)
        assert root is not None
        return _length(root)

    def _root(self, x: Tensor | None) -> Tensor | None:
        if x is None or self.form is None:
            return None
        ridge = self.ridge * self.form.mean
        return self.form.apply(x.to(self.form.values), lambda v: (v + ridge).rsqrt()).float()


class _Dense:
    """The figures of one layer, on its owner, from vectors and products of its shape."""

    def __init__(
        self,
        basis: list[Tensor],
        images: list[Tensor],
        probes: list[Tensor],
        answers: list[Tensor],
        gradient: Tensor,
        errors: list[float],
        rounding: float = 0.0,
    ) -> None:
        empty = gradient.new_zeros((0, *gradient.shape), dtype=torch.float32)
        self.q, self.w = torch.stack(basis), torch.stack(images)
        self.z = torch.stack(probes) if probes else empty
        self.y = torch.stack(answers) if answers else empty
        self.b, self.rounding = gradient, rounding
        self.inside = self._dots(self.q, self.w)
        self.own = _squares(self.w).sum()
        self.between = self._dots(self.y, self.y)
        self.rest = self.between.diag()
        # Errors of products in units of |C|: by squares, as these are in it.
        wrong = torch.tensor(errors, dtype=torch.float64).square().to(self.rest)
        self.slips = (wrong[: len(basis)] * _squares(self.w)).sqrt()
        own = self.slips.square().sum()
        off = self._averages(own, wrong[len(basis) :] * self.rest)[0]
        whole = self._averages(self.own, self.rest)[0]
        self.doubt = COVERAGE * math.sqrt(off / whole) if whole else 0.0

    def figures(self, forms: Sequence[Eigenform], damping: float) -> list[float]:
        """Return the norm, the top, the damping, the residual, and the share of C; then four
        figures of each K, each with its error.
        """
        norms = np.sqrt(self._averages(self.own, self.rest))
        values, vectors = torch.linalg.eigh((self.inside + self.inside.T) / 2)
        top, lowest = float(values.abs().max()), float(values[0])
        shift = damping * top + max(-lowest, 0.0)
        least = shift + lowest if damping == 0 or lowest < 0 else shift
        if lowest < 0:  # of which some eigenvalue is as near as its residual
            least -= self._residual(lowest, vectors[:, 0])
        x, residual, angle = self._solution(shift, least)
        plain, plainly = self._diagonal(None)
        length = norms[0] or math.nan
        lengthening = self.between / (2 * length)
        found = [norms[0], self._bar(norms, norms[0], lengthening), top, shift, residual]
        found += [plain[0], self._bar(plain, _reach(plain[0]), plainly)]
        for form in forms:
            inner, mixed, moving = self._inner(form)
            cosine = inner / (norms * form.norm)
            # Errors of its own: most of those of the product with K cancel in the cosine.
            size = form.norm or math.nan
            scale, ratio = inner / size**2, norms[0] / size
            share, sharing = self._diagonal(form)
            turning = mixed / (size * length) - cosine[0] / length * lengthening
            for values, reach, pairs, least, of_k in (
                (cosine, 1.0, turning, 0.0, form.rounding),
                (scale, ratio, mixed / size**2, moving / size**4, form.rounding * ratio),
                (share, _reach(share[0]), sharing, 0.0, self._turns(form, share[0])),
            ):
                found += [values[0], math.hypot(self._bar(values, reach, pairs, least), of_k)]
            found += self._solve(form, found[-4], found[-3], shift, x, angle)
        return found

    def _solve(
        self, form: Eigenform, scale: float, error: float, shift: float, x: Tensor, angle: float
    ) -> Value:
        """Return the cosine of K's damped solution with that of C, which is at an angle to x, at
        most; with what the scale's error makes of it.
        """
        if not (scale > 0 and angle < math.pi):
            return UNKNOWN
        solve, *others = (
            _cosine(_damped(form, c, shift, self.b), x)
            for c in (scale, max(scale - error, 0.0), scale + error)
        )
        between = math.acos(min(max(solve, -1.0), 1.0))
        turned = (math.cos(max(between - angle, 0.0)), math.cos(min(between + angle, math.pi)))
        far = max(abs(other - solve) for other in others) + max(abs(c - solve) for c in turned)
        return solve, min(far, 1 + abs(solve))  # a cosine is no farther

    def _residual(self, value: float, y: Tensor) -> float:
        """Return a bound on `|C x - value x|` of a Ritz vector, from its coordinates."""
        rest = (self.w.double() - value * self.q.double()).flatten(1).T @ y
        return math.hypot(float(rest.norm()), COVERAGE * float((self.slips * y).norm()))

    def _averages(self, own: Tensor, rest: Tensor) -> np.ndarray:
        """Return own + mean(rest), and the same with each probe left out in turn."""
        p, total = len(rest), float(rest.sum())
        if p < 2:
            return np.array([float(own) + total])
        others = (total - rest.cpu().numpy()) / (p - 1)
        return np.append(float(own) + total / p, float(own) + others)

    def _bar(self, values: np.ndarray, reach: float, pairs: Tensor, least: float = 0.0) -> float:
        """Return the standard error over the probes, with the products' errors.

        Args:
            values: The figure, and the same with each probe left out in turn.
            reach: How far errors of the length |C| move it, at most.
            pairs: `(p, p)` `z'Mz'` of the M with which the mean of `z'Mz` moves it, to first order.
            least: |M|^2, by other means than pairs.
        """
        others, spread = values[1:], 0.0
        if (p := len(others)) > 1:
            squares = float(np.square(others - others.mean()).sum())
            spread = math.sqrt((p - 1) / p * squares)
            between = float(pairs.square().sum() - pairs.diag().square().sum()) / (p * (p - 1))
            spread = max(spread, math.sqrt(2 * max(between, least) / p))
        return math.hypot(spread, self.doubt * float(reach))

    def _inner(self, form: Eigenform) -> tuple[np.ndarray, Tensor, float]:
        """Return <C, K>, `z'CKz'` of all pairs of probes, and the mean of `|P K C z|^2`: what
        `(z'KCz')^2` is in the mean over all z that might be paired with that one, since K is known.
        """
        own = (self.w * form.apply(self.q.to(form.values))).sum()
        images = form.apply(self.y.to(form.values))
        pairs = self._dots(images, self.z)
        narrow = images.float()
        moving = _squares(narrow - self._project(narrow))
        square = float(moving.mean()) if len(moving) else 0.0
        return self._averages(own, pairs.diag()), (pairs + pairs.T) / 2, square

    def _diagonal(self, form: Eigenform | None) -> tuple[np.ndarray, Tensor]:
        """Return the share of |C|^2 on the diagonal, in the eigenbasis of K or the parameters',
        and what moves it, of all pairs of probes.

        Pairs tell the share itself. Of two probes without one no pair is left: the error is NaN.
        """

        def rotated(x: Tensor) -> Tensor:
            return x.double() if form is None else form.rotated(x.to(form.values))

        q, w = rotated(self.q), rotated(self.w)
        mixed = torch.einsum("ij,jmn->imn", self.inside.to(q), q)
        known = (q * (2 * w - mixed)).sum(0)
        back = rotated(self.y - self._project(self.y))
        z = rotated(self.z)
        parts = z * back
        p = len(parts)
        norms = self._averages(self.own, self.rest)
        if p < 2:
            return np.array([float((known**2).sum())]) / norms, self.between
        total, squares = parts.sum(0), _squares(parts)

        def square(without: Tensor | None, left: float, count: int) -> float:
            sum_ = total if without is None else total - without
            pairs = (
                (float((sum_**2).sum()) - left) / (count * (count - 1)) if count > 1 else math.nan
            )
            return float((known**2).sum()) + 2 * float((known * sum_).sum()) / count + pairs

        whole = float(squares.sum())
        values = [square(None, whole, p)]
        values += [square(d, whole - float(s), p - 1) for d, s in zip(parts, squares, strict=True)]
        values = np.array(values) / norms
        pairs = self._dots(z * (known + total / p), back)
        return values, (pairs + pairs.T - values[0] * self.between) / norms[0]

    def _turns(self, form: Eigenform, share: float) -> float:
        """Return how far the share is from that of other eigenvectors of K, in the mean square; 0
        where K has no others.
        """
        generator = torch.Generator().manual_seed(0)
        others = (form.turned(generator) for _ in range(TURNS))
        found = [float(self._diagonal(k)[0][0]) - share for k in others if k is not None]
        return math.sqrt(float(np.square(found).mean())) if found else 0.0

    def _solution(self, shift: float, least: float) -> tuple[Tensor, float, float]:
        """Return the damped solution in the Krylov space, its relative residual, and its largest
        angle to the exact one, by the least eigenvalue of C + shift; pi where nothing is known.
        """
        images = (self.w + shift * self.q).double().flatten(1).T
        b = self.b.double().reshape(-1)
        y = torch.linalg.lstsq(images.cpu(), b[:, None].cpu()).solution.to(b)
        size = float(b.norm())
        residual = float((images @ y - b[:, None]).norm()) / size if size else math.nan
        x = torch.einsum("i,imn->mn", y[:, 0], self.q.double())
        missing = residual * size + COVERAGE * float((self.slips * y[:, 0]).norm()) + self.rounding
        reach = least * float(x.norm())
        return x, residual, math.asin(missing / reach) if missing < reach else math.pi

    def _project(self, x: Tensor) -> Tensor:
        """Return the part of each x in the span of the basis."""
        return torch.einsum("pi,imn->pmn", self._dots(x, self.q).to(x), self.q)

    def _dots(self, a: Tensor, b: Tensor) -> Tensor:
        return a.double().flatten(1) @ b.double().flatten(1).T


def _damped(form: Eigenform, scale: float, shift: float, b: Tensor) -> Tensor:
    """Return (scale K + shift)^-1 b."""
    return form.apply(b.to(form.values), lambda v: 1 / (scale * v + shift))


def _cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


def _reach(share: float) -> float:
    """Return how far errors of half the length |C| move a share of |C|^2, at most."""
    return math.sqrt(max(share, 0.0)) + share


def _length(x: Tensor) -> float:
    """Return the norm, of which no square is lost in fp32."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))


def _squares(x: Tensor) -> Tensor:
    return x.double().square().flatten(1).sum(1)


def _orthogonal(x: Tensor, basis: list[Tensor]) -> Tensor:
    """Return x without its part in the span of orthonormal vectors (twice is enough)."""
    rest = x.clone()
    for _ in range(2):
        for q in basis:
            rest.sub_(q, alpha=float((q * rest).sum(dtype=torch.float64)))
    return rest
