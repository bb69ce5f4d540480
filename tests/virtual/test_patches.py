"""What is switched while a virtual card is open is switched back, contexts keep their tensors apart, and building costs nothing."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._subclasses
import torch.optim.optimizer as optimizers
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim.optimizer import _foreach_supported_types
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import vramlab as vl
from vramlab.memory.trace import Category
from vramlab.units import MiB
from vramlab.virtual import backend
from vramlab.virtual.device import VirtualGPU, virtual_gpu
from vramlab.virtual.values import UnknownValueError

OWNERS = [
    *(torch, torch.Tensor, torch.utils, torch._subclasses, fake_tensor, FakeTensor, torch.autograd, torch.autograd.graph, nn.init),
    *(nn.Module, nn.Parameter, nn.parameter.UninitializedTensorMixin, optimizers, torch.UntypedStorage, torch.amp, torch.amp.GradScaler),
    *(
        torch.amp.autocast_mode,
        torch.autocast,
        torch.nn.functional,
        torch.nn.attention,
        torch.utils.checkpoint,
        torch.random,
        torch.backends.cuda,
    ),
    fake_tensor.log,
]


def state() -> dict[Any, Any]:
    """All that code can see of torch, by identity, and its flags."""
    seen: dict[Any, Any] = {}
    for i, owner in enumerate(OWNERS):
        seen |= {(i, name): id(value) for name, value in vars(owner).items() if not name.startswith(("__doc", "__abstract", "_abc"))}
    return seen | {
        "modes": list(_get_current_dispatch_mode_stack()),
        "foreach": list(_foreach_supported_types),
        "grad": torch.is_grad_enabled(),
        "lift": torch._C._only_lift_cpu_tensors(),
        "threads": torch.autograd.is_multithreading_enabled(),
        "autocast": [torch.is_autocast_enabled(d) for d in ("cpu", "cuda")],
        "autocast types": [torch.get_autocast_dtype(d) for d in ("cpu", "cuda")],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "swap": torch.__future__.get_swap_module_params_on_conversion(),
        "default device": torch.get_default_device(),
        "dtype": torch.get_default_dtype(),
        "hooks": [len(h) for h in (nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks)],
        "step hooks": [len(h) for h in (optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks)],
        "contexts": list(backend.contexts),
        "sdp": [
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
        ],
        "lost": list(backend.lost),
        "random": torch.get_rng_state().tolist(),
    }


def _train(gpu: VirtualGPU) -> None:
    model = nn.Linear(8, 8).to(gpu.device)
    with torch.autocast(gpu.device.type, torch.bfloat16):
        model(torch.empty(2, 8, device=gpu.device)).sum().backward()
    torch.optim.AdamW(model.parameters()).step()


def _raise(gpu: VirtualGPU) -> None:
    with gpu.building(), torch.autocast(gpu.device.type), torch.no_grad():
        raise ZeroDivisionError


def _raise_in_backward(gpu: VirtualGPU) -> None:
    x = torch.empty(2, device=gpu.device, requires_grad=True)
    x.register_hook(lambda g: 1 / 0)
    x.sum().backward()


def _build(gpu: VirtualGPU) -> None:
    with gpu.building():
        vl.tasks.gpt("nano").model()


def _nest(gpu: VirtualGPU) -> None:
    with virtual_gpu("RTX 3090") as other:
        _train(other)
        raise ZeroDivisionError


def _out_of_memory(gpu: VirtualGPU) -> None:
    try:
        torch.empty(2**40, device=gpu.device)
    except torch.OutOfMemoryError:
        raise ZeroDivisionError from None


@pytest.mark.parametrize("what", [_train, _raise, _raise_in_backward, _build, _nest, _out_of_memory])
def test_everything_is_as_before_afterwards(what: Any) -> None:
    with virtual_gpu():
        pass  # the device type, and what torch loads when it is first used, stay
    torch.manual_seed(3)
    model = nn.Linear(8, 8)  # draws what _train's will
    torch.manual_seed(3)
    before = state()
    try:
        with virtual_gpu() as gpu:
            torch.set_rng_state(torch.get_rng_state())
            what(gpu)
    except ZeroDivisionError:
        pass
    after = state()
    before.pop("random"), after.pop("random")
    assert {k for k in before.keys() | after.keys() if before.get(k) != after.get(k)} == set()
    assert model(torch.ones(1, 8)).shape == (1, 8)


def test_a_context_that_cannot_be_entered_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from vramlab.virtual import autocast

    before = state()
    monkeypatch.setattr(autocast, "hooked", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        virtual_gpu().__enter__()
    assert {k for k in before if before[k] != state()[k]} == set()


# Contexts


def test_the_innermost_card_counts(gpu: VirtualGPU) -> None:
    outer = torch.empty(1024, device=gpu.device)
    with virtual_gpu("RTX 3090") as inner:
        assert torch.get_device_module(inner.device).get_device_name() == "RTX 3090"
        x = torch.empty(2048, device=inner.device)
        assert (inner.allocated, gpu.allocated) == (8192, 4096)
        assert (x + x).device == inner.device
        with pytest.raises(RuntimeError, match="tensor of another virtual GPU"):
            x[:1024] + outer
        with pytest.raises(RuntimeError, match="tensor of another virtual GPU"):
            outer * 2
    assert torch.get_device_module(gpu.device).get_device_name() == "RTX 4090"
    assert (outer + outer).shape == (1024,)
    assert gpu.peak_allocated == 8192


def test_tensors_are_of_no_use_when_their_context_has_ended() -> None:
    with virtual_gpu() as gpu:
        x = torch.empty(3, device=gpu.device, requires_grad=True)
        y = x.sum()
    for use in (lambda: x + 1, y.item, lambda: x.cpu(), lambda: x.tolist(), y.backward, lambda: x.data.zero_()):
        with pytest.raises(RuntimeError, match=r"on a virtual GPU whose `with` block has ended|virtual GPU is open"):
            use()
    with virtual_gpu() as other, pytest.raises(RuntimeError, match="tensor of another virtual GPU"):
        x + torch.ones(3, device=other.device)


def test_no_tensor_is_made_where_no_card_is_open() -> None:
    with virtual_gpu() as gpu:
        pass
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.ones(3, device=gpu.device)
    with pytest.raises(RuntimeError, match="No virtual GPU is open here: write `with vramlab.virtual_gpu"):
        torch.get_device_module("vgpu").memory_allocated()
    assert not torch.get_device_module("vgpu").is_available()


def test_what_was_counted_can_be_read_afterwards() -> None:
    with virtual_gpu() as gpu:
        x = torch.empty(3 * MiB, device=gpu.device)
        live = gpu.trace.peak
        del x
    assert gpu.peak_allocated == gpu.trace.peak == live == 12 * MiB
    assert gpu.trace.counters is not None
    assert gpu.trace.counters.reserved == 12 * MiB
    assert gpu.trace.device == "vgpu:0"


def test_tensors_of_another_fake_mode_are_refused(gpu: VirtualGPU) -> None:
    with FakeTensorMode() as mode:
        stranger = torch.empty(3)
    with pytest.raises(RuntimeError, match="of another virtual GPU or of a FakeTensorMode"):
        stranger + torch.ones(3, device=gpu.device)
    assert isinstance(stranger, torch._subclasses.FakeTensor)
    assert not isinstance(torch.ones(3, device=gpu.device), torch._subclasses.FakeTensor)
    assert mode is not None


ALONE = {
    "another backend": (
        "torch.utils.rename_privateuse1_backend('other')",
        "torch has room for one additional device type in a process, and 'other' is registered here already. Use vramlab.plan()",
    ),
    "CUDA": ("torch.cuda.is_available = lambda: True", "A virtual GPU changes this process for good.*161129.*Use vramlab.plan()"),
}


@pytest.mark.parametrize("what", ALONE)
def test_processes_that_it_would_spoil_are_refused_and_unchanged(what: str) -> None:
    change, message = ALONE[what]
    code = f"""
        import re
        import torch
        from vramlab.virtual.device import virtual_gpu
        {change}
        before = torch._C._get_privateuse1_backend_name()
        try:
            virtual_gpu()
        except RuntimeError as error:
            assert re.search({message!r}.replace("()", r"\\(\\)"), str(error)), error
        else:
            raise AssertionError
        assert torch._C._get_privateuse1_backend_name() == before
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


# Building


class _Widths(nn.Module):
    """Computes its widths with tensors, as torchvision's RegNet does."""

    def __init__(self) -> None:
        super().__init__()
        widths = (torch.arange(4) * 8.7 + 24).div(8).round().mul(8).int()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths[:-1].tolist(), widths[1:].tolist(), strict=True))
        self.register_buffer("widths", widths)
        self.register_buffer("scale", torch.linspace(0, 1, int(widths.max())), persistent=False)


def _tied() -> nn.Module:
    model = nn.ModuleDict({"a": nn.Embedding(10, 4), "b": nn.Linear(4, 10, bias=False)})
    model["b"].weight = model["a"].weight
    return model


MODELS: dict[str, Any] = {
    "computed widths": _Widths,
    "transformer encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2),
    "transformer": lambda: nn.Transformer(16, 2, 1, 1, 32, batch_first=True),
    "attention": lambda: nn.MultiheadAttention(16, 2, kdim=8, vdim=8),
    "convolutions": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 4, 3), nn.InstanceNorm2d(4)),
    "tied": _tied,
    "lstm": lambda: nn.LSTM(8, 16, 2, bidirectional=True),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6)),
    "parameters in lists": lambda: nn.ParameterList([torch.zeros(3), nn.Parameter(torch.ones(2), requires_grad=False)]),
    "half": lambda: nn.Linear(4, 4, dtype=torch.bfloat16),
    "embeddings": lambda: nn.Sequential(nn.Embedding(10, 4, padding_idx=0), nn.EmbeddingBag(10, 4), nn.PReLU(), nn.LayerNorm(4)),
    "frozen": lambda: nn.Linear(4, 4).requires_grad_(False),
    "gpt": lambda: vl.tasks.gpt("nano").model(),
    "vit": lambda: vl.tasks.vit("nano").model(),
    "resnet": lambda: vl.tasks.resnet("nano").model(),
}


@pytest.mark.parametrize("device", ["card", "host"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_is_built_is_the_one_of_the_cpu(gpu: VirtualGPU, name: str, device: str) -> None:
    real = MODELS[name]()
    with gpu.building(None if device == "card" else "cpu"):
        model = MODELS[name]()
    if device == "host":
        assert gpu.allocated == 0
        model.to(gpu.device)
    assert repr(model).replace(" (vgpu:0)", "") == repr(real)

    def shapes(named: Any) -> list[Any]:
        return [(n, p.shape, p.dtype, p.requires_grad, p.stride()) for n, p in named]

    assert shapes(model.named_parameters()) == shapes(real.named_parameters())
    assert shapes(model.named_buffers()) == shapes(real.named_buffers())
    assert list(model.state_dict()) == list(real.state_dict())
    assert all(isinstance(p, nn.Parameter) and p.device == gpu.device for p in model.parameters())
    assert all(b.device == gpu.device for b in model.buffers())
    assert gpu.trace.breakdown("end").parameters >= sum(p.nbytes for p in model.parameters())
    blocks = sum(-(-t.nbytes // 512) * 512 for t in (*model.parameters(), *model.buffers()))
    assert gpu.allocated - gpu.trace.breakdown("end").workspace <= blocks + 4096
    assert not gpu.reads


def test_buffers_keep_their_values_and_tied_weights_are_one(gpu: VirtualGPU) -> None:
    with gpu.building():
        model, tied = _Widths(), _tied()
    assert model.widths.tolist() == _Widths().widths.tolist()
    assert tied["a"].weight is tied["b"].weight
    assert len(list(tied.parameters())) == 1


@pytest.mark.parametrize("wrapped", [lambda move: move, functools.partial], ids=["function", "partial"])
def test_where_a_model_moves_to_is_asked_once_a_move(gpu: VirtualGPU, wrapped: Callable[[Any], Any]) -> None:
    asked: list[int] = []
    where: list[Any] = ["cpu"]

    def move(tensor: torch.Tensor) -> torch.Tensor:
        asked.append(0 if nn.parameter.is_lazy(tensor) else tensor.numel())
        return tensor.to(where[0])

    model, same = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))), wrapped(move)
    weights = list(model.parameters())
    for where[0] in ("cpu", gpu.device):  # the same function, which moves to another place now
        asked.clear()
        model._apply(same)
        assert asked.count(0) == 1
        assert all(p.device == torch.device(where[0]) for p in model.parameters())
        assert all(p is before for p, before in zip(model.parameters(), weights, strict=True))
    lazy = nn.LazyLinear(4)
    for where[0] in ("cpu", gpu.device):
        lazy._apply(same)
    assert lazy(torch.zeros(2, 3, device=gpu.device)).device == lazy.weight.device == gpu.device


def test_initialisers_are_restored_and_real_models_are_initialised_afterwards(gpu: VirtualGPU) -> None:
    before = dict(vars(nn.init))
    registered = nn.Module.register_parameter, nn.Module.register_buffer
    with gpu.building():
        assert nn.init.normal_ is not before["normal_"]
        with gpu.building():
            nn.Linear(2, 2)
        assert nn.init.normal_ is not before["normal_"]
    assert dict(vars(nn.init)) == before
    assert (nn.Module.register_parameter, nn.Module.register_buffer) == registered
    assert nn.Linear(64, 64).weight.std() > 0.01
    with pytest.raises(ZeroDivisionError), gpu.building():
        raise ZeroDivisionError
    assert dict(vars(nn.init)) == before


@pytest.mark.parametrize(
    "read", [lambda p: p.item(), lambda p: p.tolist(), lambda p: float(p), lambda p: p.cpu().numpy(), lambda p: bool(p)]
)
def test_a_parameters_number_that_is_read_while_a_model_is_built_is_refused(gpu: VirtualGPU, read: Any) -> None:
    with gpu.building():
        parameter = nn.Linear(1, 1).weight
        with pytest.raises(UnknownValueError, match="Compute them on the CPU"):
            read(parameter)
    assert not gpu.reads
    assert parameter.item() == 0.0
    assert sum(gpu.reads.values()) == 1


def test_building_an_8b_model_takes_no_host_memory_and_no_time() -> None:
    code = """
        import resource
        import torch
        import vramlab as vl
        from vramlab.virtual.device import virtual_gpu
        torch.set_num_threads(1)
        with virtual_gpu("RTX 4090", limited=False) as gpu:
            with gpu.building():
                model = vl.tasks.gpt("llama-8b").model()
            count = sum(p.numel() for p in model.parameters())
            assert 7.9e9 < count < 8.1e9, count
            assert gpu.allocated >= 4 * count
            model.bfloat16()
            assert 2 * count <= gpu.allocated < 2.01 * count
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        assert used < 2 * 2**30, used
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


# Host memory


@pytest.mark.parametrize("kind", ["pinned", "not pinned", "ours"])
def test_offloaded_activations_are_virtual_and_counted_as_host_memory(gpu: VirtualGPU, kind: str) -> None:
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 1024)).to(gpu.device)
    x = torch.empty(2**12, 1024, device=gpu.device)  # 16 MiB
    before = gpu.allocated
    offload = vl.techniques.offload_activations(model) if kind == "ours" else torch.autograd.graph.save_on_cpu(pin_memory=kind == "pinned")
    with offload:
        loss = model(x).sum()
    # the first layer's input, tanh's output for its own backward and for the second layer's; torch's moves that one's weight too
    expected = 3 * 16 * MiB + (0 if kind == "ours" else 4 * MiB)
    assert gpu.host_trace.peak == gpu.peak_host == expected
    assert gpu.allocated - before <= 9 * MiB  # cuBLAS's workspace, and the loss
    loss.backward()
    assert int(gpu.host_trace.events.nbytes.sum()) == 0
    assert gpu.trace.breakdown("end").gradients == 2 * (1024 * 1024 + 1024) * 4


def test_a_terabyte_in_host_memory_takes_none_here() -> None:
    with virtual_gpu(limited=False) as gpu:
        kept = [torch.empty(2**36, device=gpu.device).cpu() for _ in range(4)]
        assert gpu.peak_host == 4 * 2**38
        assert all(t.device.type == "cpu" for t in kept)
        assert kept[0].to(gpu.device).device == gpu.device


def test_an_offloaded_optimizer_lives_in_host_memory(gpu: VirtualGPU) -> None:
    model = nn.Linear(1024, 1024, bias=False).to(gpu.device)  # 4 MiB
    optimizer = vl.techniques.OffloadedOptimizer(model.parameters(), lambda groups: torch.optim.AdamW(groups, foreach=False))
    for _ in range(2):
        model(torch.empty(8, 1024, device=gpu.device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    held = int(gpu.host_trace.events.nbytes.sum())
    assert 0 <= held - 3 * 4 * MiB <= 64  # fp32 parameters and two moments, and a counter
    assert gpu.host_trace.peak - held == 3 * 4 * MiB  # the gradient, a root and its quotient
    device = gpu.trace.events
    assert int(device.nbytes[device.category == Category.OPTIMIZER_STATE].sum()) == 0


# Several cards


class TwoParts(nn.Module):
    """The first layers on one card, the others on the next."""

    def __init__(self, devices: list[torch.device]) -> None:
        super().__init__()
        self.devices = devices
        self.first = nn.Linear(512, 1024, bias=False).to(devices[0])  # 2 MiB
        self.second = nn.Linear(1024, 256, bias=False).to(devices[1])  # 1 MiB

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x.to(self.devices[0]))).to(self.devices[1]))


def test_a_model_on_two_cards_is_counted_on_each() -> None:
    with virtual_gpu("RTX 4090", count=2) as gpu:
        model = TwoParts(gpu.devices)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            out = model(torch.empty(64, 512))
            assert out.device == gpu.devices[1]
            out.sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        assert model.first.weight.grad.device == gpu.devices[0]
        assert model.second.weight.grad.device == gpu.devices[1]
        ends = [t.breakdown("end") for t in gpu.traces]
        assert [(b.parameters, b.gradients, b.optimizer_state) for b in ends] == [(2 * MiB, 2 * MiB, 4 * MiB), (MiB, MiB, 2 * MiB)]
        assert [b.workspace > 0 for b in ends] == [True, True]
        for trace, allocator in zip(gpu.traces, gpu.allocators, strict=True):
            assert trace.rounded().peak == allocator.peak_allocated
        assert torch.get_device_module(gpu.device).device_count() == 2
        assert torch.get_device_module(gpu.device).memory_allocated(1) == gpu.allocators[1].allocated
    assert [t.device for t in gpu.traces] == ["vgpu:0", "vgpu:1"]


def test_one_card_of_two_runs_out_by_itself() -> None:
    with virtual_gpu("RTX 4090", count=2) as gpu:
        held = [torch.empty(20 * 2**30, dtype=torch.uint8, device=d) for d in gpu.devices]
        del held[0]
        with pytest.raises(torch.OutOfMemoryError, match="RTX 4090 out of memory"):
            torch.empty(8 * 2**30, dtype=torch.uint8, device=gpu.devices[1])
        held.append(torch.empty(8 * 2**30, dtype=torch.uint8, device=gpu.devices[0]))
        with pytest.raises(RuntimeError, match="same device"):
            held[0][:9] + held[1][:9]
        assert [a.allocated for a in gpu.allocators] == [8 * 2**30, 20 * 2**30]
