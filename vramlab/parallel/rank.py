"""The processes that `launch` starts: the agent, which is torchrun's, and the ranks. Also how any process becomes a rank."""

from __future__ import annotations

import faulthandler
import importlib
import itertools
import json
import os
import pickle
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from vramlab.virtual.travel import name_of, pack_error, pickled

LAUNCHED = "VRAMLAB_LAUNCHED"  # in the environment of every rank that launch() started: the agent's process
KILLING = 5.0  # s: a killed process can take a moment to give back its memory
WATCH = 0.5  # s: how often a rank looks whether its agent is still there
TOLD_SIZE = 8  # bytes in front of each value that a rank tells: how many follow
MARGIN = 60.0  # s: the parent's timeout comes first, as it can show every rank's stack and a collective only its own
# -P keeps a user's json.py in the working directory from being taken for Python's own; then sys.path becomes the parent's.
BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from vramlab.parallel.rank import {0}; {0}(sys.argv[2:])"


def command(role: str, *arguments: str) -> list[str]:
    """What starts a Python process that runs the function ``role`` of this module, with the ``sys.path`` of this one."""
    path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
    return [sys.executable, "-P", "-c", BOOT.format(role), path, *arguments]


# The agent


def agent(arguments: list[str]) -> None:
    """Run torchrun until all ranks have ended or one has failed, and note how those that failed did.

    Args:
        arguments: the job's folder, the number of ranks.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    folder, ranks = arguments
    os.environ[LAUNCHED] = str(os.getpid())
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    # Port 0: the agent's store takes a free port and tells the ranks which, so that no other process can take it in between.
    options = ["--standalone", f"--nproc-per-node={ranks}", "--local-addr=localhost", "--max-restarts=0", f"--log-dir={folder}"]
    python, *rest = command("serve", folder)
    try:
        main([*options, "--no-python", python, *rest])
    except ChildFailedError as failed:
        write(Path(folder, "failures"), json.dumps({rank: failure.exitcode for rank, failure in failed.failures.items()}).encode())
        sys.exit(1)


def _end_with_parent(folder: str) -> None:
    """The parent holds the other end of stdin: when it has gone, whatever the reason, so do the ranks."""
    os.read(0, 1)
    end_processes(psutil.Process().children(recursive=True))
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def end_processes(processes: Sequence[psutil.Process]) -> None:
    """Kill processes, and wait until they are gone."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    deadline = time.monotonic() + KILLING
    while any(is_running(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.01)


def is_running(process: psutil.Process) -> bool:
    """Whether it has not ended; one that has can stay in the table, where containers have nobody to ask for it."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


# A rank


def serve(arguments: list[str]) -> None:
    """One rank: run the function, leave its result or its error in the folder. What ``BOOT`` runs under the agent."""
    folder, rank = Path(arguments[0]), int(os.environ["RANK"])
    del sys.argv[1:]
    threading.Thread(target=_end_with_agent, args=(int(os.environ[LAUNCHED]),), daemon=True).start()
    _redirect(folder, rank)
    write(folder / f"pid-{rank}", str(os.getpid()).encode())
    try:
        settings, call = pickle.loads((folder / "call").read_bytes())
        if settings["followed"]:
            _followed.append((folder, rank))
        with as_rank(settings["device"], settings["seed"], settings["timeout"]):
            try:
                result = _called(folder, rank, call)
                sys.stdout.flush()
                write(folder / f"result-{rank}", result)
            except BaseException as error:
                _leave(folder, rank, error)  # with the process group still there: its end would be the first that others hear
    except BaseException as error:
        _leave(folder, rank, error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # while Python ends in order, a thread of torch's that asks for its lock aborts the process, as after a hook of DDP's


def _called(folder: Path, rank: int, call: bytes) -> bytes:
    function, args, kwargs = load(call)
    write(folder / f"ready-{rank}", b"")
    return pack_result(function, function(*args, **kwargs))


# While the function goes on

_followed: list[tuple[Path, int]] = []  # the folder of the `follow` that started this process, and its rank


def tell(value: Any) -> bool:
    """Hand a value to the process that called `follow`, at once; False in a process that it did not start."""
    for folder, rank in _followed:
        data = pickled(value)
        append(folder / f"told-{rank}", len(data).to_bytes(TOLD_SIZE, "big") + data)
    return bool(_followed)


def is_last_round(number: int) -> bool:
    """Whether all ranks end after this round of their work, since the caller of `follow` wants that: all get the same answer.

    Rank 0 alone looks what the caller wants, and names the next round. A rank can end that one only after rank 0
    has begun it, so it finds the name there.

    Args:
        number: of the round. Each has a collective of all ranks.
    """
    for folder, rank in _followed:
        last = folder / "last"
        if rank == 0 and (folder / "stop").exists() and not last.exists():
            write(last, str(number + 1).encode())
        return last.exists() and number >= int(last.read_bytes())
    return False


def _leave(folder: Path, rank: int, error: BaseException) -> None:
    """Hand the error over and go at once: ending Python in order can wait for ranks that wait for this one."""
    moment = time.time()
    with suppress(Exception):
        sys.stdout.flush()
    write(folder / f"error-{rank}", pickle.dumps((moment, pack_error(_from_user_on(error)))))
    os._exit(1)


def _from_user_on(error: BaseException) -> BaseException:
    """The error without this module's frames at the start of its traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return error.with_traceback(trace)


def _end_with_agent(agent: int) -> None:
    while os.getppid() == agent:
        time.sleep(WATCH)
    os._exit(1)


def _redirect(folder: Path, rank: int) -> None:
    """Everything the rank writes goes to its files, past Python too; a signal writes where it is; nobody types into it."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(folder / f"{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    streams: Any = (sys.stdout, sys.stderr)
    for stream in streams:
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    faulthandler.enable(sys.stderr)
    if hasattr(faulthandler, "register"):  # not on Windows
        faulthandler.register(signal.SIGUSR1, file=_kept_open(folder / f"stack-{rank}"), all_threads=True)


def _kept_open(path: Path) -> Any:
    file = open(path, "w", encoding="utf-8")  # noqa: SIM115  # for as long as the process lives
    _open_files.append(file)
    return file


_open_files: list[Any] = []


def write(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all."""
    half = path.with_name(f"{path.name}.half")
    half.write_bytes(data)
    half.replace(path)


def append(path: Path, data: bytes) -> None:
    """Add to a file all of this or, if the disk is full, say, nothing: the next would follow on half of it."""
    file = open(path, "ab")  # noqa: SIM115  # closing it writes too, and may fail
    length = file.tell()
    try:
        with file:
            file.write(data)
    except BaseException:
        os.truncate(path, length)
        raise


def load(call: bytes) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Function and arguments, with what to do when they cannot be loaded."""
    importlib.invalidate_caches()
    try:
        loaded: tuple[Any, tuple[Any, ...], dict[str, Any]] = pickle.loads(call)
        return loaded
    except (ImportError, AttributeError) as error:
        error.add_note(
            "A rank could not load the function. It imports what is defined in a module: put the module in a folder of sys.path, "
            "define the function in the notebook or script, or see cloudpickle.register_pickle_by_value()."
        )
        raise


def pack_result(function: Any, result: Any) -> bytes:
    """A rank's result as bytes. Tensors on a card come back on the CPU: the caller may have no card, or not that one.

    Raises:
        TypeError: it cannot be pickled.
    """
    try:
        return pickled(tree_map_only(torch.Tensor, _to_cpu, result))
    except Exception as error:
        kind = f"{type(result).__module__}.{type(result).__qualname__}"
        raise TypeError(
            f"{name_of(function)} gave a {kind}, which cannot be pickled to leave its rank: {error}. Return numbers, text, arrays, traces."
        ) from error


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu() if tensor.is_cuda else tensor


# Becoming a rank


@contextmanager
def as_rank(device: str, seed: int, timeout: float | None) -> Iterator[None]:
    """Around a rank's work: the process group, the rank's own card, device "auto", and seed.

    A group that is there already is used, and stays.
    """
    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    name = f"cuda:{local}" if device == "cuda" else device
    before = os.environ.get("VRAMLAB_DEVICE")
    os.environ["VRAMLAB_DEVICE"] = name
    try:
        if device == "cuda":
            torch.cuda.set_device(local)
            if rank == 0 and (note := p2p_note()):
                print(note, file=sys.stderr)
        sow(seed + rank)
        with _process_group(device, timeout):
            yield
    finally:
        if before is None:
            del os.environ["VRAMLAB_DEVICE"]
        else:
            os.environ["VRAMLAB_DEVICE"] = before


def sow(seed: int) -> None:
    """Seed the generators of torch, NumPy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextmanager
def _process_group(device: str, timeout: float | None) -> Iterator[None]:
    if dist.is_initialized():
        yield
        return
    # gloo beside nccl: counts and Python objects travel between the hosts without waiting for the cards.
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    limit = None if timeout is None else timedelta(seconds=timeout + MARGIN)
    store = dist.PrefixStore(f"launch {next(_groups)}", _store())
    dist.init_process_group(backend, store=store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]), timeout=limit)
    try:
        yield
    except BaseException:
        # The others may be in a collective, and an orderly end would wait for them.
        abort = getattr(dist.distributed_c10d, "_abort_process_group", dist.destroy_process_group)
        with suppress(Exception):
            abort() if device == "cuda" else dist.destroy_process_group()
        raise
    dist.destroy_process_group()


_groups = itertools.count(1)  # a second group must not find the first one's addresses in the store
_stores: list[Any] = []


def _store() -> Any:
    """torchrun's store; one for the life of the process, as the first rank may have to host it."""
    if not _stores:
        _stores.append(next(iter(dist.rendezvous("env://")))[0])
    return _stores[0]


def p2p_note() -> str:
    """What to know about the traffic between this machine's cards; empty where they read one another's memory."""
    count = torch.cuda.device_count()
    names = [torch.cuda.get_device_name(i) for i in range(count)]
    pairs = [(i, j) for i, j in itertools.combinations(range(count), 2) if not torch.cuda.can_device_access_peer(i, j)]
    return _p2p_text(names, pairs)


def _p2p_text(names: Sequence[str], pairs: Sequence[tuple[int, int]]) -> str:
    """The note for these cards, and these pairs without access to one another.

    The hang is NVIDIA/nccl-tests issue 117: some drivers claim access between GeForce RTX 40 cards, which have none.
    """
    advice = "If the first collective hangs, set os.environ['NCCL_P2P_DISABLE'] = '1' before launch()."
    if pairs:
        (i, j), more = pairs[0], f" and {len(pairs) - 1} more pairs" if len(pairs) > 1 else ""
        return f"Cards {i} and {j} ({names[i]}){more} cannot read one another's memory: traffic passes through host memory. {advice}"
    if len(names) > 1 and (ada := next((name for name in names if "GeForce RTX 40" in name), None)):
        return f"The driver says that these cards read one another's memory, which a {ada} is not made for. {advice}"
    return ""
