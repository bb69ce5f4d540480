"""The planner process itself: takes functions, runs them one by one, can be stopped in between. It knows nothing of torch."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import io
import itertools
import os
import pickle
import queue
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import connection as connections
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeVar

from vramlab.virtual.travel import load_call, pack_error, pack_result

F = TypeVar("F", bound=FunctionType)
RETRY = 0.001  # s: when a stop is tried again that came at a moment when it may not be raised
COLLECT_EVERY = 20  # calls: models hold cycles, which the process would keep until Python's own collector comes by


def serve(handle: int, preload: list[str]) -> None:
    """Serve the parent until it has gone: what ``BOOT`` runs in the new process.

    Args:
        handle: file descriptor (on Windows: handle) of the connection to the parent.
        preload: modules to import before the first request.
    """
    del sys.argv[1:]
    faulthandler.enable(sys.__stderr__ or 2)  # after a crash the last lines show the Python stack
    if sys.platform == "win32":
        connection: Any = connections.PipeConnection(handle)
    else:
        os.set_inheritable(handle, False)
        connection = connections.Connection(handle)
    _Server(connection).run(preload)


class _Server:
    """Takes requests from the parent, runs them one by one in the main thread, and can be stopped in between."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._requests: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._number = 0  # of the request at work
        self._stopped = 0  # the number of the last request that shall stop
        self._running = False  # whether an interrupt may be raised in the main thread...
        self._shielded = self._postponed = False  # ...but not in the middle of a message
        self._stream: Iterator[Any] | None = None
        self._sources = _Sources()

    def run(self, preload: list[str]) -> None:
        signal.signal(signal.SIGINT, self._on_interrupt)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._listen, daemon=True).start()
        for module in preload:
            importlib.import_module(module)
        gc.collect()
        gc.freeze()  # what stays anyway need not be searched at each collection
        self._sources.note()
        streams = _Stream(self._send, "stdout", 1), _Stream(self._send, "stderr", 2)
        sys.stdout, sys.stderr = streams
        self._send("ready")
        for served in itertools.count(1):
            request = self._requests.get()
            answer = self._serve(*request)
            for stream in streams:
                stream.flush()
            self._send(request[0], *answer)
            del request, answer  # they hold what the function got and gave
            if served % COLLECT_EVERY == 0:
                gc.collect()

    def _forget(self) -> None:
        """In a forked process: the connection is its parent's; prints go through the pipes."""
        self._connection.close()
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        signal.signal(signal.SIGINT, signal.default_int_handler)

    # Messages

    def _send(self, *message: Any) -> None:
        data = pickle.dumps(message)
        main = threading.current_thread() is threading.main_thread()
        if main:
            self._shielded = True
        try:
            with self._sending:
                self._connection.send_bytes(data)
        except OSError:
            os._exit(0)  # the parent has gone
        finally:
            if main:
                self._shielded = False
        if main and self._postponed:
            self._interrupt()

    def _listen(self) -> None:
        """Read what the parent sends, also while a request runs; without a parent there is nothing left to do."""
        try:
            while True:
                message = pickle.loads(self._connection.recv_bytes())
                if message[1] == "stop":
                    self._stopped = message[0]
                    _signal_main_thread()
                else:
                    self._requests.put(message)
        except (EOFError, OSError):
            os._exit(0)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        """Python calls this in the main thread, between any two of its instructions."""
        if self._shielded:
            self._postponed = True
        elif _uninterruptible(frame):
            threading.Timer(RETRY, _signal_main_thread).start()
        else:
            self._interrupt()

    def _interrupt(self) -> None:
        self._postponed = False
        if self._running and self._stopped == self._number:
            self._running = False  # once per request: the handling of it is left alone
            raise KeyboardInterrupt

    # Requests

    def _serve(self, number: int, kind: str, *content: Any) -> tuple[str, bytes]:
        """The answer to a request; an interrupt is caught wherever it strikes."""
        try:
            try:
                self._number, self._running = number, True
                if self._stopped == number:
                    raise KeyboardInterrupt
                answer = getattr(self, f"_{kind}")(*content)
            except BaseException as error:
                answer = "error", pack_error(error)
            self._sources.note()
            self._running = False
        except BaseException as error:
            answer = "error", pack_error(error)
        return answer

    def _run(self, surroundings: tuple[list[str], str | None], payload: bytes) -> tuple[str, bytes]:
        self._close_stream()
        if self._sources.changed():
            return "stale", pickle.dumps(None)
        function, args, kwargs = load_call(surroundings, payload)
        return "value", pack_result(function, function(*args, **kwargs))

    def _open(self, surroundings: tuple[list[str], str | None], payload: bytes) -> tuple[str, bytes]:
        self._close_stream()
        if self._sources.changed():
            return "stale", pickle.dumps(None)
        function, args, kwargs = load_call(surroundings, payload)
        self._stream = iter(function(*args, **kwargs))
        return "value", pickle.dumps(None)

    def _next(self) -> tuple[str, bytes]:
        assert self._stream is not None
        try:
            return "value", pack_result(self._stream, next(self._stream))
        except StopIteration as end:
            stream, self._stream = self._stream, None
            return "end", pack_result(stream, end.value)

    def _close(self) -> tuple[str, bytes]:
        close = getattr(self._stream, "close", None)
        self._stream = None
        if close is not None:
            close()
        return "end", pickle.dumps(None)

    def _close_stream(self) -> None:
        """Close a stream whose reader has left it; an error in that is nobody's but shall be seen."""
        try:
            self._close()
        except Exception:
            traceback.print_exc()


_uninterrupted: set[CodeType] = set()


def uninterrupted(function: F) -> F:
    """Decorate a function that a stop must not interrupt: it is raised soon after the function has returned.

    For what C++ calls where it may not throw, as it does a device guard: an exception there aborts the process.
    """
    _uninterrupted.add(function.__code__)
    return function


def _uninterruptible(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code in _uninterrupted:
            return True
        frame = frame.f_back
    return False


def _signal_main_thread() -> None:
    """Have the handler of SIGINT called in the main thread, where the system can do it also out of a sleep."""
    if sys.platform == "win32":
        import _thread

        _thread.interrupt_main()
    else:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


class _Stream(io.TextIOBase):
    """``sys.stdout`` or ``sys.stderr`` of the process: lines travel as messages, so before the answer they belong to."""

    encoding, errors = "utf-8", "backslashreplace"

    def __init__(self, send: Callable[..., None], name: str, descriptor: int) -> None:
        self._send, self._channel, self._descriptor = send, name, descriptor
        self._pending: list[str] = []

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, text: str) -> int:
        self._pending.append(text)
        if "\n" in text or "\r" in text:  # a progress bar's line ends with a return
            self.flush()
        return len(text)

    def flush(self) -> None:
        if self._pending:
            pending, self._pending = self._pending, []
            self._send("print", self._channel, "".join(pending))


class _Sources:
    """The files of the user's own modules that the process has loaded, and whether they have changed since."""

    def __init__(self) -> None:
        folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
        self._python = tuple(os.path.join(folder, "") for folder in folders | set(map(os.path.realpath, folders)))
        self._seen: set[str] = set()
        self._files: dict[str, tuple[int, int]] = {}

    def note(self) -> None:
        """Remember the state of the files of modules that are new."""
        for name in [name for name in list(sys.modules) if name not in self._seen]:
            self._seen.add(name)
            # Its dictionary, as a module may answer a question for an attribute by importing others.
            file = getattr(sys.modules.get(name), "__dict__", {}).get("__file__")
            if isinstance(file, str) and not self._installed(file) and (state := _state(file)):
                self._files[file] = state

    def _installed(self, file: str) -> bool:
        return file.startswith(self._python) or bool({"site-packages", "dist-packages"} & set(Path(file).parts))

    def changed(self) -> list[str]:
        """Files that are no longer what was loaded; one that is gone has nothing newer to offer."""
        return [file for file, state in self._files.items() if _state(file) not in (state, None)]


def _state(file: str) -> tuple[int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
