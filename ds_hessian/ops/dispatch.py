"""The kernels as callers see them: check the arguments, then run what there is for the device.

Conventions shared by all (`csrc/contracts.h`, and `reference.py` for the twins):

* A vector is a flat contiguous fp32 tensor of `n_local` elements. Its first `owned` elements are
  the coordinates that this rank *owns*; the rest are replicas of coordinates that another rank
  owns. Updates touch all elements, sums run over the owned prefix only, so that summed over ranks
  every coordinate counts once.
* Sums are accumulated in fp64 from the exact products of the fp32 inputs, and returned as an fp64
  tensor on the vector's device: partial sums, to be reduced over ranks by the caller. They have the
  same bits on every run and every number of threads. Products with bf16 rows are formed in fp32 and
  added up there in chains of eight before they go to fp64.
* A basis is a `(m, n_local)` tensor of contiguous rows in its storage dtype, fp32 or bf16; a row is
  widened to fp32 before use.
* No output may share memory with another argument, except where it is said.

Cost is given as the number of times each operand is read (R) and written (W). Every kernel raises
`KernelError`, before anything is written, for arguments that it cannot take.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ds_hessian.ops import checks, native, random, reference
from ds_hessian.ops.checks import DTYPE_CODES, STORED, WEIGHTS

_increment_version = getattr(torch.autograd.graph, "increment_version", None)


def _module(device: torch.device) -> Any:
    """Return the compiled kernels for the device; None where the torch twins run."""
    return native.find(device.type).module


class _Call:
    """The device of a native call, and the memory of its sums."""

    def __init__(self, module: ModuleType, device: torch.device, sums: int) -> None:
        self.sums = torch.empty(sums, dtype=torch.float64, device=device)
        self.out = self.sums.data_ptr()
        index, stream = 0, 0
        if device.type == "cuda":
            index = device.index if device.index is not None else torch.cuda.current_device()
            stream = torch.cuda.current_stream(device).cuda_stream
        size = module.workspace_size(sums)
        self.workspace = torch.empty(size, dtype=torch.float64, device=device)
        self.context = (torch.get_num_threads(), index, stream, self.workspace.data_ptr())

    def wrote(self, *tensors: Tensor) -> Tensor:
        """Tell autograd, which cannot see a native write, and return the sums."""
        if _increment_version is not None:
            for tensor in tensors:
                if not tensor.is_inference():
                    _increment_version(tensor)
        return self.sums


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _basis(basis: Tensor) -> tuple[int, int, int, int]:
    rows, columns = basis.shape
    stride = basis.stride(0) if rows > 1 else columns
    return basis.data_ptr(), stride, rows, DTYPE_CODES[basis.dtype]


@torch.no_grad()
def dots(pairs: Sequence[tuple[Tensor, Tensor]], owned: int) -> Tensor:
    """Compute inner products `<a, b>` of pairs of fp32 vectors. Returns `(len(pairs),)`. R each
    operand.
    """
    if not pairs:
        return torch.zeros(0, dtype=torch.float64)
    first = checks.vector("dots", "pairs[0][0]", pairs[0][0])
    n, device = first.shape[0], first.device
    for i, pair in enumerate(pairs):
        for j in (0, 1):
            checks.vector("dots", f"pairs[{i}][{j}]", pair[j], n, device)
    checks.owned("dots", owned, n)
    module = _module(device)
    if module is None:
        return reference.dots(pairs, owned)
    call = _Call(module, device, len(pairs))
    module.dots([(a.data_ptr(), b.data_ptr()) for a, b in pairs], owned, call.out, call.context)
    return call.sums


class Shards:
    """Matching lists of flat shards of weights and masters, in the vector's order.

    Each may be fp32, bf16 or fp16; their lengths add up to `n_local`. They are checked here, once
    for all displacements: a model has thousands.

    Attributes:
        n: The length of the vector that they make up.
        device: Where they are; None if there are none, as on a rank that owns nothing.
    """

    def __init__(self, weights: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
        if len(weights) != len(masters):
            raise checks.refuse(
                "displace",
                "masters",
                f"a list of {len(weights)}, one for each shard of the weights",
                f"has {len(masters)}",
                "pass matching lists",
            )
        self.weights, self.masters = weights, masters
        self.device = weights[0].device if weights else None
        self.n = 0
        for i, (w, m) in enumerate(zip(weights, masters, strict=True)):
            checks.vector("displace", f"weights[{i}]", w, None, self.device, WEIGHTS)
            checks.vector("displace", f"masters[{i}]", m, w.shape[0], self.device, WEIGHTS)
            self.n += w.shape[0]
        self._place()

    def _place(self) -> None:
        """Require memory of its own for each of the weights, and note where everything is."""
        named = [(f"weights[{i}]", w) for i, w in enumerate(self.weights)]
        self._spans = checks.apart(
            "displace", named, [(f"masters[{i}]", m) for i, m in enumerate(self.masters)]
        )
        self._addresses = self._find()
        self._table = _table(self.weights, self.masters)
        self._table_on = _table(self.weights, self.weights)

    def _find(self) -> list[int]:
        return [t.data_ptr() for shards in (self.weights, self.masters) for t in shards]

    @torch.no_grad()
    def displace(self, v: Tensor | None, h: float, owned: int, on: bool = False) -> Tensor:
        """Write `w = cast(master + h * v)` shard by shard; never accumulates. `h = 0` restores.

        With `on` it goes on from where the weights are instead, `w = cast(w + h * v)`.

        The sum is formed in fp32 and rounded once, to nearest even. With `h = 0`,
        `w = cast(master)` bit for bit: `v`, which may then be None, takes no part in it, even where
        it is not finite.

        Returns:
            `(2,)`: `<change, v>` (0 without v) and `<change, change>` over the owned prefix, where
            `change` is what this call did to the stored weights (new minus old). Going from +h to
            -h, these give the fidelity of the realised displacement. R weights, masters, v; W
            weights.
        """
        if self._addresses != self._find():  # a host may give its tensors other memory
            self._place()
        if v is not None:
            checks.vector("displace", "v", v, self.n, self.device)
            checks.apart_from("displace", "v", v, self._spans)
        elif h != 0:
            raise checks.refuse(
                *("displace", "v", "a vector unless h is 0", f"is None with h = {h}"),
                "pass the direction",
            )
        checks.owned("displace", owned, self.n)
        device = self.device or (torch.device("cpu") if v is None else v.device)
        module = _module(device)
        if module is None:
            masters = self.weights if on else self.masters
            return reference.displace(self.weights, masters, v, h, owned)
        call = _Call(module, device, 2)
        table = self._table_on if on else self._table
        module.displace(table, _address(v), h, owned, call.out, call.context)
        return call.wrote(*self.weights)


def _table(
    weights: Sequence[Tensor], masters: Sequence[Tensor]
) -> list[tuple[int, int, int, int, int]]:
    return [
        (w.data_ptr(), m.data_ptr(), w.shape[0], DTYPE_CODES[w.dtype], DTYPE_CODES[m.dtype])
        for w, m in zip(weights, masters, strict=True)
    ]


def displace(
    weights: Sequence[Tensor],
    masters: Sequence[Tensor],
    v: Tensor | None,
    h: float,
    owned: int,
) -> Tensor:
    """Displace shards that are used once: `Shards(weights, masters).displace(v, h, owned)`."""
    return Shards(weights, masters).displace(v, h, owned)


@torch.no_grad()
def difference(
    g_plus: Tensor, g_minus: Tensor, h: float, g_zero: Tensor | None, owned: int
) -> Tensor:
    """Form the central difference in place: `g_plus <- (g_plus - g_minus) / 2h`.

    Returns:
        `(2,)`: `<p, p>` with `p` the result, and `<s, s>` with `s = g_plus + g_minus - 2 g_zero`
        (0 without g_zero). R g_plus, g_minus, g_zero; W g_plus.
    """
    checks.vector("difference", "g_plus", g_plus)
    n, device = g_plus.shape[0], g_plus.device
    inputs = [("g_minus", g_minus)] + ([("g_zero", g_zero)] if g_zero is not None else [])
    for name, tensor in inputs:
        checks.vector("difference", name, tensor, n, device)
    checks.owned("difference", owned, n)
    checks.apart("difference", [("g_plus", g_plus)], inputs)
    if h == 0:
        raise checks.refuse(
            "difference", "h", "a displacement other than 0", "is 0", "pass the step between them"
        )
    module = _module(device)
    if module is None:
        return reference.difference(g_plus, g_minus, h, g_zero, owned)
    call = _Call(module, device, 2)
    addresses = (g_plus.data_ptr(), g_minus.data_ptr(), 1 / (2 * h), _address(g_zero))
    module.difference(*addresses, n, owned, call.out, call.context)
    return call.wrote(g_plus)


@torch.no_grad()
def curvature_ratio(g_plus: Tensor, g_minus: Tensor, g_zero: Tensor, owned: int) -> Tensor:
    """`(2,)`: `<d, d>` and `<s, s>` with `d = g_plus - g_minus`, `s = g_plus + g_minus - 2 g_zero`.

    `sqrt(<s, s> / <d, d>)` is the nonlinearity ratio of a trial displacement. R g_plus, g_minus,
    g_zero; nothing is written.
    """
    checks.vector("curvature_ratio", "g_plus", g_plus)
    n, device = g_plus.shape[0], g_plus.device
    checks.vector("curvature_ratio", "g_minus", g_minus, n, device)
    checks.vector("curvature_ratio", "g_zero", g_zero, n, device)
    checks.owned("curvature_ratio", owned, n)
    module = _module(device)
    if module is None:
        return reference.curvature_ratio(g_plus, g_minus, g_zero, owned)
    call = _Call(module, device, 2)
    addresses = (g_plus.data_ptr(), g_minus.data_ptr(), g_zero.data_ptr())
    module.curvature_ratio(*addresses, owned, call.out, call.context)
    return call.sums


@torch.no_grad()
def normalize_store(w: Tensor, scale: float, v: Tensor, row: Tensor | None, owned: int) -> Tensor:
    """`v <- scale * w`, and its copy rounded to the basis' dtype into `row` (if given).

    With a bf16 `row`, `v` receives the *rounded* values, so that the vector that is
    multiplied next is the vector that is stored. `v` may be `w` itself.

    Returns `(1,)`: `<v, v>` of what was written. R w; W v, row.
    """
    checks.vector("normalize_store", "w", w)
    n, device = w.shape[0], w.device
    checks.vector("normalize_store", "v", v, n, device)
    outputs, inputs = [("v", v)], [] if v.data_ptr() == w.data_ptr() else [("w", w)]
    if row is not None:
        checks.vector("normalize_store", "row", row, n, device, STORED)
        outputs.append(("row", row))
    checks.owned("normalize_store", owned, n)
    checks.apart("normalize_store", outputs, inputs)
    module = _module(device)
    if module is None:
        return reference.normalize_store(w, scale, v, row, owned)
    call = _Call(module, device, 1)
    code = DTYPE_CODES[torch.float32 if row is None else row.dtype]
    module.normalize_store(
        *(w.data_ptr(), scale, v.data_ptr(), _address(row), code),
        *(n, owned, call.out, call.context),
    )
    return call.wrote(v) if row is None else call.wrote(v, row)


@torch.no_grad()
def project(basis: Tensor, w: Tensor, owned: int) -> Tensor:
    """Return `(m,)`: the dot products of the rows of `basis` with `w`. R basis, w."""
    checks.vector("project", "w", w)
    n, device = w.shape[0], w.device
    checks.matrix("project", "basis", basis, n, device)
    checks.owned("project", owned, n)
    module = _module(device)
    if module is None:
        return reference.project(basis, w, owned)
    call = _Call(module, device, basis.shape[0])
    module.project(_basis(basis), w.data_ptr(), owned, call.out, call.context)
    return call.sums


def _check_basis(
    kernel: str, basis: Tensor, w: Tensor, coefficients: Tensor, owned: int
) -> tuple[int, torch.device]:
    checks.vector(kernel, "w", w)
    n, device = w.shape[0], w.device
    checks.matrix(kernel, "basis", basis, n, device)
    checks.coefficients(kernel, coefficients, (-1, basis.shape[0]))
    checks.owned(kernel, owned, n)
    checks.apart(kernel, [("w", w)], [("basis", basis)])
    return n, device


def _fp64(coefficients: Tensor, device: torch.device) -> Tensor:
    """Return coefficients as a kernel reads them; they often come from a reduction on the CPU."""
    return coefficients.to(device, torch.float64).contiguous()


@torch.no_grad()
def subtract(basis: Tensor, w: Tensor, coefficients: Tensor, owned: int) -> Tensor:
    """`w <- w - basis' c` in place, with `c` `(m,)` fp64. Returns `(1,)`: `<w, w>`.

    The sum over rows is formed in fp64 and rounded to fp32 once. R basis, w; W w.
    """
    n, device = _check_basis("subtract", basis, w, coefficients, owned)
    coefficients = _fp64(coefficients, device)
    module = _module(device)
    if module is None:
        return reference.subtract(basis, w, coefficients, owned)
    call = _Call(module, device, 1)
    addresses = (_basis(basis), w.data_ptr(), coefficients.data_ptr())
    module.subtract(*addresses, n, owned, call.out, call.context)
    return call.wrote(w)


@torch.no_grad()
def subtract_project(basis: Tensor, w: Tensor, coefficients: Tensor, owned: int) -> Tensor:
    """`subtract`, then `project` of the result, reading the basis once: the middle of CGS2.

    Returns `(m,)`: the products of `project`. R basis, w; W w.
    """
    n, device = _check_basis("subtract_project", basis, w, coefficients, owned)
    coefficients = _fp64(coefficients, device)
    module = _module(device)
    if module is None:
        return reference.subtract_project(basis, w, coefficients, owned)
    call = _Call(module, device, basis.shape[0])
    addresses = (_basis(basis), w.data_ptr(), coefficients.data_ptr())
    module.subtract_project(*addresses, n, owned, call.out, call.context)
    return call.wrote(w)


@torch.no_grad()
def combine(basis: Tensor, coefficients: Tensor, out: Tensor) -> None:
    """`out <- coefficients @ basis`: `(k, m) x (m, n_local) -> (k, n_local)` fp32, summed in fp64.

    R basis once, whatever k; W out.
    """
    checks.matrix("combine", "basis", basis)
    rows, n = basis.shape
    checks.matrix("combine", "out", out, n, basis.device, (torch.float32,))
    checks.coefficients("combine", coefficients, (out.shape[0], rows))
    checks.apart("combine", [("out", out)], [("basis", basis)])
    coefficients = _fp64(coefficients, basis.device)
    module = _module(basis.device)
    if module is None:
        return reference.combine(basis, coefficients, out)
    call = _Call(module, basis.device, 0)
    k, stride = out.shape[0], out.stride(0) if out.shape[0] > 1 else n
    addresses = (_basis(basis), coefficients.data_ptr(), k, out.data_ptr())
    module.combine(*addresses, stride, n, call.context)
    call.wrote(out)
    return None


@torch.no_grad()
def add_square(pieces: Tensor, columns: int, x: Tensor, alpha: float = 1.0) -> None:
    """`s <- s + alpha x' x` with x `(T, n)` fp32, on and below the diagonal of s `(n, n)`.

    `pieces` has its columns, `columns` at a time (a multiple of 48), in the rows from the first of
    them on, each piece contiguous. What it has above the diagonal means nothing. Entries are added
    up in fp32, in chains of up to 256 tokens on a CPU; a GPU multiplies matrices, piece by piece.
    """
    n = checks.plane("add_square", "x", x).shape[1]
    checks.multiple("add_square", "columns", columns, 48)
    length = sum((n - start) * min(columns, n - start) for start in range(0, n, columns))
    checks.vector("add_square", "pieces", pieces, length, x.device)
    checks.apart("add_square", [("pieces", pieces)], [("x", x)])
    module = _module(x.device)
    kernel = getattr(module, "add_square", None)
    if kernel is None:
        return reference.add_square(pieces, columns, x, alpha)
    call = _Call(module, x.device, 0)
    kernel(pieces.data_ptr(), columns, (x.data_ptr(), *x.shape, *x.stride()), alpha, call.context)
    call.wrote(pieces)
    return None


def fill_gaussian(out: Tensor, key: int, stream: int, start: int = 0) -> Tensor:
    """`out[i] <- ` standard normal variate number `start + i` of (key, stream), `(n,)` fp32.

    The bits of `gaussian(key, stream, index)`, on every device. Returns `out`. W out.
    """
    return _fill("fill_gaussian", "gaussian", out, key, stream, start)


def fill_rademacher(out: Tensor, key: int, stream: int, start: int = 0) -> Tensor:
    """`out[i] <- ` +1 or -1, variate number `start + i` of (key, stream), `(n,)` fp32.

    The bits of `rademacher(key, stream, index)`, on every device. Returns `out`. W out.
    """
    return _fill("fill_rademacher", "rademacher", out, key, stream, start)


@torch.no_grad()
def _fill(kernel: str, kind: str, out: Tensor, key: int, stream: int, start: int) -> Tensor:
    checks.vector(kernel, "out", out)
    n = out.shape[0]
    checks.word(kernel, "key", key)
    checks.word(kernel, "stream", stream)
    if isinstance(start, bool) or not isinstance(start, int) or not 0 <= start <= (1 << 62) - n:
        raise checks.refuse(
            kernel,
            "start",
            f"an integer within 0 .. 2^62 - {n}",
            f"is {start!r}",
            "pass an index in the parameter",
        )
    module = _module(out.device)
    if module is None:
        return random.fill(kind, out, key, stream, start)
    call = _Call(module, out.device, 0)
    getattr(module, kind)(out.data_ptr(), n, key, stream, start, call.context)
    call.wrote(out)
    return out


@torch.no_grad()
def copy(to: Tensor, source: Tensor) -> Tensor:
    """`to <- source`, two fp32 vectors: the yardstick of the benchmark. R source; W to."""
    checks.vector("copy", "to", to)
    checks.vector("copy", "source", source, to.shape[0], to.device)
    checks.apart("copy", [("to", to)], [("source", source)])
    module = _module(to.device)
    if module is None:
        return to.copy_(source)
    call = _Call(module, to.device, 0)
    module.copy(to.data_ptr(), source.data_ptr(), 4 * to.shape[0], call.context)
    call.wrote(to)
    return to
