"""The random streams of this process's host: Python's, numpy's and torch's; those of devices are the model's."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import torch

__all__ = ["capture_host", "restore_host", "seed_host", "seed_of"]


def capture_host() -> dict[str, Any]:
    """Return their state as plain data."""
    import numpy as np

    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def restore_host(state: dict[str, Any]) -> None:
    """Set what :func:`capture_host` returned."""
    import numpy as np

    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])


def seed_host(seed: int) -> None:
    """Seed them, and no device's."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def seed_of(text: bytes) -> int:
    """Return a seed of 63 bits that depends on a text."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
