"""What the planner process has traced, kept to be used again, and the files that it depends on. It knows nothing of torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

KEPT = 32  # results: those of GPT-2 XL have about a megabyte each

State = tuple[int, int, int] | None
"""Of a file: when it was changed, its size and its number; None where there is none."""


@dataclass(frozen=True, eq=False)
class _Entry:
    key: Hashable
    files: Mapping[str, State]
    asked: Mapping[str, Any]
    result: Any


class Memo:
    """Results by what they were made of, the last few.

    One is used again only while nothing has changed that it depends on: its ``key``, the attributes of a subject that were
    asked for, and the files and folders that Python has read to make it. What comes from elsewhere, from a network or by chance,
    stays what it was at first.

    Args:
        kept: how many results at the most.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._entries: list[_Entry] = []  # the last used one stands last

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable, subject: Any, compute: Callable[[dict[str, Any]], Any]) -> Any:
        """The result for a key and a subject: one that is known, or a new one.

        Args:
            compute: makes it, and notes in the dictionary that it gets which attributes of the subject were asked for, see `watching`.
        """
        self._entries = [entry for entry in self._entries if entry.key != key or _unchanged(entry.files)]
        for entry in self._entries:
            if entry.key == key and all(getattr(subject, name) == value for name, value in entry.asked.items()):
                self._entries.remove(entry)
                break
        else:
            asked: dict[str, Any] = {}
            with files_read() as files:
                result = compute(asked)
            entry = _Entry(key, files, asked, result)
            if not _unchanged(files):  # it changes what it reads
                return result
        self._entries = [*self._entries[max(len(self._entries) - self._kept + 1, 0) :], entry]
        return entry.result


# What was read


_reading: dict[str, State] | None = None
_installed = False


@contextmanager
def files_read() -> Iterator[dict[str, State]]:
    """Collect the files and folders that Python reads inside, and how they were when it first did."""
    global _reading, _installed
    if not _installed:  # once: a hook stays as long as the process
        sys.addaudithook(_audit)
        _installed = True
    before, _reading = _reading, {}
    try:
        yield _reading
    finally:
        _reading = before


def _audit(event: str, args: tuple[Any, ...]) -> None:
    """Python calls this for all that it does with the system; what is raised here would be raised there."""
    if _reading is None or event not in ("open", "os.listdir", "os.scandir"):
        return
    path = args[0]
    if isinstance(path, (str, bytes)) and not (event == "open" and _writes(*args[1:3])):
        name = os.path.abspath(os.fsdecode(path))
        if name not in _reading and not name.endswith(".pyc") and not name.startswith(("/proc/", "/sys/", "/dev/")):
            _reading[name] = _state(name)


def _writes(mode: Any, flags: Any) -> bool:
    """Python's ``open`` names a mode, ``os.open`` flags alone."""
    if isinstance(mode, str):
        return not set(mode).isdisjoint("wax")
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_CREAT | os.O_TRUNC))


def _state(path: str) -> State:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _unchanged(files: Mapping[str, State]) -> bool:
    return all(_state(path) == state for path, state in files.items())


@contextmanager
def watching(owner: Any, name: str, asked: dict[str, Any]) -> Iterator[None]:
    """Note which attributes of ``owner.name``, a dataclass, are read inside, and what they are."""
    subject = getattr(owner, name)
    fields = frozenset(vars(subject))

    def read(self: Any, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name in fields:
            asked[name] = value
        return value

    copy: Any = object.__new__(type(type(subject).__name__, (type(subject),), {"__getattribute__": read}))
    object.__getattribute__(copy, "__dict__").update(vars(subject))
    setattr(owner, name, copy)
    try:
        yield
    finally:
        setattr(owner, name, subject)
