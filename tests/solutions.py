"""The solutions of the course's exercises, and answers that are wrong in a way one can foresee.

No part of the package: who teaches with the course deletes this file and loses nothing but its test.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from vramlab import Recipe


def state_bytes(shapes: Sequence[torch.Size], optimizer: str) -> int:
    numbers = sum(shape.numel() for shape in shapes)
    return 8 * numbers + 4 * len(shapes) if optimizer == "adamw" else 0


def mlp_activations(batch: int, widths: Sequence[int]) -> int:
    return 4 * batch * sum(widths[1:-1])


sixty_mebibytes = Recipe(micro_batch=1, accumulation=8, checkpointing="blocks", optimizer_impl="fused")

weight_copies = 2 * (12 * 768 * 768 * 12 + 50257 * 768)


def block_bytes(precision: str, h: int, a: int, blocks: int, tokens: int) -> int:
    if precision == "fp32":
        return blocks * tokens * (64 * h + 4 * a + 16)
    return blocks * (tokens * (36 * h + 4 * a + 16) + 24 * h * h)


in_two_bytes = Recipe(micro_batch=8, precision="amp-bf16")


def ring_bytes(parameters: int, ranks: int) -> int:
    return 2 * (ranks - 1) * 4 * parameters // ranks


def rank_factor(counts: Sequence[int], rank: int) -> float:
    return len(counts) * counts[rank] / sum(counts)


eight_by_two_by_four = Recipe(precision="amp-bf16", parallel="ddp", ranks=4, micro_batch=8, accumulation=2)


def enough_micro_batches(stages: int, percent: int) -> int:
    return -(-(stages - 1) * (100 - percent) // percent)


def in_flight(schedule: str, stage: int, stages: int, micro_batches: int) -> int:
    if schedule == "naive":
        return 1
    return min(stages - stage if schedule == "1f1b" else micro_batches, micro_batches)


large_in_four_stages = Recipe(
    precision="amp-bf16", parallel="pipeline", ranks=4, stages=4, micro_batch=1, accumulation=16, optimizer_impl="fused"
)


def half_states(parameters: int, ranks: int, stage: int) -> float:
    whole = [16, 4, 2, 0][stage]
    return whole * parameters + (16 - whole) * parameters / ranks


def shard_bytes(shapes: Sequence[torch.Size], ranks: int) -> int:
    return sum(4 * -(-shape[0] // ranks) * shape[1:].numel() for shape in shapes)


xl_in_shards = Recipe(precision="amp-bf16", parallel="fsdp", ranks=4, micro_batch=2, optimizer_impl="fused", checkpointing="blocks")


def weights(counts: Sequence[int]) -> list[float]:
    return [count / sum(counts) for count in counts]


def gradients_in_pieces(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, piece: int = 128) -> float:
    items, loss = int((targets != -100).sum()), 0.0
    for x, y in zip(inputs.split(piece), targets.split(piece), strict=True):
        total = F.cross_entropy(model(x), y, reduction="sum")
        (total / items).backward()
        loss += total.item() / items
    return loss


def _mean_of_means(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    for x, y in zip(inputs.split(1024), targets.split(1024), strict=True):
        if (y != -100).any():
            (F.cross_entropy(model(x), y) / 2).backward()
    return gradients_in_pieces(copy.deepcopy(model), inputs, targets)


eight_by_four = Recipe(precision="amp-bf16", micro_batch=8, accumulation=4)


def best_segment(n: int, boundary: int, layer: int) -> int:
    sizes = [m for m in range(1, n + 1) if n % m == 0]
    return min(sizes, key=lambda m: n // m * boundary + m * layer)


gpt2_on_12_gib = Recipe(precision="amp-bf16", micro_batch=32, checkpointing="blocks", loss_chunks=8)


def in_little_memory(layers: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    for i in range(0, len(layers), 6):
        x = checkpoint(layers[i : i + 6], x, use_reentrant=False)
    return x


def factored_bytes(shapes: Sequence[torch.Size]) -> int:
    return 4 * sum(min(shape.numel(), sum(shape)) for shape in shapes)


Tensors = list[torch.Tensor]


def adam_step(
    parameters: Tensors, gradients: Tensors, ms: Tensors, vs: Tensors, t: int, lr: float = 1e-3, beta1: float = 0.9, beta2: float = 0.999
) -> Tensors:
    for p, g, m, v in zip(parameters, gradients, ms, vs, strict=True):
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        root = (v / (1 - beta2**t)).sqrt_().add_(1e-8)
        p.addcdiv_(m, root, value=-lr / (1 - beta1**t))
    return parameters


def _adam_of_all(parameters: Tensors, gradients: Tensors, ms: Tensors, vs: Tensors, t: int) -> Tensors:
    roots = [(0.999 * v + 0.001 * g**2) / (1 - 0.999**t) for v, g in zip(vs, gradients, strict=True)]
    for p, g, m, root in zip(parameters, gradients, ms, roots, strict=True):
        p -= 1e-3 * (0.9 * m + 0.1 * g) / (1 - 0.9**t) / (root.sqrt() + 1e-8)
    return parameters


factored_loop = Recipe(micro_batch=1, optimizer="adafactor", optimizer_impl="loop")

scores_of_gpt2 = 12 * 4 * 12 * 1024**2 * 4

no_scores_no_logits = Recipe(precision="amp-bf16", micro_batch=16, loss_chunks=8)


def loss_in_pieces(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, piece: int = 64) -> torch.Tensor:
    def summed(h: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(h @ weight.T, t, reduction="sum")

    pieces = zip(hidden.split(piece), target.split(piece), strict=True)
    return torch.stack([checkpoint(summed, h, t, use_reentrant=False) for h, t in pieces]).sum() / len(target)


sixteen_of_xl = Recipe(
    precision="amp-bf16", micro_batch=4, accumulation=4, checkpointing="blocks", loss_chunks=8, offload="optimizer", optimizer_impl="fused"
)

three_in_fp32 = Recipe(
    precision="amp-bf16",
    micro_batch=2,
    optimizer="adafactor",
    optimizer_impl="loop",
    optimizer_in_backward=True,
    checkpointing="blocks",
    loss_chunks=8,
    offload="activations",
)

four_small_cards = Recipe(
    precision="amp-bf16",
    micro_batch=1,
    accumulation=4,
    optimizer_impl="fused",
    checkpointing="blocks",
    loss_chunks=8,
    parallel="fsdp",
    ranks=4,
)


def lora_bytes(layers: Sequence[tuple[int, int]], r: int) -> int:
    return (4 + 8) * sum(r * (i + o) for i, o in layers) + 4 * 2 * len(layers)


vit_on_12_gib = Recipe(precision="amp-bf16", micro_batch=256, checkpointing="blocks")


def scores(model: nn.Module, batches: Sequence[torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(batch) for batch in batches])


SOLUTIONS: dict[str, Any] = {
    "01.1": state_bytes,
    "01.2": mlp_activations,
    "01.3": sixty_mebibytes,
    "02.1": weight_copies,
    "02.2": block_bytes,
    "02.3": in_two_bytes,
    "03.1": weights,
    "03.2": gradients_in_pieces,
    "03.3": eight_by_four,
    "04.1": best_segment,
    "04.2": gpt2_on_12_gib,
    "04.3": in_little_memory,
    "05.1": factored_bytes,
    "05.2": adam_step,
    "05.3": factored_loop,
    "06.1": scores_of_gpt2,
    "06.2": no_scores_no_logits,
    "06.3": loss_in_pieces,
    "07.1": ring_bytes,
    "07.2": rank_factor,
    "07.3": eight_by_two_by_four,
    "08.1": enough_micro_batches,
    "08.2": in_flight,
    "08.3": large_in_four_stages,
    "09.1": half_states,
    "09.2": shard_bytes,
    "09.3": xl_in_shards,
    "10.1": sixteen_of_xl,
    "10.2": three_in_fp32,
    "10.3": four_small_cards,
    "11.1": lora_bytes,
    "11.2": vit_on_12_gib,
    "11.3": scores,
}
"""The answer to each exercise."""

WRONG: dict[str, list[tuple[Any, str]]] = {
    "01.1": [
        (lambda shapes, name: 8 * sum(s.numel() for s in shapes) if name == "adamw" else 0, r"yours is 320, right is 324"),
        (lambda shapes, name: None if name == "adamw" else 0, "fill in the missing lines"),
    ],
    "01.2": [(lambda batch, widths: 8 * batch * sum(widths[1:-1]), "yours is 16,384, right is 8,192")],
    "01.3": [
        (Recipe(micro_batch=8), "peak 107.67 MiB allocated, target 60.00 MiB"),
        (sixty_mebibytes.with_(optimizer_impl="foreach"), "target 60.00 MiB"),
        (sixty_mebibytes.with_(accumulation=4), "accumulation stays 8, yours has 4"),
        (Recipe(micro_batch=8, precision="bf16"), "precision stays 'fp32', yours has 'bf16'"),
    ],
    "02.1": [
        (2 * weight_copies, "is 2 times what it is"),
        (weight_copies - 2 * 768 * 50257, "is 0.688 times"),
        (weight_copies + 2 * 1024 * 768, "is 1.01 times"),
    ],
    "02.2": [
        (lambda precision, h, a, blocks, tokens: blocks * tokens * (64 * h + 4 * a + 16), r"yours is 132,096, right is 173,056"),
        (lambda *sizes: block_bytes(*sizes) if sizes[0] == "fp32" else None, "fill in the missing lines"),
    ],
    "02.3": [
        (Recipe(micro_batch=8), r"peak 11\.21 GiB reserved, target 11\.19 GiB"),
        (Recipe(micro_batch=8, precision="tf32"), r"peak 11\.21 GiB reserved, target 11\.19 GiB"),
        (Recipe(micro_batch=4, precision="amp-bf16", accumulation=2), "micro_batch stays 8, yours has 4"),
    ],
    "03.1": [
        (lambda counts: [1 / len(counts)] * len(counts), r"for \[16, 8, 4, 4\] yours is 0\.25, right is 0\.5"),
        (lambda counts: None, "fill in the missing lines"),
    ],
    "03.2": [
        (lambda *args: gradients_in_pieces(*args, piece=1024), r"peak .* MiB, target 2\.00 MiB"),
        (_mean_of_means, "of the gradients yours is off by"),
        (lambda *args: None, "fill in the missing lines"),
    ],
    "03.3": [
        (Recipe(precision="amp-bf16", micro_batch=32), r"target 11\.19 GiB"),
        (eight_by_four.with_(micro_batch=16, accumulation=2), r"target 11\.19 GiB"),
        (eight_by_four.with_(accumulation=2), "accumulation stays 32, yours has 16"),
        (eight_by_four.with_(checkpointing="blocks"), "checkpointing stays 'none'"),
    ],
    "04.1": [
        (lambda n, boundary, layer: round(n**0.5), "for 48, 1, 16 yours is 7, right is 2"),
        (lambda n, boundary, layer: 1, "for 64, 1, 1 yours is 1, right is 8"),
    ],
    "04.2": [
        (Recipe(precision="amp-bf16", micro_batch=32), r"peak 32\.59 GiB reserved, target 11\.19 GiB"),
        (gpt2_on_12_gib.with_(loss_chunks=1), r"peak 23\.92 GiB reserved, target 11\.19 GiB"),
        (gpt2_on_12_gib.with_(micro_batch=4, accumulation=8), "accumulation stays 1, yours has 8"),
    ],
    "04.3": [
        (lambda layers, x: layers(x), r"right, peak 10\.25 MiB, target 5\.00 MiB"),
        (lambda layers, x: checkpoint_sequential(layers, 36, x, use_reentrant=False), r"right, peak 9\.50 MiB, target 5\.00 MiB"),
        (
            lambda layers, x: checkpoint_sequential(layers, 6, x, use_reentrant=False, preserve_rng_state=False),
            "the results are right; of the gradients yours is off by",
        ),
    ],
    "05.1": [
        (lambda shapes: 4 * sum(map(sum, shapes)), r"yours is 4,040, right is 4,036"),
        (lambda shapes: None, "fill in the missing lines"),
    ],
    "05.2": [
        (_adam_of_all, r"right, peak .* MiB, target 600\.00 KiB"),
        (lambda *args: adam_step(*args, lr=1e-2), "yours is off by"),
        (lambda *args: None, "fill in the missing lines"),
    ],
    "05.3": [
        (Recipe(micro_batch=1, optimizer_impl="fused"), r"target 3\.80 GiB"),
        (factored_loop.with_(optimizer_impl="foreach"), r"target 3\.80 GiB"),
        (factored_loop.with_(precision="bf16"), "precision stays 'fp32', yours has 'bf16'"),
    ],
    "06.1": [
        (scores_of_gpt2 // 12, "is 0.0833 times what it is"),
        (scores_of_gpt2 // 2, "is 0.5 times what it is"),
    ],
    "06.2": [
        (no_scores_no_logits.with_(attention="math", loss_chunks=1), r"peak 27\.53 GiB reserved, target 11\.19 GiB"),
        (no_scores_no_logits.with_(loss_chunks=1), r"peak 16\.68 GiB reserved, target 11\.19 GiB"),
        (no_scores_no_logits.with_(checkpointing="blocks"), "checkpointing stays 'none', yours has 'blocks'"),
    ],
    "06.3": [
        (lambda hidden, weight, target: F.cross_entropy(hidden @ weight.T, target), r"right, peak 48\.00 MiB, target 16\.00 MiB"),
        (lambda hidden, weight, target: loss_in_pieces(hidden, weight, target, 256), r"right, peak 26\.06 MiB, target 16\.00 MiB"),
        (lambda hidden, weight, target: loss_in_pieces(hidden, weight, target) * len(target), "yours is off by"),
    ],
    "07.1": [
        (lambda parameters, ranks: 4 * parameters, r"yours is 497,759,232, right is 746,638,848"),
        (lambda parameters, ranks: 8 * parameters, r"yours is 995,518,464, right is 746,638,848"),
    ],
    "07.2": [
        (lambda counts, rank: counts[rank] / sum(counts), r"yours is 0\.75, right is 1\.5"),
        (lambda counts, rank: 1.0, r"yours is 1\.0, right is 1\.5"),
    ],
    "07.3": [
        (Recipe(precision="amp-bf16", parallel="ddp", ranks=4, micro_batch=16), r"target 11\.19 GiB"),
        (Recipe(precision="amp-bf16", micro_batch=8, accumulation=8), "parallel stays 'ddp', yours has 'none'"),
        (eight_by_two_by_four.with_(accumulation=8), r"data-parallel ranks stays 64, yours has 256"),
    ],
    "08.1": [
        (lambda stages, percent: (stages - 1) * (100 - percent) // percent, r"for 3, 30 yours is 4, right is 5"),
        (lambda stages, percent: -(-(stages - 1) * 100 // percent), r"for 4, 10 yours is 30, right is 27"),
    ],
    "08.2": [
        (lambda schedule, stage, stages, micro_batches: micro_batches, r"for 'naive', 0, 4, 8 yours is 8, right is 1"),
        (lambda *a: {"naive": 1, "gpipe": a[3], "1f1b": a[2] - a[1]}[a[0]], r"for '1f1b', 0, 4, 2 yours is 4, right is 2"),
    ],
    "08.3": [
        (large_in_four_stages.with_(parallel="ddp", stages=1, accumulation=4), r"target 11\.19 GiB"),
        (large_in_four_stages.with_(schedule="gpipe"), r"target 11\.19 GiB"),
        (large_in_four_stages.with_(checkpointing="blocks"), "checkpointing stays 'none', yours has 'blocks'"),
    ],
    "09.1": [
        (lambda parameters, ranks, stage: 16 * parameters / ranks, r"for 7500000000, 64, 0 yours is 1,875,000,000\.0"),
        (
            lambda parameters, ranks, stage: 16.0 * parameters,
            r"for 7500000000, 64, 1 yours is 120,000,000,000\.0, right is 31,406,250,000\.0",
        ),
    ],
    "09.2": [
        (lambda shapes, ranks: sum(4 * shape.numel() for shape in shapes) // ranks, r"yours is 38,597,376, right is 38,599,680"),
        (lambda shapes, ranks: sum(4 * -(-shape.numel() // ranks) for shape in shapes), r"yours is 38,597,376, right is 38,599,680"),
    ],
    "09.3": [
        (xl_in_shards.with_(checkpointing="none"), r"target 11\.19 GiB"),
        (xl_in_shards.with_(parallel="zero1"), r"target 11\.19 GiB"),
        (xl_in_shards.with_(offload="optimizer"), "offload stays 'none', yours has 'optimizer'"),
    ],
    "10.1": [
        (sixteen_of_xl.with_(offload="none"), r"peak .* GiB reserved, target 23\.08 GiB"),
        (sixteen_of_xl.with_(accumulation=1), r"micro_batch \* accumulation stays 16, yours has 4"),
    ],
    "10.2": [
        (three_in_fp32.with_(offload="none"), r"peak 25\.23 GiB reserved, target 23\.08 GiB"),
        (three_in_fp32.with_(precision="bf16"), "precision stays 'amp-bf16', yours has 'bf16'"),
    ],
    "10.3": [
        (four_small_cards.with_(micro_batch=4, accumulation=1, checkpointing="none", loss_chunks=1), r"peak 39\.48 GiB reserved"),
        (four_small_cards.with_(ranks=2), "ranks stays 4, yours has 2"),
        (four_small_cards.with_(accumulation=1), r"data-parallel ranks stays 16, yours has 4"),
    ],
    "11.1": [
        (lambda layers, r: 12 * sum(r * (i + o) for i, o in layers), "yours is 288, right is 296"),
        (lambda layers, r: 8 * sum(r * (i + o) for i, o in layers) + 8 * len(layers), "yours is 200, right is 296"),
    ],
    "11.2": [
        (Recipe(precision="amp-bf16", micro_batch=256), r"peak 17\.59 GiB reserved, target 11\.19 GiB"),
        (vit_on_12_gib.with_(checkpointing="selective"), r"peak 13\.04 GiB reserved, target 11\.19 GiB"),
        (vit_on_12_gib.with_(micro_batch=64), r"micro_batch \* accumulation stays 256, yours has 64"),
    ],
    "11.3": [
        (lambda model, batches: torch.cat([model(batch) for batch in batches]).detach(), r"right, peak 12\.12 MiB, target 2\.00 MiB"),
        (lambda model, batches: torch.cat([model(batch) for batch in batches]), "of the gradients yours is a tensor, and there is none"),
    ],
}
"""At least one wrong answer to each exercise, and a pattern of what is said to it."""
