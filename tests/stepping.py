"""What the layer does around a core, for blocks of one shape in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from accel_shard.optim.core import Core

Schedule = Callable[[int, int], bool]


def as_the_reference(start: int) -> Schedule:
    """facebookresearch/optimizers: at the start step, and after it at every multiple of the period."""
    return lambda step, period: step == start or (step > start and step % period == 0)


class Stepper:
    """Owns weights and state of a batch of blocks, ``[blocks, *shape]``."""

    def __init__(self, core: Core, weights: torch.Tensor, schedule: Schedule | None = None, **settings: Any) -> None:
        unknown = set(settings) - set(core.defaults)
        assert not unknown, unknown
        self.core, self.weights, self.steps = core, weights.clone(), 0
        self.settings: Mapping[str, Any] = {**core.defaults, **settings}
        core.check(self.settings)
        self.schedule = schedule or (lambda step, period: (step - 1) % period == 0)
        described = core.state(tuple(weights.shape[1:]), self.settings)
        self.state = {n: torch.zeros(len(weights), *shape, dtype=dtype) for n, (shape, dtype) in described.items()}
        core.start(self.state, self.settings)
        self.kept = torch.zeros(len(weights), dtype=torch.long)

    def step(self, gradient: torch.Tensor) -> torch.Tensor:
        """Do one step and return the direction."""
        self.steps += 1
        settings, kept_gradient = self.settings, gradient.clone()
        self.core.observe(gradient, self.state, settings, self.steps)
        assert torch.equal(gradient, kept_gradient), "observe changed the gradient"
        period = self.core.period(settings)
        if period and self.schedule(self.steps, period):
            seen = {**self.state, "gradient": gradient} if self.core.needs_gradient else self.state
            before = {name: tensor.clone() for name, tensor in seen.items()}
            found, kept = self.core.refresh(seen, settings, self.steps)
            assert kept.shape == (len(gradient),)
            assert kept.dtype == torch.bool
            for name, tensor in before.items():
                torch.testing.assert_close(seen[name], tensor, rtol=0, atol=0, equal_nan=True)
            for name, tensor in found.items():
                assert tensor.shape == self.state[name].shape
                assert tensor.dtype == self.state[name].dtype
                self.state[name][~kept] = tensor[~kept]
            self.kept += kept
        direction = self.core.direction(gradient.clone(), self.state, settings, self.steps)
        assert direction.dtype == gradient.dtype
        assert direction.shape == gradient.shape
        lr, decay = settings["lr"], settings["weight_decay"]
        self.weights -= lr * (direction + decay * self.weights)
        return direction

    def run(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Do a step with each gradient and return the weights."""
        for gradient in gradients:
            self.step(gradient)
        return self.weights


DOUBLE = {"state_dtype": "float64", "factor_dtype": "float64"}


def gradients_of(count: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Return random gradients, ``[blocks, *shape]`` each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]


def power(matrix: torch.Tensor, exponent: float) -> torch.Tensor:
    """A symmetric matrix to a power, by its definition."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values**exponent) @ vectors.T


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the largest difference, in units of the largest right value."""
    return float((got - want).abs().max() / want.abs().max())
