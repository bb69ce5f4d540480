"""Pipeline parallelism: each rank holds some layers, micro-batches flow through the ranks; alone, or as a grid with copies."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from vramlab.devices import choose_device
from vramlab.parallel.data import add_up, listed
from vramlab.parallel.flow import Job, LazyStage, Runs, inputs_of, number_text, refuse_mixed, talking_device
from vramlab.parallel.parts import (
    ADAMW_BYTES,
    Boundary,
    PartCost,
    Stage,
    balanced_split,
    batch_norms,
    parts_of,
    trace_parts,
)
from vramlab.parallel.timeline import Clock
from vramlab.parallel.way import Loss, Way, random_state, set_random_state
from vramlab.recipe import Recipe
from vramlab.techniques.accumulation import Window
from vramlab.techniques.checkpointing import checkpoint_blocks, find_blocks
from vramlab.techniques.choose import around_forward, around_window
from vramlab.techniques.in_backward import hooked_parameters
from vramlab.techniques.precision import Precision
from vramlab.tensors import map_tensors, tensors_in

SCHEDULES = ("1f1b", "gpipe", "naive")


def pipeline(model: nn.Module, stages: int | None = None, **options: Any) -> Pipeline:
    """Split a model into stages, one a rank, through which micro-batches flow: forward to the last, backward to the first.

        pipe = vl.parallel.pipeline(MyModel(), loss=loss, example=first, micro_batches=8)
        optimizer = torch.optim.AdamW(pipe.stage.parameters())
        for batch in loader:
            window = pipe.window(split_batch(batch, 8))
            optimizer.step()
            optimizer.zero_grad()

    All ranks call it with the same model, made on the CPU; each moves its own stage to its device and lets go of the
    rest. The gradients, summed over the stages, are those of one process. What a card saves is the parameters,
    gradients and optimizer state of the other stages; of activations the first stage of 1F1B keeps those of as many
    micro-batches as there are stages, of GPipe those of all.

    Args:
        model: an `nn.Sequential`, or with a method ``pipeline_parts()``; see `vramlab.parallel.parts.parts_of`.
        stages: how many; None: as many as ranks.
        options: of `Pipeline`.

    Raises:
        RuntimeError: no process group.
        ValueError: not as many ranks as stages, and what `Pipeline` refuses.
    """
    stages = _ranks("pipeline()") if stages is None else stages
    if stages != _ranks("pipeline()"):
        raise ValueError(
            f"A pipeline has one stage a rank, got stages={stages} in {_ranks('pipeline()')} ranks. Launch as many, or take hybrid(), "
            "which repeats the pipeline."
        )
    return Pipeline(model, stages, **options)


def hybrid(model: nn.Module, stages: int, **options: Any) -> Pipeline:
    """Several copies of a pipeline, each on its own data: a grid of stages x copies; see `pipeline`.

    Rank ``r`` holds stage ``r % stages`` of copy ``r // stages``, so that neighbouring ranks exchange activations. The
    copies' gradients are added up once a window, each item weighing the same; weights and buffers come from copy 0.

    Args:
        model, options: as of `pipeline`.
        stages: of each copy; at least two copies fill the ranks.

    Raises:
        RuntimeError: no process group.
        ValueError: the ranks are no multiple of the stages, and what `Pipeline` refuses.
    """
    ranks = _ranks("hybrid()")
    if not isinstance(stages, int) or stages < 1 or ranks % stages or ranks == stages:
        raise ValueError(
            f"A hybrid runs several copies of a pipeline: ranks are a multiple of stages, at least twice, got stages={stages} in {ranks} "
            "ranks. Launch ranks=2*stages."
        )
    return Pipeline(model, stages, **options)


def _ranks(name: str) -> int:
    if not dist.is_initialized():
        raise RuntimeError(f"{name} needs a process group; call it in a function that vl.parallel.launch(function, ranks=2) runs.")
    return dist.get_world_size()


def split_batch(batch: Any, micro_batches: int) -> list[Any]:
    """A batch cut into equal micro-batches along the first dimension of each of its tensors.

    Raises:
        ValueError: a tensor that they do not divide: the stages wait for micro-batches of one size.
    """
    tensors = tensors_in(batch)
    if wrong := [t for t in tensors if t.dim() == 0 or t.shape[0] % micro_batches]:
        raise ValueError(
            f"Micro-batches are equal parts of a batch, and {micro_batches} do not divide a tensor of shape {tuple(wrong[0].shape)}. "
            "Set micro_batches to a divisor of its first dimension, or drop the last, smaller batch."
        )
    pieces = [iter(t.chunk(micro_batches)) for t in tensors]
    order = {id(t): i for i, t in enumerate(tensors)}
    return [map_tensors(lambda t: next(pieces[order[id(t)]]), batch) for _ in range(micro_batches)]


class Pipeline:
    """This rank's stage of a model, and the schedule by which micro-batches pass through all stages.

    Args:
        model: see `pipeline`.
        stages: how many; the ranks are a multiple.
        loss: ``loss(model, micro_batch)`` gives the loss *summed* over items and how many items were summed, as
            ``Task.loss`` does. It calls ``model`` once.
        example: a micro-batch like all that follow.
        micro_batches: in a window, that is for one optimizer step.
        schedule: "1f1b": a stage goes backward as soon as it can; "gpipe": first all forwards, then all backwards;
            "naive": one micro-batch at a time passes through all stages, and one rank works while the others wait.
        split: how many parts each stage gets; None: see `vramlab.parallel.parts.balanced_split`.
        device: this rank's; None: see `vramlab.devices.choose_device`.
        around: context of a stage's forward where it is not inside ``loss``, such as autocast; ``loss`` has its own.
        recomputed: modules that are checkpointed, for the balance.
        optimizer_bytes: of optimizer state a trained number, for the balance.
        chunked: ``loss`` calls ``model.hidden`` and uses ``model.head``, the last part, by itself.

    Raises:
        NotImplementedError: with torch 2.11, tensors without a gradient between stages.
        TypeError, RuntimeError: a model whose parts are not known, are no modules, exchange more than tensors, or read numbers.
        ValueError: an unknown schedule; fewer than 2 stages; ranks no multiple of them; fewer micro-batches than stages for
            1F1B; a split that is none; a stage without trained parameters; a loss in chunks and a model without hidden() and head.

    Reference: Huang et al. 2019, GPipe; Narayanan et al. 2019, PipeDream (1F1B); ``torch/distributed/pipelining``.
    """

    stage: Stage
    """This rank's part of the model, on its device: what the optimizer is built for."""
    split: tuple[int, ...]
    """How many of the model's parts each stage holds."""
    costs: list[PartCost]
    """What each part takes, from a forward without data."""
    copies: list[nn.Parameter]
    """Of this stage's parameters those that an earlier stage holds too (tied weights): a norm over the stages counts them there."""
    names: dict[str, str]
    """From the stage's parameter names to those in the whole model."""

    def __init__(
        self,
        model: nn.Module,
        stages: int,
        *,
        loss: Loss,
        example: Any,
        micro_batches: int,
        schedule: str = "1f1b",
        split: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        recomputed: Sequence[nn.Module] = (),
        optimizer_bytes: float = ADAMW_BYTES,
        chunked: bool = False,
    ) -> None:
        _check(stages, micro_batches, schedule)
        self.device = choose_device("auto") if device is None else torch.device(device)
        self.stages, self.micro_batches, self.schedule, self.loss = stages, micro_batches, schedule, loss
        self.replica, self.number = divmod(dist.get_rank(), stages)
        self.replicas = dist.get_world_size() // stages
        parts = parts_of(model)
        if chunked:
            _refuse_unchunked(model, parts)
        args, kwargs = inputs_of(loss, example, chunked)
        self.costs, boundaries = trace_parts(parts, args, kwargs, device=self.device, around=around, recomputed=recomputed)
        self.split = self._choose_split(split, boundaries[-1], optimizer_bytes)
        ends = [0, *itertools.accumulate(self.split)]
        pieces = [parts[a:b] for a, b in itertools.pairwise(ends)]
        _refuse_untrained(pieces)
        refuse_mixed([boundaries[end - 1] for end in ends[1:-1]])
        if dist.get_rank() == 0 and (norms := batch_norms(model)):
            warnings.warn(_batch_norm_text(norms, micro_batches), stacklevel=3)
        self._build(model, pieces)
        before = boundaries[ends[self.number] - 1] if not self.is_first else None
        after = boundaries[ends[self.number + 1] - 1] if not self.is_last else None
        self._runs = Runs(self.stage, tensors_in((args, kwargs)), before, after, around, chunked)
        self._schedule = self._make_schedule()

    @property
    def is_first(self) -> bool:
        """Whether this rank holds the first stage, which reads the inputs."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage, which computes the loss."""
        return self.number == self.stages - 1

    def window(
        self,
        micro_batches: Iterable[Any],
        *,
        loss: Loss | None = None,
        scaled: Callable[[torch.Tensor], torch.Tensor] = lambda total: total,
        clock: Clock | None = None,
    ) -> Window[Any]:
        """Forward and backward of a window's micro-batches; afterwards the gradients are those of its mean loss over all items.

        All ranks of a copy are given the same micro-batches, and different copies different ones. The first stage asks for
        a micro-batch when its forward begins, the last when its loss does, the others never.

        Args:
            micro_batches: as many as the pipeline was made for, one after the other.
            loss: another than the pipeline's, called in the same way.
            scaled: what backward begins with, from the loss: ``scaler.scale``.
            clock: notes this rank's work.

        Returns:
            The window, with the loss and the count of all ranks.

        Raises:
            ValueError: other micro-batches than expected, in number or in shape; parameters that step in backward.
            RuntimeError: the loss calls the model twice or never.
        """
        if isinstance(micro_batches, Sequence) and len(micro_batches) != self.micro_batches:
            raise ValueError(number_text(self.micro_batches, len(micro_batches)))
        _refuse_steps_in_backward(self.stage)
        window = _StageWindow(self)
        window.open(self.stage.parameters())
        self._runs.job = Job(iter(micro_batches), loss or self.loss, window, scaled, clock)
        try:
            numbers = torch.arange(self.micro_batches)  # what the schedule deals out: the stages fetch what belongs to a number themselves
            for some in numbers.split(1 if self.schedule == "naive" else self.micro_batches):
                self._step(some)
        finally:
            del self._runs.job  # it holds the caller's micro-batches
        window.close(self.stage.parameters())
        return window

    def _step(self, numbers: torch.Tensor) -> None:
        try:
            inputs, target = ((numbers,) if self.is_first else ()), (numbers if self.is_last else None)
            self._schedule.step(*inputs, target=target, return_outputs=False)
        except RuntimeError as error:
            # The schedule wraps what a stage raises, out-of-memory errors too, in one that says little more.
            if error.__cause__ is not None and "to run" in str(error):
                raise error.__cause__ from error.__cause__.__cause__
            raise

    def _choose_split(self, split: Sequence[int] | None, outputs: Boundary, optimizer_bytes: float) -> tuple[int, ...]:
        if split is not None:
            return _checked_split(split, len(self.costs), self.stages)
        *others, last = self.costs
        # A loss keeps about as much as the outputs and their log-probabilities in fp32.
        last = dataclasses.replace(last, activations=last.activations + 8 * sum(t.numel() for t in outputs.tensors))
        held = [in_flight(self.schedule, stage, self.stages, self.micro_batches) for stage in range(self.stages)]
        return balanced_split([*others, last], self.stages, in_flight=held, optimizer_bytes=optimizer_bytes)

    def _build(self, model: nn.Module, pieces: Sequence[Sequence[tuple[str, nn.Module]]]) -> None:
        """This rank's stage on its device, and the groups of ranks that share something."""
        self.stage = Stage(pieces[self.number])
        self.stage.training = model.training
        whole = {id(parameter): name for name, parameter in model.named_parameters()}
        keys = {id(parameter): key for key, parameter in self.stage.named_parameters()}
        self.names = {keys[i]: whole[i] for i in keys}
        tied = _tied(pieces)
        self.stage.to(self.device)
        own = dict(self.stage.named_parameters())  # a virtual card's are others than those before

        # All ranks make all groups, in the same order.
        grid = [[copy * self.stages + stage for stage in range(self.stages)] for copy in range(self.replicas)]
        self.group = [_group(row) for row in grid][self.replica]
        self._copies_group = [_group([row[stage] for row in grid]) for stage in range(self.stages)][self.number]
        self._tied: list[tuple[dist.ProcessGroup, list[nn.Parameter]]] = []
        self.copies = []
        with torch.no_grad():
            if self.replicas > 1:
                for tensor in (*self.stage.parameters(), *self.stage.buffers()):
                    dist.broadcast(tensor.data, src=self.number, group=self._copies_group)
            for holders, parameters in tied.items():
                group = [_group([row[stage] for stage in holders]) for row in grid][self.replica]
                if self.number in holders:
                    here = [own[keys[id(parameter)]] for parameter in parameters]
                    self._tied.append((group, here))
                    self.copies += here if self.number != holders[0] else []
                    for parameter in here:
                        dist.broadcast(parameter.data, src=grid[self.replica][holders[0]], group=group)
            if self.device.type == "cuda":  # NCCL connects a group when all its ranks meet, and in a schedule they meet in pairs
                dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)

    def _make_schedule(self) -> Any:
        def meta(boundary: Boundary | None, otherwise: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return boundary.tensors if boundary is not None else (otherwise,)

        stage = LazyStage(
            self.stage,
            self.number,
            self.stages,
            self.device,
            input_args=meta(self._runs.before, torch.empty(1, dtype=torch.int64, device="meta")),
            output_args=meta(self._runs.after, torch.empty((), device="meta").requires_grad_()),
            group=self.group,
        )
        stage.runs = self._runs
        kind = Schedule1F1B if self.schedule == "1f1b" else ScheduleGPipe
        at_once = 1 if self.schedule == "naive" else self.micro_batches
        return kind(stage, at_once, loss_fn=lambda output, target: output, scale_grads=False)


def in_flight(schedule: str, stage: int, stages: int, micro_batches: int) -> int:
    """Of how many micro-batches a stage keeps the activations at most."""
    most = {"naive": 1, "gpipe": micro_batches, "1f1b": stages - stage}[schedule]
    return min(most, micro_batches)


# What is refused before anything is built


def _check(stages: int, micro_batches: int, schedule: str) -> None:
    if schedule not in SCHEDULES:
        raise ValueError(f"A schedule is one of {', '.join(map(repr, SCHEDULES))}, got {schedule!r}.")
    ranks = _ranks("A pipeline")
    if isinstance(stages, bool) or not isinstance(stages, int) or stages < 2 or ranks % stages:
        raise ValueError(f"A pipeline has at least 2 stages, and ranks are a multiple of them, got stages={stages!r} in {ranks} ranks.")
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(
            f"micro_batches is a whole number of at least 1, got {micro_batches!r}; 4 times the stages leaves little idle time."
        )
    if schedule == "1f1b" and micro_batches < stages:
        raise ValueError(
            f"1F1B begins with a micro-batch in every stage, so it needs as many as stages, got micro_batches={micro_batches} for "
            f"stages={stages}. Set micro_batches (accumulation in a Recipe) to at least {stages}, or schedule='gpipe'."
        )


def _refuse_unchunked(model: nn.Module, parts: Sequence[tuple[str, nn.Module]]) -> None:
    if parts[-1][1] is not getattr(model, "head", None) or not hasattr(model, "hidden"):
        raise ValueError(
            f"A loss in chunks takes model.hidden() and model.head, and of {type(model).__name__} the last part is {parts[-1][0]!r}. "
            "Let pipeline_parts() end with the head, or set loss_chunks=1."
        )


def _checked_split(split: Sequence[int], parts: int, stages: int) -> tuple[int, ...]:
    if len(split) != stages or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in split) or sum(split) != parts:
        raise ValueError(
            f"split says how many of the {parts} parts each of the {stages} stages gets, at least 1, got {tuple(split)}. "
            "Leave it out for a balanced one."
        )
    return tuple(split)


def _refuse_untrained(pieces: Sequence[Sequence[tuple[str, nn.Module]]]) -> None:
    for number, piece in enumerate(pieces):
        if not any(p.requires_grad for _, part in piece for p in part.parameters()):
            raise ValueError(
                f"Each stage trains something, and stage {number} would hold {', '.join(name for name, _ in piece)} alone, without a "
                "trained parameter. Give it more parts, or leave split out."
            )


def _refuse_steps_in_backward(stage: nn.Module) -> None:
    live = {id(parameter) for parameter, owner in hooked_parameters.items() if owner[0]() is not None}
    if stepped := [name for name, parameter in stage.named_parameters() if id(parameter) in live]:
        raise ValueError(
            "A step in backward uses a gradient before other micro-batches, stages and copies have added theirs. Here these "
            f"step in backward: {listed(stepped)}. Use an ordinary optimizer."
        )


def _batch_norm_text(norms: Sequence[str], micro_batches: int) -> str:
    return (
        f"BatchNorm ({listed(norms)}) takes its mean over one micro-batch, and updates its running statistics {micro_batches} times a "
        "window, as with gradient accumulation: results depend on the size of a micro-batch. GroupNorm and LayerNorm do not depend on it."
    )


def _tied(pieces: Sequence[Sequence[tuple[str, nn.Module]]]) -> dict[tuple[int, ...], list[nn.Parameter]]:
    """The parameters that several stages hold, by the numbers of those."""
    holders: dict[nn.Parameter, list[int]] = {}
    for number, piece in enumerate(pieces):
        for parameter in dict.fromkeys(p for _, part in piece for p in part.parameters()):
            holders.setdefault(parameter, []).append(number)
    found: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for parameter, stages in holders.items():
        if len(stages) > 1:
            found.setdefault(tuple(stages), []).append(parameter)
    return found


def _group(ranks: Sequence[int]) -> dist.ProcessGroup:
    world = dist.group.WORLD
    return world if len(ranks) == dist.get_world_size() else dist.new_group(list(ranks))  # type: ignore[return-value]


class _StageWindow(Window[Any]):
    """A window whose loss one stage knows: all ranks agree on loss, count and divisor when it closes."""

    def __init__(self, pipe: Pipeline) -> None:
        super().__init__(pipe.micro_batches)
        self._pipe = pipe

    def share(self, total: torch.Tensor, count: int | None = None) -> torch.Tensor:
        """As `Window.share`, divided by what all copies hold if all micro-batches are like the first of this one."""
        self._divisor = self._divisor or (count or 0) * self._micro_batches * self._pipe.replicas
        return super().share(total, count)

    def close(self, parameters: Iterable[torch.Tensor]) -> None:
        """Agree, correct the gradients, and add up those that other ranks have a part of: of tied weights, and of copies."""
        parameters, pipe = list(parameters), self._pipe
        self._agree()
        if self.count and self._divisor not in (0, self.count):
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(self._divisor / self.count)
        self._divisor = self.count
        for group, shared in pipe._tied:
            add_up([p for p in shared if p.requires_grad], group)
        if pipe.replicas > 1:
            add_up([p for p in parameters if p.requires_grad], pipe._copies_group)
        super().close(parameters)

    def _agree(self) -> None:
        pipe = self._pipe
        table = torch.zeros(pipe.replicas, 2, dtype=torch.float64, device=talking_device(pipe.device))
        if pipe.is_last:
            table[pipe.replica] = torch.tensor([self._divisor, self.count], dtype=torch.float64)
        total = torch.zeros((), dtype=torch.float64, device=pipe.device)
        total += self._total
        dist.all_reduce(table)
        dist.all_reduce(total)
        self._total = total
        divisors, counts = table.T.tolist()
        self._divisor, self.count = int(divisors[pipe.replica]), int(sum(counts))


class Pipelined(Way):
    """One stage of the model a rank: ``parallel="pipeline"``, or with copies of the pipeline ``"hybrid"``.

    The `pipe` splits the model by what one micro-batch takes. That one is drawn before the model is split, and is the first
    to be trained on. All stages of a copy draw the same micro-batches, with random numbers of their own: what dropout
    draws in one stage does not change what the next micro-batch is.
    """

    pipe: Pipeline | None = None
    clock: Clock | None = None
    """Set, it notes this rank's work."""

    def sees(self, task: Any, precision: Precision) -> None:
        self._task, self._precision = task, precision

    def leader(self) -> int:
        """The rank of the first stage of this copy."""
        rank = dist.get_rank()
        return rank - rank % self.recipe.stages

    def place(self, model: nn.Module) -> nn.Module:
        """This rank's stage of a model, on its device; the rest stays where it is, and can be let go of.

        Raises:
            TypeError, RuntimeError, ValueError: see `Pipeline`.
        """
        recipe = self.recipe
        self._stream = _Stream(self.device, self.leader())
        with self._stream:
            example = self._precision.inputs(self._task.batch(recipe.micro_batch, self.device))
        blocks = [] if recipe.checkpointing == "none" else list(find_blocks(model).values())[:: recipe.checkpoint_every]
        with around_window(recipe):
            self.pipe = Pipeline(
                model,
                recipe.stages,
                loss=self._loss,
                example=example,
                micro_batches=recipe.accumulation,
                schedule=recipe.schedule,
                device=self.device,
                around=self._around,
                recomputed=blocks,
                optimizer_bytes=_optimizer_bytes(recipe, model),
                chunked=recipe.loss_chunks > 1,
            )
        inside = set(self.pipe.stage.modules())
        self._blocks = {block for block in blocks if block in inside}
        self._first = [example] if self.pipe.is_first or self.pipe.is_last else []  # the others ask for none
        self.group = self.pipe.group
        return self.pipe.stage

    def changed(self, model: nn.Module) -> AbstractContextManager[Any]:
        """While training goes on: of the blocks that are checkpointed in one process, those in this stage are here too."""
        if not self._blocks:
            return nullcontext()
        policy = "all" if self.recipe.checkpointing == "blocks" else "selective"
        return checkpoint_blocks(model, 1, policy, blocks=lambda module: module in self._blocks)

    def window(self, model: nn.Module, batches: Iterator[Any], loss: Loss, precision: Precision) -> Window[Any]:
        """See `Pipeline.window`."""
        assert self.pipe is not None
        # In fp32 and tf32 autocast() says how products are computed, in backward too.
        around = precision.autocast(self.device) if precision.mode in ("fp32", "tf32") else nullcontext()
        with around:
            window = self.pipe.window(self._drawn(batches), loss=loss, scaled=precision.scaled, clock=self.clock)
        if not self.pipe.is_last:
            precision.scaled(torch.zeros((), device=self.device))  # backward has run here too, with another stage's loss
        return window

    def step(self, precision: Precision, optimizer: torch.optim.Optimizer) -> bool:
        """Clip by the norm over all stages, and step in all or in none."""
        assert self.pipe is not None
        return precision.step(optimizer, self.recipe.clip_norm, group=self.group, copies=self.pipe.copies)

    def _drawn(self, batches: Iterator[Any]) -> Iterator[Any]:
        for _ in range(self.recipe.accumulation):
            if not self._first:
                with self._stream:
                    self._first.append(next(batches))
            yield self._first.pop()

    def _loss(self, model: nn.Module, batch: Any) -> Any:
        chunks = () if self.recipe.loss_chunks == 1 else (self.recipe.loss_chunks,)
        with self._precision.autocast(self.device):
            return self._task.loss(model, batch, *chunks)

    @contextmanager
    def _around(self) -> Iterator[None]:
        offloading = around_forward(self.pipe.stage, self.recipe) if self.pipe is not None else nullcontext()
        with self._precision.autocast(self.device), offloading:
            yield


def _optimizer_bytes(recipe: Recipe, model: nn.Module) -> float:
    """Of optimizer state on the card, a trained number."""
    if recipe.offload == "optimizer":
        return 0.0
    itemsize = max((p.itemsize for p in model.parameters() if p.requires_grad), default=4)
    return {"adamw": 2.0 * itemsize, "adamw-8bit": 2.0}.get(recipe.optimizer, 0.0)


class _Stream:
    """Random numbers of their own for what is drawn inside, the same ones on all ranks that begin with the same.

    Args:
        device: whose generator is one of them.
        leader: the rank whose numbers are taken where each device has its own.
    """

    def __init__(self, device: torch.device, leader: int) -> None:
        self._device = device
        self._state = self._take()
        if device.type == "cuda":
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, self._state[-1])
            self._state = (*self._state[:-1], everyone[leader])
        # What is drawn outside, for dropout, differs between the stages.
        torch.default_generator.manual_seed((torch.initial_seed() + 1 + dist.get_rank() - leader) % 2**63)

    def __enter__(self) -> None:
        self._outside = self._take()
        self._put(self._state)

    def __exit__(self, *error: object) -> None:
        self._state = self._take()
        self._put(self._outside)

    def _take(self) -> tuple[Any, ...]:
        card = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        return *random_state(), card

    def _put(self, state: tuple[Any, ...]) -> None:
        set_random_state(state[:3])
        if state[3] is not None:
            torch.cuda.set_rng_state(state[3], self._device)
