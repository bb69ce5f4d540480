"""The built-in models: GPT, a Llama-like decoder, ViT and a small ResNet, written to be read; blocks are in ``blocks``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes of a decoder-only language model."""

    layers: int
    heads: int
    width: int
    sequence: int
    vocabulary: int
    kv_heads: int | None = None
    """Set for the Llama-like variant: heads of keys and values (grouped-query attention)."""
    hidden: int | None = None
    """Width of the feed-forward layer; None: 4 * width."""
    tied: bool = True
    """Embedding and output head share one weight."""
    dropout: float = 0.0


BYTES = 256  # the built-in text is read byte by byte

DECODERS = {
    "nano": DecoderConfig(layers=2, heads=4, width=128, sequence=64, vocabulary=BYTES),
    "mini": DecoderConfig(layers=4, heads=4, width=256, sequence=128, vocabulary=BYTES),
    # Radford et al. 2019, table 2; the parameter counts are those of the published checkpoints.
    "gpt2": DecoderConfig(layers=12, heads=12, width=768, sequence=1024, vocabulary=50257),
    "gpt2-medium": DecoderConfig(layers=24, heads=16, width=1024, sequence=1024, vocabulary=50257),
    "gpt2-large": DecoderConfig(layers=36, heads=20, width=1280, sequence=1024, vocabulary=50257),
    "gpt2-xl": DecoderConfig(layers=48, heads=25, width=1600, sequence=1024, vocabulary=50257),
    "llama-nano": DecoderConfig(layers=2, heads=4, kv_heads=2, width=128, hidden=352, sequence=64, vocabulary=BYTES),
    # Shapes of Llama 3.2 1B and 3B and of Llama 3.1 8B.
    "llama-1b": DecoderConfig(layers=16, heads=32, kv_heads=8, width=2048, hidden=8192, sequence=2048, vocabulary=128256),
    "llama-3b": DecoderConfig(layers=28, heads=24, kv_heads=8, width=3072, hidden=8192, sequence=2048, vocabulary=128256),
    "llama-8b": DecoderConfig(layers=32, heads=32, kv_heads=8, width=4096, hidden=14336, sequence=2048, vocabulary=128256, tied=False),
}


def decoder(config: DecoderConfig) -> nn.Module:
    """The language model of a configuration: tokens (batch, time) int64 to logits (batch, time, vocabulary)."""
    return GPT(config) if config.kv_heads is None else Llama(config)


class Part(nn.Module):
    """Some members of a model with one of its methods, which finds them under their own names: a piece that works without the rest.

    A model that gives its parts in order (``pipeline_parts``) makes one of what is no module of its own.

    Args:
        method: of the model's class; called with this part in place of the model.
        members: the modules and parameters that it uses, by their names in the model.
    """

    def __init__(self, method: Callable[..., Any], **members: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, member in members.items():
            setattr(self, name, member)
        self.method = method

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.method(self, *args, **kwargs)


class GPT(nn.Module):
    """Pre-norm GPT-2: learned positions, GELU, attention through SDPA, head tied to the embedding."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        c = config
        self.embedding = nn.Embedding(c.vocabulary, c.width)
        self.position = nn.Embedding(c.sequence, c.width)
        self.dropout = nn.Dropout(c.dropout)
        self.blocks = nn.ModuleList(Block(c.width, c.heads, dropout=c.dropout, causal=True) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.width)
        self.head = nn.Linear(c.width, c.vocabulary, bias=False)
        _initialise(self, c.layers)
        if c.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(tokens))  # (batch, time, vocabulary)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the head is applied to: (batch, time, width)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the first block is applied to: (batch, time, width)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.dropout(self.embedding(tokens) + self.position(positions))

    def pipeline_parts(self) -> list[nn.Module]:
        """The modules whose composition is the forward, in order."""
        start = Part(GPT.embed, embedding=self.embedding, position=self.position, dropout=self.dropout)
        return [start, *self.blocks, self.norm, self.head]


class Block(nn.Module):
    """Attention and MLP, each with a norm before and a residual around: 12 width² + 13 width parameters."""

    def __init__(self, width: int, heads: int, *, dropout: float = 0.0, causal: bool = False) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, dropout, causal)
        self.norm2, self.mlp = nn.LayerNorm(width), MLP(width, dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Attention(nn.Module):
    """Multi-head self-attention through ``F.scaled_dot_product_attention``."""

    def __init__(self, width: int, heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal, self.p = heads, causal, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))  # (b, heads, t, head)
        p = self.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=self.causal)
        return self.dropout(self.out(y.transpose(1, 2).reshape(b, t, -1)))  # (b, t, width)


class MLP(nn.Module):
    """Two linear layers with GELU between, four times as wide inside."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.down(F.gelu(self.up(x))))


class Llama(nn.Module):
    """A Llama 3 shaped decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        c = config
        self.embedding = nn.Embedding(c.vocabulary, c.width)
        self.blocks = nn.ModuleList(LlamaBlock(c) for _ in range(c.layers))
        self.norm = nn.RMSNorm(c.width, eps=1e-5)
        self.head = nn.Linear(c.width, c.vocabulary, bias=False)
        _initialise(self, c.layers)
        if c.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(tokens))  # (batch, time, vocabulary)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the head is applied to: (batch, time, width)."""
        x = self.embedding(tokens)  # (batch, time, width)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def pipeline_parts(self) -> list[nn.Module]:
        """The modules whose composition is the forward, in order."""
        return [self.embedding, *self.blocks, self.norm, self.head]


class LlamaBlock(nn.Module):
    """Grouped-query attention and SwiGLU, each with an RMSNorm before and a residual around."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        c, kv = config, config.kv_heads or config.heads
        self.heads, self.kv_heads, self.head = c.heads, kv, c.width // c.heads
        hidden = c.hidden or 4 * c.width
        self.norm1, self.norm2 = nn.RMSNorm(c.width, eps=1e-5), nn.RMSNorm(c.width, eps=1e-5)
        self.q, self.out = nn.Linear(c.width, c.width, bias=False), nn.Linear(c.width, c.width, bias=False)
        self.k, self.v = (nn.Linear(c.width, kv * self.head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(c.width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, c.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q = rotate(self.q(x).view(b, t, self.heads, self.head)).transpose(1, 2)  # (b, heads, t, head)
        k = rotate(self.k(x).view(b, t, self.kv_heads, self.head)).transpose(1, 2)  # (b, kv heads, t, head)
        v = self.v(x).view(b, t, self.kv_heads, self.head).transpose(1, 2)
        repeat = self.heads // self.kv_heads
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, -1))  # (b, t, width)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions (Su et al. 2021): turn each pair of features by an angle that grows with time.

    Args:
        x: (batch, time, heads, head), the head size even.
    """
    half = x.shape[-1] // 2
    frequency = 500000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[1], device=x.device)[:, None] * frequency  # (time, half)
    cos, sin = angle.cos()[:, None].to(x.dtype), angle.sin()[:, None].to(x.dtype)  # (time, 1, half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """Sizes of a vision transformer; images are square."""

    layers: int
    heads: int
    width: int
    image: int
    patch: int
    channels: int = 3
    classes: int = 1000


VITS = {
    "nano": ViTConfig(layers=4, heads=4, width=64, image=8, patch=2, channels=1, classes=10),
    # Dosovitskiy et al. 2021, table 1.
    "vit-b-16": ViTConfig(layers=12, heads=12, width=768, image=224, patch=16),
    "vit-l-16": ViTConfig(layers=24, heads=16, width=1024, image=224, patch=16),
}


class ViT(nn.Module):
    """Vision transformer: images (batch, channels, size, size) to logits (batch, classes)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        c = config
        self.patches = nn.Conv2d(c.channels, c.width, c.patch, stride=c.patch)
        self.token = nn.Parameter(torch.zeros(1, 1, c.width))
        # As large as what the patches bring: with the usual 0.02 the loss stays flat for the first hundred steps.
        self.position = nn.Parameter(torch.randn(1, (c.image // c.patch) ** 2 + 1, c.width) * 0.5)
        self.blocks = nn.ModuleList(Block(c.width, c.heads) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.width)
        self.head = nn.Linear(c.width, c.classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.embed(images)
        for block in self.blocks:
            x = block(x)
        return self.classify(x)  # (batch, classes)

    def embed(self, images: torch.Tensor) -> torch.Tensor:
        """What the first block is applied to: (batch, 1 + patches, width)."""
        x = self.patches(images).flatten(2).transpose(1, 2)  # (batch, patches, width)
        return torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.position

    def classify(self, x: torch.Tensor) -> torch.Tensor:
        """From the last block's (batch, 1 + patches, width) to logits (batch, classes)."""
        return self.head(self.norm(x[:, 0]))

    def pipeline_parts(self) -> list[nn.Module]:
        """The modules whose composition is the forward, in order."""
        start = Part(ViT.embed, patches=self.patches, token=self.token, position=self.position)
        return [start, *self.blocks, Part(ViT.classify, norm=self.norm, head=self.head)]


@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """Sizes of a ResNet of basic blocks: one width a stage, two blocks each."""

    widths: tuple[int, ...]
    image: int
    channels: int = 3
    classes: int = 1000
    large_stem: bool = True
    """7 x 7 convolution and pooling as in the paper; otherwise one 3 x 3 convolution, for small images."""


RESNETS = {
    "nano": ResNetConfig(widths=(16, 32, 64), image=8, channels=1, classes=10, large_stem=False),
    "resnet18": ResNetConfig(widths=(64, 128, 256, 512), image=224),  # He et al. 2016, table 1
}


class ResNet(nn.Module):
    """ResNet of basic blocks: images (batch, channels, size, size) to logits (batch, classes)."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        c, first = config, config.widths[0]
        kernel, stride = (7, 2) if c.large_stem else (3, 1)
        self.stem = nn.Sequential(
            nn.Conv2d(c.channels, first, kernel, stride, kernel // 2, bias=False),
            nn.BatchNorm2d(first),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1) if c.large_stem else nn.Identity(),
        )
        sizes = [(before, after) for before, after in zip((first, *c.widths[:-1]), c.widths, strict=True)]
        self.blocks = nn.ModuleList(b for i, o in sizes for b in (ResidualBlock(i, o), ResidualBlock(o, o)))
        self.head = nn.Linear(c.widths[-1], c.classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.classify(x)  # (batch, classes)

    def classify(self, x: torch.Tensor) -> torch.Tensor:
        """From the last block's (batch, channels, height, width) to logits (batch, classes)."""
        return self.head(x.mean((2, 3)))

    def pipeline_parts(self) -> list[nn.Module]:
        """The modules whose composition is the forward, in order."""
        return [self.stem, *self.blocks, Part(ResNet.classify, head=self.head)]


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with BatchNorm; halves the image where the width changes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def _initialise(model: nn.Module, layers: int) -> None:
    """GPT-2's initialisation: normal with 0.02, the layers that write to the residual stream less, biases 0."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            residual = name.endswith((".out", ".down"))
            nn.init.normal_(module.weight, std=0.02 / (math.sqrt(2 * layers) if residual else 1))
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
