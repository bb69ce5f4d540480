"""Ctrl-C at a moment of our choice."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts(list[int]):
    """The signals that wait."""

    held = False
    """While it is set, every further Ctrl-C waits too. Set it by a plain assignment in a `finally`: a function that did so
    could be interrupted as it is called."""

    def pass_on(self) -> None:
        """Let those that have waited act now."""
        while self:
            signal.raise_signal(self.pop())


@contextmanager
def deferred_interrupt(first_waits: bool = True) -> Iterator[Interrupts]:
    """Let Ctrl-C wait for the end of the block: the list then holds the signal. A second Ctrl-C acts at once.

    Args:
        first_waits: False: the first acts at once too, unless `Interrupts.held` is set.
    """
    previous = signal.getsignal(signal.SIGINT)
    waiting = Interrupts()
    # Only the main thread gets signals; a handler set by other means than Python's is left alone.
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield waiting
        return

    def wait(number: int, frame: FrameType | None) -> None:
        if waiting.held or (first_waits and not waiting):
            waiting.append(number)
        else:
            previous(number, frame)

    signal.signal(signal.SIGINT, wait)
    try:
        yield waiting
    finally:
        signal.signal(signal.SIGINT, previous)
