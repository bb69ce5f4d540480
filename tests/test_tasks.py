"""The built-in tasks: the published sizes, the published functions, real data, and that they learn."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vramlab as vl
from vramlab.tasks import text
from vramlab.tasks.models import DECODERS, GPT, RESNETS, VITS, DecoderConfig, Llama, ResNet, ViT, ViTConfig, decoder, rotate
from vramlab.tasks.text import corpus, image_batch, text_batch

CPU = torch.device("cpu")


def count(model: nn.Module) -> int:
    """Parameters, tied ones once."""
    return sum(p.numel() for p in model.parameters())


# Sizes.


@pytest.mark.parametrize(
    ("task", "size", "published"),
    [
        ("gpt", "gpt2", 124_439_808),
        ("gpt", "gpt2-medium", 354_823_168),
        ("gpt", "gpt2-large", 774_030_080),
        ("gpt", "gpt2-xl", 1_557_611_200),
        ("gpt", "llama-1b", 1_235_814_400),
        ("gpt", "llama-3b", 3_212_749_824),
        ("gpt", "llama-8b", 8_030_261_248),
        ("gpt", "8b", 8_030_261_248),
        ("resnet", "resnet18", 11_689_512),
        ("vit", "vit-b-16", 86_567_656),
        ("vit", "vit-l-16", 304_326_632),
    ],
)
def test_parameter_counts_are_those_of_the_published_models(task: str, size: str, published: int) -> None:
    with torch.device("meta"):
        model = getattr(vl.tasks, task)(size).model()
    assert count(model) == published
    assert all(p.device.type == "meta" for p in model.parameters())


def test_a_block_has_12_squares_and_13_widths() -> None:
    c = DECODERS["mini"].width
    assert [count(block) for block in decoder(DECODERS["mini"]).blocks] == [12 * c * c + 13 * c] * 4  # type: ignore[union-attr, arg-type]


def test_the_standard_lab_task_has_the_agreed_sizes() -> None:
    config = DECODERS["mini"]
    assert (config.width, config.layers, config.sequence) == (256, 4, 128)


@pytest.mark.parametrize(("size", "tied"), [("nano", True), ("gpt2", True), ("llama-nano", True), ("llama-1b", True), ("llama-8b", False)])
def test_the_head_is_tied_to_the_embedding_where_it_is_in_the_original(size: str, tied: bool) -> None:
    with torch.device("meta"):
        model = vl.tasks.gpt(size).model()
    assert (model.head.weight is model.embedding.weight) == tied


@pytest.mark.parametrize("size", DECODERS)
def test_names_and_shapes_of_every_size_fit_together(size: str) -> None:
    config = DECODERS[size]
    with torch.device("meta"):
        model = decoder(config)
        logits = model(torch.zeros(2, 5, dtype=torch.int64))
    assert logits.shape == (2, 5, config.vocabulary)
    assert len(model.blocks) == config.layers  # type: ignore[arg-type]
    assert isinstance(model, Llama if config.kv_heads else GPT)


def test_initial_values_are_gpt2s() -> None:
    """Normal with deviation 0.02, less by the root of the number of layers that add to the residual stream; biases 0."""
    model = decoder(DecoderConfig(layers=4, heads=4, width=256, sequence=64, vocabulary=256))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            right = 0.02 / math.sqrt(8) if ".out." in name or ".down." in name else 0.02
            assert float(parameter.detach().std()) == pytest.approx(right, rel=0.05), name


def test_the_first_loss_is_that_of_a_guess() -> None:
    for task, classes in ((vl.tasks.gpt("nano"), 256), (vl.tasks.gpt("llama-nano"), 256), (vl.tasks.vit("nano"), 10)):
        torch.manual_seed(0)
        total, n = task.loss(task.model(), task.batch(16, CPU))
        assert total.item() / n == pytest.approx(math.log(classes), rel=0.1)


# Functions: the same numbers as independent implementations with the same weights.


def gpt2_of_transformers(activation: str, dropout: float = 0.0) -> Any:
    import transformers as hf

    options = {"n_layer": 3, "n_head": 4, "n_embd": 32, "vocab_size": 50, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
    config = hf.GPT2Config(**options, activation_function=activation, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)
    torch.manual_seed(4)
    model = hf.GPT2LMHeadModel(config)
    for parameter in model.parameters():  # biases too: zeros would hide that they are mixed up
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def copied_gpt(source: Any) -> GPT:
    model = GPT(DecoderConfig(layers=3, heads=4, width=32, sequence=16, vocabulary=50)).eval()
    body = source.transformer
    pairs = [(model.embedding, body.wte), (model.position, body.wpe), (model.norm, body.ln_f)]
    for ours, theirs in zip(model.blocks, body.h, strict=True):
        pairs += [(ours.norm1, theirs.ln_1), (ours.norm2, theirs.ln_2)]
        pairs += [(ours.attention.qkv, theirs.attn.c_attn), (ours.attention.out, theirs.attn.c_proj)]
        pairs += [(ours.mlp.up, theirs.mlp.c_fc), (ours.mlp.down, theirs.mlp.c_proj)]
    copied = sum(copy_weights(ours, theirs) for ours, theirs in pairs)
    assert copied == count(model) == sum(p.numel() for p in source.parameters())
    return model


@torch.no_grad()
def copy_weights(ours: nn.Module, theirs: nn.Module) -> int:
    for name, parameter in theirs.named_parameters():
        # transformers' Conv1D keeps the transposed weight.
        getattr(ours, name).copy_(parameter.T if type(theirs).__name__ == "Conv1D" and parameter.dim() == 2 else parameter)
    return count(ours)


def test_gpt_is_the_gpt2_of_transformers_with_exact_gelu() -> None:
    theirs = gpt2_of_transformers("gelu")
    ours, tokens = copied_gpt(theirs), torch.randint(50, (2, 16))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


def test_gpt2s_own_activation_is_gelus_tanh_form_which_differs_in_the_third_digit() -> None:
    """A known difference: the tanh form changes no byte, and the course trains from scratch."""
    theirs = gpt2_of_transformers("gelu_new")
    ours, tokens = copied_gpt(theirs), torch.randint(50, (2, 16))
    difference = (ours(tokens) - theirs(tokens).logits).norm() / ours(tokens).norm()
    assert 1e-5 < float(difference.detach()) < 1e-2


@pytest.mark.parametrize("kv_heads", [1, 2, 4], ids="{} kv heads".format)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_llama_is_the_llama_of_transformers(kv_heads: int, tied: bool) -> None:
    import transformers as hf

    ours = Llama(DecoderConfig(layers=2, heads=4, kv_heads=kv_heads, width=32, hidden=48, sequence=16, vocabulary=50, tied=tied)).eval()
    options = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
    rope = {"rope_type": "default", "rope_theta": 500_000.0}
    config = hf.LlamaConfig(
        **options,
        num_key_value_heads=kv_heads,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        rope_parameters=rope,
        bos_token_id=0,
        eos_token_id=0,
    )
    theirs = hf.LlamaForCausalLM(config).eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    pairs = [(ours.embedding, theirs.model.embed_tokens), (ours.norm, theirs.model.norm), (ours.head, theirs.lm_head)]
    for a, b in zip(ours.blocks, theirs.model.layers, strict=True):
        attention = b.self_attn
        pairs += [(a.norm1, b.input_layernorm), (a.norm2, b.post_attention_layernorm)]
        pairs += [(a.q, attention.q_proj), (a.k, attention.k_proj), (a.v, attention.v_proj), (a.out, attention.o_proj)]
        pairs += [(a.gate, b.mlp.gate_proj), (a.up, b.mlp.up_proj), (a.down, b.mlp.down_proj)]
    copied = sum(copy_weights(x, y) for x, y in pairs)
    assert copied - (50 * 32 if tied else 0) == count(ours) == count(theirs)
    tokens = torch.randint(50, (2, 16))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


def test_resnet18_is_torchvisions() -> None:
    import torchvision

    ours, theirs = ResNet(RESNETS["resnet18"]), torchvision.models.resnet18(weights=None)
    pairs = [(ours.stem[0], theirs.conv1), (ours.stem[1], theirs.bn1), (ours.head, theirs.fc)]
    for a, b in zip(ours.blocks, [block for i in range(1, 5) for block in getattr(theirs, f"layer{i}")], strict=True):
        pairs += [(a.conv1, b.conv1), (a.norm1, b.bn1), (a.conv2, b.conv2), (a.norm2, b.bn2)]
        assert (len(a.shortcut) == 0) == (b.downsample is None)
        pairs += list(zip(a.shortcut, b.downsample or [], strict=True))
    assert sum(copy_weights(a, b) for a, b in pairs) == count(ours) == count(theirs)
    images = torch.rand(2, 3, 64, 64)
    torch.testing.assert_close(ours(images), theirs(images), rtol=1e-4, atol=1e-4)  # training mode: batch statistics
    torch.testing.assert_close(ours.eval()(images), theirs.eval()(images), rtol=1e-4, atol=1e-4)


def test_vit_is_torchvisions_but_for_the_norms_epsilon() -> None:
    from torchvision.models import VisionTransformer

    sizes = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 128, "num_classes": 7}
    theirs = VisionTransformer(**sizes).eval()
    for module in theirs.modules():
        if isinstance(module, nn.LayerNorm):
            assert module.eps == 1e-6  # ours is LayerNorm's own 1e-5: no byte of difference
            module.eps = 1e-5
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.2)
    ours = ViT(ViTConfig(layers=2, heads=4, width=32, image=32, patch=8, classes=7)).eval()
    pairs = [(ours.patches, theirs.conv_proj), (ours.norm, theirs.encoder.ln), (ours.head, theirs.heads.head)]
    with torch.no_grad():
        ours.token.copy_(theirs.class_token)
        ours.position.copy_(theirs.encoder.pos_embedding)
        for a, b in zip(ours.blocks, theirs.encoder.layers, strict=True):
            a.attention.qkv.weight.copy_(b.self_attention.in_proj_weight)
            a.attention.qkv.bias.copy_(b.self_attention.in_proj_bias)
            pairs += [(a.norm1, b.ln_1), (a.norm2, b.ln_2), (a.attention.out, b.self_attention.out_proj)]
            pairs += [(a.mlp.up, b.mlp[0]), (a.mlp.down, b.mlp[3])]
    for a, b in pairs:
        copy_weights(a, b)
    assert count(ours) == count(theirs)
    images = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(ours(images), theirs(images), rtol=1e-4, atol=1e-4)


def test_rotary_positions_turn_pairs_and_depend_on_distance_alone() -> None:
    q, k = torch.randn(1, 1, 1, 8).expand(1, 12, 1, 8), torch.randn(1, 1, 1, 8).expand(1, 12, 1, 8)
    rotated_q, rotated_k = rotate(q)[0, :, 0], rotate(k)[0, :, 0]
    assert torch.equal(rotated_q[0], q[0, 0, 0])  # position 0 stays
    torch.testing.assert_close(rotated_q.norm(dim=-1), q[0, :, 0].norm(dim=-1))
    scores = rotated_q @ rotated_k.T
    for distance in range(-4, 5):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-5)
    assert rotate(q.bfloat16()).dtype is torch.bfloat16


@pytest.mark.parametrize("size", ["nano", "llama-nano"])
def test_no_token_sees_the_future(size: str) -> None:
    model = vl.tasks.gpt(size).model().eval()
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 9] = (tokens[0, 9] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=1e-5, atol=1e-6)
    assert all(not torch.allclose(before[:, t], after[:, t], atol=1e-6) for t in range(9, 16))


def test_a_vit_sees_all_patches() -> None:
    model = ViT(VITS["nano"]).eval()
    image = torch.rand(1, 1, 8, 8, requires_grad=True)
    model(image)[0, 3].backward()
    assert image.grad is not None
    assert (image.grad != 0).all()


def test_dropout_is_in_the_gpt_and_off_in_evaluation() -> None:
    model = vl.tasks.gpt("nano", dropout=0.2).model()
    assert {m.p for m in model.modules() if isinstance(m, nn.Dropout)} == {0.2}
    assert {block.attention.p for block in model.blocks} == {0.2}
    tokens = torch.randint(256, (1, 8))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


# Learning.


@pytest.mark.parametrize(
    ("task", "steps", "fall"),
    [
        (vl.tasks.gpt("nano"), 40, 0.65),
        (vl.tasks.gpt("llama-nano"), 40, 0.65),
        (vl.tasks.vit("nano"), 90, 0.8),
        (vl.tasks.resnet("nano"), 30, 0.6),
    ],
    ids=lambda value: value.name if isinstance(value, vl.Task) else "",
)
def test_the_loss_falls(task: vl.Task, steps: int, fall: float) -> None:
    losses = vl.run(task, vl.Recipe(micro_batch=16), steps=steps, progress=False).losses
    assert np.mean(losses[-5:]) < fall * losses[0]


def test_validation_loss_falls_with_training_loss() -> None:
    """What is learnt holds for text that was not trained on."""
    task = vl.tasks.gpt("nano")
    models: list[nn.Module] = []

    def kept() -> nn.Module:
        models.append(task.model())
        return models[-1]

    vl.run(vl.Task(kept, task.batch, task.loss), vl.Recipe(micro_batch=16), steps=40, progress=False)
    unseen = text_batch(16, 64, "validation")
    with torch.no_grad():
        total, n = task.loss(models[0].eval(), unseen)
    assert total.item() / n < 0.75 * math.log(256)


@pytest.mark.parametrize(
    "task", [vl.tasks.gpt("mini", sequence=16), vl.tasks.gpt("nano", sequence=1), vl.tasks.gpt("llama-nano", sequence=100)]
)
def test_other_small_sizes_train_a_step(task: vl.Task) -> None:
    assert vl.run(task, vl.Recipe(micro_batch=1), steps=1, progress=False).losses[0] < 7


def test_large_pictures_train_a_step() -> None:
    narrow = dataclasses.replace(RESNETS["resnet18"], widths=(4, 8), image=224)
    task = vl.Task(lambda: ResNet(narrow), vl.tasks.resnet("resnet18").batch, vl.tasks.resnet("resnet18").loss, "images")
    assert vl.run(task, vl.Recipe(micro_batch=1), steps=1, progress=False).losses[0] < 9
    assert vl.tasks.vit("vit-b-16").batch(2, CPU)[0].shape == (2, 3, 224, 224)


# What a task is.


@pytest.mark.parametrize("size", ["nano", "llama-nano"])
def test_a_gpt_task_predicts_the_next_byte(size: str) -> None:
    task = vl.tasks.gpt(size, sequence=12)
    model, tokens = task.model(), task.batch(3, CPU)
    assert (tokens.shape, tokens.dtype) == ((3, 13), torch.int64)
    total, n = task.loss(model, tokens)
    assert n == 36
    log_probabilities = model(tokens[:, :12]).log_softmax(-1)
    right = -sum(log_probabilities[i, t, tokens[i, t + 1]] for i in range(3) for t in range(12))
    torch.testing.assert_close(total, right)


@pytest.mark.parametrize("task", [vl.tasks.vit("nano"), vl.tasks.resnet("nano")], ids=repr)
def test_an_image_task_sums_over_images(task: vl.Task) -> None:
    model, (images, labels) = task.model().eval(), task.batch(5, CPU)
    total, n = task.loss(model, (images, labels))
    assert n == 5
    torch.testing.assert_close(total, -model(images).log_softmax(-1)[range(5), labels].sum())


def test_units_and_names() -> None:
    assert [(t.unit, t.name) for t in (vl.tasks.gpt("nano"), vl.tasks.vit("nano"), vl.tasks.resnet("nano"))] == [
        ("tokens", "gpt nano, 64 tokens"),
        ("images", "vit nano"),
        ("images", "resnet nano"),
    ]
    assert repr(vl.tasks.gpt("gpt2-xl", sequence=512)) == "Task('gpt gpt2-xl, 512 tokens')"
    assert vl.tasks.gpt("8b").name == "gpt llama-8b, 2048 tokens"


def test_each_model_is_a_new_one() -> None:
    task = vl.tasks.gpt("nano")
    assert task.model() is not task.model()


# Data.


def test_the_text_is_the_source_of_the_standard_library() -> None:
    whole = bytes(corpus("train")) + bytes(corpus("validation"))
    source = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_bytes()
    assert source in whole
    assert 100_000 < len(whole) < 10_000_000
    assert len(corpus("validation")) == pytest.approx(len(whole) / 10, abs=1)


def test_training_and_validation_text_are_apart() -> None:
    train, validation = corpus("train"), corpus("validation")
    assert not np.shares_memory(train, validation) or (train.ctypes.data + train.nbytes <= validation.ctypes.data)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_excerpts_are_real_and_drawn_by_torchs_generator(split: str) -> None:
    torch.manual_seed(11)
    first, second = text_batch(4, 20, split), text_batch(4, 20, split)
    torch.manual_seed(11)
    assert torch.equal(text_batch(4, 20, split), first)
    assert not torch.equal(first, second)
    assert (first.shape, first.dtype) == ((4, 21), torch.int64)
    whole = bytes(corpus(split))
    assert all(bytes(row.tolist()) in whole for row in first)
    assert len({bytes(row.tolist()) for row in first}) > 1


def test_excerpts_reach_the_last_byte_and_never_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "corpus", lambda split: np.arange(10, dtype=np.uint8))
    rows = text_batch(500, 3)
    assert {tuple(row.tolist()) for row in rows} == {tuple(range(i, i + 4)) for i in range(7)}


def test_the_text_cannot_be_changed_by_who_got_it() -> None:
    before = text_batch(2, 8).clone()
    torch.manual_seed(0)
    text_batch(2, 8).zero_()
    torch.manual_seed(0)
    assert torch.equal(text_batch(2, 8), before)


@pytest.mark.parametrize("scale", [1, 2, 28])
@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_digits_enlarged_by_whole_pixels(scale: int, channels: int) -> None:
    torch.manual_seed(5)
    small, labels = image_batch(6)
    torch.manual_seed(5)
    images, same_labels = image_batch(6, 8 * scale, channels)
    assert torch.equal(labels, same_labels)
    assert (images.dtype, images.shape) == (torch.float32, (6, channels, 8 * scale, 8 * scale))
    assert torch.equal(images, F.interpolate(small, scale_factor=scale, mode="nearest").expand(-1, channels, -1, -1))
    assert (float(images.min()), float(images.max())) == (0.0, 1.0)
    assert set(labels.tolist()) <= set(range(10))


def test_training_and_validation_images_are_apart() -> None:
    seen = [{row.numpy().tobytes() for row in image_batch(3000, split=split)[0]} for split in ("train", "validation")]
    assert len(seen[0]) > 1000
    assert len(seen[1]) > 150
    # The data set itself holds a few equal pictures.
    assert len(seen[0] & seen[1]) < 3


# What is refused.


@pytest.mark.parametrize("task", ["gpt", "vit", "resnet"])
@pytest.mark.parametrize("size", ["huge", "", "GPT2", "gpt2xl", None])
def test_an_unknown_size_names_the_known_ones(task: str, size: Any) -> None:
    known = ", ".join({"gpt": DECODERS, "vit": VITS, "resnet": RESNETS}[task])
    with pytest.raises(ValueError, match=f"^{re.escape(f'tasks.{task} has no size {size!r}; known: {known}.')}$"):
        getattr(vl.tasks, task)(size)


@pytest.mark.parametrize(("size", "most"), [("nano", 64), ("gpt2", 1024)])
@pytest.mark.parametrize("sequence", [0, -1, 10.5, "64", 1025])
def test_a_gpts_sequence_has_bounds(size: str, most: int, sequence: Any) -> None:
    with pytest.raises(ValueError, match=rf"^A sequence has 1 to {most} tokens for '{size}', got {sequence!r}\.$"):
        vl.tasks.gpt(size, sequence=sequence)
    assert vl.tasks.gpt(size, sequence=most).batch(1, CPU).shape == (1, most + 1)


def test_a_llamas_sequence_has_no_upper_bound() -> None:
    assert vl.tasks.gpt("llama-nano", sequence=5000).batch(1, CPU).shape == (1, 5001)
    with pytest.raises(ValueError, match=r"^A sequence has at least 1 token for 'llama-nano', got 0\.$"):
        vl.tasks.gpt("llama-nano", sequence=0)


def test_dropout_for_llama_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^The Llama-like model has no dropout, got 0\.1; leave it out\.$"):
        vl.tasks.gpt("llama-nano", dropout=0.1)
    vl.tasks.gpt("llama-nano", dropout=0.0)


@pytest.mark.parametrize("dropout", [-0.1, 1.5])
def test_dropout_is_a_probability(dropout: float) -> None:
    with pytest.raises(ValueError, match=rf"^Dropout is a probability from 0 to 1, got {dropout}\.$"):
        vl.tasks.gpt("nano", dropout=dropout)


@pytest.mark.parametrize("read", [corpus, lambda split: text_batch(1, 4, split), lambda split: image_batch(1, split=split)])
@pytest.mark.parametrize("split", ["val", "test", "Train", None])
def test_an_unknown_split_is_refused_and_not_taken_for_validation(read: Any, split: Any) -> None:
    with pytest.raises(ValueError, match=rf"^A split is 'train' or 'validation', got {split!r}\.$"):
        read(split)


@pytest.mark.parametrize("image", [0, 4, 12, 225, -8])
def test_images_are_enlarged_by_whole_numbers_only(image: int) -> None:
    with pytest.raises(ValueError, match=rf"^The digits have 8 x 8 pixels and .* multiple of 8, got {image}\.$"):
        image_batch(1, image)


def test_a_python_without_its_source_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text("pass\n")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    corpus.cache_clear()
    try:
        with pytest.raises(
            FileNotFoundError, match=rf"Python's own source, and {re.escape(str(tmp_path))} has none; use a Python with its"
        ):
            corpus()
    finally:
        corpus.cache_clear()


def test_a_missing_scikit_learn_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    text._digits.cache_clear()
    try:
        with pytest.raises(ImportError, match=r"come with scikit-learn, which is not installed: pip install scikit-learn$"):
            image_batch(1)
    finally:
        text._digits.cache_clear()


@pytest.mark.parametrize("part", ["model", "batch", "loss"])
@pytest.mark.parametrize("value", [None, 3, "gpt"])
def test_the_parts_of_a_task_are_functions(part: str, value: Any) -> None:
    parts: dict[str, Any] = {"model": lambda: None, "batch": lambda n, d: None, "loss": lambda m, b: None}
    with pytest.raises(TypeError, match=rf"^Task\.{part} is a function, got {type(value).__name__}; write for example {part}=lambda"):
        vl.Task(**parts | {part: value})


def test_a_module_in_place_of_a_function_that_makes_one_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^Task\.model is a function that makes a new model, got a Linear; write model=lambda: \.\.\.$"):
        vl.Task(nn.Linear(2, 2), lambda n, d: None, lambda m, b: None)  # type: ignore[arg-type, return-value]
    vl.Task(lambda: nn.Linear(2, 2), lambda n, d: None, lambda m, b: (torch.zeros(()), 1))
