"""%%vram and %vram in an IPython shell: what they show, that a cell does what it did without them, and cells for virtual cards."""

from __future__ import annotations

import atexit
import gc
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from IPython.utils.capture import capture_output
from torch import nn
from traitlets.config import Config

import vramlab as vl
from vramlab.memory import free as search
from vramlab.memory.alive import Alive, alive
from vramlab.memory.cell import CellMemory
from vramlab.memory.report import OutOfMemoryReport
from vramlab.notebook import magics
from vramlab.units import MiB
from vramlab.virtual.cells import names_used


@pytest.fixture(scope="module")
def ipython() -> Iterator[InteractiveShell]:
    before = {name: getattr(sys, name) for name in ("displayhook", "excepthook", "ps1", "ps2", "ps3") if hasattr(sys, name)}
    main = sys.modules["__main__"]
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    shell.colors = "nocolor"
    with capture_output():
        assert shell.run_line_magic("load_ext", "vramlab") is None
    gc.collect()
    gc.freeze()  # what was there before need not be searched at each collection
    yield shell
    gc.unfreeze()
    atexit.unregister(shell.atexit_operations)
    shell.atexit_operations()
    InteractiveShell.clear_instance()
    sys.modules["__main__"] = main
    for name, value in before.items():
        setattr(sys, name, value)


class Cells:
    """Runs cells and keeps what they showed."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell, self.space = shell, shell.user_ns
        self.shown: list[Any] = []
        self.text = ""

    def __call__(self, cell: str) -> ExecutionResult:
        with capture_output() as captured:
            result = self.shell.run_cell(textwrap.dedent(cell).strip("\n"), store_history=True)
        self.text = captured.stdout
        self.shown = [output.data for output in captured.outputs]
        return result

    def memory(self, cell: str, options: str = "") -> CellMemory:
        """What ``%%vram`` found of a cell."""
        result = self(f"%%vram -o memory {options}\n{textwrap.dedent(cell).strip(chr(10))}")
        result.raise_error()
        found: CellMemory = self.space.pop("memory")
        return found


@pytest.fixture
def cells(ipython: InteractiveShell) -> Iterator[Cells]:
    before = set(ipython.user_ns)
    ipython.user_ns |= {"torch": torch, "nn": nn}
    yield Cells(ipython)
    vl.free()  # outputs and the last error
    for name in set(ipython.user_ns) - before:
        del ipython.user_ns[name]


def numbers(nbytes: int) -> str:
    return f"torch.zeros({nbytes}, dtype=torch.uint8)"


# A cell here


@pytest.mark.parametrize(
    ("cell", "peak", "change"),
    [
        (f"x = {numbers(3 * MiB)}", 3 * MiB, 3 * MiB),
        (f"x = {numbers(3 * MiB)}\ndel x", 3 * MiB, 0),
        (f"x = {numbers(3 * MiB)}\ny = x.clone()\ndel x", 6 * MiB, 3 * MiB),
        (f"old.add_(1)\nnew = {numbers(MiB)}", 3 * MiB, MiB),
        ("old.add_(1)\ndel old", 2 * MiB, -2 * MiB),
        ("x = old[:10]", 2 * MiB, 0),
        ("x = 3", 0, 0),
    ],
)
def test_peak_and_change_of_a_cell(cells: Cells, cell: str, peak: int, change: int) -> None:
    cells(f"old = {numbers(2 * MiB)}")
    memory = cells.memory(cell)
    assert (memory.allocated, memory.change) == (peak, change)
    assert memory.reserved is None
    (shown,) = cells.shown
    assert shown["text/plain"] == repr(memory)
    assert "<table>" in shown["text/html"] or not peak


def test_the_lines_that_hold_the_peak_stand_where_they_are_in_the_cell(cells: Cells) -> None:
    memory = cells.memory(f"a = {numbers(MiB)}\nb = {numbers(4 * MiB)}\n\nc = b + 1\ndel b, c")
    assert memory.holders() == [("notebook cell:3", 4 * MiB), ("notebook cell:5", 4 * MiB), ("notebook cell:2", MiB)]
    assert "the peak was set by aten::add.Tensor, notebook cell:5" in repr(memory)
    assert "2 other lines" in repr(cells.memory(f"a = {numbers(MiB)}\nb = {numbers(MiB)}\nc = {numbers(MiB)}", "-n 1"))


@pytest.mark.parametrize(("cell", "value"), [("6 * 7", 42), ("x = 6 * 7\nx", 42), ("x = 42", None), ("'a' 'b'", "ab"), ("None", None)])
def test_the_value_of_a_cell_is_its_own(cells: Cells, cell: str, value: Any) -> None:
    assert cells(f"%%vram\n{cell}").result == value
    assert re.findall(r"Out\[\d+\]: (.*)", cells.text) == ([] if value is None else [repr(value)])
    cells(f"%%vram\n{cell};  # not shown")
    assert "Out[" not in cells.text


def test_variables_functions_and_classes_of_a_cell_are_the_notebooks(cells: Cells) -> None:
    cells("%%vram\nimport math\nlr = 3\ndef f(x):\n    return x + lr\nclass C:\n    y: int = 5")
    assert cells("lr = 4\nf(1) + C().y + math.floor(0.5)").result == 10


@pytest.mark.parametrize("kind", ["ValueError('no')", "KeyboardInterrupt()", "SystemExit(3)"])
def test_an_error_of_a_cell_is_raised_and_its_memory_shown(cells: Cells, kind: str) -> None:
    result = cells(f"%%vram -o memory\nx = {numbers(MiB)}\ndef f():\n    y = x.clone()\n    raise {kind}\nf()")
    assert type(result.error_in_exec).__name__ == kind.partition("(")[0]
    memory = cells.space["memory"]
    assert memory.allocated == 2 * MiB
    assert memory.error.startswith(kind.partition("(")[0])
    assert "the cell ended early" in repr(memory)


def test_the_traceback_shows_the_cells_own_lines(cells: Cells) -> None:
    cells("%%vram\n\nx = 1\n\n1 / 0  # this line")
    assert re.search(r"line 5.*\n.*\n?.*1 / 0  # this line", cells.text), cells.text
    assert "magics.py" not in cells.text
    cells("%%vram\nx = (")
    assert "SyntaxError" in cells.text


def test_nothing_of_a_cell_lives_longer_because_it_was_watched(cells: Cells) -> None:
    before = search._held(False)
    cells(f"%%vram\nx = {numbers(5 * MiB)}\nx.grad_fn")
    cells("del x")
    gc.collect()
    assert search._held(False) - before < MiB


def test_magics_of_others_work_inside(cells: Cells) -> None:
    cells(f"%%vram -o outer\n%%vram -o inner\nx = {numbers(MiB)}")
    assert cells.space["inner"].allocated == cells.space["outer"].allocated == MiB
    assert len(cells.shown) == 2
    cells("%%vram\nx = !echo hello\n%time y = 3")
    assert (list(cells.space["x"]), cells.space["y"]) == (["hello"], 3)


def test_braces_and_dollars_in_a_cell_are_left_alone(cells: Cells) -> None:
    assert cells("x = 3\n").success
    assert cells("%%vram\n{x} | {'$x'}").result == {3, "$x"}


def test_future_imports_of_the_notebook_hold_in_a_cell_and_no_others(cells: Cells) -> None:
    cells("%%vram\ndef f(x: 1 + 1): ...")
    assert cells("f.__annotations__").result == {"x": 2}


def test_quiet_shows_nothing(cells: Cells) -> None:
    assert cells("%%vram -q -o memory\n3").result == 3
    assert cells.shown == []
    assert isinstance(cells.space["memory"], CellMemory)


def test_a_budget_that_runs_out_is_explained(cells: Cells) -> None:
    cells.space["vl"] = vl
    result = cells(f"%%vram\nwith vl.budget('8 MiB', device='cpu'):\n    kept = [{numbers(3 * MiB)} for _ in range(4)]")
    assert isinstance(result.error_in_exec, torch.OutOfMemoryError)
    assert len(cells.shown) == 2
    assert "ran out of memory" in cells.shown[1]["text/html"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("%%vram -d RTX 4091", "A device is 'auto', 'cpu', 'cuda', 'cuda:1' or a card. No card 'RTX 4091' is known; the nearest"),
        ("%%vram -d xpu", "vramlab measures on 'cpu' and 'cuda', got 'xpu'"),
        ("%%vram -d cpu:x", "A device is 'auto', 'cpu', 'cuda', 'cuda:1' or a card."),
        ("%%vram -n 0", "At least 1 line is listed, got -n 0."),
        ("%%vram -o 3", "-o takes the name of a variable, got '3'."),
        ("%%vram --nonsense", "unrecognized arguments: --nonsense"),
        ("%vram extra", "unrecognized arguments: extra"),
    ],
)
def test_options_that_make_no_sense_are_refused(cells: Cells, line: str, said: str) -> None:
    with capture_output() as captured:
        cells.shell.run_cell(line + ("\n1" if line.startswith("%%") else ""))
    assert f"UsageError: {said}" in captured.stderr + captured.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_where_there_is_none_is_refused(cells: Cells) -> None:
    with capture_output() as captured:
        cells.shell.run_cell("%%vram -d cuda\n1")
    assert "Device 'cuda' needs CUDA" in captured.stderr


def test_a_cell_that_awaits_is_refused(cells: Cells) -> None:
    with capture_output() as captured:
        cells.shell.run_cell("%%vram\nimport asyncio\nawait asyncio.sleep(0)")
    assert "UsageError: %%vram follows code that runs in one go" in captured.stderr


def test_the_options_are_documented(cells: Cells) -> None:
    with capture_output() as captured:
        cells.shell.run_cell("%%vram?")
    for word in (
        "-d",
        "--in-use",
        "--limited",
        "--tensors",
        "-n LINES",
        "-o NAME",
        "--quiet",
        "RTX 4090",
        "%vram alone",
        "errors are raised",
    ):
        assert word in captured.stdout


# A cell for a virtual card

TRAIN = """
def train(model, steps):
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(steps):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(torch.randn(64, 256, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print("trained at", rate)
    return loss

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

rate = 1
net = Net()
loader = (i for i in range(3))
"""
NUMBERS = 2 * 256 * 1024 + 1024 + 256


def test_peoples_own_code_is_planned_unchanged(cells: Cells) -> None:
    cells(TRAIN)
    memory = cells.memory("rate = 2\nloss = train(net, 2)\nloss", "-d RTX 4090")
    assert "trained at 2" in cells.text
    assert "tensor(..., device='cuda:0', size=()" in cells.text
    assert memory.card is not None
    assert memory.fits
    assert memory.allocated > 16 * NUMBERS
    assert memory.reserved is not None
    assert memory.reserved >= memory.allocated
    assert memory.trace.breakdown().parameters == 4 * NUMBERS
    assert re.search(r"set by aten::\S+ in \w+, up, notebook cell:\d+", repr(memory))
    assert {name for name, _ in memory.holders()} <= {"before the cell, or not by its code", *(f"notebook cell:{n}" for n in range(1, 20))}
    # Nothing has happened here.
    assert "loss" not in cells.space
    assert cells.space["rate"] == 1
    assert next(cells.space["net"].parameters()).device.type == "cpu"


@pytest.mark.parametrize("card", ["RTX 4090", "'RTX 4090'", '"RTX 4090"'])
def test_a_card_may_be_written_with_quotes_or_without(cells: Cells, card: str) -> None:
    memory = cells.memory("x = torch.zeros(2**20, device='cuda')", f"-d {card} -u '1 GiB'")
    assert (memory.allocated, memory.reserved, memory.change) == (4 * MiB, 20 * MiB, 4 * MiB)
    assert memory.in_use == 1 << 30
    assert memory.device_peak == 20 * MiB + memory.card.context + (1 << 30)  # type: ignore[union-attr]


def test_what_does_not_fit_is_seen_whole_or_raised_where_the_card_is_full(cells: Cells) -> None:
    big = "kept = [torch.zeros(2**30, device='cuda') for _ in range(8)]"
    memory = cells.memory(big, "-d RTX 4090")
    assert not memory.fits
    assert memory.allocated == 32 << 30
    assert "does not fit RTX 4090 (23.52 GiB): 8.92 GiB too much" in repr(memory)
    result = cells(f"%%vram -d RTX 4090 -l\n{big}")
    assert isinstance(result.error_in_exec, torch.OutOfMemoryError)
    assert isinstance(result.error_in_exec.report, OutOfMemoryReport)
    (shown,) = cells.shown
    assert "4.00 GiB more for aten::zeros" in shown["text/html"]
    assert "planner.py" not in cells.text


def test_a_variable_that_cannot_travel_is_named(cells: Cells) -> None:
    cells(TRAIN)
    memory = cells.memory("if False:\n    next(loader)\nx = rate", "-d RTX 4090")
    assert memory.stayed == {"loader": "TypeError: cannot pickle 'generator' object."}
    assert "loader stayed in the notebook: TypeError: cannot pickle 'generator' object." in repr(memory)
    result = cells("%%vram -d RTX 4090\nnext(loader)")
    assert isinstance(result.error_in_exec, NameError)
    assert result.error_in_exec.__notes__[-1] == (
        "loader stayed in the notebook: TypeError: cannot pickle 'generator' object. Make it in the cell."
    )


def test_a_tensor_with_a_graph_of_another_cell_stays(cells: Cells) -> None:
    cells("loss = torch.ones(3, requires_grad=True).sum()")
    memory = cells.memory("if False:\n    loss", "-d RTX 4090")
    assert "its graph does not travel" in memory.stayed["loss"]


def test_tensors_of_the_notebook_keep_values_sharing_and_gradients(cells: Cells) -> None:
    cells(
        """
        values = torch.arange(5)
        model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16, bias=False))
        model[1].weight = model[0].weight
        half = model[0].weight.detach()[:8]
        model(torch.tensor([1])).sum().backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        """
    )
    memory = cells.memory(
        """
        assert values.cuda().tolist() == [0, 1, 2, 3, 4]
        assert int(values.sum()) == 10
        assert model[0].weight is model[1].weight is optimizer.param_groups[0]["params"][0]
        model.cuda()
        model(torch.tensor([1]).cuda()).sum().backward()
        optimizer.step()
        """,
        "-d RTX 4090",
    )
    end = memory.trace.breakdown("end")
    assert (end.parameters, end.gradients) == (4 * 16 * 8, 4 * 16 * 8)


def test_what_a_cell_switches_for_good_stays_off_for_the_next(cells: Cells) -> None:
    cells.memory(
        """
        import os
        torch.set_default_dtype(torch.bfloat16)
        torch.set_default_device("cuda")
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.backends.cudnn.benchmark = True
        torch.use_deterministic_algorithms(True)
        torch.set_grad_enabled(False)
        torch.autograd.set_detect_anomaly(True)
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
        torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: 1 / 0)
        from torch.optim.optimizer import register_optimizer_step_post_hook
        register_optimizer_step_post_hook(lambda *args: 1 / 0)
        os.environ["VRAMLAB_LEFT"] = "1"
        """,
        "-d RTX 4090",
    )
    cells.memory(
        """
        import os
        assert torch.get_default_dtype() == torch.float32
        assert torch.zeros(1).device.type == "cpu"
        assert torch.backends.cuda.matmul.fp32_precision != "tf32"
        assert not torch.backends.cudnn.benchmark
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.is_grad_enabled()
        assert not torch.is_anomaly_enabled()
        assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.mem_efficient_sdp_enabled()
        assert not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
        layer = torch.nn.Linear(2, 2)
        layer(torch.zeros(1, 2)).sum().backward()
        torch.optim.SGD(layer.parameters()).step()
        assert "VRAMLAB_LEFT" not in os.environ
        """,
        "-d RTX 4090",
    )


def test_an_error_of_a_planned_cell_says_where_in_the_cell(cells: Cells) -> None:
    result = cells("%%vram -d RTX 4090\nx = 3\nraise ValueError('that')")
    assert isinstance(result.error_in_exec, ValueError)
    assert re.search(r"line 3.*\n.*raise ValueError\('that'\)", cells.text)


def test_numbers_that_were_read_are_listed(cells: Cells) -> None:
    memory = cells.memory("x = nn.Linear(3, 3).cuda().weight.sum().item()\nassert x == 0", "-d RTX 4090")
    assert memory.reads == {"notebook cell:2": 1}
    assert "numbers that were read and gave 0.0: 1 at notebook cell:2" in repr(memory)


def test_a_planned_cell_with_a_magic_is_refused(cells: Cells) -> None:
    with capture_output() as captured:
        cells.shell.run_cell("%%vram -d RTX 4090\n%time x = 3")
    assert "UsageError: A cell for a virtual card is plain Python" in captured.stderr


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("x = y", {"y"}),
        ("y = 1\nx = y", set()),
        ("x += 1", {"x"}),
        ("x: int = y", {"y"}),
        ("x[0] = 1", {"x"}),
        ("del x", {"x"}),
        ("def f(a=b):\n    return a + c", {"a", "b", "c"}),
        ("def f(): return 1\nf()", set()),
        ("if t:\n    x = 1\nx", {"t", "x"}),
        ("for i in r:\n    pass", {"r"}),
        ("import a.b as c, d.e\nc, d", set()),
        ("from m import n\nn", set()),
        ("print(len(z), f'{q}')", {"z", "q"}),
        ("def f():\n    global g\n    g = 1", {"g"}),
        ("(a, [b, *c]) = d\na, b, c", {"d"}),
        ("class K(base): pass\nK", {"base"}),
        ("with o as p:\n    p", {"o", "p"}),
    ],
)
def test_the_names_that_a_cell_takes_from_outside(source: str, names: set[str]) -> None:
    assert names_used(source) == names


# What lives


def owners(found: Alive) -> dict[str, int]:
    return {name: nbytes for name, nbytes in found.owners.items() if name != "others"}


def test_what_lives_is_listed_by_variable_and_by_tensor(cells: Cells) -> None:
    cells(
        f"""
        model = nn.Sequential(nn.Linear(256, 1024, bias=False), nn.Linear(1024, 256, bias=False))
        model[1].weight = nn.Parameter(model[0].weight.detach().T)
        batch = {numbers(MiB)}
        window = batch[:10]
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        model[0](torch.ones(1, 256)).sum().backward()
        optimizer.step()
        log = {{"last": torch.zeros({MiB // 8}, dtype=torch.float64)}}
        """
    )
    cells("%vram -t")
    (shown,) = cells.shown
    assert "float32 (256, 1024), also" not in shown["text/plain"]
    found = alive()
    mine = {t.name: t for t in found.tensors if t.owner != "others"}
    assert mine["model.0.weight"].also == ("model.1.weight",)
    assert mine["batch"].also == ("window",)
    assert "window" not in mine
    assert mine["model.0.weight.grad"].nbytes == mine["optimizer.state[0]['exp_avg']"].nbytes == MiB
    assert mine["log['last']"].kind == f"float64 ({MiB // 8},)"
    assert {name: n // MiB for name, n in owners(found).items()} == {"optimizer": 2, "model": 2, "batch": 1, "log": 1}
    assert found.total == sum(t.nbytes for t in found.tensors)
    assert re.search(r"2\.00 MiB +model +\(2 tensors, the largest model\.0\.weight 1\.00 MiB\)", repr(found))
    assert "also window" in repr(found)
    assert "also window" in repr(alive(by_tensor=True))


def test_an_output_and_the_last_error_are_named_as_holders(cells: Cells) -> None:
    cells(numbers(3 * MiB))
    number = len(cells.space["In"]) - 1
    cells(f"def fail():\n    secret = {numbers(2 * MiB)}\n    raise ValueError('no')\nfail()")
    found = owners(alive())
    assert found == {f"Out[{number}]": 3 * MiB, "the last error (ValueError): secret in fail()": 2 * MiB}
    cells("%vram")
    assert f"Out[{number}]" in cells.shown[0]["text/html"]
    vl.free()
    assert owners(alive()) == {}


def test_a_graph_is_listed_behind_its_loss(cells: Cells) -> None:
    cells(f"x = torch.zeros({MiB // 4}, requires_grad=True)\nloss = x.exp().sum()")
    found = {t.name: t.nbytes for t in alive().tensors}
    assert found["x"] == found["behind loss"] == MiB
    assert found["loss"] == 4


def test_outside_ipython_variables_of_the_script_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_shell", lambda: None)
    monkeypatch.setattr(search, "_variables", lambda: [("batch", torch.zeros(MiB, dtype=torch.uint8))])
    assert owners(alive()) == {"batch": MiB}


def test_lines_are_as_many_as_asked(cells: Cells) -> None:
    cells(f"a, b, c = {numbers(3 * MiB)}, {numbers(2 * MiB)}, {numbers(MiB)}")
    lines = repr(alive(shown=2)).splitlines()
    assert len(lines) <= 4
    with pytest.raises(ValueError, match=r"^At least 1 line is shown, got 0\.$"):
        alive(shown=0)
    cells("%vram -n 1 -o now -q")
    assert (cells.space["now"].shown, cells.shown) == (1, [])


def test_on_cuda_the_allocators_counters_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arithmetic; that the counters are read is seen on a card."""
    from vramlab.memory.trace import NO_EVENTS, DeviceCounters, MemoryTrace

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "RTX 4090")
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 30)
    trace = MemoryTrace(NO_EVENTS, "cuda:0", DeviceCounters(50, 100, None))
    memory = magics._memory(trace, 20, torch.device("cuda:0"), "", 5)
    assert (memory.allocated, memory.reserved, memory.change) == (50, 100, 10)
    assert repr(memory) == "cuda:0 (RTX 4090): peak 50 B allocated, 100 B reserved\nchange +10 B: 20 B before, 30 B after"


def test_magics_plots_and_exercises_need_no_widgets() -> None:
    """User case NB-08: without ipywidgets, or where it cannot be imported, all but the lab works."""
    source = (
        "import sys; sys.modules['ipywidgets'] = None\n"
        "import vramlab as vl, vramlab.notebook.magics\n"
        "from vramlab.memory.trace import MemoryBreakdown\n"
        "from vramlab.notebook.exercises import check\n"
        "vl.plot(MemoryBreakdown(parameters=3)); print(check('01.1', None).solved)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", source], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_a_second_error_or_free_lets_go_of_what_the_first_one_kept(cells: Cells) -> None:
    """User case NB-05."""
    fail = f"def fail():\n    secret = {numbers(2 * MiB)}\n    raise ValueError('no')\nfail()"
    for release in ("1 / 0", "import vramlab; vramlab.free();"):
        cells(f"%%vram -q\n{fail}")
        assert any(name.endswith("secret in fail()") for name in owners(alive()))
        cells(release)
        gc.collect()
        assert not any(name.endswith("secret in fail()") for name in owners(alive()))


def test_results_that_show_themselves_keep_no_tensor(cells: Cells) -> None:
    """User case NB-04: what a cell ends with stays in Out."""
    cells("%%vram -o memory\nx = torch.zeros(2**20)")
    cells("memory")
    cells("del x")
    gc.collect()
    assert owners(alive()) == {}
