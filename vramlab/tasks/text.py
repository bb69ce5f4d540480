"""Real data that every machine has: the source of Python's standard library as text, scikit-learn's digits as images."""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path

import numpy as np
import torch

CORPUS_BYTES = 4_000_000  # enough for these runs; reading all of it would cost a second


def check_split(split: str) -> None:
    """Refuse any other word: it must not silently mean one of the two.

    Raises:
        ValueError: neither train nor validation.
    """
    if split not in ("train", "validation"):
        raise ValueError(f"A split is 'train' or 'validation', got {split!r}.")


@functools.cache
def corpus(split: str = "train") -> np.ndarray:
    """The standard library's source files, one after the other: uint8 (bytes,). The last tenth is for validation.

    Args:
        split: train or validation.

    Raises:
        ValueError: no such split.
        FileNotFoundError: this Python has no source files.
    """
    check_split(split)
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= CORPUS_BYTES:
            break
    if len(text) < 100_000:
        raise FileNotFoundError(f"The built-in text is Python's own source, and {folder} has none; use a Python with its .py files.")
    cut = len(text) * 9 // 10
    return np.frombuffer(text, np.uint8)[slice(cut) if split == "train" else slice(cut, None)]


def text_batch(size: int, sequence: int, split: str = "train") -> torch.Tensor:
    """Random excerpts as token numbers: int64 (size, sequence + 1), drawn with torch's global generator."""
    text = corpus(split)
    starts = torch.randint(len(text) - sequence, (size,)).numpy()
    # Cut out with NumPy: the corpus belongs to the host, also where the "device" that is measured is the CPU.
    return torch.from_numpy(text[starts[:, None] + np.arange(sequence + 1)].astype(np.int64))


@functools.cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("The built-in images come with scikit-learn, which is not installed: pip install scikit-learn") from error
    images, labels = load_digits(return_X_y=True)
    return images.reshape(-1, 1, 8, 8).astype(np.float32) / 16, labels.astype(np.int64)


def image_batch(size: int, image: int = 8, channels: int = 1, split: str = "train") -> tuple[torch.Tensor, torch.Tensor]:
    """Random handwritten digits of 8 x 8 pixels, enlarged to ``image`` pixels a side, a multiple of 8.

    Returns:
        Images float32 (size, channels, image, image) between 0 and 1 and labels int64 (size,) from 0 to 9.
        The last tenth of the data is for validation.

    Raises:
        ValueError: ``image`` is no multiple of 8, or there is no such split.
        ImportError: scikit-learn is not installed.
    """
    check_split(split)
    if image < 8 or image % 8:
        raise ValueError(f"The digits have 8 x 8 pixels and are enlarged by whole numbers: image is a multiple of 8, got {image}.")
    images, labels = _digits()
    cut = len(images) * 9 // 10
    low, high = (0, cut) if split == "train" else (cut, len(images))
    chosen = torch.randint(low, high, (size,)).numpy()
    larger = images[chosen].repeat(image // 8, axis=2).repeat(image // 8, axis=3).repeat(channels, axis=1)
    return torch.from_numpy(larger), torch.from_numpy(labels[chosen])
