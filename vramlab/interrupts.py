"""Ctrl-C at a moment of our choice."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt() -> Iterator[list[int]]:
    """Let Ctrl-C wait for the end of the block: the list then holds the signal. A second Ctrl-C acts at once."""
    previous = signal.getsignal(signal.SIGINT)
    waiting: list[int] = []
    # Only the main thread gets signals; a handler set by other means than Python's is left alone.
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield waiting
        return

    def wait(number: int, frame: FrameType | None) -> None:
        if waiting:
            previous(number, frame)
        waiting.append(number)

    signal.signal(signal.SIGINT, wait)
    try:
        yield waiting
    finally:
        signal.signal(signal.SIGINT, previous)
