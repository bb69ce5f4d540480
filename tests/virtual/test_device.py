"""Ordinary PyTorch code on a virtual card."""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader, TensorDataset

from vramlab.memory.trace import Category
from vramlab.units import MiB
from vramlab.virtual.device import VirtualGPU, virtual_gpu
from vramlab.virtual.values import UnknownValueError

WORKSPACE = 8519680  # cuBLAS's, of cards before Hopper: torch/.../CUDABlas.cpp


def data(gpu: VirtualGPU, *shape: int) -> torch.Tensor:
    """Numbers that are too many to be known."""
    return torch.empty(shape, device=gpu.device)


def of(gpu: VirtualGPU, category: Category) -> int:
    """Bytes of a category that are there now."""
    events = gpu.trace.events
    return int(events.nbytes[events.category == category].sum())


# Bytes


def test_bytes_are_those_of_the_blocks(gpu: VirtualGPU) -> None:
    x = torch.zeros(1000, device=gpu.device)  # 4000 bytes
    assert gpu.allocated == 4096
    del x
    assert gpu.allocated == 0


def test_views_add_nothing_and_copies_do(gpu: VirtualGPU) -> None:
    x = torch.empty(1024, device=gpu.device)
    kept = [x[:10], x.view(2, -1), x.expand(5, 1024), x.detach(), x.view(2, -1).T, x.real, x.data]
    assert gpu.allocated == 4096
    kept.append(x.clone())
    assert gpu.allocated == 8192


MADE: dict[str, Callable[[torch.device], torch.Tensor]] = {
    "device=": lambda d: torch.zeros(1024, device=d),
    "device= a name": lambda d: torch.zeros(1024, device=str(d)),
    "device= without a number": lambda d: torch.zeros(1024, device=d.type),
    ".to": lambda d: torch.zeros(1024).to(d),
    ".to with a type": lambda d: torch.zeros(1024, dtype=torch.float64).to(d, torch.float32),
    ".to like another": lambda d: torch.zeros(1024).to(torch.zeros(0, device=d)),
    "type_as": lambda d: torch.zeros(1024).type_as(torch.zeros(0, device=d)),
    "the device's own method": lambda d: torch.zeros(1024).vgpu(),  # type: ignore[attr-defined]
    "non_blocking": lambda d: torch.zeros(1024).to(d, non_blocking=True),
    "torch.tensor": lambda d: torch.tensor([0.0] * 1024, device=d),
    "torch.as_tensor": lambda d: torch.as_tensor(np.zeros(1024, np.float32), device=d),
    "from_numpy": lambda d: torch.from_numpy(np.zeros(1024, np.float32)).to(d),
    "new_zeros": lambda d: torch.empty(0, device=d).new_zeros(1024),
    "new_tensor": lambda d: torch.empty(0, device=d).new_tensor([0.0] * 1024),
    "zeros_like": lambda d: torch.zeros_like(torch.zeros(1024), device=d),
    "arange": lambda d: torch.arange(1024.0, device=d),
    "randn": lambda d: torch.randn(1024, device=d),
    "copied": lambda d: torch.empty(1024, device=d).copy_(torch.zeros(1024)),
    "pinned": lambda d: torch.zeros(1024).pin_memory().to(d, non_blocking=True),
    "a default device": lambda d: _with_default(d),
    "deepcopy": lambda d: copy.deepcopy(torch.zeros(1024, device=d)),
    "storage": lambda d: nn.Parameter(torch.zeros(1024, device=d)),
}


def _with_default(device: torch.device) -> torch.Tensor:
    with device:
        return torch.zeros(1024)


@pytest.mark.parametrize("way", MADE)
def test_a_tensor_gets_on_the_card_in_every_way(gpu: VirtualGPU, way: str) -> None:
    x = MADE[way](gpu.device)
    assert x.device == gpu.device
    assert (x.dtype, x.shape) == (torch.float32, (1024,))
    assert gpu.allocated == 4096
    assert isinstance(x, torch.Tensor)
    assert torch.is_tensor(x)
    assert x.get_device() == 0
    assert not x.is_cpu
    assert (x + x).device == gpu.device


def test_what_is_on_the_cpu_stays_real(gpu: VirtualGPU) -> None:
    assert type(torch.randn(3)) is torch.Tensor
    assert (torch.arange(3) * 2).tolist() == [0, 2, 4]
    model = nn.Linear(2, 2)
    assert type(model.weight) is nn.Parameter
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[1, 1], [1, 1]]
    assert gpu.allocated == 0
    assert len(gpu.trace) == 0


# Modules


MOVES = [
    lambda m, d: m.to(d),
    lambda m, d: m.to(d).half(),
    lambda m, d: m.half().to(d).float(),
    lambda m, d: m.to(d, torch.bfloat16),
    lambda m, d: m.to(d).to(d).bfloat16().to(torch.float16),
    lambda m, d: m.to(d).cpu().to(d),
    lambda m, d: m.to(d).double().type(torch.float16),
    lambda m, d: m.vgpu(),
]


@pytest.mark.parametrize("move", MOVES)
def test_a_module_that_moves_keeps_its_parameters_hooks_and_attributes(gpu: VirtualGPU, move: Any) -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512))
    weight, seen = model[0].weight, []
    weight.register_hook(lambda g: seen.append(("tensor", g.shape)))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(("post", p is weight)))
    weight.note = "mine"
    observer = weakref.ref(weight)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    moved = move(model, gpu.device)
    assert moved is model
    assert model[0].weight is weight is observer()
    assert isinstance(weight, nn.Parameter)
    assert weight.requires_grad
    assert weight.is_leaf
    assert weight.note == "mine"
    assert all(b.device == gpu.device for b in model.buffers())
    assert gpu.allocated == 512 * 512 * weight.element_size() + sum(
        -(-t.nbytes // 512) * 512 for t in [*model.parameters(), *model.buffers()][1:]
    )
    model(torch.empty(4, 512, dtype=weight.dtype, device=gpu.device)).sum().backward()
    assert seen == [("tensor", (512, 512)), ("post", True)]
    optimizer.step()
    assert optimizer.state[weight]["exp_avg"].device == gpu.device
    assert model[1].num_batches_tracked.item() == 1


def test_a_module_that_has_gradients_moves_with_them(gpu: VirtualGPU) -> None:
    model = nn.Linear(256, 256, bias=False)
    model(torch.ones(1, 256)).sum().backward()
    model.to(gpu.device)
    assert model.weight.grad is not None
    assert model.weight.grad.device == gpu.device
    assert gpu.allocated == 2 * 256 * 256 * 4
    model.zero_grad()
    assert gpu.allocated == 256 * 256 * 4


def test_real_modules_move_as_ever(gpu: VirtualGPU) -> None:
    model = nn.Linear(2, 2)
    weight, values = model.weight, model.weight.tolist()
    model.double()
    assert model.weight is weight
    assert type(weight) is nn.Parameter
    assert weight.tolist() == values
    other = nn.Linear(2, 2).double().state_dict()
    model.load_state_dict(other)
    assert model.weight is weight
    assert weight.tolist() == other["weight"].tolist()
    assert weight.requires_grad
    model.load_state_dict(other, assign=True)
    assert model.weight.data_ptr() == other["weight"].data_ptr()


def test_tied_weights_stay_tied(gpu: VirtualGPU) -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(100, 64), "head": nn.Linear(64, 100, bias=False)})
    model["head"].weight = model["embedding"].weight
    model.to(gpu.device).half()
    assert model["head"].weight is model["embedding"].weight
    assert gpu.allocated == 100 * 64 * 2


def test_a_state_dict_goes_and_comes(gpu: VirtualGPU) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).to(gpu.device)
    before = gpu.allocated
    real = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).state_dict()
    assert str(model.load_state_dict(real)) == "<All keys matched successfully>"
    assert gpu.allocated == before
    assert {k: v.shape for k, v in model.state_dict().items()} == {k: v.shape for k, v in real.items()}
    assert model.state_dict()["1.num_batches_tracked"].item() == 0
    other = copy.deepcopy(model)
    assert gpu.allocated == 2 * before
    other.load_state_dict(model.state_dict())
    other.load_state_dict(model.state_dict(), assign=True)
    del model
    assert gpu.allocated == before
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict(nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32)).state_dict())


def test_an_optimizers_state_dict_goes_and_comes(gpu: VirtualGPU) -> None:
    def trained(model: nn.Linear, device: Any) -> Any:
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 64, device=device)).sum().backward()
        optimizer.step()
        return optimizer

    model = nn.Linear(64, 64).to(gpu.device)
    optimizer, real = trained(model, gpu.device), trained(nn.Linear(64, 64), "cpu")
    for state in (real.state_dict(), optimizer.state_dict(), copy.deepcopy(optimizer.state_dict())):
        optimizer.load_state_dict(state)
        optimizer.step()
        held = optimizer.state[model.weight]
        assert held["exp_avg"].device == gpu.device
        assert held["step"].device.type == "cpu"
    assert held["step"].item() == 3 or held["step"].item() == 2


def test_a_deep_copy_is_one(gpu: VirtualGPU) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to(gpu.device)
    model(data(gpu, 4, 8)).sum().backward()
    other = copy.deepcopy(model)
    assert [type(p) for p in other.parameters()] == [type(p) for p in model.parameters()]
    assert all(isinstance(p, nn.Parameter) and p.requires_grad and p.grad is None for p in other.parameters())
    assert other[1].num_batches_tracked.item() == 1
    other(data(gpu, 4, 8)).sum().backward()
    assert (model[1].num_batches_tracked.item(), other[1].num_batches_tracked.item()) == (1, 2)
    a = torch.arange(6, device=gpu.device)
    b, c, again = copy.deepcopy([a, a[2:], a])
    b[3] = 9
    assert (a.tolist(), c.tolist(), again is b) == ([0, 1, 2, 3, 4, 5], [2, 9, 4, 5], True)
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    average.update_parameters(model)
    assert average.n_averaged.item() == 2
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(model(data(gpu, 4, 8)))


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_model_without_memory_gets_it_on_the_card(gpu: VirtualGPU, device: str) -> None:
    with torch.device(device):
        model = nn.Linear(64, 64)
    model.to_empty(device=gpu.device)
    model(data(gpu, 2, 64)).sum().backward()
    assert isinstance(model.weight, nn.Parameter)
    assert of(gpu, Category.GRADIENTS) == 65 * 64 * 4


# Around the step


def test_data_comes_from_a_loader_with_pinned_memory(gpu: VirtualGPU) -> None:
    dataset = TensorDataset(torch.arange(10.0).view(10, 1), torch.arange(10))
    for workers in (0, 1):
        loader = DataLoader(dataset, batch_size=5, pin_memory=True, num_workers=workers)
        batches = [(x.to(gpu.device, non_blocking=True), y.to(gpu.device)) for x, y in loader]
        assert [y.tolist() for _, y in batches] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_the_scale_of_a_grad_scaler_grows_as_on_a_card(gpu: VirtualGPU) -> None:
    model = nn.Linear(128, 128).to(gpu.device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler(gpu.device.type, init_scale=1024.0, growth_interval=2)
    scales = []
    for clip in (True, False, True, False, True):
        with torch.autocast(gpu.device.type, torch.float16):
            loss = model(data(gpu, 2, 128)).sum()
        assert loss.dtype is torch.float32
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert scales == [1024, 2048, 2048, 4096, 4096]
    state = scaler.state_dict()
    assert (state["scale"], state["_growth_tracker"]) == (4096, 1)
    assert not gpu.reads
    scaler.update(8.0)
    assert scaler.get_scale() == 8


@pytest.mark.parametrize("foreach", [None, True, False])
def test_gradients_are_clipped(gpu: VirtualGPU, foreach: bool | None) -> None:
    model = nn.Linear(128, 128).to(gpu.device)
    model(data(gpu, 2, 128)).sum().backward()
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach).device == gpu.device
    nn.utils.clip_grad_value_(model.parameters(), 1.0, foreach=foreach)


def _block(gpu: VirtualGPU) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)).to(gpu.device)


def _selective() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


CHECKPOINTS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "reentrant": lambda m, x: checkpoint(m, x, use_reentrant=True),
    "not reentrant": lambda m, x: checkpoint(m, x, use_reentrant=False),
    "no early stop": lambda m, x: checkpoint(m, x, use_reentrant=False, early_stop=False),
    "without random state": lambda m, x: checkpoint(m, x, use_reentrant=False, preserve_rng_state=False),
    "unchecked": lambda m, x: checkpoint(m, x, use_reentrant=False, determinism_check="none"),
    "debug": lambda m, x: checkpoint(m, x, use_reentrant=False, debug=True),
    "selective": lambda m, x: checkpoint(m, x, use_reentrant=False, context_fn=_selective),
    "nested": lambda m, x: checkpoint(lambda y: checkpoint(m, y, use_reentrant=False), x, use_reentrant=False),
    "nested, reentrant": lambda m, x: checkpoint(lambda y: checkpoint(m, y, use_reentrant=True), x, use_reentrant=True),
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpointed_blocks_keep_what_goes_in_and_no_more(gpu: VirtualGPU, kind: str) -> None:
    model, x = _block(gpu), data(gpu, 512, 64).requires_grad_()
    before = gpu.allocated
    y = CHECKPOINTS[kind](model, x)
    held = gpu.allocated - before - y.nbytes - WORKSPACE
    assert held == (512 * 256 * 4 if kind == "selective" else 0)  # the first product; the second one is the output
    y.sum().backward()
    assert x.grad is not None
    assert all(p.grad is not None for p in model.parameters())
    plain = model(x)
    assert gpu.allocated - before > held + plain.nbytes


def test_a_sequence_is_checkpointed_in_segments(gpu: VirtualGPU) -> None:
    model, x = _block(gpu), data(gpu, 512, 64).requires_grad_()
    checkpoint_sequential(model, 2, x, use_reentrant=False).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_hooks_of_every_kind_are_called(gpu: VirtualGPU) -> None:
    seen: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *args: seen.append(name)

    model = nn.Linear(8, 8).to(gpu.device)
    model.weight.register_hook(note("tensor"))
    model.weight.register_post_accumulate_grad_hook(note("post-accumulate"))
    model.register_forward_pre_hook(note("forward pre"))
    model.register_forward_hook(note("forward"))
    model.register_full_backward_pre_hook(note("backward pre"))
    model.register_full_backward_hook(note("backward"))
    model.register_state_dict_post_hook(note("state dict"))
    torch.autograd.graph.register_multi_grad_hook(tuple(model.parameters()), note("multi"))
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.register_step_pre_hook(note("step pre"))
    optimizer.register_step_post_hook(note("step"))
    y = model(data(gpu, 2, 8).requires_grad_())
    y.retain_grad()
    y.grad_fn.register_hook(note("node"))
    y.grad_fn.register_prehook(note("node pre"))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append("pack"), t)[1], lambda t: (seen.append("unpack"), t)[1]):
        z = (y * y).sum()
    z.backward()
    removed = y.register_hook(note("removed"))
    removed.remove()
    optimizer.step()
    model.state_dict()
    assert set(seen) == {
        *("tensor", "post-accumulate", "forward pre", "forward", "backward pre", "backward", "state dict", "multi"),
        *("step pre", "step", "node", "node pre", "pack", "unpack"),
    }
    assert y.grad is not None


# Optimizers


def _flags(cls: Any, **flags: Any) -> bool:
    return all(name in inspect.signature(cls).parameters for name in flags)


OPTIMIZERS: list[Any] = [
    (cls, flags)
    for name in sorted(vars(torch.optim))
    if isinstance(cls := getattr(torch.optim, name), type)
    and issubclass(cls, torch.optim.Optimizer)
    and name not in ("Optimizer", "SparseAdam", "LBFGS")
    for flags in ({}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"capturable": True}, {"maximize": True}, {"amsgrad": True})
    if _flags(cls, **flags)
]


def test_all_of_torchs_optimizers_are_tried() -> None:
    names = {cls.__name__ for cls, _ in OPTIMIZERS}
    assert names >= {"SGD", "Adam", "AdamW", "Adafactor", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD"}


@pytest.mark.parametrize(("cls", "flags"), OPTIMIZERS, ids=lambda value: value.__name__ if isinstance(value, type) else str(value))
def test_every_optimizer_steps_and_keeps_what_it_keeps_on_the_cpu(cls: Any, flags: dict[str, bool]) -> None:
    def state(device: Any) -> dict[str, tuple[Any, Any]]:
        model = nn.Linear(96, 96, bias=False).to(device)
        optimizer = cls(model.parameters(), **flags)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 96, device=device)).pow(2).sum()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
        held = optimizer.state[model.weight]
        return {k: (v.dtype, v.shape) for k, v in held.items() if isinstance(v, torch.Tensor)}

    with virtual_gpu() as gpu:
        on_card = state(gpu.device)
    if not flags.get("capturable"):  # which the CPU does not have
        assert on_card == state("cpu")


def test_an_optimizer_that_asks_for_values_is_refused_by_line(gpu: VirtualGPU) -> None:
    model = nn.Linear(96, 96).to(gpu.device)
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure() -> torch.Tensor:
        loss = model(data(gpu, 2, 96)).sum()
        loss.backward()
        return loss

    with pytest.raises(UnknownValueError, match=r"aten::\w+ at .*test_device.py:\d+"):
        optimizer.step(closure)


def test_an_optimizer_without_flags_takes_foreach_and_its_temporary_is_in_the_trace() -> None:
    def peak(**flags: Any) -> int:
        with virtual_gpu() as gpu:
            weights = [nn.Parameter(torch.empty(MiB, device=gpu.device)) for _ in range(5)]  # 4 MiB each
            for w in weights:
                w.grad = torch.empty_like(w)
            optimizer = torch.optim.AdamW(weights, **flags)
            optimizer.step()
            held = gpu.allocated
            gpu.reset_peaks(0)
            optimizer.step()
            assert held - 20 * 4 * MiB == (
                5 * 512 if flags.get("fused") else 0
            )  # the fused kernel keeps its counters on the card; weights, gradients, two moments
            return gpu.allocators[0].peak_allocated - held

    assert peak(foreach=True) == 5 * 4 * MiB  # the roots of all second moments
    assert peak() == peak(foreach=True)
    assert peak(foreach=False) == 3 * 4 * MiB  # a root, its quotient, and that of the parameter before, which Python still holds
    assert peak(fused=True) == 0


def test_adafactor_keeps_rows_and_columns(gpu: VirtualGPU) -> None:
    weight = nn.Parameter(torch.empty(512, 256, device=gpu.device))
    weight.grad = torch.empty_like(weight)
    optimizer = torch.optim.Adafactor([weight])
    optimizer.step()
    assert of(gpu, Category.OPTIMIZER_STATE) == (512 + 256) * 4


# The rest of autograd


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, k: int) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        ctx.k = k
        return x * k

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        assert x.shape == gradient.shape
        return gradient * ctx.k, None


AUTOGRAD: dict[str, Callable[[torch.Tensor], Any]] = {
    "Function": lambda x: Times.apply(x, 2).sum().backward() or x.grad,
    "create_graph": lambda x: torch.autograd.grad((x**3).sum(), x, create_graph=True)[0],
    "second derivative": lambda x: torch.autograd.grad(torch.autograd.grad((x**3).sum(), x, create_graph=True)[0].sum(), x)[0],
    "func.grad": lambda x: torch.func.grad(lambda y: (y**2).sum())(x.detach()),
    "vmap": lambda x: torch.func.vmap(lambda y: y * 2)(x.detach()),
    "jacobian": lambda x: torch.autograd.functional.jacobian(lambda y: y**2, x.detach()[0])[0].expand_as(x),
    "inference mode": lambda x: torch.inference_mode()(lambda: x * 2)(),
    "no_grad": lambda x: torch.no_grad()(lambda: x * 2)(),
    "in place": lambda x: x.clone().mul_(2).add_(x),
    "retain_graph": lambda x: [(y := x.sum()).backward(retain_graph=True), y.backward(), x.grad][-1],
    "functional_call": lambda x: torch.func.functional_call(nn.Linear(64, 64).to(x.device), {"weight": x[:64].detach().expand(64, 64)}, x),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x)[:, :64].expand(-1, 64),
    "interpolate": lambda x: F.interpolate(x[None], scale_factor=2)[0, :, ::2],
}


@pytest.mark.parametrize("what", AUTOGRAD)
def test_autograd_in_all_its_forms(gpu: VirtualGPU, what: str) -> None:
    x = data(gpu, 64, 64).requires_grad_()
    result = AUTOGRAD[what](x)
    assert result.device == gpu.device
    assert result.shape == x.shape


LAYERS: dict[str, Callable[[torch.device], torch.Tensor]] = {
    "lstm": lambda d: nn.LSTM(8, 16, 2, batch_first=True).to(d)(torch.ones(2, 5, 8, device=d))[0],
    "rnn": lambda d: nn.RNN(8, 16, bidirectional=True).to(d)(torch.ones(2, 5, 8, device=d))[0],
    "transformer": lambda d: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).to(d)(torch.ones(2, 5, 16, device=d)),
    "attention": lambda d: nn.MultiheadAttention(16, 2).to(d)(*[torch.ones(5, 2, 16, device=d)] * 3)[0],
    "embedding bag": lambda d: nn.EmbeddingBag(10, 4).to(d)(torch.zeros(2, 3, dtype=torch.long, device=d)),
    "conv3d": lambda d: nn.Conv3d(2, 4, 3).to(d)(torch.ones(1, 2, 5, 5, 5, device=d)),
    "transposed": lambda d: nn.ConvTranspose2d(2, 4, 3).to(d)(torch.ones(1, 2, 5, 5, device=d)),
    "weight norm": lambda d: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)).to(d)(torch.ones(2, 4, device=d)),
    "spectral norm": lambda d: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)).to(d)(torch.ones(2, 4, device=d)),
    "lazy": lambda d: nn.LazyLinear(4).to(d)(torch.ones(2, 7, device=d)),
    "bilinear": lambda d: nn.Bilinear(4, 4, 2).to(d)(torch.ones(2, 4, device=d), torch.ones(2, 4, device=d)),
    "packed": lambda d: _packed(d),
}


def _packed(device: torch.device) -> torch.Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(torch.ones(2, 5, 4, device=device), torch.tensor([5, 3]), batch_first=True)
    assert packed.data.shape == (8, 4)
    assert packed.batch_sizes.tolist() == [2, 2, 2, 1, 1]
    out, lengths = nn.utils.rnn.pad_packed_sequence(nn.LSTM(4, 8, batch_first=True).to(device)(packed)[0], batch_first=True)
    assert lengths.tolist() == [5, 3]
    assert out.shape == (2, 5, 8)
    return out


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_all_kinds_train(gpu: VirtualGPU, name: str) -> None:
    out = LAYERS[name](gpu.device)
    out.sum().backward()
    assert out.device == gpu.device
    assert out.shape == LAYERS[name](torch.device("cpu")).shape
    assert of(gpu, Category.GRADIENTS) > 0


def test_sparse_gradients_are_refused_with_the_remedy(gpu: VirtualGPU) -> None:
    embedding = nn.Embedding(10, 4, sparse=True).to(gpu.device)
    with pytest.raises(NotImplementedError, match=r"sparse tensor.*Plan a dense version: sparse=False"):
        embedding(torch.tensor([1, 2], device=gpu.device)).sum().backward()


def test_an_operator_without_a_shape_function_is_refused_with_the_remedy(gpu: VirtualGPU) -> None:
    @torch.library.custom_op("vramlab_tests::odd", mutates_args=())
    def odd(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    with pytest.raises(NotImplementedError, match=r"has no shape function.*register_fake\('vramlab_tests::odd'\)"):
        odd(data(gpu, 3))


# Random numbers and what a device's module answers


def test_generators_and_random_states_are_taken(gpu: VirtualGPU) -> None:
    generator = torch.Generator(device=gpu.device).manual_seed(3)
    assert isinstance(generator, torch.Generator)
    assert torch.randn(3, device=gpu.device, generator=generator).shape == (3,)
    assert torch.randperm(4, device=gpu.device, generator=generator).shape == (4,)
    assert data(gpu, 4).normal_(generator=generator).shape == (4,)
    torch.manual_seed(0)
    module = torch.get_device_module(gpu.device)
    module.set_rng_state(module.get_rng_state())
    module.manual_seed_all(3)
    with torch.random.fork_rng(devices=[0], device_type=gpu.device.type):
        torch.rand(3, device=gpu.device)
    assert isinstance(torch.Generator(), torch.Generator)
    assert (
        torch.rand(2, generator=torch.Generator().manual_seed(0)).tolist()
        == torch.rand(2, generator=torch.Generator().manual_seed(0)).tolist()
    )


def test_the_devices_module_answers_as_torch_cuda_does(gpu: VirtualGPU) -> None:
    module = torch.get_device_module(gpu.device)
    assert module.is_available()
    assert module.device_count() == 1
    assert module.get_device_name() == "RTX 4090"
    assert module.get_device_capability() == (8, 9)
    assert module.is_bf16_supported()
    x = data(gpu, 3 * MiB)  # 12 MiB
    assert (module.memory_allocated(), module.memory_reserved()) == (12 * MiB, 12 * MiB)
    del x
    assert (module.memory_allocated(), module.max_memory_allocated()) == (0, 12 * MiB)
    module.reset_peak_memory_stats()
    assert (module.max_memory_allocated(), gpu.peak_allocated) == (0, 12 * MiB)
    module.empty_cache()
    assert (module.memory_reserved(), gpu.reserved) == (0, 0)
    free, total = module.mem_get_info()
    assert total - free == gpu.card.context
    assert module.current_device() == 0
    event, stream = module.Event(), module.current_stream()
    event.record(stream)
    event.wait()
    stream.wait_event(event)
    with module.stream(stream), module.device(0):
        module.synchronize()
    assert event.query()
    assert event.elapsed_time(event) == 0
    assert not module.is_current_stream_capturing()


# What was recorded


def test_categories_phases_operators_and_lines_of_a_small_loop(gpu: VirtualGPU) -> None:
    model = nn.Linear(256, 256, bias=False).to(gpu.device)  # 256 KiB
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    x = data(gpu, 64, 256)  # 64 KiB
    loss = torch.tanh(model(x)).sum()
    loss.backward()
    optimizer.step()
    K = 1024
    assert gpu.trace.breakdown("end of forward").__dict__ | {} == {
        **dict.fromkeys(gpu.trace.breakdown("end").__dict__, 0),
        "parameters": 256 * K,
        "inputs": 64 * K,
        "activations": 64 * K + 8,  # tanh keeps its result; the loss, and the 1 that backward begins with
        "workspace": WORKSPACE,
    }
    end = gpu.trace.breakdown("end")
    assert (end.parameters, end.gradients, end.optimizer_state, end.inputs) == (256 * K, 256 * K, 256 * K, 64 * K)
    events = gpu.trace.events
    lines = [events.lines[n] for n in events.line]
    text = {int(line.rpartition(":")[2]) for line in lines if line.startswith(("test_device.py", __file__))}
    source, first = inspect.getsourcelines(test_categories_phases_operators_and_lines_of_a_small_loop)
    said = {source[n - first].strip() for n in text if 0 <= n - first < len(source)}
    assert {"loss = torch.tanh(model(x)).sum()", "optimizer.step()", "loss.backward()"} <= said


def test_what_a_backward_allocates_is_ascribed_to_the_line_of_its_forward(gpu: VirtualGPU) -> None:
    x = data(gpu, 1024).requires_grad_()
    y = torch.sigmoid(x)
    y.sum().backward()
    events = gpu.trace.events
    (i,) = [i for i, o in enumerate(events.operator) if events.operators[o] == "aten::sigmoid_backward" and events.nbytes[i] > 0]
    source, first = inspect.getsourcelines(test_what_a_backward_allocates_is_ascribed_to_the_line_of_its_forward)
    assert source[int(events.lines[events.line[i]].rpartition(":")[2]) - first].strip() == "y = torch.sigmoid(x)"


def test_functools_partial_and_lambdas_are_ordinary_models(gpu: VirtualGPU) -> None:
    loss = functools.partial(F.linear, weight=data(gpu, 4, 4).requires_grad_())
    loss(data(gpu, 2, 4)).sum().backward()
    assert loss.keywords["weight"].grad is not None


# Arguments


@pytest.mark.parametrize("count", [0, -1, 1.5])
def test_there_is_at_least_one_card(count: Any) -> None:
    with pytest.raises(ValueError, match=f"There is at least 1 virtual card, got count={count}"):
        virtual_gpu("RTX 4090", count=count)


def test_a_card_of_which_nothing_is_left_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Nothing of .*RTX 4090.* is left: its context takes .* and others 30.00 GiB; lower in_use"):
        virtual_gpu("RTX 4090", in_use="30 GiB")


def test_a_card_is_opened_once() -> None:
    gpu = virtual_gpu()
    with gpu:
        pass
    with pytest.raises(RuntimeError, match="A virtual GPU is opened once"):
        gpu.__enter__()


def test_in_use_and_context_are_not_available() -> None:
    with virtual_gpu("RTX 4090", in_use="1 GiB") as gpu:
        assert gpu.capacity == gpu.card.memory - gpu.card.context - 2**30
        held = torch.empty(2**20, device=gpu.device)
        assert gpu.device_peak() == 20 * MiB + gpu.card.context + 2**30
        del held
    with virtual_gpu("RTX 4090", limited=False) as gpu:
        held = torch.empty(2**36, device=gpu.device)
        assert gpu.allocated == held.nbytes == 2**38
