"""What a sharded optimizer's step costs beside others: reducing gradients, updating, bringing the weights back.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 recipes/benchmarks/optimizer.py -o optimizer.json

Every way trains the same stack of linear layers with AdamW. Each is run in turn with PyTorch's ZeroRedundancyOptimizer
and with a backward that reduces nothing, as often as ``--repetitions`` says, so that whatever else the machine does
falls on all three. A figure is the time of backward and step, of the slowest rank, less that of the backward alone.
Ratios of minima are what can be compared. The update is the time of the optimizer's step with nothing sent.

Bytes are what arrives at a rank in a step, in units of the parameters' bytes, counted from the collectives; an
all-reduce counts as its ring, ``2 (ranks - 1) / ranks``. ``ZeroRedundancyOptimizer(overlap_with_ddp=True)`` refuses
gloo, so it is not here.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
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
UPSTREAM = "torch.distributed.optim.zero_redundancy_optimizer.dist.broadcast"


def stack_of(layers: int) -> torch.nn.ModuleList:
    """Return the model: a first layer like an embedding, a quarter of all, which no whole parameters divide."""
    torch.manual_seed(0)
    first = torch.nn.Linear(WIDTH, max(WIDTH, WIDTH * layers // 3), bias=False)
    rest = [torch.nn.Linear(first.out_features, WIDTH, bias=False)] if layers < 3 else []
    return torch.nn.ModuleList([first, *rest, *[torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)]])


class Way:
    """A model with its optimizer, and one step of them."""

    def __init__(self, layers: int, make: Callable[[Any], torch.optim.Optimizer], *, fsdp: bool = False) -> None:
        self.net: Any = stack_of(layers)
        if fsdp:
            for layer in self.net:
                fully_shard(layer, reshard_after_forward=False)
            self.model: Any = self.net
        else:
            self.model = DistributedDataParallel(_Forward(self.net), gradient_as_bucket_view=True)
        self.optimizer = make(self.net)
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
        super().__init__(layers, lambda net: torch.optim.SGD(net.parameters(), lr=0.0))

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


class DeepSpeed(Way):
    """ZeRO-1 by DeepSpeed's own engine, in fp32."""

    def __init__(self, layers: int, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed
        from deepspeed.ops import __compatible_ops__

        __compatible_ops__["deepspeed_shm_comm"] = False  # compiled at every start on a CPU, and never used by ZeRO
        self.net = stack_of(layers)
        config = {
            "train_micro_batch_size_per_gpu": ROWS, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 1}, "zero_force_ds_cpu_optimizer": False,
        }  # fmt: skip
        model = _Forward(self.net)
        self.model, self.optimizer, *_ = deepspeed.initialize(model=model, optimizer=make(model), config=config)

    def step(self) -> float:
        """Return the seconds of backward and step."""
        loss = self.loss(self.model)
        dist.barrier()
        start = time.perf_counter()
        self.model.backward(loss)
        self.model.step()
        return time.perf_counter() - start


def ways(layers: int, kind: str) -> dict[str, Callable[[], Way]]:
    """Return how to build each way; ``ZeroRedundancyOptimizer`` first, which stays beside each of the others."""
    settings: dict[str, Any] = {"lr": 1e-4, kind: True}

    def sharded(reduce: str, **more: Any) -> Callable[[], Way]:
        return lambda: Way(
            layers, lambda net: ShardedOptimizer(net.parameters(), torch.optim.AdamW, reduce=reduce, **more, **settings)
        )

    def plain(net: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(net.parameters(), **settings)

    def redundant(net: Any) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **settings)

    return {
        "ZeroRedundancyOptimizer": lambda: Way(layers, redundant),
        "all": sharded("all"),
        "owner": sharded("owner"),
        "in backward": sharded("owner", in_backward=True),
        "unsharded": lambda: Way(layers, plain),
        "DeepSpeed ZeRO-1": lambda: DeepSpeed(layers, plain),
        "FSDP2 keeping weights": lambda: Way(layers, plain, fsdp=True),
    }


class _Sent:
    def wait(self) -> None: ...


def update(way: Way) -> float:
    """Return the seconds of a step that sends nothing; the ranks' weights differ from then on."""
    way.loss(way.model).backward()
    with (
        mock.patch("torch.distributed.broadcast", return_value=_Sent()),
        mock.patch(UPSTREAM, return_value=_Sent()),
    ):
        dist.barrier()
        start = time.perf_counter()
        way.optimizer.step()
        seconds = time.perf_counter() - start
    way.optimizer.zero_grad()
    return seconds


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

    with (
        mock.patch("torch.distributed.broadcast", counted),
        mock.patch(UPSTREAM, counted),
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
    reduced = 0.0 if name in ("owner", "in backward") else 2 * (ranks - 1) / ranks
    return float(total) / ranks / weight + reduced


def side_by_side(trio: dict[str, Way], repetitions: int) -> dict[str, list[float]]:
    """Return the seconds of the slowest rank, of ways that take turns."""
    for way in trio.values():  # DDP forms its buckets anew after the first step, and states are made in it
        way.step()
        way.step()
    found: dict[str, list[float]] = {name: [] for name in trio}
    for _ in range(repetitions):
        for name, way in trio.items():
            slowest = torch.tensor([way.step()])
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            found[name].append(float(slowest))
    return found


def measure(layers: int, kind: str, repetitions: int) -> dict[str, dict[str, Any]]:
    """Return the figures of each way, built one after the other: all at once would be a lot of memory."""
    makers = ways(layers, kind)
    local, base = Local(layers), makers["ZeroRedundancyOptimizer"]()
    weight = sum(p.numel() * 4 for p in local.net.parameters())
    found: dict[str, dict[str, Any]] = {}
    for name, make in makers.items():
        way = base if name == "ZeroRedundancyOptimizer" else make()
        seconds = side_by_side({"alone": local, "base": base, "way": way}, repetitions)
        alone, theirs, ours = (min(times) for times in seconds.values())
        found[name] = {
            "seconds": seconds["way"], "ms": 1e3 * (ours - alone), "ratio": (ours - alone) / (theirs - alone),
            "parameters": weight // 4, "alone_ms": 1e3 * alone,
        }  # fmt: skip
        if not name.startswith(("FSDP2", "DeepSpeed")):
            found[name]["arrive"] = traffic(way, name, weight)
        if name not in ("in backward", "DeepSpeed ZeRO-1"):  # these cannot be told apart from what they send
            slowest = torch.tensor([min(update(way) for _ in range(3))])
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            found[name]["update_ms"] = 1e3 * float(slowest)
        if dist.get_rank() == 0:
            report(name, kind, found[name])
        del way
        gc.collect()
    return found


def main() -> None:
    """Measure, print, and write the figures on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=100, help="parameters of the model")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", default=["foreach", "fused"], help="AdamW's implementations")
    parser.add_argument("-o", "--output", type=Path, default=None, help="where the figures go, as JSON")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    layers = max(1, round(given.millions * 1e6 / WIDTH**2 * 0.75))
    if dist.get_rank() == 0:
        print(f"about {given.millions} M parameters, {dist.get_world_size()} ranks", flush=True)
    figures = {kind: measure(layers, kind, given.repetitions) for kind in given.kinds}
    if dist.get_rank() == 0 and given.output is not None:
        given.output.write_text(json.dumps(figures, indent=1))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may need Python after their work, and abort one that ends


def report(name: str, kind: str, row: dict[str, Any]) -> None:
    """Print a line."""
    apart = f"update {row['update_ms']:5.0f} ms" if "update_ms" in row else " " * 15
    units = f"{row['arrive']:.2f} P arrive" if "arrive" in row else ""
    print(
        f"{name + ', ' + kind:32} {row['ms']:6.0f} ms  {row['ratio']:5.2f} of ZeRO R.O.'s  {apart}  {units}", flush=True
    )


if __name__ == "__main__":
    main()
