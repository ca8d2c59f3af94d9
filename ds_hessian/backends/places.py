"""Where a model keeps its parameters, for passes that run on others in their place.

Beside the modules that own a parameter, what is no module may refer to it: Megatron's Mamba layers
keep three in an object for context parallelism, torch's recurrent layers all in a list. A forward
that found it there would read weights that are not displaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from ds_hessian.backends.state import hooks_in
from ds_hessian.errors import UnsupportedError


@contextmanager
def in_place_of(
    made: Mapping[int, nn.Parameter], model: nn.Module, leave: Callable[[], None]
) -> Iterator[None]:
    """Run the body with other parameters in a model, whose modules are put together as they were
    then: what the body makes of one (a parametrization, an adapter) would keep the others.

    Args:
        made: `{id of a parameter: what takes its place}`.
        model: The model.
        leave: Is called before they leave it (`State.leave`).

    Raises:
        UnsupportedError: in a backward of the body: a parameter got a gradient itself.
    """
    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(_put_together, module, type(module), *map(dict, _parts(module)))
        for name, p in model.named_parameters():
            if p.requires_grad and id(p) in made:
                stack.callback(p.register_hook(_past_the_model(name)).remove)
        for container, key, p in _places(model):
            if id(p) in made:
                whole = isinstance(container, list)  # which a forward may make shorter
                kept = (slice(None), list(container)) if whole else (key, p)
                stack.callback(container.__setitem__, *kept)
                container[key] = made[id(p)]
        stack.callback(leave)
        yield


def _parts(module: nn.Module) -> tuple[dict[Any, Any], ...]:
    """Return the parameters of a module, the modules in it, and its hooks."""
    return module._parameters, module._modules, *hooks_in(module)


def _put_together(module: nn.Module, kind: type[nn.Module], *kept: dict[Any, Any]) -> None:
    """Give a module whose class, parameters or modules were changed what it had, in that order."""
    parts = _parts(module)
    if type(module) is kind and all(map(_is_same, parts[:2], kept)):
        return
    module.__class__ = kind
    for part, before in zip(parts, kept, strict=True):
        part.clear()
        part.update(before)


def _is_same(part: dict[Any, Any], before: dict[Any, Any]) -> bool:
    return list(part) == list(before) and all(part[name] is before[name] for name in part)


def _places(model: nn.Module) -> Iterator[tuple[Any, Any, nn.Parameter]]:
    """Yield container, key and parameter, in modules, and in lists, dictionaries and objects that
    are attributes of modules.
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


def _past_the_model(name: str) -> Callable[[Tensor], None]:
    def refuse(gradient: Tensor) -> None:
        raise UnsupportedError(
            f"ds_hessian does not support a parameter ({name!r}) that the loss uses past the "
            "model, through a reference of its own; read it from the model that loss_fn is given"
        )

    return refuse
