"""The runs that are judged: tasks and recipes on cards, unmodified models of transformers, and FSDP's copies alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Row = dict[str, Any]

AMPERE_OR_NEWER = ("H100 SXM", "A100 80GB", "RTX 4090", "RTX 3090", "RTX 5090")  # with bf16
CARDS = (*AMPERE_OR_NEWER, "T4")

PRECISIONS = ("fp32", "tf32", "amp-bf16", "amp-fp16", "bf16")

TECHNIQUES: tuple[dict[str, Any], ...] = (
    {"accumulation": 2},
    {"accumulation": 4, "clip_norm": 1.0},
    {"checkpointing": "blocks"},
    {"checkpointing": "blocks", "checkpoint_every": 2},
    {"checkpointing": "selective"},
    {"checkpointing": "blocks", "offload": "activations"},
    {"offload": "activations"},
    {"offload": "optimizer"},
    {"optimizer_impl": "fused"},
    {"optimizer_impl": "loop"},
    {"optimizer": "sgd"},
    {"optimizer": "sgd", "optimizer_impl": "fused"},
    {"optimizer": "sgd", "optimizer_impl": "loop", "clip_norm": 0.5},
    {"optimizer": "adafactor"},
    {"optimizer": "adafactor", "optimizer_impl": "loop"},
    {"optimizer_in_backward": True},
    {"optimizer_in_backward": True, "optimizer": "adafactor"},
    {"attention": "math"},
    {"attention": "math", "checkpointing": "blocks"},
    {"loss_chunks": 4},
    {"loss_chunks": 4, "checkpointing": "selective", "optimizer_in_backward": True, "optimizer": "sgd"},
    {"loss_chunks": 8, "accumulation": 3, "clip_norm": 1.0, "optimizer_impl": "fused"},
)

SIZES: tuple[tuple[str, str, dict[str, Any], dict[str, Any]], ...] = (
    ("gpt", "nano", {"dropout": 0.1}, {"micro_batch": 5}),
    ("gpt", "mini", {}, {"micro_batch": 64}),
    ("gpt", "gpt2", {}, {"micro_batch": 4, "checkpointing": "blocks"}),
    ("gpt", "gpt2", {"dropout": 0.1, "sequence": 512}, {"micro_batch": 8}),
    ("gpt", "gpt2-medium", {}, {"micro_batch": 8, "clip_norm": 1.0}),
    ("gpt", "gpt2-xl", {}, {"micro_batch": 4, "checkpointing": "blocks", "optimizer": "adafactor", "loss_chunks": 8}),
    ("gpt", "gpt2-xl", {"sequence": 256}, {"micro_batch": 2}),
    ("gpt", "llama-nano", {}, {"micro_batch": 16}),
    ("gpt", "llama-1b", {}, {"micro_batch": 1, "checkpointing": "blocks"}),
    ("gpt", "llama-1b", {"sequence": 512}, {"micro_batch": 2, "loss_chunks": 8}),
)

LARGE = ("gpt2-xl", "llama-1b")
LIBRARY = ("gpt2", "bert", "distilbert", "llama", "t5", "qwen3", "gemma2", "mistral", "opt", "phi3", "gpt-neo")


def rows() -> list[Row]:
    """All of them, each with an id of its own."""
    return [*_tasks(), *_library(), *_ranks()]


def _tasks() -> Iterator[Row]:
    for precision in PRECISIONS:
        thorough = precision in ("fp32", "amp-bf16")
        for techniques in ({}, *TECHNIQUES) if thorough else TECHNIQUES[::2]:
            if not (techniques.get("optimizer_in_backward") and precision == "amp-fp16"):
                yield _task("RTX 4090", "gpt", "mini", {}, {"precision": precision, **techniques})
    for card in CARDS:
        for precision in PRECISIONS:
            if card != "T4" or "bf16" not in precision:
                yield _task(card, "gpt", "nano", {}, {"precision": precision})
    for card, precision in (
        *((card, "amp-bf16") for card in AMPERE_OR_NEWER),
        ("T4", "amp-fp16"),
        ("A100 80GB", "fp32"),
        ("RTX 4090", "bf16"),
    ):
        for family, size, options, recipe in SIZES:
            if size not in LARGE or card == "H100 SXM":
                yield _task(card, family, size, options, {"precision": precision, **recipe})


def _task(card: str, family: str, size: str, options: dict[str, Any], recipe: dict[str, Any]) -> Row:
    words = " ".join(f"{name}={value}" for name, value in {**options, **recipe}.items())
    return {"id": f"{card}, {family} {size}, {words}", "card": card, "task": [family, size, options], "recipe": recipe}


def _library() -> Iterator[Row]:
    for model in LIBRARY:
        for options in (
            {},
            {"amp": "bf16"},
            {"amp": "bf16", "mask": True},
            {"amp": "fp16", "scaler": True, "clip": True},
            {"amp": "bf16", "checkpointing": True, "mask": True},
        ):
            card = "T4" if options.get("amp") == "fp16" else "H100 SXM" if options.get("mask") else "RTX 4090"
            words = " ".join(name if value is True else f"{name}={value}" for name, value in options.items())
            yield {"id": f"{card}, transformers {model}, {words or 'fp32'}", "card": card, "model": model, "options": options}


WAYS: tuple[dict[str, Any], ...] = (
    {"parallel": "zero2", "ranks": 4},
    {"parallel": "zero2", "ranks": 4, "accumulation": 2, "optimizer_impl": "fused"},
    {"parallel": "fsdp", "ranks": 4},
    {"parallel": "fsdp", "ranks": 4, "accumulation": 2, "clip_norm": 1.0},
    {"parallel": "fsdp", "ranks": 4, "checkpointing": "blocks"},
    {"parallel": "fsdp", "ranks": 4, "checkpointing": "selective", "loss_chunks": 4},
    {"parallel": "fsdp", "ranks": 4, "optimizer_in_backward": True},
    {"parallel": "fsdp", "ranks": 4, "offload": "optimizer"},
    {"parallel": "pipeline", "ranks": 2, "stages": 2, "accumulation": 4, "schedule": "gpipe"},
    {"parallel": "hybrid", "ranks": 4, "stages": 2, "accumulation": 2, "schedule": "gpipe"},
)
"""Without DDP, whose reducer waits for an answer from other ranks, and 1F1B, where it counts how long NCCL holds what it sends."""


def _ranks() -> Iterator[Row]:
    """One rank of several; of a pipeline each stage."""
    for way in WAYS:
        for precision in ("fp32", "amp-bf16"):
            for rank in range(way.get("stages", 1)):
                row = _task("RTX 4090", "gpt", "mini", {}, {"precision": precision, **way})
                yield row | {"id": f"{row['id']}, rank {rank}", "rank": rank}


GROUPS: dict[str, list[list[int]]] = {
    "biases": [[3], [768], [1024]],
    "block of gpt2": [[768], [768], [2304, 768], [2304], [768, 768], [768], [768], [768], [3072, 768], [3072], [768, 3072], [768]],
    "block of llama-1b": [[2048], [2048, 2048], [512, 2048], [512, 2048], [2048, 2048], [2048], [8192, 2048], [8192, 2048], [2048, 8192]],
    "embedding of gpt2": [[50257, 768]],
    "convolutions": [[64, 3, 7, 7], [64], [10, 64, 3, 3], [10]],
}
"""Shapes of parameters that FSDP gathers together."""


def exchanges() -> list[Row]:
    """FSDP's copies of each of these groups; the tables that they read depend on how many blocks a card has room for."""
    ways = ((2, ["float32", "float32"]), (8, ["bfloat16", "float32"]), (64, ["float16", "float32"]))
    return [
        {"id": f"{card}, exchange between {ranks} ranks, {' to '.join(types)}", "card": card, "ranks": ranks, "types": types}
        for card in CARDS
        for ranks, types in ways
    ]
