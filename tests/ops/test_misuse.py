"""Misuse is a KernelError that says what was required, what came and what to do."""

from __future__ import annotations

import pytest
import torch

from ds_hessian import ops
from ds_hessian.errors import KernelError

N = 64
A, B, C = torch.ones(N), torch.ones(N), torch.ones(N)
BASIS = torch.ones(4, N)
K = torch.ones(4, dtype=torch.float64)
DOUBLE = torch.ones(N, dtype=torch.float64)
STRIDED = torch.ones(2 * N)[::2]
SHORT = torch.ones(N - 1)
META = torch.empty(N, device="meta")
OVER = torch.ones(N + 8)

CASES = {
    "dots takes float64": (
        lambda: ops.dots([(A, DOUBLE)], N),
        r"dots: pairs\[0\]\[1\].*float32.*float64",
    ),
    "dots takes strides": (
        lambda: ops.dots([(STRIDED, A)], N),
        r"flat and contiguous.*strides \(2,\)",
    ),
    "dots takes lengths": (lambda: ops.dots([(A, SHORT)], 3), "of length 64.*63 elements"),
    "dots takes devices": (lambda: ops.dots([(A, META)], N), "on cpu.*on meta.*move it"),
    "owned too large": (
        lambda: ops.dots([(A, B)], N + 1),
        r"owned must be an integer within 0 .. 64.*65",
    ),
    "owned negative": (lambda: ops.project(BASIS, A, -1), "owned must be.*-1"),
    "owned not an integer": (lambda: ops.project(BASIS, A, 2.0), "owned must be an integer"),
    "not a tensor": (lambda: ops.project(BASIS, [1.0], 1), "w must be a tensor, but it is a list"),
    "displace lists": (lambda: ops.displace([A], [], B, 1.0, N), "a list of 1.*has 0"),
    "displace shard lengths": (
        lambda: ops.displace([A], [SHORT], B, 1.0, N),
        r"masters\[0\].*64.*63",
    ),
    "displace total": (lambda: ops.displace([A], [B], SHORT, 1.0, 3), "v must be of length 64"),
    "displace dtype": (
        lambda: ops.displace([DOUBLE], [B], C, 1.0, N),
        r"weights\[0\] must be float32 or",
    ),
    "displace without v": (lambda: ops.displace([A], [B], None, 1.0, N), "unless h is 0.*None"),
    "displace in place": (lambda: ops.displace([A], [A], C, 1.0, N), "apart from.*256 bytes"),
    "displace onto v": (lambda: ops.displace([A], [B], A, 1.0, N), "apart from"),
    "displace shards overlap": (
        lambda: ops.displace([OVER[:N], OVER[8 : N + 8]], [B, C], torch.ones(2 * N), 1.0, N),
        r"weights\[1\] must be apart from weights\[0\].*224 bytes",
    ),
    "displace into a longer master": (
        lambda: ops.displace([A, OVER[40:48]], [OVER[:N], OVER[8:16]], torch.ones(72), 1.0, N),
        r"weights\[1\] must be apart from masters\[0\].*32 bytes",
    ),
    "difference h": (lambda: ops.difference(A, B, 0.0, C, N), "other than 0"),
    "difference overlap": (lambda: ops.difference(A, A, 1.0, None, N), "apart from"),
    "difference shifted": (
        lambda: ops.difference(OVER[:N], OVER[8:], 1.0, None, N),
        "apart from",
    ),
    "normalize row": (lambda: ops.normalize_store(A, 1.0, B, B, N), "apart from"),
    "normalize shifted": (lambda: ops.normalize_store(OVER[:N], 1.0, OVER[8:], None, N), "apart"),
    "normalize row dtype": (
        lambda: ops.normalize_store(A, 1.0, B, DOUBLE, N),
        "row must be float32 or",
    ),
    "basis dtype": (lambda: ops.project(BASIS.half(), A, N), "basis must be float32 or bfloat16"),
    "basis transposed": (
        lambda: ops.project(torch.ones(N, 4).t(), A, N),
        "contiguous rows.*column",
    ),
    "basis expanded": (lambda: ops.project(A.expand(4, N), B, N), "contiguous rows"),
    "basis shape": (lambda: ops.project(A, B, N), r"shape \(rows, n\)"),
    "basis columns": (lambda: ops.project(BASIS, SHORT, 3), r"\(rows, 63\)"),
    "coefficients count": (lambda: ops.subtract(BASIS, A, K[:3], N), r"shape \(4,\).*\(3,\)"),
    "coefficients dtype": (lambda: ops.subtract(BASIS, A, K.int(), N), "floating-point.*int32"),
    "row of the basis": (lambda: ops.subtract_project(BASIS, BASIS[1], K, N), "apart from basis"),
    "combine out": (lambda: ops.combine(BASIS, K[None], A), "out must be of shape"),
    "combine shape": (lambda: ops.combine(BASIS, K[None], torch.ones(2, N)), r"shape \(2, 4\)"),
    "combine in place": (lambda: ops.combine(BASIS, torch.ones(4, 4), BASIS), "apart from"),
    "combine dtype": (
        lambda: ops.combine(BASIS, K[None], torch.ones(1, N).half()),
        "must be float32",
    ),
    "square dtype": (lambda: ops.add_square(A, 48, BASIS.half()), "x must be float32.*float16"),
    "square shape": (lambda: ops.add_square(A, 48, B), r"x must be of shape \(tokens, n\)"),
    "square columns": (lambda: ops.add_square(A, 8, BASIS), "multiple of 48.*is 8"),
    "square pieces": (lambda: ops.add_square(A, 48, BASIS), "of length 3328.*64 elements"),
    "square in place": (
        lambda: ops.add_square(OVER[:N], 48, OVER[8 : 8 + N].view(-1, 8)),
        "apart from",
    ),
    "fill dtype": (lambda: ops.fill_gaussian(DOUBLE, 0, 0), "out must be float32"),
    "fill start": (lambda: ops.fill_gaussian(A, 0, 0, -1), "start must be an integer within 0"),
    "fill key": (lambda: ops.fill_rademacher(A, 2**64, 0), "key must be.*modulo"),
}


@pytest.mark.parametrize("implementation", ["auto", "torch"])
@pytest.mark.parametrize("name", CASES)
def test_misuse_is_refused_before_anything_is_written(name, implementation) -> None:
    call, message = CASES[name]
    with ops.implementation(implementation), pytest.raises(KernelError, match=message):
        call()
    for tensor in (A, B, C, BASIS, OVER, DOUBLE):
        assert (tensor == 1).all()


def test_a_native_write_is_seen_by_autograd() -> None:
    x = torch.ones(N, requires_grad=True)
    saved = x * 1.0
    y = (saved * saved).sum()
    ops.normalize_store(saved.detach(), 2.0, saved.detach(), None, N)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_parameters_can_be_displaced_outside_no_grad() -> None:
    p = torch.nn.Parameter(torch.zeros(N))
    for implementation in ("auto", "torch"):
        with ops.implementation(implementation):
            ops.displace([p], [A], B, 0.5, N)
        assert (p == 1.5).all() and p.requires_grad
