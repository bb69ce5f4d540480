"""What travels between a process and others that work for it: functions, results and exceptions, as bytes; and how those end."""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import linecache
import os
import pickle
import signal
import sys
import traceback
from collections import ChainMap
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, ClassVar

import cloudpickle  # type: ignore[import-untyped]


class RemoteTraceback(Exception):  # noqa: N818  # not an error of its own: the text shown above the error that came back
    """Shows, as the cause of an exception that came back, where in the planner process it was raised."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", None) or repr(function))


def surroundings() -> tuple[list[str], str | None]:
    """Where the caller's code looks for modules and files now."""
    try:
        folder: str | None = os.getcwd()
    except FileNotFoundError:  # it was deleted
        folder = None
    return [entry for entry in sys.path if isinstance(entry, str)], folder


class _Pickler(cloudpickle.CloudPickler):
    """cloudpickle, with the file names of code kept: it drops them, and tracebacks and plans name lines."""

    def _keep_file(code: CodeType) -> tuple[Any, ...]:  # noqa: N805  # called with the code alone, as pickle's tables are
        file = code.co_filename
        # A notebook's cells are in no file that the other process could read.
        lines = [] if os.path.exists(file) else linecache.getlines(file)
        return _code_of_file, (*cloudpickle.CloudPickler.dispatch_table[CodeType](code), file, lines)

    dispatch_table: ClassVar[Any] = ChainMap({CodeType: _keep_file}, cloudpickle.CloudPickler.dispatch_table)


def _code_of_file(make: Callable[..., CodeType], parts: tuple[Any, ...], file: str, lines: list[str]) -> CodeType:
    if lines and file not in linecache.cache:
        linecache.cache[file] = (sum(map(len, lines)), None, lines, file)
    return make(*parts).replace(co_filename=file)


def pickled(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def pack_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        return pickled((function, args, kwargs))
    except Exception as error:
        raise TypeError(
            f"{name_of(function)} and its arguments travel to the planner process, and one of them cannot be pickled: {error}. "
            "Make what cannot travel (an open file, a lock, a generator) inside the function."
        ) from error


def unpack(payload: bytes, name: str) -> Any:
    try:
        return pickle.loads(payload)
    except Exception as error:
        raise TypeError(
            f"The result of {name} came back from the planner process and cannot be unpickled here: {error}. "
            "Return numbers, text, arrays, or objects of modules that can be imported here."
        ) from error


def cause_of_death(code: int, by_itself: tuple[str, str], *, memory: str, again: str) -> tuple[str, str]:
    """What a process's exit code says, and what to do about it.

    Args:
        by_itself: what more there is to say of a process that ended itself, and the remedy.
        memory, again: what to do when memory ran out, and when another program has ended it.
    """
    if code >= 0:
        return f"ended with exit code {code}{by_itself[0]}", by_itself[1]
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if name == "SIGKILL":
        remedy = f"Linux ends processes so when memory runs out: {memory}."
    elif name in ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"):
        remedy = "An error inside compiled code does that: the lines below show where it was called."
    else:
        remedy = f"Another program has ended it: {again}."
    return f"was ended by {name}", remedy


def revive(payload: bytes) -> BaseException:
    """The exception that was raised in the process, with its causes; the last cause shows the traceback."""
    text, links = pickle.loads(payload)
    errors = [_revive_one(*link) for link in links]
    for error, cause in itertools.pairwise(errors):
        error.__cause__ = cause
    errors[-1].__cause__ = RemoteTraceback(text)
    return errors[0]


def _revive_one(name: str, text: str, notes: list[str], candidates: list[bytes]) -> BaseException:
    """The first candidate that unpickles to the same text; else a RuntimeError that gives it."""
    for candidate in candidates:
        with contextlib.suppress(Exception):
            error = pickle.loads(candidate)
            if isinstance(error, BaseException) and str(error) == text:
                return error
    error = RuntimeError(f"{name}: {text}")
    for note in notes:
        error.add_note(note)
    return error


def load_call(surroundings: tuple[list[str], str | None], payload: bytes) -> Any:
    """Function, positional and keyword arguments of a request, loaded where the caller is now."""
    sys.path[:], folder = surroundings
    if folder is not None:
        with contextlib.suppress(OSError):
            os.chdir(folder)
    importlib.invalidate_caches()  # a module may have been written since
    try:
        return pickle.loads(payload)
    except (ImportError, AttributeError) as error:
        error.add_note(
            "The planner process could not load the function. It imports what is defined in a module: put the module in a folder "
            "of sys.path, define the function in the notebook or script, or see cloudpickle.register_pickle_by_value()."
        )
        raise


def pack_result(source: Any, result: Any) -> bytes:
    try:
        return pickled(result)
    except Exception as error:
        kind = f"{type(result).__module__}.{type(result).__qualname__}"
        raise TypeError(
            f"{name_of(source)} gave a {kind}, which cannot be pickled to leave the planner process: {error}. Return numbers, text, arrays."
        ) from error


_OURS = (__file__, os.path.join(os.path.dirname(__file__), "worker.py"))


def pack_error(error: BaseException) -> bytes:
    """An exception and its causes, each in several forms, and the text of the traceback from the function on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in _OURS:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    links: list[tuple[Any, ...]] = []
    link: BaseException | None = error
    while link is not None and len(links) < 20:  # causes can be circular
        name = f"{type(link).__module__}.{type(link).__qualname__}"
        links.append((name, _text(link), list(map(str, getattr(link, "__notes__", []))), list(_forms(link))))
        link = link.__cause__
    return pickle.dumps((text, links))


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failure:
        return f"(its text cannot be made: {failure!r})"


def _forms(error: BaseException) -> Iterator[bytes]:
    """Pickles of an exception: as it is, and put together without its ``__init__`` from what can be pickled.

    The second is for exceptions that hold what cannot travel, and for those whose ``__init__`` takes other arguments
    than they keep in ``args``: pickle calls it with these.
    """
    with contextlib.suppress(Exception):
        yield pickled(error)
    with contextlib.suppress(Exception):
        args = tuple(argument if _travels(argument) else _Shown(repr(argument)) for argument in error.args)
        state = {name: value for name, value in vars(error).items() if _travels(value)}
        yield pickled(_Bare(type(error), args, state))


class _Bare:
    """Pickles to an exception of this type, arguments and attributes; its ``__init__`` is not called."""

    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        return _bare_error, self._parts


class _Shown(str):
    """Stands for an object that cannot travel, and is shown as that was: without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _bare_error(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def _travels(value: Any) -> bool:
    try:
        pickle.loads(pickled(value))
    except Exception:
        return False
    return True
