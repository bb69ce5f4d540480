"""Sharding on real gloo ranks: the losses, gradients and parameters of one process on the same batch, in a part of the bytes."""

from __future__ import annotations

import itertools
import math
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from test_data_parallel import STEPS, Batch, Case, Outcome, Words, batch_of, in_one_process, items_of, loss_of, unlike
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import vramlab as vl
from vramlab import training
from vramlab.parallel import (
    RankWindow,
    check_optimizer,
    clip_gradients,
    ddp,
    fsdp,
    gathered_gradient_bytes,
    launch,
    shard_groups,
    sharded,
    sharded_bytes,
    windows,
    zero1,
)
from vramlab.tasks import Task
from vramlab.tasks.models import DecoderConfig, decoder
from vramlab.techniques import Adafactor, Precision, Window, checkpoint_blocks, chunked_cross_entropy, step_in_backward

TINY = DecoderConfig(layers=2, heads=2, width=14, sequence=8, vocabulary=33)
GIB = 2**30


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of all of a parameter or gradient, of which this rank may hold a part."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def held(tensors: Any) -> int:
    """The bytes of the memory behind these tensors on this rank."""
    storages = {local(t).untyped_storage()._cdata: local(t).untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


# A loop as people write it, around fsdp()


class Branching(Words):
    """The second block is used only for the batches whose first token is odd, which all ranks have in the same places."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.embedding(ids[:, 1:]))
        if int(ids[0, 0]) % 2:
            x = self.blocks[1](x)
        return self.head(x)


def branching_batches(rank: int, k: int) -> list[Batch]:
    """The second block is used in the last micro-batch of each window alone."""
    made = []
    for i in range(STEPS * k):
        ids, labels = batch_of(rank, i, unlike(rank, i))
        made.append((torch.cat((torch.full((len(ids), 1), int(i % k == k - 1)), ids), 1), labels))
    return made


@dataclass(frozen=True)
class Sharding:
    """A case, and how its model is sharded."""

    case: Case
    options: dict[str, Any] = field(default_factory=dict)
    branching: bool = False
    copies: bool = False
    """Two copies of the model, each sharded over half the ranks."""
    late: bool = False
    """Checkpoint the blocks after sharding."""

    def model(self) -> nn.Module:
        if not self.branching:
            return self.case.model()
        torch.manual_seed(0)
        return Branching()

    def batches(self, rank: int) -> list[Batch]:
        return branching_batches(rank, self.case.k) if self.branching else self.case.batches(rank)


UNEVEN = Case(k=3, kept=unlike)
LAST = {"reduce": "last"}
CASES = {
    "plain": Sharding(Case()),
    "plain, zero 2": Sharding(Case(), {"zero": 2}),
    "accumulation, uneven tokens": Sharding(UNEVEN),
    "accumulation, uneven tokens, zero 2": Sharding(UNEVEN, {"zero": 2}),
    "accumulation, uneven tokens counted on the way": Sharding(Case(k=3, kept=unlike, known=False)),
    "nothing counts anywhere": Sharding(Case(k=2, known=False, kept=lambda rank, number: 0)),
    "reduced in the last micro-batch": Sharding(UNEVEN, LAST),
    "reduced in the last micro-batch, zero 2": Sharding(UNEVEN, {**LAST, "zero": 2}),
    "a branch of the last micro-batch": Sharding(Case(k=3, kept=unlike), branching=True),
    "a branch of the last micro-batch, reduced there": Sharding(Case(k=3, kept=unlike), LAST, branching=True),
    "amp-bf16": Sharding(Case(k=2, amp=True, kept=unlike)),
    "amp-bf16, checkpointed": Sharding(Case(k=2, amp=True, kept=unlike, checkpointed=True)),
    "bf16 parameters": Sharding(Case(k=3, dtype=torch.bfloat16, known=False, kept=unlike)),
    "checkpointed before": Sharding(Case(k=2, checkpointed=True)),
    "checkpointed after": Sharding(Case(k=2, checkpointed=True), late=True),
    "checkpointed after, zero 2": Sharding(Case(k=2, checkpointed=True), {"zero": 2}, late=True),
    "frozen": Sharding(Case(k=2, frozen=True)),
    "tied": Sharding(Case(k=2, tied=True)),
    "tied, reduced in the last micro-batch": Sharding(Case(k=2, tied=True), LAST),
    "tied, checkpointed, zero 2": Sharding(Case(k=2, tied=True, checkpointed=True), {"zero": 2}),
    "tied, with the root": Sharding(Case(k=2, tied=True), {"apart": False}),
    "clipped": Sharding(Case(k=2, clip=0.05, kept=unlike)),
    "offloaded": Sharding(Case(k=2, clip=0.05, kept=unlike), {"offload": True}),
    "ranks that run out windows earlier": Sharding(Case(k=2, micro_batches=lambda rank, k: STEPS * k if rank == 0 else 1)),
    "copies of shards": Sharding(UNEVEN, copies=True),
    "copies of shards, zero 2, tied": Sharding(Case(k=2, tied=True), {"zero": 2}, copies=True),
}


def train(case: Case, model: nn.Module, parts: Iterator[Window[Batch]]) -> Outcome:
    """The loop of tests/test_data_parallel.py, where gradients and parameters may be in parts."""
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    outcome = Outcome([], [], [], {}, [])
    for window in parts:
        window.open(model.parameters())
        for batch in window:
            with torch.autocast("cpu", torch.bfloat16, enabled=case.amp):
                total = loss_of(model, batch)
            window.share(total, None if case.known else items_of(batch)).backward()
        window.close(model.parameters())
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        outcome.gradients.append({name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None})
        outcome.losses.append(window.loss)
        outcome.counts.append(window.count)
        optimizer.step()
        optimizer.zero_grad()
    outcome.parameters = {name: whole(p) for name, p in model.named_parameters()}
    return outcome


def in_rank(sharding: Sharding, mesh: DeviceMesh) -> Outcome:
    case = sharding.case
    model = sharding.model() if not sharding.late else Case(dtype=case.dtype, tied=case.tied).model()
    model = fsdp(model, mesh=mesh, **sharding.options)
    if sharding.late:
        checkpoint_blocks(model)
    batches = sharding.batches(mesh_rank(mesh))
    if case.known:
        parts: Any = windows(batches, case.k, items_of, model=model)
    else:
        parts = (RankWindow(case.k, batches=batches[i * case.k : (i + 1) * case.k], model=model) for i in range(STEPS))
    return train(case, model, parts)


def mesh_rank(mesh: DeviceMesh) -> int:
    return mesh.mesh.flatten().tolist().index(dist.get_rank())


def alone_on_all(sharding: Sharding, ranks: int) -> Outcome:
    if not sharding.branching:
        return in_one_process(sharding.case, ranks)
    k, ours = sharding.case.k, [sharding.batches(rank) for rank in range(ranks)]
    together = [[batch for batches in ours for batch in batches[i * k : (i + 1) * k]] for i in range(STEPS)]
    return train(sharding.case, sharding.model(), (Window(len(part), items=sum(map(items_of, part)), batches=part) for part in together))


# train() itself, with a GPT


def uneven_task(ranks: int, rank: int | None) -> Task:
    """Sentences of which other numbers of tokens count in each micro-batch; rank None gives all ranks' micro-batches in turn."""
    made = itertools.count()

    def batch(size: int, device: torch.device) -> Any:
        i = next(made)
        whose, number = (i % ranks, i // ranks) if rank is None else (rank, i)
        ids = torch.randint(TINY.vocabulary, (size, 9), generator=torch.Generator().manual_seed(100 * whose + number))
        labels = ids[:, 1:].clone()
        labels[:, 2 + (3 * whose + 5 * number) % 6 :] = -100
        return ids[:, :-1].to(device), labels.to(device)

    def loss(model: Any, batch: Any, chunks: int = 1) -> tuple[torch.Tensor, int]:
        ids, labels = batch
        counted = int((labels != -100).sum())
        if chunks > 1:
            return chunked_cross_entropy(model.hidden(ids), model.head.weight, labels, chunks, reduction="sum"), counted
        return F.cross_entropy(model(ids).float().flatten(0, 1), labels.flatten(), reduction="sum"), counted

    def model() -> nn.Module:
        torch.manual_seed(0)
        return decoder(TINY)

    return Task(model, batch, loss, chunked=True)


SGD = {"micro_batch": 2, "optimizer": "sgd"}
ADAMW = {"micro_batch": 2, "optimizer": "adamw"}
ALL, SHARDS, BOTH = ("zero1", "zero2", "fsdp"), ("zero2", "fsdp"), ("zero1", "fsdp")
RECIPES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "accumulation": (ALL, SGD | {"accumulation": 3}),
    "adamw, clipped": (BOTH, ADAMW | {"accumulation": 3, "clip_norm": 0.05}),
    "checkpointed": (BOTH, SGD | {"accumulation": 2, "checkpointing": "blocks"}),
    "selectively checkpointed": (("fsdp",), SGD | {"checkpointing": "selective"}),
    "amp-bf16": (BOTH, SGD | {"accumulation": 2, "precision": "amp-bf16"}),
    "amp-bf16, checkpointed": (SHARDS, SGD | {"precision": "amp-bf16", "checkpointing": "blocks"}),
    "amp-fp16, clipped": (BOTH, SGD | {"accumulation": 2, "precision": "amp-fp16", "clip_norm": 0.05}),
    "bf16": (BOTH, SGD | {"accumulation": 3, "precision": "bf16"}),
    "chunked loss": (SHARDS, SGD | {"accumulation": 2, "loss_chunks": 3}),
    "chunked loss, checkpointed": (("fsdp",), SGD | {"loss_chunks": 3, "checkpointing": "blocks"}),
    "offloaded optimizer": (BOTH, ADAMW | {"accumulation": 2, "offload": "optimizer", "clip_norm": 0.1}),
    "fused": (BOTH, ADAMW | {"optimizer_impl": "fused"}),
    "loop": (BOTH, ADAMW | {"optimizer_impl": "loop"}),
    "adafactor": (("zero1",), SGD | {"optimizer": "adafactor", "accumulation": 2}),
    "step in backward": (("fsdp",), ADAMW | {"optimizer_in_backward": True}),
}
RUNS = [(way, name) for name, (ways, _) in RECIPES.items() for way in ways]


@dataclass
class Trained:
    losses: list[float]
    parameters: dict[str, torch.Tensor]


def trained(task: Task, recipe: vl.Recipe) -> Trained:
    """What `vl.train` gives in three steps, and the parameters afterwards."""
    placed = []
    find = training.choose_way

    def watched(recipe: vl.Recipe, device: torch.device) -> Any:
        way = find(recipe, device)
        place = way.place
        way.place = lambda model: placed.append(place(model)) or placed[0]  # type: ignore[method-assign, func-returns-value]
        return way

    training.choose_way = watched
    try:
        rate = 0.1 if recipe.optimizer == "sgd" else 1e-3
        reports = vl.train(task, recipe, "cpu", record_every=None, learning_rate=rate)
        losses = [report.loss for report in itertools.islice(reports, 3)]
    finally:
        training.choose_way = find
    model = getattr(placed[0], "module", placed[0])
    return Trained(losses, {name: whole(p) for name, p in model.named_parameters()})


def single(options: dict[str, Any], ranks: int) -> vl.Recipe:
    """The recipe of one process that sees all ranks' micro-batches."""
    return vl.Recipe(**options | {"accumulation": ranks * options.get("accumulation", 1), "optimizer_in_backward": False})


# One exhibit for each thing that the ranks show together


def norms(mesh: DeviceMesh) -> dict[str, Any]:
    """The gradient's norm, of shards and of DDP, before and after it is clipped."""
    group = mesh.get_group()
    rank, shown = dist.get_rank(group), {}
    for name, model in {"fsdp": fsdp(Case().model(), mesh=mesh), "ddp": ddp(Case().model(), process_group=group)}.items():
        loss_of(model, batch_of(rank, 0, 10)).backward()
        shown[name] = clip_gradients(model, 0.1)
        shown[f"{name} afterwards"] = float(whole(nn.utils.get_total_norm([p.grad for p in model.parameters()])))
    return shown


def tied_by_hand(mesh: DeviceMesh) -> dict[str, Any]:
    """Embedding(8, 4) and Linear(4, 8) with one weight: sharded one by one as torch lets people do, and by fsdp()."""
    shown: dict[str, Any] = {}
    by_hand, ours = TiedPair(), TiedPair()
    fully_shard(by_hand.a, mesh=mesh)
    fully_shard(by_hand.b, mesh=mesh)
    shown["one by one"] = by_hand.a.weight is by_hand.b.weight
    ours = fsdp(ours, mesh=mesh)
    shown["fsdp"] = ours.a.weight is ours.b.weight
    shown["own group"] = isinstance(ours.a, FSDPModule) and isinstance(ours.b, FSDPModule)
    ours(torch.arange(8)).square().sum().backward()
    shown["gradient"] = whole(ours.a.weight.grad)
    return shown


class TiedPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.b.weight = self.a.weight
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.blocks[0](self.a(x)))


def overflow(mesh: DeviceMesh) -> list[tuple[str, bool, float, bool, list[torch.Tensor]]]:
    """A step of each way in which one rank's gradient is infinite: whether it was made, the scale, whether anything moved."""
    group, shown = mesh.get_group(), []
    for way in ("zero 3", "zero 2", "zero 1"):
        torch.manual_seed(0)
        model = Words()
        model = ddp(model, process_group=group) if way == "zero 1" else fsdp(model, int(way[-1]), mesh=mesh)
        optimizer = zero1(model, sgd) if way == "zero 1" else sgd(model.parameters())
        precision = Precision("amp-fp16", loss_scale=1024.0)
        before = [whole(p) for p in model.parameters()]
        for bad in (True, False):
            loss = loss_of(model, batch_of(dist.get_rank(group), 0, 10))
            precision.backward(loss)
            if bad and (way == "zero 1" or dist.get_rank(group) == dist.get_world_size(group) - 1):
                # The first rows are on the first rank; these are the last that any rank has.
                last = [p for p in model.parameters() if p.grad is not None and local(p.grad).numel()][-1]
                local(last.grad).view(-1)[-1] = math.inf
            stepped = precision.step(optimizer, clip_norm=1.0)
            optimizer.zero_grad()
            moved = any(not torch.equal(whole(p), b) for p, b in zip(model.parameters(), before, strict=True))
            shown.append((way, stepped, precision.scale, moved, [whole(p) for p in model.parameters()]))
    return shown


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def rank_bytes(mesh: DeviceMesh) -> dict[str, Any]:
    """Bytes of parameters, gradients and AdamW's state on this rank, and the shapes of the shards."""
    model = fsdp(Words(), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, batch_of(0, 0, 10)).backward()
    shown: dict[str, Any] = {"parameters": held(model.parameters()), "gradients": held(p.grad for p in model.parameters())}
    optimizer.step()
    shown["state"] = held(v for state in optimizer.state.values() for name, v in state.items() if name != "step")
    shown["shards"] = {name: tuple(local(p).shape) for name, p in model.named_parameters()}
    return shown


def kept_gradients(mesh: DeviceMesh) -> dict[str, tuple[int, int]]:
    """Bytes of gradients on this rank between the micro-batches of a window, and what was foreseen."""
    shown = {}
    for reduce in ("each", "last"):
        model = fsdp(Words(), mesh=mesh, reduce=reduce)
        window = RankWindow(2, batches=[batch_of(0, i, 10) for i in range(2)], model=model)
        for i, batch in enumerate(window):
            window.share(loss_of(model, batch), 10).backward()
            if i == 0:
                model.set_reshard_after_backward(True)
                groups = [g for m in model.modules() if isinstance(m, FSDPModule) for g in m._get_fsdp_state()._fsdp_param_groups]
                unsharded = {id(p): p._unsharded_param.grad for g in groups for p in g.fsdp_params if p._unsharded_param.grad is not None}
                kept = held(unsharded.values()) + held(p.grad for p in model.parameters() if isinstance(p.grad, DTensor))
        shown[reduce] = kept, gathered_gradient_bytes(model)
    return shown


def between_passes(mesh: DeviceMesh) -> dict[int, list[str]]:
    """Which modules' parameters are whole after forward."""
    shown = {}
    for zero in (2, 3):
        model = fsdp(Case(tied=True).model(), zero, mesh=mesh)
        model(torch.zeros(1, 3, dtype=torch.long))
        shown[zero] = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    return shown


def mixed(mesh: DeviceMesh) -> dict[str, Any]:
    """FSDP's own mixed precision: types of what is computed with, kept, and added up; and the gradient's error."""
    seen: list[torch.dtype] = []
    model = fsdp(Case().model(), mesh=mesh, param_dtype=torch.bfloat16)
    model.blocks[0].up.register_forward_hook(lambda module, args, out: seen.append(module.weight.dtype))
    rank = dist.get_rank(mesh.get_group())
    loss_of(model, batch_of(rank, 0, 10)).backward()
    weight = model.blocks[0].up.weight
    return {"computed": seen[0], "kept": weight.dtype, "gradient": weight.grad.dtype, "whole gradient": whole(weight.grad)}


def equal_start(mesh: DeviceMesh) -> list[torch.Tensor]:
    """The weights and buffers after sharding models of each rank's own; a block with a buffer is moved with it."""
    torch.manual_seed(dist.get_rank())
    model = Words()
    model.blocks[0].register_buffer("seen", torch.randn(3))
    model = fsdp(model, mesh=mesh)
    return [whole(t) for t in (*model.parameters(), *model.buffers())]


def noted(mesh: DeviceMesh) -> list[str]:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fsdp(model, mesh=mesh)
    return [str(w.message) for w in caught]


def sums_for_averages(mesh: DeviceMesh) -> dict[str, Any]:
    """With a gloo that adds up where it should average, or refuses to, as older ones did."""
    real = dist.reduce_scatter_single
    rank, shown = dist.get_rank(mesh.get_group()), {}

    def adds(*args: Any, op: Any = None, **kwargs: Any) -> Any:
        return real(*args, op=dist.ReduceOp.SUM, **kwargs)

    def refuses(*args: Any, op: Any = None, **kwargs: Any) -> Any:
        if op == dist.ReduceOp.AVG:
            raise RuntimeError("Cannot use ReduceOp.AVG with Gloo")
        return real(*args, op=op, **kwargs)

    for name, broken in {"adds": adds, "refuses": refuses}.items():
        known = dict(sharded._averaging)
        sharded._averaging.clear()
        try:
            dist.reduce_scatter_single = broken
            model = fsdp(Case().model(), mesh=mesh)
            loss_of(model, batch_of(rank, 0, 10)).backward()
            shown[name] = {name: whole(p.grad) for name, p in model.named_parameters()}
        finally:
            dist.reduce_scatter_single = real
            sharded._averaging.clear()
            sharded._averaging.update(known)
    shown["asked once"] = len(sharded._averaging)
    return shown


def zero1_parts(mesh: DeviceMesh) -> dict[str, Any]:
    """Numbers of state on this rank, and learning rates after a scheduler's step."""
    model = ddp(Words(), process_group=mesh.get_group())
    optimizer = zero1(model, lambda params: torch.optim.AdamW(params, lr=0.1))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    loss_of(model, batch_of(0, 0, 10)).backward()
    optimizer.step()
    schedule.step()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    state = sum(s["exp_avg"].numel() for s in optimizer.optim.state.values())
    return {
        "state": state,
        "rates": [group["lr"] for group in (*optimizer.param_groups, *optimizer.optim.param_groups)],
        "moved": [float((p.detach() - b).abs().max()) for p, b in zip(model.parameters(), before, strict=True)],
    }


def resumed(mesh: DeviceMesh) -> dict[str, Any]:
    """Four steps without a break, and two steps, a checkpoint, and two steps of new objects: scales, counters and parameters."""

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer, Precision]:
        model = fsdp(Case().model(), mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01), Precision("amp-fp16", loss_scale=1024.0, growth_interval=3)

    def go(parts: Any, numbers: Any) -> None:
        model, optimizer, precision = parts
        for i in numbers:
            precision.backward(loss_of(model, batch_of(dist.get_rank(mesh.get_group()), i, 10)))
            precision.step(optimizer)
            optimizer.zero_grad()

    straight = fresh()
    go(straight, range(4))
    first = fresh()
    go(first, range(2))
    saved = *get_state_dict(first[0], first[1]), first[2].state_dict()
    second = fresh()
    set_state_dict(second[0], second[1], model_state_dict=saved[0], optim_state_dict=saved[1])
    second[2].load_state_dict(saved[2])  # last, for the line above makes a step of its own
    loaded = second[2].state_dict()
    go(second, range(2, 4))
    return {
        "saved": saved[2],
        "loaded": loaded,
        "scales": [parts[2].state_dict() for parts in (straight, second)],
        "parameters": [[whole(p) for p in parts[0].parameters()] for parts in (straight, second)],
    }


def too_early(mesh: DeviceMesh) -> dict[str, str]:
    """What is said of optimizers that were built before sharding: when they are given, asked about, and used by train()'s step."""
    model = Words()
    early = torch.optim.AdamW(model.parameters())
    shown = {}
    with pytest.raises(ValueError, match="take the place") as caught:
        fsdp(model, mesh=mesh, optimizer=early)
    shown["given"] = str(caught.value)
    fsdp(model, mesh=mesh)
    with pytest.raises(ValueError, match="take the place") as caught:
        check_optimizer(early)
    shown["asked"] = str(caught.value)
    way = sharded.Sharded(vl.Recipe(parallel="fsdp", ranks=2), torch.device("cpu"))
    with pytest.raises(ValueError, match="take the place") as caught:
        way.step(Precision("fp32"), early)
    shown["used"] = str(caught.value)
    check_optimizer(torch.optim.AdamW(model.parameters()))
    fsdp(Words(), mesh=mesh, optimizer=early)  # of another model, so of no concern here
    return shown


def most_in_forward() -> list[int]:
    """The most bytes, beside parameters, in the forward of a checkpointed step under autocast: as train() does it, and with its cache."""
    recipe = vl.Recipe(parallel="fsdp", ranks=4, precision="amp-bf16", checkpointing="blocks", **SGD)
    switch, shown = torch.set_autocast_cache_enabled, []
    for switched in (switch, lambda enabled: None):
        torch.set_autocast_cache_enabled = switched
        try:
            _, second = itertools.islice(vl.train(uneven_task(4, dist.get_rank()), recipe, "cpu", record_every=1), 2)
        finally:
            torch.set_autocast_cache_enabled = switch
        steps = second.memory.timeline()
        shown.append(int(steps[steps.phase == "forward"][["weight copies", "activations", "temporary"]].sum(axis=1).max()))
    return shown


def exhibits() -> dict[int, dict[str, Any]]:
    """All that one launch of four real ranks is asked for, as four and as two pairs; starting them costs the most."""
    torch.set_num_threads(1)
    four = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    pairs = grid["shards"]
    shown: dict[int, dict[str, Any]] = {4: {}, 2: {}}
    for ranks, mesh in ((4, four), (2, pairs)):
        for name, sharding in CASES.items():
            if not sharding.copies or ranks == 4:
                shown[ranks][name] = in_rank(sharding, grid if sharding.copies else mesh)
        for exhibit in (norms, tied_by_hand, overflow, rank_bytes, equal_start, noted):
            shown[ranks][exhibit.__name__] = exhibit(mesh)
    for exhibit in (kept_gradients, between_passes, mixed, sums_for_averages, zero1_parts, resumed, too_early):
        shown[2][exhibit.__name__] = exhibit(pairs)
    shown[4]["zero1_parts"] = zero1_parts(four)
    shown[4]["most_in_forward"] = most_in_forward()
    for way, name in RUNS:
        recipe = vl.Recipe(parallel=way, ranks=4, **RECIPES[name][1])  # type: ignore[arg-type]
        shown[4][f"{way}: {name}"] = trained(uneven_task(4, dist.get_rank()), recipe)
    return shown


@pytest.fixture(scope="module")
def launched() -> list[dict[int, dict[str, Any]]]:
    return launch(exhibits, ranks=4, device="cpu", timeout=240)


@pytest.fixture(params=[2, 4], ids=["2 ranks", "4 ranks"])
def ranks(request: pytest.FixtureRequest, launched: list[dict[int, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [shown[request.param] for shown in launched[: request.param]]


@pytest.fixture
def pair(launched: list[dict[int, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [shown[2] for shown in launched[:2]]


@pytest.fixture
def four(launched: list[dict[int, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [shown[4] for shown in launched]


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def tolerance(halved: bool, amp: bool) -> dict[str, float]:
    """Sums in another order; in bf16 a gradient is rounded to 8 bits, at another scale where the divisor is another."""
    if halved:
        return {"rtol": 2e-2, "atol": 2e-3}
    return {"rtol": 1e-4, "atol": 1e-6} if amp else {"rtol": 2e-5, "atol": 1e-7}


# The same numbers


@pytest.mark.parametrize("name", CASES)
def test_shards_learn_what_one_process_learns_on_the_same_batch(name: str, ranks: list[dict[str, Any]]) -> None:
    if name not in ranks[0]:
        assert CASES[name].copies  # two copies of two shards are four ranks
        return
    case = CASES[name].case
    expected = alone_on_all(CASES[name], len(ranks))
    close = tolerance(case.dtype is torch.bfloat16, case.amp)
    for shown in ranks:
        outcome: Outcome = shown[name]
        assert outcome.losses == pytest.approx(expected.losses, rel=1e-2 if case.dtype is torch.bfloat16 else 1e-5)
        assert outcome.counts == expected.counts
        for ours, theirs in zip(outcome.gradients, expected.gradients, strict=True):
            torch.testing.assert_close(ours, theirs, **close)
        torch.testing.assert_close(outcome.parameters, expected.parameters, **close)


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_have_the_same_whole(name: str, ranks: list[dict[str, Any]]) -> None:
    for shown in ranks[1:]:
        for part in ("gradients", "parameters", "losses"):
            first = getattr(ranks[0][name], part) if name in ranks[0] else None
            torch.testing.assert_close(getattr(shown[name], part) if name in shown else None, first, rtol=0, atol=0)


@pytest.mark.parametrize(("way", "name"), RUNS, ids=[f"{way}: {name}" for way, name in RUNS])
def test_train_gives_the_losses_and_parameters_of_one_process(way: str, name: str, four: list[dict[str, Any]]) -> None:
    options = RECIPES[name][1]
    task = uneven_task(4, None)
    expected = trained(task, single(options, 4))
    start = Precision(options.get("precision", "fp32")).prepare(task.model())
    moved = flat(expected.parameters) - flat(dict(start.named_parameters()))
    for shown in four:
        run: Trained = shown[f"{way}: {name}"]
        assert run.losses == pytest.approx(expected.losses, rel=1e-5 if ERRORS[name] == 5e-5 else 1e-3)
        # Relative to how far the parameters went; three steps of the wrong size would be off by more than any of these.
        assert (flat(run.parameters) - flat(expected.parameters)).norm() <= ERRORS[name] * moved.norm()


ERRORS = dict.fromkeys(RECIPES, 5e-5) | {"adafactor": 5e-3, "amp-fp16, clipped": 5e-3, "bf16": 5e-2}
ERRORS |= {"amp-bf16": 2e-2, "amp-bf16, checkpointed": 2e-2}
"""By how much sums in another order, and roundings at another scale, may move the parameters elsewhere."""


def flat(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.detach().double().flatten() for _, value in sorted(parameters.items())])


def test_bf16_gradients_are_added_up_in_fp32(four: list[dict[str, Any]]) -> None:
    # 256 + 1 is 256 in bf16: here 3 micro-batches of 4 ranks differ in size, and each is rounded once.
    exact = in_one_process(Case(k=3, known=False, kept=unlike), 4).gradients[0]
    for shown in four:
        for name, gradient in shown["bf16 parameters"].gradients[0].items():
            assert gradient.dtype is torch.bfloat16
            assert (gradient.float() - exact[name]).norm() <= 0.02 * exact[name].norm() + 1e-6


def test_the_norm_is_that_of_all_shards_and_of_ddp(ranks: list[dict[str, Any]]) -> None:
    for shown in ranks:
        assert shown["norms"]["fsdp"] == pytest.approx(shown["norms"]["ddp"], rel=1e-5)
        assert shown["norms"]["fsdp"] == ranks[0]["norms"]["fsdp"]
        assert shown["norms"]["fsdp"] > 0.1
        for name in ("fsdp afterwards", "ddp afterwards"):
            assert shown["norms"][name] == pytest.approx(0.1, rel=1e-4)


def test_an_infinite_gradient_on_one_rank_lets_all_skip_the_step_and_halve_the_scale(ranks: list[dict[str, Any]]) -> None:
    for shown in ranks:
        told = [entry[:4] for entry in shown["overflow"]]
        ways = ("zero 3", "zero 2", "zero 1")
        assert told == [entry for way in ways for entry in ((way, False, 512.0, False), (way, True, 512.0, True))]
        for ours, first in zip(shown["overflow"], ranks[0]["overflow"], strict=True):
            torch.testing.assert_close(ours[4], first[4], rtol=0, atol=0)


def test_weights_and_buffers_start_as_those_of_the_first_rank(ranks: list[dict[str, Any]]) -> None:
    for shown in ranks[1:]:
        torch.testing.assert_close(shown["equal_start"], ranks[0]["equal_start"], rtol=0, atol=0)


def test_own_mixed_precision_computes_in_16_bits_and_keeps_and_adds_up_in_32(pair: list[dict[str, Any]]) -> None:
    batches = [batch_of(rank, 0, 10) for rank in range(2)]
    single_model = Case().model()
    (sum(loss_of(single_model, batch) for batch in batches) / 2).backward()
    expected = single_model.blocks[0].up.weight.grad
    for shown in pair:
        types = {name: shown["mixed"][name] for name in ("computed", "kept", "gradient")}
        assert types == {"computed": torch.bfloat16, "kept": torch.float32, "gradient": torch.float32}
        assert (shown["mixed"]["whole gradient"] - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("name", ["adds", "refuses"])
def test_gradients_are_averages_also_where_gloo_adds_up(name: str, pair: list[dict[str, Any]]) -> None:
    model = Case().model()
    (sum(loss_of(model, batch_of(rank, 0, 10)) for rank in range(2)) / 2).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for shown in pair:
        torch.testing.assert_close(shown["sums_for_averages"][name], expected, rtol=2e-5, atol=1e-7)


def test_gloo_is_asked_once_a_process_group(pair: list[dict[str, Any]]) -> None:
    for shown in pair:
        assert shown["sums_for_averages"]["asked once"] == 3  # all four, this pair, and the copies' group


# What is tied stays tied


def test_tied_weights_are_one_group_and_stay_one_parameter(ranks: list[dict[str, Any]]) -> None:
    model = TiedPair()
    (model(torch.arange(8)).square().sum()).backward()
    for shown in ranks:
        pair = shown["tied_by_hand"]
        assert (pair["one by one"], pair["fsdp"], pair["own group"]) == (False, True, True)
        torch.testing.assert_close(pair["gradient"], model.a.weight.grad)


@pytest.mark.usefixtures("alone")
def test_a_tie_that_sharding_loses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TiedPair()
    apart = {"a": [model.a], "b": [model.b], "": [model]}
    monkeypatch.setattr(sharded, "shard_groups", lambda *args, **kwargs: apart)
    with pytest.raises(RuntimeError, match=r"a.weight, b.weight were one parameter and are several after sharding.*drift apart.*report it"):
        fsdp(model)


# Bytes


PADDED = {"embedding.weight": (11, 8), "head.weight": (11, 8)}  # 11 rows do not divide by 2 or 4


def test_each_rank_holds_its_part_and_no_more(ranks: list[dict[str, Any]]) -> None:
    model, n = Words(), len(ranks)
    padded = sum(math.ceil(p.shape[0] / n) * p[0].numel() for p in model.parameters()) * 4
    for rank, shown in enumerate(ranks):
        mine = {
            name: len(range(rank * (rows := math.ceil(p.shape[0] / n)), max(rank * rows, min((rank + 1) * rows, p.shape[0]))))
            for name, p in model.named_parameters()
        }
        bytes_ = shown["rank_bytes"]
        assert {name: shape[0] for name, shape in bytes_["shards"].items()} == mine
        assert bytes_["parameters"] == bytes_["gradients"] == padded
        assert bytes_["state"] == 2 * 4 * sum(mine[name] * p[0].numel() for name, p in model.named_parameters())
        groups = [[p.shape for module in modules for p in own(module, model)] for modules in shard_groups(model).values()]
        foreseen = sharded_bytes(groups, n)
        assert (foreseen.parameters, foreseen.gradients) == (padded, padded)
    whole_model = 4 * sum(p.numel() for p in model.parameters())
    assert sum(shown["rank_bytes"]["state"] for shown in ranks) == 2 * whole_model
    assert whole_model / n <= padded < whole_model / n + 4 * sum(p[0].numel() for p in model.parameters())


def own(module: nn.Module, model: nn.Module) -> list[nn.Parameter]:
    """What a group's module brings: of the root, what no other group has."""
    if module is not model:
        return list(module.parameters())
    others = {id(p) for modules in list(shard_groups(model).values())[:-1] for m in modules for p in m.parameters()}
    return [p for p in model.parameters() if id(p) not in others]


@given(rows=st.lists(st.integers(1, 40), min_size=1, max_size=5), width=st.integers(1, 7), ranks=st.integers(1, 9))
def test_shards_are_a_rank_s_share_and_less_than_a_row_more(rows: list[int], width: int, ranks: int) -> None:
    shapes = [[torch.Size((r, width))] for r in rows]
    foreseen = sharded_bytes(shapes, ranks)
    share = sum(r * width * 4 for r in rows) / ranks
    assert share <= foreseen.parameters < share + 4 * width * len(rows)
    assert foreseen.parameters == foreseen.gradients
    both = sum(sorted((math.ceil(r / ranks) * ranks * width * 4 for r in rows), reverse=True)[:2])
    assert foreseen.gathered == both
    assert sharded_bytes(shapes, ranks, 2).gathered == foreseen.parameters * ranks


@pytest.mark.parametrize("layers", [2, 3, 12])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_root_alone_gathers_all_and_blocks_gather_two(layers: int, ranks: int) -> None:
    block = [torch.Size((64, 16)), torch.Size((64,))]
    of_block = 4 * (64 * 16 + 64)
    everything = sharded_bytes([block * layers], ranks)
    assert everything.gathered == everything.reduced == layers * of_block
    each = sharded_bytes([block] * layers, ranks)
    assert each.parameters + each.gathered == layers * of_block // ranks + 2 * of_block
    assert each.reduced == of_block


def test_two_large_embeddings_with_the_root_need_a_reduction_buffer_of_9_47_gib() -> None:
    embedding = torch.Size((248320, 5120))
    assert sharded_bytes([[embedding, embedding]], 8, itemsize=2).reduced / GIB == pytest.approx(9.473, abs=5e-4)
    assert sharded_bytes([[embedding], [embedding]], 8, itemsize=2).reduced / GIB == pytest.approx(9.473 / 2, abs=5e-4)


def test_reducing_in_the_last_micro_batch_keeps_the_gradients_of_the_whole_model(pair: list[dict[str, Any]]) -> None:
    model = Words()
    numbers = sum(p.numel() for p in model.parameters())
    padded = sum(math.ceil(p.shape[0] / 2) * p[0].numel() for p in model.parameters())
    for shown in pair:
        assert shown["kept_gradients"] == {"each": (4 * padded, 4 * numbers), "last": (4 * numbers, 4 * numbers)}


def test_zero_3_gives_the_blocks_up_after_forward_and_zero_2_nothing(pair: list[dict[str, Any]]) -> None:
    names = [name for name, _ in Words(tied=True).named_parameters()]
    for shown in pair:
        assert shown["between_passes"] == {2: names, 3: [name for name in names if not name.startswith("blocks")]}


def test_16_bit_copies_of_weights_do_not_outlive_their_block_in_forward(four: list[dict[str, Any]]) -> None:
    first, _ = decoder(TINY).blocks
    copies = 2 * sum(p.numel() for p in first.parameters() if p.dim() == 2)
    for shown in four:
        ours, cached = shown["most_in_forward"]
        assert cached - ours >= copies


def test_zero_1_divides_the_state_by_whole_parameters_and_follows_schedulers(ranks: list[dict[str, Any]]) -> None:
    loads = [0] * len(ranks)
    for numel in sorted((p.numel() for p in Words().parameters()), reverse=True):
        loads[loads.index(min(loads))] += numel
    assert [shown["zero1_parts"]["state"] for shown in ranks] == loads
    for shown in ranks:
        assert shown["zero1_parts"]["rates"] == [0.05, 0.05]
        # AdamW moves by the learning rate where the gradient is what it was.
        assert shown["zero1_parts"]["moved"] == ranks[0]["zero1_parts"]["moved"]
        assert max(shown["zero1_parts"]["moved"]) == pytest.approx(0.05, rel=0.05)


# Checkpoints of a run


def test_a_run_goes_on_from_its_checkpoint_with_the_scale_it_had(pair: list[dict[str, Any]]) -> None:
    for shown in pair:
        run = shown["resumed"]
        assert run["saved"] == run["loaded"]
        assert (run["saved"]["scale"], run["saved"]["_growth_tracker"]) == (1024.0, 2)
        assert run["scales"][0] == run["scales"][1]
        assert run["scales"][0]["scale"] == 2048.0
        torch.testing.assert_close(run["parameters"][1], run["parameters"][0], rtol=0, atol=0)


# What is refused, and what is said


def test_an_optimizer_from_before_sharding_is_refused(pair: list[dict[str, Any]]) -> None:
    for shown in pair:
        for when in ("given", "asked", "used"):
            assert re.search(
                r"this AdamW has the old ones.*change nothing: embedding.weight.*Build the optimizer after", shown["too_early"][when]
            )


def test_batch_norm_is_noted_once(ranks: list[dict[str, Any]]) -> None:
    assert [len(shown["noted"]) for shown in ranks] == [1] + [0] * (len(ranks) - 1)
    assert re.search(r"BatchNorm \(0.1, 1.1\).*number of ranks", ranks[0]["noted"][0])


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.LazyLinear(3)])


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.blocks = nn.Parameter(torch.ones(())), nn.ModuleList([nn.Linear(2, 2)])


class SharedBetweenBlocks(nn.Module):
    def __init__(self, outside: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.head = nn.Linear(2, 2)
        (self.head if outside else self.blocks[2]).weight = self.blocks[0].weight


def spread() -> nn.Module:
    model = Words()
    model.head.weight = nn.Parameter(torch.ones(8, 11).t())
    return model


def stepping() -> nn.Module:
    model = Words()
    model.optimizer = step_in_backward(model, sgd)  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    ("model", "error", "text"),
    [
        (lambda: 3, TypeError, r"fsdp\(\) shards a torch.nn.Module, got int; write fsdp"),
        (lambda: nn.Linear(2, 2), ValueError, r"gathers one block at a time\..*Linear has no ModuleList.*fsdp\(model, blocks=MyBlock\)"),
        (lambda: Words().requires_grad_(False), ValueError, "none of this model's 14 parameters requires a gradient. Unfreeze"),
        (Lazy, ValueError, "these have none yet: blocks.0.weight, blocks.0.bias. Call the model once"),
        (Scaled, ValueError, r"along their first dimension, and these have none: scale. Give them the shape \(1,\)"),
        (spread, ValueError, r"contiguous, and these parameters are not: head.weight. Make them so"),
        (stepping, ValueError, r"these step in backward already: embedding.weight, .* Build the optimizer after fsdp"),
        (lambda: SharedBetweenBlocks(False), ValueError, r"one group.*: blocks.0, blocks.2 share one parameter. Name larger blocks"),
        (lambda: SharedBetweenBlocks(True), ValueError, r"one group.*: blocks.0, head share one parameter. Name larger blocks"),
        (lambda: ddp(Words()), ValueError, "shared once, as a whole: here all of it is a DistributedDataParallel already; give a new"),
        (lambda: fsdp(Words()), ValueError, "shared once, as a whole: here all of it is sharded already; give a new"),
        (lambda: nn.Sequential(fsdp(Words())), ValueError, "here '0' is sharded already"),
    ],
)
@pytest.mark.usefixtures("alone")
def test_what_cannot_be_sharded_is_refused_with_a_remedy(model: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        fsdp(model())


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"zero": 1}, ValueError, r"zero=2 and zero=3, got 1; for zero=1 use vl.parallel.zero1"),
        ({"zero": True}, ValueError, "zero=2 and zero=3, got True"),
        ({"reduce": "never"}, ValueError, "reduce is 'each' or 'last', got 'never'"),
        ({"param_dtype": "bf16"}, ValueError, "param_dtype is a floating-point type such as torch.bfloat16, got 'bf16'"),
        ({"param_dtype": torch.int8}, ValueError, "floating-point type such as torch.bfloat16, got torch.int8"),
        ({"reduce": "last", "param_dtype": torch.bfloat16}, ValueError, "these have 16 bits.* Set reduce='each'"),
        ({"blocks": nn.Conv2d}, ValueError, r"Words has no block of class Conv2d.*fsdp\(model, blocks=MyBlock\)"),
    ],
)
@pytest.mark.usefixtures("alone")
def test_an_option_that_does_not_fit_is_refused(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        fsdp(Words(), **options)


@pytest.mark.usefixtures("alone")
def test_16_bit_gradients_reduced_last_are_refused() -> None:
    with pytest.raises(ValueError, match="these have 16 bits.*that only the last micro-batch uses would fail"):
        fsdp(Words().bfloat16(), reduce="last")


def test_sharding_outside_of_ranks_says_where_it_belongs() -> None:
    with pytest.raises(RuntimeError, match=r"fsdp\(\) needs a process group; call it in a function that vl.parallel.launch"):
        fsdp(Words())


@pytest.mark.usefixtures("alone")
def test_offloading_needs_a_way_between_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "cuda:nccl")
    monkeypatch.setattr(sharded, "init_device_mesh", lambda *args: CudaMesh())
    with pytest.raises(RuntimeError, match=r"has 'cuda:nccl'\. Call init_process_group\('cpu:gloo,cuda:nccl'\)"):
        fsdp(Words(), offload=True)


class CudaMesh:
    device_type = "cuda"

    def get_group(self, dimension: int) -> None:
        return None


@pytest.mark.usefixtures("alone")
def test_cards_that_nccl_connects_are_where_the_shards_go(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sharded._device_type(Words()) == "cpu"
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "cpu:gloo,cuda:nccl")
    assert sharded._device_type(Words()) == "cuda"


def test_copies_on_some_of_the_ranks_alone_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Grid:
        ndim = 2

        def size(self) -> int:
            return 4

    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 8)
    with pytest.raises(ValueError, match="two dimensions holds all 8 ranks, got one of 4; give one dimension"):
        sharded._group_of(Grid())  # type: ignore[arg-type]


@pytest.mark.usefixtures("alone")
def test_zero_1_needs_gradients_that_are_equal_on_all_ranks() -> None:
    with pytest.raises(TypeError, match=r"equal on all ranks, got a Words; wrap it before: model = vl.parallel.ddp\(model\)"):
        zero1(Words(), sgd)


@pytest.mark.usefixtures("alone")
def test_adafactor_refuses_shards_and_steps_whole_parameters_with_zero_1() -> None:
    with pytest.raises(ValueError, match=r"whole rows and columns, got a shard of a parameter of shape \(11, 8\); use vl.parallel.ddp"):
        Adafactor(fsdp(Words()).parameters())
    assert isinstance(zero1(ddp(Words()), Adafactor).optim, Adafactor)


@pytest.mark.usefixtures("alone")
def test_whole_parameters_are_gone_before_the_next_block_is_brought_to_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    model, alive = Words(), []
    weights = [weakref.ref(block.up.weight) for block in model.blocks]
    begin = sharded._start_equal

    def watched(modules: Any, mesh: DeviceMesh) -> None:
        alive.append([weight() is not None for weight in weights])
        begin(modules, mesh)

    monkeypatch.setattr(sharded, "_start_equal", watched)
    fsdp(model)
    assert alive == [[True, True], [False, True], [False, False]]


# How a model is grouped


def grouped(model: nn.Module, **options: Any) -> list[tuple[str, ...]]:
    names = {id(module): name for name, module in model.named_modules()}
    return [tuple(names[id(module)] for module in modules) for modules in shard_groups(model, **options).values()]


class Shaped(nn.Module):
    def __init__(self, vocabulary: int, tied: bool) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocabulary, 8), nn.Embedding(4, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


BLOCKS: list[tuple[str, ...]] = [("blocks.0",), ("blocks.1",)]


@pytest.mark.parametrize(
    ("vocabulary", "tied", "options", "others"),
    [
        (9, False, {}, [("embedding",), ("head",)]),
        (9, True, {}, [("embedding", "head")]),
        (8, False, {}, []),  # 64 numbers, and a block has 72
        (8, True, {}, []),
        (9, False, {"apart": False}, []),
        (9, True, {"apart": False}, []),
    ],
)
def test_what_is_as_large_as_a_block_is_gathered_apart(
    vocabulary: int, tied: bool, options: dict[str, Any], others: list[tuple[str, ...]]
) -> None:
    assert grouped(Shaped(vocabulary, tied), **options) == [*BLOCKS, *others, ("",)]


@pytest.mark.parametrize("make", [Words, lambda: Words(tied=True), lambda: Shaped(9, True), lambda: decoder(TINY), TiedPair])
def test_each_parameter_is_in_one_group(make: Callable[[], nn.Module]) -> None:
    model = make()
    groups = shard_groups(model)
    seen = [id(p) for modules in groups.values() for p in dict.fromkeys(p for module in modules for p in own(module, model))]
    assert sorted(seen) == sorted(id(p) for p in model.parameters())


def test_blocks_can_be_named() -> None:
    assert grouped(Words(), blocks=nn.LayerNorm)[:2] == [("blocks.0.norm",), ("blocks.1.norm",)]
