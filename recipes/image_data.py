"""Handwritten digits for an image classifier: 1797 real scans of 8 x 8 pixels, which scikit-learn carries.

Nothing here knows of ranks. Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998
(CC BY 4.0).
"""

from __future__ import annotations

from typing import Final

import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset

__all__ = ["CLASSES", "IGNORED", "PADDING", "SIDE", "Digits", "split_digits"]

IGNORED: Final = -100
"""Label of an image that is not scored: torch's default ``ignore_index``."""
PADDING: Final = -1
"""Index of an image that is not scored."""
SIDE, CLASSES = 8, 10


class Digits(Dataset[dict[str, torch.Tensor]]):
    """Images ``[1, 8, 8]`` in fp32 with mean 0 and deviation 1 over all pixels, and their labels."""

    def __init__(self, pixels: torch.Tensor, labels: torch.Tensor) -> None:
        self.pixels, self.labels = pixels, labels
        self.length = len(labels)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == PADDING or index >= len(self.labels):
            return {"pixel_values": torch.zeros_like(self.pixels[0]), "labels": torch.tensor(IGNORED)}
        return {"pixel_values": self.pixels[index], "labels": self.labels[index]}

    def fill_up(self, multiple: int) -> None:
        """Append images that are not scored, so that every rank gets as many batches."""
        self.length = -(-len(self.labels) // multiple) * multiple


def split_digits() -> tuple[Digits, Digits]:
    """Return the images to train on, and every fifth, which is held out."""
    scans = load_digits()
    pixels = torch.tensor(scans.images, dtype=torch.float32).unsqueeze(1)
    pixels = (pixels - pixels.mean()) / pixels.std()
    labels = torch.tensor(scans.target, dtype=torch.int64)
    held_out = torch.arange(len(labels)) % 5 == 0
    return Digits(pixels[~held_out], labels[~held_out]), Digits(pixels[held_out], labels[held_out])
