"""Training steps of unmodified transformers models, as one writes them: for any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers as t
from torch import nn

from vramlab.devices import building

BATCH, SEQUENCE = 4, 384
STEPS = 2
SMALL = {"vocab_size": 8000, "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8}
GROUPED = {**SMALL, "intermediate_size": 1024, "num_key_value_heads": 2}


def _heads(config: str, **options: Any) -> Any:
    return getattr(t, config)(**options)


MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: t.GPT2LMHeadModel(_heads("GPT2Config", vocab_size=8000, n_embd=512, n_layer=2, n_head=8)),
    "bert": lambda: t.BertForMaskedLM(_heads("BertConfig", **SMALL, intermediate_size=1024)),
    "distilbert": lambda: t.DistilBertForMaskedLM(
        _heads("DistilBertConfig", vocab_size=8000, dim=512, n_layers=2, n_heads=8, hidden_dim=1024)
    ),
    "llama": lambda: t.LlamaForCausalLM(_heads("LlamaConfig", **GROUPED)),
    "t5": lambda: t.T5ForConditionalGeneration(
        _heads("T5Config", vocab_size=8000, d_model=512, num_layers=2, num_heads=8, d_ff=1024, decoder_start_token_id=0, pad_token_id=0)
    ),
    "qwen3": lambda: t.Qwen3ForCausalLM(_heads("Qwen3Config", **GROUPED, head_dim=64)),
    "gemma2": lambda: t.Gemma2ForCausalLM(_heads("Gemma2Config", **GROUPED, head_dim=64)),
    "mistral": lambda: t.MistralForCausalLM(_heads("MistralConfig", **GROUPED)),
    "opt": lambda: t.OPTForCausalLM(_heads("OPTConfig", **SMALL, word_embed_proj_dim=512, ffn_dim=1024)),
    "phi3": lambda: t.Phi3ForCausalLM(_heads("Phi3Config", **GROUPED, pad_token_id=0)),
    "gpt-neo": lambda: t.GPTNeoForCausalLM(
        _heads("GPTNeoConfig", vocab_size=8000, hidden_size=512, num_layers=2, attention_types=[[["global", "local"], 1]], num_heads=8)
    ),
}


def run(row: dict[str, Any], device: torch.device) -> Iterator[list[int]]:
    """As in `steps.run`."""
    options, card = row["options"], torch.get_device_module(device)
    with building(device):
        model = MODELS[row["model"]]()
    model = model.to(device).train()
    if options.get("checkpointing"):
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler(device.type, enabled=options.get("scaler", False))
    ids = torch.randint(10, 1000, (BATCH, SEQUENCE))
    batch = {"input_ids": ids, "labels": ids}
    if options.get("mask"):
        batch["attention_mask"] = torch.ones_like(ids)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(options.get("amp", ""))
    for _ in range(STEPS):
        card.reset_peak_memory_stats(device)
        inputs = {name: tensor.to(device) for name, tensor in batch.items()}
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            loss = model(**inputs).loss
        scaler.scale(loss).backward()
        if options.get("clip"):
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        yield [card.max_memory_allocated(device), card.max_memory_reserved(device), card.memory_allocated(device)]
