"""The model as one fixed function of its weights: decisions are held, dropout is off.

Routers of experts choose by `topk`: a function with jumps, of which a difference of gradients at
two points measures the jumps. ReLU, max pooling and their like have kinks, of which it counts those
that it passes. Here each such decision is recorded at the weights, for each micro-batch, and made
again wherever else the function is evaluated: values are gathered at the recorded indices, and
elements stay on their sides of the kinks (`ds_hessian.backends.pieces`). The Hessian is then that
of the smooth piece of the loss on which the weights lie, which is what a double backward computes.

Decisions are intercepted as torch's functions are called (`torch.topk`, `Tensor.argmax`,
`functional.relu`, `x > 0`, ...), in any model and loss. Which of the recorded ones a call makes
again: `ds_hessian.backends.decisions`.

An embedding with a `padding_idx` reads that row, and gives it no gradient: to training it is a
constant. It is held as well, at its value at the weights, so that gradients at displaced weights
are those of one function, masked or not, and where an output's row is tied to it.

Kinks of functions that cannot be held (`ds_hessian.backends.kinks`), or of all where the settings
say so, are crossed: functions are evaluated as they are, but it is noted that there are some.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ds_hessian.backends import compositions, pieces
from ds_hessian.backends.applied import applying
from ds_hessian.backends.choices import DIMS, PieceError, Sides, chooses
from ds_hessian.backends.constants import Constants, leaves, refuse_lost, refuse_solves
from ds_hessian.backends.contexts import refuse_context
from ds_hessian.backends.decisions import Decisions, in_backward
from ds_hessian.backends.derivatives import (
    Comparing,
    Kept,
    is_derivative,
    is_known,
    kept_slope,
    node_of,
    unchanging,
)
from ds_hessian.backends.dropping import PROBABILITIES, drops
from ds_hessian.backends.hooks import unheard, unseen
from ds_hessian.backends.in_python import COMPOSED, INERT, is_composed, undispatched
from ds_hessian.backends.kinks import argument, with_argument
from ds_hessian.backends.names import Stored
from ds_hessian.backends.random_states import RandomState, kept_random_states, trackers
from ds_hessian.backends.state import STATISTICS, State, is_a_hosts, tensors_in, written_by
from ds_hessian.defaults import defaults_of_job
from ds_hessian.errors import ConfigError, UnsupportedError

HELD = {*pieces.NAMES, *compositions.EXPANDED}
"""Functions whose sides of kinks are held."""


CPU = torch.device("cpu")
EMBEDDINGS = (functional.embedding, functional.embedding_bag)
DIFFERENTIATE = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
"""What takes cotangents, which in a backward are no constants of the loss."""
BY_FREQUENCY = (5, "scale_grad_by_freq")
"""Where embeddings are told to scale gradients, so that these are no longer those of the loss."""


class FixedFunction(TorchFunctionMode):
    """The mode in which the passes of one measurement run.

    Args:
        dropout: Whether functions drop as training's do; else their probability is 0.
        allowed: The bytes that may be held of the sides of kinks; 0 to cross all kinks.
        modules: The modules whose weights are displaced.
        device: The device of the passes.

    Attributes:
        decisions: Those that are held.
        state: What forwards change, which is told of the calls in watched ones.
        note_graph: Called with what the first backwards of micro-batches begin from, where these
            recompute activations; sessions call it with outputs and losses.
    """

    _evaluating: ClassVar[int] = 0

    @classmethod
    def is_evaluated(cls) -> bool:
        """Return whether a forward in this process now is one of a measurement, not of training."""
        return cls._evaluating > 0

    def __init__(
        self,
        dropout: bool,
        allowed: int = 0,
        modules: Sequence[nn.Module] = (),
        device: torch.device = CPU,
    ) -> None:
        super().__init__()
        self.decisions = Decisions(allowed)
        self.state: State | None = None
        self.note_graph: Callable[[Tensor], object] = lambda output: None
        self._dropout, self._ended = dropout, False
        self._told = False  # whether the caller knows that what it has changed is refused
        self._modules, self._stored, self._device = modules, Stored(), device
        self._flags = list[tuple[nn.Module, bool]]()
        self._constants, self._within = Constants(), False  # whether a forward is under way
        self._padding = Constants()  # rows of embeddings for padding
        self._bodies: dict[Any, Callable[..., Any]] = {}
        self._derives = set[Hashable]()  # forwards that take derivatives themselves
        self._judgements = set[Hashable]()  # functions whose written backwards have been judged
        self._kept = dict[Hashable, Kept]()  # what is held of what they decide; all of others
        self._keeping = set[tuple[Hashable, Hashable]]()  # those that are known to keep their slope
        self._held = set[Hashable]()  # those of which all has been held in some call
        self._trying = False
        self._here = Kept.ALL  # what is held in the present call
        self._comparing: Comparing | None = None  # of the call that is to be judged
        self._seen = False  # whether a function has decided, was to drop, or has read padding

    # ---- evaluations

    def begin(self) -> None:
        """Note the parameters of the passes, once the host has made them, and the train flags."""
        self._stored = Stored(self._modules)
        self._flags = [(m, m.training) for module in self._modules for m in module.modules()]

    def end(self) -> None:
        """Refuse evaluations and displacements from now on: nothing would restore what they do."""
        self._ended = True

    def require_open(self) -> None:
        """Raise if the measurement has ended."""
        if self._ended:
            raise ConfigError(
                "the measurement of this operator has ended: make its products inside of "
                "`with hessian.measuring() as operator`"
            )

    def require_unchanged(self) -> None:
        """Raise if the measurement has ended, the caller has changed how torch computes, or passes
        would read other weights than displaced ones, or give them no gradient.
        """
        self.require_open()
        refuse_context(self._device)
        if changed := self._stored.changed():
            self._told = True
            raise ConfigError(
                f"{', '.join(changed[:5])} was frozen, replaced, or given another type or other "
                "memory inside of a measurement, which has coordinates of what it was: change the "
                "model before you attach"
            )

    def require_told(self) -> None:
        """Raise for what the caller has changed, which is undone, if no displacement has."""
        if not self._told:
            self.require_unchanged()

    @contextmanager
    def running(self, keys: Iterable[Hashable] = ()) -> Iterator[None]:
        """Run forwards and backwards in the body; `at` says which forward begins.

        Args:
            keys: The forwards, where these are known. Once all have been evaluated, and have
                not chosen or dropped anything, or read padding, functions are called as they are.
        """
        self.require_open()
        for module, flag in self._flags:
            if module.training != flag:
                module.training = flag
        given = list(keys)
        self.decisions.begin(alone=len(given) == 1)
        self._constants.begin()
        self._padding.begin()
        seen = self._seen or any(self._constants.of(key) for key in given)
        plain = bool(given) and not seen and self.decisions.has(given)
        FixedFunction._evaluating += 1
        try:
            with defaults_of_job(), nullcontext() if plain else self._on():
                yield
        finally:
            FixedFunction._evaluating -= 1
            self.decisions.end()
            if self.state is not None:  # before anything else of the measurement is undone
                self.state.settle()

    @contextmanager
    def _on(self) -> Iterator[None]:
        """Be the mode of the body."""
        with applying(self, self._apply), self:
            yield

    @contextmanager
    def forward(self, goes_on: bool = False) -> Iterator[None]:
        """Run the forward that `at` has begun, from the state before the measurement.

        Args:
            goes_on: Whether the body is the rest of it: a loss that a schedule calls apart.
        """
        state, first = self.state, self.decisions.first
        self._within = True
        try:
            if state is None:
                yield
            else:
                with state.rest_of_forward(first) if goes_on else state.forward(first):
                    yield
        finally:
            self._within = False

    def without_graph(self, keys: Iterable[Hashable]) -> AbstractContextManager[object]:
        """Return the context of forwards alone: with a graph where constants of gradients are
        known by it, or where forwards take derivatives.
        """
        graph = any(self._constants.of(key) or key in self._derives for key in keys)
        return nullcontext() if graph else torch.no_grad()

    def at(self, key: Hashable) -> None:
        """Begin the forward of a micro-batch; its first one records the decisions."""
        self.decisions.at(key)
        self._constants.at(key, self.decisions.first)
        self._padding.at(key, self.decisions.first)

    @contextmanager
    def evaluating(self, key: Hashable) -> Iterator[None]:
        """Run forward and backward of one micro-batch in the body."""
        with self.running([key]):
            self.at(key)
            yield

    # ---- calls of torch's functions

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Make a call of one of torch's functions."""
        kwargs = kwargs or {}
        if func in INERT:
            return func(*args, **kwargs)
        if self._trying:
            return self._call(func, types, args, kwargs)
        if self.decisions.learning and func is torch.autograd.backward and in_backward():
            for output in tensors_in((*args, *kwargs.values())):
                self.note_graph(output)
        if self._within and func is torch.autograd.grad and not in_backward():
            return self._derivative(func, types, args, kwargs)
        return self._watched(func, types, args, kwargs)

    def _derivative(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Take a derivative in a forward, whose cotangents are none of the loss."""
        self._derives.add(self.decisions.key)
        self._seen = True
        with unheard():
            return self._watched(func, types, args, kwargs)

    def _watched(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Make a call, and tell the watched state of it."""
        state = self._watching(in_backward())
        if state is None:
            return self._followed(func, types, args, kwargs)
        with unseen():
            state.before(func, args, kwargs)
        made = self._followed(func, types, args, kwargs)
        with unseen():
            state.after(func, args, kwargs, made)
        return made

    def _followed(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Make a call with the constants of the gradient, and follow what comes of it."""
        constants, name, back = self._constants, getattr(func, "__name__", ""), in_backward()
        if not self._follows(back):
            return self._call(func, types, args, kwargs)
        if back and func is torch.autograd.grad and constants.of(self.decisions.key):
            refuse_solves()
        written = [] if name in STATISTICS else written_by(name, args, kwargs)
        attribute = getattr(func, "__self__", None)
        if not back and name == "requires_grad_":
            constants.begin_graph(args[0])
        elif name == "__set__":  # of an attribute: no use of its value
            if args[1] is True and not back and attribute is Tensor.requires_grad:
                constants.begin_graph(args[0])
        elif name not in pieces.COMPARISONS and not (back and func in DIFFERENTIATE):
            leaving = leaves(name, args, kwargs)
            if not (leaving and is_a_hosts()):
                args, kwargs = constants.held(name, (args, kwargs), written, leaving, back)
        if func is Tensor.register_hook and not back:
            args = args[0], unchanging(*args[1:], **kwargs)
            kwargs = {}
        made = self._call(func, types, args, kwargs)
        detaches = name == "detach" or attribute is Tensor.data
        constants.note(name, (*args, *kwargs.values()), written, made, detaches)
        return made

    def _follows(self, back: bool) -> bool:
        """Return whether constants are followed in the present call."""
        derives = back and self._within  # a derivative that the forward takes
        transformed = torch._C._are_functorch_transforms_active()
        return self._constants.following and not (transformed or derives)

    def _watching(self, back: bool) -> State | None:
        """Return the state that is watched in the present call; None for none."""
        state = self.state
        return state if state is not None and state.watching and not back else None

    def _apply(self, apply: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call a function with a written backward with the constants of the gradient."""
        constants, back = self._constants, in_backward()
        if self._trying:
            return self._called(apply, args)
        if (state := self._watching(back)) is not None:
            with torch._C.DisableTorchFunction(), unseen():
                state.before(apply, args, {})
        if not self._follows(back):
            return self._judged(apply, args)
        with torch._C.DisableTorchFunction():
            args, _ = constants.held("apply", (args, {}), [], False, back)
        read = constants.read
        made = self._judged(apply, args)
        with torch._C.DisableTorchFunction():
            if constants.read > read and not back:
                refuse_lost(args)
            constants.note("apply", args, [], made)
        return made

    def _judged(self, apply: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call a function with a written backward; its first one is refused where it is not the
        derivative.
        """
        function, way = getattr(apply, "__self__", None), _way_of(apply, args)
        learning = self.decisions.learning and not torch._C._are_functorch_transforms_active()
        judged = way in self._judgements
        if not learning or is_known(function) or (judged and not self.decisions.first):
            return self._called(apply, args)
        generators = RandomState(self._device, trackers())
        drawn, versions = generators.get(), [t._version for t in tensors_in(args)]
        before, outer = self.decisions.made, self._comparing
        with Comparing() as comparing:
            self._comparing = comparing
            try:
                made = self._called(apply, args)
            finally:
                self._comparing = outer

        def again(*args: Any) -> Any:
            with kept_random_states(self._device):
                generators.set(drawn)
                return apply(*args)

        def judge(gradients: Sequence[Tensor | None], cotangents: Sequence[Tensor | None]) -> None:
            unchanged = versions == [t._version for t in tensors_in(args)]
            if way in self._judgements or not unchanged:
                return
            self._judgements.add(way)  # whatever it is: all ranks call it as often
            with self._beside_model():
                found = is_derivative(again, args, gradients, cotangents)
            if found is False:
                raise _is_no_derivative(function)

        if self.decisions.first and self.decisions.made > before and way not in self._kept:
            self._judge_decisions(way, again, args, before, comparing.found)
        node = node_of(made, function) if torch.is_grad_enabled() and not judged else None
        if node is not None:
            node.register_hook(judge)
        return made

    def _judge_decisions(
        self,
        way: tuple[Any, ...],
        call: Callable[..., Any],
        args: tuple[Any, ...],
        before: int,
        compares: bool,
    ) -> None:
        """Give up what a written function has decided in its call, since so many decisions, if its
        values stand still with it; once for each place where it decides.

        Raises:
            PieceError: they do, and have not done in another call.
        """
        at = way, self.decisions.lines_since(before)
        if at in self._keeping:
            return

        def held() -> Callable[..., Any]:
            return functools.partial(self._holding, self.decisions.beside(), call)

        with self._beside_model():
            kept = kept_slope(call, held, args, compares)
        if kept in (Kept.ALL, None):
            self._held.add(way)
            if kept is not None:
                self._keeping.add(at)
            return
        if way in self._held:
            raise PieceError(
                "a torch.autograd.Function finds its values by comparing in some of its calls "
                f"({getattr(way[0], '__name__', way[0])})"
            )
        self._kept[way] = kept
        self.decisions.give_up(before, kept is Kept.NONE)

    def _holding(self, beside: Decisions, call: Callable[..., Any], *args: Any) -> Any:
        """Make a call with decisions of its own."""
        mine, self.decisions = self.decisions, beside
        try:
            beside.at(mine.key)
            with self:
                return call(*args)
        finally:
            self.decisions = mine

    def _called(self, apply: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call a function with a written backward, which may decide anew at each call."""
        before, kept = self._here, self._kept.get(_way_of(apply, args), Kept.ALL)
        self._here = max(before, kept)
        try:
            with self._constants.forward_of(getattr(apply, "__self__", None)):
                return apply(*args)
        finally:
            self._here = before

    @contextmanager
    def _beside_model(self) -> Iterator[None]:
        """Call a function in the body that is none of a pass."""
        self._trying = True
        try:
            with unseen():
                yield
        finally:
            self._trying = False

    def _call(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        kwargs, name = compositions.whole(func, kwargs), getattr(func, "__name__", "")
        decisions = self.decisions
        decides = decisions.key is not None
        if func in EMBEDDINGS and argument(args, kwargs, *BY_FREQUENCY):
            self._seen = True
            args, kwargs = with_argument(args, kwargs, *BY_FREQUENCY, False)
        if name in PROBABILITIES and not self._dropout:
            self._seen |= drops(name, args, kwargs)
            args, kwargs = with_argument(args, kwargs, *PROBABILITIES[name], 0.0)
        elif name in DIMS and decides and self._here < Kept.NONE and chooses(name, args, kwargs):
            self._seen = True
            x: Tensor = argument(args, kwargs, 0, "input")
            with unseen():
                choice = decisions.choice(func, name, args, kwargs, x)
            return choice.result(x)
        elif name.strip("_") in HELD and decisions.holds and decides and self._here is Kept.ALL:
            return self._hold(func, types, args, kwargs)
        elif func is torch.embedding_renorm_:
            raise _rescales()
        elif func is functional.embedding and decisions.key is not None and not self._trying:
            return self._embed(func, args, kwargs)
        elif func in COMPOSED or is_composed(func, types):
            return self._composed(func, args, kwargs)
        decisions.look_for_kinks(name, args, kwargs)
        return func(*args, **kwargs)

    def _composed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function in Python, and see what it calls."""
        if func not in self._bodies:
            self._bodies[func] = undispatched(func)
        self._seen |= isinstance(func, HigherOrderOperator)
        with self:
            return self._bodies[func](*args, **kwargs)

    # ---- kinks

    def _hold(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return what a function with kinks returns on the sides where the weights are."""
        made = compositions.expanded(func.__name__, args, kwargs)
        if made is not None:
            with self:
                return made()
        kinked = pieces.found(func, args, kwargs)
        if kinked is None and is_composed(func, types):
            return self._composed(func, args, kwargs)
        sides: Sides | None = None
        if kinked is not None:
            if self._comparing is not None and kinked.name in pieces.COMPARISONS:
                self._comparing.note()
            with unseen():
                sides = self.decisions.sides(kinked, func, args, kwargs)
        if kinked is None or sides is None or sides.held is None:
            self.decisions.look_for_kinks(func.__name__, args, kwargs)
            return func(*args, **kwargs)
        self._seen = True
        return sides.value(kinked)

    def _embed(
        self, func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """Return the embeddings, with the row for padding as it is at the weights.

        Raises:
            UnsupportedError: the function rescales rows of the weights in place.
        """
        if argument(args, kwargs, 3, "max_norm") is not None:
            raise _rescales()
        read = func(*args, **kwargs)
        padding = argument(args, kwargs, 2, "padding_idx")
        if padding is None:
            return read
        tokens, weight = (argument(args, kwargs, i, n) for i, n in enumerate(("input", "weight")))
        padded = tokens == (padding if padding >= 0 else weight.shape[0] + padding)
        with unseen():
            row = self._padding.value(weight[padding].detach(), in_backward())
            self._seen |= self.decisions.first and bool(padded.any())
        return torch.where(padded.unsqueeze(-1), row, read)


def _way_of(apply: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a written function with the numbers that it is given, which tell its ways apart."""
    numbers = (a for a in args if isinstance(a, (bool, int, float, str)))
    return getattr(apply, "__self__", None), *numbers


def _is_no_derivative(function: object) -> UnsupportedError:
    called = getattr(function, "__name__", function)
    return UnsupportedError(
        "ds_hessian does not support a torch.autograd.Function whose backward is not the "
        f"derivative of its forward ({called}), as where gradients are turned round, scaled or "
        "estimated: the gradient is not that of the loss; write y + (f - y).detach(), with f the "
        "function and y the one whose derivative the backward is, which is measured as a double "
        "backward has it"
    )


def _rescales() -> UnsupportedError:
    return UnsupportedError(
        "ds_hessian does not support embeddings with max_norm, whose forward rescales rows "
        "of the weights in place, without a gradient; leave max_norm out"
    )
