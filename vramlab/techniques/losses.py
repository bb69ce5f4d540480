"""Cross-entropy over a large vocabulary without ever holding all logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    chunks: int = 8,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """``F.cross_entropy(F.linear(hidden, weight, bias).float(), target)``, computed a chunk of the tokens at a time.

    A chunk's gradients are made in forward, while its logits are there, so that nothing is computed twice. Alive are
    1/chunks of the 4 * tokens * vocabulary bytes, twice (plain: all of them three times), and from forward on the
    gradients of hidden and weight; the weight's is added up in fp32 also where the product is in 2 bytes.

    Args:
        hidden: (..., width), what the head is applied to.
        weight: (vocabulary, width), the head's weight; it may be tied to an embedding.
        target: (...), class numbers, any integer dtype.
        chunks: pieces that the tokens are split into.
        bias: (vocabulary,) or None.
        ignore_index: targets that do not count.
        label_smoothing: as in ``F.cross_entropy``.
        reduction: mean over the targets that count (0 if none does), or sum.

    Returns:
        The loss, a scalar in fp32 (fp64 from fp64).

    Raises:
        ValueError: chunks below 1, targets that are no class numbers, shapes that do not fit, another reduction, label
            smoothing not from 0 to 1.
        RuntimeError: from ``backward(create_graph=True)``.

    Reference: Wijmans et al. 2024, Cut Your Losses in Large-Vocabulary Language Models; Hsu et al. 2024, Liger Kernel,
    section 3.2, whose chunks these are.
    """
    if not isinstance(chunks, int) or chunks < 1:
        raise ValueError(f"chunks is a whole number of at least 1, got {chunks!r}; 8 is a good start.")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is 'mean' or 'sum', got {reduction!r}; the loss of each token would need no chunks.")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is from 0 to 1, got {label_smoothing!r}; 0.1 is usual.")
    if target.is_floating_point() or target.dtype is torch.bool:
        raise ValueError(
            f"target is class numbers, got {target.dtype}; for probabilities of classes take F.cross_entropy on the whole logits."
        )
    if weight.dim() != 2 or hidden.shape != (*target.shape, weight.shape[1]):
        shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, target {tuple(target.shape)}"
        raise ValueError(f"Shapes are hidden (..., width), weight (vocabulary, width), target (...), got {shapes}; slice or transpose.")
    tokens, target = hidden.reshape(-1, weight.shape[1]), target.reshape(-1).long()
    differentiable = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (tokens, weight, bias)]
    total = _SumOverChunks.apply(tokens, weight, bias, target, chunks, ignore_index, label_smoothing, differentiable)
    return total if reduction == "sum" else total / (target != ignore_index).sum().clamp(min=1)


def loss_and_gradient(logits: torch.Tensor, target: torch.Tensor, ignore_index: int, smoothing: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed cross-entropy of logits (tokens, vocabulary), and its gradient: softmax minus the target's distribution."""
    log_p = logits.log_softmax(-1)
    del logits
    counted = (target != ignore_index).unsqueeze(-1)  # (tokens, 1)
    loss = (1 - smoothing) * F.nll_loss(log_p, target, ignore_index=ignore_index, reduction="sum")
    others = smoothing / log_p.shape[-1]  # what smoothing gives to each class
    if smoothing:
        loss -= others * torch.where(counted, log_p.sum(-1, keepdim=True), 0).sum()
    gradient = log_p.exp_()
    if smoothing:
        gradient.sub_(others)
    label = torch.where(counted, target.unsqueeze(-1), 0)
    gradient.scatter_add_(-1, label, torch.full_like(label, smoothing - 1, dtype=gradient.dtype))
    return loss, gradient.mul_(counted)


class _SumOverChunks(torch.autograd.Function):
    """The summed loss over all chunks. Its gradients are there when forward ends, and backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,  # (tokens, width)
        weight: torch.Tensor,  # (vocabulary, width)
        bias: torch.Tensor | None,
        target: torch.Tensor,  # (tokens,)
        chunks: int,
        ignore_index: int,
        smoothing: float,
        differentiable: list[bool],
    ) -> torch.Tensor:
        exact, low = torch.promote_types(hidden.dtype, torch.float32), _product_dtype(hidden)
        total = hidden.new_zeros((), dtype=exact)
        tensors = zip((hidden, weight, bias), (hidden.dtype, exact, exact), differentiable, strict=True)
        of_hidden, of_weight, of_bias = (torch.zeros_like(t, dtype=d) if needed and t is not None else None for t, d, needed in tensors)
        head, offset = weight.to(low), bias.to(low) if bias is not None else None
        size = max(1, -(-len(target) // chunks))
        for rows in (slice(start, start + size) for start in range(0, len(target), size)):
            part = hidden[rows].to(low)
            loss, gradient = loss_and_gradient(F.linear(part, head, offset).to(exact), target[rows], ignore_index, smoothing)
            total += loss
            if of_bias is not None:
                of_bias += gradient.sum(0)
            gradient = gradient.to(low)
            if of_hidden is not None:
                of_hidden[rows] = gradient @ head
            if of_weight is not None and low == exact:
                torch.addmm(of_weight, gradient.T, part, out=of_weight)
            elif of_weight is not None:
                of_weight += gradient.T @ part
            del gradient  # before the next chunk's logits
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        return total

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "chunked_cross_entropy has no second derivative, and create_graph=True asks for one; "
                "take F.cross_entropy on the whole logits there."
            )
        # In place, unless the graph is kept for another backward pass. Autograd casts to the parameters' dtype.
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        scaled = [g if g is None else g * scale if keep else g.mul_(scale) for g in ctx.saved_tensors]
        return *scaled, None, None, None, None, None


def _product_dtype(hidden: torch.Tensor) -> torch.dtype:
    """What the head's product is computed in: autocast's dtype where that is on."""
    device = hidden.device.type
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocast and hidden.dtype is not torch.float64 else hidden.dtype
