"""launch(): real ranks from a function typed anywhere, and every way in which they can end."""

from __future__ import annotations

import io
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

import vramlab
from vramlab.parallel import LaunchError, launch
from vramlab.parallel import rank as rank_module

launch_module = sys.modules["vramlab.parallel.launch"]  # the package's attribute of this name is the function
ROOT = str(Path(vramlab.__file__).parents[1])


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # it is dead, and its new parent has not asked for it
    except psutil.NoSuchProcess:
        return True


def soon(condition: Callable[[], bool], seconds: float = 20) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


@contextmanager
def busy_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before
    assert not dist.is_initialized()


# Ranks that do what they should


class Listening(io.StringIO):
    """Standard output that lets a waiting rank go on as soon as it reads what that has printed."""

    def __init__(self, word: str, go: Path) -> None:
        super().__init__()
        self.word, self.go = word, go

    def write(self, text: str) -> int:
        if self.word in text:
            self.go.touch()
        return super().write(text)


CELL = """
import torch.distributed as dist

class Answer:
    def __init__(self, value): self.value = value

def typed_in_a_cell(x):
    return Answer(x + dist.get_rank())
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], str, str]:
    """What two ranks say of themselves, what they print, and what they write to stderr."""
    folder = tmp_path_factory.mktemp("launch")
    (folder / "json.py").write_text("raise RuntimeError('this is not the json you want')\n")
    (folder / "beside_the_notebook.py").write_text("VALUE = 42\n")
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(CELL, "<cell 1>", "exec"), cell)
    typed_in_a_cell, go, captured = cell["typed_in_a_cell"], folder / "go", 10

    def everything(x: int, *, y: int) -> dict[str, Any]:
        import random
        import subprocess

        import beside_the_notebook

        rank = dist.get_rank()
        print("first", rank)
        print("shown while it waits", end="\r")
        subprocess.run([sys.executable, "-c", "print('past Python')"], check=True)
        print("warned", file=sys.stderr)
        deadline = time.monotonic() + 30
        while not go.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        total = torch.tensor([float(rank + 1)])
        dist.all_reduce(total)
        try:
            launch(lambda: 0)
        except RuntimeError as error:
            nested = str(error)
        print("no end of line", end="")
        return {
            "live": go.exists(),
            "sum": total.item(),
            "arguments": (x * captured, y),
            "cell": typed_in_a_cell(x).value,
            "module": beside_the_notebook.VALUE,
            "random": (torch.rand(3), np.random.rand(), random.random()),
            "threads": torch.get_num_threads(),
            "group": (dist.get_backend(), dist.get_world_size(), rank),
            "patience": dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds(),
            "device": vramlab.devices.choose_device(),
            "nested": nested,
            "folder": os.getcwd(),
            "typed": sys.stdin.read(),
            "pid": os.getpid(),
        }

    out, err = Listening("shown while it waits", go), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, busy_port() as port:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        patch.delenv("OMP_NUM_THREADS", raising=False)
        patch.setenv("MASTER_PORT", str(port))  # what an earlier cell may have set
        patch.setenv("PET_NNODES", "7")
        results = launch(everything, 4, y=2, timeout=100, seed=7)
    return results, out.getvalue(), err.getvalue()


def test_each_rank_gives_its_result_in_order(told: Any) -> None:
    results, _, _ = told
    assert [result["group"] for result in results] == [("gloo", 2, 0), ("gloo", 2, 1)]
    assert [result["sum"] for result in results] == [3, 3]
    assert [result["arguments"] for result in results] == [(40, 2), (40, 2)]


def test_functions_and_classes_of_a_cell_and_modules_beside_it_travel(told: Any) -> None:
    results, _, _ = told
    assert [result["cell"] for result in results] == [4, 5]
    assert [result["module"] for result in results] == [42, 42]
    assert [result["folder"] for result in results] == [results[0]["folder"]] * 2
    assert Path(results[0]["folder"], "beside_the_notebook.py").exists()


def test_output_is_labelled_and_comes_while_the_ranks_run(told: Any) -> None:
    results, out, err = told
    assert [result["live"] for result in results] == [True, True]
    lines = re.split("[\r\n]", out)
    for rank in (0, 1):
        mine = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert mine == [f"[rank {rank}] {text}" for text in (f"first {rank}", "shown while it waits", "past Python", "no end of line")]
    assert sorted(err.splitlines()) == ["[rank 0] warned", "[rank 1] warned"]


def test_each_rank_has_its_own_seed_in_every_generator(told: Any) -> None:
    results, _, _ = told
    for rank, result in enumerate(results):
        torch.manual_seed(7 + rank)
        numbers, numpy, python = result["random"]
        assert torch.equal(numbers, torch.rand(3))
        assert numpy == np.random.RandomState(7 + rank).rand()
        assert python == __import__("random").Random(7 + rank).random()


def test_each_rank_has_one_thread_the_cpu_and_nothing_to_read(told: Any) -> None:
    results, _, _ = told
    for result in results:
        assert (result["threads"], result["device"], result["typed"]) == (1, torch.device("cpu"), "")


def test_a_collective_outlasts_the_parents_timeout(told: Any) -> None:
    assert [result["patience"] for result in told[0]] == [100 + rank_module.MARGIN] * 2


def test_a_launch_inside_a_rank_is_refused(told: Any) -> None:
    for rank, result in enumerate(told[0]):
        assert re.search(f"this is rank {rank} of a launch already; call the function itself", result["nested"])


def test_no_rank_outlives_its_launch(told: Any) -> None:
    assert all(is_gone(result["pid"]) for result in told[0])


# Ranks that do not


class OutOfOilError(Exception):
    """An exception whose __init__ takes something else than it keeps, and that holds what cannot travel."""

    def __init__(self, *, liters: int) -> None:
        super().__init__(f"{liters} l left")
        self.liters, self.lock = liters, threading.Lock()


def test_the_first_error_ends_all_and_is_raised_here_with_its_traceback(tmp_path: Path) -> None:
    def work() -> None:
        (tmp_path / str(dist.get_rank())).write_text(str(os.getpid()))
        if dist.get_rank() == 1:
            try:
                raise OutOfOilError(liters=3)
            except OutOfOilError as error:
                error.add_note("stop the engine")
                raise
        dist.barrier()  # fails too, but only because the other one has gone

    began = time.monotonic()
    with pytest.raises(OutOfOilError, match="3 l left") as caught:
        launch(work, timeout=200)
    assert time.monotonic() - began < 60
    assert caught.value.liters == 3
    assert "stop the engine" in caught.value.__notes__
    assert "Raised in rank 1 of 2; the other ranks were stopped." in caught.value.__notes__
    trace = str(caught.value.__cause__)
    assert "raise OutOfOilError(liters=3)" in trace
    assert "parallel/rank.py" not in trace
    assert all(is_gone(int(file.read_text())) for file in tmp_path.iterdir())


def test_a_hang_ends_at_the_timeout_with_each_ranks_stack_and_takes_grandchildren_along(tmp_path: Path) -> None:
    def stuck_in_python() -> None:
        import subprocess

        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        (tmp_path / "child").write_text(str(child.pid))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a polite request is not enough
        time.sleep(600)

    def work() -> None:
        (tmp_path / str(dist.get_rank())).write_text(str(os.getpid()))
        stuck_in_python() if dist.get_rank() else dist.barrier()

    with pytest.raises(LaunchError) as caught:
        launch(work, timeout=2)
    text = str(caught.value)
    assert re.search(r"work took longer than its timeout of 2 s in rank 0, 1, and all ranks were stopped\. .*timeout=None", text)
    stacks = re.split(r"\nRank \d was at:", text)[1:]
    assert re.search(r"in barrier\n.* in work$", stacks[0], re.DOTALL)
    assert re.search(r"in stuck_in_python\n.* in work$", stacks[1])
    pids = [int(file.read_text()) for file in tmp_path.iterdir()]
    assert len(pids) == 3
    assert all(map(is_gone, pids))


def test_a_killed_rank_is_the_cause_and_not_the_error_of_the_one_that_waits_for_it() -> None:
    def work() -> None:
        if dist.get_rank() == 1:
            print("about to go", file=sys.stderr)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(LaunchError, match=r"Rank 1 of 2 was ended by SIGKILL while it ran .*work\. Linux.*memory.*\n    about to go$"):
        launch(work, timeout=100)


PARENT = """
import os, sys, time
import torch.distributed as dist
from vramlab.parallel import launch

def work(folder):
    open(os.path.join(folder, str(os.getpid())), "w").close()
    time.sleep(600)

launch(work, sys.argv[1], ranks=1)
"""


def test_ranks_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """As a notebook's kernel is when it is restarted."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "pids").mkdir()
    (tmp_path / "parent.py").write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, "parent.py", str(tmp_path / "pids")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ROOT, "TMPDIR": str(temporary)},
    )
    assert soon(lambda: any((tmp_path / "pids").iterdir()), 60)
    rank = int(next((tmp_path / "pids").iterdir()).name)
    agent = psutil.Process(rank).ppid()
    parent.kill()
    parent.wait()
    assert soon(lambda: is_gone(rank) and is_gone(agent))
    assert not list(temporary.glob("vramlab-*"))


NODES = """
import sys
import torch, torch.distributed as dist
from vramlab.parallel import launch

def work(x):
    total = torch.tensor([x * (dist.get_rank() + 1.0)])
    dist.all_reduce(total)
    return dist.get_rank(), total.item()

for x in (10, 20):
    print("RESULTS", launch(work, x, ranks=5), flush=True)
try:
    launch(lambda: 1 // (1 - dist.get_rank()))
except (ZeroDivisionError, RuntimeError) as error:
    print("ERROR", type(error).__name__, dist.is_initialized(), flush=True)
"""


def test_the_same_script_runs_on_two_machines_under_torchrun(tmp_path: Path) -> None:
    """Two agents on this one, each with one rank; the second launch must not meet the first one's addresses."""
    (tmp_path / "script.py").write_text(NODES)
    with busy_port() as port:
        pass  # the first agent takes it: torchrun, unlike launch(), must be told one
    options = [
        f"--log-dir={tmp_path}",
        "--nnodes=2",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{port}",
        "--local-addr=localhost",
    ]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "script.py"]
    environment = {**os.environ, "PYTHONPATH": ROOT, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    agents = [
        subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        said = [agent.communicate(timeout=100) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    for agent, (out, err) in zip(agents, said, strict=True):
        assert agent.returncode == 0, err
        assert "RESULTS [(0, 30.0), (1, 30.0)]\nRESULTS [(0, 60.0), (1, 60.0)]" in out
    errors = sorted(line for out, _ in said for line in out.splitlines() if line.startswith("ERROR"))
    assert errors == ["ERROR RuntimeError False", "ERROR ZeroDivisionError False"]  # the second one's peer hears that it has gone


# Ranks that are played by a small script, as real ones take seconds to start


def played(patch: pytest.MonkeyPatch, script: str) -> None:
    """Have launch() start this script in place of torchrun's agent. It knows the job's ``folder`` and ``write(name, data)``."""
    prelude = """
import os, pathlib, pickle, signal, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
def write(name, data=b""):
    (folder / "half").write_bytes(data if isinstance(data, bytes) else str(data).encode())
    (folder / "half").rename(folder / name)
"""
    patch.setattr(launch_module, "command", lambda role, *arguments: [sys.executable, "-c", prelude + script, *arguments])


def nothing() -> None:
    pass


ENDED = "child = subprocess.Popen([sys.executable, '-c', '']); child.wait()"


def test_an_agent_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch, "sys.exit('there is no store')")
    text = "The ranks of nothing could not start: torchrun's agent ended with exit code 1. Its last lines:\n    there is no store"
    with pytest.raises(LaunchError, match=re.escape(text)):
        launch(nothing)


def test_ranks_that_never_start_are_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "STARTING", 0.5)
    played(monkeypatch, "print('looking for the others', flush=True); time.sleep(600)")
    with pytest.raises(LaunchError, match=r"did not start in 0.5 s. Is the machine busy\? .*lines:\n    looking for the others$"):
        launch(nothing, timeout=None)


def test_a_rank_that_ends_itself_is_told_to_return(monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch, f"{ENDED}; write('stderr-1', 'bye'); write('pid-1', child.pid); write('result-0', pickle.dumps(1))")
    with pytest.raises(LaunchError, match=r"Rank 1 of 2 ended with exit code 0 and without a result while .*return instead.*:\n    bye$"):
        launch(nothing)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (-9, "was ended by SIGKILL while it ran nothing. Linux ends processes so when memory runs out"),
        (-11, "was ended by SIGSEGV while it ran nothing. An error inside compiled code"),
        (-2, "was ended by SIGINT while it ran nothing. Another program has ended it"),
        (-40, "was ended by signal 40 while it ran nothing."),
        (7, "ended with exit code 7 and without a result while it ran nothing. Something in it ends the process"),
    ],
)
def test_what_ended_a_rank_is_named_also_where_another_heard_of_it_first(code: int, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = pickle.dumps((1.0, rank_module.pack_error(RuntimeError("Connection closed by peer [127.0.0.1]:1"))))
    failures = f'{{"0": 1, "1": {code}, "2": -15}}'
    ranks = f"{ENDED}; [write(f'pid-{{i}}', child.pid) for i in range(3)]"
    played(monkeypatch, f"{ranks}; write('error-0', {heard!r}); time.sleep(0.3); write('failures', {failures!r})")
    with pytest.raises(LaunchError, match=re.escape(f"Rank 1 of 3 {text}")) as caught:
        launch(nothing, ranks=3)
    assert "Connection closed" in str(caught.value.__cause__)


def test_a_rank_that_waits_for_one_that_has_returned_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = pickle.dumps((1.0, rank_module.pack_error(RuntimeError("Connection reset by peer"))))
    played(monkeypatch, f"write('result-0', pickle.dumps(1)); write('error-1', {heard!r})")
    with pytest.raises(RuntimeError, match="Connection reset") as caught:
        launch(nothing)
    assert any(re.search("Rank 0 had returned by then: all ranks call the same collectives", note) for note in caught.value.__notes__)


def test_the_earlier_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    late, early = (pickle.dumps((moment, rank_module.pack_error(KeyError(moment)))) for moment in (5.0, 3.0))
    played(monkeypatch, f"write('error-1', {early!r}); write('error-0', {late!r}); time.sleep(600)")
    monkeypatch.setattr(launch_module, "TICK", 1.0)  # both are there when it looks
    with pytest.raises(KeyError, match="3.0"):
        launch(nothing)


def test_a_rank_that_has_returned_ends_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    def aborts_when_python_ends() -> int:
        import atexit

        print("returning", file=sys.stderr)
        atexit.register(os.abort)
        return 3

    assert launch(aborts_when_python_ends, ranks=1, device="cpu") == [3]
    assert "Abort" not in (said := "".join(capsys.readouterr()))
    assert "returning" in said


def test_a_rank_that_calls_exit_does_not_end_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    left = pickle.dumps((1.0, rank_module.pack_error(SystemExit(3))))
    played(monkeypatch, f"write('error-0', {left!r})")
    with pytest.raises(LaunchError, match=r"SystemExit\(3\) ended rank 0 of 1 in nothing; return instead"):
        launch(nothing, ranks=1)


def test_a_result_of_an_unknown_module_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch, "write('result-0', b'cnowhere_to_be_found\\nThing\\n.')")
    with pytest.raises(TypeError, match=r"result of nothing in rank 0 cannot be unpickled here: No module.*Return numbers, text"):
        launch(nothing, ranks=1)


def test_a_hang_on_cards_offers_to_leave_peer_access_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "_device_type", lambda device, ranks: "cuda")
    played(monkeypatch, "write('ready-0'); write('ready-1'); write('result-1'); time.sleep(600)")
    with pytest.raises(LaunchError, match=r"in rank 0, and all ranks were stopped. Rank 1 has ended. .*'NCCL_P2P_DISABLE'\] = '1' before"):
        launch(nothing, timeout=0.2)


def test_ctrl_c_leaves_no_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sleep = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)"
    played(
        monkeypatch,
        f"signal.signal(2, signal.SIG_IGN); p = pathlib.Path({str(tmp_path)!r}); (p / str({sleep}.pid)).touch(); time.sleep(600)",
    )

    def interrupt() -> None:
        soon(lambda: any(tmp_path.iterdir()))
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=interrupt)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        launch(nothing)
    presser.join()
    assert all(is_gone(int(file.name)) for file in tmp_path.iterdir())


def test_a_process_that_got_the_number_of_a_rank_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        played(monkeypatch, f"write('pid-0', {other.pid}); write('result-0', pickle.dumps(5))")
        assert launch(nothing, ranks=1) == [5]
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_output_is_dropped_where_there_is_nobody_to_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch, "write('stdout-0', 'said\\n'); write('result-0', pickle.dumps(5)); time.sleep(600)")
    for stream in (None, io.StringIO()):
        if stream is not None:
            stream.close()
        monkeypatch.setattr(sys, "stdout", stream)
        assert launch(nothing, ranks=1) == [5]


# What is refused before anything starts


@pytest.mark.parametrize("ranks", [0, -1, True, 1.5, "2", None])
def test_a_number_of_ranks_is_a_number(ranks: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"ranks is a whole number of at least 1, got {ranks!r}; 2 is enough")):
        launch(nothing, ranks=ranks)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), True, "10"])
def test_a_timeout_is_seconds_or_none(timeout: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"positive number of seconds, or None for no limit, got {timeout!r}")):
        launch(nothing, timeout=timeout)


def test_a_call_in_place_of_a_function_is_refused() -> None:
    with pytest.raises(TypeError, match=r"needs a function, got int; write launch\(work, 10\), not launch\(work\(10\)\)"):
        launch(3)  # type: ignore[arg-type]


def test_what_cannot_travel_is_refused_by_name() -> None:
    lock = threading.Lock()

    def holds_a_lock() -> None:
        lock.acquire()

    with pytest.raises(TypeError, match=r"holds_a_lock and its arguments travel to the ranks, and one .* lock.*inside the function"):
        launch(holds_a_lock)


def pretend_cards(patch: pytest.MonkeyPatch, count: int) -> None:
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: count)
    patch.delenv("VRAMLAB_DEVICE", raising=False)


def test_more_ranks_than_cards_are_refused_or_run_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cards(monkeypatch, 2)
    with pytest.raises(ValueError, match="3 ranks need 3 CUDA devices, one each, and there are 2. Set ranks=2, or device='cpu'"):
        launch(nothing, ranks=3, device="cuda")
    with pytest.warns(UserWarning, match="there are 2: they run on the CPU. Give device='cpu'"):
        assert launch_module._device_type("auto", 3) == "cpu"
    assert [launch_module._device_type(device, 2) for device in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]


def test_one_card_for_all_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cards(monkeypatch, 2)
    with pytest.raises(ValueError, match="Ranks take the cards from 0 on, got 'cuda:1'; set device='cuda', and CUDA_VISIBLE_DEVICES"):
        launch(nothing, device="cuda:1")


def test_virtual_cards_are_for_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "choose_device", lambda device: torch.device("meta"))
    with pytest.raises(ValueError, match=r"Ranks run on 'cpu' and 'cuda', got 'vgpu'; plan\(\) is for virtual"):
        launch(nothing, device="vgpu")


def test_a_torch_without_distributed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=re.escape(f"need torch.distributed, and torch {torch.__version__} here is built without")):
        launch(nothing)


@pytest.mark.parametrize("more", [{}, {"WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}])
def test_variables_that_an_earlier_cell_has_set_are_named(more: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", **more}.items():
        monkeypatch.setenv(name, value)
    shown = ", ".join(f"{name}={value}" for name, value in {"RANK": "0", **more}.items())
    with pytest.raises(ValueError, match=re.escape(f"not torchrun that set it: {shown}. Start with torchrun") + ".*del os.environ"):
        launch(nothing, ranks=2)


# A process that is a rank already


@pytest.fixture
def as_only_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is what torchrun would start as the only rank."""
    with busy_port() as port:
        pass
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VRAMLAB_DEVICE", "cpu")
    monkeypatch.setattr(rank_module, "_stores", [])


@pytest.mark.usefixtures("as_only_rank")
def test_a_rank_runs_the_function_itself_and_leaves_things_as_they_were() -> None:
    def work(x: int) -> tuple[Any, ...]:
        with pytest.raises(RuntimeError, match="this is rank 0 of a launch already; call the function itself"):
            launch(nothing, ranks=1)
        return x, os.getpid(), dist.get_backend(), torch.rand(1).item()

    for _ in range(2):
        torch.manual_seed(3)
        first = torch.rand(1).item()
        assert launch(work, 1, ranks=1, seed=3) == [(1, os.getpid(), "gloo", first)]
        assert not dist.is_initialized()
    assert os.environ["VRAMLAB_DEVICE"] == "cpu"


@pytest.mark.usefixtures("as_only_rank")
def test_an_error_in_a_rank_passes_and_ends_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VRAMLAB_DEVICE")
    with pytest.raises(ZeroDivisionError):
        launch(lambda: 1 // 0, ranks=1, device="cpu")
    assert not dist.is_initialized()
    assert "VRAMLAB_DEVICE" not in os.environ


@pytest.mark.usefixtures("as_only_rank")
def test_a_process_group_that_is_there_is_used_and_stays() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    try:
        assert launch(lambda: dist.group.WORLD is group, ranks=1) == [True]
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("as_only_rank")
def test_a_result_that_cannot_travel_is_refused_by_its_type() -> None:
    with pytest.raises(TypeError, match=r"gave a _thread.lock, which cannot be pickled to leave its rank: .*Return numbers, text"):
        launch(threading.Lock, ranks=1)


def test_a_function_of_a_module_that_ranks_cannot_import_says_what_to_do() -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        rank_module.load(b"cnowhere_to_be_found\nThing\n.")
    assert any("put the module in a folder of sys.path" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("names", "pairs", "text"),
    [
        (["NVIDIA GeForce RTX 4090"] * 2, [(0, 1)], r"^Cards 0 and 1 \(NVIDIA GeForce RTX 4090\) cannot read .*'NCCL_P2P_DISABLE'\] = '1'"),
        (["NVIDIA GeForce RTX 3080"] * 3, [(0, 1), (0, 2), (1, 2)], r"\(NVIDIA GeForce RTX 3080\) and 2 more pairs cannot"),
        (
            ["NVIDIA GeForce RTX 4090"] * 2,
            [],
            r"^The driver says .* a NVIDIA GeForce RTX 4090 is not made for. If the first collective hangs",
        ),
        (["NVIDIA H100 80GB HBM3"] * 2, [], "^$"),
        (["NVIDIA GeForce RTX 4090"], [], "^$"),
    ],
)
def test_cards_without_peer_access_are_told(
    names: list[str], pairs: list[tuple[int, int]], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: names[i])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: (i, j) not in pairs)
    assert re.search(text, rank_module.p2p_note())
