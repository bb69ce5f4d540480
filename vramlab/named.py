"""A Task from what one types in a shell: a built-in name, a ``config.json`` of Hugging Face, or ``module:factory``."""

from __future__ import annotations

import difflib
import functools
import importlib
import json
import operator
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vramlab import tasks
from vramlab.tasks import Task
from vramlab.tasks.models import DECODERS, RESNETS, VITS

LONGEST = 2048  # tokens of an item where nobody says how many: the built-in Llamas have as many


def named_task(name: str, sequence: int | None = None) -> Task:
    """The Task that a name means.

    Args:
        name: a built-in model (see `builtin_names`), the path of a ``config.json`` or of its folder, or ``module:factory``.
        sequence: tokens of one item, for models of text; None: the model's longest, 2048 at most where that is not built in.

    Raises:
        ValueError: no such model, file, module or factory; a configuration or a factory's result that makes no Task.
        ImportError: a ``config.json`` without transformers.
        Exception: what the user's own module raises.
    """
    path = Path(name)
    if path.suffix == ".json" or (path / "config.json").is_file():
        return configured_task(path if path.suffix == ".json" else path / "config.json", sequence)
    if ":" in name:
        if sequence is not None:
            raise ValueError(f"A sequence is for models that are made here, and {name!r} makes its own batches; set it there.")
        return factory_task(name)
    return _builtin_task(name, sequence)


# Built-in


def builtin_names() -> list[str]:
    """Names of the built-in models: those of ``tasks.gpt``, then of ``vit`` and ``resnet``, whose nanos are told apart."""
    return [*DECODERS, *_named(VITS, "vit"), *_named(RESNETS, "resnet")]


def _named(table: dict[str, Any], family: str) -> dict[str, str]:
    """What is typed -> the size of the family."""
    return {size if size.startswith(family) else f"{family}-{size}": size for size in table}


def _builtin_task(name: str, sequence: int | None) -> Task:
    if name in DECODERS:
        return tasks.gpt(name, sequence=sequence)
    for table, family, make in ((VITS, "vit", tasks.vit), (RESNETS, "resnet", tasks.resnet)):
        if size := _named(table, family).get(name):
            if sequence is not None:
                raise ValueError(f"A sequence is for models of text, and {name!r} takes images; leave it out.")
            return make(size)
    known = builtin_names()
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    hint = f"; the nearest: {', '.join(near)}" if near else ""
    hub = " Nothing is downloaded: of a model on the Hugging Face Hub save its config.json and name that." if "/" in name else ""
    raise ValueError(
        f"No model {name!r} is known{hint}.{hub} A model is one of {', '.join(known)}, "
        "the path of a Hugging Face config.json, or module:factory."
    )


# module:factory


def factory_task(name: str) -> Task:
    """The Task that ``module:factory`` makes, or is; the module is looked for in the working directory too.

    Raises:
        ValueError: no such module or factory, or what it makes is no Task.
        Exception: what the module or the factory raises.
    """
    module, _, attribute = name.partition(":")
    found = _attribute(_module(module), attribute, name)
    made = found() if callable(found) and not isinstance(found, nn.Module | Task) else found
    if isinstance(made, Task):
        return made
    what = f"{name!r} makes a {type(made).__name__}" if made is not found else f"{name!r} is a {type(made).__name__}"
    if isinstance(made, nn.Module):
        raise ValueError(
            f"{what}, which lacks a batch and a loss: return "
            "vramlab.Task(model=lambda: ..., batch=lambda size, device: ..., loss=lambda model, batch: (sum of losses, count))."
        )
    raise ValueError(f"{what}, and a vramlab.Task is needed; return vramlab.Task(model=..., batch=..., loss=...).")


def _module(name: str) -> Any:
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # one that this module imports
        raise ValueError(f"There is no module {error.name!r} in {os.getcwd()} or among what is installed; give module:factory.") from None
    except (TypeError, ValueError) as error:
        if name and not name.startswith("."):
            raise
        raise ValueError(f"A model is module:factory, got the module {name!r}; write for example train:task.") from error
    except SystemExit as error:
        raise ValueError(
            f"Importing {name!r} ended Python with status {error.code}; put what the script does under if __name__ == '__main__'."
        ) from error


def _attribute(module: Any, attribute: str, name: str) -> Any:
    try:
        return operator.attrgetter(attribute)(module)
    except AttributeError:
        known = [n for n, value in vars(module).items() if not n.startswith("_") and callable(value)]
        near = difflib.get_close_matches(attribute, known, n=3, cutoff=0.5)
        hint = f"; the nearest: {', '.join(near)}" if near else ""
        raise ValueError(f"The module of {name!r} has no {attribute!r}{hint}; give module:factory.") from None


# config.json

KINDS = {
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
}
"""How a name in ``architectures`` ends -> the class of transformers that makes the model."""


def configured_task(path: Path, sequence: int | None = None) -> Task:
    """Training from scratch of the model that a ``config.json`` describes, with the model's own loss, on random tokens.

    Parameters are made in float32, whatever the file's dtype: what they become is the Recipe's to say. Keys and values
    are not kept (``use_cache=False``), as in transformers' Trainer. Nothing is downloaded.

    Raises:
        ValueError: no such file, or not a configuration of a language model or text classifier that transformers knows;
            a sequence below 2 or above the model's positions.
        ImportError: transformers is not installed.
    """
    settings = _settings(path)
    kind = _kind(settings, path)
    config = _config(settings, path)
    sequence = _sequence(config, sequence)
    name = f"{settings['architectures'][0]} of {path}, {sequence} tokens"
    text, loss = config.get_text_config(), _label_loss if "Classification" in kind else _token_loss
    return Task(
        functools.partial(_make, kind, config),
        functools.partial(_label_batch if "Classification" in kind else _token_batch, config, text.vocab_size, sequence),
        loss,
        "sequences" if "Classification" in kind else "tokens",
        name,
    )


def _settings(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"No configuration can be read from {str(path)!r}: {error.strerror}; give the path of a config.json.") from None
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is no JSON: {error}; give the config.json of a model.") from None
    if not isinstance(settings, dict):
        raise ValueError(f"A config.json holds an object, {str(path)!r} holds a {type(settings).__name__}; give that of a model.")
    return settings


def _kind(settings: dict[str, Any], path: Path) -> str:
    names = settings.get("architectures")
    first = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    for ending, kind in KINDS.items():
        if first is not None and first.endswith(ending):
            return kind
    said = f"architectures={names!r}" if names else "no architectures"
    raise ValueError(
        f"The architectures of a config.json end in {', '.join(KINDS)}, and {str(path)!r} has {said}; "
        "mend that, or write a factory that returns a vramlab.Task and give module:factory."
    )


def _config(settings: dict[str, Any], path: Path) -> Any:
    try:
        from transformers import CONFIG_MAPPING
    except ImportError as error:
        raise ImportError(f"A config.json needs transformers ({error}): pip install 'vramlab[models]'") from error
    if settings.get("quantization_config"):
        raise ValueError(f"{str(path)!r} is that of quantised weights, which are not trained; drop its quantization_config.")
    model_type = str(settings.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(model_type, list(CONFIG_MAPPING.keys()), n=3, cutoff=0.5)
        hint = f"; the nearest: {', '.join(near)}" if near else ""
        raise ValueError(f"This transformers knows no model_type {model_type!r}{hint}; see {str(path)!r}, or install a newer one.")
    try:
        config = CONFIG_MAPPING[model_type].from_dict(settings)
        text = config.get_text_config()
        text.use_cache = False
        if "ForSequenceClassification" in settings["architectures"][0] and getattr(text, "pad_token_id", None) is None:
            text.pad_token_id = 0  # the model looks for an item's last token that is none
        int(text.vocab_size)
    except Exception as error:  # each kind of configuration checks itself in its own way
        raise ValueError(f"transformers does not take {str(path)!r}: {type(error).__name__}: {error}; mend it.") from error
    return config


def _sequence(config: Any, sequence: int | None) -> int:
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    most = positions if isinstance(positions, int) and positions > 0 else None
    if sequence is None:
        longest = min(most or LONGEST, LONGEST)
        return longest - longest % 8 if longest > 8 else longest  # RoBERTa's 514 positions are for 512 tokens
    if sequence < 2 or (most is not None and sequence > most):
        known = f"2 to {most} tokens" if most is not None else "at least 2 tokens"
        raise ValueError(f"A sequence has {known} for this config.json, got {sequence}.")
    return sequence


def _make(kind: str, config: Any) -> nn.Module:
    """A new model; in the planner process it is made on the virtual card."""
    import transformers

    transformers.logging.set_verbosity_error()  # its hints are for those who generate text
    made: nn.Module = getattr(transformers, kind).from_config(config, dtype=torch.float32, trust_remote_code=False)
    return made


def _token_batch(config: Any, vocabulary: int, sequence: int, size: int, device: torch.device) -> torch.Tensor:
    """Random tokens: int64 (size, sequence)."""
    return torch.randint(vocabulary, (size, sequence)).to(device)


def _label_batch(config: Any, vocabulary: int, sequence: int, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and a label for each item, of the dtype that the configuration's problem asks for."""
    labels = _labels(config.num_labels, config.problem_type, size)
    return _token_batch(config, vocabulary, sequence, size, device), labels.to(device)


def _labels(classes: int, problem: str | None, size: int) -> torch.Tensor:
    if problem == "multi_label_classification":
        return torch.randint(2, (size, classes)).float()
    if problem == "regression" or (problem is None and classes == 1):
        return torch.rand(size, classes).squeeze(-1)
    return torch.randint(classes, (size,))


def _token_loss(model: Callable[..., Any], tokens: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The model's own loss, which is a mean, as a sum; models of text shift the labels themselves."""
    count = tokens.numel()
    return model(input_ids=tokens, labels=tokens).loss * count, count


def _label_loss(model: Callable[..., Any], batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    tokens, labels = batch
    return model(input_ids=tokens, labels=labels).loss * len(labels), len(labels)
