"""plan(): what it says against arithmetic by hand, whom it leaves alone, and the problems people had with planners."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vramlab as vl
from vramlab import planning
from vramlab.gpus import gpu
from vramlab.memory.allocator import CachingAllocator
from vramlab.memory.trace import Category, Events, MemoryTrace
from vramlab.planning import MICRO_BATCHES, Plan, plan
from vramlab.units import GiB, MiB

NANO = vl.tasks.gpt("nano")


@functools.cache
def planned(**options: Any) -> Plan:
    return plan(NANO, vl.Recipe(**options), "RTX 4090")


def model_of(task: vl.Task) -> nn.Module:
    return task.model()


WIDTH, BATCH = 512, 64


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def square(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(batch).square().sum(), len(batch)


def task_of(model: Any = Net, loss: Any = square, batch: Any = None, **options: Any) -> vl.Task:
    return vl.Task(model=model, batch=batch or (lambda size, device: torch.randn(size, WIDTH).to(device)), loss=loss, **options)


# The numbers


def test_parameters_gradients_and_state_are_those_of_the_model() -> None:
    nbytes = sum(p.numel() * 4 for p in model_of(NANO).parameters())
    parts = planned(optimizer_impl="loop").trace.breakdown("step")
    assert parts.parameters >= nbytes  # and the buffers
    assert parts.gradients == nbytes
    assert parts.optimizer_state == 2 * nbytes


def test_a_foreach_step_holds_one_more_copy_of_the_parameters_and_a_fused_one_does_not() -> None:
    nbytes = sum(p.numel() * 4 for p in model_of(NANO).parameters())
    foreach, fused = (planned(optimizer_impl=impl, micro_batch=1).trace.breakdown("step").temporary for impl in ("foreach", "fused"))
    assert foreach >= nbytes
    assert fused < nbytes / 10


def test_a_small_step_is_the_sum_that_one_writes_by_hand() -> None:
    """Forward keeps the input, both products' inputs and the squares' input; the loss is one number."""
    result = plan(task_of(), vl.Recipe(optimizer="sgd", micro_batch=BATCH, optimizer_impl="fused"), "RTX 4090")
    forward = result.trace.breakdown("end of forward")
    assert forward.parameters == 4 * (2 * 4 * WIDTH * WIDTH + 5 * WIDTH)
    kept = 4 * BATCH * (WIDTH + 4 * WIDTH + WIDTH) + 4  # the batch, relu's result, the output, the loss
    assert 0 <= forward.inputs + forward.activations + forward.temporary - kept <= 4 * 4  # sums of losses, 4 bytes each
    assert forward.workspace == gpu("RTX 4090").cublas_workspace


def test_allocated_reserved_and_device_are_in_order() -> None:
    result = planned()
    assert result.trace.peak <= result.allocated <= result.reserved < result.device == result.reserved + result.gpu.context
    assert result.host == 0
    assert sum(result.items.values()) == result.device


def test_the_desktop_is_counted() -> None:
    card = gpu("RTX 4090")
    result = plan(NANO, vl.Recipe(), card, in_use="0.5 GiB")
    assert result.device == planned().device + GiB // 2
    assert result.margin == planned().margin - GiB // 2
    assert result.items["others"] == GiB // 2


@pytest.mark.parametrize("accumulation", [MICRO_BATCHES, MICRO_BATCHES + 1, 9])
def test_a_window_needs_what_its_first_micro_batches_need(accumulation: int) -> None:
    here = vl.run(task_of(), vl.Recipe(accumulation=accumulation, micro_batch=4), steps=2, device="cpu", progress=False)
    least = vl.run(task_of(), vl.Recipe(accumulation=MICRO_BATCHES, micro_batch=4), steps=2, device="cpu", progress=False)
    assert here.peak == least.peak
    assert planned(accumulation=accumulation).reserved == planned(accumulation=MICRO_BATCHES).reserved


def test_what_does_not_fit_says_by_how_much() -> None:
    card = gpu("RTX 4090").with_(memory=planned().device - 1)
    result = plan(NANO, vl.Recipe(), card)
    assert result.allocated == planned().allocated
    assert result.fits == (result.reserved <= result.capacity)
    small = plan(NANO, vl.Recipe(), card.with_(memory=card.context + planned().trace.peak // 2))
    assert not small.fits
    assert small.reserved == planned().reserved
    assert small.margin == small.capacity - small.reserved < 0
    assert f"does not fit, {vl_bytes(-small.margin)} too much" in repr(small)


def vl_bytes(nbytes: int) -> str:
    from vramlab.units import format_bytes

    return format_bytes(nbytes)


def traced(*nbytes: int) -> MemoryTrace:
    """A trace that allocates (positive) and releases (negative, the first of that size) tensors."""
    alive: list[tuple[int, int]] = []
    rows: list[tuple[int, int]] = []
    for number, size in enumerate(nbytes):
        if size > 0:
            alive.append((number, size))
            rows.append((number, size))
        else:
            handle = next(entry for entry in alive if entry[1] == -size)
            alive.remove(handle)
            rows.append((handle[0], size))
    storage, change = np.array(rows, np.int64).T
    none = np.zeros(len(rows), np.int32)
    return MemoryTrace(Events(storage, change, none, none, none, none, ("",), ("op",), line=none, lines=("",)))


def on_card(capacity: int, trace: MemoryTrace) -> Plan:
    roomy = CachingAllocator()
    roomy.replay(zip(trace.events.storage.tolist(), trace.events.nbytes.tolist(), strict=True))
    card = gpu("RTX 4090").with_(memory=capacity + gpu("RTX 4090").context)
    return Plan(NANO, vl.Recipe(), card, 0, roomy.peak_allocated, 0, trace, {}, [], 0.0)


def test_a_tight_card_gives_cached_memory_back_before_it_runs_out() -> None:
    trace = traced(30 * MiB, -30 * MiB, 100 * MiB)  # the second does not fit into what is cached of the first
    roomy, tight, short = (on_card(size * MiB, trace) for size in (130, 120, 98))
    assert (roomy.fits, roomy.reserved, roomy.retries) == (True, 130 * MiB, 0)
    assert (tight.fits, tight.reserved, tight.retries) == (True, 100 * MiB, 1)
    assert "fits after emptying the cache 1 times, 20.00 MiB left" in repr(tight)
    assert (short.fits, short.reserved, short.margin) == (False, 130 * MiB, -32 * MiB)


def test_memory_in_holes_is_told_apart_from_memory_that_is_missing() -> None:
    """Twenty tensors of 9 MiB share segments; every second one goes, and what is left between cannot take one of 60 MiB."""
    sizes = [9 * MiB + i * 512 for i in range(20)]
    holes = traced(*sizes, *(-size for size in sizes[::2]), 60 * MiB)
    result = on_card(220 * MiB, holes)
    assert not result.fits
    assert result.fits_with_expandable_segments == ("but fits with PYTORCH_ALLOC_CONF=expandable_segments:True" in repr(result))
    missing = on_card(100 * MiB, holes)
    assert not missing.fits_with_expandable_segments
    assert "expandable" not in repr(missing)


def test_frozen_weights_have_no_gradients_and_no_state() -> None:
    def model() -> nn.Module:
        net = Net()
        net.up.requires_grad_(False)
        return net

    trained = 4 * (4 * WIDTH * WIDTH + WIDTH)
    parts = plan(task_of(model), vl.Recipe(micro_batch=1, optimizer_impl="loop"), "RTX 4090").trace.breakdown("step")
    assert parts.gradients == trained
    assert parts.optimizer_state == 2 * trained  # the step counters are on the CPU


def test_a_lora_model_trains_its_adapters_alone() -> None:
    peft = pytest.importorskip("peft", reason="needs the extra models")

    def model() -> nn.Module:
        return peft.get_peft_model(Net(), peft.LoraConfig(r=8, target_modules=["up", "down"]))

    adapters = 4 * 8 * (WIDTH + 4 * WIDTH) * 2
    parts = plan(task_of(model), vl.Recipe(micro_batch=1, optimizer_impl="loop"), "RTX 4090").trace.breakdown("step")
    assert parts.gradients == adapters
    assert parts.optimizer_state == 2 * adapters


def test_offloaded_memory_is_counted_on_the_host() -> None:
    nbytes = sum(p.numel() * 4 for p in model_of(NANO).parameters())
    result = planned(offload="optimizer")
    assert result.host >= 3 * nbytes  # parameters and both moments
    assert result.trace.breakdown("step").optimizer_state == 0
    mini = vl.tasks.gpt("mini")
    moved, kept = (plan(mini, vl.Recipe(offload=where, micro_batch=32, loss_chunks=8), "RTX 4090") for where in ("activations", "none"))
    assert moved.host > 0
    assert moved.allocated + moved.host == pytest.approx(kept.allocated, rel=0.2)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("checkpointing", "blocks"),
        ("checkpointing", "selective"),
        ("precision", "bf16"),
        ("optimizer_in_backward", True),
        ("loss_chunks", 8),
    ],
)
def test_each_technique_lowers_the_peak(option: str, value: Any) -> None:
    base = {"micro_batch": 1 if "optimizer" in option else 16, "optimizer_impl": "loop"}
    assert planned(**base, **{option: value}).allocated < planned(**base).allocated


# Who sets the peak


def test_the_cause_names_phase_operator_module_and_line() -> None:
    cause = planned(micro_batch=64).cause
    assert cause["phase"] in ("forward", "backward")
    assert cause["operator"].startswith("aten::")
    assert re.search(r"\.py:\d+$", cause["line"])


def test_the_holders_are_listed_by_line() -> None:
    holders = planned(micro_batch=64).holders(3)
    assert list(holders.columns) == ["line", "bytes"]
    file, number = holders["line"][0].rsplit(":", 1)
    assert Path(file).name in ("models.py", "__init__.py")
    assert int(number) > 0
    total = planned(micro_batch=64).holders(1000)["bytes"].sum()
    assert total == planned(micro_batch=64).trace.peak
    with pytest.raises(ValueError, match="Holders are listed by one of category, module, phase, operator, line, n at least 1; got 'size'"):
        planned().holders(by="size")


def test_the_html_shows_verdict_bar_and_card() -> None:
    page = planned()._repr_html_()
    assert "fits" in page
    assert vl_bytes(planned().gpu.memory) in page
    for category in (Category.PARAMETERS, Category.ACTIVATIONS):
        assert category.color in page
    widths = [float(w) for w in re.findall(r"width:([\d.]+)%", page)]
    assert sum(widths) == pytest.approx(100 * planned().device / planned().gpu.memory, abs=0.1)
    assert "<script" not in page


def test_what_nobody_publishes_is_noted() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return model(batch)[0].sum(), len(batch)

    assert planned().notes == []
    convolutions = plan(vl.tasks.resnet("nano"), vl.Recipe(), "RTX 4090")
    assert convolutions.notes == ["cuDNN does not publish its workspaces for convolutions: they are planned as 0"]
    assert "Note: cuDNN does not publish its workspaces" in convolutions._repr_html_()
    (note,) = plan(task_of(lambda: nn.LSTM(WIDTH, 32), loss, lambda n, device: torch.randn(4, n, WIDTH).to(device)), gpu="RTX 4090").notes
    assert "recurrent layers are planned with PyTorch's own kernels" in note


def test_names_in_the_html_are_escaped() -> None:
    page = plan(task_of(name="<b>mine</b>"), vl.Recipe(micro_batch=1), "RTX 4090")._repr_html_()
    assert "<b>mine" not in page
    assert "&lt;b&gt;mine" in page


# Other micro-batches


@functools.cache
def lawful() -> Plan:
    return plan(vl.tasks.gpt("mini"), vl.Recipe(precision="amp-bf16", micro_batch=4), gpu("RTX 4090").with_(memory="3 GiB"))


@pytest.mark.parametrize("n", [1, 4, 5, 16, 50])
def test_the_law_gives_what_a_plan_gives(n: int) -> None:
    traced = plan(lawful().task, lawful().recipe.with_(micro_batch=n), lawful().gpu)
    point, quick = lawful().law(n), lawful().law(n, quick=True)
    assert point.exact
    assert (point.allocated, point.reserved, point.fits) == (traced.allocated, traced.reserved, traced.fits)
    if quick.exact:
        assert quick == point
    assert quick.allocated == pytest.approx(traced.allocated, rel=0.03)
    assert lawful().law_error == ""


def test_the_largest_micro_batch_fits_and_the_next_does_not() -> None:
    n = lawful().max_micro_batch
    at = [plan(lawful().task, lawful().recipe.with_(micro_batch=m), lawful().gpu) for m in (n, n + 1)]
    assert [p.fits for p in at] == [True, False]
    assert lawful().law(1).fits


def test_a_step_that_needs_the_same_at_any_micro_batch_has_no_largest() -> None:
    def batch(size: int, device: torch.device) -> torch.Tensor:
        return torch.zeros(2, 3).to(device)

    def loss(model: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return model(x).sum(), 2

    with pytest.raises(ValueError, match=r"^The step needs the same at any micro-batch, so none is the largest"):
        _ = plan(vl.Task(lambda: torch.nn.Linear(3, 3), batch, loss), vl.Recipe(), gpu("RTX 4090")).max_micro_batch


@pytest.mark.parametrize("n", [1, 3, 5, 8])
def test_halving_the_micro_batch_is_offered_where_the_effective_batch_stays(n: int) -> None:
    offered = [o for o in planning._candidates(NANO, vl.Recipe(micro_batch=n), gpu("RTX 4090")) if "micro_batch" in o]
    assert [o["micro_batch"] * o["accumulation"] for o in offered] == ([n] if n % 2 == 0 else [])


def test_nothing_fits_a_card_without_room() -> None:
    small = gpu("RTX 4090").with_(memory=gpu("RTX 4090").context + 4 * MiB)
    assert plan(NANO, vl.Recipe(), small).max_micro_batch == 0


def test_a_step_that_changes_with_the_batch_has_no_law_and_is_traced() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        out = model(batch)
        for _ in range(len(batch)):
            out = out.sin()
        return out.sum(), len(batch)

    result = plan(task_of(loss=loss), vl.Recipe(micro_batch=1), "RTX 4090")
    assert "does other things at micro-batch 3 than at 2" in result.law_error
    again = plan(task_of(loss=loss), vl.Recipe(micro_batch=6), "RTX 4090")
    assert result.law(6).allocated == again.allocated
    assert result.law(6).exact


def test_the_curve_goes_beyond_what_fits_and_is_drawn() -> None:
    from matplotlib.figure import Figure

    from vramlab.notebook.style import Picture

    curve = lawful().curve(6)
    assert [p.micro_batch for p in curve.points] == sorted({p.micro_batch for p in curve.points})
    assert curve.points[0].micro_batch == 1
    assert curve.points[0].fits
    assert not curve.points[-1].fits
    ax = Figure().subplots()
    assert vl.plot(curve, ax) is ax
    reserved = ax.get_lines()[0].get_ydata()
    assert [round(y * GiB) for y in reserved] == [p.reserved for p in curve.points]
    assert isinstance(vl.plot(curve), Picture)
    assert "micro-batch" in repr(vl.plot(curve))
    with pytest.raises(ValueError, match="A curve has at least 2 points, got 1"):
        lawful().curve(1)


def test_a_plan_is_drawn_with_the_line_of_its_card() -> None:
    from matplotlib.figure import Figure

    tight = plan(NANO, vl.Recipe(), gpu("RTX 4090").with_(memory=planned().device + 8 * MiB))
    ax = Figure().subplots()
    assert vl.plot(tight, ax) is ax
    assert any("RTX 4090" in text.get_text() for text in ax.texts)
    far = Figure().subplots()
    vl.plot(planned(), far)
    assert not any("RTX 4090" in text.get_text() for text in far.texts)
    assert "planned for RTX 4090" in repr(vl.plot(planned()))


@pytest.mark.parametrize("n", [0, -1, 1.5, "4"])
def test_a_micro_batch_is_a_whole_number(n: Any) -> None:
    with pytest.raises(ValueError, match="A micro-batch is a whole number of at least 1, got"):
        planned().law(n)


# What is refused


def test_a_card_that_is_full_is_refused() -> None:
    with pytest.raises(ValueError, match="Nothing of RTX 4090 .* is left: its context takes 450.00 MiB and others 30.00 GiB; lower in_use"):
        plan(NANO, vl.Recipe(), "RTX 4090", in_use="30 GiB")


def test_a_card_without_bf16_is_refused() -> None:
    with pytest.raises(ValueError, match="bf16 needs a card of compute capability 8.0"):
        plan(NANO, vl.Recipe(precision="amp-bf16"), "T4")


@pytest.mark.parametrize("how", ["compile", "method"])
def test_a_compiled_model_is_refused_by_name(how: str) -> None:
    def model() -> nn.Module:
        net = Net()
        if how == "compile":
            return torch.compile(net)
        net.up.compile()
        return net

    with pytest.raises(ValueError, match="is compiled. Record or plan the model before torch.compile"):
        plan(task_of(model), vl.Recipe(), "RTX 4090")


# Problems people had with planners (FK-01 to FK-08)


@pytest.mark.parametrize(
    ("branch", "operator"),
    [
        (lambda x: bool(x.sum() > 0), "aten::_local_scalar_dense"),
        (lambda x: int(x.argmax()), "aten::_local_scalar_dense"),
        (lambda x: x[x > 0.5], "aten::index.Tensor"),
        (lambda x: x.nonzero(), "aten::nonzero"),
        (lambda x: torch.unique(x), "aten::_unique2"),
        (lambda x: torch.equal(x, 2 * x), "aten::equal"),
    ],
)
def test_a_branch_on_computed_values_is_named_with_its_line(branch: Any, operator: str) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        out = model(batch)
        branch(out)
        return out.sum(), len(batch)

    with pytest.raises(RuntimeError, match=f"{operator} at .*test_planning.py:\\d+ needs values that were computed on the card") as caught:
        plan(task_of(loss=loss), vl.Recipe(), "RTX 4090")
    assert any(note.startswith("This was aten::") and "in forward" in note for note in caught.value.__notes__)


def test_a_branch_in_a_module_names_the_module() -> None:
    class Branching(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            return out if out.sum() > 0 else -out

    with pytest.raises(RuntimeError, match="needs values") as caught:
        plan(task_of(lambda: nn.Sequential(Net(), Branching())), vl.Recipe(), "RTX 4090")
    assert any("module 1" in note for note in caught.value.__notes__)


def test_values_that_came_from_the_cpu_may_be_read() -> None:
    def batch(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(size, WIDTH).to(device), torch.arange(size).to(device)

    def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        x, numbers = batch
        wanted = numbers % 2 == 0
        assert int(wanted.sum()) == 4
        return model(x)[wanted].sum(), int(wanted.sum())

    assert plan(task_of(loss=loss, batch=batch), vl.Recipe(micro_batch=8), "RTX 4090").fits


def test_floating_point_numbers_read_as_zero_and_are_counted_by_line() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        total = model(batch).sum()
        print(f"{total.item():.1f}", end="")
        return total, len(batch)

    reads = plan(task_of(loss=loss), vl.Recipe(), "RTX 4090").reads
    ((line, times),) = reads.items()
    assert "test_planning.py:" in line
    assert times == 2  # one a step


def test_models_move_and_change_their_type_freely() -> None:
    """Under torch's own fake mode .to() and .half() fail on weak references."""

    def model() -> nn.Module:
        net = Net().half().float().to(torch.bfloat16)
        net.down.weight = nn.Parameter(net.up.weight.detach().t().clone())
        return net.double().float()

    assert plan(task_of(model), vl.Recipe(), "RTX 4090").fits


def test_plain_tensors_of_a_model_work_and_a_real_model_is_untouched() -> None:
    table = torch.arange(4 * WIDTH, dtype=torch.float32)

    class Scaled(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * table[:WIDTH].to(x.device)

    mine = Scaled()
    before = {name: (p, p.data_ptr(), p.clone()) for name, p in mine.named_parameters()}

    import copy

    plan(task_of(lambda: copy.deepcopy(mine)), vl.Recipe(), "RTX 4090")
    for name, p in mine.named_parameters():
        same, address, values = before[name]
        assert p is same
        assert p.data_ptr() == address
        assert torch.equal(p, values)


def test_an_operator_without_a_shape_function_is_named_with_the_way_out() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        @torch.library.custom_op("vramlab_test::unshaped", mutates_args=())
        def unshaped(x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        return unshaped(model(batch)).sum(), len(batch)

    with pytest.raises(NotImplementedError, match="vramlab_test.unshaped.default has no shape function.*register_fake"):
        plan(task_of(loss=loss), vl.Recipe(), "RTX 4090")


def test_modules_add_up_also_where_the_first_needs_no_gradient_of_its_input() -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.twice = nn.Embedding(1000, 64), nn.Linear(64, 64)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.twice(self.twice(self.table(tokens)))

    def loss(model: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, int]:
        return model(tokens).sum(), tokens.numel()

    task = task_of(Embedded, loss, lambda size, device: torch.randint(1000, (size, 128)).to(device))
    trace = plan(task, vl.Recipe(micro_batch=4), "RTX 4090").trace
    table = trace.by_module("step")
    assert table["total"].sum() == trace.breakdown("step").total
    assert table.loc["table", "gradients"] == 1000 * 64 * 4


# This process stays as it is


def test_nothing_changes_in_the_process_that_plans() -> None:
    code = """
        import torch, vramlab as vl
        from torch.utils.data import DataLoader
        from vramlab.planning import plan

        def state():
            loader = DataLoader(torch.arange(4.0), pin_memory=True)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                product = (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
            return (
                str(torch.accelerator.current_accelerator()), torch._C._get_privateuse1_backend_name(), len(list(loader)), product,
                len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()), torch.is_grad_enabled(), torch.get_num_threads(),
                torch.random.get_rng_state().sum().item(),
            )

        import warnings
        warnings.simplefilter("ignore")  # that memory is not pinned without a card
        before = state()
        assert plan(vl.tasks.gpt("nano"), vl.Recipe(), "RTX 4090").fits
        assert state() == before, (before, state())
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        model(torch.ones(2, 4)).sum().backward()
        dist.destroy_process_group()
        print("the same")
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "VRAMLAB_DEVICE": "cpu"},
    )
    assert result.stdout.strip().endswith("the same"), result.stdout + result.stderr


def test_the_planner_process_is_used_again() -> None:
    from vramlab.virtual.planner import shared

    planned()
    before = shared().call(os.getpid)
    plan(NANO, vl.Recipe(micro_batch=3), "RTX 4090")
    assert shared().call(os.getpid) == before


# Runs on a virtual card


def test_a_run_on_a_card_is_planned_and_has_no_losses_and_no_speeds() -> None:
    run = vl.run(NANO, vl.Recipe(), steps=3, device="RTX 4090", progress=False)
    assert run.status == "finished"
    assert all(loss != loss for loss in run.losses)
    assert run.throughput is None
    assert run.peak is not None
    assert "planned for RTX 4090" in repr(run)
    assert "not computed" in run._repr_html_()
    assert planned().allocated * 0.9 < run.peak <= planned().allocated


def test_a_run_that_does_not_fit_raises_as_a_card_does() -> None:
    card = gpu("RTX 4090").with_(memory=gpu("RTX 4090").context + 24 * MiB)
    with pytest.raises(torch.OutOfMemoryError, match="RTX 4090 out of memory. Tried to allocate .* free") as caught:
        vl.run(NANO, vl.Recipe(micro_batch=32), steps=2, device=card, progress=False)
    assert caught.value.run.failed_trace is not None


def test_recipes_are_compared_on_a_card() -> None:
    comparison = vl.compare(NANO, [vl.Recipe(), vl.Recipe(checkpointing="blocks")], steps=2, device="RTX 4090", progress=False)
    frame = comparison.to_frame()
    assert frame["peak_bytes"].iloc[1] < frame["peak_bytes"].iloc[0]
    assert "planned for RTX 4090" in comparison._repr_html_()


def test_an_unknown_card_or_device_is_refused() -> None:
    with pytest.raises(ValueError, match="A device is 'auto', 'cpu', 'cuda', 'cuda:1' or a card"):
        vl.run(NANO, steps=1, device="RTX 9999", progress=False)


def test_a_plan_can_be_cross_entropy_of_a_class_defined_here() -> None:
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return F.cross_entropy(model(batch), torch.zeros(len(batch), dtype=torch.long, device=batch.device), reduction="sum"), len(batch)

    assert plan(task_of(Mine, loss, lambda size, device: torch.randn(size, 16).to(device)), gpu="RTX 4090").fits
