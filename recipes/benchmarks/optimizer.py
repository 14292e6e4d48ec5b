"""What a sharded optimizer's step costs beside PyTorch's: reducing gradients, updating, bringing the weights back.

    torchrun --nproc-per-node 2 recipes/benchmarks/optimizer.py -o optimizer.json

Every way trains the same stack of linear layers with AdamW, one step of each way in turn, as often as ``--repetitions``
says, so that whatever else the machine does falls on all of them. A figure is the time of backward and step, of the
slowest rank, less that of a backward that reduces nothing. Ratios of minima are what can be compared.

Bytes are what arrives at a rank in a step, in units of the parameters' bytes, counted from the collectives; an
all-reduce counts as its ring, ``2 (ranks - 1) / ranks``. ``ZeroRedundancyOptimizer(overlap_with_ddp=True)`` refuses
gloo, so it is not here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from accel_shard import ShardedOptimizer

WIDTH, ROWS = 1024, 4


class Way:
    """A model with its optimizer, and one step of them."""

    def __init__(self, layers: int, make: Callable[[Any], torch.optim.Optimizer], *, fsdp: bool = False) -> None:
        torch.manual_seed(0)
        # An embedding-like first layer, a quarter of all: what is shared out by whole parameters cannot cut it.
        first = torch.nn.Linear(WIDTH, max(WIDTH, WIDTH * layers // 3), bias=False)
        rest = [torch.nn.Linear(first.out_features, WIDTH, bias=False)] if layers < 3 else []
        stack = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)]
        self.net: Any = torch.nn.ModuleList([first, *rest, *stack])
        if fsdp:
            for layer in self.net:
                fully_shard(layer, reshard_after_forward=False)
            self.model: Any = self.net
        else:
            self.model = DistributedDataParallel(_Forward(self.net), gradient_as_bucket_view=True)
        self.optimizer = make(self.net.parameters())
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.attach(self.model)

    def loss(self, wrapped: Any) -> torch.Tensor:
        """Run forward, so that only what comes after it is timed."""
        return wrapped(torch.ones(ROWS, WIDTH)) if not isinstance(wrapped, torch.nn.ModuleList) else _forward(wrapped)

    def step(self) -> float:
        """Return the seconds of backward and step."""
        loss = self.loss(self.model)
        dist.barrier()
        start = time.perf_counter()
        loss.backward()
        self.optimizer.step()
        seconds = time.perf_counter() - start
        self.optimizer.zero_grad()
        return seconds


class _Forward(torch.nn.Module):
    def __init__(self, layers: torch.nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _forward(self.layers, x)


def _forward(layers: torch.nn.ModuleList, x: torch.Tensor | None = None) -> torch.Tensor:
    x = torch.ones(ROWS, WIDTH) if x is None else x
    head = layers[0](x).square().mean()
    for layer in list(layers)[1:]:
        x = torch.tanh(layer(x)) if layer.in_features == x.shape[1] else x
    return head + x.square().mean()


class Local(Way):
    """Backward alone, without any rank beside: what every way pays."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers, lambda p: torch.optim.SGD(p, lr=0.0))

    def step(self) -> float:
        """Return the seconds of backward."""
        with self.model.no_sync():
            loss = self.loss(self.model)
            dist.barrier()
            start = time.perf_counter()
            loss.backward()
            seconds = time.perf_counter() - start
        self.optimizer.zero_grad()
        return seconds


def ways(layers: int) -> dict[str, Way]:
    """Build each way; all of them hold their state at once, so mind the memory."""

    def adamw(**kind: bool) -> dict[str, Any]:
        return {"lr": 1e-4, **kind}

    made: dict[str, Way] = {"backward alone": Local(layers)}
    for name in ("foreach", "fused"):
        kind = adamw(**{name: True})

        def sharded(reduce: str, kind: dict[str, Any] = kind) -> Callable[[Any], torch.optim.Optimizer]:
            return lambda p: ShardedOptimizer(p, torch.optim.AdamW, reduce=reduce, **kind)

        def redundant(p: Any, kind: dict[str, Any] = kind) -> torch.optim.Optimizer:
            return ZeroRedundancyOptimizer(p, torch.optim.AdamW, parameters_as_bucket_view=True, **kind)

        made[f"ZeroRedundancyOptimizer, {name}"] = Way(layers, redundant)
        made[f"all, {name}"] = Way(layers, sharded("all"))
        made[f"owner, {name}"] = Way(layers, sharded("owner"))
    made["unsharded, fused"] = Way(layers, lambda p: torch.optim.AdamW(p, **adamw(fused=True)))
    made["FSDP2 keeping weights, fused"] = Way(layers, lambda p: torch.optim.AdamW(p, **adamw(fused=True)), fsdp=True)
    return made


@contextlib.contextmanager
def counting(arrived: list[int]) -> Iterator[None]:
    """Count the bytes that arrive by broadcasts and all-to-alls."""
    rank, broadcast, all_to_all = dist.get_rank(), dist.broadcast, dist.all_to_all_single

    def counted(tensor: torch.Tensor, src: int = 0, *more: Any, **options: Any) -> Any:
        arrived[0] += tensor.nbytes * (src != rank)
        return broadcast(tensor, src, *more, **options)

    def exchanged(output: torch.Tensor, given: torch.Tensor, *more: Any, **options: Any) -> Any:
        arrived[0] += output.nbytes * (dist.get_world_size() - 1) // dist.get_world_size()
        return all_to_all(output, given, *more, **options)

    upstream = "torch.distributed.optim.zero_redundancy_optimizer.dist.broadcast"
    with (
        mock.patch("torch.distributed.broadcast", counted),
        mock.patch(upstream, counted),
        mock.patch("torch.distributed.all_to_all_single", exchanged),
    ):
        yield


def traffic(way: Way, name: str, weight: int) -> float:
    """Return what arrives at a rank in one step, in units of the parameters, on average over the ranks."""
    arrived, ranks = [0], dist.get_world_size()
    with counting(arrived):
        way.step()
    total = torch.tensor([arrived[0]], dtype=torch.float64)
    dist.all_reduce(total)
    reduced = 0.0 if name.startswith(("owner", "backward")) else 2 * (ranks - 1) / ranks
    return float(total) / ranks / weight + reduced


def main() -> None:
    """Measure, print, and write the figures on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=100, help="parameters of the model")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path, default=None, help="where the figures go, as JSON")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    layers = max(1, round(given.millions * 1e6 / WIDTH**2 * 0.75))
    made = ways(layers)
    weight = sum(p.numel() * 4 for p in made["backward alone"].net.parameters())
    for way in made.values():  # DDP forms its buckets anew after the first step, and states are made in it
        way.step()
        way.step()
    found: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(given.repetitions):
        for name, way in made.items():
            slowest = torch.tensor([way.step()])
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            found[name].append(float(slowest))
    units = {name: traffic(way, name, weight) for name, way in made.items() if not name.startswith("FSDP2")}
    if dist.get_rank() == 0:
        report(found, units, weight, given.output)
    dist.destroy_process_group()


def report(found: dict[str, list[float]], units: dict[str, float], weight: int, output: Path | None) -> None:
    """Print a table, and write it."""
    local = min(found.pop("backward alone"))
    least = {name: min(times) - local for name, times in found.items()}
    base = {name: min(v for k, v in least.items() if k.startswith("Zero") and k.endswith(name)) for name in
            ("foreach", "fused")}  # fmt: skip
    print(f"{weight / 4e6:.1f} M parameters, {dist.get_world_size()} ranks; backward alone {local * 1e3:.0f} ms")
    ratios = {name: least[name] / base[name.rpartition(" ")[2]] for name in least}
    for name in least:
        sent = f"{units[name]:.2f} P arrive" if name in units else ""
        print(f"{name:36} {least[name] * 1e3:7.0f} ms  {ratios[name]:5.2f} of ZeroRedundancyOptimizer's  {sent}")
    if output is not None:
        figures = {"parameters": weight // 4, "backward": local, "seconds": found, "ratios": ratios, "arrive": units}
        output.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
