"""What ``python -m vramlab`` prints: JSON of a documented schema, and text of at most 80 columns."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vramlab import __version__
from vramlab.gpus import GPU
from vramlab.units import format_bytes

if TYPE_CHECKING:
    from vramlab.experiments import Run
    from vramlab.memory.report import OutOfMemoryReport
    from vramlab.planning import Plan
    from vramlab.tasks import Task

WIDTH = 79  # of 80 columns: a terminal may break a line that fills the last one
HOLDERS = 10

_RAN = {
    "schema": ("text", "vramlab.{command}/1; the number grows when a key changes its meaning or goes"),
    "vramlab": ("text", "version"),
    "torch": ("text", "version, on which sizes depend"),
    "model": ("text", "as given"),
    "task": ("text", "what is trained, in words"),
    "unit": ("text", "what an item is: tokens, images"),
    "recipe": ("object", "every option of Recipe and its value"),
}
_CATEGORIES = "bytes in storages at the peak, by category"

SCHEMAS: dict[str, dict[str, tuple[str, str]]] = {
    "plan": _RAN
    | {
        "gpu": ("object", "name, and bytes of memory (what PyTorch reports) and context"),
        "in_use": ("bytes", "of the card that others hold"),
        "capacity": ("bytes", "that PyTorch can reserve: memory less context and in_use"),
        "fits": ("true or false", "as the exit status"),
        "margin": ("bytes", "left at the peak; negative: by how much it is too much"),
        "allocated": ("bytes", "peak of what PyTorch's allocator hands out"),
        "reserved": ("bytes", "peak of what PyTorch takes from the driver"),
        "device": ("bytes", "peak in use by everything: reserved, context, in_use"),
        "host": ("bytes", "peak in host memory of what was offloaded there"),
        "retries": ("number", "how often the allocator empties its cache to fit"),
        "fits_with_expandable_segments": ("true, false or null", "if it does not fit: whether it does so; else null"),
        "max_micro_batch": ("number or null", "the largest that fits; null without --max-micro-batch"),
        "breakdown": ("object", _CATEGORIES),
        "ranks": ("list", "of objects, one a rank: rank, allocated, reserved, fits, and sent (bytes a step); empty for one card"),
        "changes": ("list or null", "the best single changes to the recipe, planned: words, options, allocated, reserved, fits"),
        "cause": ("object", "phase, operator, module and line that set the peak"),
        "holders": ("list", f"the {HOLDERS} lines of code that hold most at the peak: line, bytes"),
        "notes": ("list", "what is missing because its size is not published"),
        "seconds": ("number", "that planning took"),
    },
    "run": _RAN
    | {
        "device": ("text", "where it ran: cpu, cuda:0 or the name of a card"),
        "virtual": ("true or false", "sizes are planned, and nothing is computed"),
        "status": ("text", "finished, interrupted, or the error that ended it"),
        "steps": ("number", "optimizer steps done"),
        "peak": ("bytes or null", "peak allocated; null without a recorded step"),
        "breakdown": ("object", _CATEGORIES),
        "ranks": ("list", "of objects, one a rank: peak and breakdown; empty for one process"),
        "throughput": ("number or null", "items per second, the median; null if not measured"),
        "throughput_range": ("list or null", "lower and upper quartile"),
        "losses": ("list", "the mean loss of each step; null where none was computed"),
        "report": ("object or null", "when out of memory: who held it, and changes to the recipe, planned"),
    },
    "gpus": {
        "schema": _RAN["schema"],
        "vramlab": _RAN["vramlab"],
        "cards": (
            "list",
            "of objects: name, memory, context and usable (bytes; usable is memory less context), capability (major, minor), "
            "architecture, sms, clock (GHz), fp32, tf32, fp16 and bf16 (dense TFLOPS), bandwidth, nvlink and pcie (bytes/s), "
            "p2p, note, and sources (of each figure); null: not known, or the hardware has none",
        ),
    },
    "lab": {
        "schema": _RAN["schema"],
        "vramlab": _RAN["vramlab"],
        "ready": ("true or false", "nothing is missing"),
        "missing": ("list", "packages that are not installed"),
        "notebooks": ("text or null", "their folder; null if there is none"),
        "command": ("list", "what is started without --json, word by word"),
    },
}
"""Command -> key of its JSON -> type and meaning."""


def schema_help(command: str) -> str:
    """The schema of a command's JSON, for its ``--help``."""
    lines = ["the object that --json prints:"]
    for key, (kind, meaning) in SCHEMAS[command].items():
        text = f"{key} ({kind}): {meaning.format(command=command)}"
        lines += textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)
    return "\n".join(lines)


# JSON

_FIGURES = ("in_use", "capacity", "fits", "margin", "allocated", "reserved", "device", "host", "retries")


def plan_answer(model: str, plan: Plan, *, max_micro_batch: bool = False, changes: bool = False) -> dict[str, Any]:
    """A plan as the object of ``SCHEMAS["plan"]``; what takes more plans only on demand."""
    return _ran("plan", model, plan.task, asdict(plan.recipe)) | {
        "gpu": {"name": plan.gpu.name, "memory": plan.gpu.memory, "context": plan.gpu.context},
        **{key: getattr(plan, key) for key in _FIGURES},
        "fits_with_expandable_segments": None if plan.fits else plan.fits_with_expandable_segments,
        "max_micro_batch": plan.max_micro_batch if max_micro_batch else None,
        "breakdown": dict(plan.breakdown.items()),
        "ranks": [
            {"rank": rank.rank, "allocated": rank.allocated, "reserved": rank.reserved, "fits": rank.fits, "sent": rank.communication.wire}
            for rank in plan.ranks
        ],
        "changes": [vars(change) for change in plan.changes] if changes else None,
        "cause": plan.cause,
        "holders": [{"line": row["line"], "bytes": int(row["bytes"])} for row in plan.holders(HOLDERS).to_dict("records")],
        "notes": plan.notes,
        "seconds": round(plan.seconds, 3),
    }


def run_answer(model: str, run: Run, report: OutOfMemoryReport | None = None) -> dict[str, Any]:
    """A run, with the report of its error, as the object of ``SCHEMAS["run"]``."""
    return _ran("run", model, run.task, asdict(run.recipe)) | {
        "device": run.device.name if isinstance(run.device, GPU) else str(run.device),
        "virtual": isinstance(run.device, GPU),
        "status": run.status,
        "steps": len(run.reports),
        "peak": run.peak,
        "breakdown": dict(run.breakdown.items()),
        "ranks": [{"peak": rank.peak, "breakdown": dict(rank.breakdown.items())} for rank in run.ranks],
        "throughput": run.throughput,
        "throughput_range": run.throughput_range and list(run.throughput_range),
        "losses": [loss if math.isfinite(loss) else None for loss in run.losses],  # JSON has no NaN
        "report": report.to_dict() if report is not None else None,
    }


def gpus_answer(cards: Iterable[GPU]) -> dict[str, Any]:
    """Cards as the object of ``SCHEMAS["gpus"]``."""
    figures = ("sms", "clock", "bandwidth", "fp32", "tf32", "fp16", "bf16", "nvlink", "p2p", "pcie", "note")
    listed = [
        {"name": card.name, "memory": card.memory, "context": card.context, "usable": card.memory - card.context}
        | {"capability": list(card.capability), "architecture": card.architecture}
        | {figure: getattr(card, figure) for figure in figures}
        | {"sources": dict(card.sources)}
        for card in cards
    ]
    return about("gpus") | {"cards": listed}


def about(command: str) -> dict[str, Any]:
    """The keys that each answer begins with."""
    return {"schema": f"vramlab.{command}/1", "vramlab": __version__}


def _ran(command: str, model: str, task: Task, recipe: dict[str, Any]) -> dict[str, Any]:
    import torch

    return about(command) | {"torch": torch.__version__, "model": model, "task": task.name, "unit": task.unit, "recipe": recipe}


# Text


def plan_text(answer: Mapping[str, Any], title: str) -> str:
    """A plan's answer in words, under a title."""
    far = format_bytes(abs(answer["margin"]))
    verdict = f"FITS, {far} left" if answer["fits"] else f"DOES NOT FIT, {far} too much"
    if answer["fits_with_expandable_segments"]:
        verdict += "; fits with PYTORCH_ALLOC_CONF=expandable_segments:True"
    if answer["fits"] and answer["retries"]:
        verdict += f", after the allocator has emptied its cache {answer['retries']} times"
    sizes = [
        ("allocated", answer["allocated"], "peak of what tensors and workspaces take"),
        ("reserved", answer["reserved"], "peak of what PyTorch takes from the driver"),
        ("device", answer["device"], "that, the CUDA context and what others hold"),
        ("host", answer["host"], "offloaded to host memory"),
    ]
    cause = answer["cause"]
    module = f"in {cause['module']}" if cause["module"] else "outside modules"
    parts = [
        wrapped(title),
        wrapped(verdict),
        "\n".join(f"{name:10}{format_bytes(n):>12}  {what}" for name, n, what in sizes if n or name != "host"),
        _bars("in use at the peak", answer["breakdown"]),
        wrapped(f"the peak is in {cause['phase']} by {cause['operator']} {module}, {cause['line']}"),
        "\n".join(["lines that hold most at the peak", *(_wrapped_holder(h["bytes"], h["line"]) for h in answer["holders"])]),
    ]
    if answer["changes"] is not None:
        parts.append("\n".join(["one change to the recipe, planned again", *map(_change, answer["changes"])]))
    if answer["ranks"]:
        parts.insert(3, "\n".join([f"{'rank':>4}{'allocated':>13}{'reserved':>13}{'sent a step':>14}", *map(_rank, answer["ranks"])]))
    parts += [wrapped(f"Note: {note}.") for note in answer["notes"]]
    if answer["max_micro_batch"] is not None:
        parts.insert(2, f"the largest micro-batch that fits: {answer['max_micro_batch']}")
    return "\n\n".join(parts)


def run_text(answer: Mapping[str, Any], title: str) -> str:
    """A run's answer in words, under a title, without its report."""
    losses = [loss for loss in answer["losses"] if loss is not None]
    speed = "not measured"
    if answer["throughput"] is not None:
        low, high = answer["throughput_range"]
        speed = f"{answer['throughput']:,.0f} {answer['unit']}/s (quartiles {low:,.0f} to {high:,.0f})"
    figures = {
        "peak": f"{format_bytes(answer['peak'])} allocated" if answer["peak"] is not None else "no recorded step",
        "throughput": speed,
        "loss": f"{losses[0]:.3f} to {losses[-1]:.3f}" if losses else "not computed",
        "steps": f"{answer['steps']}, {answer['status'].partition(chr(10))[0]}",
    }
    if answer["ranks"]:
        figures["ranks"] = ", ".join(f"{number}: {format_bytes(rank['peak'] or 0)}" for number, rank in enumerate(answer["ranks"]))
    table = "\n".join(wrapped(f"{name:12}{value}", 12) for name, value in figures.items())
    return "\n\n".join([wrapped(title), table, _bars("in storages at the peak", answer["breakdown"])])


def gpus_text(answer: Mapping[str, Any]) -> str:
    """A table of the cards."""
    rows = [("card", "memory", "usable", "capability", "bandwidth", "fp16")]
    for card in answer["cards"]:
        speed = f"{card['bandwidth'] / 1e9:,.0f} GB/s" if card["bandwidth"] else "-"
        flops = f"{card['fp16']:,.0f} TFLOPS" if card["fp16"] else "-"
        capability = ".".join(map(str, card["capability"]))
        rows.append((card["name"], format_bytes(card["memory"]), format_bytes(card["usable"]), capability, speed, flops))
    table = "\n".join(f"{a:<19}{b:>11}{c:>12}{d:>12}{e:>12}{f:>13}" for a, b, c, d, e, f in rows)
    return f"{table}\n\n" + wrapped(
        "memory is what PyTorch reports, usable that without a CUDA context; fp16 is dense, with sums in float32. "
        "--json has all figures and their sources."
    )


def lab_text(answer: Mapping[str, Any]) -> str:
    """What is missing for the notebooks, in one line; empty if nothing is."""
    if answer["missing"]:
        return f"JupyterLab needs {', '.join(answer['missing'])}: pip install 'vramlab[lab,models]', or 'make lab' where the notebooks are."
    if answer["notebooks"] is None:
        return "There is no folder 'notebooks' here or beside the package; run it in a checkout of vramlab, which has them."
    return ""


def _change(change: Mapping[str, Any]) -> str:
    return wrapped(f"  {'fits' if change['fits'] else 'no':4}  {format_bytes(change['reserved']):>11} reserved  {change['words']}", 29)


def _rank(rank: Mapping[str, Any]) -> str:
    sizes = f"{format_bytes(rank['allocated']):>13}{format_bytes(rank['reserved']):>13}{format_bytes(rank['sent']):>14}"
    return f"{rank['rank']:>4}{sizes}  {'fits' if rank['fits'] else 'does not fit'}"


def _bars(title: str, breakdown: Mapping[str, int]) -> str:
    """Bytes by category, with bars of up to 40 characters."""
    largest = max([1, *breakdown.values()])
    rows = [f"  {label:20}{format_bytes(n):>11}  {'#' * max(1, round(40 * n / largest))}" for label, n in breakdown.items() if n]
    return "\n".join([title, *rows])


def wrapped(text: str, indent: int = 0) -> str:
    """Lines of at most 79 characters; those of a title stay apart."""
    return "\n".join(textwrap.fill(line, WIDTH, subsequent_indent=" " * indent) for line in text.splitlines())


def _wrapped_holder(nbytes: int, line: str) -> str:
    return wrapped(f"{format_bytes(nbytes):>14}  {line or 'not followed'}", 16)
