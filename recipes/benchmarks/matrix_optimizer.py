"""What a step of a matrix optimizer costs beside AdamW's, and beside others', on the same gradients.

    python recipes/benchmarks/matrix_optimizer.py -o one.json
    torchrun --nproc-per-node 2 recipes/benchmarks/matrix_optimizer.py --policy fsdp2 -o two.json

The parameters are those of a GPT of ``--width`` and ``--layers`` with an untied vocabulary of 8192; the gradients are
random. Every way does one step in turn, over ``--periods`` periods of ten after one that does not count, on one thread.
Times are of the processor, so that waiting for another rank does not count: median and slowest step and the mean (what
a step costs with its share of the refreshes), in units of AdamW's (foreach) median. ``floor`` is the time of the matrix
products of a Shampoo step alone. On several ranks, "alone" does on each rank what one rank would have to do.

``pytorch-optimizer``, if installed, runs beside; with ``--reference PATH`` so does a checkout of Meta's Shampoo.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import accel_shard
from accel_shard import parameter_groups

PERIOD = 10


class GPT(nn.Module):
    """The parameters of one; nothing is computed with them."""

    def __init__(self, width: int, layers: int, vocabulary: int = 8192) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Embedding(256, width)
        self.layers = nn.ModuleList(_Layer(width) for _ in range(layers))
        self.norm, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        """As transformers' models."""
        return self.lm_head


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))


class Way:
    """A model with its optimizer; the gradients are given."""

    def __init__(self, model: nn.Module, make: Callable[[Any], torch.optim.Optimizer], policy: str) -> None:
        self.model, self.optimizer = model, make(model)
        if policy == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            named = dict(model.named_parameters())
            fully_shard(model)
            swap = {id(old): dict(model.named_parameters())[name] for name, old in named.items()}
            for group in self.optimizer.param_groups:
                group["params"] = [swap[id(p)] for p in group["params"]]
        self.seconds: list[float] = []

    def step(self, gradients: dict[str, torch.Tensor], *, counts: bool) -> None:
        """Take one step, and note the processor's seconds."""
        for name, parameter in self.model.named_parameters():
            whole = gradients[name]
            parameter.grad = _like(parameter, whole)
        start = time.process_time()
        self.optimizer.step()
        if counts:
            self.seconds.append(time.process_time() - start)

    def state_bytes(self) -> int:
        """Return the bytes of the optimizer's state on this rank."""
        if hasattr(self.optimizer, "state_bytes"):
            return int(self.optimizer.state_bytes())
        return sum(t.nbytes for t in _tensors(list(self.optimizer.state.values()), set()))


def _like(parameter: Any, whole: torch.Tensor) -> torch.Tensor:
    if not hasattr(parameter, "placements"):
        return whole.clone()
    from torch.distributed.tensor import DTensor

    local = torch.chunk(whole, dist.get_world_size())[dist.get_rank()].clone()
    return DTensor.from_local(local, parameter.device_mesh, parameter.placements, shape=whole.shape,
                              stride=whole.stride())  # fmt: skip


def _tensors(value: Any, seen: set[int]) -> list[torch.Tensor]:
    """Return what a state reaches, each thing once: those of others are objects that know each other."""
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return [value]
    if not isinstance(value, (dict, list, tuple)):
        value = getattr(value, "__dict__", {})
    within = value.values() if isinstance(value, dict) else value
    return [tensor for thing in within for tensor in _tensors(thing, seen)]


def ours(name: str, block: int, *, routed: bool, **more: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Return how to make one of ours; not routed, it preconditions embeddings and head too."""
    kind = getattr(accel_shard, name)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        groups = parameter_groups(model) if routed else [{"params": list(model.parameters())}]
        return kind(groups, lr=1e-3, max_preconditioner_dim=block, **more)

    return make


def peers(block: int, reference: Path | None) -> dict[str, Callable[[nn.Module], torch.optim.Optimizer]]:
    """Return how to make those of others that are there."""
    found: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {}
    try:
        others = importlib.import_module("pytorch_optimizer")
        for name in ("DASH", "ScalableShampoo"):
            if hasattr(others, name):
                found[f"pytorch-optimizer {name}"] = partial(_peer, getattr(others, name), block)
    except ImportError:
        print("pytorch-optimizer is not installed: left out")
    if reference is not None:
        sys.path.insert(0, str(reference))
        meta = importlib.import_module("distributed_shampoo")
        found["reference Shampoo"] = lambda m: meta.DistributedShampoo(
            m.parameters(), lr=1e-3, betas=(0.9, 0.999), epsilon=1e-8, max_preconditioner_dim=block,
            precondition_frequency=PERIOD, start_preconditioning_step=PERIOD,
            grafting_config=meta.AdamPreconditionerConfig(beta2=0.999, epsilon=1e-8),
        )  # fmt: skip
    return found


def _peer(kind: Any, block: int, model: nn.Module) -> torch.optim.Optimizer:
    import inspect

    known = inspect.signature(kind).parameters
    wanted = {"block_size": block, "preconditioning_compute_steps": PERIOD, "precondition_frequency": PERIOD,
              "update_freq": PERIOD, "inverse_solver": "evd", "root_method": "eigh"}  # fmt: skip
    made: torch.optim.Optimizer = kind(model.parameters(), lr=1e-3, **{k: v for k, v in wanted.items() if k in known})
    return made


def floor(model: nn.Module, block: int) -> float:
    """Return the seconds of a Shampoo step's matrix products alone: two for the factors, two for the direction."""
    blocks: dict[tuple[int, int], int] = {}
    for parameter in model.parameters():
        if parameter.dim() == 2:
            for row in range(0, parameter.shape[0], block):
                for column in range(0, parameter.shape[1], block):
                    shape = min(block, parameter.shape[0] - row), min(block, parameter.shape[1] - column)
                    blocks[shape] = blocks.get(shape, 0) + 1
    best = []
    for _ in range(3):
        start = time.process_time()
        for (rows, columns), count in blocks.items():
            g, left, right = torch.ones(rows, columns), torch.ones(rows, rows), torch.ones(columns, columns)
            for _ in range(count):
                torch.mm(g, g.mT), torch.mm(g.mT, g), torch.mm(torch.mm(left, g), right)
        best.append(time.process_time() - start)
    return min(best)


def main() -> None:
    """Measure, print a table, and write figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--block", type=int, default=256)
    parser.add_argument("--periods", type=int, default=2)
    parser.add_argument("--policy", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--reference", type=Path, default=None)
    parser.add_argument("-o", "--output", type=Path, default=None)
    given = parser.parse_args()
    torch.set_num_threads(1)
    several = dist.is_torchelastic_launched()
    if several:
        dist.init_process_group("gloo")
    make: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "AdamW foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, foreach=True),
        "Shampoo, every matrix": ours("Shampoo", given.block, routed=False),
        "Shampoo": ours("Shampoo", given.block, routed=True),
        "SOAP": ours("SOAP", given.block, routed=True),
        "Muon": ours("Muon", 16384, routed=True),
    }
    alone = "Shampoo, every matrix, alone"
    if several:
        own = dist.new_subgroups(1)[0]
        make[alone] = ours("Shampoo", given.block, routed=False, process_group=own)
    else:
        make |= {"AdamW fused": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True)}
        make |= peers(given.block, given.reference)
    ways = {}
    for name, how in make.items():
        torch.manual_seed(0)
        policy = given.policy if several and name != alone else "ddp"
        ways[name] = Way(GPT(given.width, given.layers), how, policy)
    shapes = {name: p.shape for name, p in GPT(given.width, given.layers).named_parameters()}
    for step in range((given.periods + 1) * PERIOD + 1):
        draw = torch.Generator().manual_seed(step)
        gradients = {name: torch.randn(shape, generator=draw) * 1e-3 for name, shape in shapes.items()}
        for way in ways.values():
            way.step(gradients, counts=step > PERIOD)
    weight = sum(shape.numel() for shape in shapes.values())
    report(ways, weight, floor(GPT(given.width, given.layers), given.block), given.output)
    if several:
        dist.destroy_process_group()


def report(ways: dict[str, Way], weight: int, least: float, output: Path | None) -> None:
    """Print the slowest rank's figures, and write them."""
    unit = statistics.median(ways["AdamW foreach"].seconds)
    rows: dict[str, dict[str, float]] = {}
    for name, way in ways.items():
        median = statistics.median(way.seconds)
        rows[name] = {
            "median": median / unit, "mean": statistics.mean(way.seconds) / unit,
            "slowest / median": max(way.seconds) / median, "state / weights": way.state_bytes() / 4 / weight,
        }  # fmt: skip
    rows["floor"] = {"median": least / unit}
    everyones: list[Any] = [rows]
    if dist.is_initialized():
        everyones = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, rows)
        if dist.get_rank():
            return
    rows = {name: {k: max(theirs[name][k] for theirs in everyones) for k in row} for name, row in rows.items()}
    print(
        f"{weight / 1e6:.1f} M parameters; AdamW foreach {unit * 1e3:.1f} ms of the processor; {len(everyones)} ranks"
    )
    print("| optimizer | median | mean | slowest / median | state / weights |\n| --- | --- | --- | --- | --- |")
    for name, row in rows.items():
        cells = (f"{row[k]:.2f}" if k in row else "" for k in ("median", "mean", "slowest / median", "state / weights"))
        print(f"| {name} | {' | '.join(cells)} |")
    if output is not None:
        output.write_text(json.dumps({"parameters": weight, "unit": unit, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
