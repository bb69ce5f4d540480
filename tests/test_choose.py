"""Every pair of a recipe's options trains to the numbers of what it means, or is refused with both names."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import vramlab as vl
from vramlab.recipe import conflicts
from vramlab.techniques.choose import around_window, build_optimizer, changed_model

# What changes the numbers, and what must not.
MEANING: list[dict[str, Any]] = [
    {"precision": "amp-fp16"},
    {"precision": "amp-bf16"},
    {"precision": "bf16"},
    {"optimizer": "sgd"},
    {"optimizer": "adafactor"},
    {"clip_norm": 0.1},
]
SAVING: list[dict[str, Any]] = [
    {"precision": "tf32"},  # on the CPU no product is rounded
    {"accumulation": 2, "micro_batch": 2},
    {"checkpointing": "blocks"},
    {"checkpointing": "blocks", "checkpoint_every": 2},
    {"checkpointing": "selective"},
    {"offload": "activations"},
    {"offload": "optimizer"},
    {"optimizer_impl": "fused"},
    {"optimizer_impl": "loop"},
    {"optimizer_in_backward": True},
    {"attention": "math"},
    {"loss_chunks": 3},
]
TASK = vl.tasks.gpt("nano", sequence=16)
PAIRS = [
    pytest.param(a, b, id=" ".join(f"{k}={v}" for k, v in [*a.items(), *b.items()]))
    for a, b in itertools.combinations([*MEANING, *SAVING], 2)
    if not a.keys() & b.keys()
]
_meant: dict[vl.Recipe, list[float]] = {}


def losses(recipe: vl.Recipe) -> list[float]:
    return vl.run(TASK, recipe, steps=3, device="cpu", progress=False).losses


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_pair_of_options_trains_to_the_numbers_it_means_or_is_refused_by_both_names(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    options = {"micro_batch": 4} | first | second
    if conflicts(**options):
        with pytest.raises(ValueError, match="Set ") as refused:
            vl.Recipe(**options)
        assert all(any(name in str(refused.value) for name in part) for part in (first, second))
        return
    meant = vl.Recipe(micro_batch=4)
    for part in (first, second):
        if part in MEANING:
            meant = meant.with_(**part)
    expected = _meant.setdefault(meant, losses(meant))
    # Offloaded bf16 parameters have an fp32 original: those are other, better numbers.
    rough = 0.05 if meant.precision != "fp32" else 1e-4
    assert losses(vl.Recipe(**options)) == pytest.approx(expected, rel=rough)


def test_the_pairs_are_all_there() -> None:
    assert len(PAIRS) > 120
    assert sum(bool(conflicts(**{"micro_batch": 4} | p.values[0] | p.values[1])) for p in PAIRS) >= 4


@pytest.mark.parametrize("option", SAVING, ids=str)
def test_what_saves_memory_alone_keeps_the_losses(option: dict[str, Any]) -> None:
    plain = losses(vl.Recipe(micro_batch=4))
    exact = not {"accumulation", "attention", "loss_chunks"} & option.keys() and option.get("optimizer_impl") is None
    assert losses(vl.Recipe(**{"micro_batch": 4} | option)) == (plain if exact else pytest.approx(plain, rel=1e-5))


def test_a_model_is_as_before_after_training_and_after_an_error() -> None:
    model = TASK.model()
    before = {name: module.forward for name, module in model.named_modules()}
    with contextlib.suppress(KeyError), changed_model(model, vl.Recipe(checkpointing="blocks")):
        assert {name: module.forward for name, module in model.named_modules()} != before
        raise KeyError
    assert {name: module.forward for name, module in model.named_modules()} == before


def test_written_out_attention_is_switched_back() -> None:
    before = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()
    with contextlib.suppress(KeyError), around_window(vl.Recipe(attention="math")):
        assert not torch.backends.cuda.flash_sdp_enabled()
        raise KeyError
    assert (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()) == before


def test_written_out_attention_stores_the_score_matrix() -> None:
    def activations(attention: Any) -> int:
        run = vl.run(TASK, vl.Recipe(micro_batch=4, attention=attention), steps=2, device="cpu", progress=False)
        return run.reports[1].memory.breakdown("end of forward").activations  # type: ignore[union-attr]

    scores = 2 * 4 * 4 * 16 * 16 * 4  # layers, batch, heads, time squared, fp32
    row_sums = 2 * 4 * 4 * 16 * 4  # what the fused kernel keeps instead
    assert activations("math") - activations("sdpa") == scores - row_sums


def test_a_chunked_loss_is_refused_for_a_task_that_has_none() -> None:
    with pytest.raises(ValueError, match=r"^loss_chunks=2 needs a Task with a chunked loss, and 'vit nano' has none; set loss_chunks=1"):
        vl.run(vl.tasks.vit(), vl.Recipe(loss_chunks=2), device="cpu", progress=False)


def test_a_model_without_parameters_has_no_optimizer() -> None:
    with pytest.raises(ValueError, match="^Training needs parameters with requires_grad, and Tanh has none"):
        build_optimizer(nn.Tanh(), vl.Recipe(), 1e-3)


def test_gradients_in_backward_are_never_all_there() -> None:
    def gradients(**options: Any) -> int:
        run = vl.run(TASK, vl.Recipe(micro_batch=4, **options), steps=2, device="cpu", progress=False)
        return int(run.reports[1].memory.timeline()["gradients"].max())  # type: ignore[union-attr]

    parameters = 4 * sum(p.numel() for p in TASK.model().parameters())
    assert gradients() == parameters
    assert gradients(optimizer_in_backward=True) < parameters / 2
