"""Signals during a measurement: they end it first, and are handled where training goes on.

A handler written in Python may save a checkpoint, and would save displaced weights. So a signal of
`ENDING` raises `Signalled` in the measurement instead, between two collectives, which ends it on
all ranks; its handler runs when the training state is restored. Other signals with such a handler,
as of timers, or of a worker of a `DataLoader` that has died, end nothing by themselves: their
handler runs where `Signalled` would be raised, and what it raises is an error of the measurement.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
"""Signals that users, schedulers and launchers send, and training scripts handle."""

Handler = Callable[[int, FrameType | None], object]


class Signalled(KeyboardInterrupt):
    """A signal has come whose handler waits until the measurement has ended."""


class Interrupts:
    """A context manager in which signals with handlers written in Python end the body, or wait.

    It does nothing outside of the main thread, where Python runs no handler, and in processes that
    are forked in the body, which have the script's own handlers.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._depth = self._reported = 0
        self._waiting: list[int] = []  # to be handled when the measurement has ended
        self._passing: list[int] = []  # to be handled as soon as nothing holds them back
        self._handlers: dict[int, Handler] = {}
        self._ending = {getattr(signal, name, None) for name in ENDING}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in signal.valid_signals():
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
            inner._passing += self._passing
            self._passing.clear()
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
        while self._waiting or self._passing:
            try:
                self._run(self._waiting or self._passing)
            except BaseException as error:
                raised = raised or error
        return raised

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            self._handlers[number](number, frame)
            return
        (self._waiting if number in self._ending else self._passing).append(number)
        self._report()

    def _report(self) -> None:
        while self._passing and not self._depth:
            self._run(self._passing)
        if len(self._waiting) > self._reported and not self._depth:
            self._reported = len(self._waiting)
            raise Signalled(f"received {signal.Signals(self._waiting[-1]).name}")

    def _run(self, numbers: list[int]) -> None:
        """Run the handler of the first of some signals, as called from here."""
        number = numbers.pop(0)
        self._handlers[number](number, sys._getframe())
