"""The names by which probes, records and checkpoints know parameters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ds_hessian.errors import ConfigError


def checkpoint_name(name: str) -> str:
    """Return the name that a parameter has in the model alone, without `torch.compile` around it
    or around a part of it.
    """
    return name.replace("_orig_mod.", "")


def trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return checkpoint names and parameters of those that are trained."""
    named = module.named_parameters()
    return [(checkpoint_name(name), p) for name, p in named if p.requires_grad]


def trained_names(modules: Sequence[nn.Module]) -> list[str]:
    """Return the names of this rank's parameters that are trained."""
    return [name for module in modules for name, _ in trained(module)]


def require_same(attached: Sequence[str], here: Sequence[str]) -> None:
    """Require the trained parameters to be those that were attached.

    A parameter that is frozen later has a coordinate, but no gradient.

    Args:
        attached: The trained parameters of the modules when they were attached.
        here: Those of now.

    Raises:
        ConfigError: a parameter has been frozen, unfrozen, added or removed.
    """
    if list(here) != list(attached):
        different = sorted(set(here) ^ set(attached))
        raise ConfigError(
            "the trainable parameters have changed since attach(): "
            f"{', '.join(different[:5]) or 'their order'}; attach again"
        )
