"""The planner process: one warm Python process for everything that runs on a virtual GPU.

Registering the virtual GPU changes a process for good, so the caller's process never does it. ``Planner`` is a general
runner: it sends a function and its arguments by cloudpickle, and brings back the result, what was printed, or the
exception. It knows nothing of torch. `vramlab.virtual.worker` is what runs in the other process.
"""

from __future__ import annotations

import atexit
import codecs
import contextlib
import itertools
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import CancelledError, Future
from typing import IO, Any, TypeVar

from vramlab.virtual.travel import cause_of_death, name_of, pack_call, revive, surroundings, unpack

T = TypeVar("T")
TICK = 0.05  # s: how often a waiting thread looks whether it was cancelled
GRACE = 2.0  # s: what a stopped function gets to end by itself; a killed process costs a new start of several seconds
PATIENCE = 10.0  # s: after that a stream nobody reads from gives way to others that wait
CRASH = "Fatal Python error"  # how faulthandler's report begins
SHOWN_LINES = 25  # of what a dead process wrote last
# -P keeps a user's json.py from being taken for Python's own; then sys.path becomes the parent's. Not -m: then
# this module would be there twice, once as __main__.
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from vramlab.virtual.worker import serve; serve(int(sys.argv[2]), sys.argv[3:])"
)


class PlannerError(RuntimeError):
    """The planner process died, was ended, or did not answer in time. The next call starts a new one."""


# The caller's side


_thread = threading.local()


class Scope:
    """What a thread asks of planners inside ``with scope:`` ends when another thread calls `cancel`: CancelledError is raised there."""

    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        """End the request that is going on, and all that follow in the scope. Returns at once."""
        self.cancelled = True

    def __enter__(self) -> Scope:
        self._around = getattr(_thread, "scope", None)
        _thread.scope = self
        return self

    def __exit__(self, *error: object) -> None:
        _thread.scope = self._around


class _Ticket:
    """A place in the queue for the process. ``stop`` holds the exception that the owner shall end with."""

    def __init__(self, thread: int | None) -> None:
        self.thread = thread  # that is blocked while it waits; None for a request in the background
        self.scope: Scope | None = getattr(_thread, "scope", None) if thread is not None else None
        self.stop: BaseException | None = None
        self.idle_since: float | None = None  # set while a stream waits for its reader

    def check(self) -> None:
        if self.stop is not None:
            raise self.stop
        if self.scope is not None and self.scope.cancelled:
            raise CancelledError

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
        what, remedy = cause_of_death(
            self.process.returncode,
            ("", "Something in it ends the process, or it could not start: the lines below may say what."),
            memory="close other programs, or build less in memory",
            again="call again",
        )
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


def _telling_lines(lines: list[str]) -> list[str]:
    """Of a process's last lines those worth showing: around Python's own report of the crash, without our own frames."""
    own = (
        f'"{os.path.dirname(__file__)}',
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
        name, payload = name_of(function), pack_call(function, args, kwargs)
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
        name, payload = name_of(function), pack_call(function, args, kwargs)
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
        name, payload = name_of(function), pack_call(function, args, kwargs)
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
            answer, value = self._ask(child, ticket, name, kind, surroundings(), payload, timeout=timeout)
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
            raise revive(payload)
        return kind, unpack(payload, name)

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


_planners: weakref.WeakSet[Planner] = weakref.WeakSet()
_shared: Planner | None = None
_shared_lock = threading.Lock()


def shared() -> Planner:
    """The one planner of this process. It is closed when Python ends."""
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = Planner(preload=("torch", "vramlab.virtual.device"))
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
