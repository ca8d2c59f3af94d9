"""Deferred signals: an interrupt is handled between two collectives, not during one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
"""Signals that users, schedulers and launchers send, and training scripts turn into exceptions."""

Handler = Callable[[int, FrameType | None], object]


class Interrupts:
    """A context manager in which handlers of signals that are written in Python can be held back.

    It does nothing outside of the main thread, where Python runs no handler.
    """

    def __init__(self) -> None:
        self._depth = 0
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
        """Hold handlers back until the end of the body."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    def hold(self) -> None:
        """Hold handlers back until `release`."""
        self._depth += 1

    def release(self) -> None:
        """Run the handlers that were held back, if no other hold is active; they may raise."""
        self._depth -= 1
        while self._waiting and not self._depth:
            number = self._waiting.pop(0)
            self._handlers[number](number, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._depth:
            self._waiting.append(number)
        else:
            self._handlers[number](number, frame)
