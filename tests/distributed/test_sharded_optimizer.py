"""``ShardedOptimizer`` against the optimizer that it runs, unsharded, on the same ranks."""

from __future__ import annotations

import contextlib
import copy
import unittest.mock
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_optimizer
import torch
import torch.distributed as dist
from rank_pool import RankError, RankPool
from torch.nn.parallel import DistributedDataParallel
from training import put_together

from accel_shard import Checkpointer, ShardedOptimizer, ShardingPolicy, UnsupportedPolicyError
from accel_shard.layout import Layout

WIDE = pytest.mark.wide
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
ELEMENTWISE = tuple(name for name in OPTIMIZERS if name != "Adafactor")
# From PyPI's pytorch-optimizer, untouched: a count of steps in the group; four states of other kinds; whole matrices.
FOREIGN: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "Lion": (pytorch_optimizer.Lion, {"lr": 1e-3}),
    "Adan": (pytorch_optimizer.Adan, {"lr": 1e-2}),
    "AdaBelief": (pytorch_optimizer.AdaBelief, {"lr": 1e-2}),
    "SOAP": (pytorch_optimizer.SOAP, {"lr": 1e-2, "precondition_frequency": 2}),
}


def make(name: str, params: Any, *, sharded: bool, **how: Any) -> torch.optim.Optimizer:
    if name == "home-made":

        def factory(groups: Any) -> Whitened:
            return Whitened(groups, lr=2e-2)

        return ShardedOptimizer(params, factory, **how) if sharded else factory(params)
    kind, settings = (OPTIMIZERS | FOREIGN)[name]
    return ShardedOptimizer(params, kind, **settings, **how) if sharded else kind(params, **settings)


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


def side_by_side(name: str, **how: Any) -> tuple[float, float]:
    """The largest difference of weights after ``STEPS``, and how far they moved."""
    torch.manual_seed(5)
    plain = Net()
    model = copy.deepcopy(plain)
    start = copy.deepcopy(plain.state_dict())
    result = []
    for net, sharded in ((plain, False), (model, True)):
        optimizer = make(name, three_groups(net), sharded=sharded, **(how if sharded else {}))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
        result.append(train(net, optimizer, range(STEPS), schedule))
    reached, moved = plain.state_dict(), model.state_dict()
    assert result[0] == pytest.approx(result[1], abs=1e-5)
    return furthest(reached, moved), furthest(start, moved)


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((tensor - other[name]).abs().max()) for name, tensor in one.items())


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=WIDE), 3, 4], indirect=True)
@pytest.mark.parametrize("name", [*OPTIMIZERS, *FOREIGN, "home-made"])
def test_weights_are_those_of_the_unsharded_optimizer(name: str, ranks: RankPool) -> None:
    for difference, moved in ranks.run(side_by_side, name):
        assert moved > 5e-3, "nothing was trained"
        # The fused kernels round the last elements of a tensor, which a flat one has elsewhere, by other instructions.
        assert difference <= (1e-6 if "fused" in name else 0.0)


def in_small_parts(name: str) -> tuple[float, float]:
    """A small net in buckets, and buckets in blocks, as a large one is."""
    with small_parts():
        return side_by_side(name)


@contextlib.contextmanager
def small_parts() -> Iterator[None]:
    with (
        unittest.mock.patch("accel_shard.optim.partition.CHUNK_BYTES", (100, 400)),
        unittest.mock.patch("accel_shard.optim.stepping.BLOCK", 16),
    ):
        yield


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=WIDE)], indirect=True)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_buckets_and_blocks_change_nothing(name: str, ranks: RankPool) -> None:
    for difference, moved in ranks.run(in_small_parts, name):
        assert moved > 5e-3, "nothing was trained"
        assert difference <= (1e-6 if "fused" in name else 0.0)


def counted_parts() -> tuple[list[int], list[int]]:
    """Elements of the pieces, and of what the inner optimizer is stepped on."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*[torch.nn.Linear(8, 8, bias=False) for _ in range(6)])
    with small_parts():
        optimizer: Any = ShardedOptimizer(layers.parameters(), torch.optim.AdamW, foreach=True)
        optimizer.bind()
        stepped: list[int] = []
        kept = optimizer._inner.step

        def step() -> None:
            stepped.extend(p.numel() for g in optimizer._inner.param_groups for p in g["params"])
            kept()

        optimizer._inner.step = step
        layers(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    return [piece.tensor.numel() for bucket in optimizer._buckets for piece in bucket.pieces], stepped


def test_small_parts_are_stepped_one_after_the_other(two_ranks: RankPool) -> None:
    for pieces, stepped in two_ranks.run(counted_parts):
        # From the last layer on: 256 bytes are above 100; the next two are above 400; in forward's order.
        assert pieces == [32, 64, 64, 32]
        assert stepped == [16] * (sum(pieces) // 16)


@pytest.mark.parametrize("name", [*OPTIMIZERS, *FOREIGN, "home-made"])
def test_one_process_without_a_group(name: str) -> None:
    assert not dist.is_initialized()
    difference, moved = side_by_side(name)
    assert moved > 5e-3
    assert difference <= (1e-6 if "fused" in name else 0.0)


@pytest.mark.parametrize("name", ["Lion", "AdaBelief"])
def test_a_foreign_optimizer_that_is_marked_runs_on_ranges(name: str, three_ranks: RankPool) -> None:
    for difference, moved in three_ranks.run(side_by_side, name, elementwise=True):
        assert moved > 5e-3
        assert difference <= 1e-6


# ---- what a rank holds -----------------------------------------------------------------------------------------


def bytes_of(optimizer: torch.optim.Optimizer) -> int:
    return sum(v.numel() * v.element_size() for s in optimizer.state.values() for v in s.values() if v.dim())


class Shaped(torch.nn.Module):
    """GPT-2's proportions, a sixteenth of its width: a tied embedding that is a third of all, and 12 blocks."""

    def __init__(self, width: int = 48, words: int = 3141, blocks: int = 12) -> None:
        super().__init__()
        self.embed, self.places = torch.nn.Embedding(words, width), torch.nn.Embedding(64, width)
        self.blocks = torch.nn.ModuleList(torch.nn.TransformerEncoderLayer(width, 2, 4 * width) for _ in range(blocks))
        self.head = torch.nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight


def share(sharded: bool) -> tuple[int, list[tuple[int, int]]]:
    model = Shaped()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer: Any = ShardedOptimizer(groups, torch.optim.AdamW) if sharded else torch.optim.AdamW(groups)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    inner = optimizer._inner if sharded else optimizer
    return bytes_of(inner), [(len(g["params"]), sum(p.numel() for p in g["params"])) for g in inner.param_groups]


@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
def test_each_rank_holds_its_share_of_the_state_to_one_element_a_group(ranks: RankPool) -> None:
    (whole, groups), *_ = ranks.run(share, False)
    assert whole == 8 * sum(numel for _, numel in groups)
    shares = ranks.run(share, True)
    assert sum(held for held, _ in shares) == whole, "everything once"
    for held, mine in shares:
        assert held <= whole / ranks.world * 1.01
        # The weights are above 1 MB, where DDP ends its first bucket; its next ends at 25 MB.
        assert [count for count, _ in mine] == [2, 1], "one flat tensor a group and bucket"
        for (_, numel), (_, total) in zip(mine, groups, strict=True):
            assert abs(numel - total / ranks.world) < ranks.world, "the last rank's range ends with the elements"
            assert numel < total / ranks.world + 1


def whole_share() -> tuple[int, int]:
    model = Shaped()
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.Adafactor)
    return optimizer.updated_elements(), sum(p.numel() for p in model.parameters())


def test_whole_parameters_are_shared_out_by_size(four_ranks: RankPool) -> None:
    shares = [updated for updated, _ in four_ranks.run(whole_share)]
    total = four_ranks.run(whole_share)[0][1]
    largest = 3141 * 48
    assert sum(shares) == total
    # The embedding is more than a quarter; the others share the rest to within their largest.
    assert max(shares) == max(largest, total // 4 + 1)
    assert max(sorted(shares)[:3]) - min(shares) <= 4 * 48 * 48


# ---- what users do ---------------------------------------------------------------------------------------------


def twins(seed: int = 5) -> tuple[Net, Net]:
    torch.manual_seed(seed)
    plain = Net()
    return plain, copy.deepcopy(plain)


def as_on_a_device(name: str) -> float:
    """The all-gather that joins ranges of one length where the group's backend is not gloo."""
    with unittest.mock.patch("torch.distributed.get_backend", return_value="nccl"):
        return side_by_side(name)[0]


@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
def test_one_all_gather_a_buffer_brings_the_same(ranks: RankPool) -> None:
    assert ranks.run(as_on_a_device, "AdamW") == [0.0] * ranks.world


def sent_by(name: str) -> tuple[dict[str, int], int]:
    """Bytes that this rank hands to collectives in one step, by kind, and the bytes of all parameters."""
    net = twins()[0]
    net.requires_grad_(True)
    optimizer: Any = make(name, three_groups(net), sharded=True)
    train(net, optimizer, range(1))
    counted: dict[str, int] = {}
    kept = dist.broadcast

    def broadcast(tensor: torch.Tensor, src: int, **options: Any) -> Any:
        mine = "sent" if src == dist.get_rank() else "received"
        counted[mine] = counted.get(mine, 0) + tensor.numel() * tensor.element_size()
        return kept(tensor, src=src, **options)

    for p in net.parameters():
        p.grad = torch.ones_like(p)
    with unittest.mock.patch("torch.distributed.broadcast", broadcast):
        optimizer.step()
    return counted, sum(p.numel() * p.element_size() for p in net.parameters())


@pytest.mark.parametrize("name", ["AdamW", "home-made"])
def test_a_step_sends_each_weight_once(name: str, four_ranks: RankPool) -> None:
    found = four_ranks.run(sent_by, name)
    assert sum(counted.get("sent", 0) for counted, _ in found) == found[0][1]
    for counted, total in found:
        assert counted.get("sent", 0) + counted["received"] == total


def grown(name: str) -> float:
    """A group that comes later, and a part that is set free later still."""
    found = []
    for net, sharded in zip(twins(), (False, True), strict=True):
        kept = [*net.frozen.parameters(), *net.embed.parameters(), *net.body.parameters()]
        optimizer = make(name, [{"params": kept}], sharded=sharded)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        train(net, optimizer, range(4), schedule)
        optimizer.add_param_group({"params": [*net.head.parameters(), net.scale], "lr": 3e-3})
        train(net, optimizer, range(4, 8))
        net.frozen.requires_grad_(True)
        train(net, optimizer, range(8, 14))
        net.body.requires_grad_(False)
        net.body.zero_grad()
        train(net, optimizer, range(14, 18))
        found.append({n: p.detach() for n, p in net.named_parameters()})
    assert optimizer.param_groups[1]["lr"] == 3e-3
    return furthest(*found)


@pytest.mark.parametrize("name", ["AdamW", "SGD with momentum", "home-made"])
def test_parameters_that_come_and_go(name: str, two_ranks: RankPool) -> None:
    assert two_ranks.run(grown, name) == [0.0, 0.0]


def in_turns() -> tuple[list[int], list[dict[str, Any]]]:
    """States of the part that has a gradient in some steps only, from the unsharded optimizer and the layout."""
    plain, net = twins()
    optimizers: list[Any] = [make("AdamW", n.parameters(), sharded=s) for n, s in ((plain, False), (net, True))]
    for n, optimizer in zip((plain, net), optimizers, strict=True):
        train(n, optimizer, range(5))
    layout = Layout()
    optimizers[1].describe_state(layout, {id(p): name for name, p in net.named_parameters()})
    for name, p in plain.named_parameters():
        state = optimizers[0].state.get(p, {})
        for key, value in state.items():
            if value.dim():
                for box, part in layout.states.get(name, {}).get(key, Nothing).parts:
                    assert torch.equal(part, value[box.slices()]), (name, key)
            elif name in layout.scalars:
                assert layout.scalars[name][key] == value, (name, key)
    return [int(layout.scalars.get(n, {}).get("step", -1)) for n in ("embed.weight", "seldom.weight", "frozen.weight")]


class Nothing:
    parts = ()


def test_states_are_torchs_own_where_a_gradient_was_missing(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(in_turns)
    seen = [max(pair) for pair in zip(first, second, strict=True)]
    assert seen == [5, 2, -1]  # every step; steps 1 and 4; frozen


def used_too_late() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    optimizer = ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    loss = net(torch.ones(2, 3)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    loss.backward()


def test_autograd_sees_that_a_step_wrote_the_weights(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match="modified by an inplace operation"):
        two_ranks.run(used_too_late)


def low_precision(dtype: torch.dtype) -> tuple[float, float, int, int]:
    """16-bit weights: masters, against a copy of the model that is trained in fp32 with the same gradients."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(13, 7).to(dtype)), torch.nn.Parameter(torch.randn(5).to(dtype))]
    masters = [torch.nn.Parameter(p.detach().float()) for p in weights]
    optimizer: Any = ShardedOptimizer(weights, torch.optim.AdamW, lr=1e-4)
    wanted = torch.optim.AdamW(masters, lr=1e-4)
    start = [p.detach().clone() for p in weights]
    for step in range(40):
        generator = torch.Generator().manual_seed(step)
        for p, m in zip(weights, masters, strict=True):
            p.grad = torch.randn(p.shape, generator=generator).to(dtype)
            m.grad = p.grad.float()
        optimizer.step()
        wanted.step()
    far = max(float((p.float() - m.to(dtype).float()).abs().max()) for p, m in zip(weights, masters, strict=True))
    moved = max(float((p - s).abs().max()) for p, s in zip(weights, start, strict=True))
    with torch.no_grad():  # somebody writes a weight: its master must follow
        weights[0].fill_(2.0)
        weights[0].grad = torch.zeros_like(weights[0])
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert float((weights[0] - 2.0).abs().max()) == 0.0
    return far, moved, optimizer.state_bytes(), sum(p.numel() for p in weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_of_16_bit_weights_live_with_their_owner(dtype: torch.dtype, two_ranks: RankPool) -> None:
    for far, moved, held, numel in two_ranks.run(low_precision, dtype):
        assert far == 0.0
        assert moved > 1e-3
        assert held <= 12 * (numel / 2 + 1) + 8  # master and two states in fp32, and a step count


def mixed() -> float:
    """float32, float64, bfloat16 and complex weights in one group, one of them not contiguous."""
    found = []
    for sharded in (False, True):
        torch.manual_seed(1)
        kinds = (torch.float32, torch.float64, torch.complex64, torch.bfloat16)
        weights = [torch.nn.Parameter(torch.randn(7, 5, dtype=kind)) for kind in kinds]
        weights.append(torch.nn.Parameter(torch.randn(6, 4).t()))
        optimizer = (
            ShardedOptimizer(weights, torch.optim.AdamW, lr=0.01, master=None)
            if sharded
            else torch.optim.AdamW(weights, lr=0.01)
        )
        for step in range(5):
            generator = torch.Generator().manual_seed(step)
            for p in weights:
                p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            optimizer.step()
        found.append({str(i): p.detach() for i, p in enumerate(weights)})
    assert not weights[-1].is_contiguous(), "its strides are the user's"
    return furthest(*found)


def test_mixed_dtypes_and_strides(two_ranks: RankPool) -> None:
    assert two_ranks.run(mixed) == [0.0, 0.0]


def moved_away() -> float:
    """Weights that somebody puts elsewhere between steps."""
    found = []
    for net, sharded in zip(twins(), (False, True), strict=True):
        optimizer = make("AdamW", net.parameters(), sharded=sharded)
        train(net, optimizer, range(3))
        net.head.weight.data = net.head.weight.detach().clone() * 0.5
        net.body.weight.data = net.body.weight.detach().t().contiguous().t()
        train(net, optimizer, range(3, 6))
        found.append(net.state_dict())
    return furthest(*found)


def test_weights_that_were_put_elsewhere(two_ranks: RankPool) -> None:
    assert two_ranks.run(moved_away) == [0.0, 0.0]


def test_a_closure_is_evaluated_once_with_gradients() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = ShardedOptimizer([weight], torch.optim.SGD, lr=0.5)
    calls = []

    def closure() -> float:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        calls.append(loss.item())
        return loss.item()

    assert optimizer.step(closure) == 3.0
    assert calls == [3.0]
    assert weight.tolist() == [0.0, 0.0, 0.0]


def overflow() -> list[float]:
    """fp16's scaler: an infinite gradient skips the step on every rank, and changes nothing."""
    net = twins()[0]
    optimizer = make("AdamW", net.parameters(), sharded=True)
    train(net, optimizer, range(2))
    before, state = copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    wrapped = DistributedDataParallel(net)
    loss = wrapped(mine(batch(3)[0]), seldom=True).sum() * (torch.inf if dist.get_rank() == 0 else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    after = optimizer.state_dict()["state"]
    assert state
    assert all(torch.equal(v, after[i][k]) for i, s in state.items() for k, v in s.items())
    return [furthest(before, net.state_dict()), scaler.get_scale()]


def test_an_overflow_skips_the_step_on_every_rank(two_ranks: RankPool) -> None:
    assert two_ranks.run(overflow) == [[0.0, 512.0]] * 2


# ---- refusals --------------------------------------------------------------------------------------------------


def test_what_cannot_be_sharded_is_refused_by_name() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 2))
    with pytest.raises(ValueError, match="LBFGS, which takes inner products"):
        ShardedOptimizer([weight], torch.optim.LBFGS)
    with pytest.raises(ValueError, match="SparseAdam, which takes sparse gradients"):
        ShardedOptimizer([weight], torch.optim.SparseAdam)
    with pytest.raises(ValueError, match=r"groups of \[1\] parameters and made a SGD with groups of \[\]"):
        ShardedOptimizer([weight], lambda groups: emptied(torch.optim.SGD(groups, lr=1.0)))
    with pytest.raises(ValueError, match=r"shapes \(4, 2\) and \(2,\), share memory"):
        ShardedOptimizer([weight, torch.nn.Parameter(weight.detach()[1])], torch.optim.SGD, lr=1.0).bind()


def emptied(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.param_groups.clear()
    return optimizer


def test_a_sparse_gradient_is_refused_by_name() -> None:
    embed = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = ShardedOptimizer(embed.named_parameters(), torch.optim.SGD, lr=1.0)
    embed(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"parameter weight of group 0, of shape \(5, 3\), is torch.sparse_coo"):
        optimizer.step()


class Paired(torch.optim.SGD):
    """Keeps two numbers a tensor, so it is not element-wise."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["two"] = torch.zeros(2)


def test_a_state_that_is_not_element_wise_is_refused_by_name() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 3))
    for elementwise in (False, True):
        optimizer = ShardedOptimizer([weight], Paired, lr=0.1, elementwise=elementwise)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        layout, names = Layout(), {id(weight): "w"}
        if not elementwise:
            optimizer.describe_state(layout, names)
            assert layout.states["w"]["two"].shape == (2,)
            continue
        with pytest.raises(UnsupportedPolicyError, match=r"'two' in shape \(2,\) for 12 elements of 'w'"):
            optimizer.describe_state(layout, names)


# ---- state dicts -----------------------------------------------------------------------------------------------


def there_and_back(name: str) -> list[float]:
    """Unsharded, to sharded, to a new sharded one from its own share: as if nothing had happened."""
    plain, net = twins()
    unsharded = make(name, plain.parameters(), sharded=False)
    train(plain, unsharded, range(4))
    net.load_state_dict(plain.state_dict())
    sharded = make(name, net.parameters(), sharded=True)
    sharded.load_state_dict(copy.deepcopy(unsharded.state_dict()))
    train(plain, unsharded, range(4, 8))
    train(net, sharded, range(4, 8))
    first = furthest(plain.state_dict(), net.state_dict())
    again = copy.deepcopy(net)
    resumed = make(name, again.parameters(), sharded=True)
    resumed.load_state_dict(copy.deepcopy(sharded.state_dict()))
    kept = resumed.state_dict()  # before its first step: what it was given
    assert kept["state"].keys() == sharded.state_dict()["state"].keys()
    train(again, resumed, range(8, 10))
    train(net, sharded, range(8, 10))
    return [first, furthest(net.state_dict(), again.state_dict())]


@pytest.mark.parametrize("name", ["AdamW", "Adagrad", "NAdam", "Adafactor", "home-made", "RMSprop"])
def test_state_dicts_of_the_unsharded_and_its_own(name: str, two_ranks: RankPool) -> None:
    assert two_ranks.run(there_and_back, name) == [[0.0, 0.0]] * 2


def saved_share() -> dict[str, Any]:
    net = twins()[0]
    optimizer = make("AdamW", net.parameters(), sharded=True)
    train(net, optimizer, range(2))
    return copy.deepcopy(optimizer.state_dict())


def test_a_share_of_another_rank_is_refused(two_ranks: RankPool) -> None:
    shares = two_ranks.run(saved_share)
    assert [len(share["sharded"]["ranges"]) for share in shares] < [9, 9]
    net = twins()[0]
    optimizer = make("AdamW", net.parameters(), sharded=True)
    with pytest.raises(ValueError, match=r"share of rank 1 of 2; this is rank 0 of 1.*Checkpointer"):
        optimizer.load_state_dict(shares[1])
    other = make("AdamW", [net.embed.weight, net.body.weight], sharded=True)
    shares[1]["param_groups"][0]["params"] = [0, 1]
    shares[1]["sharded"] |= {"rank": 0, "ranks": 1}
    other.load_state_dict(shares[1])
    with pytest.raises(ValueError, match="it is of other parameters or groups"):
        other.step()


# ---- under a policy --------------------------------------------------------------------------------------------


class Policed:
    """The net, under a policy, with an optimizer that the user made and a schedule of it."""

    def __init__(self, line: str, name: str) -> None:
        self.accelerator = ShardingPolicy.load(line).accelerator()
        torch.manual_seed(5)
        net = Net()
        net.scale = torch.nn.Parameter(torch.tensor([1.5]))  # FSDP2 takes no parameter without dimensions
        groups = [{**g, "params": [p for p in g["params"] if p.requires_grad]} for g in three_groups(net)]
        optimizer = make(name, groups, sharded=False)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
        self.net, self.optimizer, self.schedule = self.accelerator.prepare(net, optimizer, schedule)

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            tokens, labels = (mine(rows) for rows in batch(step))
            logits = self.net(tokens, seldom=True)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            losses.append(float(self.accelerator.reduce(loss.detach(), "mean")))
        return losses

    def held(self) -> dict[str, torch.Tensor]:
        """Everything that all ranks hold, put together."""
        return put_together(self.accelerator.backend.layout(self.accelerator, self.net, self.optimizer))


def leg(
    line: str, name: str, folder: str, steps: range
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Any]:
    """Resume, show what is there, train, show, save."""
    run = Policed(line, name)
    with Checkpointer(run.accelerator, folder, background=False) as checkpointer:
        assert checkpointer.resume() == (steps.start > 0)
        assert checkpointer.steps == steps.start
        found = run.held() if steps.start else {}
        losses = run.train(steps)
        checkpointer.steps = steps.stop
        checkpointer.save()
        return found, run.held(), losses


@pytest.fixture(scope="module")
def one_rank() -> Iterator[RankPool]:
    pool = RankPool(1)
    yield pool
    pool.stop()


ROUTES = {
    "ranks": ("AdamW", [("ddp_sharded", 2), ("ddp_sharded", 4), ("ddp_sharded", 1), ("ddp", 2), ("ddp_sharded", 2)]),
    "backends": ("AdamW", [("ddp_sharded", 2), ("fsdp2,wrap=Linear", 2), ("ddp_sharded", 4), ("fsdp2,wrap=Linear", 4)]),
    "whole": ("Adafactor", [("ddp_sharded", 2), ("ddp_sharded", 4), ("ddp_sharded", 1), ("ddp", 2)]),
    "home-made": ("home-made", [("ddp", 2), ("ddp_sharded", 4), ("ddp_sharded", 2), ("ddp_sharded", 1)]),
    "foreign": ("Adan", [("ddp_sharded", 2), ("ddp_sharded", 1), ("ddp", 2), ("ddp_sharded", 4)]),
    "zero": ("SGD with momentum", [("zero2", 2), ("ddp_sharded", 2), ("zero2", 4), ("ddp_sharded", 1)]),
}


@pytest.mark.parametrize("route", ROUTES)
def test_a_run_goes_on_at_other_rank_counts_and_under_other_backends(
    route: str, one_rank: RankPool, two_ranks: RankPool, four_ranks: RankPool, tmp_path: Path
) -> None:
    name, stops = ROUTES[route]
    pools = {1: one_rank, 2: two_ranks, 4: four_ranks}
    left: dict[str, torch.Tensor] = {}
    losses: list[float] = []
    for number, (line, ranks) in enumerate(stops):
        found, reached, mine = pools[ranks].run(leg, line, name, str(tmp_path), range(3 * number, 3 * number + 3))[0]
        assert found.keys() == left.keys()
        for key, tensor in left.items():
            assert torch.equal(found[key], tensor), (line, key)
        assert not any(tensor.isnan().any() for tensor in reached.values())
        left, losses = reached, losses + mine
    straight = pools[1].run(leg, "ddp", name, str(tmp_path / "straight"), range(3 * len(stops)))[0]
    if "zero" not in route:
        assert losses == pytest.approx(straight[2], rel=1e-4)
        assert losses[-1] < 0.97 * losses[0]


def prepared(line: str) -> tuple[str, float, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = Policed(line, "AdamW")
        run.train(range(2))
    inner = run.optimizer.optimizer
    return (
        type(inner).__name__,
        run.optimizer.param_groups[0]["lr"],
        [str(w.message) for w in caught if "lr_sch" in str(w.message)],
    )


def test_prepare_shards_a_plain_optimizer_and_its_schedule_goes_with_it(two_ranks: RankPool) -> None:
    for name, rate, warned in two_ranks.run(prepared, "ddp_sharded"):
        assert name == "ShardedOptimizer"
        assert rate == pytest.approx(2e-2 * 0.95**2)
        assert not warned
    assert two_ranks.run(prepared, "ddp")[0][0] == "AdamW"


def pure_bf16() -> tuple[set[torch.dtype], set[torch.dtype]]:
    accelerator = ShardingPolicy.load(
        "ddp_sharded,precision.master=bf16,precision.compute=bf16,precision.reduce=bf16"
    ).accelerator()
    net: Any = torch.nn.Linear(5, 3)
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    accelerator.backward(net(torch.ones(2, 5)).sum())
    optimizer.step()
    layout = accelerator.backend.layout(accelerator, net, optimizer)
    return {s.dtype for s in layout.weights.values()}, {s.dtype for t in layout.states.values() for s in t.values()}


def test_bf16_masters_of_a_policy_are_updated_as_such(two_ranks: RankPool) -> None:
    for weights, states in two_ranks.run(pure_bf16):
        assert weights == states == {torch.bfloat16}


def given_sharded(line: str) -> None:
    net = torch.nn.Linear(5, 3)
    accelerator = ShardingPolicy.load(line).accelerator()
    accelerator.prepare(net, ShardedOptimizer(net.parameters(), torch.optim.AdamW))


@pytest.mark.parametrize("line", ["ddp", "fsdp2,wrap=Linear", "zero2"])
def test_a_sharded_optimizer_under_a_policy_that_shards_otherwise(line: str, two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match="Use preset 'ddp_sharded', or the plain optimizer"):
        two_ranks.run(given_sharded, line)


def saved_by_accelerate(folder: str) -> None:
    Policed("ddp_sharded", "AdamW").accelerator.save_state(folder)


def test_what_keeps_one_ranks_share_only_is_refused(two_ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="keeps rank 0's share"):
        two_ranks.run(saved_by_accelerate, str(tmp_path))


class Needy(torch.optim.SGD):
    """Takes something that its defaults do not hold."""

    def __init__(self, params: Any, teacher: torch.nn.Module, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.teacher = teacher


def needy() -> None:
    net = torch.nn.Linear(5, 3)
    ShardingPolicy.load("ddp_sharded").accelerator().prepare(net, Needy(net.parameters(), net))


def test_an_optimizer_that_cannot_be_made_anew_says_how_to_shard_it(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"ShardedOptimizer\(params, lambda params: Needy\(params, ...\)\)"):
        two_ranks.run(needy)


def test_the_policy_makes_the_optimizer_that_it_needs() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    sharded = ShardingPolicy.load("ddp_sharded").optimizer([weight], torch.optim.SGD, lr=0.5)
    assert isinstance(sharded, ShardedOptimizer)
    assert sharded.param_groups[0]["lr"] == 0.5
    assert type(ShardingPolicy.load("fsdp2").optimizer([weight], torch.optim.SGD, lr=0.5)) is torch.optim.SGD


def test_the_policy_says_who_gets_gradients() -> None:
    weight = torch.nn.Parameter(torch.ones(2))

    def reduce(line: str, **how: str) -> str:
        optimizer = ShardingPolicy.load(line).optimizer([weight], torch.optim.SGD, lr=0.5, **how)
        assert type(optimizer) is ShardedOptimizer
        return str(optimizer.reduce)

    assert reduce("ddp_sharded") == reduce("ddp_sharded", reduce="all") == "all"
    assert reduce("ddp_sharded", reduce="owner") == reduce("ddp_sharded,gradient_reduce=owner") == "owner"
    assert reduce("ddp_sharded,gradient_reduce=owner", reduce="owner") == "owner"
    for line, how, words in (
        ("ddp_sharded,gradient_reduce=owner", "all", "Say it in one place"),
        ("ddp_sharded", "owners", "Allowed: all, owner"),
        (
            "ddp",
            "owner",
            "reduce is 'owner', and the policy has backend 'ddp' and shard 'none'.*Use preset 'ddp_sharded'",
        ),
        ("fsdp2", "all", "reduce is 'all', and the policy has backend 'fsdp'"),
    ):
        with pytest.raises(ValueError, match=words):
            reduce(line, reduce=how)


# ---- gradients to their owners only ----------------------------------------------------------------------------


def to_owners(name: str, always: bool) -> tuple[float, float, int, int]:
    """Differences to plain DDP and how far weights moved; bytes that other ranks got from this one, and all bytes."""
    found, counted = [], [0]
    kept = dist.all_to_all_single

    def all_to_all(output: torch.Tensor, given: torch.Tensor, *sizes: list[int], **options: Any) -> Any:
        counted[0] += (given.numel() - sizes[1][dist.get_rank()]) * given.element_size()
        return kept(output, given, *sizes, **options)

    for net, sharded in zip(twins(), (False, True), strict=True):
        start = copy.deepcopy(net.state_dict())
        optimizer: Any = make(name, three_groups(net), sharded=sharded, **({"reduce": "owner"} if sharded else {}))
        wrapped = DistributedDataParallel(net, find_unused_parameters=not always, bucket_cap_mb=0.001)
        if sharded:
            optimizer.attach(wrapped)
        with unittest.mock.patch("torch.distributed.all_to_all_single", all_to_all):
            norms = []
            for step in range(STEPS):
                for half in range(2):  # two micro-batches
                    tokens, labels = (mine(rows)[half::2] for rows in batch(step))
                    with contextlib.nullcontext() if half else wrapped.no_sync():
                        logits = wrapped(tokens, seldom=always or step % 3 == 1)
                        (torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) / 2).backward()
                clip = (
                    optimizer.clip_grad_norm_ if sharded else partial(torch.nn.utils.clip_grad_norm_, net.parameters())
                )
                norms.append(float(clip(0.5)))
                optimizer.step()
                optimizer.zero_grad()
        found.append((copy.deepcopy(net.state_dict()), norms))
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5)
    assert max(found[0][1]) > 0.5, "clipping must bite"
    trained = sum(p.numel() * p.element_size() for p in net.parameters() if p.requires_grad)
    return furthest(found[0][0], found[1][0]), furthest(start, found[1][0]), counted[0], trained


@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
@pytest.mark.parametrize("name", ["SGD with momentum", "AdamW", "Adafactor", "home-made"])
def test_gradients_that_go_to_their_owners_only_train_the_same(name: str, ranks: RankPool) -> None:
    outcome = ranks.run(to_owners, name, True)
    for difference, moved, _, _ in outcome:
        assert moved > 5e-3
        assert difference <= 1e-5  # ranks are summed in another order, and Adam divides what is small by itself
    sent = sum(counted for _, _, counted, _ in outcome)
    total = outcome[0][3]
    assert sent == STEPS * total * (ranks.world - 1), "each rank sends each element to its owner, once"


def owned(name: str) -> tuple[float, float]:
    """As :func:`side_by_side`, without clipping, whose norm is rounded otherwise."""
    # Centered, it divides by a variance, which where it is near 0 makes 5e-6 of the last bit of fp32.
    dtype = torch.float64 if name == "RMSprop" else torch.float32
    found, start = [], twins()[0].to(dtype).state_dict()
    for net, sharded in zip(twins(), (False, True), strict=True):
        net.to(dtype)
        optimizer: Any = make(name, three_groups(net), sharded=sharded, **({"reduce": "owner"} if sharded else {}))
        wrapped = DistributedDataParallel(net, bucket_cap_mb=0.001)
        if sharded:
            optimizer.attach(wrapped)
        for step in range(STEPS):
            tokens, labels = (mine(rows) for rows in batch(step))
            logits = wrapped(tokens, seldom=True)
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(net.state_dict())
    return furthest(*found), furthest(start, found[1])


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=WIDE), 3, pytest.param(4, marks=WIDE)], indirect=True)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_owners_come_to_the_weights_of_plain_ddp(name: str, ranks: RankPool) -> None:
    for difference, moved in ranks.run(owned, name):
        assert moved > 5e-3
        assert difference <= 1e-6


def test_gradients_of_a_part_that_is_seldom_used(two_ranks: RankPool) -> None:
    for difference, moved, _, _ in two_ranks.run(to_owners, "AdamW", False):
        assert moved > 5e-3
        assert difference <= 1e-5


def owner_policed(line: str, reduce: str | None) -> tuple[list[float], list[float]]:
    """Under a policy; None is a plain optimizer, which the policy alone shards."""
    accelerator = ShardingPolicy.load(line).accelerator()
    torch.manual_seed(5)
    net: Any = Net()
    plain = reduce is None
    optimizer: Any = (
        make("AdamW", three_groups(net), sharded=False)
        if plain
        else accelerator.policy.optimizer(three_groups(net), torch.optim.AdamW, lr=1e-2, reduce=reduce)
    )
    net, optimizer = accelerator.prepare(net, optimizer)
    assert isinstance(optimizer.optimizer, ShardedOptimizer)
    assert len(net._comm_hooks) == ((reduce or accelerator.policy.gradient_reduce) == "owner")
    losses, norms = [], []
    for step in range(2 * STEPS):
        tokens, labels = (mine(rows) for rows in batch(step))
        with accelerator.accumulate(net):
            logits = net(tokens, seldom=True)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            accelerator.backward(loss)
            if accelerator.sync_gradients and step % 4 == 1:  # else the policy clips by itself
                norms.append(float(accelerator.clip_grad_norm_(net.parameters())))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def test_a_policy_clips_shares_to_the_global_norm(two_ranks: RankPool) -> None:
    line = "ddp_sharded,gradient_clipping=0.5,gradient_accumulation_steps=2"
    wanted, found = two_ranks.run(owner_policed, line, "all"), two_ranks.run(owner_policed, line, "owner")
    assert two_ranks.run(owner_policed, f"{line},gradient_reduce=owner", None) == found, "the policy's word does it too"
    for (losses, norms), (again, shares) in zip(wanted, found, strict=True):
        assert again == pytest.approx(losses, rel=1e-4)
        assert shares == pytest.approx(norms, rel=1e-4)
        assert len(norms) == STEPS // 2
        assert max(norms) > 0.5
        assert losses[-1] < 0.9 * losses[0]


def misused(how: str) -> None:
    net = twins()[0]
    given = [p for p in net.parameters() if p is not net.scale or how != "no owner"]
    optimizer = ShardedOptimizer(given, torch.optim.AdamW, reduce="owner")
    wrapped = DistributedDataParallel(net)
    if how != "not attached":
        optimizer.attach(wrapped)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, enabled=how == "scaler")
    scaler.scale(wrapped(mine(batch(0)[0]), seldom=True).sum()).backward()
    if how == "read by mistake":
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        raise AssertionError(f"the norm is {float(norm)}")
    if how == "scaler":
        scaler.step(optimizer)
    optimizer.step()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("not attached", "the optimizer is not attached to the DDP model"),
        ("no owner", "no optimizer has the parameter 'scale'"),
        ("scaler", r"a GradScaler \(fp16\) with reduce 'owner'"),
        ("read by mistake", "the norm is nan"),
    ],
)
def test_what_shares_of_gradients_do_not_allow(how: str, words: str, two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match=words):
        two_ranks.run(misused, how)


def test_an_unknown_way_to_reduce_says_the_known_ones() -> None:
    with pytest.raises(ValueError, match="Allowed: all, owner"):
        ShardedOptimizer([torch.nn.Parameter(torch.ones(2))], torch.optim.SGD, lr=1.0, reduce="owners")


def compressed() -> None:
    accelerator = ShardingPolicy.load("ddp_sharded,gradient_compression=powersgd").accelerator()
    net = torch.nn.Linear(5, 3)
    accelerator.prepare(net, ShardedOptimizer(net.parameters(), torch.optim.AdamW, reduce="owner"))


def contradicted() -> None:
    accelerator = ShardingPolicy.load("ddp_sharded,gradient_reduce=owner").accelerator()
    net = torch.nn.Linear(5, 3)
    accelerator.prepare(net, ShardedOptimizer(net.parameters(), torch.optim.AdamW))


def test_an_optimizer_that_was_made_otherwise_than_the_policy_says(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match="was made with reduce 'all'"):
        two_ranks.run(contradicted)


def test_two_hooks_are_one_too_many(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match="DDP has one communication hook"):
        two_ranks.run(compressed)
