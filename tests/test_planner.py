"""The planner process: what travels, what comes back, and how it ends. Most tests share one process that loads no torch."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import multiprocessing
import os
import pickle
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import psutil
import pytest

from vramlab.virtual import worker as module
from vramlab.virtual.planner import Planner, PlannerError, shared
from vramlab.virtual.travel import RemoteTraceback

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def planner() -> Iterator[Planner]:
    planner = Planner(preload=(), grace=1.0)
    yield planner
    planner.close()


def pid(planner: Planner) -> int:
    return planner.call(os.getpid)


def eventually(condition: Callable[[], bool], seconds: float = 10) -> bool:
    """Whether a condition becomes true in time: for what another process does."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def gone(process: int) -> bool:
    return not psutil.pid_exists(process) or psutil.Process(process).status() == psutil.STATUS_ZOMBIE


def touches(path: Path) -> Callable[[], None]:
    """A function that says by a file that it has begun, and then sleeps until it is stopped."""

    def begin_and_sleep() -> None:
        path.touch()
        time.sleep(60)

    return begin_and_sleep


def stubborn(path: Path) -> Callable[[], None]:
    """A function that cannot be stopped."""

    def begin_and_refuse() -> None:
        path.touch()
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(60)

    return begin_and_refuse


# Calls


def test_a_call_gives_what_the_function_returns_from_another_process(planner: Planner) -> None:
    offset = 10
    assert planner.call(lambda x, *, factor: x * factor + offset, 3, factor=4) == 22
    assert pid(planner) not in (os.getpid(), os.getppid())
    assert pid(planner) == pid(planner)


def test_the_process_has_the_callers_folder_and_path_one_thread_no_card_and_no_stdin(
    planner: Planner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert pid(planner)  # it runs already when folder and path change
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "modules")

    def look() -> tuple[str, list[str], str, str, str]:
        return os.getcwd(), sys.path, os.environ["OMP_NUM_THREADS"], os.environ["CUDA_VISIBLE_DEVICES"], sys.__stdin__.read()

    assert planner.call(look) == (str(tmp_path), sys.path, "1", "", "")


def test_a_folder_that_was_deleted_does_not_stop_a_call(planner: Planner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "deleted").mkdir()
    monkeypatch.chdir(tmp_path / "deleted")
    (tmp_path / "deleted").rmdir()
    assert planner.call(pow, 2, 3) == 8


def test_a_warm_call_takes_less_than_a_tenth_of_a_second(planner: Planner) -> None:
    pid(planner)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        planner.call(pow, 2, 3)
        times.append(time.perf_counter() - start)
    assert sorted(times)[10] < 0.1


def test_large_arguments_and_results_travel(planner: Planner) -> None:
    data = os.urandom(5_000_000)
    assert planner.call(lambda x: x[::-1], data) == data[::-1]


def test_what_is_dropped_in_the_process_is_collected_though_it_refers_to_itself() -> None:
    planner = Planner(preload=())

    def leave_a_cycle() -> None:
        gc.disable()
        node = types.SimpleNamespace(data=bytearray(1000))
        node.itself = node

    def nodes() -> int:
        return sum(isinstance(thing, types.SimpleNamespace) and hasattr(thing, "itself") for thing in gc.get_objects())

    planner.call(leave_a_cycle)
    assert planner.call(nodes) == 1
    for _ in range(module.COLLECT_EVERY):
        planner.call(pow, 2, 3)
    assert planner.call(nodes) == 0
    planner.close()


def test_threads_share_the_process(planner: Planner) -> None:
    results: dict[int, list[tuple[int, int]]] = {}

    def work(number: int) -> None:
        results[number] = [planner.call(lambda i: (i, os.getpid()), 1000 * number + i) for i in range(50)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    process = pid(planner)
    assert results == {number: [(1000 * number + i, process) for i in range(50)] for number in range(4)}


def test_prints_appear_here_in_order_and_before_the_answer(planner: Planner, capfd: pytest.CaptureFixture[str]) -> None:
    def talk() -> None:
        print("first", "line")
        print("to stderr", file=sys.stderr)
        print("é 漢", flush=True)
        sys.stdout.write("no newline")

    with capfd.disabled():
        pid(planner)
    assert planner.call(talk) is None
    captured = capfd.readouterr()
    assert captured.out == "first line\né 漢\nno newline"
    assert captured.err == "to stderr\n"


def test_prints_go_to_what_stdout_is_now_and_a_missing_one_swallows_them(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = io.StringIO()
    with contextlib.redirect_stdout(elsewhere):
        planner.call(print, "caught")
    assert elsewhere.getvalue() == "caught\n"
    elsewhere.close()
    for gone_stream in (None, elsewhere):
        monkeypatch.setattr(sys, "stdout", gone_stream)
        assert planner.call(print, "lost") is None


def test_what_is_written_past_python_appears_too(planner: Planner, capfd: pytest.CaptureFixture[str]) -> None:
    def write() -> None:
        os.system("echo from a program")
        os.write(2, "ünder\n".encode())

    planner.call(write)
    out = err = ""
    for _ in range(500):
        captured = capfd.readouterr()
        out, err = out + captured.out, err + captured.err
        if out and err.endswith("\n"):
            break
        time.sleep(0.01)
    assert (out, err) == ("from a program\n", "ünder\n")


def test_bytes_on_stdout_do_not_disturb_the_protocol(planner: Planner) -> None:
    def write() -> int:
        for descriptor in (1, 2):
            os.write(descriptor, os.urandom(10_000).replace(b"\n", b"") + b"\n")
        return 7

    with contextlib.redirect_stdout(None), contextlib.redirect_stderr(None):
        assert planner.call(write) == 7
        time.sleep(0.1)  # what was written is read by a thread


# What cannot travel


def test_an_argument_that_cannot_be_pickled_is_refused_with_the_remedy(planner: Planner) -> None:
    with pytest.raises(TypeError, match=r"touches and its arguments travel .* cannot be pickled: cannot pickle '_thread.lock'.*Make what"):
        planner.call(touches, threading.Lock())


@pytest.mark.parametrize("how", ["call", "stream"])
def test_a_result_that_cannot_be_pickled_is_named(planner: Planner, how: str) -> None:
    def make_lock() -> Any:
        return threading.Lock()

    def yield_lock() -> Iterator[Any]:
        yield threading.Lock()

    with pytest.raises(TypeError, match=r"(make|yield)_lock gave a _thread.lock, which cannot be pickled.*Return numbers, text, arrays"):
        planner.call(make_lock) if how == "call" else next(planner.stream(yield_lock))


def test_a_result_that_cannot_be_unpickled_here_is_named(planner: Planner) -> None:
    def only_there() -> Any:
        class Trap:
            def __reduce__(self) -> Any:
                return int, ("no number",)

        return Trap()

    with pytest.raises(TypeError, match=r"only_there came back .* cannot be unpickled here: invalid literal for int.*Return numbers"):
        planner.call(only_there)


def test_a_module_that_the_process_cannot_import_is_explained(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    made = types.ModuleType("made_by_hand")
    exec("def function(): pass", made.__dict__)
    monkeypatch.setitem(sys.modules, "made_by_hand", made)
    made.__file__ = "somewhere"
    with pytest.raises(ModuleNotFoundError, match="No module named 'made_by_hand'") as caught:
        planner.call(_by_reference(made.function))
    assert "put the module in a folder of sys.path" in caught.value.__notes__[0]


class _by_reference:  # noqa: N801
    """Calls a function that pickle names by its module, as it does in modules it can import."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __reduce__(self) -> Any:
        return _find, (self.function.__module__, self.function.__name__)

    def __call__(self) -> None: ...


def _find(name: str, attribute: str) -> Any:
    return getattr(importlib.import_module(name), attribute)


# Exceptions


class PlainError(Exception):
    pass


class CodeError(Exception):
    """Its ``__init__`` takes other arguments than it keeps in ``args``: pickle cannot make it."""

    def __init__(self, code: int, name: str) -> None:
        self.code = code
        super().__init__(f"{name} failed with {code}")


class RewordingError(Exception):
    """Pickle makes it, with another text."""

    def __init__(self, text: str) -> None:
        super().__init__(f"not good: {text}")


class HoldingError(Exception):
    """It holds what cannot travel."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock, self.size = threading.Lock(), 5


def raises(error: BaseException) -> Callable[[], None]:
    """A function that raises this, made where it runs."""
    maker = pickle.dumps(error)

    def fail() -> None:
        raise pickle.loads(maker)

    return fail


@pytest.mark.parametrize(
    "error",
    [
        ValueError("text", 3),
        KeyError("key"),
        OSError(2, "No such file", "name"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
        StopIteration(4),
        SystemExit(3),
        GeneratorExit(),
        KeyboardInterrupt("by hand"),
        PlainError(1, [2]),
        ExceptionGroup("several", [ValueError("a"), TypeError("b")]),
        MemoryError(),
        PlannerError("nested"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_comes_back_as_it_is(planner: Planner, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        planner.call(raises(error))
    assert type(caught.value) is type(error)
    assert str(caught.value) == str(error)
    assert [repr(argument) for argument in caught.value.args] == [repr(argument) for argument in error.args]
    assert isinstance(caught.value.__cause__, RemoteTraceback)


@pytest.mark.parametrize(
    ("make", "text", "attributes"),
    [
        (lambda: CodeError(7, "disk"), "disk failed with 7", {"code": 7}),
        (lambda: RewordingError("x"), "not good: x", {}),
        (lambda: HoldingError("held"), "held", {"size": 5}),
    ],
)
def test_an_exception_that_pickle_gets_wrong_comes_back_right(planner: Planner, make: Any, text: str, attributes: dict[str, Any]) -> None:
    def fail() -> None:
        error = make()
        error.add_note("a note")
        raise error

    with pytest.raises(type(make())) as caught:
        planner.call(fail)
    assert str(caught.value) == text
    assert vars(caught.value) == {**attributes, "__notes__": ["a note"]}


def test_an_argument_of_an_exception_that_cannot_travel_becomes_text(planner: Planner) -> None:
    def fail() -> None:
        raise PlainError(3, threading.Lock())

    with pytest.raises(PlainError, match="unlocked _thread.lock") as caught:
        planner.call(fail)
    assert caught.value.args[0] == 3


def test_an_exception_that_cannot_come_back_is_told_by_a_runtime_error(planner: Planner) -> None:
    def fail() -> None:
        class OddError(Exception):
            def __new__(cls, *args: Any) -> Any:
                return super().__new__(cls)

            def __init__(self, lock: Any) -> None:
                self.lock = lock

            def __reduce__(self) -> Any:
                raise ValueError("never")

            def __str__(self) -> str:
                return "odd text" if hasattr(self, "lock") else ""

        error = OddError(threading.Lock())
        error.add_note("the note")
        raise error

    with pytest.raises(RuntimeError, match=r"^.*OddError: odd text\nthe note$") as caught:
        planner.call(fail)
    assert caught.value.__notes__ == ["the note"]


def test_an_exception_without_a_text_comes_back(planner: Planner) -> None:
    def fail() -> None:
        class MuteError(Exception):
            def __str__(self) -> str:
                raise ValueError("no text")

        raise MuteError

    with pytest.raises(RuntimeError, match=r"MuteError: \(its text cannot be made: ValueError\('no text'\)\)"):
        planner.call(fail)
    assert planner.call(pow, 2, 3) == 8


def test_causes_come_back_and_the_last_shows_where_it_happened(planner: Planner) -> None:
    def inner() -> None:
        raise KeyError("deep")

    def fail() -> None:
        try:
            inner()
        except KeyError as error:
            raise CodeError(1, "outer") from error

    with pytest.raises(CodeError) as caught:
        planner.call(fail)
    cause = caught.value.__cause__
    assert repr(cause) == "KeyError('deep')"
    assert cause is not None
    text = str(cause.__cause__)
    assert isinstance(cause.__cause__, RemoteTraceback)
    assert f'File "{__file__}"' in text
    assert 'raise KeyError("deep")' in text
    assert 'raise CodeError(1, "outer") from error' in text
    assert "planner.py" not in text.replace(__file__, "")


def test_causes_that_go_round_in_a_circle_end(planner: Planner) -> None:
    def fail() -> None:
        one, two = ValueError("one"), TypeError("two")
        one.__cause__, two.__cause__ = two, one
        raise one

    with pytest.raises(ValueError, match="one") as caught:
        planner.call(fail)
    assert repr(caught.value.__cause__) == "TypeError('two')"


def test_torchs_out_of_memory_error_comes_back_as_itself(planner: Planner) -> None:
    import torch

    def fail() -> None:
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory. Tried to allocate 2.00 GiB.$"):
        planner.call(fail)


# How the process ends


def test_a_killed_process_is_explained_and_replaced(planner: Planner) -> None:
    before = pid(planner)
    with pytest.raises(PlannerError, match=r"(?s)was ended by SIGKILL while it ran .*<lambda>. Linux ends .* when memory runs out"):
        planner.call(lambda: (os.write(2, b"last words\n"), time.sleep(0.1), os.kill(os.getpid(), signal.SIGKILL)))
    assert pid(planner) != before
    assert gone(before)


def test_a_process_killed_while_it_is_idle_is_replaced_without_a_word(planner: Planner) -> None:
    before = pid(planner)
    child = planner._child
    assert child is not None
    os.kill(before, signal.SIGKILL)
    assert eventually(lambda: child.dead)
    assert pid(planner) != before


def test_an_abort_shows_the_line_and_what_was_said_last(planner: Planner, capfd: pytest.CaptureFixture[str]) -> None:
    def deep() -> None:
        os.write(2, b"terminate called without an active exception\n")
        os.abort()

    with pytest.raises(PlannerError) as caught:
        planner.call(deep)
    text = str(caught.value)
    assert "was ended by SIGABRT while it ran test_an_abort" in text
    assert "An error inside compiled code does that" in text
    assert "terminate called without an active exception" in text
    assert "Fatal Python error: Aborted" in text
    assert f'File "{__file__}", line {deep.__code__.co_firstlineno + 2} in deep' in text
    assert module.__file__ not in text  # our own frames tell nothing
    assert "Fatal" not in capfd.readouterr().err  # once is enough
    assert planner.call(pow, 2, 3) == 8


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (lambda: os._exit(3), "ended with exit code 3 while it ran .* Something in it ends the process.*last lines: nothing"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "was ended by SIGSEGV .* compiled code"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "was ended by SIGTERM .* Another program has ended it"),
        (lambda: os.kill(os.getpid(), signal.SIGRTMIN + 1), r"was ended by signal \d+ .* Another program has ended it"),
    ],
)
def test_each_way_to_end_has_its_text(planner: Planner, end: Any, text: str) -> None:
    with pytest.raises(PlannerError, match=f"(?s){text}"):
        planner.call(end)
    assert planner.call(pow, 2, 3) == 8


def test_a_process_that_cannot_start_says_why() -> None:
    planner = Planner(preload=("no_such_module",))
    for _ in range(2):
        with pytest.raises(PlannerError, match=r"(?s)exit code 1 while it started\..*Error: No module named 'no_such_module'"):
            planner.call(pow, 2, 3)


def test_prints_of_a_start_appear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loud_module.py").write_text("print('loaded')")
    monkeypatch.syspath_prepend(tmp_path)
    planner = Planner(preload=("loud_module",))
    planner.call(pow, 2, 3)
    planner.close()
    assert capfd.readouterr().out == "loaded\n"


def test_a_process_that_a_forked_child_outlives_is_noticed(planner: Planner) -> None:
    def fork_and_die() -> None:
        for descriptor in range(3, 50):
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    os.dup(descriptor)  # this copy is not closed in the fork
        if os.fork() == 0:
            time.sleep(3)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    start = time.monotonic()
    with pytest.raises(PlannerError, match="SIGKILL"):
        planner.call(fork_and_die)
    assert time.monotonic() - start < 2.9


def test_a_fork_in_the_process_leaves_the_connection_to_it(planner: Planner) -> None:
    def fork() -> int:
        child = os.fork()
        if child == 0:
            closed = []
            for descriptor in range(3, 50):
                with contextlib.suppress(OSError):
                    closed.append(stat.S_ISSOCK(os.fstat(descriptor).st_mode))
            os._exit(10 * any(closed) + (sys.stdout is not sys.__stdout__))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert planner.call(fork) == 0
    assert planner.call(pow, 2, 3) == 8


def test_a_function_over_its_timeout_is_stopped_and_the_process_stays(planner: Planner, tmp_path: Path) -> None:
    before = pid(planner)
    with pytest.raises(PlannerError, match=r"begin_and_sleep took longer than its timeout of 0.2 s and was stopped. Give it more time"):
        planner.call(touches(tmp_path / "begun"), timeout=0.2)
    assert pid(planner) == before


def test_a_function_that_cannot_be_stopped_is_killed(planner: Planner, tmp_path: Path) -> None:
    before = pid(planner)
    start = time.monotonic()
    with pytest.raises(PlannerError, match=r"begin_and_refuse took longer than its timeout of 0.2 s"):
        planner.call(stubborn(tmp_path / "begun"), timeout=0.2)
    assert 1 < time.monotonic() - start < 5
    assert pid(planner) != before
    assert gone(before)


def test_the_timeout_does_not_count_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_module.py").write_text("import time; time.sleep(1)")
    monkeypatch.syspath_prepend(tmp_path)
    planner = Planner(preload=("slow_module",))
    assert planner.call(pow, 2, 3, timeout=0.5) == 8
    planner.close()


def test_a_loop_in_python_is_stopped_too(planner: Planner) -> None:
    def loop() -> None:
        while True:
            sum(range(10))

    before = pid(planner)
    with pytest.raises(PlannerError, match="timeout"):
        planner.call(loop, timeout=0.2)
    assert pid(planner) == before


def test_what_must_not_be_interrupted_is_not(planner: Planner, tmp_path: Path) -> None:
    file = tmp_path / "interrupted"

    @module.uninterrupted
    def guard(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException:
            file.write_text("in the guard")
            raise

    def work() -> None:
        end = time.monotonic() + 0.02
        while time.monotonic() < end:
            pass

    def guarded() -> None:
        module.uninterrupted(guard)  # its code is another object in this process
        while True:
            guard(work)
            time.sleep(0.005)

    before = pid(planner)
    for _ in range(5):
        with pytest.raises(PlannerError, match="timeout"):
            planner.call(guarded, timeout=0.1)
    assert not file.exists()
    assert pid(planner) == before


def test_a_signal_that_nobody_here_sent_stops_nothing(planner: Planner) -> None:
    def signal_itself() -> int:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        return 4

    assert planner.call(signal_itself) == 4


def test_stops_amid_prints_never_break_the_protocol(planner: Planner) -> None:
    def chatter() -> None:
        while True:
            print("x" * 20_000)

    before = pid(planner)
    with contextlib.redirect_stdout(None):
        for i in range(20):
            with pytest.raises(PlannerError, match="timeout"):
                planner.call(chatter, timeout=0.01 + 0.0007 * i)
    assert pid(planner) == before


def test_closing_ends_the_process_and_a_later_call_starts_another() -> None:
    planner = Planner(preload=())
    planner.close()  # nothing there yet
    before = pid(planner)
    planner.close()
    assert not psutil.pid_exists(before)  # waited for: no zombie
    assert pid(planner) != before
    planner.close()


def test_closing_ends_what_runs_and_what_waits(tmp_path: Path) -> None:
    planner = Planner(preload=())
    running = planner.submit(touches(tmp_path / "begun"))
    waiting = planner.submit(pow, 2, 3)
    assert eventually((tmp_path / "begun").exists)
    planner.close()
    for request in (running, waiting):
        with pytest.raises(PlannerError, match="The planner was closed before the answer was there. Call again."):
            request.result(10)


def test_warm_starts_the_process_before_the_first_call() -> None:
    planner = Planner(preload=())
    before = {child.pid for child in psutil.Process().children()}
    planner.warm()
    (started,) = {child.pid for child in psutil.Process().children()} - before
    planner.warm()
    assert pid(planner) == started
    planner.close()


# Requests in the background


def test_a_request_gives_its_result_or_its_exception(planner: Planner) -> None:
    assert planner.submit(pow, 2, 5).result(10) == 32
    with pytest.raises(ZeroDivisionError):
        planner.submit(lambda: 1 / 0).result(10)


def test_requests_are_answered_in_order_with_their_arguments_as_they_were(planner: Planner) -> None:
    done: list[int] = []
    box = [0]
    requests = []
    for i in range(10):
        box[0] = i
        requests.append(planner.submit(lambda values: values[0], box))
        requests[-1].add_done_callback(lambda request: done.append(request.result()))
    assert [request.result(10) for request in requests] == list(range(10))
    assert eventually(lambda: len(done) == 10)
    assert done == list(range(10))


def test_the_newest_request_wins(planner: Planner, tmp_path: Path) -> None:
    before = pid(planner)
    first = planner.submit(touches(tmp_path / "first"))
    assert eventually((tmp_path / "first").exists)
    other = planner.submit(pow, 2, 6)
    second = planner.submit(touches(tmp_path / "second"), replaces=first)
    third = planner.submit(pow, 2, 5, replaces=second)
    assert third.result(10) == 32
    assert other.result(0) == 64  # a request that nothing replaces keeps its turn
    for request in (first, second):
        with pytest.raises(CancelledError):
            request.result(0)
    assert not (tmp_path / "second").exists()  # dropped, never begun
    assert pid(planner) == before


def test_a_running_request_that_cannot_be_stopped_is_killed_for_the_next(planner: Planner, tmp_path: Path) -> None:
    before = pid(planner)
    first = planner.submit(stubborn(tmp_path / "begun"))
    assert eventually((tmp_path / "begun").exists)
    start = time.monotonic()
    assert first.cancel()
    assert time.monotonic() - start < 0.1
    assert planner.call(os.getpid) != before


def test_a_finished_request_cannot_be_cancelled(planner: Planner) -> None:
    request = planner.submit(pow, 2, 5)
    assert request.result(10) == 32
    assert not request.cancel()
    assert planner.submit(pow, 2, 6, replaces=request).result(10) == 64


def test_a_request_cancelled_while_the_process_starts_leaves_it_starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sluggish_module.py").write_text("import time; time.sleep(1)")
    monkeypatch.syspath_prepend(tmp_path)
    planner = Planner(preload=("sluggish_module",), grace=0.1)
    planner.warm()
    started = planner._child
    request = planner.submit(touches(tmp_path / "begun"))
    time.sleep(0.2)
    request.cancel()
    assert planner.call(pow, 2, 3) == 8
    assert planner._child is started
    assert not (tmp_path / "begun").exists()
    planner.close()


# Streams


def count(path: Path, last: int) -> Iterator[int]:
    """Notes how it goes in a file, as it runs elsewhere."""
    try:
        for i in range(last):
            path.write_text(str(i))
            print("step", i)
            yield i
    except GeneratorExit:
        path.write_text("closed")
        raise
    return "returned"  # type: ignore[return-value]


def test_a_stream_yields_step_by_step_and_returns_what_the_function_returns(
    planner: Planner, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stream = planner.stream(count, tmp_path / "steps", 3)
    seen = []
    for value in stream:
        seen.append((value, (tmp_path / "steps").read_text(), capfd.readouterr().out))
    assert seen == [(i, str(i), f"step {i}\n") for i in range(3)]

    def whole() -> Iterator[int]:
        return (yield from planner.stream(count, tmp_path / "steps", 1))

    running = whole()
    next(running)
    with pytest.raises(StopIteration) as end:
        next(running)
    assert end.value.value == "returned"


def test_any_iterable_can_be_streamed(planner: Planner) -> None:
    assert list(planner.stream(range, 4)) == [0, 1, 2, 3]
    stream = planner.stream(range, 4)
    next(stream)
    stream.close()  # a range has nothing to close
    assert planner.call(pow, 2, 3) == 8


@pytest.mark.parametrize("how", ["close", "break", "throw"])
def test_leaving_a_stream_closes_the_function_and_keeps_the_process(planner: Planner, tmp_path: Path, how: str) -> None:
    before = pid(planner)
    stream = planner.stream(count, tmp_path / "steps", 5)
    assert next(stream) == 0
    if how == "close":
        stream.close()
    elif how == "throw":
        with pytest.raises(ValueError, match="thrown in"):
            stream.throw(ValueError("thrown in"))
    else:
        for _ in stream:
            break
        del stream
    assert (tmp_path / "steps").read_text() == "closed"
    assert pid(planner) == before


def test_a_stream_that_nothing_was_read_from_is_closed_without_a_process() -> None:
    planner = Planner(preload=())
    planner.stream(range, 3).close()
    assert planner._child is None


def test_an_exception_in_a_stream_comes_back_where_it_happens(planner: Planner) -> None:
    def fail() -> Iterator[int]:
        yield 1
        raise CodeError(2, "stream")

    stream = planner.stream(fail)
    assert next(stream) == 1
    with pytest.raises(CodeError, match="stream failed with 2"):
        next(stream)
    assert planner.call(pow, 2, 3) == 8


def test_an_exception_while_a_stream_is_closed_comes_back(planner: Planner) -> None:
    def fail() -> Iterator[int]:
        try:
            yield 1
        finally:
            raise CodeError(2, "closing")

    stream = planner.stream(fail)
    next(stream)
    with pytest.raises(CodeError, match="closing failed with 2"):
        stream.close()
    assert planner.call(pow, 2, 3) == 8


def test_a_stream_whose_process_died_is_closed_quietly(planner: Planner) -> None:
    stream = planner.stream(range, 3)
    next(stream)
    assert planner._child is not None
    planner._child.end()
    stream.close()
    assert planner.call(pow, 2, 3) == 8


def test_another_request_of_the_same_thread_closes_an_open_stream(
    planner: Planner, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stream = planner.stream(count, tmp_path / "steps", 5)
    next(stream)
    assert list(planner.stream(range, 2)) == [0, 1]
    assert (tmp_path / "steps").read_text() == "closed"
    with pytest.raises(PlannerError, match=r"The stream of count was closed: another request .* Read it to its end, or close\(\) it"):
        next(stream)

    def fail() -> Iterator[int]:
        try:
            yield 1
        finally:
            raise CodeError(2, "closing")

    stream = planner.stream(fail)
    next(stream)
    assert planner.call(pow, 2, 3) == 8
    assert "CodeError: closing failed with 2" in capfd.readouterr().err  # it is not the call's error, but it is seen
    stream.close()


def test_another_thread_waits_for_a_stream_that_is_read(planner: Planner, tmp_path: Path) -> None:
    stream = planner.stream(count, tmp_path / "steps", 3)
    next(stream)
    request = planner.submit(pow, 2, 5)
    time.sleep(0.2)
    assert not request.done()
    assert list(stream) == [1, 2]
    assert request.result(10) == 32


def test_a_stream_left_alone_gives_way(planner: Planner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vramlab.virtual.planner.PATIENCE", 0.3)
    stream = planner.stream(count, tmp_path / "steps", 3)
    next(stream)
    start = time.monotonic()
    assert planner.submit(pow, 2, 5).result(10) == 32
    assert time.monotonic() - start > 0.2
    assert (tmp_path / "steps").read_text() == "closed"
    stream.close()


# Modules of the user's own


def test_a_local_module_that_has_changed_is_loaded_again(planner: Planner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "my_own_model.py"
    file.write_text("WIDTH = 1\n")
    monkeypatch.syspath_prepend(tmp_path)

    def width() -> int:
        import my_own_model  # type: ignore[import-not-found]

        return my_own_model.WIDTH

    assert planner.call(width) == 1
    before = pid(planner)
    assert planner.call(width) == 1
    assert pid(planner) == before
    file.write_text("WIDTH = 200\n")
    assert planner.call(width) == 200
    after = pid(planner)
    assert after != before
    file.write_text("WIDTH = 30000\n")

    def widths() -> Iterator[int]:
        yield width()

    assert list(planner.stream(widths)) == [30000]
    last = pid(planner)
    assert last not in (before, after)
    file.unlink()
    assert pid(planner) == last  # there is nothing newer


def test_installed_modules_are_not_watched() -> None:
    sources = module._Sources()
    sources.note()
    watched = set(sources._files)
    assert module.__file__ in watched or "site-packages" in module.__file__
    assert __file__ in watched
    assert not any(file in watched for file in (os.__file__, pytest.__file__, psutil.__file__))


# Forks


def test_a_forked_process_forgets_the_planner_of_its_parent(planner: Planner) -> None:
    before = pid(planner)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    def in_fork() -> None:
        answers.put(planner._child)
        answers.put(pid(planner))
        planner.close()

    worker = context.Process(target=in_fork)
    worker.start()
    worker.join(20)
    assert answers.get() is None
    assert answers.get() != before
    assert pid(planner) == before


# Whole programs


def run(source: str, how: str = "-c", *, tmp_path: Path | None = None) -> str:
    source = textwrap.dedent(source)
    command, stdin = [sys.executable, "-W", "error"], None
    if how == "-c":
        command += ["-c", source]
    elif how == "file":
        assert tmp_path is not None
        (tmp_path / "script.py").write_text(source)
        command += [str(tmp_path / "script.py")]
    else:
        command, stdin = [*command, "-i"], source  # as typed at the prompt
    result = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, env=ENVIRONMENT, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr
    return result.stdout


PROGRAM = """
from vramlab.virtual.planner import Planner
class Model:
    def __init__(self, width): self.width = width

class Failure(Exception): pass

FACTOR = 3
def build(width): return Model(width * FACTOR)

def fail(): raise Failure('mine')

planner = Planner(preload=())
model = planner.call(build, 2)
print(type(model) is Model, model.width, flush=True)
try: planner.call(fail)
except Failure as error: print('caught', error, flush=True)

planner.call(lambda: print('from there'))
"""
BROKEN = """
def broken():
    return 1 / 0
try:
    planner.call(broken)
except ZeroDivisionError as error:
    print(error.__cause__)
"""


@pytest.mark.parametrize("how", ["-c", "file", "prompt"])
def test_classes_and_closures_of_the_main_program_travel(how: str, tmp_path: Path) -> None:
    assert run(PROGRAM, how, tmp_path=tmp_path) == "True 6\ncaught mine\nfrom there\n"


def test_cells_of_a_notebook_travel_and_their_lines_are_shown(tmp_path: Path) -> None:
    jupyter = pytest.importorskip("jupyter_client.manager", reason="needs Jupyter")
    manager, client = jupyter.start_new_kernel(kernel_name="python3", env=ENVIRONMENT, cwd=str(tmp_path))
    printed: list[str] = []

    def note(message: dict[str, Any]) -> None:
        printed.append(message["content"].get("text", ""))

    try:
        for cell in (
            PROGRAM,
            BROKEN,
        ):
            reply = client.execute_interactive(cell, timeout=60, output_hook=note)
            assert reply["content"]["status"] == "ok", reply
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    text = "".join(printed)
    assert text.startswith("True 6\ncaught mine\nfrom there\n")
    assert "return 1 / 0" in text  # the source of a cell is in no file


def test_importing_and_using_it_changes_nothing_here() -> None:
    out = run("""
        import sys
        import vramlab.virtual.planner as p
        p.shared().call(pow, 2, 3)
        print(sorted({'torch', 'pandas', 'matplotlib'} & set(sys.modules)), p.shared() is p.shared())
        print(p.shared().call(lambda: ('torch' in sys.modules, __import__('torch').get_num_threads())))
    """)
    assert out == "[] True\n(True, 1)\n"
    assert isinstance(shared(), Planner)


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), 9)", "sys.exit()", "1 / 0"])
def test_the_process_ends_with_its_parent_whatever_it_does(end: str, tmp_path: Path) -> None:
    source = f"""
        import os, sys, time
        from vramlab.virtual.planner import Planner
        planner = Planner(preload=())
        print(planner.call(os.getpid), flush=True)
        planner.submit(lambda: (open('begun', 'w').close(), time.sleep(60)))
        while not os.path.exists('begun'): time.sleep(0.01)
        {end}
    """
    command = [sys.executable, "-c", textwrap.dedent(source)]
    started = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60, env=ENVIRONMENT, cwd=tmp_path)
    assert eventually(lambda: gone(int(started.stdout)))


def test_control_c_stops_the_function_and_leaves_a_usable_planner(tmp_path: Path) -> None:
    source = """
        import os, signal, sys, threading, time
        from vramlab.virtual.planner import Planner
        planner = Planner(preload=(), grace=1.0)
        before = planner.call(os.getpid)
        def sleep(name):
            open(name, 'w').close()
            time.sleep(60)
        def steps(name):
            yield 1
            sleep(name)
        def interrupt(name):
            while not os.path.exists(name): time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
        def use(name):
            threading.Thread(target=interrupt, args=(name,)).start()
            try: planner.call(sleep, name) if name == 'call' else list(planner.stream(steps, name))
            except KeyboardInterrupt: print('interrupted', planner.call(os.getpid) == before)
        use('call')
        use('stream')
    """
    start = time.monotonic()
    assert run(source, "file", tmp_path=tmp_path) == "interrupted True\ninterrupted True\n"
    assert time.monotonic() - start < 20


def test_control_c_in_a_terminal_reaches_only_the_parent(planner: Planner) -> None:
    assert os.getpgid(pid(planner)) != os.getpgid(0)
