"""What a forward changes beside weights, buffers and global generators: it is put back.

A model may count its calls in an attribute, keep its last hidden state, append to a list, write a
tensor that is no buffer, a frozen parameter (a momentum encoder), a teacher that its loss refers
to, or the micro-batch itself. Training would go on from what displaced weights have left there, and
the next evaluation would be one of another function. So the first forward of each micro-batch is
watched: what it changes is noted, put back before each further forward, and at the end. So are
attributes that hooks have changed in a backward before the next forward.

Watched are the attributes of all modules, with the lists, dictionaries, sets, deques and arrays in
them, hooks that it registers, and writes of torch's functions into memory that was there before: of
tensors, wherever they are kept. Gradients of parameters that are none of the model's (those of a
loss of its own) are put back at the end; their hooks rest until then, and those of another engine,
which would add to what it has pending, refuse. What the packages of the hosts, and this one, write
is their own business.

Memory: a copy of what is written.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ds_hessian.backends.hooks import hooks_of, nothing
from ds_hessian.backends.random_states import generator
from ds_hessian.errors import UnsupportedError

HOSTS = ("deepspeed", "megatron", "transformer_engine")
"""Packages whose own writes and attributes are left alone."""
_OF_TORCH = {*vars(nn.Module()), "_flat_weights"}
"""Attributes that are torch's own of every module, but for the flags of the guard."""
_OPERATORS = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or")
_IN_PLACE = {f"__i{name}__" for name in (*_OPERATORS, "xor", "lshift", "rshift")} | {"__setitem__"}
STATISTICS = ("batch_norm", "instance_norm", "_native_batch_norm_legit")
"""Functions that write tensors among their arguments, whatever they are called."""
_NONE = (
    *("requires_grad_", "retain_grad_", "detach_", "rename_", "share_memory_"),
    "embedding_renorm_",  # which is refused by another name
)
_SHARES = ("__get__", "as_tensor", "asarray", "from_numpy", "frombuffer", "from_dlpack")
"""Functions whose results may be memory that none of their tensors has."""
_TORCH = str(Path(torch.__file__).parent)
BETWEEN = tuple(
    str(Path(__file__).parent / f"{name}.py")
    for name in ("state", "function", "decisions", "constants")
)
"""Files of this package that lie between who calls torch and what is noted of the call."""

_Owned = Sequence[tuple[dict[str, Any], dict[str, Any]]]
"""The attributes of each owner now, and as they were."""
_Contents = Mapping[int, tuple[Any, Any]]
"""What `_contents` returns."""


class State:
    """What forwards of a measurement change, and how it was before.

    Args:
        modules: The modules of the job.
        held: Modules and other objects to which its loss refers, as `held_by` returns them.
        drawn: Called with a generator from which a watched forward is about to draw.

    Attributes:
        left_alone: Names of attributes that are the host's own business.
        watching: Whether a forward is watched now; `before` and `after` are to be told its calls.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        held: Sequence[Any],
        drawn: Callable[[torch.Generator], object],
    ) -> None:
        self.modules, self.left_alone = modules, set(_OF_TORCH)
        self.watching = False
        self._owners = [m for m in modules_of([*modules, *held]) if not _is_of_a_host(m)]
        others = [each for each in held if not isinstance(each, nn.Module)]
        self._owners += [each for each in others if hasattr(each, "__dict__")]
        self._drawn = drawn
        self._made = set[int]()
        self._own = set[int]()
        self._weights: list[tuple[str, nn.Parameter]] = []
        self._written = list[tuple[Tensor, Tensor]]()
        self._kept: dict[int, list[tuple[int, int]]] = {}
        self._bound = list[tuple[Tensor, Tensor]]()
        self._gradients: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._attributes: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
        self._contents: dict[int, tuple[Any, Any]] = {}
        self._latest: tuple[_Owned, _Contents] | None = None  # before the latest watched forward
        self._hooks = list[tuple[dict[int, Any], int]]()  # that forwards have added
        self._hooked = list[dict[int, Any]]()
        self._resting = list[Callable[[], object]]()  # puts back hooks of gradients that are, too

    @contextmanager
    def forward(self, first: bool) -> Iterator[None]:
        """Run a forward in the body, from the state before the measurement.

        Args:
            first: Whether it is the first one of its micro-batch, at the weights.
        """
        self.put_back()
        inside = modules_of(self.modules) if first else []
        hooks = [each for m in inside for each in hooks_in(m)] if first else self._hooked
        known = [set(each) for each in hooks]
        try:
            with self._watched(inside) if first else nullcontext():
                yield
        finally:
            for each, keys in zip(hooks, known, strict=True):
                self._hooks += [(each, key) for key in each if key not in keys]
            if first:
                changed = [*self._hooked, *(each for each, _ in self._hooks)]
                self._hooked = list({id(each): each for each in changed}.values())

    @contextmanager
    def _watched(self, inside: Sequence[nn.Module]) -> Iterator[None]:
        named = [pair for module in self.modules for pair in module.named_parameters()]
        # Partitioned ones have no memory of their own: what they are gathered into is the host's.
        self._weights = [(n, p) for n, p in named if p.requires_grad and not hasattr(p, "ds_id")]
        self._own = {id(p) for _, p in named}
        self._made = {place(b) for m in inside for b in m._buffers.values() if b is not None}
        before = [(vars(owner), _attributes(owner, self.left_alone)) for owner in self._owners]
        contents = _contents(value for _, each in before for value in each.values())
        self._latest = before, contents  # to be noted once its backward has run, too
        with self.rest_of_forward(first=True):
            yield

    @contextmanager
    def rest_of_forward(self, first: bool) -> Iterator[None]:
        """Run the rest of the latest forward in the body; `first` as there."""
        self.watching = first
        try:
            yield
        finally:
            self.watching = False

    def _note(
        self,
        before: _Owned,
        contents: _Contents,
    ) -> None:
        for owner, values in before:
            new = {k: _GONE for k in owner if k not in values and k not in self.left_alone}
            for name, value in (values | new).items():
                if owner.get(name, _GONE) is not value:
                    self._attributes.setdefault((id(owner), name), (owner, name, value))
        for key, (value, content) in contents.items():
            if key not in self._contents and not _same(value, content):
                self._contents[key] = value, content

    def settle(self) -> None:
        """Note what the latest watched forward has changed, and since then its backward."""
        if self._latest is not None:
            self._note(*self._latest)
            self._latest = None

    def put_back(self) -> None:
        """Put everything back that watched forwards and their backwards have changed, but for
        gradients.
        """
        self.settle()
        for owner, name, value in self._attributes.values():
            if value is _GONE:
                owner.pop(name, None)
            else:
                owner[name] = value
        for value, content in self._contents.values():
            _refill(value, content)
        for hooks, key in self._hooks:
            hooks.pop(key, None)
        self._hooks.clear()
        with torch.no_grad():
            for tensor, data in reversed(self._bound):
                tensor.data = data
            for memory, content in reversed(self._written):
                whole = memory.untyped_storage().nbytes()
                if memory.storage_offset() + memory.numel() <= whole:  # it may have been resized
                    memory.copy_(content)

    def leave(self) -> None:
        """Put back what passes have changed, before the parameters on which they ran leave the
        model: containers have had these in them.
        """
        self.put_back()
        self._attributes.clear()
        self._contents.clear()

    def restore(self) -> None:
        """Put everything back, gradients too, at the end."""
        self.put_back()
        for tensor, gradient in self._gradients.values():
            tensor.grad = gradient
        self._gradients.clear()
        for put_back in self._resting:
            put_back()
        self._resting.clear()

    # ---- calls of torch's functions in a watched forward

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep what a call is about to write.

        Raises:
            UnsupportedError: it writes trainable weights, or adds to their gradients.
        """
        name = getattr(func, "__name__", "")
        if func in (Tensor.backward, torch.autograd.backward):
            raise UnsupportedError(
                "ds_hessian does not support a model or loss_fn that runs a backward pass itself, "
                "whose gradients would count too; return the loss alone, and take gradients inside "
                "of it by torch.autograd.grad"
            )
        given = kwargs.get("generator")
        if given is not None and isinstance(given, torch.Generator):
            self._drawn(given)
        self._keep_gradients(tensors_in((*args, *kwargs.values())))
        if name == "__set__":
            if getattr(func, "__self__", None) is Tensor.data and not is_a_hosts():
                self._rebind(*args)
            return
        found = written_by(name, args, kwargs)
        if found and not is_a_hosts():
            for tensor in found:
                self._keep(tensor)

    def after(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
        """Note the memory that a call has made, into which writes are no change."""
        results = list(tensors_in((made,)))
        if results and getattr(func, "__name__", "") not in _SHARES:
            given = {place(t) for t in tensors_in((*args, *kwargs.values()))}
            self._made |= {place(t) for t in results} - given

    def _keep_gradients(self, tensors: Iterable[Tensor]) -> None:
        for t in tensors:
            # A view of a weight in a written forward is a leaf too, and keeps what was gathered.
            whole = t if t._base is None else t._base
            if not (t.requires_grad and t.is_leaf) or id(whole) in self._own:
                continue
            # ZeRO-3 gathers another engine's weight into memory that it makes for it.
            made = place(t) in self._made and not hasattr(t, "ds_id")
            if id(t) not in self._gradients and not made:
                self._gradients[id(t)] = t, t.grad
                t.grad = None
                for hooks, key, hook in hooks_of(t):
                    package = package_of(hook)
                    if package != "ds_hessian":
                        self._resting.append(functools.partial(hooks.__setitem__, key, hook))
                        hooks[key] = _refuse_gradient if package in HOSTS else nothing
                # Megatron's wrapper has its hook at the node, where torch shows none.
                if hasattr(t, "main_grad"):
                    self._resting.append(t.register_hook(_refuse_gradient).remove)

    def _rebind(self, tensor: Tensor, data: Tensor) -> None:
        if tensor.layout == data.layout == torch.strided and tensor.is_set_to(data):
            return  # as `module.to(dtype)` does where all is in that dtype
        if any(tensor is p for _, p in self._weights):
            raise self._refusal(tensor)
        known = any(tensor is each for each, _ in self._bound) or hasattr(tensor, "ds_id")
        if not known and place(tensor) not in self._made:
            self._bound.append((tensor, tensor.data))

    def _keep(self, tensor: Tensor) -> None:
        where, extent = place(tensor), _extent(tensor)
        if where == 0 or where in self._made or extent is None or tensor.grad_fn is not None:
            return  # what has a graph has been made by this forward, seen or not
        if any(_overlap(tensor, p) for _, p in self._weights if place(p) == where):
            raise self._refusal(tensor)
        first, last = extent
        kept = self._kept.setdefault(where, [])
        if any(low <= first and last <= high for low, high in kept):
            return
        kept.append(extent)
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        memory.set_(tensor.untyped_storage(), first, (last - first,), (1,))
        self._written.append((memory, memory.clone()))

    def _refusal(self, tensor: Tensor) -> UnsupportedError:
        name = next((n for n, p in self._weights if _overlap(tensor, p)), "of the model")
        return UnsupportedError(
            f"ds_hessian does not support a forward that writes its own trainable weights ({name}):"
            " the loss is no function of them then; normalise or clamp a copy of them, or write "
            "them after the optimizer's step"
        )


def _refuse_gradient(_: Tensor) -> None:
    """Be the hook by which another engine collects the gradient of its parameter."""
    raise UnsupportedError(
        "ds_hessian does not support a loss that hands gradients to another engine or model that "
        "is trained (a critic, a teacher), which would train on them: call it under "
        "torch.no_grad(), or detach what it returns"
    )


# ---- what objects and functions hold


def generators_in(objects: Iterable[Any]) -> list[Any]:
    """Return the random generators that modules, or other objects, have as attributes, and in
    containers there.
    """
    values = [v for each in objects for v in _attributes(each).values()]
    inside = [each for value in values for each in _items(value)]
    return [value for value in (*values, *inside) if generator(value) is not None]


def held_by(function: object) -> list[Any]:
    """Return the modules, generators and owners of methods to which a function refers, and those
    that it calls: by closure, defaults, globals, or as attributes, and in containers there.

    Functions of torch's are not looked into.
    """
    found: dict[int, Any] = {}
    given: list[Any] = [function]
    while given:
        value = given.pop()
        if id(value) in found or value is None or isinstance(value, type):
            continue
        if str(getattr(value, "__module__", "")).split(".")[0] in _LIBRARIES:
            continue
        found[id(value)] = value
        if type(value) not in _HOLDING or max(len(value), len(found)) < LARGE:
            given += _referred(value)
    methods = [v for v in found.values() if isinstance(v, MethodType)]
    owners = {id(v.__self__): v.__self__ for v in methods if not isinstance(v.__self__, type)}
    functions = (FunctionType, MethodType, functools.partial)
    others = {key: v for key, v in found.items() if not isinstance(v, functions)}
    return [v for v in (others | owners).values() if hasattr(v, "__dict__") or generator(v)]


_LIBRARIES = ("torch", "numpy", "builtins", "functools", *HOSTS)


def modules_of(objects: Iterable[Any]) -> list[nn.Module]:
    """Return the modules among some objects, and those inside of them, each once."""
    roots = [each for each in objects if isinstance(each, nn.Module)]
    return list({id(m): m for root in roots for m in root.modules()}.values())


def package_of(function: object) -> str:
    """Return the package in which a function is written."""
    return str(getattr(function, "__module__", "")).split(".")[0]


def given_to(function: object) -> list[Any]:
    """Return what a function closes over, where it is assigned yet, and its defaults."""
    cells = [c for c in getattr(function, "__closure__", None) or () if c != CellType()]
    return [*(c.cell_contents for c in cells), *(getattr(function, "__defaults__", None) or ())]


def _is_of_a_host(module: nn.Module) -> bool:
    name = type(module).__module__
    return name.split(".")[0] in HOSTS or name.startswith("torch.nn.parallel")


def _referred(value: Any) -> list[Any]:
    """Return what a function, method or other callable refers to, as far as `held_by` follows."""
    if isinstance(value, nn.Module):
        return []
    if type(value) in _HOLDING:
        return list(filter(_is_held, _items(value)))
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__func__, *filter(_is_held, getattr(value.__self__, "__dict__", {}).values())]
    if not isinstance(value, FunctionType):
        called = type(value).__call__ if callable(value) else None
        return [called, *filter(_is_held, getattr(value, "__dict__", {}).values())]
    names, code = value.__globals__, value.__code__
    known = [names[n] for n in code.co_names if n in names]
    return [v for v in (*given_to(value), *known) if _is_held(v)]


def _is_held(value: object) -> bool:
    kinds = (FunctionType, MethodType, functools.partial, nn.Module)
    return isinstance(value, kinds) or type(value) in _HOLDING or generator(value) is not None


# ---- attributes

_GONE = object()
_KINDS = {list, dict, set, deque, OrderedDict, defaultdict, Counter, np.ndarray}
_HOLDING = _KINDS - {np.ndarray} | {tuple}


LARGE = 4096
"""Entries of a container from which on only its length is kept: what is added to it vanishes."""


def _attributes(owner: Any, left_alone: Set[str] = _OF_TORCH) -> dict[str, Any]:
    """Return an object's attributes but torch's own."""
    return {k: v for k, v in getattr(owner, "__dict__", {}).items() if k not in left_alone}


def hooks_in(module: nn.Module) -> list[dict[int, Any]]:
    """Return the dictionaries of a module's hooks, whose keys no other hook has."""
    found = vars(module)
    return [found[name] for name in found if name in _OF_TORCH and "_hooks" in name]


def _items(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple, set, deque)) else []


def _contents(values: Iterable[Any]) -> dict[int, tuple[Any, Any]]:
    """Return `{id: (container or array, copy of its contents)}` of values and what is in them; of
    large ones the length.
    """
    found: dict[int, tuple[Any, Any]] = {}
    given = list(values)
    while given and len(found) < LARGE:
        value = given.pop()
        if id(value) in found or type(value) not in _KINDS:
            given += [v for v in value if type(v) in _KINDS] if type(value) is tuple else []
            continue
        content: Any
        if isinstance(value, np.ndarray):
            content = value.copy()
        elif len(value) >= LARGE:
            content = len(value)
        else:
            content = dict(value) if isinstance(value, dict) else list(value)
            given += [each for each in _items(value) if type(each) in _KINDS | {tuple}]
        found[id(value)] = value, content
    return found


def _same(value: Any, content: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.shape == content.shape and value.tobytes() == content.tobytes()
    if isinstance(content, int):
        return len(value) == content
    if len(value) != len(content):
        return False
    if isinstance(value, dict):
        pairs = zip(value.items(), content.items(), strict=True)
        return all(k is q and v is w for (k, v), (q, w) in pairs)
    if isinstance(value, set):
        return value == set(content)
    return all(a is b for a, b in zip(value, content, strict=True))


def _refill(value: Any, content: Any) -> None:
    if isinstance(value, np.ndarray):
        value[...] = content
    elif isinstance(content, int):
        if isinstance(value, (list, dict, deque)):
            while len(value) > content:
                value.popitem() if isinstance(value, dict) else value.pop()
    elif isinstance(value, list):
        value[:] = content
    else:
        value.clear()
        (value.extend if isinstance(value, deque) else value.update)(content)


# ---- tensors


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Return the tensors among values, and in lists and tuples among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def written_by(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors into which a call of one of torch's functions writes."""
    given = [] if kwargs.get("out") is None else [kwargs["out"]]
    if name in STATISTICS:
        given += [t for t in tensors_in((*args[1:], *kwargs.values())) if not t.requires_grad]
    in_place = name.endswith("_") and not name.endswith("__") and name not in _NONE
    if in_place or name in _IN_PLACE or kwargs.get("inplace") is True:
        given += args[:1] or list(kwargs.values())[:1]
    return list(tensors_in(given))


def is_a_hosts() -> bool:
    """Return whether one of the hosts' packages, or a hook of this one, calls torch: by the
    innermost frame that is neither torch's nor between.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, *BETWEEN)):
            return str(frame.f_globals.get("__name__")).split(".")[0] in (*HOSTS, "ds_hessian")
    return False


def place(tensor: Tensor) -> int:
    """Return where a tensor's memory begins; 0 where it has none of its own."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse, or a subclass around others
        return 0


def _extent(tensor: Tensor) -> tuple[int, int] | None:
    """Return the bytes of its memory between which a tensor lies; None without any."""
    if tensor.numel() == 0 or tensor.layout != torch.strided:
        return None
    size, strides = tensor.element_size(), zip(tensor.shape, tensor.stride(), strict=True)
    first = int(tensor.storage_offset()) * size
    return first, first + (1 + sum((n - 1) * int(step) for n, step in strides)) * size


def _overlap(a: Tensor, b: Tensor) -> bool:
    mine, other = _extent(a), _extent(b)
    if place(a) != place(b) or mine is None or other is None:
        return False
    return mine[0] < other[1] and other[0] < mine[1]
