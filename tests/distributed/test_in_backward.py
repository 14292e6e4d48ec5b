"""The optimizer in backward, against the same optimizer after it."""

from __future__ import annotations

import contextlib
import copy
import gc
import unittest.mock
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rank_pool import RankError, RankPool
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from accel_shard import ShardedOptimizer, ShardingPolicy
from accel_shard.optim.backward import InBackward

STEPS = 12
WIDTH = 16


class Deep(torch.nn.Module):
    """Layers of 1 KB, their first weight used once more at the end; one has a backward that gives its bias nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WIDTH, WIDTH)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(12))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return torch.nn.functional.linear(hidden, self.embed.weight)


class Silent(torch.autograd.Function):
    """Takes a bias and gives it no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0], None


def groups(net: torch.nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in net.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in net.parameters() if p.dim() == 1], "lr": 3e-3},
    ]


@contextlib.contextmanager
def small_parts(item_bytes: int = 4) -> Iterator[None]:
    with (
        unittest.mock.patch("accel_shard.optim.partition.CHUNK_BYTES", (250 * item_bytes, 500 * item_bytes)),
        unittest.mock.patch("accel_shard.optim.stepping.BLOCK", 100),
    ):
        yield


def wrap(net: torch.nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(net, **{"gradient_as_bucket_view": True, "bucket_cap_mb": 0.002, **options})


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2 * step + torch.distributed.get_rank())
    return torch.randint(0, WIDTH, (9,), generator=generator)


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(tokens), (tokens * 3 + 1) % WIDTH)


def train(kind: Any, dtype: torch.dtype, in_backward: bool) -> tuple[dict[str, torch.Tensor], list[float], int, int]:
    """Weights, losses, the most bytes of gradient buffers that were alive, and of all of them."""
    torch.manual_seed(3)
    net = Deep().to(dtype)
    with small_parts(dtype.itemsize):
        optimizer = ShardedOptimizer(groups(net), kind, lr=1e-2, reduce="owner", in_backward=in_backward)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        model = wrap(net, bucket_cap_mb=0.0005 * dtype.itemsize)
        optimizer.attach(model)
        most, memories, losses = 0, dict[int, torch.UntypedStorage](), []
        kept = InBackward.reduce

        def reduce(self: InBackward, bucket: GradBucket) -> Any:
            nonlocal most
            memory = bucket.buffer().untyped_storage()
            memories.setdefault(memory._cdata, memory)
            apart = sum(g.nbytes for g in self._gradients.values() if g.untyped_storage()._cdata not in memories)
            most = max(most, apart + sum(m.nbytes() for m in memories.values()))
            return kept(self, bucket)

        with unittest.mock.patch.object(InBackward, "reduce", reduce):
            for step in range(STEPS):
                if step < 3:  # DDP forms its buckets in the first step, and anew in the second
                    most = 0
                if step == 1:
                    memories.clear()
                loss = loss_of(model, batch(step))
                loss.backward()
                if in_backward:
                    assert all(bool(p.grad.isnan().all()) for p in net.parameters() if p.grad is not None)
                    assert not any(m.nbytes() for m in memories.values()), "all of it is freed"
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    assert len(memories) > 3 or not in_backward, "many buckets"
    return copy.deepcopy(net.state_dict()), losses, most, sum(p.nbytes for p in net.parameters())


@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_the_same_weights_without_all_gradients_at_once(kind: Any, dtype: torch.dtype, ranks: RankPool) -> None:
    wanted, found = ranks.run(train, kind, dtype, False), ranks.run(train, kind, dtype, True)
    for (weights, losses, _, _), (again, others, most, total) in zip(wanted, found, strict=True):
        assert losses == others
        assert losses[-1] != losses[0]
        assert all(torch.equal(tensor, again[name]) for name, tensor in weights.items())
        assert 0 < most < 0.5 * total, "two buckets of seven, and the biases"


def without_a_gradient() -> float:
    """A parameter that backward reaches, and gives nothing."""
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    bias = torch.nn.Parameter(torch.ones(8))
    net.register_parameter("silent", bias)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Silent.apply(self.net[1](self.net[0](x)), self.net.silent)

    optimizer = ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=0.1, reduce="owner", in_backward=True)
    model = wrap(Model())
    optimizer.attach(model)
    before = net[0].weight.detach().clone()
    for _ in range(4):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(net[0].weight, before)
    return float((bias - 1).abs().max())


def test_a_parameter_that_backward_gives_nothing(two_ranks: RankPool) -> None:
    assert two_ranks.run(without_a_gradient) == [0.0, 0.0]


def misused(how: str) -> None:
    torch.manual_seed(3)
    net, options = Deep(), dict[str, Any]()
    if how in ("find_unused_parameters", "static_graph"):
        options[how] = True
    if how == "gradient_as_bucket_view":
        options[how] = False
    kind = torch.optim.Adafactor if how == "whole" else torch.optim.SGD
    optimizer: Any = ShardedOptimizer(net.parameters(), kind, lr=0.1, reduce="owner", in_backward=True)
    if how == "strangers":
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    model = wrap(net, **options)
    if how != "not attached":
        optimizer.attach(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, enabled=how == "scaler")
    with model.no_sync() if how == "accumulated" else contextlib.nullcontext():
        scaler.scale(loss_of(net if how == "past the model" else model, batch(0))).backward()
    if how == "clipped":
        optimizer.clip_grad_norm_(1.0)
    if how == "clipped by torch":
        raise AssertionError(f"the norm is {float(torch.nn.utils.get_total_norm([p.grad for p in net.parameters()]))}")
    if how == "added":
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    if how == "scaler":
        scaler.step(optimizer)
    optimizer.step()
    if how == "not zeroed":
        loss_of(model, batch(1)).backward()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("accumulated", r"gradients are accumulated \(no_sync\).*gradient_accumulation_steps 1"),
        ("not zeroed", r"Call optimizer.zero_grad\(\) after each step"),
        ("clipped", "the first weights are updated before the last gradients exist"),
        ("clipped by torch", "the norm is nan"),
        ("scaler", r"a GradScaler \(fp16\) with reduce 'owner'"),
        ("past the model", "a gradient that DDP did not reduce"),
        ("not attached", "not attached to the DDP model"),
        ("added", "parameters were added, or train now"),
        ("strangers", "parameters that are not in the DDP model"),
        ("whole", "the optimizer is Adafactor, which may count its steps.*AdamW"),
        ("find_unused_parameters", "DDP has find_unused_parameters=True"),
        ("static_graph", "DDP has static_graph=True"),
        ("gradient_as_bucket_view", "DDP has gradient_as_bucket_view=False"),
    ],
)
def test_what_an_update_in_backward_does_not_allow(how: str, words: str, two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match=words):
        two_ranks.run(misused, how)


def used_too_late() -> None:
    """Backward of the first layer reads the last one's weight, which is complete by then."""

    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(weight)
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            return grads[0] + ctx.saved_tensors[0].sum(), None

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = Late.apply(self.layers[0](x), self.layers[-1].weight.detach())
            for layer in list(self.layers)[1:]:
                x = layer(x)
            return x

    with small_parts():
        net = Model()
        optimizer = ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=0.1, reduce="owner", in_backward=True)
        model = wrap(net, bucket_cap_mb=0.001)
        optimizer.attach(model)
        for _ in range(3):
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_autograd_refuses_weights_that_were_updated_too_early(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match="modified by an inplace operation"):
        two_ranks.run(used_too_late)


def test_all_reduce_is_refused() -> None:
    with pytest.raises(ValueError, match=r"in_backward is set and reduce is 'all'.*Allowed: reduce 'owner'"):
        ShardedOptimizer([torch.nn.Parameter(torch.ones(2))], torch.optim.SGD, lr=1.0, in_backward=True)


def under_a_policy(line: str) -> list[float]:
    accelerator = ShardingPolicy.load(line).accelerator()
    torch.manual_seed(3)
    net: Any = Deep()
    optimizer: Any = ShardedOptimizer(groups(net), torch.optim.AdamW, lr=1e-2, reduce="owner", in_backward=True)
    net, optimizer = accelerator.prepare(net, optimizer)
    losses = []
    for step in range(STEPS):
        with accelerator.accumulate(net):
            loss = loss_of(net, batch(step))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


def test_under_a_policy(two_ranks: RankPool) -> None:
    for losses in two_ranks.run(under_a_policy, "ddp_sharded"):
        assert losses[-1] < 0.9 * losses[0]
    with pytest.raises(RankError, match=r"in_backward=True and gradient_clipping is 0\.5"):
        two_ranks.run(under_a_policy, "ddp_sharded,gradient_clipping=0.5")
    with pytest.raises(RankError, match="in_backward=True and gradient_accumulation_steps is 2"):
        two_ranks.run(under_a_policy, "ddp_sharded,gradient_accumulation_steps=2")


def models_left(line: str, **options: Any) -> int:
    """How many DDP models and gradient buckets outlive a run."""
    accelerator = ShardingPolicy.load(line).accelerator()
    net: Any = Deep()
    optimizer: Any = accelerator.policy.optimizer(net.parameters(), torch.optim.AdamW, lr=1e-2, **options)
    net, optimizer = accelerator.prepare(net, optimizer)
    for step in range(3):
        accelerator.backward(loss_of(net, batch(step)))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.free_memory()
    known = weakref.ref(net)
    del net, optimizer, accelerator
    gc.collect()
    return int(known() is not None)


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("ddp_sharded", {"reduce": "owner", "in_backward": True}),
        ("ddp_sharded", {"reduce": "owner"}),
        ("ddp_sharded", {}),
        ("ddp,gradient_compression=powersgd", {}),
        ("ddp,local_sgd=2", {}),
    ],
)
def test_a_run_that_is_over_leaves_no_model(line: str, options: dict[str, Any], two_ranks: RankPool) -> None:
    assert two_ranks.run(models_left, line, **options) == [0, 0]
