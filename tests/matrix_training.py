"""A run with a matrix optimizer: by an oracle, which loops over blocks in one process, and under a policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from accel_shard.optim.core import Core, Cost
from accel_shard.optim.matrix import MatrixOptimizer

STEPS, SAMPLES, WORDS = 10, 12, 23
BLOCK = 6


class Orthogonal(Core):
    """A user's own: the gradient with its singular values drawn together, with momentum."""

    def state(self, shape: tuple[int, ...], settings: Mapping[str, Any]) -> dict[str, Any]:
        return {"momentum": (shape, torch.float32)}

    def cost(self, shape: tuple[int, ...], settings: Mapping[str, Any]) -> Cost:
        return Cost(float(shape[0] * shape[1] * min(shape)))

    def direction(self, gradient: torch.Tensor, state: Any, settings: Mapping[str, Any], step: int) -> torch.Tensor:
        left, values, right = torch.linalg.svd(gradient.double(), full_matrices=False)
        drawn = values / (values + values.amax(-1, keepdim=True).clamp(min=1e-30))
        state["momentum"].mul_(0.9).add_(((left * drawn[:, None, :]) @ right).float())
        return state["momentum"].clone()


class Whitening(Core):
    """One with statistics, a root that is refreshed once in a period, and states that do not begin as zeros."""

    def state(self, shape: tuple[int, ...], settings: Mapping[str, Any]) -> dict[str, Any]:
        square = ((shape[0], shape[0]), torch.float32)
        return {"left": square, "root": square, "seen": ((), torch.float32)}

    def start(self, state: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> None:
        state["left"].diagonal(dim1=-2, dim2=-1).fill_(1e-2)

    def cost(self, shape: tuple[int, ...], settings: Mapping[str, Any]) -> Cost:
        return Cost(float(shape[0] ** 2 * shape[1]), 10.0 * shape[0] ** 3)

    def observe(self, gradient: torch.Tensor, state: Any, settings: Mapping[str, Any], step: int) -> None:
        state["left"].mul_(0.9).add_(gradient @ gradient.mT)
        state["seen"].add_(1)

    def period(self, settings: Mapping[str, Any]) -> int:
        return int(settings["period"])

    def refresh(self, state: Any, settings: Mapping[str, Any], step: int) -> Any:
        values, vectors = torch.linalg.eigh(state["left"].double())
        root = (vectors * values.clamp(min=1e-4).rsqrt()[:, None, :]) @ vectors.mT
        return {"root": root.float()}, torch.zeros(len(root), dtype=torch.bool)

    def direction(self, gradient: torch.Tensor, state: Any, settings: Mapping[str, Any], step: int) -> torch.Tensor:
        return state["root"] @ gradient


CORES: dict[str, tuple[type[Core], dict[str, Any]]] = {
    "orthogonal": (Orthogonal, {}),
    "whitening": (Whitening, {"period": 4}),
}


class Block(torch.nn.Module):
    """Sizes that no number of ranks divides, and a tensor of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(7, 13)
        self.mixing = torch.nn.Parameter(torch.randn(13, 3, 5) * 0.3)
        self.narrow = torch.nn.Linear(15, 7, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.wide(hidden)) @ self.mixing.flatten(1)
        return hidden + self.narrow(torch.tanh(inner))


class Net(torch.nn.Module):
    """A tied embedding, two blocks, a matrix of one row, a frozen one, one number, and a part used in odd steps only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = torch.nn.Embedding(WORDS, 7)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.gate = torch.nn.Linear(7, 1)
        self.seldom = torch.nn.Linear(7, 9)
        self.frozen = torch.nn.Linear(7, 7, bias=False)
        self.scale = torch.nn.Parameter(torch.tensor([1.5]))
        self.head = torch.nn.Linear(7, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, seldom: bool) -> torch.Tensor:
        hidden = self.embed(tokens) + self.frozen(self.embed(tokens))
        for block in self.blocks:
            hidden = block(hidden)
        hidden = hidden * torch.sigmoid(self.gate(hidden)) * self.scale
        if seldom:
            hidden = hidden + torch.tanh(self.seldom(hidden))[..., :7]
        return self.head(hidden)


def groups(model: Net) -> list[dict[str, Any]]:
    """Three groups: the embedding by AdamW, the blocks, and the rest with another rate and a decay."""
    embedding = {id(model.embed.weight)}
    inner = [p for block in model.blocks for p in block.parameters()]
    rest = [p for p in model.parameters() if id(p) not in embedding | {id(p) for p in inner}]
    return [
        {"params": inner, "weight_decay": 0.1},
        {"params": [model.embed.weight], "core": "adamw", "lr": 1e-2},
        {"params": rest, "lr": 1e-2},
    ]


def optimizer_for(model: Net, core: str, **options: Any) -> MatrixOptimizer:
    kind, settings = CORES[core]
    settings = {"lr": 2e-2, "max_preconditioner_dim": BLOCK} | settings | options
    return MatrixOptimizer(groups(model), kind(), **settings)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, WORDS, (SAMPLES, 5), generator=torch.Generator().manual_seed(step))
    return tokens, (tokens * 3 + 1) % WORDS


def is_used(step: int) -> bool:
    """Whether the part that is seldom used is used."""
    return step % 3 != 1


def loss_of(model: Any, tokens: torch.Tensor, labels: torch.Tensor, step: int) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(tokens, is_used(step)).flatten(0, 1), labels.flatten())


@dataclass
class Run:
    """What a run shows."""

    losses: list[float] = field(default_factory=list)
    start: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    statistics: dict[str, int] = field(default_factory=dict)


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# ---- the oracle ----------------------------------------------------------------------------------------------------


def pieces(parameter: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the blocks of a parameter, as slices of its matrix."""
    rows, columns = parameter.flatten(1).shape
    for row in range(0, rows, BLOCK):
        for column in range(0, columns, BLOCK):
            yield slice(row, row + BLOCK), slice(column, column + BLOCK)


class Plain(torch.optim.Optimizer):
    """The same mathematics, block by block, with the phases of an optimizer that is tested elsewhere."""

    def __init__(self, params: Any, core: Core, phases: dict[Any, int], **settings: Any) -> None:
        super().__init__(params, settings)
        self.core, self.phases = core, phases

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for index, group in enumerate(self.param_groups):
            for number, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                state = self.state[p]
                step = state["step"] = state.get("step", 0) + 1
                for row, column in pieces(p):
                    mine = state.setdefault((row.start, column.start), {})
                    phase = self.phases.get((index, number, row.start, column.start), 0)
                    p.flatten(1)[row, column] -= group["lr"] * self._update(p, mine, group, step, phase, (row, column))

    def _update(self, p: Any, state: Any, group: Any, step: int, phase: int, where: Any) -> torch.Tensor:
        gradient, weight = p.grad.flatten(1)[where][None].clone(), p.detach().flatten(1)[where]
        if not state:
            for name, (shape, dtype) in self.core.state(tuple(weight.shape), group).items():
                state[name] = torch.zeros(1, *shape, dtype=dtype)
            self.core.start(state, group)
        self.core.observe(gradient, state, group, step)
        period = self.core.period(group)
        if period and (step == 1 or step % period == phase):
            state.update(self.core.refresh(state, group, step)[0])
        return self.core.direction(gradient, state, group, step)[0] + group.get("weight_decay", 0.0) * weight


def phases_of_plan(core: str) -> dict[Any, int]:
    """When a ``MatrixOptimizer`` in one process refreshes which block."""
    model = Net()
    optimizer = optimizer_for(model, core)
    optimizer.bind()
    return {
        (*unit.members[job.parameter].place, *job.block.offsets): phase
        for unit, phases in zip(optimizer._units, optimizer._phases, strict=True)
        for job, phase in zip(unit.jobs, phases, strict=True)
        if unit.matrices[job.parameter]
    }


def oracle(core: str, steps: int = STEPS) -> Run:
    """One process, plain loops, torch's AdamW."""
    model, run = Net(), Run()
    run.start = weights_of(model)
    matrices, vectors = [], []
    for group in groups(model):
        routed = group.get("core") == "adamw"
        kept = [p for p in group["params"] if p.dim() > 1 and not routed]
        matrices.append({**group, "params": kept})
        vectors.append({**group, "params": [p for p in group["params"] if p.dim() < 2 or routed]})
    # Numbers of parameters in the phases count those of one dimension too.
    numbers = [{id(p): i for i, p in enumerate(group["params"])} for group in groups(model)]
    phases = {}
    for (group, number, row, column), phase in phases_of_plan(core).items():
        order = [numbers[group][id(p)] for p in matrices[group]["params"]]
        if number in order:
            phases[group, order.index(number), row, column] = phase
    kind, settings = CORES[core]
    by_core = Plain([g for g in matrices if g["params"]], kind(), _shifted(phases, matrices), lr=2e-2, **settings)
    by_adamw = torch.optim.AdamW(vectors, lr=2e-2, weight_decay=0.0)
    for step in range(steps):
        loss = loss_of(model, *batch(step), step)
        loss.backward()
        for optimizer in (by_core, by_adamw):
            optimizer.step()
            optimizer.zero_grad()
        run.losses.append(loss.item())
    run.weights = weights_of(model)
    return run


def _shifted(phases: dict[Any, int], matrices: list[dict[str, Any]]) -> dict[Any, int]:
    """Count the groups without those that have no matrix."""
    kept = [index for index, group in enumerate(matrices) if group["params"]]
    return {(kept.index(key[0]), *key[1:]): phase for key, phase in phases.items()}


# ---- under a policy ------------------------------------------------------------------------------------------------


def mine(rows: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    return rows[rank * len(rows) // ranks : (rank + 1) * len(rows) // ranks]


def policy_accelerator(line: str) -> Any:
    from accelerate.utils import DistributedDataParallelKwargs

    from accel_shard import ShardingPolicy

    policy = ShardingPolicy.load(line)
    # A part of the model is not used in every step.
    handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)] if policy.backend == "ddp" else []
    return policy.accelerator(kwargs_handlers=handlers)


def train(accelerator: Any, model: Any, optimizer: Any, steps: range, run: Run) -> None:
    rank, ranks = accelerator.process_index, accelerator.num_processes
    for step in steps:
        tokens, labels = (mine(rows, rank, ranks) for rows in batch(step))
        loss = loss_of(model, tokens, labels, step)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(float(accelerator.reduce(loss.detach(), "mean")))


def client_of(accelerator: Any, optimizer: Any) -> MatrixOptimizer:
    model, _ = accelerator.trained
    client: MatrixOptimizer = accelerator.backend.torch_optimizer(model, optimizer)
    return client


def under_policy(line: str, core: str, steps: int = STEPS, **options: Any) -> Run:
    """The same run on the ranks of this process's group; weights on every rank."""
    accelerator = policy_accelerator(line)
    net, run = Net(), Run()
    run.start = weights_of(net)
    optimizer: Any = optimizer_for(net, core, **options)
    model, optimizer = accelerator.prepare(net, optimizer)
    train(accelerator, model, optimizer, range(steps), run)
    run.weights = {name: w.detach().float().clone() for name, w in accelerator.whole_weights(model)}
    run.statistics = client_of(accelerator, optimizer).statistics()
    return run
