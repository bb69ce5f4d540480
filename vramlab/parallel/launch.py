"""launch(): run a function in several ranks, from a notebook cell, a script, or under torchrun."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist

from vramlab.devices import choose_device
from vramlab.interrupts import deferred_interrupt
from vramlab.parallel.rank import LAUNCHED, TOLD_SIZE, as_rank, command, end_processes, is_running, pack_result, write
from vramlab.virtual.travel import cause_of_death, name_of, pickled, revive

T = TypeVar("T")
TICK = 0.05  # s: how often the ranks' output and files are looked at
STARTING = 180.0  # s: what starting takes at most: two imports of torch one after the other, from a slow disk
GRACE = 5.0  # s: what ranks that have handed over their results get to end by themselves
AFTERMATH = 3.0  # s: what the agent gets, after a failure, to say how the ranks ended
SHOWN_LINES = 25  # of what a rank or a stack says
# What gloo and NCCL say in a rank when another one has gone: not the cause of a failure.
CONSEQUENCE = re.compile(r"connection (was )?(closed|reset)|broken pipe|remote process|communicator was aborted|socket", re.IGNORECASE)


class LaunchError(RuntimeError):
    """The ranks did not start, hung, or one was ended; the message says which, where it was, and what to do."""


def launch(
    function: Callable[..., T],
    *args: Any,
    ranks: int = 2,
    device: str = "auto",
    timeout: float | None = 600.0,
    seed: int = 0,
    **kwargs: Any,
) -> list[T]:
    """Call ``function(*args, **kwargs)`` in several ranks at once, each a process of its own, and return what each gave.

        def work(x):
            total = torch.tensor([x * (dist.get_rank() + 1)])
            dist.all_reduce(total)
            return total.item()

        vl.parallel.launch(work, 10, ranks=2)  # [30, 30]

    The function, and what it refers to, may be defined in a notebook cell: it travels by cloudpickle to fresh processes
    that torchrun's agent starts, so that a CUDA context or threads of this process are not in the way. There the process
    group is ready: gloo on the CPU; on CUDA nccl, with gloo beside it for tensors on the CPU. Each rank has its card as
    the current one and as device "auto", the seed ``seed + rank``, and one OpenMP thread unless OMP_NUM_THREADS says
    otherwise. What it prints appears here with its number in front. The first error, a rank that dies, the timeout,
    Ctrl-C, and the end of this process end all ranks.

    In a process that torchrun started the function runs in that rank, and ``ranks`` is what torchrun says; every rank
    gets the list of all results. So a script that calls ``launch`` runs unchanged on two machines:

        torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-id=1 --rdzv-endpoint=HOST1:29500 script.py

    Args:
        function: what each rank runs. ``torch.distributed.get_rank()`` tells the ranks apart.
        args, kwargs: its arguments, the same for all ranks.
        ranks: how many; on CUDA at most one a card.
        device: "cpu", "cuda", or "auto": CUDA if there are cards enough, unless VRAMLAB_DEVICE names another.
        timeout: seconds the function may take, without the start of the processes; None: no limit. Then Python's stack in each
            rank is shown. Under torchrun it limits each collective, and None leaves PyTorch's own limit.
        seed: of torch, NumPy and random in rank 0. Weights that all ranks shall share come from rank 0 (`ddp` does that),
            or from ``torch.manual_seed`` in the function.

    Returns:
        The results in the order of the ranks; tensors on the CPU.

    Raises:
        Exception: what the first rank that failed raised, with its attributes and cause; its traceback is the last cause.
        LaunchError: a rank was ended or ended itself, the time is over, or the processes did not start.
        TypeError: the function, an argument or a result cannot be pickled.
        ValueError: ``ranks`` below 1 or above the number of CUDA devices, an unknown device, a timeout that is not positive.
        RuntimeError: launch() inside a rank of launch().
    """
    return _launch(function, args, kwargs, ranks, device, timeout, seed)[0]


def follow(
    function: Callable[..., T], *args: Any, heard: Callable[[int, Any], None], ranks: int, device: str, seed: int
) -> tuple[list[T], bool]:
    """`launch` without a timeout, and hear meanwhile what the ranks `tell`.

    The first Ctrl-C asks them to end after a round of their work (see `is_last_round`), and before they have all begun
    ends them; a second one ends them at once. Under torchrun all that is left to torchrun.

    Args:
        heard: called here with a rank's number and a value; twice with the same one if Ctrl-C comes in between.

    Returns:
        The results, and whether the ranks were asked to end.

    Raises:
        KeyboardInterrupt: the ranks were ended.
        Exception: what `launch` raises.
    """
    return _launch(function, args, {}, ranks, device, None, seed, heard)


def _launch(
    function: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    ranks: int,
    device: str,
    timeout: float | None,
    seed: int,
    heard: Callable[[int, Any], None] | None = None,
) -> tuple[list[T], bool]:
    _check(function, ranks, timeout)
    if _under_torchrun(ranks):
        return _run_as_rank(function, args, kwargs, device, timeout, seed), False
    kind = _device_type(device, ranks)
    try:
        call = pickled((function, args, kwargs))
    except Exception as error:
        raise TypeError(
            f"{name_of(function)} and its arguments travel to the ranks, and one of them cannot be pickled: {error}. "
            "Make what cannot travel (an open file, a lock, a generator, a process group) inside the function."
        ) from error
    settings = {"device": kind, "seed": seed, "timeout": timeout, "followed": heard is not None}
    with deferred_interrupt(first_waits=heard is not None) as interrupted:
        # A key held down sends Ctrl-C 30 times a second: none may fall between a start and the promise of an end, nor into the end.
        interrupted.held = True
        with tempfile.TemporaryDirectory(prefix="vramlab-", ignore_cleanup_errors=True) as folder:
            write(Path(folder, "call"), pickle.dumps((settings, call)))
            with _Job(Path(folder), ranks, kind, name_of(function), heard, interrupted) as job:
                try:
                    interrupted.held = False
                    if heard is None:
                        interrupted.pass_on()
                    results = job.results(timeout)
                finally:
                    interrupted.held = True
    if heard is None:
        interrupted.pass_on()
    return results, bool(interrupted)


def _check(function: Any, ranks: Any, timeout: Any) -> None:
    if not callable(function):
        raise TypeError(f"launch() needs a function, got {type(function).__name__}; write launch(work, 10), not launch(work(10)).")
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks is a whole number of at least 1, got {ranks!r}; 2 is enough to try something out.")
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < float("inf")):
        raise ValueError(f"timeout is a positive number of seconds, or None for no limit, got {timeout!r}.")
    if not dist.is_available():
        raise RuntimeError(f"Ranks need torch.distributed, and torch {torch.__version__} here is built without; install another build.")
    if LAUNCHED in os.environ or _running:
        raise RuntimeError(
            f"launch() starts ranks, and this is rank {os.environ.get('RANK')} of a launch already; call the function itself here, "
            "or give the outer launch() more ranks."
        )


def _under_torchrun(ranks: int) -> bool:
    """Whether this process is a rank: of torchrun, or of another launcher that set the same variables."""
    told = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name in os.environ]
    if "RANK" not in told:
        return False
    if dist.is_torchelastic_launched() or (len(told) == 4 and os.environ["WORLD_SIZE"] == str(ranks)):
        return True
    shown = ", ".join(f"{name}={os.environ[name]}" for name in told)
    raise ValueError(
        f"RANK says that this process is one of {ranks} ranks already, and it was not torchrun that set it: {shown}. Start with torchrun, "
        "set all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or remove what an earlier cell has set: del os.environ['RANK']."
    )


def settled(device: str, ranks: int) -> str:
    """The device of so many ranks: of "auto" the one that they get, with a warning if that is for want of cards.

    Under torchrun "auto" stays, as each machine has some of the ranks.
    """
    return device if device != "auto" or "RANK" in os.environ else _device_type(device, ranks, depth=5)


def _device_type(device: str, ranks: int, depth: int = 4) -> str:
    """ "cpu" or "cuda" for this many ranks. ``depth``: how many calls further out a warning belongs."""
    chosen = choose_device(device)
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"Ranks run on 'cpu' and 'cuda', got {device!r}; plan() is for virtual cards.")
    if chosen.index is not None and chosen.type == "cuda":
        raise ValueError(f"Ranks take the cards from 0 on, got {str(chosen)!r}; set device='cuda', and CUDA_VISIBLE_DEVICES to choose.")
    if chosen.type == "cuda" and ranks > torch.cuda.device_count():
        shortage = f"{ranks} ranks need {ranks} CUDA devices, one each, and there are {torch.cuda.device_count()}"
        if str(device) != "auto":
            raise ValueError(f"{shortage}. Set ranks={torch.cuda.device_count()}, or device='cpu' to try it out.")
        warnings.warn(f"{shortage}: they run on the CPU. Give device='cpu' to say that this is meant.", stacklevel=depth)
        return "cpu"
    return chosen.type


# In a process that torchrun started

_running: list[bool] = []


def _run_as_rank(function: Callable[..., T], args: Any, kwargs: dict[str, Any], device: str, timeout: float | None, seed: int) -> list[T]:
    kind = _device_type(device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    _running.append(True)
    try:
        with as_rank(kind, seed, timeout):
            mine = pack_result(function, function(*args, **kwargs))
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, mine)
            return [pickle.loads(result) for result in everyone]
    finally:
        _running.pop()


# In any other process


class _Job:
    """The agent and its ranks as seen by the process that called launch(); leaving the block ends them all."""

    def __init__(
        self,
        folder: Path,
        ranks: int,
        kind: str,
        name: str,
        heard: Callable[[int, Any], None] | None = None,
        interrupted: Sequence[int] = (),
    ) -> None:
        self._folder, self._ranks, self._kind, self._name = folder, range(ranks), kind, name
        self._heard, self._interrupted = heard, interrupted
        self._told = [_Told(folder, rank) for rank in self._ranks]
        self._outputs = [_Output(folder, rank, stream) for rank in self._ranks for stream in ("stdout", "stderr")]
        with open(folder / "agent", "wb") as log:
            self._agent = subprocess.Popen(
                command("agent", str(folder), str(ranks)),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=_environment(),
                **_own_group(),
            )

    def __enter__(self) -> _Job:
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self._stop()
        finally:
            self._forward(last=True)

    def results(self, timeout: float | None) -> list[Any]:
        """Wait for all ranks' results and pass on meanwhile what they print."""
        began, running = time.monotonic(), False
        while len(self._there("result")) < len(self._ranks):
            self._forward()
            if self._there("error") or self._agent.poll() is not None:
                raise self._failure()
            if not running and len(self._there("ready")) == len(self._ranks):
                began, running = time.monotonic(), True
            self._heed(running)
            limit = timeout if running else STARTING
            if limit is not None and time.monotonic() - began > limit:
                raise self._hang(limit, running)
            time.sleep(TICK)
        self._wait(GRACE, lambda: not self._alive())
        return [self._unpacked(rank) for rank in self._ranks]

    def _heed(self, running: bool) -> None:
        """After a Ctrl-C let the ranks end together, if they have begun."""
        stop = self._folder / "stop"
        if self._interrupted and not stop.exists():
            if not running:
                raise KeyboardInterrupt
            write(stop, b"")

    def _unpacked(self, rank: int) -> Any:
        try:
            return pickle.loads(self._file("result", rank).read_bytes())
        except Exception as error:
            raise TypeError(
                f"The result of {self._name} in rank {rank} cannot be unpickled here: {error}. "
                "Return numbers, text, arrays, or objects of modules that can be imported here."
            ) from error

    def _file(self, kind: str, rank: int) -> Path:
        return self._folder / f"{kind}-{rank}"

    def _there(self, kind: str) -> list[int]:
        return [rank for rank in self._ranks if self._file(kind, rank).exists()]

    def _forward(self, last: bool = False) -> None:
        for output in self._outputs:
            output.forward(last)
        if self._heard is not None:
            for rank, told in enumerate(self._told):
                for value in told.values():
                    self._heard(rank, value)

    def _wait(self, seconds: float, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while not until() and time.monotonic() < deadline:
            self._forward()
            time.sleep(TICK)

    def _alive(self) -> dict[int, psutil.Process]:
        """The ranks' processes that have not ended."""
        found = {}
        for rank in self._there("pid"):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(int(self._file("pid", rank).read_bytes()))
                # Its number may have gone to another process since.
                if is_running(process) and str(self._folder) in process.cmdline():
                    found[rank] = process
        return found

    # How it can go wrong

    def _failure(self) -> BaseException:
        """The error that came first; one that only says that another rank has gone gives way to what ended that one."""
        errors, first = self._errors()
        if first is None or CONSEQUENCE.search(str(revive(errors[first][1]))):
            self._wait(AFTERMATH, lambda: self._agent.poll() is not None)  # it says which ranks ended without a word
            errors, first = self._errors()
        gone = self._ended_without_word(set(errors))
        if first is None:
            return LaunchError(self._obituary(gone))
        error = revive(errors[first][1])
        if gone and CONSEQUENCE.search(str(error)):
            death = LaunchError(self._obituary(gone))
            death.__cause__ = error
            return death
        if isinstance(error, SystemExit | GeneratorExit | StopIteration):  # raised here they would mean something else
            left = LaunchError(f"{type(error).__name__}({error}) ended rank {first} of {len(self._ranks)} in {self._name}; return instead.")
            left.__cause__ = error
            return left
        error.add_note(f"Raised in rank {first} of {len(self._ranks)}; the other ranks were stopped.")
        if (returned := self._there("result")) and CONSEQUENCE.search(str(error)):
            error.add_note(
                f"Rank {', '.join(map(str, returned))} had returned by then: all ranks call the same collectives, equally often."
            )
        return error

    def _errors(self) -> tuple[dict[int, tuple[float, bytes]], int | None]:
        """Each failed rank's moment and packed error, and which came first."""
        errors = {rank: pickle.loads(self._file("error", rank).read_bytes()) for rank in self._there("error")}
        return errors, min(errors, key=lambda rank: errors[rank][0], default=None)

    def _ended_without_word(self, told: set[int]) -> dict[int, int]:
        """Ranks that left neither result nor error, by themselves or by a signal, with exit codes; not those torchrun stopped."""
        failures = self._folder / "failures"
        codes = {int(rank): code for rank, code in json.loads(failures.read_bytes()).items()} if failures.exists() else {}
        if not codes and self._agent.poll() is None:
            return {}  # it has not said yet
        silent = [rank for rank in self._there("pid") if rank not in told and not self._file("result", rank).exists()]
        return {rank: codes.get(rank, 0) for rank in silent if codes.get(rank, 0) != -signal.SIGTERM}

    def _obituary(self, gone: dict[int, int]) -> str:
        if not gone:
            return (
                f"The ranks of {self._name} could not start: torchrun's agent ended with exit code {self._agent.poll()}. "
                f"Its last lines:{_shown(_text(self._folder / 'agent'))}"
            )
        rank, code = next(iter(gone.items()))
        what, remedy = cause_of_death(
            code,
            (" and without a result", "Something in it ends the process: return instead."),
            memory="take fewer ranks or less memory in each",
            again="launch again",
        )
        lines = _shown(_text(self._file("stderr", rank)))
        return f"Rank {rank} of {len(self._ranks)} {what} while it ran {self._name}. {remedy} Its last lines:{lines}"

    def _hang(self, limit: float, running: bool) -> LaunchError:
        """What to say at the timeout; asks each rank for its Python stack."""
        stacks = self._stacks()
        waiting = [rank for rank in self._ranks if not self._file("result", rank).exists()]
        ended = "".join(f" Rank {rank} has ended." for rank in self._there("result"))
        if not running:
            said = _shown(_text(self._folder / "agent"))
            text = f"The ranks of {self._name} did not start in {limit:g} s. Is the machine busy? torchrun's last lines:{said}"
        else:
            text = (
                f"{self._name} took longer than its timeout of {limit:g} s in rank {', '.join(map(str, waiting))}, and all ranks were "
                f"stopped.{ended} If the ranks stand at different collectives, each waits for the others: every rank calls the same ones "
                "in the same order. If they just need longer: launch(..., timeout=None)."
            )
            if self._kind == "cuda":
                text += " If they stand at their first one: os.environ['NCCL_P2P_DISABLE'] = '1' before launch()."
        return LaunchError(text + "".join(f"\nRank {rank} was at:{stack}" for rank, stack in stacks.items()))

    def _stacks(self) -> dict[int, str]:
        if not hasattr(signal, "SIGUSR1"):  # Windows
            return {}
        alive = self._alive()
        for process in alive.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)  # each handler writes at once, whatever the rank is doing
        texts = {rank: _text(self._file("stack", rank)) for rank in alive}
        return {rank: _main_stack(text) for rank, text in texts.items() if text}

    def _stop(self) -> None:
        """End the agent first, so that it starts nothing any more, then all that it has started."""
        try:
            processes = psutil.Process(self._agent.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            processes = []
        for process in self._alive().values():  # one that outlived the agent is nobody's child
            with contextlib.suppress(psutil.NoSuchProcess):
                processes += [other for other in (process, *process.children(recursive=True)) if other not in processes]
        self._agent.kill()
        end_processes(processes)
        self._agent.wait()
        if self._agent.stdin is not None:
            self._agent.stdin.close()


class _Output:
    """What a rank writes to one of its streams: new lines are passed on with the rank's number in front."""

    def __init__(self, folder: Path, rank: int, stream: str) -> None:
        self._path, self._label, self._stream = folder / f"{stream}-{rank}", f"[rank {rank}] ", stream
        self._position = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def forward(self, last: bool = False) -> None:
        """Pass on whole lines; at last also one without an end."""
        if not self._path.exists():
            return
        with open(self._path, "rb") as file:
            file.seek(self._position)
            data = file.read()
        self._position += len(data)
        *lines, self._rest = re.split(r"(?<=[\n\r])(?<!\r(?=\n))", self._rest + self._decoder.decode(data))
        if last and self._rest:
            lines, self._rest = [*lines, self._rest + "\n"], ""
        stream = getattr(sys, self._stream)
        if lines and stream is not None:
            with contextlib.suppress(ValueError, OSError):  # it is closed
                stream.write("".join(self._label + line for line in lines))
                stream.flush()


class _Told:
    """What a rank tells: whole values alone, as it may have been ended in the middle of one."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path, self._position = folder / f"told-{rank}", 0

    def values(self) -> Iterator[Any]:
        """Those that are new."""
        if not self._path.exists():
            return
        with open(self._path, "rb") as file:  # closed before anybody listens: on Windows an open file stays in its folder
            file.seek(self._position)
            data = memoryview(file.read())
        while len(data) >= TOLD_SIZE:
            end = TOLD_SIZE + int.from_bytes(data[:TOLD_SIZE], "big")
            if len(data) < end:
                return
            yield pickle.loads(data[TOLD_SIZE:end])
            self._position += end  # after it: better heard twice than never, if Ctrl-C comes here
            data = data[end:]


def _environment() -> dict[str, str]:
    """The ranks' environment: this one's, without what would change torchrun's options, and with one thread a rank."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "TORCHELASTIC_"))}
    # Else gloo asks for the host's name, which laptops on a VPN and containers do not always find.
    interface = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    local = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    return {"OMP_NUM_THREADS": "1", **local, **kept}


def _own_group() -> dict[str, Any]:
    """Options of Popen that keep the terminal's and the notebook's Ctrl-C from the agent: this process decides."""
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"start_new_session": True}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _shown(text: str) -> str:
    lines = [line[:200] for line in text.splitlines() if line.strip()][-SHOWN_LINES:]
    return "".join(f"\n    {line}" for line in lines) or " nothing."


def _main_stack(report: str) -> str:
    """Of faulthandler's report the main thread's frames, without those that every rank has below its function."""
    frames: list[str] = []
    for line in report.splitlines():
        frames = [] if "(most recent call first)" in line else [*frames, line]  # the last thread reported is the main one
    own = os.path.join(os.path.dirname(__file__), "rank.py")
    return _shown("\n".join(line for line in frames if f'"{own}"' not in line and '"<string>"' not in line))
