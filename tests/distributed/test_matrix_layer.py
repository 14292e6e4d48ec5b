"""What ``MatrixOptimizer`` does around its core: order of construction, odd parameters, odd gradients, traffic."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from matrix_training import BLOCK, Net, Orthogonal, Whitening, batch, groups, loss_of, mine, optimizer_for, weights_of
from rank_pool import RankError, RankPool
from torch.nn.parallel import DistributedDataParallel

from accel_shard.layout import Box, boxes_of_range
from accel_shard.optim.blocks import Grid
from accel_shard.optim.bucket import Ranks
from accel_shard.optim.core import Core, Cost
from accel_shard.optim.exchange import Exchange, Job, holders_of
from accel_shard.optim.matrix import MatrixOptimizer


class Plain(Core):
    """The gradient itself, so that the layer around it shows."""

    def state(self, shape: tuple[int, ...], settings: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def cost(self, shape: tuple[int, ...], settings: Mapping[str, Any]) -> Cost:
        return Cost(float(shape[0] * shape[1]))

    def direction(self, gradient: torch.Tensor, state: Any, settings: Mapping[str, Any], step: int) -> torch.Tensor:
        return gradient


# ---- the exchange, planned for ranks that are not there ------------------------------------------------------------


@given(st.integers(1, 30), st.integers(1, 9), st.integers(2, 9), st.integers(1, 7), st.data())
def test_every_element_goes_to_its_owner_once_and_back(
    rows: int, columns: int, ranks: int, size: int, data: st.DataObject
) -> None:
    """For a flat range a rank, as FSDP1 and ZeRO have it, cut anywhere."""
    total = rows * columns
    cuts = sorted(data.draw(st.lists(st.integers(0, total), min_size=ranks - 1, max_size=ranks - 1)))
    ranges = list(zip([0, *cuts], [*cuts, total], strict=True))
    holders = holders_of([boxes_of_range((rows, columns), *span) for span in ranges])
    jobs = [Job(0, block, data.draw(st.integers(0, ranks - 1))) for block in Grid(size).blocks((rows, columns))]
    everyones = [Exchange(jobs, [holders], Ranks(None, rank, ranks)) for rank in range(ranks)]
    whole = torch.arange(total).view(rows, columns)
    seen, back = torch.zeros(rows, columns), torch.zeros(rows, columns)
    for rank, exchange in enumerate(everyones):
        for source, pieces in enumerate(exchange.gradients.incoming):
            assert pieces == everyones[source].gradients.outgoing[rank]
        arrived = exchange.gradients.local + [p for pieces in exchange.gradients.incoming for p in pieces]
        assert {p.job for p in arrived} <= {i for i, job in enumerate(jobs) if job.owner == rank}
        for piece in arrived:
            seen[piece.box.slices()] += 1
        start, stop = ranges[rank]
        for piece in exchange.updates.local + [p for pieces in exchange.updates.incoming for p in pieces]:
            back[piece.box.slices()] += 1
            assert ((whole[piece.box.slices()] >= start) & (whole[piece.box.slices()] < stop)).all()
    assert (seen == 1).all()
    assert (back == 1).all()


def test_replicas_send_alike_much() -> None:
    """Hybrid sharding of two replicas: nobody sends to the other one's owners, and both do the same."""
    halves = [boxes_of_range((16, 8), 0, 64), boxes_of_range((16, 8), 64, 128)]
    holders = holders_of([*halves, *halves])
    jobs = [Job(0, block, i % 4) for i, block in enumerate(Grid(4).blocks((16, 8)))]
    everyones = [Exchange(jobs, [holders], Ranks(None, rank, 4)) for rank in range(4)]
    for rank, exchange in enumerate(everyones):
        others = [target for target, pieces in enumerate(exchange.gradients.outgoing) if pieces]
        assert others == [rank ^ 1]
        assert exchange.gradients.sent == 16


# ---- traffic, on ranks ---------------------------------------------------------------------------------------------


def sent_and_held(name: str, size: int) -> tuple[dict[str, int], int, int, list[int]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(48, 48, bias=False) for _ in range(6)))
    count = sum(p.numel() for p in model.parameters())
    if name == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    else:
        model = DistributedDataParallel(model)
    optimizer = MatrixOptimizer(model.parameters(), Orthogonal(), max_preconditioner_dim=size)
    sizes: list[int] = []

    def counted(output: Any, sent: Any, into: Any, out: Any, **options: Any) -> Any:
        sizes.append(sent.numel())
        return real(output, sent, into, out, **options)

    def told(part: Any, src: int, **options: Any) -> Any:
        if src == dist.get_rank():
            sizes.append(part.numel() * (dist.get_world_size() - 1))
        return broadcast(part, src, **options)

    real, broadcast = dist.all_to_all_single, dist.broadcast
    dist.all_to_all_single, dist.broadcast = counted, told
    try:
        model(torch.randn(4, 48)).square().sum().backward()
        optimizer.step()
    finally:
        dist.all_to_all_single, dist.broadcast = real, broadcast
    return optimizer.statistics(), optimizer.state_bytes(), count, sizes


def test_what_is_sent_under_fsdp(four_ranks: RankPool) -> None:
    """At most two P / N elements a rank, counted at the collective, and the state is shared out."""
    for statistics, held, count, sizes in four_ranks.run(sent_and_held, "fsdp2", 24):
        assert sum(sizes) == statistics["gradients_sent"] + statistics["updates_sent"]
        assert 0 < sum(sizes) <= 2 * count / 4
        assert held == 4 * count / 4


def test_nothing_is_sent_where_shards_are_whole_blocks(four_ranks: RankPool) -> None:
    for statistics, held, count, sizes in four_ranks.run(sent_and_held, "fsdp2", 12):
        assert (statistics["gradients_sent"], statistics["updates_sent"], sum(sizes)) == (0, 0, 0)
        assert held == 4 * count / 4


def test_what_is_sent_under_ddp(four_ranks: RankPool) -> None:
    """Gradients are everywhere; each rank sends its updates to the three others."""
    for statistics, held, count, sizes in four_ranks.run(sent_and_held, "ddp", 12):
        assert statistics["gradients_sent"] == 0
        assert sum(sizes) == statistics["updates_sent"] == 3 * count / 4
        assert held == 4 * count / 4


# ---- any order -----------------------------------------------------------------------------------------------------


def step_by_step(model: Any, optimizer: Any, net: Net, steps: int = 4) -> dict[str, torch.Tensor]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(0, 3 * steps, 3):  # the steps in which every part is used
        tokens, labels = (mine(rows, rank, ranks) for rows in batch(step))
        loss_of(model, tokens, labels, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for n, p in net.named_parameters()}


def in_order(order: str, kind: str) -> dict[str, torch.Tensor]:
    """Plain torch and Accelerate, without a policy."""
    from accelerate import Accelerator
    from torch.distributed.fsdp import fully_shard

    net: Any = Net()
    if order == "before":
        optimizer: Any = optimizer_for(net, "whitening")
    model: Any = net
    if kind == "accelerate":
        accelerator = Accelerator(cpu=True)
        if order == "before":
            model, optimizer = accelerator.prepare(net, optimizer)
        else:
            model = accelerator.prepare(net)
            optimizer = accelerator.prepare(optimizer_for(net, "whitening"))
    else:
        # As a move to a device does: other memory behind the same parameters.
        for parameter in net.parameters():
            parameter.data = parameter.data.clone()
        if kind == "ddp":
            model = DistributedDataParallel(net)
        else:
            fully_shard(net)
        if order == "after":
            optimizer = optimizer_for(net, "whitening")
    return step_by_step(model, optimizer, net)


@pytest.mark.parametrize(("order", "kind"), [
    ("before", "ddp"), ("after", "ddp"), ("after", "fsdp2"), ("before", "accelerate"), ("after", "accelerate"),
])  # fmt: skip
def test_built_before_or_after(order: str, kind: str, two_ranks: RankPool) -> None:
    model = Net()
    optimizer = optimizer_for(model, "whitening")
    for step in range(0, 12, 3):
        loss_of(model, *batch(step), step).backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights in two_ranks.run(in_order, order, kind):
        for name, weight in weights_of(model).items():
            assert float((weights[name] - weight).abs().max()) <= 1e-5, name
            moved = float((weight - dict(Net().named_parameters())[name]).abs().max())
            assert name.startswith("frozen") or moved > 1e-3


def flattened() -> None:
    """What FSDP1 and DeepSpeed do to a group."""
    net = torch.nn.Linear(4, 4, bias=False)
    optimizer = MatrixOptimizer(net.parameters(), Orthogonal())
    flat = torch.nn.Parameter(torch.zeros(8))
    flat.grad = torch.ones(8)
    optimizer.param_groups[0]["params"] = [flat]
    optimizer.step()


def test_flat_tensors_without_our_policy_are_refused() -> None:
    with pytest.raises(ValueError, match=r"has flattened the parameters.*accelerator\(\)"):
        flattened()


# ---- odd parameters ------------------------------------------------------------------------------------------------


def one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()


def test_channels_last_trains_as_contiguous() -> None:
    torch.manual_seed(0)
    plain = torch.nn.Conv2d(4, 6, 3)
    other = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    assert not other.weight.is_contiguous()
    start = weights_of(plain)["weight"]
    for model in (plain, other):
        optimizer = MatrixOptimizer(model.parameters(), Whitening(), lr=0.05, period=2, max_preconditioner_dim=4)
        for seed in range(3):
            data = torch.randn(5, 4, 8, 8, generator=torch.Generator().manual_seed(seed))
            one_step(model, optimizer, data)
    torch.testing.assert_close(other.weight, plain.weight, rtol=1e-5, atol=1e-5)
    assert float((plain.weight - start).abs().max()) > 1e-2


def test_bf16_weights_are_rounded_once_and_have_states_in_fp32() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 6).to(torch.bfloat16)
    optimizer = MatrixOptimizer(model.parameters(), Plain(), lr=0.1, weight_decay=0.5)
    before = model.weight.detach().clone()
    model(torch.randn(4, 8, dtype=torch.bfloat16)).float().square().sum().backward()
    gradient = model.weight.grad
    assert gradient is not None
    wanted = (before.float() * (1 - 0.1 * 0.5) - 0.1 * gradient.float()).to(torch.bfloat16)
    optimizer.step()
    assert torch.equal(model.weight, wanted)
    assert {value.dtype for value in optimizer.state_dict()["state"][1].values() if hasattr(value, "dtype")} == {
        torch.float32
    }


def test_decay_in_the_gradient() -> None:
    model = torch.nn.Linear(8, 6, bias=False)
    optimizer = MatrixOptimizer(model.parameters(), Plain(), lr=0.1, weight_decay=0.5, decoupled_weight_decay=False)
    before, model.weight.grad = model.weight.detach().clone(), torch.ones(6, 8)
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before - 0.1 * (1.0 + 0.5 * before))


def test_the_built_in_adamw_is_torchs() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)).double()
    twin = copy.deepcopy(model)
    ours = MatrixOptimizer(
        [{"params": model.parameters(), "core": "adamw"}], Plain(), lr=0.1, weight_decay=0.1, adamw_betas=(0.8, 0.99)
    )
    theirs = torch.optim.AdamW(twin.parameters(), lr=0.1, weight_decay=0.1, betas=(0.8, 0.99))
    for seed in range(5):
        data = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        one_step(model, ours, data)
        one_step(twin, theirs, data)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_its_learning_rate_has_a_factor_of_its_own() -> None:
    model = torch.nn.Linear(4, 3)
    model.weight.grad, model.bias.grad = torch.ones(3, 4), torch.ones(3)
    before = weights_of(model)
    MatrixOptimizer(model.parameters(), Plain(), lr=0.1, weight_decay=0.5, adamw_lr_factor=0.01).step()
    torch.testing.assert_close(model.weight.detach(), before["weight"] * 0.95 - 0.1)
    torch.testing.assert_close(model.bias.detach(), before["bias"] * (1 - 0.0005) - 0.001)


def test_a_group_that_comes_later_and_a_closure() -> None:
    torch.manual_seed(0)
    first, second = torch.nn.Linear(6, 6, bias=False), torch.nn.Linear(6, 6, bias=False)
    optimizer = MatrixOptimizer(first.parameters(), Orthogonal(), lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = second(first(torch.ones(2, 6))).square().mean()
        loss.backward()
        return loss.item()

    start = [first.weight.detach().clone(), second.weight.detach().clone()]
    begun = optimizer.step(closure)
    assert torch.equal(second.weight, start[1])
    optimizer.add_param_group({"params": second.parameters(), "lr": 0.2})
    for _ in range(5):
        ended = optimizer.step(closure)
    assert ended < 0.9 * begun
    assert float((second.weight - start[1]).detach().abs().max()) > 0.1
    assert [state["step"] for state in optimizer.state_dict()["state"].values()] == [6, 5]


def test_what_changes_under_it_is_refused() -> None:
    model = torch.nn.Linear(8, 8, bias=False)
    optimizer = MatrixOptimizer(model.parameters(), Orthogonal(), max_preconditioner_dim=4)
    one_step(model, optimizer, torch.ones(2, 8))
    optimizer.param_groups[0]["max_preconditioner_dim"] = 2
    with pytest.raises(ValueError, match="max_preconditioner_dim of group 0 is 2 and was 4 at the first step"):
        one_step(model, optimizer, torch.ones(2, 8))
    optimizer.param_groups[0]["max_preconditioner_dim"] = 4
    kept = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = [torch.nn.Parameter(torch.zeros(8, 8))]
    with pytest.raises(ValueError, match="was replaced, cast or moved after the first step"):
        optimizer.step()
    optimizer.param_groups[0]["params"] = kept
    model.double()
    with pytest.raises(ValueError, match=r"its state is of torch\.float32"):
        optimizer.step()


def test_heads_are_matrices_of_their_own() -> None:
    torch.manual_seed(0)
    whole = torch.nn.Parameter(torch.randn(12, 8))
    heads = [torch.nn.Parameter(part.clone()) for part in whole.detach().chunk(3)]
    together = MatrixOptimizer([{"params": [whole], "heads": 3}], Orthogonal(), lr=0.1)
    apart = MatrixOptimizer(heads, Orthogonal(), lr=0.1)
    for step in range(3):
        whole.grad = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
        for head, gradient in zip(heads, whole.grad.chunk(3), strict=True):
            head.grad = gradient.clone()
        together.step()
        apart.step()
    assert torch.equal(whole, torch.cat(heads))


def test_refreshes_are_spread_over_a_period_whatever_the_order_of_groups() -> None:
    """A group that was added late is refreshed as if it had been there: a resumed run has it from the start."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(2 * BLOCK, 2 * BLOCK)) for _ in range(4)]
    at_once = MatrixOptimizer(
        [{"params": [p]} for p in parameters], Whitening(), period=4, max_preconditioner_dim=BLOCK
    )
    later = MatrixOptimizer([{"params": parameters[:1]}], Whitening(), period=4, max_preconditioner_dim=BLOCK)
    later.bind()
    for parameter in parameters[1:]:
        later.add_param_group({"params": [parameter]})
    counts = []
    for step in range(9):
        for optimizer in (at_once, later):
            for parameter in parameters:
                parameter.grad = torch.randn(2 * BLOCK, 2 * BLOCK, generator=torch.Generator().manual_seed(step))
            optimizer.step()
        counts.append(at_once.statistics()["refreshes"])
    assert counts == [16 + 4 * step for step in range(9)]
    for one, other in zip(at_once.state_dict()["state"].values(), later.state_dict()["state"].values(), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one if key.startswith("left"))


# ---- odd gradients -------------------------------------------------------------------------------------------------


def bad_gradient(sharded: bool, nonfinite: str) -> tuple[str, bool, int]:
    """One rank only has a NaN, where it is sharded. Returns the message, and whether anything changed."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    net: Any = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    if sharded:
        fully_shard(net)
    optimizer = MatrixOptimizer(net.parameters(), Whitening(), period=2, nonfinite=nonfinite)
    net(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
    local = [getattr(p, "_local_tensor", p) for p in net.parameters()]
    before = [p.detach().clone() for p in local]
    states = copy.deepcopy(optimizer.state_dict()["state"])
    first = next(net.parameters()).grad
    if not sharded or dist.get_rank() == 1:
        getattr(first, "_local_tensor", first)[0, 0] = torch.nan
    message = ""
    try:
        optimizer.step()
    except ValueError as error:
        message = str(error)
    same = all(torch.equal(a, b) for a, b in zip(before, local, strict=True))
    for number, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            same &= torch.equal(value, states[number][key]) if key != "step" else value == states[number][key]
    return message, same, optimizer.statistics()["skipped"]


@pytest.mark.parametrize("sharded", [True, False])
def test_a_gradient_that_is_not_finite_is_refused_on_every_rank(sharded: bool, two_ranks: RankPool) -> None:
    for message, same, skipped in two_ranks.run(bad_gradient, sharded, "raise"):
        assert "not finite (number 0 of group 0 (8, 8))" in message
        assert same
        assert skipped == 1
    for message, same, skipped in two_ranks.run(bad_gradient, sharded, "skip"):
        assert (message, same, skipped) == ("", True, 1)


def on_one_rank(sharded: bool) -> list[torch.Tensor]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    net: Any = torch.nn.Linear(6, 4, bias=False)
    if sharded:
        fully_shard(net)
    optimizer = MatrixOptimizer(net.parameters(), Plain(), lr=1.0)
    net(torch.ones(2, 6)).sum().backward()
    if dist.get_rank() == 1:
        net.weight.grad = None
    before = net.weight.full_tensor() if sharded else net.weight.detach().clone()
    optimizer.step()
    return [before.detach(), (net.weight.full_tensor() if sharded else net.weight).detach()]


def test_a_gradient_on_some_ranks_only(two_ranks: RankPool) -> None:
    """Where each has its own part it counts as zero; where all have all of it somebody has made a mistake."""
    for before, after in two_ranks.run(on_one_rank, True):
        torch.testing.assert_close(after[:2], before[:2] - 2.0)
        assert torch.equal(after[2:], before[2:])
    with pytest.raises(RankError, match="has a gradient on some ranks only"):
        two_ranks.run(on_one_rank, False)


def in_bf16() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    ends = []
    for dtype in (None, torch.bfloat16):
        net = Net()
        optimizer = MatrixOptimizer(
            groups(net), Orthogonal(), lr=2e-2, max_preconditioner_dim=BLOCK, communication_dtype=dtype
        )
        step_by_step(DistributedDataParallel(net), optimizer, net, 2)
        ends.append([p.detach().clone() for p in net.parameters()])
    return ends[0], ends[1]


def test_updates_in_bf16_leave_the_ranks_alike(two_ranks: RankPool) -> None:
    results = two_ranks.run(in_bf16)
    for exact, rounded in results:
        worst = max(float((a - b).abs().max()) for a, b in zip(exact, rounded, strict=True))
        assert 0.0 < worst < 1e-3
    for one, other in zip(results[0][1], results[1][1], strict=True):
        assert torch.equal(one, other)


def test_kept_roots_are_counted() -> None:
    class Keeps(Whitening):
        def refresh(self, state: Any, settings: Mapping[str, Any], step: int) -> Any:
            new, keep = super().refresh(state, settings, step)
            return {
                name: torch.full_like(value, torch.nan) for name, value in new.items()
            } if step > 1 else new, keep | (step > 1)

    model = torch.nn.Linear(8, 8, bias=False)
    optimizer = MatrixOptimizer(model.parameters(), Keeps(), period=1, max_preconditioner_dim=4)
    for _ in range(3):
        one_step(model, optimizer, torch.ones(2, 8))
    assert optimizer.statistics()["refreshes"] == 12
    assert optimizer.statistics()["kept"] == 8
    assert bool(model.weight.isfinite().all())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nonfinite": "ignore"}, "unknown nonfinite 'ignore'"),
        ({"max_preconditioner_dim": 0}, "max_preconditioner_dim is 0"),
        ({"heads": 3}, "heads is 3"),
        ({"core": "muon"}, "core is 'muon'"),
    ],
)
def test_settings_that_are_not_allowed(options: dict[str, Any], words: str) -> None:
    model = torch.nn.Linear(8, 8, bias=False)
    group = {"params": model.parameters(), **{key: value for key, value in options.items() if key == "core"}}
    rest = {key: value for key, value in options.items() if key != "core"}
    with pytest.raises(ValueError, match=words):
        MatrixOptimizer([group], Plain(), **rest).bind()


def test_boxes_of_one_row_and_no_elements() -> None:
    """What FSDP2 makes of a matrix of one row: all of it is on the first rank."""
    holders = holders_of([[Box((0, 0), (1, 5))], [], []])
    jobs = [Job(0, block, 2) for block in Grid().blocks((1, 5))]
    sent = [Exchange(jobs, [holders], Ranks(None, rank, 3)).gradients.sent for rank in range(3)]
    assert sent == [5, 0, 0]


def prepared_under(line: str) -> None:
    from accel_shard import ShardingPolicy

    model = torch.nn.Linear(8, 8, bias=False)
    ShardingPolicy.load(line).accelerator().prepare(model, MatrixOptimizer(model.parameters(), Plain()))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ddp_sharded,gradient_reduce=owner", "the MatrixOptimizer needs whole gradients"),
        ("ddp,local_sgd=4", "local_sgd is 4 and the optimizer is a MatrixOptimizer"),
    ],
)
def test_policies_that_keep_gradients_apart_are_refused(line: str, words: str, two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match=words):
        two_ranks.run(prepared_under, line)
