"""The virtual GPU against what others measured on real ones, and other estimators beside it.

python benchmarks/accuracy.py [--only TEXT] [--python VERSION=PATH] [--rivals] [--merge]

Runs every row of ground_truth.json on a virtual card (see workloads.py), prints a table by source and by model, and writes
benchmarks/results/accuracy.json. Libraries write the same model differently from version to version, so rows name the
transformers that they ran with or the nearest that installs, and need an interpreter that has it; others are skipped:

for v in 4.51.3 4.46.3 4.44.2; do python -m venv envs/$v && envs/$v/bin/pip install -e '.[models]' transformers==$v; done
python benchmarks/accuracy.py $(for v in 4.51.3 4.46.3 4.44.2; do echo --python $v=envs/$v/bin/python; done)
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import measure

FACTS = Path(__file__).parent / "ground_truth.json"
UNLIMITED = 1 << 42  # bytes of a card that nothing fills
Row = dict[str, Any]


# In the worker: one row after another


class OnCard:
    """A `workloads.Place` on a virtual card. ``requested`` counts what was asked for, not the blocks that were handed out."""

    def __init__(self, gpu: Any, requested: bool) -> None:
        self.gpu, self.device, self.requested = gpu, gpu.device, requested
        self._sizes: dict[Any, int] = {}
        self._now = self._peak = 0
        if requested:
            self._count(gpu.allocators[0])

    def _count(self, allocator: Any) -> None:
        malloc, free, move = allocator.malloc, allocator.free, allocator.move

        def counted_malloc(handle: Any, nbytes: int, *stream: Any) -> None:
            malloc(handle, nbytes, *stream)
            self._sizes[handle] = nbytes
            self._now += nbytes
            self._peak = max(self._peak, self._now)

        def counted_free(handle: Any) -> None:
            free(handle)
            self._now -= self._sizes.pop(handle, 0)

        def counted_move(old: Any, new: Any) -> None:
            move(old, new)
            if old in self._sizes:
                self._sizes[new] = self._sizes.pop(old)

        allocator.malloc, allocator.free, allocator.move = counted_malloc, counted_free, counted_move

    def building(self) -> Any:
        return self.gpu.building()

    def allocated(self) -> int:
        return self._now if self.requested else self.gpu.allocated

    def peak(self) -> int:
        return self._peak if self.requested else self.gpu.peak_allocated

    def reset(self) -> None:
        self._peak = self._now
        self.gpu.allocators[0].peak_allocated = self.gpu.allocated


def run(row: Row, memory: int | None) -> dict[str, Any]:
    """One row on its card, with ``memory`` bytes if given: the bytes that it measures, or that they do not fit."""
    import torch
    import workloads

    from vramlab.gpus import gpu as card
    from vramlab.virtual.device import virtual_gpu

    chosen = card(row["card"])
    workload = workloads.WORKLOADS[row["workload"]]
    started = time.perf_counter()
    with virtual_gpu(chosen.with_(memory=memory) if memory else chosen) as gpu:
        place = OnCard(gpu, row["quantity"] == "requested")
        try:
            with place.building():
                model = workload.model(**row["options"])
            parameters = sum(p.numel() for p in model.parameters())
            read = workload.steps(place, model.to(gpu.device), **row["options"])
        except torch.OutOfMemoryError:
            return {"fits": False, "seconds": time.perf_counter() - started}
    peak = gpu.peak_reserved if row["quantity"] == "reserved" else place.peak()
    return {"fits": True, "predicted": peak if read is None else read, "parameters": parameters, "seconds": time.perf_counter() - started}


def plan(row: Row) -> dict[str, Any]:
    """What the virtual card says: whether it fits, where the card's memory is known, and the bytes even if it does not."""
    if row["memory"] is None:
        return run(row, UNLIMITED)
    found = run(row, row["memory"])
    if not found["fits"] and not row["out_of_memory"]:
        found = run(row, UNLIMITED) | {"fits": False}
    return found


def work(rivals: bool) -> None:
    """Ids of rows on stdin; a line of JSON for each on stdout."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    known = {row["id"]: row for row in json.loads(FACTS.read_text())["rows"]}
    for line in sys.stdin:
        row = known[line.strip()]
        try:
            found = plan(row)
        except Exception as error:  # a row that cannot be run is listed with its error
            found = {"error": f"{type(error).__name__}: {error}"[:400]}
        if rivals and row["table"].startswith("xMem"):
            from rivals import estimates

            found["others"] = dict(estimates(row))
        print(json.dumps({"id": row["id"], **found}), flush=True)


# In the parent: rows to interpreters, results to tables


def ask(python: str, rows: list[Row], rivals: bool) -> Iterator[dict[str, Any]]:
    """Results of the rows from worker processes; the row at which one dies is told, and the next goes on after it."""
    left = list(rows)
    while left:
        command = [python, __file__, "--worker", *(["--rivals"] if rivals else [])]
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True) as worker,
        ):
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.stdin.write("".join(f"{row['id']}\n" for row in left))
            worker.stdin.close()
            for line in worker.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
                    left.pop(0)
            worker.wait()
            errors.seek(0)
            said = errors.read().strip().splitlines()
        if left:
            word = said[-1] if said else "without a word"
            yield {"id": left.pop(0)["id"], "error": f"the process ended with {worker.returncode}: {word}"[:400]}


def interpreters(rows: list[Row], own: str, others: dict[str, str]) -> tuple[dict[str, list[Row]], dict[str, str]]:
    """Rows by the interpreter that runs them, and those that none can, with the reason.

    Args:
        rows: what to run.
        own: the interpreter for rows that need no certain transformers.
        others: interpreters by the version of transformers that they have.
    """
    by_python: dict[str, list[Row]] = defaultdict(list)
    skipped = {}
    for row in rows:
        version = row["transformers"]
        python = own if version is None else others.get(version)
        if python is None:
            skipped[row["id"]] = f"needs transformers {version}: give --python {version}=PATH"
        else:
            by_python[python].append(row)
    return by_python, skipped


def scored(row: Row, found: dict[str, Any]) -> dict[str, Any]:
    """A row's facts and what was found, with its error; of a run that ran out of memory the verdict alone counts."""
    result = {key: row[key] for key in ("id", "source", "table", "name", "card", "quantity", "bytes", "out_of_memory")}
    result["seconds_of_xmem"] = row.get("seconds_of_xmem")  # on its authors' machine
    result["confidence"] = row.get("confidence")  # of published figures: can the run be rebuilt from what is published?
    result |= {key: found[key] for key in ("predicted", "fits", "parameters", "seconds", "error") if key in found}
    result["others"] = row["others"] | found.get("others", {})
    if "predicted" in found and not row["out_of_memory"]:
        result["relative_error"] = found["predicted"] / row["bytes"] - 1
    if row["memory"] is not None and "fits" in found:
        result["verdict_right"] = found["fits"] != row["out_of_memory"]
    result["capacity"] = capacity(row)
    return result


def capacity(row: Row) -> int | None:
    """What the card leaves to PyTorch; None where the run's card is not known exactly."""
    from vramlab.gpus import gpu as card

    return row["memory"] - card(row["card"]).context if row["memory"] else None


def tool_error(row: Row, tool: str) -> float | None:
    if row["out_of_memory"]:
        return None
    if tool == "vramlab":
        return row.get("relative_error")
    bytes_ = row["others"].get(tool)
    return bytes_ / row["bytes"] - 1 if isinstance(bytes_, int) else None


def tool_verdict(row: Row, tool: str) -> bool | None:
    """Whether a tool's verdict was right; None where it has none."""
    if tool == "vramlab":
        return row.get("verdict_right")
    bytes_ = row["others"].get(tool)
    if row["capacity"] is None or not isinstance(bytes_, int):
        return None
    return (bytes_ <= row["capacity"]) != row["out_of_memory"]


def summary(rows: list[dict[str, Any]], tool: str) -> dict[str, Any] | None:
    """Median, 90th percentile and greatest of a tool's absolute errors, and its wrong verdicts."""
    errors = sorted(abs(e) for row in rows if (e := tool_error(row, tool)) is not None)
    verdicts = [v for row in rows if (v := tool_verdict(row, tool)) is not None]
    if not errors and not verdicts:
        return None
    signed = [e for row in rows if (e := tool_error(row, tool)) is not None]
    clock = {"vramlab": "seconds", "xMem": "seconds_of_xmem"}.get(tool, "")
    seconds = [row[clock] for row in rows if row.get(clock) is not None]
    unsafe = [row for row in rows if row["out_of_memory"] and tool_verdict(row, tool) is False]
    return {
        "rows": len(errors),
        "median": statistics.median(errors) if errors else None,
        "p90": errors[math.ceil(0.9 * len(errors)) - 1] if errors else None,
        "greatest": errors[-1] if errors else None,
        "median_signed": statistics.median(signed) if signed else None,
        "verdicts": len(verdicts),
        "verdicts_wrong": verdicts.count(False),
        "fits_but_ran_out": len(unsafe),
        "median_seconds": statistics.median(seconds) if seconds else None,
    }


def tables(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summaries by source and over sources, of all tools, and of vramlab by model."""
    tools = ["vramlab", *dict.fromkeys(tool for row in rows for tool in row["others"])]
    found: dict[str, Any] = {}
    groups = {name: [row for row in rows if row["table"] == name] for name in dict.fromkeys(row["table"] for row in rows)}
    groups["xMem grid, all"] = [row for row in rows if row["table"].startswith("xMem grid")]
    for confidence in ("high", "medium"):
        groups[f"published, {confidence} confidence"] = [row for row in rows if row["confidence"] == confidence]
    for name, of_table in groups.items():
        single = name in {row["table"] for row in of_table}
        models = dict.fromkeys(row["name"] for row in of_table if single)
        found[name] = {
            "tools": {tool: s for tool in tools if (s := summary(of_table, tool))},
            "models": {model: s for model in models if (s := summary([r for r in of_table if r["name"] == model], "vramlab"))},
        }
    return found


def show(found: dict[str, Any]) -> None:
    def percent(x: float | None, sign: str = "") -> str:
        return "-" if x is None else f"{x:{sign}.2%}"

    for table, groups in found.items():
        print(f"\n{table}")
        for title, of_group in (("", groups["tools"]), ("  ", groups["models"])):
            for name, s in of_group.items():
                verdicts = f"{s['verdicts_wrong']} of {s['verdicts']} verdicts wrong" if s["verdicts"] else ""
                seconds = f"{s['median_seconds']:.1f} s" if s["median_seconds"] is not None else ""
                errors = f"median {percent(s['median']):>7} ({percent(s['median_signed'], '+')}), p90 {percent(s['p90']):>7}"
                print(f"  {title}{name[:40]:42}{s['rows']:3} rows  {errors:40} {verdicts:26} {seconds}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="rows whose id or table contains it; may be repeated")
    parser.add_argument("--python", action="append", default=[], metavar="VERSION=PATH", help="an interpreter with this transformers")
    parser.add_argument("--rivals", action="store_true", help="run the other estimators too (minutes)")
    parser.add_argument("--merge", action="store_true", help="keep what the results file has of rows and estimators that are not run now")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(arguments.rivals)
    facts = json.loads(FACTS.read_text())
    texts = arguments.only or [""]
    chosen = [row for row in facts["rows"] if any(text in row["id"] or text in row["table"] for text in texts)]
    by_python, skipped = interpreters(chosen, sys.executable, dict(given.split("=", 1) for given in arguments.python))
    known = {row["id"]: row for row in chosen}
    results = earlier() if arguments.merge else {}
    for python, rows in by_python.items():
        for found in ask(python, rows, arguments.rivals):
            result = scored(known[found["id"]], found)
            result["others"] = results.get(found["id"], result)["others"] | result["others"]
            results[found["id"]] = result
            error = f"{result['relative_error']:+8.2%}" if "relative_error" in result else "verdict "
            told = result.get("error") or f"{error}  fits: {result['fits']}"
            print(f"{found['id'][:60]:62}{told}", flush=True)
    order = [row["id"] for row in facts["rows"]]
    rows = sorted(results.values(), key=lambda row: order.index(row["id"]))
    done = tables([row for row in rows if "error" not in row])
    show(done)
    failed = [row["id"] for row in rows if "error" in row]
    reasons = f"{len(facts['not_scored'])} not scored for reasons in {FACTS.name}"
    print(f"\n{len(rows)} rows, {len(failed)} failed, {len(skipped)} skipped, {reasons}")
    measure.write("accuracy", {"tables": done, "skipped": skipped, "rows": rows})
    return None


def earlier() -> dict[str, dict[str, Any]]:
    path = measure.RESULTS / "accuracy.json"
    return {row["id"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}


if __name__ == "__main__":
    main()
