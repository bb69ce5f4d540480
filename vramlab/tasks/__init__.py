"""What is trained: a Task, and the built-in ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vramlab.tasks.models import DECODERS, RESNETS, VITS, ResNet, ViT, decoder
from vramlab.tasks.text import image_batch, text_batch
from vramlab.techniques.losses import chunked_cross_entropy


@dataclass(frozen=True)
class Task:
    """What a run trains, whatever the Recipe.

    Args:
        model: makes a new model on the CPU; it is moved to the device afterwards.
        batch: ``batch(size, device)`` gives one micro-batch of ``size`` items: tensors in any nesting.
        loss: ``loss(model, batch)`` gives the loss *summed* over items, a scalar with a graph, and how many items
            were summed. Means are taken over a whole window, so that accumulation changes nothing.
        unit: what an item is: "tokens", "images".
        name: shown in tables and plots.
        chunked: ``loss`` takes a third argument, in how many chunks it is computed (see `chunked_cross_entropy`).
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int, torch.device], Any]
    loss: Callable[..., tuple[torch.Tensor, int]]
    unit: str = "items"
    name: str = "task"
    chunked: bool = False

    def __post_init__(self) -> None:
        for part in ("model", "batch", "loss"):
            if not callable(getattr(self, part)):
                raise TypeError(
                    f"Task.{part} is a function, got {type(getattr(self, part)).__name__}; write for example {part}=lambda ...: ..."
                )
        if isinstance(self.model, nn.Module):  # callable too, but each run needs a model of its own
            raise TypeError(f"Task.model is a function that makes a new model, got a {type(self.model).__name__}; write model=lambda: ...")

    def __repr__(self) -> str:
        return f"Task({self.name!r})"


def gpt(size: str = "nano", *, sequence: int | None = None, dropout: float = 0.0) -> Task:
    """Next-byte prediction on Python's own source with a GPT or Llama-like model.

    Args:
        size: nano, mini (the standard lab task), gpt2, gpt2-medium, gpt2-large, gpt2-xl, llama-nano, llama-1b,
            llama-3b or llama-8b (the last three also as 1b, 3b, 8b).
        sequence: tokens of one item; None: the model's longest (2048 for Llama).
        dropout: of the GPT; the Llama-like model has none.

    Raises:
        ValueError: no such size, a sequence below 1 or above what the GPT's positions allow, dropout for Llama.
    """
    if size not in DECODERS and f"llama-{size}" in DECODERS:
        size = f"llama-{size}"
    config = _pick(DECODERS, size, "gpt")
    llama = config.kv_heads is not None
    sequence = config.sequence if sequence is None else sequence
    if not isinstance(sequence, int) or sequence < 1 or (sequence > config.sequence and not llama):
        most = "at least 1 token" if llama else f"1 to {config.sequence} tokens"
        raise ValueError(f"A sequence has {most} for {size!r}, got {sequence!r}.")
    if dropout and llama:
        raise ValueError(f"The Llama-like model has no dropout, got {dropout}; leave it out.")
    if not 0 <= dropout <= 1:
        raise ValueError(f"Dropout is a probability from 0 to 1, got {dropout}.")
    config = replace(config, dropout=dropout)

    def batch(count: int, device: torch.device) -> torch.Tensor:
        return text_batch(count, sequence).to(device)  # (count, sequence + 1)

    def loss(model: Any, tokens: torch.Tensor, chunks: int = 1) -> tuple[torch.Tensor, int]:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]  # (count, sequence)
        if chunks > 1:
            total = chunked_cross_entropy(model.hidden(inputs), model.head.weight, targets, chunks, reduction="sum")
        else:
            logits = model(inputs).float()  # (count, sequence, vocabulary)
            total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return total, targets.numel()

    return Task(lambda: decoder(config), batch, loss, "tokens", f"gpt {size}, {sequence} tokens", chunked=True)


def vit(size: str = "nano") -> Task:
    """Classify handwritten digits with a vision transformer: nano (8 x 8 pixels), vit-b-16 or vit-l-16 (224 x 224)."""
    config = _pick(VITS, size, "vit")
    return _images(lambda: ViT(config), config.image, config.channels, f"vit {size}")


def resnet(size: str = "nano") -> Task:
    """Classify handwritten digits with a ResNet: nano (8 x 8 pixels) or resnet18 (224 x 224)."""
    config = _pick(RESNETS, size, "resnet")
    return _images(lambda: ResNet(config), config.image, config.channels, f"resnet {size}")


def _images(model: Callable[[], nn.Module], image: int, channels: int, name: str) -> Task:
    def batch(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = image_batch(count, image, channels)
        return images.to(device), labels.to(device)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
        images, labels = batch
        return F.cross_entropy(model(images).float(), labels, reduction="sum"), len(labels)

    return Task(model, batch, loss, "images", name)


def _pick(table: dict[str, Any], size: str, family: str) -> Any:
    if size not in table:
        raise ValueError(f"tasks.{family} has no size {size!r}; known: {', '.join(table)}.")
    return table[size]
