"""The sum of x' x, of which one triangle is formed, against fp64 and against its torch twin."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ds_hessian import ops
from ds_hessian.ops import reference
from tests.ops.cases import U32

SIZES = [(0, 5), (1, 1), (3, 49), (257, 100), (600, 49), (40, 200)]


def triangle(pieces: Tensor, n: int, columns: int) -> Tensor:
    """`(n, n)` fp64, with zeros above the diagonal."""
    whole, at = torch.zeros(n, n, dtype=torch.float64), 0
    for start in range(0, n, columns):
        width = min(columns, n - start)
        piece = pieces[at : at + (n - start) * width]
        whole[start:, start : start + width] = piece.view(n - start, width)
        at += len(piece)
    assert at == len(pieces)
    return whole.tril()


@pytest.mark.parametrize("columns", [48, 96])
@pytest.mark.parametrize(("tokens", "n"), SIZES)
def test_squares_are_added_to_one_triangle(device, tokens, n, columns) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(tokens, n + 3, generator=generator).to(device)[:, 2:-1]  # unaligned
    turned = torch.randn(n, tokens, generator=generator).to(device).T
    length = sum((n - start) * min(columns, n - start) for start in range(0, n, columns))
    native, twin = torch.ones(length, device=device), torch.ones(length, device=device)
    exact, terms = torch.ones(n, n).double(), torch.ones(n, n).double()
    for x, alpha in ((rows, 1.0), (turned, -0.25)):
        ops.add_square(native, columns, x, alpha)
        reference.add_square(twin, columns, x, alpha)
        wide = x.double().cpu()
        exact += alpha * wide.T @ wide
        terms += abs(alpha) * wide.abs().T @ wide.abs()
    # A chain of fp32 operations over 256 tokens; a library's, over all.
    for found, chain in ((native, min(tokens, 256) + tokens / 256), (twin, tokens)):
        error = (triangle(found.cpu(), n, columns) - exact.tril()).abs()
        assert (error <= (chain + 4) * U32 * terms.tril()).all()


def test_what_is_not_finite_stays_in_its_rows_and_columns(device) -> None:
    n, x = 100, torch.ones(5, 100, device=device)
    x[3, 60] = torch.nan
    pieces = torch.zeros(n * 48 + 52 * 48 + 4 * 4, device=device)
    ops.add_square(pieces, 48, x)
    whole = triangle(pieces.cpu(), n, 48)
    bad = torch.zeros(n, n, dtype=torch.bool)
    bad[60, :61] = bad[60:, 60] = True
    assert whole[bad].isnan().all() and (whole[~bad] == torch.ones(n, n).tril()[~bad] * 5).all()
