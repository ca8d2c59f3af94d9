"""Signals during a measurement: they end it first, and are handled where training goes on.

A handler written in Python may save a checkpoint, and would save displaced weights. So a signal
raises `Signalled` in the measurement instead, between two collectives, which ends it on all ranks;
its handler runs when the training state is restored.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
"""Signals that users, schedulers and launchers send, and training scripts handle."""

Handler = Callable[[int, FrameType | None], object]


class Signalled(KeyboardInterrupt):
    """A signal has come whose handler waits until the measurement has ended."""


class Interrupts:
    """A context manager in which signals with handlers written in Python raise `Signalled`.

    It does nothing outside of the main thread, where Python runs no handler.
    """

    def __init__(self) -> None:
        self._depth = self._reported = 0
        self._waiting: list[int] = []
        self._handlers: dict[int, Handler] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (getattr(signal, name) for name in SIGNALS if hasattr(signal, name)):
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold signals back until the end of the body."""
        self.hold()
        try:
            yield
        finally:
            self._depth -= 1
            self._report()

    @contextmanager
    def let(self) -> Iterator[None]:
        """Let signals end the body, also those that have been held back around it."""
        depth, self._depth = self._depth, 0
        try:
            self._report()
            yield
        finally:
            self._depth = depth

    @contextmanager
    def entering(self, inner: Interrupts) -> Iterator[None]:
        """Hold signals back while the body enters a measurement inside; then they end that one.

        Args:
            inner: The context of that measurement.
        """
        self.hold()
        inner.hold()
        try:
            yield
            inner._waiting += self._waiting[self._reported :]
            del self._waiting[self._reported :]
        finally:
            inner._depth -= 1
            self._depth -= 1

    def hold(self) -> None:
        """Hold signals back until `handled`."""
        self._depth += 1

    def handled(self) -> BaseException | None:
        """Run the handlers of the signals that have come; return what the first of them raised that
        raised anything.
        """
        raised: BaseException | None = None
        while self._waiting:
            number = self._waiting.pop(0)
            try:
                self._handlers[number](number, None)
            except BaseException as error:
                raised = raised or error
        return raised

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._waiting.append(number)
        self._report()

    def _report(self) -> None:
        if len(self._waiting) > self._reported and not self._depth:
            self._reported = len(self._waiting)
            raise Signalled(f"received {signal.Signals(self._waiting[-1]).name}")
