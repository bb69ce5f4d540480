"""Runs that others measured, rebuilt: a model and the loop that it went through, told from what was published of each.

A workload is a model and its steps. `Place` is what they need of a device, so the same run goes through the virtual GPU,
a real one, or another estimator. Loops matter as much as models: when gradients are dropped, which outputs live on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import architectures
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Place(Protocol):
    """Where a workload runs."""

    device: torch.device

    def building(self) -> AbstractContextManager[None]:
        """In it, parameters go to the device as they are made."""

    def allocated(self) -> int:
        """Bytes in tensors' blocks now."""

    def peak(self) -> int:
        """Highest `allocated` since the last `reset`."""

    def reset(self) -> None:
        """Forget the peak."""


@dataclass(frozen=True)
class Workload:
    """A model, and its steps: ``steps(place, model, **options)`` gives bytes where the run read them in its loop."""

    model: Callable[..., nn.Module]
    steps: Callable[..., int | None]


@contextlib.contextmanager
def default_dtype(name: str) -> Iterator[None]:
    """Models made in this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def token_ids(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.int64)  # in every vocabulary


# xMem's grid: github Stone-ResearchLife/xMem, experiments/trainer/train_loop.py

IMAGE_MODELS = {
    "ConvNeXtTiny": ("convnext_tiny", {}),
    "ConvNeXtBase": ("convnext_base", {}),
    "VGG16": ("vgg16", {}),
    "VGG19": ("vgg19", {}),
    "ResNet101": ("resnet101", {}),
    "ResNet152": ("resnet152", {}),
    "MobileNetV2": ("mobilenet_v2", {}),
    "RegNetX400MF": ("regnet_x_400mf", {}),
    "RegNetY400MF": ("regnet_y_400mf", {}),
    "MobeNetV3Small": ("mobilenet_v3_small", {"num_classes": 10}),
    "MobeNetV3Large": ("mobilenet_v3_large", {"num_classes": 10}),
    "MnasNet": ("mnasnet1_0", {"num_classes": 10}),
}
"""The grid's names, and torchvision's builders with the classes that the grid used."""

TEXT_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "openai-community/gpt2": ("GPT2", {}),
    "distilbert/distilgpt2": ("GPT2", {"n_layer": 6}),
    "gpt2-large": ("GPT2", {"n_embd": 1280, "n_layer": 36, "n_head": 20}),
    "cerebras/Cerebras-GPT-111M": (
        "GPT2",
        {
            "n_layer": 10,
            "n_inner": 3072,
            "n_positions": 2048,
            "activation_function": "gelu",
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
        },
    ),
    "EleutherAI/gpt-neo-125M": (
        "GPTNeo",
        {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "attention_types": [[["global", "local"], 6]]},
    ),
    "facebook/opt-125m": ("OPT", {}),
    "facebook/opt-350m": (
        "OPT",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "ffn_dim": 4096,
            "num_attention_heads": 16,
            "word_embed_proj_dim": 512,
            "do_layer_norm_before": False,
        },
    ),
    "T5-small": ("T5", {"d_model": 512, "d_ff": 2048, "num_layers": 6, "num_heads": 8, "decoder_start_token_id": 0}),
    "t5-base": ("T5", {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "decoder_start_token_id": 0}),
    "EleutherAI/pythia-410m-deduped": (
        "GPTNeoX",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "vocab_size": 50_304,
            "max_position_embeddings": 2048,
        },
    ),
    "distilbert-base-uncased": ("DistilBert", {}),
    "albert/albert-base-v2": (
        "Albert",
        {
            "hidden_size": 768,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "attention_probs_dropout_prob": 0.0,
            "hidden_dropout_prob": 0.0,
        },
    ),
    "google-bert/bert-base-uncased": ("Bert", {}),
    "microsoft/biogpt": ("BioGpt", {}),
}
"""The public configurations, as differences from the defaults of transformers' configuration class."""


def image_model(model: str, **_: Any) -> nn.Module:
    import torchvision

    name, arguments = IMAGE_MODELS[model]
    return getattr(torchvision.models, name)(weights=None, **arguments)


def text_model(model: str, head: str | None = None, attention: str | None = None, dtype: str = "float32", **_: Any) -> nn.Module:
    import transformers

    kind, differences = TEXT_CONFIGS[model]
    head = head or ("Seq2SeqLM" if kind == "T5" else "CausalLM")
    config = getattr(transformers, f"{kind}Config")(**differences)
    chosen = {} if attention is None else {"attn_implementation": attention}
    with default_dtype(dtype):
        return getattr(transformers, f"AutoModelFor{head}").from_config(config, **chosen)


def grid_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "Adafactor":
        from transformers import Adafactor

        return Adafactor(model.parameters(), lr=1e-3, relative_step=False)
    return getattr(torch.optim, name)(model.parameters(), lr=1e-3)


def grid_images(place: Place, model: nn.Module, /, *, optimizer: str, batch: int, zero_grad: int, **_: Any) -> None:
    """Four steps on images of 86 x 86; ``zero_grad`` is 0 before the batch, 1 before backward, 2 at the end."""
    model.train()
    chosen = grid_optimizer(optimizer, model)
    criterion = nn.CrossEntropyLoss()
    for _step in range(4):
        inputs, labels = torch.zeros(batch, 3, 86, 86), torch.zeros(batch, dtype=torch.int64)
        if zero_grad == 0:
            chosen.zero_grad()
        inputs, labels = inputs.to(place.device), labels.to(place.device)
        outputs = model(inputs)
        loss = criterion(outputs, labels)
        if zero_grad == 1:
            chosen.zero_grad()
        loss.backward()
        chosen.step()
        _, _predicted = torch.max(outputs, 1)
        if zero_grad == 2:
            chosen.zero_grad()


def grid_text(place: Place, model: nn.Module, /, *, optimizer: str, batch: int, length: int, zero_grad: int, **_: Any) -> None:
    """Four steps on ``length`` tokens with an attention mask and labels; the model computes its loss."""
    model.train()
    chosen = grid_optimizer(optimizer, model)
    for _step in range(4):
        given = {name: token_ids(batch, length) for name in ("input_ids", "attention_mask", "labels")}
        if zero_grad == 0:
            chosen.zero_grad()
        given = {name: tensor.to(place.device) for name, tensor in given.items()}
        outputs = model(**given)
        if zero_grad == 1:
            chosen.zero_grad()
        loss = outputs.loss
        loss.backward()
        chosen.step()
        if zero_grad == 2:
            chosen.zero_grad()


# Sebastian Raschka's ladders: github rasbt/pytorch-memory-optim, rasbt/LLM-finetuning-scripts, rasbt/LLMs-from-scratch


class Precision:
    """Lightning Fabric's precisions: "32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "64-true"."""

    DTYPES = {"16": torch.float16, "bf16": torch.bfloat16, "32": torch.float32, "64": torch.float64}  # noqa: RUF012

    def __init__(self, name: str, place: Place) -> None:
        bits, kind = name.split("-")
        self.dtype, self.mixed, self.place = self.DTYPES[bits], kind == "mixed", place
        self.scaler = torch.amp.GradScaler(place.device.type) if name == "16-mixed" else None

    def prepare(self, model: nn.Module) -> nn.Module:
        return model if self.mixed else model.to(self.dtype)

    def inputs(self, x: Tensor) -> Tensor:
        return x if self.mixed or not x.is_floating_point() else x.to(self.dtype)

    def forward(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.place.device.type, dtype=self.dtype) if self.mixed else nullcontext()

    def backward(self, loss: Tensor) -> None:
        (self.scaler.scale(loss) if self.scaler else loss).backward()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.scaler:
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()


def ladder_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "SGD":
        return torch.optim.SGD(model.parameters(), lr=0.01)
    return architectures.OldForeachAdam(model.parameters())  # these runs had torch 2.0, and 2.1 of June 2023


def vit_model(**_: Any) -> nn.Module:
    import torchvision

    model = torchvision.models.vit_l_16(weights=None)
    model.heads.head = nn.Linear(1024, 10)
    return model


def vit_ladder(place: Place, model: nn.Module, /, *, precision: str, batch: int, optimizer: str, accumulation: int, **_: Any) -> None:
    """Training steps with ``zero_grad`` between forward and backward, then a validation batch."""
    chosen = Precision(precision, place)
    model = chosen.prepare(model)
    optimize = ladder_optimizer(optimizer, model)
    for step in range(3 * accumulation):
        model.train()
        features, targets = torch.zeros(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.int64)
        features, targets = chosen.inputs(features.to(place.device)), targets.to(place.device)
        with chosen.forward():
            logits = model(features)
        logits = logits.float() if precision != "32-true" else logits  # Fabric gives outputs back in the default dtype
        loss = F.cross_entropy(logits, targets) / accumulation
        if accumulation == 1:
            optimize.zero_grad()
        chosen.backward(loss)
        if (step + 1) % accumulation == 0:
            chosen.step(optimize)
            if accumulation > 1:
                optimize.zero_grad()
        model.eval()
        with torch.no_grad():
            torch.argmax(logits, 1)
    with torch.no_grad(), chosen.forward():
        features = chosen.inputs(torch.zeros(batch, 3, 224, 224).to(place.device))
        logits = model(features)


def vit_made(place: Place, model: nn.Module, /, *, cast: bool, **_: Any) -> None:
    """Only the model, in fp16; with ``cast`` made in fp32 on the card first."""
    if cast:
        model.half()


def vit_made_model(*, cast: bool, **_: Any) -> nn.Module:
    with default_dtype("float32" if cast else "float16"):
        return vit_model()


def distilbert_model(**_: Any) -> nn.Module:
    return text_model("distilbert-base-uncased", head="SequenceClassification", attention="eager")


def distilbert_reviews(place: Place, model: nn.Module, /, *, precision: str, batch: int, **_: Any) -> None:
    """Sentiment of 512 padded tokens: the model's loss, ``zero_grad`` between forward and backward."""
    chosen = Precision(precision, place)
    model = chosen.prepare(model).train()
    optimize = ladder_optimizer("Adam", model)
    for _step in range(3):
        given = {"input_ids": token_ids(batch, 512), "attention_mask": token_ids(batch, 512), "labels": token_ids(batch)}
        given["attention_mask"][0, -1] = 0  # reviews are padded, so the mask is not all ones
        given = {name: tensor.to(place.device) for name, tensor in given.items()}
        with chosen.forward():
            outputs = model(**given)
        optimize.zero_grad()
        chosen.backward(outputs.loss)
        chosen.step(optimize)


def book_model(*, mask: str, plain: bool, dtype: str = "float32", **_: Any) -> nn.Module:
    with default_dtype(dtype):
        return architectures.BookGPT2(mask, plain)


def book_steps(place: Place, model: nn.Module, /, *, batch: int, fused: bool, **_: Any) -> None:
    """``zero_grad``, forward, loss over all tokens, backward, AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1, fused=fused or None)
    model.train()
    for _step in range(3):
        inputs, targets = token_ids(batch, 1024), token_ids(batch, 1024)
        optimizer.zero_grad()
        inputs, targets = inputs.to(place.device), targets.to(place.device)
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        del logits  # a local of the function that computes the loss
        loss.backward()
        optimizer.step()


# Lightning's litgpt: extensions/thunder/README.md


def lit_model(**_: Any) -> nn.Module:
    with default_dtype("bfloat16"):
        return architectures.LitLlama()


def lit_steps(place: Place, model: nn.Module, /, *, batch: int, accumulation: int, **_: Any) -> None:
    """Micro-batches whose gradients add up; fused AdamW; cross entropy on all logits."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, weight_decay=0.1, betas=(0.9, 0.95), fused=True)
    for step in range(3 * accumulation):
        data = token_ids(batch, 2049).to(place.device)
        inputs, targets = data[:, :2048].contiguous().long(), data[:, 1:].contiguous().long()
        logits = model(inputs).float()  # Fabric gives outputs back in the default dtype
        loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-100)
        del logits  # a local of the function that computes the loss
        (loss / accumulation).backward()
        if (step + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()


# Hugging Face's attention tables: transformers' documentation, forward and backward in fp16


def attention_table_model(**options: Any) -> nn.Module:
    return text_model(dtype="float16", **options)


def attention_table(place: Place, model: nn.Module, /, *, batch: int, length: int, **_: Any) -> int:
    """Sum of the logits, backward; the outputs live until the next forward has ended."""
    model.train()
    inputs = token_ids(batch, length).to(place.device)
    for step in range(4):
        if step == 1:
            place.reset()
        model.zero_grad()
        outputs = model(input_ids=inputs)
        loss = outputs.logits.sum()
        loss.backward()
    return place.peak()


# The language model of Stanford's CS336, measured by its students


def course_model(*, size: str, context: int, segment: int = 0, **_: Any) -> nn.Module:
    return architectures.CourseLM(size, context, segment)


def course_autocast(place: Place, amp: bool) -> AbstractContextManager[Any]:
    return torch.autocast(place.device.type, dtype=torch.bfloat16, enabled=amp)


def course_training(place: Place, model: nn.Module, /, *, context: int, batch: int = 4, amp: bool = False, **_: Any) -> int:
    """A step to warm up, then one that is measured, with output and gradients of the first dropped; inputs for six stay."""
    optimizer = architectures.CourseAdamW(model.parameters())
    tokens, targets = (token_ids(6, batch, context).to(place.device) for _ in range(2))
    with course_autocast(place, amp):
        output = model(tokens[0])
        loss = architectures.course_loss(output, targets[0])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    del output, loss
    place.reset()
    with course_autocast(place, amp):
        output = model(tokens[5])
        loss = architectures.course_loss(output, targets[5])
    loss.backward()
    optimizer.step()
    return place.peak()


def course_inference(place: Place, model: nn.Module, /, *, context: int, batch: int = 4, amp: bool = False, **_: Any) -> int:
    """Forward in inference mode, after a few to warm up."""
    model.eval()
    tokens = token_ids(6, batch, context).to(place.device)
    with torch.inference_mode():
        for step in range(2):
            place.reset()
            with course_autocast(place, amp):
                model(tokens[step])
    return place.peak()


def course_no_grad(place: Place, model: nn.Module, /, *, context: int, batch: int = 4, amp: bool = False, **_: Any) -> int:
    """Forward without a graph, twice: the logits of the first live through the second."""
    model.eval()
    tokens = token_ids(batch, context).to(place.device)
    with torch.no_grad():
        for _step in range(2):
            place.reset()
            with course_autocast(place, amp):
                _output = model(tokens)
    return place.peak()


def course_graph(place: Place, model: nn.Module, /, *, context: int, batch: int = 4, amp: bool = False, **_: Any) -> int:
    """Forward only, its output dropped."""
    tokens = token_ids(batch, context).to(place.device)
    for _step in range(2):
        place.reset()
        with course_autocast(place, amp):
            model(tokens)
    return place.peak()


def course_block(place: Place, model: nn.Module, /, *, context: int, batch: int = 4, **_: Any) -> int:
    """Bytes that one block keeps for backward, its output with them."""
    tokens = token_ids(batch, context).to(place.device)
    x = model.embedding(tokens)
    x = model.blocks[0](x)
    before = place.allocated()
    y = model.blocks[1](x)
    kept = place.allocated() - before
    del y
    return kept


# Single operators


def no_model(**_: Any) -> nn.Module:
    return nn.Module()


def attention_operator(place: Place, model: nn.Module, /, *, length: int, width: int, read: str, mask: bool = False, **_: Any) -> int:
    """The course's attention on eight sequences without heads.

    Args:
        read: "round" (the peak of forward and backward, while the output and graph of another forward live on) or "after
            forward" (with gradients, output and loss of the round before).
    """
    q, k, v = (torch.zeros(8, length, width).to(place.device).requires_grad_() for _ in range(3))
    shown = torch.ones(length, length, dtype=torch.bool).to(place.device) if mask else None

    def one_round() -> None:
        output = architectures.plain_attention(q, k, v, shown)
        output.sum().backward()

    if read == "round":
        one_round()
        q.grad = k.grad = v.grad = None
        output = architectures.plain_attention(q, k, v, shown)
        loss = output.sum()
        place.reset()
        one_round()
        del output, loss
        return place.peak()
    for _step in range(2):
        output = architectures.plain_attention(q, k, v, shown)
        loss = output.sum()
        found = place.allocated()
        loss.backward()
    return found


def operator_peak(place: Place, once: Callable[[], object]) -> int:
    """The peak of one round after two others: github linkedin/Liger-Kernel, benchmark/scripts/utils.py."""
    for _round in range(3):
        place.reset()
        once()
    return place.peak()


def cross_entropy(place: Place, model: nn.Module, /, *, rows: int, vocabulary: int, **_: Any) -> int:
    logits = torch.zeros(rows, vocabulary).to(place.device).requires_grad_()
    targets = torch.zeros(rows, 1, dtype=torch.int64).to(place.device).squeeze(1)
    criterion = nn.CrossEntropyLoss()
    return operator_peak(place, lambda: criterion(logits, targets).backward())


def head_model(**_: Any) -> nn.Module:
    """The measured head and a second one of the same size that was resident."""
    with default_dtype("bfloat16"):
        return nn.ModuleList(nn.Linear(4096, 128_256, bias=False) for _ in range(2))


def head_and_loss(place: Place, model: nn.Module, /, *, rows: int, **_: Any) -> int:
    x = torch.zeros(rows, 4096, dtype=torch.bfloat16).to(place.device).requires_grad_()
    targets = torch.zeros(rows, dtype=torch.int64).to(place.device)
    criterion = nn.CrossEntropyLoss()
    return operator_peak(place, lambda: criterion(model[0](x), targets).backward())


def feed_forward_model(*, activation: str, **_: Any) -> nn.Module:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    with default_dtype("bfloat16"):
        return LlamaMLP(LlamaConfig(hidden_size=4096, intermediate_size=11_008, hidden_act=activation))


def feed_forward(place: Place, model: nn.Module, /, *, batch: int, length: int, **_: Any) -> int:
    x = torch.zeros(batch, length, 4096, dtype=torch.bfloat16).to(place.device).requires_grad_()

    def once() -> None:
        y = model(x)
        y.backward(torch.randn_like(y), retain_graph=True)

    return operator_peak(place, once)


def layer_norm_model(*, width: int, **_: Any) -> nn.Module:
    return nn.LayerNorm(width, eps=1e-6)


def layer_norm(place: Place, model: nn.Module, /, *, rows: int, width: int, **_: Any) -> int:
    x = torch.zeros(rows, width).to(place.device)
    gradient = torch.randn_like(x)
    x.requires_grad_()
    return operator_peak(place, lambda: model(x).backward(gradient, retain_graph=True))


WORKLOADS: dict[str, Workload] = {
    "grid images": Workload(image_model, grid_images),
    "grid text": Workload(text_model, grid_text),
    "vit ladder": Workload(vit_model, vit_ladder),
    "vit made": Workload(vit_made_model, vit_made),
    "distilbert reviews": Workload(distilbert_model, distilbert_reviews),
    "book gpt2": Workload(book_model, book_steps),
    "litgpt": Workload(lit_model, lit_steps),
    "attention table": Workload(attention_table_model, attention_table),
    "course training": Workload(course_model, course_training),
    "course inference": Workload(course_model, course_inference),
    "course no grad": Workload(course_model, course_no_grad),
    "course graph": Workload(course_model, course_graph),
    "course block": Workload(course_model, course_block),
    "attention operator": Workload(no_model, attention_operator),
    "cross entropy": Workload(no_model, cross_entropy),
    "head and loss": Workload(head_model, head_and_loss),
    "feed forward": Workload(feed_forward_model, feed_forward),
    "layer norm": Workload(layer_norm_model, layer_norm),
}
