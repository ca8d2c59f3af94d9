"""What passes sum over the tokens of one linear layer, for its Kronecker factors.

Each of the sums is an `Accumulator` of one layer on one rank; the sum over ranks is made by
`ds_hessian.operators.kronecker.passes`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hessian import ops
from ds_hessian.operators.kronecker.planned import columns, size_of_square, spans

SKETCH = 32
"""Columns of random signs by whose products `sum c a'` and the job's gradient are compared: the
square of their distance is then known to sqrt(2 / SKETCH), a quarter, or better (Hutchinson, 1990).
"""


class Accumulator(Protocol):
    """What one pass sums over the tokens of one layer on this rank."""

    @abstractmethod
    def note(self, a: Tensor, c: Tensor) -> None:
        """Add the tokens of a call: inputs `(T, n)` and cotangents `(T, m)`."""

    def join(self, ranks: dist.ProcessGroup) -> None:
        """Add up what ranks that have tokens of a micro-batch each have seen of it, which is
        nothing to a sum over tokens, before it is closed.
        """
        return

    def close(self) -> None:
        """End a micro-batch of which it has seen tokens, which is nothing to a sum over these."""
        return


class Count(Accumulator):
    """How much is seen of a layer.

    Attributes:
        tokens: Its tokens.
        batches: Micro-batches that had some.
    """

    def __init__(self) -> None:
        self.tokens = self.batches = self._before = 0

    def note(self, a: Tensor, c: Tensor) -> None:
        """Count the tokens."""
        self.tokens += len(a)

    def close(self) -> None:
        """Count the micro-batch, if it had some."""
        self.batches += self.tokens > self._before
        self._before = self.tokens


class Seen(Accumulator):
    """Products of `sum c a'` with random signs, of the calls that the job's gradient has in it.

    Attributes:
        sketch: `(m, SKETCH)` the products.
        lengths: `sum |c| |a|`.
        batches: Micro-batches with such calls.
    """

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        m, n = shape
        self.signs = _signs(n).to(device)
        self.sketch = torch.zeros(m, SKETCH, device=device)
        self.lengths = torch.zeros((), dtype=torch.float64, device=device)
        self.batches, self._open = 0, False

    def note(self, a: Tensor, c: Tensor) -> None:
        """Add `c' a` times the signs."""
        self.sketch.addmm_(c.T, a @ self.signs)
        self.lengths += _lengths(a, c)
        self._open = True

    def close(self) -> None:
        """Count the micro-batch, if it had some."""
        self.batches += self._open
        self._open = False


class Square:
    """A sum of `x' x` over tensors x `(T, n)`: its pieces of columns from the diagonal downward."""

    def __init__(self, n: int, device: torch.device) -> None:
        self.n, self._spans, self._columns = n, spans(n), columns(n)
        self.flat = torch.zeros(size_of_square(n), device=device)

    def _cut(self, flat: Tensor) -> list[Tensor]:
        shapes = [(self.n - start, end - start) for start, end in self._spans]
        parts = flat.split([rows * width for rows, width in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def add(self, x: Tensor, alpha: float = 1.0) -> None:
        """Add `alpha x' x`."""
        ops.add_square(self.flat, self._columns, x, alpha)

    def triangle(self, flat: Tensor) -> Tensor:
        """Return the matrix `(n, n)`, fp64, from pieces in the order of `flat`; what is above its
        diagonal means nothing.
        """
        found = flat.new_zeros(self.n, self.n, dtype=torch.float64)
        for (start, end), piece in zip(self._spans, self._cut(flat), strict=True):
            found[start:, start:end] = piece
        return found

    def whole(self, flat: Tensor) -> Tensor:
        """Return the matrix `(n, n)`, fp64, from pieces in the order of `flat`."""
        found = self.triangle(flat)
        for start, end in self._spans:
            square = found[start:end, start:end]
            square.copy_(square.tril() + square.tril(-1).T)
            found[start:end, end:] = found[end:, start:end].T
        return found


class KFAC(Accumulator):
    """The factors `sum a a'` and `sum c c'`."""

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        m, n = shape
        self.squares = [Square(s, device) for s in (n, m)]

    def note(self, a: Tensor, c: Tensor) -> None:
        """Add `a' a` and `c' c`."""
        self.squares[0].add(a)
        self.squares[1].add(c)


class Gradients(Accumulator):
    """A micro-batch's gradient G, of which sums of squares are made, `(m, m)` and `(n, n)`."""

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self.gradient = torch.zeros(shape, device=device)
        self.squares = [Square(s, device) for s in shape]

    def note(self, a: Tensor, c: Tensor) -> None:
        """Add to the gradient of the micro-batch."""
        self.gradient.addmm_(c.T, a)

    def join(self, ranks: dist.ProcessGroup) -> None:
        """Give the first of the ranks the micro-batch's whole gradient, and the others none."""
        dist.all_reduce(self.gradient, group=ranks)
        if dist.get_rank(ranks):
            self.gradient.zero_()


class Shampoo(Gradients):
    """The factors `sum G G'` and `sum G' G` over micro-batches.

    Attributes:
        lengths: `sum |c| |a|` of each micro-batch, squared and added up.
    """

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        super().__init__(shape, device)
        self.lengths, self._length = torch.zeros(2, dtype=torch.float64, device=device)

    def note(self, a: Tensor, c: Tensor) -> None:
        """Add to the gradient of the micro-batch, and to its lengths."""
        super().note(a, c)
        self._length += _lengths(a, c)

    def close(self) -> None:
        """Add the squares of the gradient, which begins anew."""
        self.lengths += self._length.square()
        self._length.zero_()
        self.squares[0].add(self.gradient.T)
        self.squares[1].add(self.gradient)
        self.gradient.zero_()


class Moments(Accumulator):
    """The sum of `(U_B' c)^2 ((U_A' a)^2)'`: EK-FAC's eigenvalues."""

    def __init__(self, shape: tuple[int, int], bases: tuple[Tensor, Tensor]) -> None:
        self.left, self.right = bases
        self.total = torch.zeros(shape, device=self.left.device)

    def note(self, a: Tensor, c: Tensor) -> None:
        """Add the squares in the eigenvectors."""
        self.total.addmm_((c @ self.left).square_().T, (a @ self.right).square_())


class Round(Gradients):
    """The sums of one round of KL-Shampoo: G R^-1 G' / n and G' L^-1 G / m over micro-batches.

    Args:
        shape: `(m, n)`.
        roots: S with `S S' = L^-1` and `S S' = R^-1`: by them the sums are as accurate as squares.
    """

    def __init__(self, shape: tuple[int, int], roots: tuple[Tensor, Tensor]) -> None:
        self.left, self.right = roots
        super().__init__(shape, self.left.device)

    def close(self) -> None:
        """Add the squares of the gradient times the roots; it begins anew."""
        g = self.gradient
        self.squares[0].add((g @ self.right).T, alpha=1 / g.shape[1])
        self.squares[1].add(self.left.T @ g, alpha=1 / g.shape[0])
        g.zero_()


def _lengths(a: Tensor, c: Tensor) -> Tensor:
    """Return `sum |c| |a|`: fp32 rounds `sum c a'` to its roundoff times that."""
    return (c.norm(dim=1) * a.norm(dim=1)).sum(dtype=torch.float64)


def _signs(n: int) -> Tensor:
    """Return `(n, SKETCH)` random signs, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 2, (n, SKETCH), generator=generator).float().mul_(2).sub_(1)
