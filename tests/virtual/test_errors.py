"""Errors on a virtual card arrive where Python can catch them. A process would end here if one did not, so each kind has its own."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest

Run = Callable[[str], None]

START = """
import gc, sys, traceback, warnings
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorDeviceMismatchError
from torch.utils.checkpoint import checkpoint
from vramlab.virtual.device import virtual_gpu
torch.set_num_threads(1)

class Ours(Exception):
    pass

def fail(*args):
    raise Ours("said by the hook")

def linear(gpu):
    return nn.Linear(8, 8).to(gpu.device), torch.ones(2, 8, device=gpu.device)

def good(gpu):
    "Training goes on afterwards."
    model, x = linear(gpu)
    optimizer = torch.optim.AdamW(model.parameters())
    model(x).sum().backward()
    optimizer.step()
    assert model.weight.grad is not None and optimizer.state

def expect(error, text, call, ends=None):
    try:
        call()
    except BaseException as caught:
        assert type(caught) is error, repr(caught)
        assert text in str(caught), str(caught)
        lines = traceback.extract_tb(caught.__traceback__)
        if ends is not None:
            assert any(ends in (f.name, f.line) for f in lines), [(f.name, f.line) for f in lines]
        assert lines[0].name == "expect", lines
    else:
        raise AssertionError("nothing was raised")
    sys.exc_info()
"""


SERVER = """
import json, os, tempfile
with virtual_gpu():
    pass
for line in sys.stdin:
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            exec(compile(json.loads(line), "<case>", "exec"), {"__name__": "__main__"})
            sys.stdout.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        text = output.read().decode(errors="replace")
    print(json.dumps([os.waitstatus_to_exitcode(status), text]), flush=True)
"""


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[str], None]]:
    """Runs code in a process of its own: the fork of one that has imported everything."""
    command = [sys.executable, "-W", "error", "-c", START + SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None

        def run(code: str) -> None:
            script = START + textwrap.dedent(code)
            server.stdin.write(json.dumps(script) + "\n")
            server.stdin.flush()
            status, text = json.loads(server.stdout.readline())
            assert status == 0, f"the process ended with {status}: {text[-4000:]}"
            assert not text

        yield run
        server.stdin.close()


RAISING = {
    "tensor hook": "model.weight.register_hook(fail); call = model(x).sum().backward",
    "hook of an activation": "y = model(x); y.register_hook(fail); call = y.sum().backward",
    "post-accumulate hook": "model.weight.register_post_accumulate_grad_hook(fail); call = model(x).sum().backward",
    "node hook": "y = model(x); y.grad_fn.register_hook(fail); call = y.sum().backward",
    "node prehook": "y = model(x); y.grad_fn.register_prehook(fail); call = y.sum().backward",
    "multi-grad hook": "torch.autograd.graph.register_multi_grad_hook(tuple(model.parameters()), fail); call = model(x).sum().backward",
    "full backward hook": "x.requires_grad_(); model.register_full_backward_hook(fail); call = model(x).sum().backward",
    "full backward prehook": "model.register_full_backward_pre_hook(fail); call = model(x).sum().backward",
    "forward hook": "model.register_forward_hook(fail); call = lambda: model(x)",
    "forward prehook": "model.register_forward_pre_hook(fail); call = lambda: model(x)",
    "pack": """
        def call():
            with torch.autograd.graph.saved_tensors_hooks(fail, lambda t: t):
                model(x)
    """,
    "unpack": """
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, fail):
            call = model(x).sum().backward
    """,
    "step hook": """
        optimizer = torch.optim.SGD(model.parameters())
        optimizer.register_step_pre_hook(fail)
        model(x).sum().backward()
        call = optimizer.step
    """,
    "hook that was there before the model moved": """
        model = nn.Linear(8, 8)
        model.weight.register_hook(fail)
        call = model.to(gpu.device)(x).sum().backward
    """,
    "Function.backward": """
        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, gradient):
                fail()

        call = Function.apply(model(x)).sum().backward
    """,
    "recomputation": """
        times = []
        def block(x):
            times.append(1)
            if len(times) == 2:
                fail()
            return torch.relu(model(x))

        call = checkpoint(block, x.requires_grad_(), use_reentrant=False).sum().backward
    """,
    "recomputation, reentrant": """
        times = []
        def block(x):
            times.append(1)
            if len(times) == 2:
                fail()
            return torch.relu(model(x))

        call = checkpoint(block, x.requires_grad_(), use_reentrant=True).sum().backward
    """,
    "nested backward": """
        inner = model(x)
        inner.register_hook(fail)
        total = inner.sum()
        y = model(x)
        y.register_hook(lambda g: total.backward())
        call = y.sum().backward
    """,
    "autograd.grad": "y = model(x); y.register_hook(fail); call = lambda: torch.autograd.grad(y.sum(), model.weight)",
    "create_graph": """
        warnings.simplefilter("ignore")
        y = model(x)
        y.register_hook(fail)
        call = lambda: y.sum().backward(create_graph=True)
    """,
    "retain_graph": "y = model(x); y.register_hook(fail); call = lambda: y.sum().backward(retain_graph=True)",
    "hook among good ones": """
        y = model(x)
        y.register_hook(lambda g: None)
        y.register_hook(lambda g: 2 * g)
        y.register_hook(fail)
        call = y.sum().backward
    """,
    "autocast": """
        model.weight.register_hook(fail)
        with torch.autocast(gpu.device.type, torch.bfloat16):
            call = model(x).sum().backward
    """,
    "two layers on": """
        deep = nn.Sequential(model, nn.GELU(), nn.Linear(8, 8).to(gpu.device), nn.LayerNorm(8).to(gpu.device))
        model.bias.register_hook(fail)
        call = deep(x).sum().backward
    """,
}


@pytest.mark.parametrize("name", RAISING)
def test_what_is_raised_arrives_where_backward_was_called(run: Run, name: str) -> None:
    body = RAISING[name] if "\n" in RAISING[name] else "\n" + " " * 8 + RAISING[name] + "\n"
    run(f"""
    with virtual_gpu() as gpu:
        for _ in range(3):
            model, x = linear(gpu)
{textwrap.indent(textwrap.dedent(body), " " * 12)}
            expect(Ours, "said by the hook", call, 'fail')
            good(gpu)
        del model, x, call
        globals().update(y=None, inner=None, optimizer=None, deep=None, block=None, Function=None)
    """)


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "SystemExit", "MemoryError", "StopIteration", "AssertionError", "RecursionError"])
def test_exceptions_of_any_class_keep_it(run: Run, error: str) -> None:
    run(f"""
    def fail(gradient):
        raise {error}("a word")

    with virtual_gpu() as gpu:
        for _ in range(3):
            model, x = linear(gpu)
            model.weight.register_hook(fail)
            expect({error}, "a word", model(x).sum().backward, "fail")
            good(gpu)
    """)


def test_causes_contexts_and_notes_of_an_exception_stay(run: Run) -> None:
    run("""
    def fail(gradient):
        try:
            {}["key"]
        except KeyError as error:
            problem = Ours("with a cause")
            problem.add_note("and a note")
            raise problem from error

    with virtual_gpu() as gpu:
        model, x = linear(gpu)
        model.weight.register_hook(fail)
        try:
            model(x).sum().backward()
        except Ours as error:
            assert isinstance(error.__cause__, KeyError)
            assert error.__notes__ == ["and a note"]
            text = "".join(traceback.format_exception(error))
            assert "SystemError" not in text, text

        def other(gradient):
            try:
                {}["key"]
            except KeyError:
                raise Ours("while handling")

        model, x = linear(gpu)
        model.weight.register_hook(other)
        try:
            model(x).sum().backward()
        except Ours as error:
            assert isinstance(error.__context__, KeyError)
            assert not error.__suppress_context__
    """)


def test_an_error_that_is_caught_inside_a_hook_is_none(run: Run) -> None:
    run("""
    seen = []
    def hook(gradient):
        try:
            fail()
        except Ours:
            seen.append(1)

    with virtual_gpu() as gpu:
        model, x = linear(gpu)
        model.weight.register_hook(hook)
        model(x).sum().backward()
        assert seen == [1]
        inner = model(x)
        inner.register_hook(fail)
        total = inner.sum()
        y = model(x)
        def nested(gradient):
            try:
                total.backward()
            except Ours:
                seen.append(2)
        y.register_hook(nested)
        y.sum().backward()
        assert seen == [1, 2, 1]
    """)


OOM = {
    "forward": "call = lambda: big(torch.empty(2**19, 8192, device=gpu.device))",
    "backward": """
        w = torch.empty(2**16, 2**15, device=gpu.device, requires_grad=True)  # 8 GiB, and 8 more as a gradient
        more = torch.empty(9 * 2**30, dtype=torch.uint8, device=gpu.device)
        call = torch.mm(torch.empty(1, 2**16, device=gpu.device), w).sum().backward
    """,
    "step": """
        w = nn.Parameter(torch.empty(10 * 2**27, device=gpu.device))  # 5 GiB: Adam keeps 10 more, and foreach needs another 5
        w.grad = torch.empty_like(w)
        call = torch.optim.Adam([w]).step
    """,
    "move": "call = lambda: nn.Linear(2**16, 2**17, device='meta').to_empty(device=gpu.device)",
    "recomputation": """
        def block(x):
            return torch.relu(torch.relu(x @ w))
        w = torch.empty(8, 2**15, device=gpu.device, requires_grad=True)
        x = torch.empty(2**15, 8, device=gpu.device, requires_grad=True)
        y = checkpoint(block, x, use_reentrant=False).sum()
        more = torch.empty(20 * 2**30, dtype=torch.uint8, device=gpu.device)
        call = y.backward
    """,
}


@pytest.mark.parametrize("where", OOM)
def test_out_of_memory_is_raised_and_the_card_can_be_used_again(run: Run, where: str) -> None:
    body = OOM[where] if "\n" in OOM[where] else "\n" + " " * 8 + OOM[where] + "\n"
    run(f"""
    def big(x):
        return x * 2

    def one(gpu):
        if True:
{textwrap.indent(textwrap.dedent(body), " " * 12)}
        expect(torch.OutOfMemoryError, "RTX 4090 out of memory. Tried to allocate", call)

    gc.disable()  # what has failed is released at once, as in a loop that tries again with less
    with virtual_gpu() as gpu:
        for _ in range(4):
            one(gpu)
            good(gpu)
            assert gpu.allocated <= 30 * 2**20, gpu.allocated
        assert gpu.peak_reserved <= gpu.capacity
    """)


def test_what_did_not_fit_is_told_in_numbers(run: Run) -> None:
    run("""
    with virtual_gpu("RTX 4090", in_use="1 GiB") as gpu:
        held = torch.empty(3 * 2**30, dtype=torch.uint8, device=gpu.device)
        try:
            torch.empty(2**35, dtype=torch.uint8, device=gpu.device)
        except torch.OutOfMemoryError as error:
            assert "Tried to allocate 32.00 GiB, for 32.00 GiB." in str(error), error
            assert "3.00 GiB are allocated by PyTorch and 0 B reserved but unallocated; 19.08 GiB are free." in str(error), error
            assert (error.requested, error.segment) == (2**35, 2**35)
        assert gpu.allocated == 3 * 2**30
    """)


def test_errors_in_backward_three_hundred_times(run: Run) -> None:
    run("""
    with virtual_gpu() as gpu:
        model, x = linear(gpu)
        handle = model.weight.register_hook(fail)
        for n in range(300):
            expect(Ours, "said by the hook", model(x).sum().backward, "fail")
            if n == 50:
                model.zero_grad()
                gc.collect()
                first = gpu.allocated
        handle.remove()
        model.zero_grad()
        gc.collect()
        assert gpu.allocated == first, (gpu.allocated, first)
        good(gpu)
        from vramlab.virtual import backend
        assert not backend.lost
    """)


def test_operators_that_fail_in_forward_say_what_torch_says(run: Run) -> None:
    run("""
    def double(x):
        y = (x.detach().requires_grad_() ** 2).sum()
        y.backward()
        y.backward()

    with virtual_gpu() as gpu:
        x = torch.ones(2, 3, device=gpu.device)
        expect(RuntimeError, "broadcast", lambda: x + x.T)
        expect(FakeTensorDeviceMismatchError, "same device", lambda: x + torch.ones(2, 3))
        expect(RuntimeError, "Trying to backward through the graph a second time", lambda: double(x))
        expect(RuntimeError, "does not require grad", x.sum().backward)
        expect(IndexError, "out of bounds", lambda: x[5])
        expect(RuntimeError, "scalar outputs", (x.requires_grad_() * 2).backward)
        good(gpu)
    """)


def test_an_operator_that_fails_in_backward_says_what_torch_says(run: Run) -> None:
    run("""
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient + gradient.T

    class Shape(Wrong):
        @staticmethod
        def backward(ctx, gradient):
            return gradient[:, :1].expand(2, 5)

    with virtual_gpu() as gpu:
        x = torch.ones(2, 3, device=gpu.device, requires_grad=True)
        expect(RuntimeError, "broadcast", Wrong.apply(x).sum().backward, "backward")
        expect(RuntimeError, "invalid gradient at index 0", Shape.apply(x).sum().backward)
        y = torch.sigmoid(x)
        y.add_(1)
        expect(RuntimeError, "modified by an inplace operation", y.sum().backward)
        good(gpu)
    """)


def test_a_generator_can_be_left_in_the_middle_of_a_context(run: Run) -> None:
    run("""
    def steps():
        with virtual_gpu() as gpu:
            for _ in range(5):
                good(gpu)
                yield

    running = steps()
    next(running)
    next(running)
    running.close()
    assert type(torch.ones(1)) is torch.Tensor
    with virtual_gpu() as gpu:
        good(gpu)
    """)
