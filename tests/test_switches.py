"""The switches of the lab without a browser: what they offer, where they begin, what excludes what, and the way out as a button."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any

import ipywidgets as w
import pytest
from rows import TASK

import vramlab as vl
from vramlab.notebook.switches import BESIDE, MOST, SLIDERS, SWITCHES, Switches
from vramlab.recipe import Recipe, choices, conflicts

CHUNKED = vl.tasks.gpt("nano")


class Moved(Switches):
    """Switches that count how often they told of a move."""

    def __init__(self, recipe: Recipe | None = None, names: Any = None, task: vl.Task = CHUNKED) -> None:
        self.moves = 0
        super().__init__(task, recipe or Recipe(), names, self._count)

    def _count(self) -> None:
        self.moves += 1

    def messages(self) -> dict[str, list[str]]:
        """What is shown beside each switch, without markup."""
        shown = {name: [re.sub(r"<[^>]+>", "", m.children[0].value) for m in box.children] for name, box in self._messages.items()}
        return {name: texts for name, texts in shown.items() if texts}

    def remedies(self) -> list[Any]:
        return [button for box in self._messages.values() for m in box.children for button in m.children[1].children]


def inside(widget: Any) -> Iterator[Any]:
    yield widget
    for child in getattr(widget, "children", ()):
        yield from inside(child)


def test_they_begin_where_the_recipe_stands() -> None:
    recipe = Recipe(
        precision="amp-bf16", micro_batch=100, accumulation=40, checkpointing="blocks", checkpoint_every=3, optimizer="sgd",
        optimizer_impl="fused", attention="math", loss_chunks=5, offload="optimizer", clip_norm=1.0,
    )  # fmt: skip
    assert Moved(recipe).recipe == recipe
    assert Moved().recipe == Recipe()


@pytest.mark.parametrize("name", [n for n in SWITCHES if choices(n)])
def test_each_switch_of_names_offers_the_recipes_choices(name: str) -> None:
    offered = Moved().widgets[name].options
    assert set(offered) <= set(choices(name))
    assert set(choices(name)) - set(offered) <= {"adamw-8bit"}


def test_only_the_named_options_have_a_switch_in_the_order_of_all() -> None:
    chosen = Moved(names=("micro_batch", "precision"))
    assert list(chosen.widgets) == ["precision", "micro_batch"]
    assert Moved(Recipe(optimizer="sgd", micro_batch=3), ("precision",)).recipe == Recipe(optimizer="sgd", micro_batch=3)
    with pytest.raises(ValueError, match=r"^The lab has no switch 'ranks'; it can have precision, micro_batch, "):
        Moved(names=("ranks",))
    assert Moved(names=()).recipe == Recipe()


def test_set_moves_all_and_tells_once() -> None:
    switches = Moved()
    switches.set(micro_batch=200, precision="amp-bf16", optimizer="sgd", loss_chunks=3)
    assert switches.recipe == Recipe(micro_batch=200, precision="amp-bf16", optimizer="sgd", loss_chunks=3)
    assert switches.moves == 1
    switches.widgets["micro_batch"].value = 4
    assert switches.moves == 2


def test_an_unknown_switch_is_refused_and_names_the_known() -> None:
    with pytest.raises(ValueError, match=r"^The lab has no switch 'lr'; it has precision, offload\.$"):
        Moved(names=("precision", "offload")).set(lr=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("micro_batch", 0), ("micro_batch", True), ("micro_batch", 2.5), ("accumulation", None), ("precision", "fp8"),
        ("checkpointing", True),
        ("optimizer_in_backward", 1), ("loss_chunks", 0), ("checkpoint_every", "2"),
    ],
)  # fmt: skip
def test_an_unknown_position_is_refused_and_nothing_moves(name: str, value: Any) -> None:
    switches = Moved()
    with pytest.raises(ValueError, match=rf"^The switch '{name}' has no position {re.escape(repr(value))}; it has "):
        switches.set(**{"offload": "activations", name: value})
    assert switches.recipe == Recipe()
    assert switches.moves == 0


def test_a_task_without_a_chunked_loss_says_why_its_switch_is_off() -> None:
    switches = Moved(task=TASK)
    assert switches.widgets["loss_chunks"].disabled
    assert "has no chunked loss" in switches.widgets["loss_chunks"].tooltip
    with pytest.raises(ValueError, match=r"no position 8; it has 1 alone, for this task has no chunked loss\.$"):
        switches.set(loss_chunks=8)


def test_the_effective_batch_follows() -> None:
    switches = Moved()
    switches.set(micro_batch=6, accumulation=7)
    assert "<b>42</b>" in switches.effective.value
    shared = Moved(Recipe(parallel="hybrid", ranks=6, stages=2, schedule="gpipe", micro_batch=2, accumulation=5))
    shared.set(accumulation=7)
    assert "<b>42</b>" in shared.effective.value  # three copies of the pipeline


def test_what_has_no_effect_is_off() -> None:
    switches = Moved()
    assert switches.widgets["checkpoint_every"].disabled
    switches.set(checkpointing="blocks")
    assert not switches.widgets["checkpoint_every"].disabled


CONFLICTS = [
    {"optimizer_in_backward": True, "accumulation": 4},
    {"optimizer_in_backward": True, "precision": "amp-fp16"},
    {"checkpointing": "selective", "offload": "activations"},
    {"optimizer": "adafactor", "optimizer_impl": "fused"},
]


@pytest.mark.parametrize("options", CONFLICTS, ids=str)
@pytest.mark.parametrize("last", [0, 1])
def test_a_conflict_stands_beside_the_switch_moved_last_and_each_button_ends_it(options: dict[str, Any], last: int) -> None:
    names = list(options) if last else list(options)[::-1]
    (conflict,) = conflicts(**options)
    for way_out in range(2):
        switches = Moved()
        for name in names:
            switches.widgets[name].value = options[name]
        assert switches.messages() == {names[-1]: [f"! {conflict.rule}"]}
        with pytest.raises(ValueError, match=re.escape(conflict.rule)):
            _ = switches.recipe
        buttons = switches.remedies()
        assert [b.tooltip for b in buttons] == [f"{n}={v!r}" for n, v in conflict.changes]
        buttons[way_out].click()
        assert switches.messages() == {}
        name, value = conflict.changes[way_out]
        assert getattr(switches.recipe, name) == value


def test_a_conflict_with_an_option_that_has_no_switch_says_the_remedy_in_words() -> None:
    switches = Moved(Recipe(clip_norm=1.0), ("optimizer_in_backward",))
    switches.widgets["optimizer_in_backward"].value = True
    assert [b.description for b in switches.remedies()] == ["set in backward off"]
    alone = Moved(Recipe(offload="activations"), ("checkpointing",))
    alone.widgets["checkpointing"].value = "selective"
    assert [b.description for b in alone.remedies()] == ["set checkpointing blocks"]


def test_messages_that_are_gone_are_closed() -> None:
    switches = Moved()
    switches.set(optimizer_in_backward=True, accumulation=2)
    shown = [w for box in switches._messages.values() for m in box.children for w in inside(m)]
    assert len(shown) >= 4
    switches.set(accumulation=1)
    assert all(w.comm is None for w in shown)


def test_every_control_has_a_label_and_a_tooltip_and_is_in_the_panel() -> None:
    switches = Moved()
    shown = list(inside(switches.panel()))
    texts = " ".join(getattr(w, "value", "") for w in shown if isinstance(getattr(w, "value", None), str))
    for name, widget in switches.widgets.items():
        assert widget in shown
        assert widget.tooltip
        assert SWITCHES[name].label in (widget.description or texts)
        if hasattr(widget, "tooltips"):
            assert len(widget.tooltips) == len(widget.options)
            assert all(widget.tooltips)
    assert {second for seconds in BESIDE.values() for second in seconds} <= set(SWITCHES)


@pytest.mark.parametrize("name", SLIDERS)
def test_a_slider_and_its_field_are_one_switch_and_the_field_goes_on_where_the_slider_ends(name: str) -> None:
    switches = Moved()
    slider, field = switches.sliders[name], switches.widgets[name]
    slider.value = 3
    assert (field.value, getattr(switches.recipe, name), switches.moves) == (3, 3, 1)
    field.value = slider.max + 100
    assert (slider.value, getattr(switches.recipe, name), switches.moves) == (field.value, field.value, 2)
    slider.value = 1
    assert (field.value, switches.moves) == (1, 3)
    switches.set(**{name: 2 * MOST})
    assert (slider.value, field.value, switches.moves) == (2 * MOST, 2 * MOST, 4)


@pytest.mark.parametrize("at_first", [4, 100, MOST])
@pytest.mark.parametrize("large", [100, 1000, MOST // 2 + 1, MOST])
@pytest.mark.parametrize("name", SLIDERS)
def test_a_sliders_reach_goes_with_the_value_back_to_the_first_and_never_beyond_the_field(name: str, large: int, at_first: int) -> None:
    switches = Moved(Recipe().with_(**{name: at_first}))
    slider, field = switches.sliders[name], switches.widgets[name]
    first = slider.max
    for value in (large, 2, large, large // 2, 1):
        field.value = value
        assert (slider.value, getattr(switches.recipe, name)) == (value, value)
        assert slider.max == (first if value <= first else min(2 * value, field.max))


@pytest.mark.parametrize("name", SLIDERS)
def test_a_slider_reaches_as_far_as_before_while_it_is_dragged_but_at_its_left_end(name: str) -> None:
    switches = Moved()
    slider, field = switches.sliders[name], switches.widgets[name]
    first = slider.max
    field.value = 1000
    for value in (1500, 900, 2000, 2):
        slider.value = value
        assert (field.value, slider.max) == (value, 2000)  # else the handle would leave the pointer
    slider.value = 1
    assert (field.value, slider.max) == (1, first)
    field.value = 1000
    slider.value = 2
    switches.widgets["precision"].value = "amp-bf16"  # another switch, so it is not dragged any more
    assert (slider.value, slider.max) == (2, first)


def test_what_can_be_set_has_a_name_that_a_screen_reader_finds() -> None:
    """A description is a label; a slider's handle gets none, so each has a field, and buttons in a row have their own texts."""
    switches = Moved()
    for widget in inside(switches.panel()):
        if isinstance(widget, w.IntSlider):
            assert widget in switches.sliders.values()
            assert not widget.readout
        elif isinstance(widget, w.BoundedIntText | w.Dropdown | w.Checkbox):
            assert widget.description


def test_the_recipe_stands_below_in_words_and_as_python() -> None:
    switches = Moved(task=CHUNKED)
    for options in (
        {},
        {"precision": "amp-bf16", "micro_batch": 3},
        {"optimizer_in_backward": True},
        {"checkpointing": "blocks", "loss_chunks": 8},
    ):
        switches.set(**options)
        said = re.sub(r"<style>.*?</style>|<[^>]+>", " ", switches.words.value, flags=re.DOTALL)
        assert str(switches.recipe) in said
        line = html.unescape(re.findall(r"<code[^>]*>(.*)</code>", switches.words.value)[0])
        assert eval(line, {"vl": vl}) == switches.recipe
    switches.set(accumulation=2)
    assert "no recipe: these switches exclude one another" in switches.words.value
