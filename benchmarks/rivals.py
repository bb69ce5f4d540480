"""What other estimators say of the same runs. Each takes a row of ground_truth.json and gives bytes of device memory.

The four that xMem's authors ran (xMem, DNNMem, SchedTune, LLMem) are in ground_truth.json as they published them. The
others run here, as their documentation says; a card is not needed by any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import workloads
from torch import nn

Row = dict[str, Any]


def _model(row: Row) -> nn.Module:
    return workloads.WORKLOADS[row["workload"]].model(**row["options"])


def _on_meta(row: Row) -> nn.Module:
    if row["name"].startswith("RegNet"):  # RegNets compute their widths with tensors
        return _model(row).to("meta")
    with torch.device("meta"):
        return _model(row)


class _Tracked:
    """A `workloads.Place`: fake tensors on the CPU, since fake CUDA tensors need a driver."""

    device = torch.device("cpu")

    def building(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def allocated(self) -> int:
        raise NotImplementedError("MemTracker is asked for its peak only.")

    peak = allocated

    def reset(self) -> None:
        raise NotImplementedError("MemTracker's peak is that of the whole run.")


def mem_tracker(row: Row) -> int:
    """``torch.distributed._tools.MemTracker`` over the row's own loop, its peak of all categories."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.optim.optimizer import register_optimizer_step_post_hook

    with FakeTensorMode():
        model = _model(row)
        tracker = MemTracker()
        tracker.track_external(model)
        # The peak stays; without this it refuses a second step.
        handle = register_optimizer_step_post_hook(lambda *_: tracker.reset_mod_stats())
        try:
            with tracker:
                workloads.WORKLOADS[row["workload"]].steps(_Tracked(), model, **row["options"])
        finally:
            handle.remove()
        return int(sum(kinds["Total"] for kinds in tracker.get_tracker_snapshot("peak").values()))


def accelerate(row: Row) -> int:
    """``accelerate estimate-memory``: four times the model, which is its estimate of training with Adam."""
    from accelerate.utils import calculate_maximum_sizes

    total, _ = calculate_maximum_sizes(_on_meta(row))
    return int(total) * 4


def deepspeed(row: Row) -> int:
    """``estimate_zero2_model_states_mem_needs`` on one card without offload: 4 bytes a parameter and 16 shared by the cards.

    The formula alone, from deepspeed/runtime/zero/stage_1_and_2.py: importing DeepSpeed needs its compiled operators.
    """
    parameters = sum(p.numel() for p in _on_meta(row).parameters())
    return 4 * parameters + 16 * parameters


def torchinfo(row: Row) -> int:
    """``torchinfo.summary``'s "Estimated Total Size": inputs, parameters, outputs of all layers forward and backward."""
    from torchinfo import summary

    options = row["options"]
    batch = options["batch"]
    inputs: Any = torch.zeros(batch, 3, 86, 86)
    if row["workload"] == "grid text":
        inputs = {name: torch.ones(batch, options["length"], dtype=torch.int64) for name in ("input_ids", "attention_mask", "labels")}
    found = summary(_on_meta(row), input_data=inputs, device="meta", mode="train", verbose=0)
    return int(found.total_input + found.total_output_bytes + found.total_param_bytes)


RIVALS: dict[str, Callable[[Row], int]] = {
    "MemTracker": mem_tracker,
    "accelerate": accelerate,
    "DeepSpeed": deepspeed,
    "torchinfo": torchinfo,
}


def estimates(row: Row) -> Iterator[tuple[str, int | str]]:
    """Each estimator with its bytes, or with why it has none."""
    for name, estimate in RIVALS.items():
        try:
            yield name, estimate(row)
        except Exception as error:  # another tool's failure is a result
            yield name, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
