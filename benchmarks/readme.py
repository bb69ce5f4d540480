"""Write README's tables from benchmarks/results.

python benchmarks/readme.py [--check]      with --check only says whether README is up to date
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from measure import RESULTS

from vramlab.recipe import choices, conflicts
from vramlab.units import format_bytes

README = RESULTS.parents[1] / "README.md"

# What each row of benchmarks/techniques.py costs, and the module that does it.
ABOUT: dict[str, tuple[str, str]] = {
    "mixed precision, bf16": ("2 bytes a weight from forward to backward; rounding", "precision"),
    "pure bf16": ("rounding of parameters and gradients too; a CPU sums those of norms coarsely", "precision"),
    "gradient accumulation": ("gradients live through the window", "accumulation"),
    "checkpointing, blocks": ("one more forward", "checkpointing"),
    "checkpointing, selective": ("the cheap part of one more forward", "checkpointing"),
    "factored optimizer": ("another optimizer than Adam", "adafactor"),
    "fused optimizer": ("nothing", "choose"),
    "optimizer in backward": ("a gradient can be used once", "in_backward"),
    "chunked loss": ("the head's gradient is there from forward on", "losses"),
}

TAUGHT = {
    "precision": "02_mixed_precision",
    "accumulation": "03_gradient_accumulation",
    "checkpointing": "04_activation_checkpointing",
    "adafactor": "05_optimizer_state",
    "choose": "05_optimizer_state",
    "in_backward": "05_optimizer_state",
    "losses": "06_attention_and_loss",
    "": "10_fit_it",
}
"""Module -> the notebook that is about it; all together in the last."""


def technique_tables(report: dict[str, Any]) -> str:
    said = (
        f"Measured on {report['device']} ({report['processor']}, torch {report['torch']}, one thread), each technique against plain fp32 "
        "with AdamW: the peak with 8 items a step (activations set it) and with 1 (parameters and their like do), the median time of a "
        "step in one process (on a CPU it says little about a card), and the largest difference of a gradient relative to its "
        "parameter's largest. `python benchmarks/techniques.py`"
    )
    return "\n\n".join([said, *(technique_table(task) for task in report["tasks"].values())])


def technique_table(task: dict[str, Any]) -> str:
    head = ["technique", "`Recipe`", "saves of 8", "of 1", "costs", "step time", "gradients", "excludes", "notebook", "module"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    plain = task["rows"]["plain fp32, AdamW"]
    for name, row in task["rows"].items():
        if row is plain:
            continue
        options = {k: v for k, v in row["recipe"].items() if not (k == "optimizer_impl" and name == "factored optimizer")}
        written = "<br>".join(f"`{k}={v!r}`" for k, v in options.items())
        saved, of_one = (f"{1 - row[peak] / plain[peak]:.0%}" for peak in ("peak", "peak_of_one_item"))
        cost, module = ABOUT.get(name, ("all of these", ""))
        difference = row["gradient_difference"]
        same = "same to the bit" if difference == 0 else f"within {difference:.0e}"
        link = f"[`{module}`](vramlab/techniques/{module}.py)" if module else ""
        shown = f"[{TAUGHT[module][:2]}](notebooks/{TAUGHT[module]}.ipynb)"
        time = f"x {row['time_ratio']['median']:.2f}"
        lines.append(f"| {' | '.join([name, written, saved, of_one, cost, time, same, excluded(options), shown, link])} |")
    peaks = f"{format_bytes(plain['peak'])} and {format_bytes(plain['peak_of_one_item'])}"
    chunks = " Chunks save nothing here, since the vocabulary is 256." if "chunked loss" in task["rows"] else ""
    return "\n".join([f"**{task['name']}**, plain peaks {peaks} allocated.{chunks}", "", *lines])


def excluded(options: dict[str, Any]) -> str:
    """What a technique excludes, found by asking for conflicts with every value of every option."""
    found = []
    for name in (
        "accumulation",
        "clip_norm",
        "precision",
        "checkpointing",
        "offload",
        "optimizer",
        "optimizer_impl",
        "optimizer_in_backward",
    ):
        values: list[Any] = list(choices(name)) or {"accumulation": [2], "clip_norm": [1.0]}.get(name, [True])
        bad = [v for v in values if name not in options and conflicts(**options, **{name: v})]
        if bad:
            found.append(name.replace("_", " ") if len(values) == 1 else " ".join(map(str, bad)))
    return ", ".join(found) or "nothing"


def optimizer_table(report: dict[str, Any]) -> str:
    lines = ["| optimizer | state | extra in the step | step time |", "|---|---|---|---|"]
    for row in report["results"]:
        extra = "not seen" if row["step_peak"] is None else format_bytes(row["step_peak"])
        ratio = "{median:.2f} ({low:.2f} to {high:.2f})".format(**row["ratio"])
        lines.append(f"| {row['optimizer']} | {format_bytes(row['state'])} | {extra} | {ratio} x {row['against']} |")
    head = f"{report['model']}, {format_bytes(report['parameter_bytes'])} of fp32 parameters, {report['device']}, one thread. "
    return "\n".join([head + "`python benchmarks/optimizers.py`", "", *lines])


def recorder_line(report: dict[str, Any]) -> str:
    costs = ", ".join(
        f"{r['precision']} {r['ratio']['median']:.2f} times the step ({r['microseconds_per_operator']['median']:.0f} us an operator)"
        for r in report["results"]
    )
    where = f"{report['pairs']} pairs of steps of {report['task']} on one thread"
    return f"Recording costs, medians of {where}: {costs}. `python benchmarks/recorder.py`"


SHOWN = {  # tables of benchmarks/accuracy.py: what README calls them
    "xMem grid, text": "xMem's grid, transformers",
    "xMem grid, images": "xMem's grid, CNNs",
    "published, high confidence": "published, rebuilt in full",
    "published, medium confidence": "published, one detail assumed",
}
OTHERS = ("xMem", "DNNMem", "SchedTune", "LLMem", "MemTracker", "accelerate", "DeepSpeed", "torchinfo")


def accuracy_table(report: dict[str, Any]) -> str:
    tables = report["tables"]
    others = [tool for tool in OTHERS if any(tool in tables[name]["tools"] for name in SHOWN if name in tables)]
    head = ["measured by", "rows", "median error", "9 of 10 within", "wrong verdicts", "seconds a plan", *others]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, shown in SHOWN.items():
        tools = tables[name]["tools"]
        ours = tools["vramlab"]
        verdicts = f"{ours['verdicts_wrong']} of {ours['verdicts']}" if ours["verdicts"] else ""
        theirs = [percent(tools[tool]["median"]) if tool in tools else "" for tool in others]
        cells = [shown, ours["rows"], percent(ours["median"]), percent(ours["p90"]), verdicts, f"{ours['median_seconds']:.1f}", *theirs]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    unsafe = sum(tables[name]["tools"]["vramlab"]["fits_but_ran_out"] for name in SHOWN if name in tables)
    said = (
        "Planned against what others measured on real cards (RTX 3060 and 4060, A100, H100 and more), in allocated or reserved bytes, "
        "whichever they published; the last columns are the median errors of other predictors on the same rows. "
        f"Runs that ran out of memory and were said to fit: {unsafe}. `python benchmarks/accuracy.py`, sources in "
        "`benchmarks/ground_truth.json`, which also names the rows that informed a choice and those that cannot be rebuilt."
    )
    return "\n".join([said, "", *lines])


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f} %"


def judge_line(report: dict[str, Any]) -> str:
    count, cards = report["summary"], len({row["card"] for row in report["rows"]})
    return (
        f"The strictest judge is PyTorch's own host code: torch {report['torch']} with its CUDA allocator, autocast and autograd thread, "
        f"over a CUDA runtime that hands out addresses and starts no kernel. Over {count['rows']} steps ({cards} cards; precision, "
        "checkpointing, optimizers, offloading, ranks of FSDP and pipelines, models of this package and of transformers) peak "
        "allocated is equal to the byte in "
        f"{count['equal in allocated']}, peak reserved in {count['equal in reserved']}. `python benchmarks/judge/run.py` needs gcc and a "
        "CUDA build of PyTorch, and no card."
    )


SECTIONS: dict[str, Callable[[dict[str, Any]], str]] = {
    "techniques": technique_tables,
    "optimizers": optimizer_table,
    "recorder": recorder_line,
    "accuracy": accuracy_table,
    "judge": judge_line,
}


def rendered(text: str) -> str:
    """README with what stands between each pair of markers made anew."""
    for name, table in SECTIONS.items():
        begin, end = f"<!-- {name}: made by benchmarks/readme.py -->", f"<!-- /{name} -->"
        before, rest = text.split(begin)
        _, after = rest.split(end)
        text = f"{before}{begin}\n{table(json.loads((RESULTS / f'{name}.json').read_text()))}\n{end}{after}"
    return text


if __name__ == "__main__":
    old = README.read_text()
    new = rendered(old)
    if "--check" in sys.argv[1:] and new != old:
        sys.exit("README.md does not show benchmarks/results: run python benchmarks/readme.py")
    README.write_text(new)
