"""What optimizers cost on GPT-2 124M's parameters: bytes of state, bytes a step holds beside them, and time against AdamW.

python benchmarks/optimizers.py [--pairs N] [--device cuda]      prints a table and writes benchmarks/results/optimizers.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from measure import spread, write
from torch import nn

from vramlab.devices import Stopwatch
from vramlab.memory.recorder import record
from vramlab.techniques.adafactor import Adafactor
from vramlab.techniques.low_bit import adamw_8bit
from vramlab.tensors import storages_of, tensors_in
from vramlab.units import format_bytes

LAYER = [*[(768,)] * 4, (2304, 768), (2304,), (768, 768), (768,), (3072, 768), (3072,), (768, 3072), (768,)]
SHAPES = [(50257, 768), (1024, 768), *LAYER * 12, (768,), (768,)]
Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

REFERENCE = "AdamW foreach"
OPTIMIZERS: dict[str, Factory] = {
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "AdamW loop": lambda p: torch.optim.AdamW(p, foreach=False),
    "SGD foreach": lambda p: torch.optim.SGD(p, foreach=True),
    "Adafactor loop": lambda p: Adafactor(p, foreach=False),
    "Adafactor foreach": lambda p: Adafactor(p, foreach=True),
    "torch.optim.Adafactor loop": lambda p: torch.optim.Adafactor(p, foreach=False),
    "torch.optim.Adafactor foreach": lambda p: torch.optim.Adafactor(p, foreach=True),
    "AdamW 8-bit (torchao)": adamw_8bit,
}
SAME_FORM = [(f"Adafactor {form}", f"torch.optim.Adafactor {form}") for form in ("loop", "foreach")]


def measure(params: list[nn.Parameter], name: str, against: str, pairs: int) -> dict[str, Any]:
    """Bytes and time of one optimizer, stepping in turn with another over the same parameters and gradients.

    Args:
        params: with gradients.
        name, against: of `OPTIMIZERS`.
        pairs: how many steps of each.

    Returns:
        ``state`` and ``step_peak`` in bytes (None where a compiled step allocates below the operators that a recorder
        sees), quartiles of the ``seconds`` of a step and of the ``ratio`` of the pairs.
    """
    optimizer, other = OPTIMIZERS[name](params), OPTIMIZERS[against](params)
    device = params[0].device
    for _ in range(2):
        optimizer.step()
        other.step()
    ours, theirs = [], []
    for pair in range(pairs):
        turns = [(optimizer, ours), (other, theirs)]
        for stepping, seconds in turns if pair % 2 else reversed(turns):  # whoever is second may find the caches warm
            with Stopwatch(device) as watch:
                stepping.step()
            seconds.append(watch.seconds)
    return {
        "optimizer": name,
        "against": against,
        "state": state_bytes_of(optimizer),
        "step_peak": None if "8-bit" in name else step_peak(optimizer),
        "seconds": spread(ours),
        "ratio": spread([a / b for a, b in zip(ours, theirs, strict=True)]),
    }


def state_bytes_of(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all storages in the optimizer's state."""
    storages = {s._cdata: s.nbytes() for state in optimizer.state.values() for t in tensors_in(state) for s in storages_of(t)}
    return sum(storages.values())


def step_peak(optimizer: torch.optim.Optimizer) -> int:
    """The most bytes that a step holds beside parameters, gradients and state."""
    with record(optimizer=optimizer) as trace:
        optimizer.step()
    return trace.peak - trace.baseline


def installed(name: str) -> bool:
    try:
        OPTIMIZERS[name]([nn.Parameter(torch.ones(1))])
    except ImportError as error:
        print(f"{name}: left out. {error}")
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="steps of each optimizer, at least 2")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    params = [nn.Parameter(0.02 * torch.randn(shape, device=arguments.device)) for shape in SHAPES]
    for p in params:
        p.grad = 1e-2 * torch.randn_like(p)
    nbytes = sum(p.nbytes for p in params)
    print(f"GPT-2 124M, {len(params)} parameters, {format_bytes(nbytes)}, fp32, {arguments.device}, one thread, {arguments.pairs} pairs")
    print(f"{'optimizer':30} {'state':>12} {'step peak':>12} {'ms a step':>10}  time ratio: median (quartiles)")
    results = []
    for name, against in [*((name, REFERENCE) for name in OPTIMIZERS if installed(name)), *SAME_FORM]:
        results.append(measure(params, name, against, arguments.pairs))
        print(row(results[-1]), flush=True)
    report = {"model": "GPT-2 124M", "parameter_bytes": nbytes, "pairs": arguments.pairs, "device": arguments.device, "results": results}
    write("optimizers", report)


def row(r: dict[str, Any]) -> str:
    peak = "not seen" if r["step_peak"] is None else format_bytes(r["step_peak"])
    ratio = "{median:.3f} ({low:.3f}-{high:.3f})".format(**r["ratio"])
    return f"{r['optimizer']:30} {format_bytes(r['state']):>12} {peak:>12} {r['seconds']['median'] * 1e3:10.1f}  {ratio} x {r['against']}"


if __name__ == "__main__":
    main()
