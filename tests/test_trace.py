"""MemoryTrace read from hand-made events with round numbers, and laws that hold for any events."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vramlab.memory.trace import Category, DeviceCounters, Events, MemoryBreakdown, MemoryTrace, Phase

PARAMETERS, STATE, GRADIENTS = Category.PARAMETERS, Category.OPTIMIZER_STATE, Category.GRADIENTS
ACTIVATIONS, INPUTS, TEMPORARY = Category.ACTIVATIONS, Category.INPUTS, Category.TEMPORARY
BUILD, FORWARD, BACKWARD, STEP = Phase


def events(*rows: tuple[int, int, Category, Phase, str, str], seeds: int = 0, steps: tuple[tuple[int, int], ...] = ()) -> Events:
    """Events from rows of storage, signed bytes, category, phase, module and operator."""
    modules = tuple(dict.fromkeys(["", *(r[4] for r in rows)]))
    operators = tuple(dict.fromkeys(["(before)", *(r[5] for r in rows)]))
    return Events(
        storage=np.array([r[0] for r in rows], np.int64),
        nbytes=np.array([r[1] for r in rows], np.int64),
        category=np.array([r[2] for r in rows], np.int8),
        module=np.array([modules.index(r[4]) for r in rows], np.int32),
        phase=np.array([r[3] for r in rows], np.int8),
        operator=np.array([operators.index(r[5]) for r in rows], np.int32),
        modules=modules,
        operators=operators,
        seeds=seeds,
        steps=steps,
    )


def one_step() -> MemoryTrace:
    """3,000 bytes at the start, 3,650 at most in forward, the peak of 4,000 in backward, 3,400 when the step begins."""
    return MemoryTrace(
        events(
            (0, 1000, PARAMETERS, BUILD, "blocks.0.mlp", "(before)"),
            (1, 2000, STATE, BUILD, "blocks.0.mlp", "(before)"),
            (2, 100, INPUTS, FORWARD, "", "aten::randn"),
            (3, 500, ACTIVATIONS, FORWARD, "blocks.0.mlp", "aten::mm"),
            (4, 50, TEMPORARY, FORWARD, "blocks.0", "aten::add"),
            (4, -50, TEMPORARY, FORWARD, "blocks.0", "aten::add"),
            (5, 400, TEMPORARY, BACKWARD, "blocks.1.mlp", "aten::mm"),
            (3, -500, ACTIVATIONS, BACKWARD, "blocks.0.mlp", "aten::mm"),
            (6, 300, GRADIENTS, BACKWARD, "blocks.0.mlp", "aten::mm"),
            (5, -400, TEMPORARY, BACKWARD, "blocks.1.mlp", "aten::mm"),
            (6, -300, GRADIENTS, STEP, "blocks.0.mlp", "aten::_foreach_add_"),
            (2, -100, INPUTS, STEP, "", "aten::_foreach_add_"),
            seeds=2,
            steps=((10, 0),),
        )
    )


def nothing() -> MemoryTrace:
    return MemoryTrace(events())


# Peak and baseline


def test_the_peak_is_the_highest_total_and_names_its_phase() -> None:
    trace = one_step()
    assert (trace.peak, trace.baseline, trace.peak - trace.baseline) == (4000, 3000, 1000)
    assert trace.peak_phase == "backward"
    assert len(trace) == 12


def test_an_empty_trace_is_zero_everywhere() -> None:
    trace = nothing()
    assert (trace.peak, trace.baseline, len(trace), trace.peak_phase) == (0, 0, 0, "build")
    assert trace.breakdown() == trace.breakdown("start") == trace.breakdown("end") == MemoryBreakdown()
    assert len(trace.by_module()) == len(trace.holders()) == len(trace.timeline()) == 0
    assert trace.rounded().peak == 0
    assert repr(trace) == "MemoryTrace(peak 0 B in build on cpu, 0 events)"
    assert "0 B" in trace._repr_html_()


def test_what_existed_before_existed_at_once_so_its_rows_are_no_moments_of_their_own() -> None:
    trace = MemoryTrace(
        events(
            (0, 700, PARAMETERS, BUILD, "", "(before)"),
            (1, 300, INPUTS, BUILD, "", "(before)"),
            (0, -700, PARAMETERS, FORWARD, "", "aten::mm"),
            seeds=2,
        )
    )
    assert trace.peak == trace.baseline == 1000
    assert trace.peak_phase == "build"
    assert trace.breakdown() == trace.breakdown("start") == MemoryBreakdown(parameters=700, inputs=300)


def test_of_two_equal_peaks_the_first_counts() -> None:
    trace = MemoryTrace(
        events(
            (0, 10, ACTIVATIONS, FORWARD, "", "aten::mm"),
            (0, -10, ACTIVATIONS, BACKWARD, "", "aten::mm"),
            (1, 10, TEMPORARY, STEP, "", "aten::sqrt"),
        )
    )
    assert trace.peak_phase == "forward"
    assert trace.breakdown() == MemoryBreakdown(activations=10)


# Breakdown at each kind of moment


def test_breakdown_at_every_kind_of_moment() -> None:
    trace = one_step()
    fixed = MemoryBreakdown(parameters=1000, optimizer_state=2000)
    assert trace.breakdown("start") == fixed
    assert trace.breakdown("end") == fixed
    assert trace.breakdown("forward") == MemoryBreakdown(1000, 2000, inputs=100, activations=500, temporary=50)
    assert trace.breakdown("peak") == trace.breakdown("backward") == MemoryBreakdown(1000, 2000, inputs=100, activations=500, temporary=400)
    assert trace.breakdown(2) == MemoryBreakdown(1000, 2000, inputs=100)
    assert trace.breakdown(0).total == 1000
    assert trace.breakdown(11) == trace.breakdown("end")


def test_a_phase_holds_what_was_there_when_it_began() -> None:
    """A step of plain SGD allocates nothing: its highest moment is its first, before the gradients go."""
    assert one_step().breakdown("step") == MemoryBreakdown(1000, 2000, gradients=300, inputs=100)


def test_the_end_of_a_phase_is_where_it_first_ends() -> None:
    trace = one_step()
    assert trace.breakdown("end of forward") == MemoryBreakdown(1000, 2000, inputs=100, activations=500)
    assert trace.breakdown("end of step") == trace.breakdown("end")
    twice = MemoryTrace(
        events(
            (0, 5, ACTIVATIONS, FORWARD, "", "aten::mm"),
            (1, 7, GRADIENTS, BACKWARD, "", "aten::mm"),
            (2, 100, ACTIVATIONS, FORWARD, "", "aten::mm"),
        )
    )
    assert twice.breakdown("end of forward").total == 5


def test_the_number_of_an_event_may_come_from_pandas() -> None:
    trace = one_step()
    highest = trace.timeline().drop(columns="phase").sum(axis=1).to_numpy().argmax()
    assert isinstance(highest, np.integer)
    assert trace.breakdown(highest) == trace.breakdown("peak")


@pytest.mark.parametrize("number", [-1, 12, 1000])
def test_a_number_beyond_the_events_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match=rf"An event's number is at least 0 and below 12, got {number}\."):
        one_step().breakdown(number)


@pytest.mark.parametrize("read", ["breakdown", "by_module", "holders"])
def test_an_unknown_moment_is_refused_with_the_known_ones(read: str) -> None:
    with pytest.raises(ValueError, match=r"A moment is 'peak', 'start', 'end', an event's number or one of 'build'.*, got 'lunch'"):
        getattr(one_step(), read)(at="lunch")


@pytest.mark.parametrize("moment", ["step", "end of step"])
def test_a_phase_that_did_not_happen_is_refused(moment: str) -> None:
    trace = MemoryTrace(events((0, 10, ACTIVATIONS, FORWARD, "", "aten::mm")))
    with pytest.raises(ValueError, match=r"This trace has no event in phase 'step'\."):
        trace.breakdown(moment)


# By module, holders, timeline


def test_by_module_has_one_row_a_module_and_one_column_a_category_largest_first() -> None:
    table = one_step().by_module()
    assert table.index.tolist() == ["blocks.0.mlp", "blocks.1.mlp", ""]
    assert table.columns.tolist() == ["parameters", "optimizer state", "activations", "inputs", "temporary", "total"]
    assert table.loc["blocks.0.mlp"].tolist() == [1000, 2000, 500, 0, 0, 3500]
    assert table.loc["blocks.1.mlp", "temporary"] == 400
    assert set(table.dtypes.astype(str)) == {"int64"}


@pytest.mark.parametrize(
    ("depth", "totals"),
    [
        (1, {"blocks": 3900, "": 100}),
        (2, {"blocks.0": 3500, "blocks.1": 400, "": 100}),
        (3, {"blocks.0.mlp": 3500, "blocks.1.mlp": 400, "": 100}),
        (9, {"blocks.0.mlp": 3500, "blocks.1.mlp": 400, "": 100}),
    ],
)
def test_by_module_adds_up_below_a_depth(depth: int, totals: dict[str, int]) -> None:
    assert one_step().by_module(depth=depth)["total"].to_dict() == totals


def test_holders_are_the_largest_storages_with_what_made_them() -> None:
    held = one_step().holders(3)
    assert held["bytes"].tolist() == [2000, 1000, 500]
    assert held.iloc[2].to_dict() == {
        "bytes": 500,
        "category": "activations",
        "module": "blocks.0.mlp",
        "phase": "forward",
        "operator": "aten::mm",
    }
    assert len(one_step().holders(100)) == 5
    assert one_step().holders(at="start")["bytes"].tolist() == [2000, 1000]


def test_a_resized_storage_is_one_holder_with_its_present_size() -> None:
    trace = MemoryTrace(
        events(
            (0, 100, ACTIVATIONS, FORWARD, "", "aten::empty"),
            (0, 900, ACTIVATIONS, FORWARD, "", "aten::resize_"),
            (0, -1000, ACTIVATIONS, BACKWARD, "", "aten::resize_"),
            (0, 10, ACTIVATIONS, STEP, "", "aten::resize_"),
        )
    )
    assert trace.peak == 1000
    assert trace.holders()["bytes"].tolist() == [1000]
    assert len(trace.holders(at=2)) == 0
    assert trace.holders(at="end")[["bytes", "operator"]].to_numpy().tolist() == [[10, "aten::empty"]]


def test_the_timeline_has_a_row_an_event_and_a_column_a_category() -> None:
    table = one_step().timeline()
    assert table.columns.tolist() == [*(c.label for c in Category), "phase"]
    assert table["activations"].tolist() == [0, 0, 0, 500, 500, 500, 500, 0, 0, 0, 0, 0]
    assert table["phase"].tolist() == ["build"] * 2 + ["forward"] * 4 + ["backward"] * 4 + ["step"] * 2
    assert table.drop(columns="phase").sum(axis=1).max() == 4000


# Growth


def loop(*kept: int, optimizers: tuple[int, ...] = (0,)) -> MemoryTrace:
    """Each step allocates 100 bytes of activations, releases them and leaves some bytes behind."""
    rows, steps = [], []
    for step, leaked in enumerate(kept):
        rows += [
            (2 * step, 100, ACTIVATIONS, FORWARD, "", "aten::mm"),
            (2 * step + 1, leaked, ACTIVATIONS, FORWARD, "", "aten::sum"),
            (2 * step, -100, ACTIVATIONS, BACKWARD, "", "aten::mm"),
        ]
        steps.append((len(rows), optimizers[step % len(optimizers)]))
    return MemoryTrace(events(*rows, steps=tuple(steps)))


def test_growth_is_what_was_added_after_the_second_step() -> None:
    assert loop(1000, 1000, 0, 0).growth() == MemoryBreakdown()
    assert loop(1000, 1000, 20, 3).growth() == MemoryBreakdown(activations=23)


def test_growth_with_several_optimizers_compares_steps_of_the_same_one() -> None:
    """A GAN: the generator's step is not compared with the discriminator's."""
    assert loop(0, 0, 0, 0, 0, 7, optimizers=(0, 1)).growth() == MemoryBreakdown(activations=7)
    assert loop(0, 0, 0, 50, 0, 0, optimizers=(0, 1)).growth() == MemoryBreakdown()  # it was there after the second step of 1


@pytest.mark.parametrize(("trace", "count"), [(nothing(), 0), (loop(0, 0), 2), (loop(0, 0, 0, 0, optimizers=(0, 1)), 2)])
def test_growth_needs_three_steps(trace: MemoryTrace, count: int) -> None:
    with pytest.raises(ValueError, match=rf"Growth compares optimizer step 2 with the last: record at least 3 steps, got {count}\."):
        trace.growth()


# Rounding


def test_rounding_gives_whole_blocks_as_cuda_does() -> None:
    """pytorch/pytorch#126738, #29554: biases of 10 floats are 40 bytes in tensors and 512 on the card, each."""
    sizes = {1: 512, 40: 512, 512: 512, 513: 1024, 0: 0}
    trace = MemoryTrace(events(*((i, n, PARAMETERS, BUILD, "", "aten::empty") for i, n in enumerate(sizes))))
    rounded = trace.rounded()
    assert rounded.events.nbytes.tolist() == list(sizes.values())
    assert (trace.peak, rounded.peak) == (1066, 2560)
    assert trace.rounded(block=1).events.nbytes.tolist() == list(sizes)


def test_rounding_follows_a_storage_that_is_resized() -> None:
    steps = (100, 500, -88, 512, -1024)  # 100, 600, 512, 1024, 0 bytes
    trace = MemoryTrace(events(*((0, n, ACTIVATIONS, FORWARD, "", "aten::resize_") for n in steps), steps=((5, 0),)))
    rounded = trace.rounded()
    assert np.cumsum(rounded.events.nbytes).tolist() == [512, 1024, 512, 1024, 0]
    assert rounded.events.steps == ((5, 0),)


# Live and finished


def test_a_trace_can_be_read_while_it_grows_and_after_it_is_finished() -> None:
    rows = [(0, 10, ACTIVATIONS, FORWARD, "", "aten::mm")]
    trace = MemoryTrace(lambda: events(*rows))
    assert trace.peak == 10
    rows.append((1, 5, ACTIVATIONS, FORWARD, "", "aten::mm"))
    assert (trace.peak, len(trace)) == (15, 2)
    trace.finish(events(*rows), "cuda:0", DeviceCounters(allocated=512, reserved=2 << 20, device=None))
    rows.append((2, 5, ACTIVATIONS, FORWARD, "", "aten::mm"))
    assert (trace.peak, len(trace), trace.device) == (15, 2, "cuda:0")
    assert trace.rounded().counters is trace.counters


# Texts


def test_representations_say_bytes_phase_and_device() -> None:
    assert repr(one_step()) == "MemoryTrace(peak 3.91 KiB in backward on cpu, 12 events)"
    assert repr(MemoryBreakdown(parameters=1024, temporary=-512)) == "MemoryBreakdown(512 B: parameters 1.00 KiB, temporary -512 B)"


def test_html_escapes_names_and_shows_the_total() -> None:
    trace = MemoryTrace(events((0, 1234, ACTIVATIONS, FORWARD, "<i>", "<script>alert(1)</script>")), device="<b>cpu</b>")
    page = trace._repr_html_()
    assert "<script>" not in page
    assert "<b>cpu</b>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "1,234" in page
    assert "forward" in page


def test_html_of_a_breakdown_has_a_row_a_category_in_use_and_the_sum() -> None:
    page = MemoryBreakdown(parameters=1000, gradients=500)._repr_html_()
    assert page.count("<tr>") == 4  # heading, two categories, total
    assert "<th style='text-align:right'>1,500</th>" in page
    assert Category.PARAMETERS.color in page
    assert "activations" not in page
    assert "width:6.00em" in page  # half as long as the largest
    assert MemoryBreakdown()._repr_html_().count("<tr>") == 2


@pytest.mark.parametrize(("device", "shown"), [(3 << 20, ", device 3.00 MiB"), (None, "reserved 2.00 MiB</p>")])
def test_html_shows_cudas_counters_where_there_are_some(device: int | None, shown: str) -> None:
    trace = MemoryTrace(one_step().events, "cuda:0", DeviceCounters(1 << 20, 2 << 20, device))
    assert f"allocated 1.00 MiB, reserved 2.00 MiB{', device 3.00 MiB' if device else ''}" in trace._repr_html_()
    assert shown in trace._repr_html_()


def test_breakdowns_subtract_by_category() -> None:
    difference = MemoryBreakdown(parameters=10, inputs=5) - MemoryBreakdown(parameters=4, workspace=1)
    assert difference == MemoryBreakdown(parameters=6, inputs=5, workspace=-1)
    assert difference.total == 10


def test_categories_and_fields_agree_and_have_one_colour_each() -> None:
    assert [label for label, _ in MemoryBreakdown().items()] == [c.label for c in Category]
    assert len({c.color for c in Category}) == len(Category)


# Laws

NAMES = ("", "a", "a.b", "a.c", "a.b.d")


@st.composite
def any_events(draw: st.DrawFn) -> Events:
    """Storages that are allocated, resized (also to 0) and released in any order."""
    rows: list[tuple[int, int, Category, Phase, str, str]] = []
    held: dict[int, list] = {}
    seeds = draw(st.integers(0, 4))
    for i in range(seeds + draw(st.integers(0, 25))):
        phase = BUILD if i < seeds else draw(st.sampled_from(Phase))
        known = draw(st.sampled_from(sorted(held))) if held and i >= seeds and draw(st.booleans()) else None
        if known is None:
            number, before = len(held), 0
            held[number] = [0, draw(st.sampled_from(Category)), draw(st.sampled_from(NAMES))]
        else:
            number, before = known, held[known][0]
        after = draw(st.integers(0, 2000)) if known is None or draw(st.booleans()) else 0
        held[number][0] = after
        rows.append((number, after - before, held[number][1], phase, held[number][2], f"op{i % 3}"))
    return events(*rows, seeds=seeds)


@settings(deadline=None, max_examples=60)
@given(any_events())
def test_laws_of_totals(happened: Events) -> None:
    trace = MemoryTrace(happened)
    running = np.cumsum(happened.nbytes)
    assert trace.breakdown("peak").total == trace.peak >= max(trace.baseline, int(running[-1]) if len(running) else 0)
    assert trace.breakdown("end").total == happened.nbytes.sum()
    table = trace.timeline()
    assert table.drop(columns="phase").sum(axis=1).tolist() == running.tolist()
    for label in set(table["phase"][happened.seeds :]):
        rows = running[happened.seeds :][(table["phase"][happened.seeds :] == label).to_numpy()]
        assert max(rows) <= trace.breakdown(label).total <= trace.peak


@settings(deadline=None, max_examples=60)
@given(any_events(), st.data())
def test_modules_and_holders_add_up_to_the_breakdown(happened: Events, data: st.DataObject) -> None:
    trace = MemoryTrace(happened)
    moments = ["peak", "start", "end", *range(len(trace))]
    at, depth = data.draw(st.sampled_from(moments)), data.draw(st.sampled_from([None, 1, 2]))
    breakdown, modules = trace.breakdown(at), trace.by_module(at, depth)
    assert modules["total"].sum() == breakdown.total
    for label, nbytes in breakdown.items():
        assert (modules[label].sum() if label in modules else 0) == nbytes
    assert trace.holders(1000, at)["bytes"].sum() == breakdown.total


@settings(deadline=None, max_examples=60)
@given(any_events(), st.sampled_from([1, 2, 512, 2 << 20]))
def test_rounding_is_never_below_and_always_whole_blocks(happened: Events, block: int) -> None:
    trace, rounded = MemoryTrace(happened), MemoryTrace(happened).rounded(block)
    exact, blocks = np.cumsum(happened.nbytes), np.cumsum(rounded.events.nbytes)
    assert (blocks >= exact).all()
    assert (blocks % block == 0).all()
    assert (blocks - exact < block * max(1, len(set(happened.storage.tolist())))).all()
    assert rounded.peak >= trace.peak
    assert rounded.rounded(block).events.nbytes.tolist() == rounded.events.nbytes.tolist()
    if block == 1:
        assert blocks.tolist() == exact.tolist()


def test_moments_blocks_and_counts_that_cannot_be_are_refused_in_words() -> None:
    trace = one_step()
    for at in (1.5, None):
        with pytest.raises(ValueError, match="^A moment is 'peak', 'start', 'end', an event's number"):
            trace.breakdown(at)
    with pytest.raises(ValueError, match=r"^A block has at least 1 byte, got 0\.$"):
        trace.rounded(0)
    with pytest.raises(ValueError, match=r"^n is a whole number of at least 1, got -1\.$"):
        trace.holders(-1)
