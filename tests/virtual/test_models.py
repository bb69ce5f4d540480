"""Models nobody here wrote, unmodified and from their configurations, on a virtual card.

Two judges stand beside it: the same model built by PyTorch alone, and the same training step really done on the CPU.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vramlab.memory.recorder import record
from vramlab.memory.trace import Category, MemoryTrace, Phase
from vramlab.units import round_up
from vramlab.virtual.attention import TORCH
from vramlab.virtual.device import VirtualGPU, virtual_gpu
from vramlab.virtual.values import UnknownValueError

tf = pytest.importorskip("transformers", reason="needs transformers")
HAS_TORCHVISION, HAS_PEFT = (find_spec(name) is not None for name in ("torchvision", "peft"))
if HAS_TORCHVISION:
    import torchvision
    from torchvision import models as tv
if HAS_PEFT:
    import peft

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks transformers

Loss = Callable[..., torch.Tensor]  # of a model, a device, and further inputs


@dataclass(frozen=True)
class Case:
    """A model and the loss that it is trained with."""

    build: Callable[[], nn.Module]
    loss: Loss
    published: int | None = None  # parameters, by its authors
    reference: str = "meta"  # where PyTorch alone builds it


def language(kind: str, config: Any, time: int = 64) -> Case:
    """A language model with a batch of 2 texts; with its own loss."""
    size = config.vocab_size

    def loss(model: nn.Module, device: torch.device, **inputs: torch.Tensor) -> torch.Tensor:
        tokens = torch.arange(2 * time, device=device).remainder(size).view(2, time)
        return model(input_ids=tokens, labels=tokens, **inputs).loss

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
        return model(
            pixel_values=torch.zeros(2, 3, size, size, device=device), labels=torch.zeros(2, dtype=torch.int64, device=device)
        ).loss

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
    "OPT": language("OPTForCausalLM", tf.OPTConfig(num_hidden_layers=4)),
    "BERT": language("BertForMaskedLM", tf.BertConfig(num_hidden_layers=4)),
    "DistilBERT": language("DistilBertForMaskedLM", tf.DistilBertConfig()),
    "T5": language("T5ForConditionalGeneration", tf.T5Config(decoder_start_token_id=0)),
    "ViT": labelled_pictures("ViTForImageClassification", tf.ViTConfig(num_hidden_layers=4)),
    "Llama": language("LlamaForCausalLM", tf.LlamaConfig(**LLAMA, vocab_size=128256, tie_word_embeddings=True)),
    **({"Llama, LoRA": Case(with_lora, language("LlamaForCausalLM", tf.LlamaConfig(vocab_size=128256)).loss)} if HAS_PEFT else {}),
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
TORCHVISION = (
    {}
    if not HAS_TORCHVISION
    else {
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
)
CASES = TRANSFORMERS | TORCHVISION


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **options)


def train(
    model: nn.Module,
    loss: Loss,
    device: torch.device,
    optimizer: torch.optim.Optimizer,
    autocast: bool = False,
    **inputs: torch.Tensor,
) -> None:
    """Two steps."""
    model.train()
    for _ in range(2):
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            value = loss(model, device, **inputs)
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
    assert planned(name, False).facts == reference


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.published])
def test_a_model_has_the_parameters_that_its_authors_count(name: str) -> None:
    assert planned(name, False).facts.count == CASES[name].published


@pytest.mark.parametrize("name", ["GPT-2", "T5", "Llama", "Gemma 2"])
def test_tied_weights_are_one_parameter(name: str) -> None:
    facts = planned(name, False).facts
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
def test_autocast_keeps_half_sized_copies_of_weights(name: str) -> None:
    full, half = (planned(name, autocast).trace.breakdown("forward") for autocast in (False, True))
    assert full.weight_copies == 0
    assert 0 < half.weight_copies <= sum(planned(name, True).trained + planned(name, True).frozen) // 2
    if name != "Mamba":  # its recurrence runs in fp32, and casts what it reads
        assert half.activations < full.activations


# The same step, really done on the CPU


def small(attention: str = "eager") -> dict[str, Case]:
    """Every kind of model, small and without dropout, whose mask differs by device."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 199, "attn_implementation": attention}
    wide = {"hidden_size": 64, "intermediate_size": 128, **sizes}
    grouped = wide | {"num_key_value_heads": 2, "head_dim": 16}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    gpt2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 199, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    opt = {"hidden_size": 64, "ffn_dim": 128, "word_embed_proj_dim": 64, "dropout": 0.0, **sizes}
    distilbert = {"dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4, "vocab_size": 199, "dropout": 0.0, "attention_dropout": 0.0}
    t5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 199, "dropout_rate": 0.0}
    vit = {key: value for key, value in wide.items() if key != "vocab_size"} | still | {"image_size": 64, "patch_size": 8}
    how = {"attn_implementation": attention}
    models = {
        "GPT-2": language("GPT2LMHeadModel", tf.GPT2Config(**gpt2, **how, loss_type="ForCausalLMLoss")),
        "OPT": language("OPTForCausalLM", tf.OPTConfig(**opt)),
        "BERT": language("BertForMaskedLM", tf.BertConfig(**wide, **still)),
        "DistilBERT": language("DistilBertForMaskedLM", tf.DistilBertConfig(**distilbert, **how)),
        "T5": language("T5ForConditionalGeneration", tf.T5Config(**t5, **how, decoder_start_token_id=0)),
        "ViT": labelled_pictures("ViTForImageClassification", tf.ViTConfig(**vit), 64),
        "Llama": language("LlamaForCausalLM", tf.LlamaConfig(**wide)),
        "Mistral": language("MistralForCausalLM", tf.MistralConfig(**grouped, sliding_window=32)),
        "Qwen3": language("Qwen3ForCausalLM", tf.Qwen3Config(**grouped)),
        "Phi-3": language("Phi3ForCausalLM", tf.Phi3Config(**wide, pad_token_id=0)),
        "Mixtral": language("MixtralForCausalLM", tf.MixtralConfig(**grouped, num_local_experts=4)),
    }
    if attention == "eager":  # nothing else for these
        neo = {"hidden_size": 64, "num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_heads": 4, "vocab_size": 199}
        models["GPT-Neo"] = language("GPTNeoForCausalLM", tf.GPTNeoConfig(**neo))
        models["Gemma 2"] = language("Gemma2ForCausalLM", tf.Gemma2Config(**grouped))
        models["Mamba"] = language("MambaForCausalLM", tf.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=199), time=16)
    return models


def small_torchvision() -> dict[str, Case]:
    """All but VGG, which has 100 million parameters at any size, and no operator that the others have not."""

    def swin() -> nn.Module:
        sizes: dict[str, Any] = {"patch_size": [4, 4], "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": [7, 7]}
        return tv.SwinTransformer(**sizes, stochastic_depth_prob=0.0, num_classes=10)

    def vit() -> nn.Module:
        return tv.VisionTransformer(image_size=64, patch_size=16, num_layers=2, num_heads=4, hidden_dim=64, mlp_dim=128, num_classes=10)

    if not HAS_TORCHVISION:
        return {}
    builds: dict[str, Callable[[], nn.Module]] = {
        "ResNet": lambda: tv.resnet18(num_classes=10),
        "ConvNeXt": lambda: tv.ConvNeXt([tv.convnext.CNBlockConfig(16, 32, 2), tv.convnext.CNBlockConfig(32, None, 2)], num_classes=10),
        "MobileNetV3": lambda: tv.mobilenet_v3_small(num_classes=10),
        "MnasNet": lambda: tv.mnasnet0_5(num_classes=10),
        "RegNet": lambda: tv.regnet_y_400mf(num_classes=10),
        "ViT of torchvision": vit,
        "Swin": swin,
        "DeepLabV3": lambda: tv.segmentation.deeplabv3_mobilenet_v3_large(weights_backbone=None),
    }
    return {name: pictures(build, 64, 10) for name, build in builds.items()}


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def really(case: Case) -> MemoryTrace:
    """Two steps on the CPU, with the optimizer's choice for cards."""
    model = without_dropout(case.build())
    optimizer = adamw(model, foreach=True)
    with record(model, optimizer) as trace:
        train(model, case.loss, torch.device("cpu"), optimizer)
    return trace


ONES = (64, 64)  # how much of each text is there
PADDED = (63, 64)


@cache
def virtually(
    case: Case,
    autocast: bool = False,
    change: Callable[[nn.Module], Any] = without_dropout,
    lengths: tuple[int, ...] | None = None,
) -> VirtualGPU:
    """Two steps on a virtual card, with a mask for texts of these lengths."""
    with virtual_gpu("RTX 4090") as gpu:
        with gpu.building():
            model = case.build()
        change(model)
        inputs = {}
        if lengths is not None:
            inputs["attention_mask"] = (torch.arange(64) < torch.tensor(lengths)[:, None]).long().to(gpu.device)
        train(model, case.loss, gpu.device, adamw(model), autocast, **inputs)
    return gpu


def second_step(trace: MemoryTrace) -> list[tuple[int, int]]:
    """Phase and signed bytes of what happens between the first and the second step of the optimizer, without workspaces."""
    events = trace.events
    (begin, _), (end, _) = events.steps
    rows = range(begin, end)
    return [(int(events.phase[i]), int(events.nbytes[i])) for i in rows if events.category[i] != Category.WORKSPACE]


def highest(trace: MemoryTrace) -> dict[str, int]:
    """The most bytes in each phase of the second step, without workspaces."""
    events = trace.events
    held = np.cumsum(np.where(events.category == Category.WORKSPACE, 0, events.nbytes))
    (begin, _), (end, _) = events.steps
    phases = events.phase[begin:end]
    return {phase.label: int(held[begin:end][phases == phase].max()) for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.STEP)}


def operators(trace: MemoryTrace) -> Counter[str]:
    """How many storages each operator makes in the second step."""
    events = trace.events
    (begin, _), (end, _) = events.steps
    rows = [i for i in range(begin, end) if events.nbytes[i] > 0 and events.category[i] != Category.WORKSPACE]
    return Counter(str(events.operators[events.operator[i]]).removeprefix("aten::") for i in rows)


EAGER, FUSED = small("eager"), small("sdpa")
TRUE = EAGER | {name: case for name, case in small_torchvision().items() if name != "ViT of torchvision"}  # its attention is fused
COUNTER = 4  # bytes of Adam's count of steps for each parameter, which is on the host where there is a card
SCALAR = 8  # bytes at most of a number that is made on the CPU and moved: it comes into being a moment later


@pytest.mark.parametrize("name", TRUE)
def test_a_step_allocates_and_releases_what_it_does_on_the_cpu(name: str) -> None:
    """Event by event. A virtual card could differ only by its own kernels, and eager attention without dropout has none."""
    true, virtual = really(TRUE[name]), virtually(TRUE[name]).trace
    expected, got = second_step(true), second_step(virtual)
    for change in (COUNTER, -COUNTER):  # the number 1 that the counters are increased by
        expected.remove((Phase.STEP, change))
    assert [event for event in got if abs(event[1]) > SCALAR] == [event for event in expected if abs(event[1]) > SCALAR]
    assert sorted(got) == sorted(expected)
    counters = COUNTER * sum(1 for _ in TRUE[name].build().parameters())
    wanted = {phase: nbytes - counters for phase, nbytes in highest(true).items()}
    assert highest(virtual) == pytest.approx(wanted, rel=0, abs=4 * SCALAR)


ATTENTION = {"_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward"}
AROUND_ATTENTION = {"clone", "_to_copy", "scalar_tensor", "lift_fresh", "empty_like", "sum.dim_IntList"}


FUSED_IN_FP32 = [name for name in FUSED if name not in ("Qwen3", "Mixtral") or TORCH >= (2, 14)]
"""Before 2.14 the kernel that takes fp32 wants as many key heads as query heads."""


@pytest.mark.parametrize("name", [*FUSED_IN_FP32, *(["ViT of torchvision"] if HAS_TORCHVISION else [])])
def test_fused_attention_is_all_that_differs_from_the_cpu(name: str) -> None:
    case = (FUSED | small_torchvision())[name]
    true, virtual = operators(really(case)), operators(virtually(case).trace)
    assert virtual.keys() >= ATTENTION
    assert set(virtual - true) <= ATTENTION | AROUND_ATTENTION
    math = {"bmm", "_safe_softmax", "_softmax_backward_data", "add.Tensor", "mul.Scalar"}  # the CPU's way with T5's bias, which is trained
    assert {name for name in true - virtual if "attention_for_cpu" not in name} <= AROUND_ATTENTION | math


@pytest.mark.skipif(not HAS_TORCHVISION, reason="needs torchvision")
def test_masks_of_dropout_have_a_byte_an_element() -> None:
    case = small_torchvision()["DeepLabV3"]
    trace = virtually(case, change=lambda model: model).trace
    assert operators(trace) - operators(virtually(case).trace) == {"native_dropout": 2, "native_dropout_backward": 1}
    names = [str(name) for name in trace.events.operators]
    rows = zip(trace.events.nbytes, trace.events.operator, strict=True)
    mask, out = sorted({int(nbytes) for nbytes, operator in rows if nbytes > 0 and names[operator] == "aten::native_dropout"})
    assert out == 4 * mask


# Masks


def kernels(gpu: VirtualGPU) -> set[str]:
    return {name for name in operators(gpu.trace) if name.startswith("_scaled_dot_product") and "backward" not in name}


MASKED = [name for name in FUSED if name != "ViT"]


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("name", MASKED)
def test_a_mask_of_ones_costs_itself_and_no_more(name: str, autocast: bool) -> None:
    without, with_ones = (virtually(FUSED[name], autocast, lengths=lengths) for lengths in (None, ONES))
    assert kernels(with_ones) == kernels(without)
    assert len(kernels(without)) == (autocast or name in FUSED_IN_FP32)
    assert with_ones.peak_allocated == without.peak_allocated + blocks([2 * 64 * 8])


@pytest.mark.parametrize("name", MASKED)
def test_a_mask_with_a_zero_is_not_the_same(name: str) -> None:
    """Flash attention takes none."""
    assert kernels(virtually(FUSED[name], True, lengths=PADDED)) == {"_scaled_dot_product_efficient_attention"}


@pytest.mark.parametrize("name", FUSED)
def test_eager_attention_keeps_its_weights(name: str) -> None:
    eager, fused = (virtually(cases[name]) for cases in (EAGER, FUSED))
    assert kernels(eager) == set()
    batch, heads, time = 2, 4, 64
    weights_of_a_layer = batch * heads * time * time * 4
    held = [gpu.trace.holders(1000, "end of forward").query("operator == 'aten::_softmax'") for gpu in (eager, fused)]
    kept = [(made["bytes"] >= weights_of_a_layer).sum() for made in held]  # routers have small ones
    assert kept[0] >= 2  # layers
    assert kept[1] == 0


# Ways to save


def checkpointed(model: nn.Module) -> None:
    without_dropout(model).gradient_checkpointing_enable()


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", [name for name in EAGER if name != "Mamba"])
def test_checkpointing_of_transformers_lowers_activations_and_nothing_else(name: str) -> None:
    plain, saving = (virtually(EAGER[name], change=change) for change in (without_dropout, checkpointed))
    forward, less = (gpu.trace.breakdown("end of forward") for gpu in (plain, saving))
    assert less.activations < 0.7 * forward.activations
    assert (less.parameters, less.optimizer_state) == (forward.parameters, forward.optimizer_state)
    assert highest(saving.trace)["step"] == highest(plain.trace)["step"]


@pytest.mark.skipif(not HAS_PEFT, reason="needs peft")
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_lora_trains_its_matrices_alone(autocast: bool) -> None:
    run = planned("Llama, LoRA", autocast)
    rank, width, keys = 8, 2048, 512
    assert sum(run.trained) == 4 * 4 * rank * ((width + width) + (width + keys))  # bytes, layers, rank, sizes of the query and the value
    assert sum(run.frozen) == sum(planned("Llama", False).trained)
    held = run.trace.breakdown("step")
    assert (held.gradients, held.optimizer_state) == (sum(run.trained), 2 * sum(run.trained))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("when", ["on the card", "on the host", "in the config"])
def test_a_model_in_half_precision_takes_half_of_all(when: str, dtype: torch.dtype) -> None:
    config = tf.LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=199)
    with virtual_gpu("RTX 4090") as gpu:
        with gpu.building("cpu" if when == "on the host" else None):
            build = tf.AutoModelForCausalLM.from_config
            model = build(config, dtype=dtype) if when == "in the config" else build(config).to(dtype)
        model.to(gpu.device)
        train(model, language("LlamaForCausalLM", config).loss, gpu.device, adamw(model))
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    size = 2 * sum(parameter.numel() for parameter in model.parameters())
    held = gpu.trace.breakdown("step")
    assert (held.gradients, held.optimizer_state, held.temporary) == (size, 2 * size, size)
    assert held.parameters == size + sum(buffer.nbytes for buffer in model.buffers())


# What cannot be planned, and must say so


def detector(name: str, **targets: Any) -> Case:
    """Two pictures, with a box in each; what it proposes depends on values."""

    def loss(model: nn.Module, device: torch.device) -> torch.Tensor:
        boxes, labels = torch.tensor([[10.0, 10.0, 90.0, 90.0]]), torch.ones(1, dtype=torch.int64)
        target = {"boxes": boxes.to(device), "labels": labels.to(device)}
        return sum(model(list(torch.zeros(2, 3, 128, 128, device=device)), [target, target]).values())

    return Case(lambda: getattr(tv.detection, name)(weights=None, weights_backbone=None, num_classes=3), loss)


def speech() -> Case:
    config = tf.Wav2Vec2Config(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, mask_time_prob=0.0)

    def loss(model: nn.Module, device: torch.device) -> torch.Tensor:
        return model(input_values=torch.zeros(2, 4000, device=device), labels=torch.ones(2, 3, dtype=torch.int64, device=device)).loss

    return Case(lambda: tf.Wav2Vec2ForCTC(config), loss)


def experts_one_by_one() -> Case:
    config = tf.MixtralConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    config.vocab_size, config._experts_implementation = 199, "eager"
    return language("MixtralForCausalLM", config)


def generation() -> Case:
    config = tf.LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=199)

    def generate(model: nn.Module, device: torch.device) -> torch.Tensor:
        return model.generate(torch.ones(1, 4, dtype=torch.int64, device=device), max_new_tokens=3)

    return Case(lambda: tf.LlamaForCausalLM(config), generate)


REFUSED = {
    **(
        {
            "Faster R-CNN": (detector("fasterrcnn_resnet50_fpn"), "aten::nonzero"),
            "Mask R-CNN": (detector("maskrcnn_resnet50_fpn"), "aten::nonzero"),
            "RetinaNet": (detector("retinanet_resnet50_fpn"), "aten::nonzero"),
            "SSD": (detector("ssdlite320_mobilenet_v3_large"), "aten::nonzero"),
            "FCOS": (detector("fcos_resnet50_fpn"), "aten::index.Tensor"),
        }
        if HAS_TORCHVISION
        else {}
    ),
    "wav2vec 2.0 with CTC": (speech(), "aten::_ctc_loss.Tensor"),
    "Mixtral, experts one by one": (experts_one_by_one(), "aten::nonzero"),
    "generating text": (generation(), "aten::_local_scalar_dense"),
}
"""Permitted refusals: models whose work depends on values that the card computes, and the operator that they must name."""


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_depends_on_values_is_refused_with_operator_line_and_way_out(name: str, gpu: VirtualGPU) -> None:
    case, operator = REFUSED[name]
    with gpu.building():
        model = case.build()
    message = (
        rf"Nothing is computed on a virtual GPU, so what Python reads from it must have come from the CPU: {re.escape(operator)} at "
        r"\S+\.py:\d+ needs values that were computed on the card\. Compute them on the CPU and move them there, or leave out the check "
        r"or the branch that reads them while planning; where a shape depends on values, use the largest that can occur\."
    )
    with pytest.raises(UnknownValueError, match=f"^{message}(\n|$)"):
        case.loss(model.train(), gpu.device)


# A library must not be able to tell


def test_transformers_takes_a_virtual_tensor_for_a_real_one(gpu: VirtualGPU) -> None:
    from transformers.utils.import_utils import is_fake_tensor, is_tracing

    assert not is_tracing(torch.zeros(2, device=gpu.device))
    assert not is_fake_tensor(torch.zeros(2, device=gpu.device))
    with torch._subclasses.fake_tensor.FakeTensorMode():
        assert is_fake_tensor(torch.zeros(2))


def test_experts_are_multiplied_in_groups_as_on_cards_that_can() -> None:
    assert operators(virtually(EAGER["Mixtral"]).trace)["_grouped_mm"] == 2 * 2 * 3  # layers, products, and forward with two gradients


def test_where_a_card_multiplies_no_groups_another_way_must_be_named() -> None:
    case = EAGER["Mixtral"]
    with virtual_gpu("RTX 2080 Ti") as gpu:
        with gpu.building():
            model = case.build()
        message = (
            r"_grouped_mm\S*\) on cards of compute capability 8\.0 and later, and this one has 7\.5.*experts_implementation='batched_mm'"
        )
        with pytest.raises(NotImplementedError, match=message):
            case.loss(model, gpu.device)
        model.set_experts_implementation("batched_mm")
        case.loss(model, gpu.device).backward()


@pytest.mark.filterwarnings("ignore:`create_unbacked_symint` is deprecated:FutureWarning")  # torchvision asks torch
@pytest.mark.skipif(not HAS_TORCHVISION, reason="needs torchvision")
def test_torchvision_suppresses_boxes_as_on_a_card(gpu: VirtualGPU) -> None:
    boxes = torch.rand(1010, 4).sort().values  # more than 4,000 numbers: on the CPU class by class, on a card at once
    kept = torchvision.ops.batched_nms(boxes.to(gpu.device), torch.rand(1010).to(gpu.device), torch.zeros(1010, device=gpu.device), 0.5)
    assert kept.device == gpu.device
    names = {str(name) for name in gpu.trace.events.operators}
    assert "torchvision.nms" in names
    assert not names & {"aten::_unique2", "aten::nonzero"}


@pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate")
def test_a_trainer_that_chooses_its_device_is_refused_and_works_afterwards(tmp_path: Any) -> None:
    import accelerate

    original = accelerate.PartialState.__init__
    with virtual_gpu("RTX 4090"):
        with pytest.raises(RuntimeError, match=r"^accelerate, and transformers\.Trainer.* here the CPU.*Write the step without it"):
            accelerate.Accelerator()
    assert accelerate.PartialState.__init__ is original
    assert accelerate.PartialState().device.type == "cpu"


# Where CUDA lays out memory in another way than PyTorch's shape functions


def last(*shape: int) -> torch.Tensor:
    """Channels last."""
    return torch.zeros(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


def weights(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


LAYOUTS: dict[str, tuple[Callable[..., torch.Tensor], list[torch.Tensor]]] = {
    "conv1d": (F.conv1d, [torch.zeros(2, 9, 8).transpose(1, 2), weights(4, 8, 3)]),
    "conv2d": (F.conv2d, [weights(2, 8, 9, 7), weights(4, 8, 3, 3)]),
    "conv2d, channels last": (F.conv2d, [last(2, 8, 9, 7), weights(4, 8, 3, 3)]),
    "conv2d, weight channels last": (F.conv2d, [weights(2, 8, 9, 7), last(4, 8, 3, 3)]),
    "conv2d, 1 x 1": (F.conv2d, [weights(2, 8, 9, 7), weights(4, 8, 1, 1)]),
    "conv2d with a bias": (F.conv2d, [last(2, 8, 9, 7), weights(4, 8, 3, 3), weights(4)]),
    "conv2d of each channel": (lambda x, w: F.conv2d(x, w, groups=8), [last(2, 8, 9, 7), weights(8, 1, 3, 3)]),
    "conv3d, channels last": (F.conv3d, [last(2, 8, 5, 9, 7), weights(4, 8, 3, 3, 3)]),
    "transposed": (F.conv_transpose2d, [last(2, 8, 9, 7), weights(8, 4, 3, 3)]),
    "layer norm": (lambda x, w: F.layer_norm(x, (8,), w), [weights(2, 9, 7, 8), weights(8)]),
    "glu": (lambda x: F.glu(x, 1), [last(2, 8, 9, 7)]),
    "log softmax": (lambda x: x.log_softmax(1), [last(2, 8, 9, 7)]),
    "softmax": (lambda x: x.softmax(1), [last(2, 8, 9, 7)]),
    "squares": (lambda x: F.mse_loss(x, torch.ones_like(x), reduction="none"), [last(2, 8, 9, 7)]),
    "smooth": (lambda x: F.smooth_l1_loss(x, torch.ones_like(x), reduction="none"), [last(2, 8, 9, 7)]),
}


def strides(function: Callable[..., torch.Tensor], inputs: list[torch.Tensor], device: torch.device | str) -> list[tuple[int, ...]]:
    leaves = [tensor.to(device).requires_grad_() for tensor in inputs]
    out = function(*leaves)
    permuted = torch.ones_like(out.movedim(1, -1).contiguous().movedim(-1, 1))
    return [tensor.stride() for tensor in (out, *torch.autograd.grad(out, leaves, permuted))]


@pytest.mark.parametrize("name", LAYOUTS)
def test_results_and_gradients_lie_in_memory_as_on_the_cpu(name: str, gpu: VirtualGPU) -> None:
    """Where CUDA's kernels and the CPU's follow the same rule, and the shape functions do not."""
    assert strides(*LAYOUTS[name], gpu.device) == strides(*LAYOUTS[name], "cpu")


@pytest.mark.parametrize("why", ["double precision", "no cuDNN"])
def test_convolutions_without_cudnn_are_contiguous(why: str, gpu: VirtualGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "no cuDNN":
        monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    dtype = torch.float64 if why == "double precision" else torch.float32
    out = F.conv2d(last(2, 8, 9, 7).to(gpu.device, dtype), weights(4, 8, 3, 3).to(gpu.device, dtype))
    assert out.is_contiguous()


GROUPS = {
    "rows by group": ((10, 16), (3, 16, 6), (10, 6)),
    "columns by group": ((3, 4, 16), (16, 6), (4, 6)),
    "sums by group": ((4, 16), (16, 6), (3, 4, 6)),
    "batches": ((3, 4, 16), (3, 16, 6), (3, 4, 6)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", GROUPS)
def test_products_in_groups_have_rows_of_whole_16_bytes(kind: str, dtype: torch.dtype, gpu: VirtualGPU) -> None:
    one, other, shape = GROUPS[kind]
    ends = None if kind == "batches" else torch.tensor([2, 5, 16 if kind == "sums by group" else 6], dtype=torch.int32).to(gpu.device)
    wide = torch.zeros(*other[:-1], 8, device=gpu.device, dtype=dtype)[..., : other[-1]]  # rows must begin at multiples of 16 bytes
    out = F.grouped_mm(torch.zeros(one, device=gpu.device, dtype=dtype), wide, offs=ends)
    assert out.shape == shape
    assert out.stride() == (shape[-2] * 8, 8, 1)[-len(shape) :]  # 6 elements, of 2 or 4 bytes, rounded up
    assert out.untyped_storage().nbytes() == (int(np.prod(shape[:-1])) * 8 - 2) * dtype.itemsize
