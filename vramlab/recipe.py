"""Recipe: how one training run saves memory. Conflicting choices are collected and refused once, each with a remedy."""

from __future__ import annotations

import difflib
import functools
import inspect
import numbers
import operator
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args, get_type_hints

Precision = Literal["fp32", "tf32", "amp-fp16", "amp-bf16", "bf16"]
Checkpointing = Literal["none", "blocks", "selective"]
Offload = Literal["none", "activations", "optimizer"]
Optimizer = Literal["adamw", "sgd", "adafactor", "adamw-8bit"]
OptimizerImpl = Literal["foreach", "fused", "loop"]
Attention = Literal["sdpa", "math"]
Parallel = Literal["none", "ddp", "zero1", "zero2", "fsdp", "pipeline", "hybrid"]
Schedule = Literal["1f1b", "gpipe"]


@dataclass(frozen=True)
class Conflict:
    """Options that exclude one another: the rule, the value that breaks it, the way out."""

    options: tuple[str, ...]
    """Names of the Recipe fields involved."""
    rule: str
    value: str
    remedy: str
    changes: tuple[tuple[str, object], ...] = ()
    """The remedy for programs: ``(option, value)``, each of which alone is a way out; empty where it takes several at once."""

    def __str__(self) -> str:
        return f"{self.rule} Got {self.value}. {self.remedy}"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Options of one run; frozen, so that a result can name the recipe it came from.

    Raises:
        TypeError: an unknown option (the nearest known one is named), or a positional argument.
        ValueError: values out of range or in conflict, all of them in one message.
    """

    precision: Precision = "fp32"
    """fp32, tf32 (same bytes, faster products), amp-fp16 and amp-bf16 (autocast), bf16 (everything in 2 bytes)."""
    loss_scale: float = 65536.0
    """First loss scale of amp-fp16; it then adapts. Unused by the other precisions."""
    micro_batch: int = 8
    """Items (sequences, images) in one forward and backward."""
    accumulation: int = 1
    """Micro-batches whose gradients are added up before one optimizer step."""
    checkpointing: Checkpointing = "none"
    """none; blocks: keep only block inputs and recompute the rest; selective: keep products too."""
    checkpoint_every: int = 1
    """Checkpoint every k-th block. Unused without checkpointing."""
    offload: Offload = "none"
    """Move activations, or the optimizer state, to host memory between uses."""
    optimizer: Optimizer = "adamw"
    """adamw keeps 8 bytes of state a parameter, sgd (no momentum) none, adafactor about 0.02, adamw-8bit about 2."""
    optimizer_impl: OptimizerImpl = "foreach"
    """foreach needs a parameter-sized temporary in the step; fused and loop do not."""
    optimizer_in_backward: bool = False
    """Step each parameter as soon as its gradient is there, then release the gradient."""
    attention: Attention = "sdpa"
    """sdpa: the fused kernels; math: written out, the score matrix is stored."""
    loss_chunks: int = 1
    """Split the loss over the vocabulary into this many chunks."""
    clip_norm: float | None = None
    """Clip the gradient's global norm to this value before the step."""
    parallel: Parallel = "none"
    """How several cards share the work."""
    ranks: int = 1
    """Number of processes, one a card."""
    stages: int = 1
    """Pipeline stages that the layers are split into."""
    schedule: Schedule = "1f1b"
    """Order of the pipeline's micro-batches."""

    def __new__(cls, *args: object, **options: object) -> Recipe:
        """Name the nearest option for an unknown one, before the generated ``__init__`` gives its bare message."""
        if args:
            raise TypeError(f"Recipe takes options by name, got {args[0]!r}; write Recipe(precision='amp-bf16').")
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise TypeError(f"Recipe has no option {name!r}{_nearest(name, known)}")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            object.__setattr__(self, field.name, _plain(value, whole=type(field.default) is int))
        problems = _bad_values(self) or [str(c) for c in conflicts(**asdict(self))]
        if problems:
            raise ValueError("\n".join(problems))

    def with_(self, **changes: Any) -> Recipe:
        """The same recipe with some options changed, checked again."""
        return replace(self, **changes)

    def changes(self) -> dict[str, object]:
        """The options that differ from the defaults, in field order."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    def __repr__(self) -> str:
        return f"Recipe({', '.join(f'{name}={value!r}' for name, value in self.changes().items())})"

    def __str__(self) -> str:
        """A short label for tables and plots: ``fp32, micro batch 8, adamw``."""
        return self.words(["precision", "micro_batch", *self.changes(), "optimizer"])

    def words(self, names: Iterable[str]) -> str:
        """Some options in words, each once: ``amp-bf16, micro batch 4, checkpointing blocks``."""
        plain = ("precision", "optimizer")  # their values speak for themselves
        return ", ".join(f"{getattr(self, n)}" if n in plain else f"{n.replace('_', ' ')} {getattr(self, n)}" for n in dict.fromkeys(names))


# Else Shift-Tab would show __new__'s *args and **options.
_init = inspect.signature(Recipe.__init__)
Recipe.__signature__ = _init.replace(parameters=list(_init.parameters.values())[1:])  # type: ignore[attr-defined]


@functools.cache
def choices(option: str) -> tuple[str, ...]:
    """The values an option may take, in order: ``choices("precision")``; empty for numbers and switches."""
    hint = get_type_hints(Recipe)[option]
    return tuple(value for value in get_args(hint) if isinstance(value, str))


def conflicts(**options: object) -> list[Conflict]:
    """Find every conflict between options, without building a Recipe (which could not exist).

    Args:
        options: Recipe fields by name; those left out have their defaults.

    Returns:
        All conflicts, in the order of the rules; the Lab shows the same texts as the exception.
    """
    value: dict[str, Any] = {f.name: f.default for f in fields(Recipe)} | options
    found = []

    def refuse(broken: bool, names: str, rule: str, remedy: str, *changes: tuple[str, object]) -> None:
        if broken:
            listed = tuple(names.split())
            found.append(Conflict(listed, rule, ", ".join(f"{n}={value[n]!r}" for n in listed), remedy, changes))

    in_backward, parallel = value["optimizer_in_backward"], value["parallel"]
    after_backward = ("optimizer_in_backward", False)
    pipelined = parallel in ("pipeline", "hybrid")
    refuse(
        in_backward and value["accumulation"] > 1,
        "optimizer_in_backward accumulation",
        "A step in backward uses each gradient at once, so there is nothing to accumulate.",
        "Set accumulation=1, or optimizer_in_backward=False.",
        ("accumulation", 1),
        after_backward,
    )
    refuse(
        in_backward and value["clip_norm"] is not None,
        "optimizer_in_backward clip_norm",
        "The global norm is known only when all gradients are, and in backward they are gone by then.",
        "Set clip_norm=None, or optimizer_in_backward=False.",
        ("clip_norm", None),
        after_backward,
    )
    refuse(
        in_backward and value["precision"] == "amp-fp16",
        "optimizer_in_backward precision",
        "The loss scaler must see all gradients before it lets a step happen.",
        "Set precision='amp-bf16', or optimizer_in_backward=False.",
        ("precision", "amp-bf16"),
        after_backward,
    )
    refuse(
        in_backward and parallel in ("ddp", "zero1"),
        "optimizer_in_backward parallel ranks",
        "A step in backward would use gradients that are not averaged over the ranks yet.",
        "Set parallel='fsdp', or optimizer_in_backward=False.",
        ("parallel", "fsdp"),
        after_backward,
    )
    refuse(
        value["checkpointing"] == "selective" and value["offload"] == "activations",
        "checkpointing offload",
        "Selective checkpointing keeps results where offloading does not see them.",
        "Set checkpointing='blocks', or offload='none'.",
        ("checkpointing", "blocks"),
        ("offload", "none"),
    )
    refuse(
        value["optimizer"] == "adafactor" and value["optimizer_impl"] == "fused",
        "optimizer optimizer_impl",
        "The factored optimizer has no fused kernel.",
        "Set optimizer_impl='foreach' or 'loop'.",
        ("optimizer_impl", "foreach"),
        ("optimizer_impl", "loop"),
    )
    refuse(
        value["optimizer"] == "adamw-8bit" and value["optimizer_impl"] != "foreach",
        "optimizer optimizer_impl",
        "The 8-bit optimizer has one implementation, its own.",
        "Leave optimizer_impl='foreach'.",
        ("optimizer_impl", "foreach"),
    )
    refuse(
        value["optimizer"] == "adamw-8bit" and value["offload"] == "optimizer",
        "optimizer offload",
        "An offloaded optimizer runs on the CPU, and the 8-bit one is made for the card.",
        "Set optimizer='adamw', or offload='none'.",
        ("optimizer", "adamw"),
        ("offload", "none"),
    )
    refuse(
        in_backward and pipelined,
        "optimizer_in_backward parallel ranks stages",
        "A pipeline's gradients add up over its micro-batches and its stages, and a step in backward uses each at once.",
        "Set optimizer_in_backward=False.",
        after_backward,
    )
    refuse(
        pipelined and value["schedule"] == "1f1b" and value["accumulation"] < value["stages"],
        "parallel ranks stages schedule accumulation",
        "1F1B begins with a micro-batch in every stage, so it needs as many as there are stages.",
        f"Set accumulation={value['stages']} or more, or schedule='gpipe'.",
        ("accumulation", value["stages"]),
        ("schedule", "gpipe"),
    )
    shards = parallel in ("zero2", "fsdp")
    refuse(
        shards and value["optimizer"] == "adafactor",
        "optimizer parallel ranks",
        "The factored optimizer takes means over whole rows and columns, and a shard has a part of them.",
        "Set parallel='zero1', or optimizer='adamw'.",
        ("parallel", "zero1"),
        ("optimizer", "adamw"),
    )
    refuse(
        shards and value["optimizer"] == "adamw-8bit",
        "optimizer parallel ranks",
        "The 8-bit optimizer's scales are of 256 numbers in a row, and a shard's are others than the whole's.",
        "Set parallel='zero1', or optimizer='adamw'.",
        ("parallel", "zero1"),
        ("optimizer", "adamw"),
    )
    refuse(
        shards and value["offload"] == "activations",
        "offload parallel ranks",
        "Gathered weights would be moved to host memory with the activations.",
        "Set offload='none', or parallel='ddp'.",
        ("offload", "none"),
        ("parallel", "ddp"),
    )
    refuse(
        shards and value["offload"] == "optimizer" and value["precision"] == "bf16",
        "offload precision parallel ranks",
        "Offloaded shards have no fp32 original, as the offloaded optimizer of one card has.",
        "Set precision='amp-bf16', or offload='none'.",
        ("precision", "amp-bf16"),
        ("offload", "none"),
    )
    refuse(
        shards and value["offload"] == "optimizer" and in_backward,
        "offload optimizer_in_backward parallel ranks",
        "Gradients are copied to host memory while the step in backward already reads them there.",
        "Set offload='none', or optimizer_in_backward=False.",
        ("offload", "none"),
        after_backward,
    )
    refuse(
        (parallel == "none") != (value["ranks"] == 1),
        "parallel ranks",
        "Several ranks need a way to share the work, and a way to share needs several ranks.",
        "Set both, for example parallel='ddp', ranks=2, or neither.",
    )
    refuse(
        pipelined != (value["stages"] > 1),
        "parallel stages",
        "Stages belong to parallel='pipeline' or 'hybrid', and those need at least 2.",
        "Set stages=2 or more with one of them, or stages=1 without.",
    )
    refuse(
        parallel == "pipeline" and value["stages"] > 1 and value["stages"] != value["ranks"],
        "parallel stages ranks",
        "A pipeline has one stage a rank.",
        "Set stages equal to ranks, or parallel='hybrid'.",
    )
    refuse(
        parallel == "hybrid" and value["stages"] > 1 and (value["ranks"] % value["stages"] > 0 or value["ranks"] == value["stages"]),
        "parallel stages ranks",
        "A hybrid runs several copies of a pipeline: ranks is a multiple of stages, at least twice.",
        "Set ranks=2*stages, for example ranks=4, stages=2.",
    )
    return found


def _nearest(name: str, known: list[str] | tuple[str, ...]) -> str:
    """``"; did you mean 'adamw'? Known: ..."`` for a misspelt name."""
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    guess = f"; did you mean {close[0]!r}?" if close else "."
    return f"{guess} Known: {', '.join(known)}."


def _plain(value: Any, whole: bool) -> Any:
    """Python's own number or text for NumPy's, from an arange say, which would stand in the recipe's text; others as they are."""
    if isinstance(value, int):
        return value
    if whole:
        return operator.index(value) if hasattr(value, "__index__") else value
    return float(value) if isinstance(value, numbers.Real) else str.__str__(value) if isinstance(value, str) else value


def _bad_values(recipe: Recipe) -> list[str]:
    """Everything wrong with single values, each as rule, value, remedy."""
    problems = []
    for field in fields(recipe):
        name, value = field.name, getattr(recipe, field.name)
        known = choices(name)
        if known:
            if value not in known:
                problems.append(f"Recipe.{name} has no value {value!r}{_nearest(str(value), known)}")
        elif isinstance(field.default, bool):
            if not isinstance(value, bool):
                problems.append(f"Recipe.{name} is True or False, got {value!r}.")
        elif isinstance(field.default, int):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                problems.append(f"Recipe.{name} is a whole number of at least 1, got {value!r}.")
        elif value is None and field.default is None:
            continue
        elif not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            problems.append(f"Recipe.{name} is a positive number, got {value!r}.")
    return problems
