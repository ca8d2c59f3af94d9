"""The names by which probes, records and checkpoints know parameters."""

from __future__ import annotations

from torch import nn


def checkpoint_name(name: str) -> str:
    """Return the name that a parameter has in the model alone, without `torch.compile` around it
    or around a part of it.
    """
    return name.replace("_orig_mod.", "")


def trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return checkpoint names and parameters of those that are trained."""
    named = module.named_parameters()
    return [(checkpoint_name(name), p) for name, p in named if p.requires_grad]
