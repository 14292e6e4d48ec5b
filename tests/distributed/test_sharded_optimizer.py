"""``ShardedOptimizer`` against the optimizer that it runs, unsharded, on the same ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from torch.nn.parallel import DistributedDataParallel

from accel_shard.optim.sharded import ShardedOptimizer

STEPS = 20


class Whitened(torch.optim.Optimizer):
    """A home-made optimizer with whole-matrix maths: it divides by the root of each side's mean square."""

    def __init__(self, params: Any, lr: float, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                matrix = p.grad.reshape(len(p.grad), -1) if p.dim() else p.grad.reshape(1, 1)
                if not state:
                    state.update(step=0, left=matrix.new_ones(len(matrix)), momentum=torch.zeros_like(p))
                state["step"] += 1
                state["left"].mul_(group["beta"]).add_(matrix.square().mean(1))
                update = (matrix / (state["left"].sqrt() + 1e-3)[:, None] / (1 + matrix.norm())).view_as(p)
                state["momentum"].mul_(group["beta"]).add_(update)
                p.sub_(state["momentum"], alpha=group["lr"])


class Net(torch.nn.Module):
    """Sizes that no number of ranks divides; a part that is used in odd steps only, a frozen one, and one number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(23, 7)
        self.body = torch.nn.Linear(7, 11)
        self.seldom = torch.nn.Linear(11, 11)
        self.frozen = torch.nn.Linear(11, 11)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.head = torch.nn.Linear(11, 23)
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, seldom: bool) -> torch.Tensor:
        hidden = torch.tanh(self.body(self.embed(tokens))) * self.scale
        hidden = hidden + torch.tanh(self.frozen(hidden))
        return self.head(hidden + torch.tanh(self.seldom(hidden)) if seldom else hidden)


def three_groups(model: Net) -> list[dict[str, Any]]:
    return [
        {"params": [model.embed.weight, *model.seldom.parameters(), model.scale], "lr": 2e-2},
        {"params": [model.body.weight, *model.frozen.parameters(), model.head.weight], "weight_decay": 0.1},
        {"params": [model.body.bias, model.head.bias]},
    ]


OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD with momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "foreach": False}),
    "AdamW foreach": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.5, "centered": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-2}),
    "Adamax": (torch.optim.Adamax, {"lr": 1e-2}),
    "RAdam": (torch.optim.RAdam, {"lr": 1e-2}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "ASGD": (torch.optim.ASGD, {"lr": 1e-2}),
    "Rprop": (torch.optim.Rprop, {"lr": 1e-3}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
}


def make(name: str, params: Any, *, sharded: bool) -> torch.optim.Optimizer:
    if name == "home-made":

        def factory(groups: Any) -> Whitened:
            given = [{k: v for k, v in group.items() if k != "weight_decay"} for group in groups]
            return Whitened(given, lr=2e-2)

        return ShardedOptimizer(params, factory) if sharded else factory(params)
    kind, settings = OPTIMIZERS[name]
    return ShardedOptimizer(params, kind, **settings) if sharded else kind(params, **settings)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 23, (8, 5), generator=generator)
    return tokens, (tokens * 3 + 1) % 23


def mine(rows: torch.Tensor) -> torch.Tensor:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return rows[dist.get_rank() :: ranks] if ranks > 1 else rows


def train(model: Net, optimizer: torch.optim.Optimizer, steps: range, schedule: Any = None) -> list[float]:
    losses = []
    # The part that is seldom used has no gradient in a step, on any rank.
    wrapped = DistributedDataParallel(model, find_unused_parameters=True) if dist.is_initialized() else model
    for step in steps:
        tokens, labels = (mine(rows) for rows in batch(step))
        logits = wrapped(tokens, seldom=step % 3 == 1)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        losses.append(loss.item())
    return losses


def side_by_side(name: str) -> tuple[float, float]:
    """The largest difference of weights after ``STEPS``, and how far they moved."""
    torch.manual_seed(5)
    plain = Net()
    model = copy.deepcopy(plain)
    start = copy.deepcopy(plain.state_dict())
    result = []
    for net, sharded in ((plain, False), (model, True)):
        optimizer = make(name, three_groups(net), sharded=sharded)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
        result.append(train(net, optimizer, range(STEPS), schedule))
    reached, moved = plain.state_dict(), model.state_dict()
    assert result[0] == pytest.approx(result[1], abs=1e-5)
    return furthest(reached, moved), furthest(start, moved)


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((tensor - other[name]).abs().max()) for name, tensor in one.items())


@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
@pytest.mark.parametrize("name", [*OPTIMIZERS, "home-made"])
def test_weights_are_those_of_the_unsharded_optimizer(name: str, ranks: RankPool) -> None:
    for difference, moved in ranks.run(side_by_side, name):
        assert moved > 5e-3, "nothing was trained"
        # The fused kernels round the last elements of a tensor, which a flat one has elsewhere, by other instructions.
        assert difference <= (1e-6 if "fused" in name else 0.0)


@pytest.mark.parametrize("name", [*OPTIMIZERS, "home-made"])
def test_one_process_without_a_group(name: str) -> None:
    assert not dist.is_initialized()
    difference, moved = side_by_side(name)
    assert moved > 5e-3
    assert difference <= (1e-6 if "fused" in name else 0.0)
