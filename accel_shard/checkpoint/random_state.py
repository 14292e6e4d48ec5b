"""The random state of a rank: Python's, numpy's, torch's, the device's; and streams for ranks that did not exist."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import torch

__all__ = ["capture", "derive", "restore"]


def capture(device: torch.device) -> dict[str, Any]:
    """Return this rank's random state as plain data. Local: communicates nothing; waits for the device."""
    import numpy as np

    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Set this rank's random state. The last thing of a resume: much that comes before draws numbers."""
    import numpy as np

    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)


def derive(base: dict[str, Any], rank: int) -> None:
    """Seed a rank that the saving run did not have, from rank 0's state and its own number: new, but repeatable."""
    import numpy as np

    text = base["torch"].numpy().tobytes() + f"/{rank}".encode()
    seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # every device too
