"""Where a model keeps its parameters, for passes that run on others in their place.

Beside the modules that own a parameter, what is no module may refer to it: Megatron's Mamba layers
keep three in an object for context parallelism. A forward that found it there would read weights
that are not displaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from ds_hessian.errors import UnsupportedError


def places(model: nn.Module) -> Iterator[tuple[Any, Any, nn.Parameter]]:
    """Yield container, key and parameter of each place in which `container[key] = other` puts
    another one: in modules, and in lists, dictionaries and objects that are attributes of modules.
    """
    found = dict[int, Any]()
    for module in model.modules():
        for value in (module._parameters, vars(module), *vars(module).values()):
            within = value if isinstance(value, (dict, list)) else getattr(value, "__dict__", None)
            if isinstance(within, (dict, list)) and not isinstance(value, (nn.Module, Tensor)):
                found[id(within)] = within
    for container in found.values():
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, value in list(items):
            if isinstance(value, nn.Parameter):
                yield container, key, value


def past_the_model(name: str) -> Callable[[Tensor], None]:
    """Return the hook of a parameter that another one stands in for, which gets no gradient.

    Raises:
        UnsupportedError: (the hook) it got one.
    """

    def refuse(gradient: Tensor) -> None:
        raise UnsupportedError(
            f"ds_hessian does not support a parameter ({name!r}) that the loss uses past the "
            "model, through a reference of its own; read it from the model that loss_fn is given"
        )

    return refuse
