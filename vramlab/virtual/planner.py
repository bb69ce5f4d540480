"""The planner process: one warm Python process for everything that runs on a virtual GPU.

Registering the virtual GPU changes a process for good, so the caller's process never does it. ``Planner`` is a general
runner: it sends a function and its arguments by cloudpickle, and brings back the result, what was printed, or the
exception. It knows nothing of torch. The second half of this file, from ``serve`` on, is what runs in the other process.
"""

from __future__ import annotations

import atexit
import codecs
import contextlib
import faulthandler
import gc
import importlib
import io
import itertools
import json
import linecache
import multiprocessing
import os
import pickle
import queue
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
import weakref
from collections import ChainMap
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from multiprocessing import connection as connections
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import IO, Any, ClassVar, TypeVar

import cloudpickle  # type: ignore[import-untyped]

T = TypeVar("T")
F = TypeVar("F", bound=FunctionType)

TICK = 0.05  # s: how often a waiting thread looks whether it was cancelled
RETRY = 0.001  # s: when a stop is tried again that came at a moment when it may not be raised
GRACE = 2.0  # s: what a stopped function gets to end by itself; a killed process costs a new start of several seconds
PATIENCE = 10.0  # s: after that a stream nobody reads from gives way to others that wait
COLLECT_EVERY = 20  # calls: models hold cycles, which the process would keep until Python's own collector comes by
CRASH = "Fatal Python error"  # how faulthandler's report begins
SHOWN_LINES = 25  # of what a dead process wrote last

# -P keeps a user's json.py from being taken for Python's own; then sys.path becomes the parent's. Not -m: then
# this module would be there twice, once as __main__.
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from vramlab.virtual.planner import serve; serve(int(sys.argv[2]), sys.argv[3:])"
)


class PlannerError(RuntimeError):
    """The planner process died, was ended, or did not answer in time. The next call starts a new one."""


class RemoteTraceback(Exception):  # noqa: N818  # not an error of its own: the text shown above the error that came back
    """Shows, as the cause of an exception that came back, where in the planner process it was raised."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


# The caller's side


class _Ticket:
    """A place in the queue for the process. ``stop`` holds the exception that the owner shall end with."""

    def __init__(self, thread: int | None) -> None:
        self.thread = thread  # that is blocked while it waits; None for a request in the background
        self.stop: BaseException | None = None
        self.idle_since: float | None = None  # set while a stream waits for its reader

    def check(self) -> None:
        if self.stop is not None:
            raise self.stop

    def abandoned(self, waiting: Iterable[_Ticket]) -> bool:
        """Whether a stream gives way: its reader is not reading, and waits itself for something else or has left it."""
        if self.idle_since is None:
            return False
        return time.monotonic() - self.idle_since > PATIENCE or any(ticket.thread == self.thread for ticket in waiting)


class Request(Future[Any]):
    """A ``Future`` that can be cancelled at any time: one that waits is dropped, one that runs is stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.ticket = _Ticket(thread=None)

    def cancel(self) -> bool:
        """Cancel; True unless the result is there already. Returns at once: the process is stopped in the background."""
        cancelled = super().cancel()
        if cancelled:
            self.ticket.stop = CancelledError()
        return cancelled


class _Child:
    """The process as seen by its parent: messages to and from it, what it wrote, and how it died."""

    def __init__(self, preload: Iterable[str]) -> None:
        ours, theirs = multiprocessing.Pipe()
        self.connection: Any = ours  # its class has another name on Windows
        self.ready = False
        self.intact = True  # False while a message is under way: cut off there, the connection is of no more use
        self._tail = ""
        path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
        command = [sys.executable, "-P", "-c", BOOT, path, str(theirs.fileno()), *preload]
        with theirs:
            self.process = subprocess.Popen(command, **_popen_options(theirs.fileno()))
        self._readers = [
            threading.Thread(target=self._forward, args=(pipe, name), daemon=True, name=f"planner {name}")
            for name, pipe in (("stdout", self.process.stdout), ("stderr", self.process.stderr))
        ]
        for reader in self._readers:
            reader.start()

    def _forward(self, pipe: IO[bytes], name: str) -> None:
        """Pass on what was written past Python: by C++, by faulthandler, by programs the user's code started."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        with pipe:
            while data := pipe.read(65536):
                text = decoder.decode(data)
                self._tail = (self._tail + text)[-20_000:]
                if CRASH not in self._tail:  # that is for the error's text
                    _write(name, text)

    def send(self, *message: Any) -> None:
        data = pickle.dumps(message)
        self.intact = False
        self.connection.send_bytes(data)
        self.intact = True

    def receive(self, seconds: float) -> tuple[Any, ...] | None:
        """The next message, or None when there is none in this time.

        Raises:
            EOFError, OSError: the process has ended.
        """
        if not self.connection.poll(seconds):
            # A process that it forked can keep the connection open, so its end alone is not enough.
            if self.process.poll() is not None and not self.connection.poll(0):
                raise EOFError
            return None
        self.intact = False
        data = self.connection.recv_bytes()
        self.intact = True
        message: tuple[Any, ...] = pickle.loads(data)
        return message

    @property
    def dead(self) -> bool:
        return not self.intact or self.process.poll() is not None

    def end(self) -> None:
        """End the process and those it has started, and wait for it."""
        if self.process.poll() is None:
            if sys.platform != "win32":
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
        self.process.wait()
        for reader in self._readers:
            if reader is not threading.current_thread():
                reader.join(0.5)

    def forget(self) -> None:
        """In a forked copy of the parent: the process is the parent's alone."""
        self.connection.close()
        self.process.returncode = 0  # so that Popen neither waits for another's child nor warns

    def obituary(self, doing: str) -> str:
        """Why the process is gone: what happened, the last lines it wrote, what to do."""
        try:
            self.process.wait(5)  # the connection closes a moment before the process is gone
        except subprocess.TimeoutExpired:
            self.end()
        for reader in self._readers:
            reader.join(0.5)
        what, remedy = _cause_of_death(self.process.returncode)
        lines = _telling_lines(self._tail.splitlines())
        said = "".join(f"\n    {line}" for line in lines) if lines else " nothing."
        return f"The planner process {what} {doing}. {remedy} The next call starts a new process. Its last lines:{said}"


def _popen_options(handle: int) -> dict[str, Any]:
    """Options of Popen: one handle is inherited, stdin is not, and signals of the terminal do not reach the process."""
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # there is no data to work on
    options: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "bufsize": 0,  # raw pipes: a buffered reader's lock, held at the time of a fork, would never be released there
        "env": {**os.environ, **threads, "CUDA_VISIBLE_DEVICES": ""},
    }
    if sys.platform == "win32":
        os.set_handle_inheritable(handle, True)
        options["startupinfo"] = subprocess.STARTUPINFO(lpAttributeList={"handle_list": [handle]})
        options["creationflags"] = subprocess.CREATE_NEW_PROCESS_GROUP
    else:
        options["pass_fds"] = [handle]
        options["start_new_session"] = True
    return options


def _cause_of_death(code: int) -> tuple[str, str]:
    """What an exit code says, and what to do about it."""
    if code >= 0:
        return f"ended with exit code {code}", "Something in it ends the process, or it could not start: the lines below may say what."
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if name == "SIGKILL":
        remedy = "Linux ends processes so when memory runs out: close other programs, or build less in memory."
    elif name in ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"):
        remedy = "An error inside compiled code does that: the lines below show where it was called."
    else:
        remedy = "Another program has ended it: call again."
    return f"was ended by {name}", remedy


def _telling_lines(lines: list[str]) -> list[str]:
    """Of a process's last lines those worth showing: around Python's own report of the crash, without our own frames."""
    own = (
        f'"{__file__}"',
        f'"{threading.__file__}"',
        f'"{os.path.dirname(multiprocessing.__file__)}',
        '"<string>"',
        "Extension modules:",
        "<no Python frame>",
    )
    lines = [line[:200] for line in lines if line.strip() and not any(mark in line for mark in own)]
    head = "(most recent call first):"
    pairs = itertools.pairwise([*lines, head])
    lines = [line for line, after in pairs if not (line.endswith(head) and after.endswith(head))]  # a thread without a frame
    start = next((i for i, line in enumerate(lines) if line.startswith(CRASH)), None)
    return lines[-SHOWN_LINES:] if start is None else lines[max(start - 3, 0) : start + SHOWN_LINES]


def _write(name: str, text: str) -> None:
    """Write to ``sys.stdout`` or ``sys.stderr`` as it is now; a closed one swallows it."""
    stream = getattr(sys, name)
    if stream is not None:
        with contextlib.suppress(ValueError, OSError):
            stream.write(text)
            stream.flush()


class Planner:
    """Runs functions in one separate Python process, which starts with the first call and stays warm.

    Functions, classes and arguments travel by cloudpickle: those defined in a notebook or script by value, others by
    the name of their module. The process has the caller's ``sys.path`` and working directory, no card, one thread. It is
    started anew when a module of the user's that it has loaded has changed on disk. What is printed there appears here.
    Safe to use from several threads; one request runs at a time, in the order in which they came.

    Args:
        preload: modules that the process imports while it starts.
        grace: seconds that a stopped function gets to end before the process is killed.
    """

    def __init__(self, preload: Iterable[str] = ("torch",), grace: float = GRACE) -> None:
        self._preload, self._grace = tuple(preload), grace
        self._numbers = itertools.count(1)
        self._forget()
        _planners.add(self)

    def _forget(self) -> None:
        """The state of a planner that has not been used yet; in a forked process, without touching the parent's child."""
        child: _Child | None = getattr(self, "_child", None)
        if child is not None:
            child.forget()
        self._child: _Child | None = None
        self._changed = threading.Condition()
        self._queue: list[_Ticket] = []  # the first has the process

    def call(self, function: Callable[..., T], *args: Any, timeout: float | None = None, **kwargs: Any) -> T:
        """``function(*args, **kwargs)``, computed in the planner process.

        Args:
            timeout: seconds the function may take, without waiting for its turn or for the process to start.

        Raises:
            PlannerError: the process died or the time is over; the message says which and what to do.
            TypeError: the function, an argument or the result cannot be pickled.
            KeyboardInterrupt: stops the function; the planner stays usable.
            Exception: what the function raised, with its attributes, notes and cause; its traceback is the last cause.
        """
        name, payload = _name(function), _pack(function, args, kwargs)
        result: T = self._run(_Ticket(threading.get_ident()), name, payload, timeout)
        return result

    def submit(self, function: Callable[..., Any], *args: Any, replaces: Future[Any] | None = None, **kwargs: Any) -> Request:
        """Like ``call``, in the background.

        Args:
            replaces: an earlier request whose answer is no longer wanted. It is cancelled: dropped when it waits,
                stopped when it runs. So ``self.request = planner.submit(f, x, replaces=self.request)`` is "newest wins".

        Returns:
            a future with the result or the exception; its arguments are taken as they are now.
        """
        name, payload = _name(function), _pack(function, args, kwargs)
        if replaces is not None:
            replaces.cancel()
        request = Request()
        self._enqueue(request.ticket)
        threading.Thread(target=self._fulfil, args=(request, name, payload), daemon=True, name=f"planner: {name}").start()
        return request

    def stream(self, function: Callable[..., Iterable[T]], *args: Any, **kwargs: Any) -> Generator[T, None, Any]:
        """Yield what ``function(*args, **kwargs)`` yields, step by step, in the planner process; return what it returns.

        The function runs on only when the next value is asked for. Closing this generator closes that one
        (GeneratorExit); the process stays warm. While it is open it has the process to itself: others wait, unless its
        own thread makes another request or nothing is asked of it for 10 s. Then it is closed.

        Raises:
            PlannerError, TypeError, KeyboardInterrupt, Exception: as ``call``; also PlannerError when it had to give way.
        """
        name, payload = _name(function), _pack(function, args, kwargs)
        ticket = _Ticket(threading.get_ident())
        try:
            self._await_turn(ticket)
            child = self._begin(ticket, name, "open", payload, None)[0]
            while True:
                kind, value = self._ask(child, ticket, name, "next")
                if kind == "end":
                    return value
                ticket.idle_since = time.monotonic()
                try:
                    yield value
                except BaseException:
                    if self._resume(ticket):
                        with contextlib.suppress(PlannerError):
                            self._ask(child, ticket, name, "close", timeout=self._grace)
                    raise
                if not self._resume(ticket):
                    raise PlannerError(
                        f"The stream of {name} was closed: another request needed the planner process while nothing was read "
                        "from it. Read it to its end, or close() it, before the next request."
                    )
        finally:
            self._release(ticket)

    def warm(self) -> None:
        """Start the process now, without waiting for it, so that the first call need not."""
        self._started()

    def close(self) -> None:
        """End the process. Requests that wait or run end with PlannerError; a later call starts a new process."""
        with self._changed:
            child, self._child = self._child, None
            for ticket in self._queue:
                ticket.stop = ticket.stop or PlannerError("The planner was closed before the answer was there. Call again.")
        if child is not None:
            child.end()

    # Taking turns

    def _enqueue(self, ticket: _Ticket) -> None:
        with self._changed:
            if ticket not in self._queue:
                self._queue.append(ticket)

    def _await_turn(self, ticket: _Ticket) -> None:
        self._enqueue(ticket)
        with self._changed:
            while self._queue[0] is not ticket:
                ticket.check()
                if self._queue[0].abandoned(self._queue[1:]):
                    del self._queue[0]
                    self._changed.notify_all()
                else:
                    self._changed.wait(TICK)

    def _resume(self, ticket: _Ticket) -> bool:
        """A stream is read again; False when it has lost the process."""
        with self._changed:
            ticket.idle_since = None
            ticket.thread = threading.get_ident()
            return ticket in self._queue

    def _release(self, ticket: _Ticket) -> None:
        with self._changed:
            if ticket in self._queue:
                self._queue.remove(ticket)
            self._changed.notify_all()

    # Talking to the process

    def _run(self, ticket: _Ticket, name: str, payload: bytes, timeout: float | None) -> Any:
        try:
            self._await_turn(ticket)
            return self._begin(ticket, name, "run", payload, timeout)[1]
        finally:
            self._release(ticket)

    def _fulfil(self, request: Request, name: str, payload: bytes) -> None:
        try:
            result = self._run(request.ticket, name, payload, None)
        except BaseException as error:
            if request.set_running_or_notify_cancel():
                request.set_exception(error)
        else:
            if request.set_running_or_notify_cancel():
                request.set_result(result)

    def _begin(self, ticket: _Ticket, name: str, kind: str, payload: bytes, timeout: float | None) -> tuple[_Child, Any]:
        """Send a function; once more to a new process where this one has loaded modules that have changed since."""
        while True:
            child = self._ready_child(ticket)
            answer, value = self._ask(child, ticket, name, kind, _surroundings(), payload, timeout=timeout)
            if answer != "stale":
                return child, value
            child.end()

    def _started(self) -> _Child:
        with self._changed:
            if self._child is None or self._child.dead:
                self._child = _Child(self._preload)
            return self._child

    def _ready_child(self, ticket: _Ticket) -> _Child:
        """The process, ready for requests. Giving up here leaves it starting: nothing has been asked of it."""
        child = self._started()
        while not child.ready:
            ticket.check()
            try:
                message = child.receive(TICK)
            except (EOFError, OSError):
                ticket.check()
                raise PlannerError(child.obituary("while it started")) from None
            child.ready = message is not None and message[0] == "ready"
        return child

    def _ask(self, child: _Child, ticket: _Ticket, name: str, *message: Any, timeout: float | None = None) -> tuple[str, Any]:
        """Send a message and wait for the answer: its kind and value. However this ends, the process is at rest or gone."""
        number = next(self._numbers)
        try:
            child.send(number, *message)
            kind, payload = self._answer(child, ticket, number, name, timeout)
        except (EOFError, OSError):
            ticket.check()
            raise PlannerError(child.obituary(f"while it ran {name}")) from None
        except BaseException:
            self._settle(child, number)
            raise
        if kind == "error":
            raise _revive(payload)
        return kind, _unpack(payload, name)

    def _answer(self, child: _Child, ticket: _Ticket, number: int, name: str, timeout: float | None) -> tuple[str, bytes]:
        """Wait for the answer with this number, and print meanwhile what the function prints."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            ticket.check()
            answer = child.receive(TICK if deadline is None else min(TICK, max(deadline - time.monotonic(), 0)))
            if answer is None:
                if deadline is not None and time.monotonic() >= deadline:
                    raise PlannerError(
                        f"{name} took longer than its timeout of {timeout:g} s and was stopped. Give it more time, or less to do."
                    )
            elif answer[0] == "print":
                _write(*answer[1:])
            elif answer[0] == number:
                return answer[1], answer[2]

    def _settle(self, child: _Child, number: int) -> None:
        """Stop what the process does for a request; kill it if it does not react."""
        settled = False
        try:
            if child.intact:
                child.send(number, "stop")
                self._answer(child, _Ticket(None), number, "", self._grace)
                settled = True
        except (EOFError, OSError, PlannerError):
            pass
        finally:  # also after a second Ctrl-C
            if not settled:
                child.end()


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", None) or repr(function))


def _surroundings() -> tuple[list[str], str | None]:
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


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def _pack(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        return _pickled((function, args, kwargs))
    except Exception as error:
        raise TypeError(
            f"{_name(function)} and its arguments travel to the planner process, and one of them cannot be pickled: {error}. "
            "Make what cannot travel (an open file, a lock, a generator) inside the function."
        ) from error


def _unpack(payload: bytes, name: str) -> Any:
    try:
        return pickle.loads(payload)
    except Exception as error:
        raise TypeError(
            f"The result of {name} came back from the planner process and cannot be unpickled here: {error}. "
            "Return numbers, text, arrays, or objects of modules that can be imported here."
        ) from error


def _revive(payload: bytes) -> BaseException:
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


_planners: weakref.WeakSet[Planner] = weakref.WeakSet()
_shared: Planner | None = None
_shared_lock = threading.Lock()


def shared() -> Planner:
    """The one planner of this process. It is closed when Python ends."""
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = Planner()
        return _shared


@atexit.register
def _close_all() -> None:
    for planner in list(_planners):
        planner.close()


def _forget_all() -> None:
    global _shared_lock
    _shared_lock = threading.Lock()
    for planner in list(_planners):
        planner._forget()


if hasattr(os, "register_at_fork"):  # a DataLoader's worker must not talk to the planner of its parent
    os.register_at_fork(after_in_child=_forget_all)


# The process's side


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
                answer = "error", _pack_error(error)
            self._sources.note()
            self._running = False
        except BaseException as error:
            answer = "error", _pack_error(error)
        return answer

    def _run(self, surroundings: tuple[list[str], str | None], payload: bytes) -> tuple[str, bytes]:
        self._close_stream()
        if self._sources.changed():
            return "stale", pickle.dumps(None)
        function, args, kwargs = _load(surroundings, payload)
        return "value", _pack_result(function, function(*args, **kwargs))

    def _open(self, surroundings: tuple[list[str], str | None], payload: bytes) -> tuple[str, bytes]:
        self._close_stream()
        if self._sources.changed():
            return "stale", pickle.dumps(None)
        function, args, kwargs = _load(surroundings, payload)
        self._stream = iter(function(*args, **kwargs))
        return "value", pickle.dumps(None)

    def _next(self) -> tuple[str, bytes]:
        assert self._stream is not None
        try:
            return "value", _pack_result(self._stream, next(self._stream))
        except StopIteration as end:
            stream, self._stream = self._stream, None
            return "end", _pack_result(stream, end.value)

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


def _load(surroundings: tuple[list[str], str | None], payload: bytes) -> Any:
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


def _pack_result(source: Any, result: Any) -> bytes:
    try:
        return _pickled(result)
    except Exception as error:
        kind = f"{type(result).__module__}.{type(result).__qualname__}"
        raise TypeError(
            f"{_name(source)} gave a {kind}, which cannot be pickled to leave the planner process: {error}. Return numbers, text, arrays."
        ) from error


def _pack_error(error: BaseException) -> bytes:
    """An exception and its causes, each in several forms, and the text of the traceback from the function on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
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
        yield _pickled(error)
    with contextlib.suppress(Exception):
        args = tuple(argument if _travels(argument) else _Shown(repr(argument)) for argument in error.args)
        state = {name: value for name, value in vars(error).items() if _travels(value)}
        yield _pickled(_Bare(type(error), args, state))


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
        pickle.loads(_pickled(value))
    except Exception:
        return False
    return True
