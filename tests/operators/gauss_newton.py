"""Dense Gauss-Newton matrices in fp64, by automatic differentiation alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

Loss = Callable[[nn.Module, Any], Tensor]


class ExactGaussNewton:
    """fp64 products `J' H_out J v`, and those of the empirical Fisher matrix of tokens.

    Args:
        net: A module; its trainable parameters in order are the space.
        outputs: The name of the module that returns the outputs.
        loss: `loss(net, batch)`.
        data: Micro-batches; the loss is the mean of theirs.
        fisher: Whether H_out is `sum omega_t (p - y)(p - y)'`, which is `c c' / omega`.
    """

    def __init__(
        self,
        net: nn.Module,
        outputs: str,
        loss: Loss,
        data: Sequence[Any],
        fisher: bool = False,
    ) -> None:
        self.net = copy.deepcopy(net).double().eval()
        self.module = dict(self.net.named_modules())[outputs]
        self.parameters = [p for p in self.net.parameters() if p.requires_grad]
        self.loss, self.fisher = loss, fisher
        self.data = [[_wide(x) for x in b] for b in data]

    def __call__(self, v: Tensor) -> Tensor:
        """`(n,)` to `(n,)` fp64."""
        parts = v.double().split([p.numel() for p in self.parameters])
        return torch.stack([self._of(b, parts) for b in self.data]).mean(0)

    def _of(self, batch: Any, parts: Sequence[Tensor]) -> Tensor:
        seen: list[Tensor] = []
        handle = self.module.register_forward_hook(
            lambda m, a, f: seen.append(f[0] if isinstance(f, tuple) else f)
        )
        loss = self.loss(self.net, batch)
        handle.remove()
        (f,) = seen
        (c,) = torch.autograd.grad(loss, f, create_graph=True)
        u = self._jacobian_times(f, parts)
        if self.fisher:
            p = f.detach().softmax(-1)
            omega = (c.detach() / (p - p.new_zeros(()).expand_as(p))).abs()  # of other entries
            other = c.detach() > 0
            omega = torch.where(other, omega, 0).sum(-1, keepdim=True) / other.sum(
                -1, keepdim=True
            ).clamp(min=1)
            along = (c * u).sum(-1, keepdim=True) / omega.clamp_min(1e-30)
            product = torch.where(omega > 0, c * along, 0.0)
        elif c.requires_grad:
            (product,) = torch.autograd.grad(c, f, u, retain_graph=True)
        else:
            product = torch.zeros_like(f)
        back = torch.autograd.grad(f, self.parameters, product.detach(), materialize_grads=True)
        return torch.cat([g.reshape(-1) for g in back])

    def _jacobian_times(self, f: Tensor, parts: Sequence[Tensor]) -> Tensor:
        dual = torch.zeros_like(f, requires_grad=True)
        back = torch.autograd.grad(
            f, self.parameters, dual, create_graph=True, materialize_grads=True
        )
        along = sum((g * v.view_as(g)).sum() for g, v in zip(back, parts, strict=True))
        assert isinstance(along, Tensor)
        return torch.autograd.grad(along, dual)[0].detach()


def _wide(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def of_functions(
    net: nn.Module,
    logits: Callable[[Callable[..., Any]], Tensor],
    loss: Callable[[Tensor], Tensor],
    v: Tensor,
) -> Tensor:
    """Return `J' H_out J v` by forward and reverse mode in fp64.

    Args:
        net: A module.
        logits: `logits(net)`: the outputs f.
        loss: The loss as a function of them.
        v: `(n,)`.
    """
    net = copy.deepcopy(net).double()
    weights = {n: p.detach() for n, p in net.named_parameters()}
    parts = v.double().split([p.numel() for p in weights.values()])
    tangents = {n: x.view_as(p) for (n, p), x in zip(weights.items(), parts, strict=True)}

    def outputs(point: dict[str, Tensor]) -> Tensor:
        state = point | {n: b.clone() for n, b in net.named_buffers()}  # a forward may change them
        return logits(lambda *args, **kwargs: functional_call(net, state, args, kwargs))

    f, u = torch.func.jvp(outputs, (weights,), (tangents,))
    _, product = torch.func.jvp(torch.func.grad(loss), (f,), (u,))
    (found,) = torch.func.vjp(outputs, weights)[1](product)
    return torch.cat([found[n].reshape(-1) for n in weights])
