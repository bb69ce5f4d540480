"""Judge the planned bytes: each row runs on PyTorch's own host code and on a virtual card, and what both allocate is compared.

    python benchmarks/judge/run.py                 all rows; writes benchmarks/results/judge.json
    python benchmarks/judge/run.py --only llama    those whose id contains a text; writes nothing
    python benchmarks/judge/run.py --only llama --events    and the first allocation that differs

The judge is PyTorch's own C++ (dispatcher, CUDA autocast, the choice of attention kernels, autograd's device thread, the caching
allocator) over a CUDA runtime that gives out addresses and starts no kernels (shim.c), and a cuBLAS that multiplies nothing
(blas.c). So *which* memory is asked for *when*, and what the allocator makes of it, is not a model of PyTorch: it is PyTorch.
Of training steps the peaks are compared; of FSDP's copies (exchange.py), whose tables no peak shows, every allocation.

Its limits: what happens below the runtime is not there. Convolutions and recurrent layers (cuDNN plans them with a driver), cuDNN's
attention, cuSOLVER, compiled kernels (triton, NVRTC). Values are zeros, so what depends on values is left out. The driver's
addresses: each new segment lies above all earlier ones, as the virtual allocator has it; on a card, which of two equally good
blocks is taken may differ. The occupancy of kernels, on which some of cub's scratch depends, is taken as two blocks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import build
import rows

HERE = Path(__file__).parent
Row = dict[str, Any]


def ask(side: str, wanted: list[Row], environment: dict[str, str], events: bool) -> dict[str, Row]:
    """What one side answers to the rows, by id."""
    command = [sys.executable, str(HERE / "steps.py"), side, *(["--events"] if events else [])]
    text = "".join(json.dumps(row) + "\n" for row in wanted)
    done = subprocess.run(command, input=text, capture_output=True, text=True, env=environment, cwd=HERE.parents[1], check=False)
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
    return {answer["id"]: answer for answer in answers}


def compared(wanted: list[Row], events: bool) -> Iterator[Row]:
    """Each row with what both sides say."""
    plain = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with ThreadPoolExecutor() as pool:
        judge = pool.submit(ask, "real", wanted, build.environment(build.build()), events)
        virtual = ask("virtual", wanted, plain, events)
        real = judge.result()
    nothing = {"error": "no answer"}
    for row in wanted:
        yield row | {"real": real.get(row["id"], nothing), "virtual": virtual.get(row["id"], nothing)}


def differences(row: Row) -> list[int] | None:
    """Greatest difference, planned minus judged, of allocated, reserved, and allocated between steps; None if a side failed."""
    if "error" in row["real"] or "error" in row["virtual"]:
        return None
    pairs = zip(row["virtual"]["steps"], row["real"]["steps"], strict=True)
    by_step = [[planned - judged for planned, judged in zip(one, other, strict=True)] for one, other in pairs]
    return [max(column, key=abs) for column in zip(*by_step, strict=True)]


def asked(side: Row) -> list[int]:
    """Bytes asked for and, negative, given back, in order."""
    return [nbytes for nbytes, _ in ordered(side["events"])]


def equal_in_every_allocation(row: Row) -> bool:
    return differences(row) is not None and asked(row["real"]) == asked(row["virtual"])


def show(row: Row, events: bool) -> None:
    found = differences(row)
    if found is None:
        for side in ("real", "virtual"):
            if "error" in row[side]:
                print(f"FAILED {row['id']}: {side}: {row[side]['error'][:300]}")
    elif any(found):
        print(f"DIFFERS {row['id']}: allocated {found[0]:+,}, reserved {found[1]:+,}, between steps {found[2]:+,} bytes")
    elif "types" in row and not equal_in_every_allocation(row):
        print(f"DIFFERS {row['id']}: {first_difference(row['real']['events'], row['virtual']['events'])}")
    if events and found is not None:
        print("       ", first_difference(row["real"]["events"], row["virtual"]["events"]))


def first_difference(real: list[Any], virtual: list[Any]) -> str:
    """The first allocation that differs; the order among releases that follow one another does not count."""
    one, other = ordered(real), ordered(virtual)
    for i, (a, b) in enumerate(itertools.zip_longest(one, other, fillvalue=[0, "the end"])):
        if a[0] != b[0]:
            return f"event {i}: judged {a[0]:+,} ({a[1]}), planned {b[0]:+,} ({b[1]})"
    return f"all {len(one)} events are equal"


def ordered(events: list[Any]) -> list[Any]:
    """Events with the releases that follow one another sorted."""
    groups = itertools.groupby(events, key=lambda event: event[0] > 0)
    return [event for grows, group in groups for event in (group if grows else sorted(group, key=lambda event: event[0]))]


def fact(row: Row) -> Row:
    """What is kept of a row: what was run and what the real allocator counted."""
    keys = ("id", "card", "task", "recipe", "rank", "model", "options", "ranks", "types")
    steps = row["real"]["steps"]
    kept = {key: row[key] for key in keys if key in row}
    if "types" in row:
        return kept | {"asked": " ".join(map(str, asked(row["real"])))}
    return kept | {"allocated": [s[0] for s in steps], "reserved": [s[1] for s in steps], "between": [s[2] for s in steps]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose id contains this text")
    parser.add_argument("--events", action="store_true", help="show the first allocation that differs")
    options = parser.parse_args()
    wanted = [row for row in (*rows.rows(), *rows.exchanges()) if options.only in row["id"]]
    results = list(compared(wanted, options.events))
    for row in results:
        show(row, options.events)
    judged = [(row, found) for row in results if (found := differences(row)) is not None]
    steps = [(row, found) for row, found in judged if "types" not in row]
    copies = [row for row, _ in judged if "types" in row]
    summary = {
        "rows": len(steps),
        "equal in allocated": sum(found[0] == 0 for _, found in steps),
        "equal in reserved": sum(found[1] == 0 for _, found in steps),
        "failed": len(results) - len(judged),
        "exchanges": len(copies),
        "equal in every allocation": sum(map(equal_in_every_allocation, copies)),
    }
    print(summary)
    if not options.only:
        import transformers

        sys.path.append(str(HERE.parent))
        import measure

        report = {"transformers": transformers.__version__, "summary": summary}
        measure.write("judge", report | {"rows": [fact(row) for row, _ in steps], "exchanges": [fact(row) for row in copies]})


if __name__ == "__main__":
    main()
