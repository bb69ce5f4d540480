"""Bytes to text and back."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramlab.units import GiB, KiB, MiB, format_bytes, parse_bytes, round_up

UNITS = {"B": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB}
sizes = st.integers(0, 1 << 50) | st.builds(lambda power, off: max(0, (1 << power) + off), st.integers(0, 45), st.integers(-6000, 6000))


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (512, "512 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (MiB - 1, "1.00 MiB"),  # 1023.999 KiB
        (MiB - 6, "1,023.99 KiB"),
        (GiB - 1, "1.00 GiB"),
        (10_133_000_000, "9.44 GiB"),
        (-1536, "-1.50 KiB"),
        (-MiB + 1, "-1.00 MiB"),
        (1 << 40, "1,024.00 GiB"),  # cards and models are compared in GiB, so it is the largest unit
        (2.5 * GiB, "2.50 GiB"),
    ],
)
def test_bytes_are_written_in_the_largest_unit_that_keeps_them_at_1_or_more(nbytes: float, text: str) -> None:
    assert format_bytes(nbytes) == text


@given(sizes)
def test_what_is_written_reads_back_within_half_of_the_last_digit(nbytes: int) -> None:
    text = format_bytes(nbytes)
    assert abs(parse_bytes(text) - nbytes) <= 0.005 * UNITS[text.split()[1]] + 0.5


@given(st.floats(0, 1e15) | sizes | st.floats(1023, 1025).map(lambda x: x * KiB) | st.floats(1023, 1025))
def test_no_unit_below_the_largest_shows_1024(nbytes: float) -> None:
    number, unit = format_bytes(nbytes).replace(",", "").split()
    assert unit == "GiB" or float(number) < 1024
    assert unit == "B" or float(number) >= 1


@given(sizes.filter(bool))
def test_a_difference_is_written_as_its_size_with_a_sign(nbytes: int) -> None:
    assert format_bytes(-nbytes) == "-" + format_bytes(nbytes)


@given(sizes, sizes)
def test_more_bytes_never_read_as_less(one: int, other: int) -> None:
    low, high = sorted((one, other))
    assert parse_bytes(format_bytes(low)) <= parse_bytes(format_bytes(high))


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        ("12 GiB", 12 * GiB),
        ("512MiB", 512 * MiB),
        ("1.5 kib", 1536),
        (".5 MiB", MiB // 2),
        ("2. KiB", 2048),
        ("  7 B ", 7),
        ("42", 42),
        ("+3 B", 3),
        ("24 GB", 24 * 10**9),
        ("1 kB", 1000),
        ("1 MB", 10**6),
        ("2 TB", 2 * 10**12),
        ("2 TiB", 2 << 40),
        ("1,024.00 GiB", 1 << 40),
        ("1_000 B", 1000),
        (0, 0),
        (123, 123),
        (2**63 + 1, 2**63 + 1),
        ("0.3 B", 0),
    ],
)
def test_sizes_are_read_with_binary_and_decimal_units(size: int | str, nbytes: int) -> None:
    read = parse_bytes(size)
    assert read == nbytes
    assert type(read) is int


@given(st.integers(0, 10**6), st.sampled_from(sorted(UNITS)))
def test_whole_numbers_of_a_unit_are_read_exactly(number: int, unit: str) -> None:
    assert parse_bytes(f"{number} {unit}") == number * UNITS[unit]


@pytest.mark.parametrize(
    "size",
    # "1,5 GiB" is one and a half in half of Europe: never 15.
    ["", "GiB", "12 GiBi", "12 G", "12 bits", "1.2.3 GiB", "12 GiB 3", "nan", "inf GiB", "1e3", "0x10", "1,5 GiB"],
)
def test_a_text_that_is_no_size_is_refused(size: str) -> None:
    message = f"A size is a number and a unit (B, KiB, MiB, GiB), got {size!r}; write for example '12 GiB'."
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_bytes(size)


@pytest.mark.parametrize("size", [1.5, math.nan, None, True, [1], b"12 GiB"])
def test_neither_text_nor_a_whole_number_is_refused(size: object) -> None:
    message = f"A size is text or a whole number of bytes, got {size!r}; write for example '12 GiB'."
    with pytest.raises(TypeError, match=re.escape(message)):
        parse_bytes(size)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [-1, "-1 GiB", "-0.5 KiB"])
def test_a_negative_size_is_refused(size: int | str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"A size is not negative, got {size!r}.")):
        parse_bytes(size)


@given(st.integers(0, 1 << 50), st.integers(1, 1 << 30))
def test_rounding_up_gives_the_next_whole_block(nbytes: int, block: int) -> None:
    rounded = round_up(nbytes, block)
    assert rounded % block == 0
    assert 0 <= rounded - nbytes < block


@pytest.mark.parametrize(("nbytes", "rounded"), [(0, 0), (1, 512), (512, 512), (513, 1024)])
def test_rounding_up_to_the_allocators_512_bytes(nbytes: int, rounded: int) -> None:
    assert round_up(nbytes, 512) == rounded
