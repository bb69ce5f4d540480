"""Recipe: what it takes, what it refuses and in which words."""

import copy
import dataclasses
import inspect
import pickle
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vramlab.recipe import Conflict, Recipe, choices, conflicts

FIELDS = {field.name: field for field in dataclasses.fields(Recipe)}
CHOICES = {name: choices(name) for name in FIELDS if choices(name)}
SWITCHES = [name for name, field in FIELDS.items() if isinstance(field.default, bool)]
COUNTS = [name for name, field in FIELDS.items() if type(field.default) is int]

some_options = st.fixed_dictionaries(
    {},
    optional={name: st.sampled_from(values) for name, values in CHOICES.items()}
    | {name: st.booleans() for name in SWITCHES}
    | {name: st.integers(1, 8) for name in COUNTS}
    | {"loss_scale": st.floats(1e-3, 1e6), "clip_norm": st.none() | st.floats(1e-3, 1e3) | st.integers(1, 9)},
)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    options = draw(some_options)
    assume(not conflicts(**options))
    return Recipe(**options)


def test_the_default_recipe_changes_nothing() -> None:
    assert Recipe().changes() == {}
    assert repr(Recipe()) == "Recipe()"
    assert str(Recipe()) == "fp32, micro batch 8, adamw"


def test_every_option_is_a_choice_a_switch_or_a_number() -> None:
    assert {*CHOICES, *SWITCHES, *COUNTS, "loss_scale", "clip_norm"} == set(FIELDS)
    assert choices("precision") == ("fp32", "tf32", "amp-fp16", "amp-bf16", "bf16")
    assert choices("micro_batch") == choices("optimizer_in_backward") == choices("clip_norm") == ()


def test_changes_hold_what_differs_from_the_defaults_in_field_order() -> None:
    recipe = Recipe(optimizer="sgd", micro_batch=4, precision="amp-bf16", attention="sdpa")
    assert list(recipe.changes().items()) == [("precision", "amp-bf16"), ("micro_batch", 4), ("optimizer", "sgd")]


def test_the_label_names_precision_micro_batch_changes_and_optimizer_once_each() -> None:
    recipe = Recipe(precision="amp-bf16", micro_batch=4, accumulation=2, checkpointing="blocks", optimizer="sgd")
    assert str(recipe) == "amp-bf16, micro batch 4, accumulation 2, checkpointing blocks, sgd"


def test_words_name_the_options_asked_for() -> None:
    recipe = Recipe(optimizer_impl="fused", clip_norm=1.0)
    assert recipe.words(["optimizer", "optimizer_impl", "clip_norm", "optimizer"]) == "adamw, optimizer impl fused, clip norm 1.0"


def test_with_changes_some_options_and_keeps_the_rest() -> None:
    recipe = Recipe(precision="amp-bf16", micro_batch=4)
    changed = recipe.with_(micro_batch=2, optimizer="sgd")
    assert changed == Recipe(precision="amp-bf16", micro_batch=2, optimizer="sgd")
    assert recipe.micro_batch == 4
    assert recipe.with_() == recipe


def test_with_checks_again() -> None:
    with pytest.raises(ValueError, match="Set accumulation=1, or optimizer_in_backward=False"):
        Recipe(accumulation=2).with_(optimizer_in_backward=True)
    with pytest.raises(TypeError, match="did you mean 'micro_batch'"):
        Recipe().with_(micro_bach=1)


def test_a_recipe_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'precision'"):
        Recipe().precision = "bf16"  # type: ignore[misc]


@given(recipes())
def test_the_repr_makes_the_same_recipe(recipe: Recipe) -> None:
    assert eval(repr(recipe)) == recipe


@given(recipes())
def test_copies_are_equal_and_hash_the_same(recipe: Recipe) -> None:
    for other in (copy.copy(recipe), copy.deepcopy(recipe), pickle.loads(pickle.dumps(recipe)), dataclasses.replace(recipe)):
        assert other == recipe
        assert hash(other) == hash(recipe)


@given(recipes())
def test_changes_alone_make_the_same_recipe(recipe: Recipe) -> None:
    assert Recipe(**recipe.changes()) == recipe


@given(some_options)
def test_a_recipe_exists_exactly_if_there_is_no_conflict(options: dict[str, Any]) -> None:
    found = conflicts(**options)
    if found:
        message = "\n".join(map(str, found))
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            Recipe(**options)
    else:
        Recipe(**options)


def test_the_signature_lists_the_options() -> None:
    """Shift-Tab in a notebook shows it."""
    assert list(inspect.signature(Recipe).parameters) == list(FIELDS)


# What is refused, in full.


def test_a_positional_argument_is_refused() -> None:
    message = "Recipe takes options by name, got 'amp-bf16'; write Recipe(precision='amp-bf16')."
    with pytest.raises(TypeError, match=re.escape(message)):
        Recipe("amp-bf16")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("precison", "precision"), ("Precision", "precision"), ("microbatch", "micro_batch"), ("checkpoint", "checkpointing")],
)
def test_an_unknown_option_names_the_nearest_and_all(name: str, nearest: str) -> None:
    message = f"Recipe has no option {name!r}; did you mean {nearest!r}? Known: {', '.join(FIELDS)}."
    with pytest.raises(TypeError, match=re.escape(message)):
        Recipe(**{name: 1})


def test_an_unknown_option_like_no_other_names_all() -> None:
    with pytest.raises(TypeError, match=re.escape(f"Recipe has no option 'zzz'. Known: {', '.join(FIELDS)}.")):
        Recipe(zzz=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("option", "value", "nearest"),
    [
        ("precision", "amp_bf16", "amp-bf16"),
        ("precision", "FP32", "fp32"),
        ("optimizer", "adam", "adamw"),
        ("checkpointing", "block", "blocks"),
        ("parallel", "pipelined", "pipeline"),
    ],
)
def test_an_unknown_value_names_the_nearest_and_all(option: str, value: str, nearest: str) -> None:
    message = f"Recipe.{option} has no value {value!r}; did you mean {nearest!r}? Known: {', '.join(choices(option))}."
    with pytest.raises(ValueError, match=re.escape(message)):
        Recipe(**{option: value})


@pytest.mark.parametrize("option", CHOICES)
@pytest.mark.parametrize("value", [None, 16, True, ["fp32"]])
def test_a_choice_takes_only_its_values(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=re.escape(f"Recipe.{option} has no value {value!r}")):
        Recipe(**{option: value})


@pytest.mark.parametrize("option", SWITCHES)
@pytest.mark.parametrize("value", [0, 1, None, "yes"])
def test_a_switch_is_true_or_false(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=re.escape(f"Recipe.{option} is True or False, got {value!r}.")):
        Recipe(**{option: value})


@pytest.mark.parametrize("option", COUNTS)
@pytest.mark.parametrize("value", [0, -1, 1.0, True, None, "8"])
def test_a_count_is_a_whole_number_of_at_least_1(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=re.escape(f"Recipe.{option} is a whole number of at least 1, got {value!r}.")):
        Recipe(**{option: value})


@pytest.mark.parametrize("option", COUNTS)
def test_a_count_from_numpy_is_a_whole_number_too(option: str) -> None:
    (given,) = np.arange(1, 2)
    recipe = Recipe(**{option: given})
    assert type(getattr(recipe, option)) is int
    assert recipe == Recipe(**{option: 1})


@pytest.mark.parametrize(
    "options",
    [
        *({name: kind(2)} for name in ("loss_scale", "clip_norm") for kind in (np.float64, np.float32, np.int64)),
        {"precision": np.array(["bf16"])[0], "optimizer": np.str_("sgd")},
        {"micro_batch": np.int32(4)},
    ],
)
def test_what_comes_from_numpy_reads_as_python(options: dict[str, Any]) -> None:
    recipe = Recipe(**options)
    assert "np." not in repr(recipe)
    assert eval(repr(recipe), {"Recipe": Recipe}) == recipe
    assert {name: getattr(recipe, name) for name in options} == options


@pytest.mark.parametrize("option", ["loss_scale", "clip_norm"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "1"])
def test_a_scale_is_a_positive_number(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=re.escape(f"Recipe.{option} is a positive number, got {value!r}.")):
        Recipe(**{option: value})


def test_only_clip_norm_may_be_none() -> None:
    assert Recipe(clip_norm=None).clip_norm is None
    with pytest.raises(ValueError, match=re.escape("Recipe.loss_scale is a positive number, got None.")):
        Recipe(loss_scale=None)  # type: ignore[arg-type]


def test_all_bad_values_are_reported_at_once() -> None:
    with pytest.raises(ValueError, match=r"^Recipe\.precision .*\nRecipe\.micro_batch .*\nRecipe\.optimizer_in_backward .*$"):
        Recipe(precision="fp64", micro_batch=0, optimizer_in_backward="no")  # type: ignore[arg-type]


CONFLICTS = [
    (
        {"optimizer_in_backward": True, "accumulation": 4},
        "A step in backward uses each gradient at once, so there is nothing to accumulate.",
        "Set accumulation=1, or optimizer_in_backward=False.",
    ),
    (
        {"optimizer_in_backward": True, "clip_norm": 1.0},
        "The global norm is known only when all gradients are, and in backward they are gone by then.",
        "Set clip_norm=None, or optimizer_in_backward=False.",
    ),
    (
        {"optimizer_in_backward": True, "precision": "amp-fp16"},
        "The loss scaler must see all gradients before it lets a step happen.",
        "Set precision='amp-bf16', or optimizer_in_backward=False.",
    ),
    (
        {"optimizer_in_backward": True, "parallel": "ddp", "ranks": 2},
        "A step in backward would use gradients that are not averaged over the ranks yet.",
        "Set parallel='fsdp', or optimizer_in_backward=False.",
    ),
    (
        {"checkpointing": "selective", "offload": "activations"},
        "Selective checkpointing keeps results where offloading does not see them.",
        "Set checkpointing='blocks', or offload='none'.",
    ),
    (
        {"optimizer": "adafactor", "optimizer_impl": "fused"},
        "The factored optimizer has no fused kernel.",
        "Set optimizer_impl='foreach' or 'loop'.",
    ),
    (
        {"optimizer": "adamw-8bit", "optimizer_impl": "fused"},
        "The 8-bit optimizer has one implementation, its own.",
        "Leave optimizer_impl='foreach'.",
    ),
    (
        {"optimizer": "adamw-8bit", "offload": "optimizer"},
        "An offloaded optimizer runs on the CPU, and the 8-bit one is made for the card.",
        "Set optimizer='adamw', or offload='none'.",
    ),
    *(
        ({"parallel": way, "ranks": 2, **options}, rule, remedy)
        for way in ("zero2", "fsdp")
        for options, rule, remedy in [
            (
                {"optimizer": "adafactor"},
                "The factored optimizer takes means over whole rows and columns, and a shard has a part of them.",
                "Set parallel='zero1', or optimizer='adamw'.",
            ),
            (
                {"optimizer": "adamw-8bit"},
                "The 8-bit optimizer's scales are of 256 numbers in a row, and a shard's are others than the whole's.",
                "Set parallel='zero1', or optimizer='adamw'.",
            ),
            (
                {"offload": "activations"},
                "Gathered weights would be moved to host memory with the activations.",
                "Set offload='none', or parallel='ddp'.",
            ),
            (
                {"offload": "optimizer", "precision": "bf16"},
                "Offloaded shards have no fp32 original, as the offloaded optimizer of one card has.",
                "Set precision='amp-bf16', or offload='none'.",
            ),
            (
                {"offload": "optimizer", "optimizer_in_backward": True},
                "Gradients are copied to host memory while the step in backward already reads them there.",
                "Set offload='none', or optimizer_in_backward=False.",
            ),
        ]
    ),
    *(
        (
            {"optimizer_in_backward": True, "parallel": way, "ranks": 4, "stages": stages, "schedule": "gpipe"},
            "A pipeline's gradients add up over its micro-batches and its stages, and a step in backward uses each at once.",
            "Set optimizer_in_backward=False.",
        )
        for way, stages in (("pipeline", 4), ("hybrid", 2))
    ),
    *(
        (
            {"parallel": way, "ranks": 4, "stages": stages, "schedule": "1f1b", "accumulation": stages - 1},
            "1F1B begins with a micro-batch in every stage, so it needs as many as there are stages.",
            f"Set accumulation={stages} or more, or schedule='gpipe'.",
        )
        for way, stages in (("pipeline", 4), ("hybrid", 2))
    ),
    (
        {"optimizer_in_backward": True, "parallel": "zero1", "ranks": 2},
        "A step in backward would use gradients that are not averaged over the ranks yet.",
        "Set parallel='fsdp', or optimizer_in_backward=False.",
    ),
    (
        {"parallel": "ddp", "ranks": 1},
        "Several ranks need a way to share the work, and a way to share needs several ranks.",
        "Set both, for example parallel='ddp', ranks=2, or neither.",
    ),
    (
        {"parallel": "none", "ranks": 2},
        "Several ranks need a way to share the work, and a way to share needs several ranks.",
        "Set both, for example parallel='ddp', ranks=2, or neither.",
    ),
    (
        {"parallel": "none", "stages": 2},
        "Stages belong to parallel='pipeline' or 'hybrid', and those need at least 2.",
        "Set stages=2 or more with one of them, or stages=1 without.",
    ),
    (
        {"parallel": "pipeline", "stages": 2, "ranks": 4, "accumulation": 2},
        "A pipeline has one stage a rank.",
        "Set stages equal to ranks, or parallel='hybrid'.",
    ),
    (
        {"parallel": "hybrid", "stages": 2, "ranks": 3, "accumulation": 2},
        "A hybrid runs several copies of a pipeline: ranks is a multiple of stages, at least twice.",
        "Set ranks=2*stages, for example ranks=4, stages=2.",
    ),
    (
        {"parallel": "hybrid", "stages": 2, "ranks": 2, "accumulation": 2},
        "A hybrid runs several copies of a pipeline: ranks is a multiple of stages, at least twice.",
        "Set ranks=2*stages, for example ranks=4, stages=2.",
    ),
]


@pytest.mark.parametrize(("options", "rule", "remedy"), CONFLICTS, ids=lambda row: "-".join(row) if isinstance(row, dict) else "")
def test_a_conflict_is_refused_with_rule_both_values_and_remedy(options: dict[str, Any], rule: str, remedy: str) -> None:
    (conflict,) = conflicts(**options)
    assert set(conflict.options) <= set(options)
    assert (conflict.rule, conflict.remedy) == (rule, remedy)
    got = ", ".join(f"{name}={options[name]!r}" for name in conflict.options)
    with pytest.raises(ValueError, match=re.escape(f"{rule} Got {got}. {remedy}")):
        Recipe(**options)


@pytest.mark.parametrize("options", [options for options, _, _ in CONFLICTS], ids=str)
def test_each_change_that_a_conflict_offers_is_a_way_out_by_itself(options: dict[str, Any]) -> None:
    (conflict,) = conflicts(**options)
    for name, value in conflict.changes:
        assert f"{name}={value!r}" in conflict.remedy or repr(value) in conflict.remedy
        assert conflicts(**options | {name: value}) == []


def test_every_rule_has_a_row_above() -> None:
    source = inspect.getsource(conflicts)
    assert source.count("    refuse(\n") == len({rule for _, rule, _ in CONFLICTS})


@pytest.mark.parametrize("parallel", ["pipeline", "hybrid"])
def test_a_pipeline_without_stages_is_refused_once(parallel: str) -> None:
    (conflict,) = conflicts(parallel=parallel, ranks=2)
    assert conflict.options == ("parallel", "stages")


@pytest.mark.parametrize(
    "options",
    [
        {"parallel": "pipeline", "ranks": 4, "stages": 4, "accumulation": 4},
        {"parallel": "hybrid", "ranks": 4, "stages": 2, "accumulation": 3},
        {"parallel": "hybrid", "ranks": 6, "stages": 2, "schedule": "gpipe"},
        {"parallel": "zero2", "ranks": 8},
        {"optimizer": "adafactor", "optimizer_impl": "loop"},
        {"optimizer": "adamw", "optimizer_impl": "fused"},
        {"optimizer_in_backward": True, "precision": "amp-bf16"},
        {"accumulation": 8, "clip_norm": 1.0, "precision": "amp-fp16"},
    ],
)
def test_what_the_remedies_name_is_accepted(options: dict[str, Any]) -> None:
    assert conflicts(**options) == []
    Recipe(**options)


def test_all_conflicts_are_reported_at_once_in_the_order_of_the_rules() -> None:
    options: dict[str, Any] = {"optimizer_in_backward": True, "accumulation": 2, "clip_norm": 1.0, "precision": "amp-fp16", "ranks": 2}
    assert [conflict.options[-1] for conflict in conflicts(**options)] == ["accumulation", "clip_norm", "precision", "ranks"]
    with pytest.raises(ValueError, match=r"^.*accumulate.*\n.*global norm.*\n.*loss scaler.*\n.*Several ranks.*$"):
        Recipe(**options)


def test_a_conflict_reads_as_rule_value_remedy() -> None:
    assert str(Conflict(("a", "b"), "Never both.", "a=1, b=2", "Drop one.")) == "Never both. Got a=1, b=2. Drop one."
