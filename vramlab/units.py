"""Bytes to text and back. Everywhere else bytes are plain integers."""

from __future__ import annotations

import re

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30

# Cards and papers also speak in powers of ten; both are read, only powers of two are written.
_READ = {"b": 1, "kib": KiB, "mib": MiB, "gib": GiB, "tib": 1 << 40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def format_bytes(nbytes: float) -> str:
    """Write a number of bytes in the largest binary unit that keeps it at 1 or more.

    Args:
        nbytes: bytes, may be negative (a difference).

    Returns:
        ``"512 B"``, ``"1.50 KiB"``, ``"9.44 GiB"``: two decimals, never "GB" for 2**30.
    """
    nbytes = round(nbytes)
    size = abs(nbytes)
    for unit, name in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        # 1023.996 KiB would print as "1024.00 KiB": it is written as 1.00 MiB instead.
        if size >= unit or round(size / (unit >> 10), 2) >= 1024:
            return f"{nbytes / unit:,.2f} {name}"
    return f"{nbytes} B"


def parse_bytes(size: int | str) -> int:
    """Read ``"12 GiB"``, ``"512MiB"``, ``"24 GB"`` (10**9) or a plain number of bytes.

    Args:
        size: text with a unit, or bytes.

    Returns:
        Bytes, rounded to the nearest integer.

    Raises:
        ValueError: not a size, or negative.
        TypeError: neither text nor a whole number.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        number, unit = float(size), "b"
    elif isinstance(size, str):
        match = re.fullmatch(r"\s*([+-]?(?:\d{1,3}(?:,\d{3})+|\d[\d_]*)\.?\d*|\.\d+)\s*([a-zA-Z]*)\s*", size)
        unit = (match[2] or "b").lower() if match else ""
        if not match or unit not in _READ:
            raise ValueError(f"A size is a number and a unit (B, KiB, MiB, GiB), got {size!r}; write for example '12 GiB'.")
        number = float(match[1].replace(",", "").replace("_", ""))
    else:
        raise TypeError(f"A size is text or a whole number of bytes, got {size!r}; write for example '12 GiB'.")
    if number < 0:
        raise ValueError(f"A size is not negative, got {size!r}.")
    return size if isinstance(size, int) else round(number * _READ[unit])


def round_up(nbytes: int, block: int) -> int:
    """The smallest multiple of ``block`` bytes that holds ``nbytes`` (0 stays 0)."""
    return -(-nbytes // block) * block
