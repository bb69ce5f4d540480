"""Models nobody here wrote, unmodified and from their configurations, on a virtual card.

Two judges stand beside it: the same model built by PyTorch alone, and the same training step really done on the CPU.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vramlab.memory.recorder import record
from vramlab.memory.trace import Category, MemoryTrace, Phase
from vramlab.units import round_up
from vramlab.virtual import patches
from vramlab.virtual.device import VirtualGPU, virtual_gpu
from vramlab.virtual.values import UnknownValueError

tf = pytest.importorskip("transformers", reason="needs transformers")
tv = pytest.importorskip("torchvision", reason="needs torchvision").models
peft = pytest.importorskip("peft", reason="needs peft")

Loss = Callable[[nn.Module, torch.device], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model and the loss that it is trained with."""

    build: Callable[[], nn.Module]
    loss: Loss
    published: int | None = None  # parameters, by its authors
    reference: str = "meta"  # where PyTorch alone builds it


def language(kind: str, config: Any, time: int = 64, mask: list[list[int]] | None = None) -> Case:
    """A language model with a batch of 2 texts; with its own loss."""
    size = config.vocab_size

    def loss(model: nn.Module, device: torch.device) -> torch.Tensor:
        tokens = torch.arange(2 * time).remainder(size).view(2, time).to(device)
        attention = {} if mask is None else {"attention_mask": torch.tensor(mask).to(device)}
        return model(input_ids=tokens, labels=tokens, **attention).loss

    return Case(lambda: getattr(tf, kind)(config), loss)


def pictures(build: Callable[[], nn.Module], size: int = 224, classes: int = 1000, **options: Any) -> Case:
    """A classifier, or a segmenter, of a batch of 2 pictures."""

    def loss(model: nn.Module, device: torch.device) -> torch.Tensor:
        out = model(torch.zeros(2, 3, size, size, device=device))
        if isinstance(out, dict):
            return F.cross_entropy(out["out"], torch.zeros(2, size, size, dtype=torch.int64, device=device))
        return F.cross_entropy(out, torch.zeros(2, dtype=torch.int64, device=device) + classes - 1)

    return Case(build, loss, **options)


def labelled_pictures(kind: str, config: Any, size: int = 224) -> Case:
    def loss(model: nn.Module, device: torch.device) -> torch.Tensor:
        return model(pixel_values=torch.zeros(2, 3, size, size, device=device), labels=torch.zeros(2, dtype=torch.int64, device=device)).loss

    return Case(lambda: getattr(tf, kind)(config), loss)


def torchvision_model(name: str, weights: str, **options: Any) -> Case:
    published = getattr(getattr(tv, weights.partition(".")[0]), weights.partition(".")[2]).meta["num_params"]
    return pictures(lambda: getattr(tv, name)(weights=None), published=published, **options)


LLAMA = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 8}
"""Llama 3.2 1B with 4 of its 16 layers."""


def with_lora() -> nn.Module:
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**LLAMA, vocab_size=128256, tie_word_embeddings=True))
    return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


TRANSFORMERS = {
    "GPT-2": language("GPT2LMHeadModel", tf.GPT2Config(loss_type="ForCausalLMLoss")),
    "GPT-Neo": language(
        "GPTNeoForCausalLM", tf.GPTNeoConfig(hidden_size=768, num_layers=4, attention_types=[[["global", "local"], 2]], num_heads=12)
    ),
    "OPT": language("OPTForCausalLM", tf.OPTConfig(num_hidden_layers=6)),
    "BERT": language("BertForMaskedLM", tf.BertConfig(num_hidden_layers=6)),
    "DistilBERT": language("DistilBertForMaskedLM", tf.DistilBertConfig()),
    "T5": language("T5ForConditionalGeneration", tf.T5Config(decoder_start_token_id=0)),
    "ViT": labelled_pictures("ViTForImageClassification", tf.ViTConfig(num_hidden_layers=6)),
    "Llama": language("LlamaForCausalLM", tf.LlamaConfig(**LLAMA, vocab_size=128256, tie_word_embeddings=True)),
    "Llama, LoRA": Case(with_lora, language("LlamaForCausalLM", tf.LlamaConfig(vocab_size=128256)).loss),
    "Mistral": language("MistralForCausalLM", tf.MistralConfig(num_hidden_layers=4, sliding_window=32)),
    "Qwen3": language("Qwen3ForCausalLM", tf.Qwen3Config(hidden_size=1024, intermediate_size=3072, num_hidden_layers=4)),
    "Gemma 2": language("Gemma2ForCausalLM", tf.Gemma2Config(num_hidden_layers=4)),
    "Phi-3": language("Phi3ForCausalLM", tf.Phi3Config(num_hidden_layers=4)),
    "Mamba": language("MambaForCausalLM", tf.MambaConfig(num_hidden_layers=2), time=16),
    "Mixtral": language(
        "MixtralForCausalLM",
        tf.MixtralConfig(hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2),
    ),
}
TORCHVISION = {
    "ResNet": torchvision_model("resnet50", "ResNet50_Weights.DEFAULT"),
    "VGG": torchvision_model("vgg11", "VGG11_Weights.DEFAULT"),
    "ConvNeXt": torchvision_model("convnext_tiny", "ConvNeXt_Tiny_Weights.DEFAULT"),
    "MobileNetV3": torchvision_model("mobilenet_v3_large", "MobileNet_V3_Large_Weights.DEFAULT"),
    "MnasNet": torchvision_model("mnasnet1_0", "MNASNet1_0_Weights.DEFAULT"),
    # It computes its widths with tensors, for which it reads their values while it is built.
    "RegNet": torchvision_model("regnet_y_8gf", "RegNet_Y_8GF_Weights.DEFAULT", reference="cpu"),
    "ViT of torchvision": torchvision_model("vit_b_16", "ViT_B_16_Weights.DEFAULT"),
    "Swin": torchvision_model("swin_t", "Swin_T_Weights.DEFAULT"),
    "DeepLabV3": pictures(lambda: tv.segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None)),
}
CASES = TRANSFORMERS | TORCHVISION


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **options)


def train(model: nn.Module, loss: Loss, device: torch.device, optimizer: torch.optim.Optimizer, autocast: bool = False) -> None:
    """Two steps."""
    model.train()
    for _ in range(2):
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            value = loss(model, device)
        value.backward()
        del value
        optimizer.step()
        optimizer.zero_grad()


# What a model consists of


@dataclass
class Facts:
    """What there is to know about a model without looking at its values."""

    parameters: dict[str, tuple[Any, ...]]
    buffers: dict[str, tuple[Any, ...]]
    tied: set[frozenset[str]]
    count: int

    @classmethod
    def of(cls, model: nn.Module) -> Facts:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        names: dict[int, list[str]] = {}
        for name, parameter in parameters.items():
            names.setdefault(id(parameter), []).append(name)
        return cls(
            {n: (p.shape, p.stride(), p.dtype, p.requires_grad, isinstance(p, nn.Parameter)) for n, p in parameters.items()},
            {n: (b.shape, b.stride(), b.dtype) for n, b in model.named_buffers(remove_duplicate=False)},
            {frozenset(group) for group in names.values()},
            sum(p.numel() for p in model.parameters()),
        )


@dataclass
class Run:
    """Two steps on a virtual card: what it counted, and the sizes of its parameters and buffers in bytes."""

    facts: Facts
    trace: MemoryTrace
    peak: int
    reads: dict[str, int]
    frozen: list[int] = field(default_factory=list)  # parameters that got no gradient
    trained: list[int] = field(default_factory=list)
    buffers: list[int] = field(default_factory=list)


@cache
def planned(name: str, autocast: bool) -> Run:
    case = CASES[name]
    with virtual_gpu("RTX 4090", limited=False) as gpu:
        with gpu.building():
            model = case.build()
        model.to(gpu.device)
        optimizer = adamw(model)
        train(model, case.loss, gpu.device, optimizer, autocast)
    run = Run(Facts.of(model), gpu.trace, gpu.peak_allocated, gpu.reads)
    assert {p.device for p in (*model.parameters(), *model.buffers())} == {gpu.device}
    for parameter in model.parameters():
        (run.trained if parameter in optimizer.state else run.frozen).append(parameter.numel() * parameter.element_size())
    run.buffers = [b.numel() * b.element_size() for b in model.buffers()]
    return run


@pytest.mark.parametrize("name", CASES)
def test_a_model_is_the_one_that_pytorch_builds(name: str) -> None:
    with torch.device(CASES[name].reference):
        reference = Facts.of(CASES[name].build())
    assert planned(name, autocast=False).facts == reference


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.published])
def test_a_model_has_the_parameters_that_its_authors_count(name: str) -> None:
    assert planned(name, autocast=False).facts.count == CASES[name].published


@pytest.mark.parametrize("name", ["GPT-2", "T5", "Llama", "Gemma 2"])
def test_tied_weights_are_one_parameter(name: str) -> None:
    facts = planned(name, autocast=False).facts
    assert max(map(len, facts.tied)) > 1
    assert facts.count < sum(shape.numel() for shape, *_ in facts.parameters.values())


# What training holds


def blocks(sizes: list[int]) -> int:
    """Bytes of the allocator's blocks for storages of these sizes."""
    return sum(round_up(size, 512) for size in sizes)


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("name", CASES)
def test_the_optimizer_step_holds_what_arithmetic_says(name: str, autocast: bool) -> None:
    run = planned(name, autocast)
    held = run.trace.rounded().breakdown("step")
    trained = blocks(run.trained)
    assert trained > 0
    assert held.parameters == trained + blocks(run.frozen) + blocks(run.buffers)
    assert held.gradients == trained
    assert held.optimizer_state == 2 * trained  # two moments; the counters of the steps are on the host
    assert held.temporary == trained  # foreach makes the roots of all second moments at once
    assert held.weight_copies == 0
    assert held.total <= run.peak
    assert run.reads == {}


@pytest.mark.parametrize("name", CASES)
def test_autocast_keeps_half_sized_copies_of_weights_and_halves_activations(name: str) -> None:
    full, half = (planned(name, autocast).trace.breakdown("forward") for autocast in (False, True))
    assert full.weight_copies == 0
    assert 0 < half.weight_copies <= sum(planned(name, autocast=True).trained) / 2 + sum(planned(name, autocast=True).frozen) / 2
    assert half.activations < full.activations
