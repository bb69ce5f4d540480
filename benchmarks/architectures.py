"""Models whose figures others published and that no library builds: written from their descriptions, operator by operator.

What an operator keeps for backward, and when a temporary dies, decides the peak, so these follow the published runs in
that: where a run attends with einsum and a written-out softmax, so does the model here. Shapes: B sequences, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Course language model: github stanford-cs336/assignment2-systems, cs336-basics (the model that its students measure)


class PlainLinear(nn.Module):
    """``x @ weight.T`` as an einsum, without a bias; weight (out, in)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class PlainEmbedding(nn.Module):
    """Rows of a table by indexing (not ``F.embedding``: another backward)."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens, :]


class PlainRMSNorm(nn.Module):
    """RMSNorm in fp32, returned in the dtype it came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * scale
        return (self.weight * x).to(dtype)


class PlainRotary(nn.Module):
    """Rotary embedding of neighbouring pairs; one buffer (2, context, head / 2) for all layers."""

    def __init__(self, context: int, head: int) -> None:
        super().__init__()
        frequencies = 10_000.0 ** -(torch.arange(0, head, 2) / head)
        angles = torch.outer(torch.arange(context).float(), frequencies)
        self.register_buffer("table", torch.stack((angles.cos(), angles.sin())), persistent=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, heads, T, head)
        even, odd = x.unflatten(-1, (-1, 2)).movedim(-1, 0).unbind(0)
        cos, sin = self.table[:, : x.size(-2), :].unbind(0)
        first = cos * even - sin * odd
        second = sin * even + cos * odd
        rotated = torch.concat((first, second), dim=-1)
        return rotated  # noqa: RET504  # the parts die when the function ends, after the result is there


def plain_softmax(x: Tensor) -> Tensor:
    """Softmax over the last dimension, written out."""
    shifted = x - torch.max(x, dim=-1, keepdim=True)[0]
    exponentials = torch.exp(shifted)
    return exponentials / torch.sum(exponentials, dim=-1, keepdim=True)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention by einsum and the written-out softmax; mask True where a query may look."""
    scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(k.shape[-1])
    if mask is not None:
        scores = torch.where(mask, scores, float("-inf"))
    weights = plain_softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, v)


class PlainAttention(nn.Module):
    """Causal attention with a mask made in every forward."""

    def __init__(self, width: int, heads: int, rotary: PlainRotary) -> None:
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.q, self.k, self.v, self.out = (PlainLinear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        q = self.rotary(q)
        k = self.rotary(k)
        places = torch.arange(x.size(1), device=x.device)
        mask = (places[:, None] >= places[None, :])[None, ...]
        mixed = plain_attention(q, k, v, mask)
        mixed = mixed.transpose(1, 2).flatten(2).contiguous()
        return self.out(mixed)


class PlainSwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))`` with ``silu`` written as ``y * sigmoid(y)``."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.down, self.up = PlainLinear(width, hidden), PlainLinear(hidden, width), PlainLinear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self._silu(self.gate(x)) * self.up(x))

    @staticmethod
    def _silu(x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


class PlainBlock(nn.Module):
    """Norms before attention and feed-forward."""

    def __init__(self, width: int, heads: int, hidden: int, rotary: PlainRotary) -> None:
        super().__init__()
        self.attention, self.feed_forward = PlainAttention(width, heads, rotary), PlainSwiGLU(width, hidden)
        self.norm1, self.norm2 = PlainRMSNorm(width), PlainRMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attention(self.norm1(x))
        middle = x + attended
        forwarded = self.feed_forward(self.norm2(middle))
        end = middle + forwarded
        return end  # noqa: RET504  # the branches die when the function ends


COURSE_SIZES: dict[str, dict[str, int]] = {
    "small": {"width": 768, "hidden": 3072, "layers": 12, "heads": 12},
    "medium": {"width": 1024, "hidden": 4096, "layers": 24, "heads": 16},
    "large": {"width": 1280, "hidden": 5120, "layers": 36, "heads": 20},
    "xl-2025": {"width": 1600, "hidden": 6400, "layers": 48, "heads": 25},
    "xl-2026": {"width": 2560, "hidden": 10240, "layers": 32, "heads": 32},
}
"""The course's sizes; "xl-2026" is "2.7B" of 2025."""


class CourseLM(nn.Module):
    """Decoder of the course: vocabulary 10,000, untied head, no biases.

    Args:
        size: a key of `COURSE_SIZES`.
        context: tokens of the rotary table.
        segment: blocks per checkpointed segment; 0 for no checkpointing.
    """

    def __init__(self, size: str, context: int, segment: int = 0) -> None:
        super().__init__()
        given = COURSE_SIZES[size]
        self.segment = segment
        self.embedding = PlainEmbedding(10_000, given["width"])
        rotary = PlainRotary(context, given["width"] // given["heads"])
        self.blocks = nn.ModuleList(PlainBlock(given["width"], given["heads"], given["hidden"], rotary) for _ in range(given["layers"]))
        self.norm, self.head = PlainRMSNorm(given["width"]), PlainLinear(given["width"], 10_000)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) int64 -> (B, T, 10000)
        x = embedded = self.embedding(tokens)  # noqa: F841  # lives to the end, which is seen where no graph keeps it
        if self.segment:
            for start in range(0, len(self.blocks), self.segment):
                run = nn.Sequential(*self.blocks[start : start + self.segment])
                x = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)
        else:
            for block in self.blocks:
                x = block(x)
        return self.head(self.norm(x))


def course_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy written out: maximum, exponentials, sum, logarithm; the whole of it negated, then gathered."""
    losses = -_log_softmax(logits)
    return torch.mean(torch.gather(losses, -1, targets.unsqueeze(-1)))


def _log_softmax(x: Tensor) -> Tensor:
    highest = torch.max(x, dim=-1, keepdim=True)[0]
    x = x - highest
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


class CourseAdamW(torch.optim.Optimizer):
    """AdamW one parameter at a time, its moments made anew in each step: the old ones live until the new ones are there."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 1e-3})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                gradient, state = p.grad.data, self.state[p]
                p.data -= group["lr"] * 0.01 * p.data
                before = state.get("m", torch.zeros_like(gradient))
                before2 = state.get("v", torch.zeros_like(gradient))
                m = 0.9 * before + 0.1 * gradient
                v = 0.999 * before2 + 0.001 * torch.square(gradient)
                p.data -= group["lr"] * m / (torch.sqrt(v) + 1e-8)
                state["m"], state["v"] = m, v


# GPT-2 from scratch: github rasbt/LLMs-from-scratch, chapter 5, "training speed": each rung of its ladder changes one thing


class BookLayerNorm(nn.Module):
    """LayerNorm from mean, variance and square root."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        normed = (x - mean) / torch.sqrt(variance + 1e-5)
        return self.scale * normed + self.shift


class BookGELU(nn.Module):
    """GELU by tanh, written out."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(torch.sqrt(torch.tensor(2.0 / torch.pi)) * (x + 0.044715 * torch.pow(x, 3))))


class BookAttention(nn.Module):
    """Causal attention of the book.

    Args:
        mask: "buffer" (a stored fp32 triangle of the context, made bool in every forward), "made" (a bool triangle made in
            every forward) or "kernel" (one linear layer for all three projections, and PyTorch's own attention).
    """

    def __init__(self, width: int, context: int, heads: int, mask: str) -> None:
        super().__init__()
        self.heads, self.mask_kind = heads, mask
        if mask == "kernel":
            self.qkv = nn.Linear(width, 3 * width, bias=False)
        else:
            self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out, self.dropout = nn.Linear(width, width), nn.Dropout(0.1)
        if mask == "buffer":
            self.register_buffer("mask", torch.triu(torch.ones(context, context), diagonal=1))

    def forward(self, x: Tensor) -> Tensor:
        if self.mask_kind == "kernel":
            return self._by_kernel(x)
        b, t, width = x.shape
        k, q, v = self.key(x), self.query(x), self.value(x)
        k, v, q = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in (k, v, q))
        scores = q @ k.transpose(2, 3)
        if self.mask_kind == "buffer":
            hidden = self.mask.bool()[:t, :t]
        else:
            hidden = torch.triu(torch.ones(t, t, device=x.device), diagonal=1).bool()
        scores.masked_fill_(hidden, -torch.inf)
        weights = torch.softmax(scores / k.shape[-1] ** 0.5, dim=-1)
        weights = self.dropout(weights)
        mixed = (weights @ v).transpose(1, 2).contiguous().view(b, t, width)
        return self.out(mixed)

    def _by_kernel(self, x: Tensor) -> Tensor:
        b, t, width = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0, is_causal=True)
        return self.out(mixed.transpose(1, 2).contiguous().view(b, t, width))


class BookBlock(nn.Module):
    """Norms before attention and feed-forward, dropout on both branches."""

    def __init__(self, width: int, context: int, heads: int, mask: str, plain: bool) -> None:
        super().__init__()
        norm, gelu = (BookLayerNorm(width), BookGELU()) if plain else (nn.LayerNorm(width), nn.GELU(approximate="tanh"))
        self.attention = BookAttention(width, context, heads, mask)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), gelu, nn.Linear(4 * width, width))
        self.norm1, self.norm2 = norm, BookLayerNorm(width) if plain else nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.attention(self.norm1(x))
        x = self.dropout(branch) + x
        branch = self.feed_forward(self.norm2(x))
        return self.dropout(branch) + x


class BookGPT2(nn.Module):
    """GPT-2 124M's shape with an untied head: 163,009,536 parameters with a vocabulary of 50,257 and no bias in q, k, v.

    Args:
        mask: see `BookAttention`.
        plain: norms and GELU written out, or PyTorch's own.
    """

    def __init__(self, mask: str = "buffer", plain: bool = True) -> None:
        super().__init__()
        width, context, heads, layers, vocabulary = 768, 1024, 12, 12, 50_257
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.Sequential(*(BookBlock(width, context, heads, mask, plain) for _ in range(layers)))
        self.norm = BookLayerNorm(width) if plain else nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) int64 -> (B, T, 50257)
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(self.dropout(x))))


# Llama as Lightning's litgpt writes it: github Lightning-AI/litgpt, litgpt/model.py


class LitRMSNorm(nn.Module):
    """RMSNorm in fp32, weighted after the cast back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.float()
        squares = torch.mean(x * x, dim=-1, keepdim=True)
        normed = x * torch.rsqrt(squares + 1e-5)
        return normed.to(dtype=dtype) * self.weight


def lit_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the two halves of a head; (B, heads, T, head)."""
    half = x.size(-1) // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return ((x * cos) + (rotated * sin)).to(dtype=x.dtype)


class LitBlock(nn.Module):
    """Grouped attention from one projection, then SwiGLU."""

    def __init__(self, width: int, hidden: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.head = heads, groups, width // heads
        self.norm1, self.norm2 = LitRMSNorm(width), LitRMSNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * groups) * self.head, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up, self.down = (nn.Linear(*s, bias=False) for s in ((width, hidden), (width, hidden), (hidden, width)))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self._attend(self.norm1(x), cos, sin) + x
        normed = self.norm2(x)
        return self.down(F.silu(self.gate(normed)) * self.up(normed)) + x

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, width = x.shape
        shared = self.heads // self.groups
        qkv = self.qkv(x).view(b, t, self.groups, shared + 2, self.head).permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((shared, 1, 1), dim=2)
        if self.groups != self.heads and self.groups != 1:
            k = k.expand(b, self.groups, shared, t, self.head)
            v = v.expand(b, self.groups, shared, t, self.head)
        q, k, v = q.reshape(b, -1, t, self.head), k.reshape(b, -1, t, self.head), v.reshape(b, -1, t, self.head)
        q, k = lit_rotate(q, cos, sin), lit_rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1 / math.sqrt(self.head))
        return self.out(mixed.transpose(1, 2).reshape(b, t, width))


class LitLlama(nn.Module):
    """TinyLlama 1.1B: 22 layers of width 2048, 32 heads in 4 groups, feed-forward 5632, vocabulary 32,000, untied."""

    def __init__(self, context: int = 2048) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32_000, 2048), nn.Linear(2048, 32_000, bias=False)
        self.blocks = nn.ModuleList(LitBlock(2048, 5632, 32, 4) for _ in range(22))
        self.norm = LitRMSNorm(2048)
        angles = torch.outer(torch.arange(context).float(), 10_000.0 ** -(torch.arange(0, 64, 2).float() / 64)).repeat(1, 2)
        self.register_buffer("cos", angles.cos().to(torch.get_default_dtype()), persistent=False)
        self.register_buffer("sin", angles.sin().to(torch.get_default_dtype()), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) int64 -> (B, T, 32000)
        x = self.embedding(tokens)
        cos, sin = self.cos[: tokens.size(1)], self.sin[: tokens.size(1)]
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


# Optimizers of the past


class OldForeachAdam(torch.optim.Optimizer):
    """Foreach Adam as torch 2.0 wrote it: square root and denominator are two temporaries of the parameters' size, not one."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 5e-5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        gradients = [p.grad for p in params]
        for p in params:
            if not self.state[p]:
                self.state[p]["m"], self.state[p]["v"] = torch.zeros_like(p), torch.zeros_like(p)
        first, second = [self.state[p]["m"] for p in params], [self.state[p]["v"] for p in params]
        torch._foreach_mul_(first, 0.9)
        torch._foreach_add_(first, gradients, alpha=0.1)
        torch._foreach_mul_(second, 0.999)
        torch._foreach_addcmul_(second, gradients, gradients, 0.001)
        roots = torch._foreach_sqrt(second)
        torch._foreach_div_(roots, [0.5] * len(roots))
        denominators = torch._foreach_add(roots, 1e-8)
        torch._foreach_addcdiv_(params, first, denominators, [-5e-5] * len(params))
