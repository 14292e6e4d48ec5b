"""The random state of a rank: Python's, numpy's, torch's, the device's; and streams for ranks that did not exist."""

from __future__ import annotations

from typing import Any

import torch

from accel_shard.random_streams import capture_host, restore_host, seed_host, seed_of

__all__ = ["capture", "derive", "restore"]


def capture(device: torch.device) -> dict[str, Any]:
    """Return this rank's random state as plain data. Local: communicates nothing; waits for the device."""
    state = capture_host()
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Set this rank's random state. The last thing of a resume: much that comes before draws numbers."""
    restore_host(state)
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)


def derive(base: dict[str, Any], rank: int) -> None:
    """Seed a rank that the saving run did not have, from rank 0's state and its own number: new, but repeatable."""
    seed = seed_of(base["torch"].numpy().tobytes() + f"/{rank}".encode())
    seed_host(seed)
    torch.manual_seed(seed)  # every device too
