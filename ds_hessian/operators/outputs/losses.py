"""The loss as a function of the outputs, recognised from what a gradient shows of it.

For cross entropy the cotangent of token t is `omega_t (p_t - y_t)`, with the softmax p and the
label's unit vector y: the label is its only negative entry, and the weight omega_t (mask, token
count, loss scale) is read off it. The second derivative is then known,

    H_out u  =  omega (p * u - p <p, u>)

and so is the empirical Fisher matrix of tokens, `omega (p - y) <p - y, u>`.

A loss whose cotangent is linear in the outputs (mean squared error) has `H_out u = omega u`.

Memory: a weight, and for the Fisher matrix a label, for each token; beside the outputs and what is
returned, a block of tokens at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hessian.backends.protocol import Head
from ds_hessian.operators.displacement.trials import ROUNDOFF

ROUNDING = 32.0
"""The cotangent of cross entropy is within this many roundings of omega (p - y): measured 1 - 13,
where label smoothing and mean squared error are off by 0.25 - 1 (docs/gauss_newton.md)."""

COHERENT, BIAS = 6.0, 4.0
"""Largest sum of all entries of the cotangents: in standard deviations of their rounding, and in
roundings of each token, since a softmax in 16 bits does not sum to 1 without bias."""

BLOCKS, LEAST = 16, 2**18
"""Outputs are worked on in so many blocks of tokens, or in fewer that have so many entries: little
memory beside the outputs, and work enough for an accelerator."""

UNHEARD = 104.0
"""How far below the likeliest class exp is 0 in fp32, whose least number is 2^-149."""

GOLDEN = 0.6180339887
"""The golden ratio's fraction, of which multiples are spread evenly."""


@dataclass(frozen=True)
class Tokens:
    """What is kept of the cross entropy of one micro-batch.

    Attributes:
        weights: omega, `(T,)` fp32; 0 for a token without a loss. In units of the cotangents, or
            after `scaled` of the terms of `Session.add_gradient`.
        labels: `(T,)`, of this rank's classes; -1 for a label elsewhere, or none.
        read: `(T,)`, whether the weight was read off the token's own cotangent: off that of a sure
            token it may not be, nor is it off one without a loss.
        dim: The dimension of the outputs along which the classes are.
        group: The ranks over which these are split; None if they are not.
        steepest: The largest entry of the cotangents on this rank, as they were seen.
        roundoff: That of the outputs and cotangents, as they were seen.
    """

    weights: Tensor
    labels: Tensor
    read: Tensor
    dim: int
    group: dist.ProcessGroup | None
    steepest: float = 0.0
    roundoff: float = ROUNDOFF

    def scaled(self, factor: float) -> Tokens:
        """Return the same with weights times a factor."""
        return replace(self, weights=self.weights * factor)

    def hessian(self, f: Tensor, u: Tensor) -> Tensor:
        """Return `H_out u`, in the shape of the outputs, fp32."""
        classes, rows = _Classes(f, self.dim, self.group), _rows(u, self.dim)
        # Of a sure token only distances from the likeliest class are left: no rounding of u itself.
        start, means = classes.at_highest(rows), classes.new_zeros()
        for some in classes.blocks():
            apart = rows[some] - start[some, None]
            means[some] = apart.mul_(classes.probabilities(some)).sum(-1)
        means = _summed(means, self.group)
        out = torch.empty_like(rows, dtype=torch.float32)
        for some in classes.blocks():
            apart = (rows[some] - start[some, None]).sub_(means[some, None])
            p = classes.probabilities(some).mul_(apart)
            out[some] = p.mul_(self.weights[some, None])
        return _shaped(out, f, self.dim)

    def fisher(self, f: Tensor, u: Tensor) -> Tensor:
        """Return the empirical Fisher matrix of the tokens times u, fp32."""
        classes, rows = _Classes(f, self.dim, self.group), _rows(u, self.dim)
        # Of a sure token p - 1 at the label would be all rounding: what is left of p is not.
        others, along = classes.new_zeros(), classes.new_zeros()
        for some in classes.blocks():
            p = _without_labels(classes.probabilities(some), self.labels[some])
            others[some] = p.sum(-1)
        others = _summed(others, self.group)

        def less_labels(some: slice) -> Tensor:
            return _with_labels(classes.probabilities(some), self.labels[some], -others[some])

        for some in classes.blocks():
            along[some] = (less_labels(some) * rows[some]).sum(-1)
        along = _summed(along, self.group)
        out = torch.empty_like(rows, dtype=torch.float32)
        for some in classes.blocks():
            d = less_labels(some).mul_(along[some, None])
            out[some] = d.mul_(self.weights[some, None])
        return _shaped(out, f, self.dim)

    def less_rounding(self, c: Tensor) -> Tensor:
        """Return the cotangents of this cross entropy with less of their rounding: at a label all
        that the others sum up to, where the loss has had p - 1.
        """
        rows = _rows(c, self.dim).clone()
        others = torch.zeros(len(rows), device=c.device)
        for some in _blocks(rows):
            others[some] = _without_labels(rows[some].float(), self.labels[some]).sum(-1)
        others = _summed(others, self.group).to(rows.dtype)
        return _shaped(_with_labels(rows, self.labels, -others), c, self.dim)

    def sampled(self, f: Tensor, seed: int) -> Tensor:
        """Return `sqrt(omega) (p - y)` with labels y drawn from the model, fp32.

        The mean of its outer products over all draws is `H_out`. Collective in the group.
        """
        classes = _Classes(f, self.dim, self.group)
        p = classes.probabilities(slice(None))
        generator = torch.Generator().manual_seed(seed)
        u = torch.rand(len(p), generator=generator, dtype=torch.float64).to(p.device, p.dtype)
        first, last = _place(self.group)
        parts = p.new_zeros(last + 1, len(p))
        parts[first] = p.sum(-1)
        u -= _summed(parts, self.group)[:first].sum(0)
        labels = (p.cumsum(-1) < u[:, None]).sum(-1)
        if first == last:  # of what rounding leaves
            labels.clamp_(max=p.shape[-1] - 1)
        here = (u >= 0) & (labels < p.shape[-1])
        d = _less_labels(p, torch.where(here, labels, -1))
        return _shaped(d * self.weights.clamp_min(0).sqrt()[:, None], f, self.dim)

    def is_like(self, other: Tokens) -> bool:
        """Return whether all tokens of each of two micro-batches have one weight, and the two are
        the same or have the same sum: the mean over tokens of one loss.
        """
        bound, found = ROUNDING * max(self.roundoff, other.roundoff), list[tuple[float, float]]()
        for tokens in (self, other):
            read = tokens.weights[tokens.read & (tokens.weights > 0)].double()
            if not len(read):  # of no token there is a loss, or all are sure
                return True
            mean = float(read.mean())
            if float((read - mean).abs().max()) > bound * mean:
                return False
            found.append((mean, mean * float((tokens.weights > 0).sum())))
        return any(math.isclose(a, b, rel_tol=bound) for a, b in zip(*found, strict=True))


@dataclass(frozen=True)
class Squares:
    """What is kept of a loss that is quadratic in the outputs of one micro-batch.

    Attributes:
        weights: omega for each entry of the outputs, or one for each row, fp32.
    """

    weights: Tensor

    def scaled(self, factor: float) -> Squares:
        """Return the same with weights times a factor."""
        return Squares(self.weights * factor)

    def hessian(self, f: Tensor, u: Tensor) -> Tensor:
        """Return `H_out u`."""
        return u * self.weights


def group_of(f: Tensor, head: Head) -> dist.ProcessGroup | None:
    """Return the ranks over which the classes of these outputs are split."""
    return head.group if f.shape[-1] < head.classes else None


def read_cross_entropy(
    f: Tensor, c: Tensor, group: dist.ProcessGroup | None = None
) -> Tokens | None:
    """Return what the cotangent says of a cross entropy; None if the loss is another.

    Args:
        f: The outputs, the classes along the last dimension, or along the second.
        c: The cotangent.
        group: The ranks over which the last dimension is split.

    Collective in the group: a few floats a token.
    """
    if group is not None:
        return _read(f, c, f.ndim - 1, group)
    for dim in dict.fromkeys((f.ndim - 1, 1)):
        if 0 < dim < f.ndim and f.shape[dim] > 1:
            found = _read(f, c, dim, None)
            if found is not None:
                return found
    return None


def size_of(x: Tensor) -> float:
    """Return the largest entry, in absolute value; 0 if there is none."""
    return max(float(x.amax()), -float(x.amin())) if x.numel() else 0.0


def beside_outputs(f: Tensor, least: float = 1e-3) -> Tensor:
    """Return something as large as the outputs that a softmax hears, of entries +-a with
    a >= `least`, to be added to them.
    """
    return _signs(f).mul_(max(_size_heard(f), least))


def rounding_of(f: Tensor) -> Tensor:
    """Return what rounds outputs otherwise, to be added to them: +-u of each, u their roundoff."""
    return _signs(f).mul_(torch.finfo(f.dtype).eps / 2).mul_(f)


def _signs(f: Tensor) -> Tensor:
    """Return signs that alternate, but not with a period of the data, in the shape of f, fp32."""
    last = f.shape[-1]
    parts = (torch.arange(count, device=f.device) for count in (f.numel() // max(last, 1), last))
    rows, columns = (torch.frac(part * GOLDEN) for part in parts)
    return (rows[:, None] + columns).frac_().ge_(0.5).mul_(2).sub_(1).reshape(f.shape)


def heard(f: Tensor, highest: Tensor) -> Tensor:
    """Return which outputs a softmax does not make 0, as it does those of masked classes."""
    return f >= highest - UNHEARD


def _size_heard(f: Tensor) -> float:
    """Return the root of the mean square of the outputs that a softmax hears."""
    if not f.numel():
        return 0.0
    least, highest = torch.aminmax(f)
    count = f.numel()
    if not heard(least, highest):
        some = heard(f, highest)
        f, count = f.masked_fill(~some, 0.0), int(some.sum())
    wide = torch.promote_types(f.dtype, torch.float32)
    return float(f.norm(dtype=wide)) / math.sqrt(max(count, 1))


def uneven(added: Tensor) -> Tensor:
    """Multiply what is added to outputs, in place, by factors of 1 to 2, each entry by its own.

    Then an entry of the cotangent that another entry of the outputs changes has another slope.
    """
    generator = torch.Generator(added.device).manual_seed(0)
    rows = added.view(-1, added.shape[-1])
    for some in _blocks(rows):
        factors = torch.rand(rows[some].shape, generator=generator, device=added.device)
        rows[some].mul_(factors.add_(1.0))
    return added


def keeps_weights(tokens: Tokens, f: Tensor, c: Tensor, scale: float, added: Tensor) -> bool:
    """Return whether the weights of tokens are the same at other outputs.

    Those of a loss of the label's probability that is no cross entropy (focal loss) are functions
    of it, and no single cotangent shows that.

    Args:
        tokens: What was read at `f - added`.
        f: The outputs.
        c: The cotangent there.
        scale: The factor from its units to those of the weights.
        added: What was added to the outputs.

    Collective in the group.
    """
    dim, group, weights = tokens.dim, tokens.group, tokens.weights
    roundoff = max(tokens.roundoff, _roundoff(f, c))
    given = _rows(c, dim)
    here = _Classes(f, dim, group, tokens.labels)
    before = _Classes(f, dim, group, tokens.labels, less=added)
    squares = torch.zeros(3, len(given), device=f.device)
    for some in here.blocks():
        d = here.less_labels(some)
        squares[1, some] = d.square().sum(-1)
        squares[2, some] = before.less_labels(some).square_().sum(-1)
        d.mul_(weights[some, None]).sub_(given[some].float(), alpha=scale)
        squares[0, some] = d.square_().sum(-1)
    off, now, then = _summed(squares, group)
    # The weight of a sure token was read off what is left of p, in which each digit counts.
    then = then.sqrt().masked_fill(then.sqrt() <= ROUNDING * roundoff, 1.0)
    bound = ROUNDING * roundoff * weights * (1 + now.sqrt() / then)
    return bool(((off.sqrt() <= bound) | ~tokens.read).all())


def _read(f: Tensor, c: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tokens | None:
    roundoff = _roundoff(f, c)
    given, classes = _rows(c, dim), _Classes(f, dim, group)
    counts, highest = torch.zeros(2, len(given), device=f.device), classes.highest()
    lowest = torch.empty_like(highest)
    for some in classes.blocks():
        negative = given[some] < 0
        counts[:, some] = torch.stack([negative.sum(-1), given[some].ne(0).sum(-1)]).float()
        lowest[some] = torch.where(negative.any(-1), given[some].argmin(-1), -1)
    found, told = _summed(counts, group)
    if bool(found.gt(1).any()):  # enough for most other losses
        return None
    # Without a negative entry the label is the likeliest class, whose p - 1 was lost in rounding.
    labels = torch.where(found > 0, lowest, highest.masked_fill(told == 0, -1))
    classes.labels, sums = labels, torch.zeros(7, len(given), device=f.device)
    for some in classes.blocks():
        d, cotangents = classes.less_labels(some), given[some].float()
        p, rest = (_without_labels(x.clone(), labels[some]) for x in (d, cotangents))
        parts = (d.square(), cotangents, cotangents.square(), p.square(), rest * p, p, rest)
        sums[:, some] = torch.stack([part.sum(-1) for part in parts])
    squares, total, seen, others, along, left, known = _summed(sums, group)
    tiny = torch.finfo(torch.float32).tiny
    # The cotangent of a sure token is all rounding at its label, of entries that were near 1.
    sure = (squares.sqrt() <= ROUNDING * roundoff) | (found == 0)
    weights = torch.where(sure, known / left.clamp_min(tiny), along / others.clamp_min(tiny))
    off = torch.zeros_like(counts)
    for some in classes.blocks():
        d, cotangents = classes.less_labels(some), given[some].float()
        fitted = cotangents - weights[some, None] * d
        whole = torch.where(sure[some, None], cotangents, fitted)
        rest = _without_labels(fitted, labels[some])
        off[:, some] = torch.stack([part.square().sum(-1) for part in (whole, rest)])
    away, apart = _summed(off, group).sqrt()
    read = ~sure | (told > 0) & (apart <= ROUNDING * roundoff * weights * others.sqrt())
    largest = torch.cat([weights.masked_fill(~read, 0.0), weights.new_zeros(1)]).max()
    bound = ROUNDING * roundoff * torch.where(sure, largest, weights)
    if not bool((away <= bound).all()):
        return None  # for a negative or infinite weight, or NaN, too
    allowed = COHERENT * bound.norm() + BIAS * bound.sum()
    if bool(ROUNDING * total.sum().abs() > allowed):
        return None  # such as a z-loss, which is lost in the rounding of one token
    kept = torch.where(read, weights, torch.where(seen > 0, largest, 0.0))
    return Tokens(kept, labels, read, dim, group, size_of(c), roundoff)


class _Classes:
    """The softmax of outputs, some tokens at a time.

    Args:
        f: The outputs.
        dim: Their dimension of classes.
        group: The ranks over which these are split; None if they are not.
        labels: `(T,)`, of this rank's classes; -1 for others, or none.
        less: What is taken from the outputs; None for nothing.

    Collective in the group: the constructor.
    """

    def __init__(
        self,
        f: Tensor,
        dim: int,
        group: dist.ProcessGroup | None,
        labels: Tensor | None = None,
        less: Tensor | None = None,
    ) -> None:
        self._rows, self.labels, self._group = _rows(f, dim), labels, group
        self._less = None if less is None else _rows(less, dim)
        self._split: tuple[Tensor, Tensor] | None = None
        if group is None:
            return
        highest, total = self.new_zeros(), self.new_zeros()
        for some in self.blocks():
            highest[some] = self._outputs(some).amax(-1)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group)
        for some in self.blocks():
            total[some] = (self._outputs(some) - highest[some, None]).exp_().sum(-1)
        self._split = highest, _summed(total, group)

    def blocks(self) -> Iterator[slice]:
        """Yield the tokens in blocks."""
        return _blocks(self._rows)

    def new_zeros(self) -> Tensor:
        """Return a zero for each token, fp32."""
        return torch.zeros(len(self._rows), device=self._rows.device)

    def probabilities(self, some: slice) -> Tensor:
        """Return p of some tokens, `(t, classes)`."""
        rows = self._outputs(some)
        if self._split is None:
            return rows.softmax(-1)
        highest, total = self._split
        return (rows - highest[some, None]).exp_().div_(total[some, None])

    def at_highest(self, rows: Tensor) -> Tensor:
        """Return of each token the entry of `rows`, `(T, classes)`, at the likeliest class.

        Collective in the group.
        """
        found = torch.zeros(2, len(rows), device=rows.device)
        for some in self.blocks():
            highest, place = self._outputs(some).max(-1)
            here = 1.0 if self._split is None else (highest == self._split[0][some]).float()
            found[0, some] = rows[some].gather(1, place[:, None])[:, 0] * here
            found[1, some] = here
        total, ranks = _summed(found, self._group)
        return total / ranks.clamp_min(1.0)

    def highest(self) -> Tensor:
        """Return of each token its likeliest class, `(T,)`; -1 where another rank has it."""
        found = torch.empty(len(self._rows), dtype=torch.int64, device=self._rows.device)
        for some in self.blocks():
            highest, place = self._outputs(some).max(-1)
            here = None if self._split is None else highest == self._split[0][some]
            found[some] = place if here is None else torch.where(here, place, -1)
        return found

    def less_labels(self, some: slice) -> Tensor:
        """Return p - y of some tokens, `(t, classes)`."""
        assert self.labels is not None
        return _less_labels(self.probabilities(some), self.labels[some])

    def _outputs(self, some: slice) -> Tensor:
        rows = self._rows[some].float()
        return rows if self._less is None else rows - self._less[some]


def _less_labels(p: Tensor, labels: Tensor) -> Tensor:
    """Subtract the unit vectors of the labels that this rank has, in place."""
    here = labels >= 0
    p[here, labels[here]] -= 1.0
    return p


def _without_labels(rows: Tensor, labels: Tensor) -> Tensor:
    """Set the entries of the labels that this rank has to zero, in place."""
    return _with_labels(rows, labels, rows.new_zeros(len(rows)))


def _with_labels(rows: Tensor, labels: Tensor, entries: Tensor) -> Tensor:
    """Set the entries of the labels that this rank has, in place."""
    here = labels >= 0
    rows[here, labels[here]] = entries[here]
    return rows


def _place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return this rank's number among the ranks that split the classes, and the last one."""
    return (0, 0) if group is None else (dist.get_rank(group), dist.get_world_size(group) - 1)


def _summed(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(x, group=group)
    return x


@dataclass(frozen=True)
class Secant:
    """The slope of a cotangent between the outputs and others.

    Attributes:
        least, means, most: Of each row, `(..., 1)`: the change of an entry over that of the output.
        doubt: What rounding of the two cotangents makes of a slope, at most.
    """

    least: Tensor
    means: Tensor
    most: Tensor
    doubt: float

    @classmethod
    def of(cls, before: Tensor, after: Tensor, added: Tensor) -> Secant:
        """Return the slope of two cotangents, where `added`, without a zero, lies between them."""
        parts, nearest = list[tuple[Tensor, ...]](), math.inf
        rows = [_rows(x, x.ndim - 1) for x in (before, after, added)]
        for some in _blocks(rows[0]):
            start, end, step = (x[some] for x in rows)
            slopes = end.to(torch.float32, copy=True).sub_(start).div_(step)
            parts.append((slopes.amin(-1), slopes.mean(-1), slopes.amax(-1)))
            nearest = min(nearest, float(step.abs().amin()))
        shape = [*before.shape[:-1], 1]
        least, means, most = (torch.cat(part).view(shape) for part in zip(*parts, strict=True))
        scale = (size_of(before) + size_of(after)) / nearest
        return cls(least, means, most, ROUNDING * _roundoff(before, after) * scale)

    @property
    def steepest(self) -> Tensor:
        """The largest slope, in absolute value."""
        return torch.maximum(self.most.max(), -self.least.min())

    def apart(self, slopes: Tensor) -> float:
        """Return the largest distance from one slope for each row."""
        return float(torch.maximum(self.most - slopes, slopes - self.least).max())


def read_squares(near: Secant, far: Secant) -> Squares | None:
    """Return what two secants of one micro-batch say of a loss that is quadratic in the outputs;
    None for others.

    A loss of scalar outputs has one slope in each row, whatever it is: only that the two are equal
    shows a quadratic one, and one that does not couple the rows.

    Args:
        near: One secant.
        far: Another, to the other side, `uneven`, and farther, so that its slope is more exact.
    """
    weights = far.means
    for secant in (near, far):
        known = math.isfinite(secant.doubt)
        if not known or not secant.apart(weights) <= secant.doubt + far.doubt:
            return None
    return Squares(weights) if bool((weights >= 0).all()) else None


def _roundoff(*tensors: Tensor) -> float:
    return max(torch.finfo(x.dtype).eps / 2 for x in tensors)


def _rows(x: Tensor, dim: int) -> Tensor:
    return x.movedim(dim, -1).reshape(-1, x.shape[dim])


def _blocks(rows: Tensor) -> Iterator[slice]:
    """Yield rows in blocks."""
    size = max(1, max(LEAST, rows.numel() // BLOCKS) // rows.shape[1])
    for start in range(0, len(rows), size):
        yield slice(start, start + size)


def _shaped(rows: Tensor, like: Tensor, dim: int) -> Tensor:
    shape = [*like.shape[:dim], *like.shape[dim + 1 :], like.shape[dim]]
    return rows.reshape(shape).movedim(-1, dim)
