"""``local_sgd``: ranks that train by themselves and average their weights now and then, against loops in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from listening import listening
from rank_pool import RankError, RankPool
from training import put_together

from accel_shard import Checkpointer, ShardingPolicy
from accel_shard.explain import explain_policy

STEPS, PERIOD = 10, 4


def tower() -> torch.nn.Sequential:
    """With statistics that each rank gathers for itself."""
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 9, bias=False), torch.nn.BatchNorm1d(9), torch.nn.Tanh(), torch.nn.Linear(9, 4)
    )  # fmt: skip


def rows(step: int, micro: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + micro)
    x = torch.randn(16, 6, generator=generator)
    y = torch.sin(2 * x[:, :4]) + torch.randn(16, 4, generator=generator) / 10
    return x[rank::ranks], y[rank::ranks]


def by_hand(ranks: int, steps: int, micros: int = 1, clip: float | None = None) -> list[dict[str, torch.Tensor]]:
    """Every rank's model in one process: each steps on its own rows, and weights become their mean now and then."""
    models = [tower() for _ in range(ranks)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for micro in range(micros):
                x, y = rows(step, micro, rank, ranks)
                (torch.nn.functional.mse_loss(model(x), y) / micros).backward()
            if clip is not None:
                assert torch.nn.utils.clip_grad_norm_(model.parameters(), clip) > clip
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % PERIOD == 0:
            with torch.no_grad():
                for parameters in zip(*(model.parameters() for model in models), strict=True):
                    mean = sum(p.detach().clone() for p in parameters) / ranks
                    for p in parameters:
                        p.copy_(mean)
    return [model.state_dict() for model in models]


class Run:
    """The plain loop of README, which knows nothing of local SGD."""

    def __init__(self, line: str = f"ddp,local_sgd={PERIOD}") -> None:
        self.accelerator = ShardingPolicy.load(line).accelerator()
        model: Any = tower()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        if "fsdp2" not in line:  # where Accelerate takes both at once only
            self.accelerator.prepare(self.optimizer)  # once more, which must change nothing

    def train(self, steps: range) -> None:
        micros = self.accelerator.gradient_accumulation_steps
        for step in steps:
            for micro in range(micros):
                with self.accelerator.accumulate(self.model):
                    x, y = rows(step, micro, dist.get_rank(), dist.get_world_size())
                    self.accelerator.backward(torch.nn.functional.mse_loss(self.model(x), y))
                    self.optimizer.step()
                    self.optimizer.zero_grad()

    def held(self) -> dict[str, torch.Tensor]:
        """All that decides how this rank goes on."""
        found = dict(self.accelerator.unwrap_model(self.model).state_dict())
        layout = self.accelerator.backend.layout(self.accelerator, self.model, self.optimizer)
        found |= {key: s.parts[0][1] for key, s in layout.tensors() if key.startswith("optim.")}
        return {key: tensor.detach().clone() for key, tensor in found.items()}

    def of_all_ranks(self) -> dict[str, torch.Tensor]:
        layout = self.accelerator.backend.layout(self.accelerator, self.model, self.optimizer)
        layout.buffers = {}  # one of them is a whole number
        return put_together(layout)


def trained(line: str, steps: int, ending: bool = False) -> dict[str, torch.Tensor]:
    run = Run(line)
    run.train(range(steps))
    if ending:
        for finish in run.accelerator.before_end:
            finish()
    return {name: t.clone() for name, t in run.accelerator.unwrap_model(run.model).state_dict().items()}


@pytest.mark.parametrize(
    ("line", "micros", "clip"),
    [("", 1, None), (",gradient_accumulation_steps=2", 2, None), (",gradient_clipping=0.05", 1, 0.05)],
)
def test_ranks_train_apart_and_average_now_and_then(
    line: str, micros: int, clip: float | None, two_ranks: RankPool
) -> None:
    wanted = two_ranks.run(by_hand, 2, STEPS, micros, clip)[0]
    found = two_ranks.run(trained, f"ddp,local_sgd={PERIOD}{line}", STEPS)
    for one, other in zip(wanted, found, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(found[0]["0.weight"], found[1]["0.weight"]), "two steps after the last average"
    assert not torch.equal(found[0]["1.running_mean"], found[1]["1.running_mean"])
    together = two_ranks.run(trained, f"ddp,local_sgd={PERIOD}{line}", 2 * PERIOD)
    assert torch.equal(together[0]["0.weight"], together[1]["0.weight"])
    plain = two_ranks.run(trained, f"ddp{line}", 2 * PERIOD)
    assert not torch.equal(plain[0]["0.weight"], together[0]["0.weight"])


def test_on_four_ranks_and_at_the_end_of_training(four_ranks: RankPool) -> None:
    wanted = by_hand(4, STEPS)
    for one, other in zip(wanted, four_ranks.run(trained, f"ddp,local_sgd={PERIOD}", STEPS), strict=True):
        assert max(float((one[n].float() - other[n].float()).abs().max()) for n in one) < 1e-6
    ended = four_ranks.run(trained, f"ddp,local_sgd={PERIOD}", STEPS, True)
    mean = sum(one["0.weight"] for one in wanted) / 4
    for theirs in ended:
        assert torch.equal(theirs["0.weight"], ended[0]["0.weight"])
        assert float((theirs["0.weight"] - mean).abs().max()) < 1e-6


def by_accelerates_own() -> dict[str, torch.Tensor]:
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    accelerator = Accelerator(cpu=True)
    model: Any = tower()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=PERIOD) as local:
        for step in range(2 * PERIOD):
            x, y = rows(step, 0, dist.get_rank(), dist.get_world_size())
            accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            local.step()
    return {name: t.clone() for name, t in accelerator.unwrap_model(model).state_dict().items()}


def test_it_is_what_accelerates_own_class_does(two_ranks: RankPool) -> None:
    wanted = two_ranks.run(by_accelerates_own)
    for one, other in zip(wanted, two_ranks.run(trained, f"ddp,local_sgd={PERIOD}", 2 * PERIOD), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def gathered() -> tuple[int, int, int]:
    """How many elements are averaged in the steps, and what a forward and backward of this model sends beside."""
    run, counted, kept = Run(), [0], dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        counted[0] += tensor.numel()
        return kept(tensor, *args, **options)

    dist.all_reduce = all_reduce
    try:
        run.train(range(PERIOD - 1))
        before = counted[0]
        run.train(range(PERIOD - 1, PERIOD))
    finally:
        dist.all_reduce = kept
    return before, counted[0], sum(p.numel() for p in run.model.parameters())


def test_weights_are_sent_once_a_period_and_gradients_never(two_ranks: RankPool) -> None:
    for before, after, numel in two_ranks.run(gathered):
        assert before == 0
        assert after == numel


# ---- snapshots -------------------------------------------------------------------------------------------------


def saved(folder: str, at: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Save after ``at`` steps and go on to the end; what was held then and at the end."""
    run = Run()
    with Checkpointer(run.accelerator, folder) as checkpointer:
        run.train(range(at))
        checkpointer.steps = at
        checkpointer.save()
        then = run.held()
        run.train(range(at, STEPS))
    return then, run.held()


def resumed(folder: str, line: str, at: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[str]]:
    run = Run(line)
    with Checkpointer(run.accelerator, folder) as checkpointer, listening() as said:
        assert checkpointer.resume()
        assert checkpointer.steps == at
        found = run.held() if line.startswith("ddp") else run.of_all_ranks()
        if "local_sgd" in line:
            run.train(range(at, STEPS))
    return found, run.held() if line.startswith("ddp") else {}, list(said)


@pytest.mark.parametrize("at", [PERIOD + 2, 2 * PERIOD], ids=["apart", "just averaged"])
def test_as_many_ranks_go_on_exactly(at: int, two_ranks: RankPool, tmp_path: Path) -> None:
    straight = two_ranks.run(saved, str(tmp_path), at)
    again = two_ranks.run(resumed, str(tmp_path), f"ddp,local_sgd={PERIOD}", at)
    for (then, end), (found, reached, said) in zip(straight, again, strict=True):
        assert not said
        assert then.keys() == found.keys()
        assert all(torch.equal(then[key], found[key]) for key in then)
        assert all(torch.equal(end[key], reached[key]) for key in end)
    (first, _), (second, _) = straight
    assert torch.equal(first["0.weight"], second["0.weight"]) == (at % PERIOD == 0)
    assert not torch.equal(first["optim.0.weight.exp_avg"], second["optim.0.weight.exp_avg"]), "state is never averaged"


@pytest.mark.parametrize(
    ("line", "ranks", "words"),
    [
        (f"ddp,local_sgd={PERIOD}", 4, "2 ranks that had trained apart for 2 steps; now all 4 get the mean"),
        ("ddp", 2, "have no place under policy [ddp] and were left (first: local_sgd.model"),
        ("fsdp2,wrap=Linear", 2, "were left (first: local_sgd.model"),
    ],
)
def test_others_get_the_mean_and_are_told(
    line: str, ranks: int, words: str, two_ranks: RankPool, four_ranks: RankPool, tmp_path: Path
) -> None:
    at = PERIOD + 2
    (first, _), (second, _) = two_ranks.run(saved, str(tmp_path), at)
    results = {2: two_ranks, 4: four_ranks}[ranks].run(resumed, str(tmp_path), line, at)
    assert any(words in text for *_, said in results for text in said)
    for found, _, _ in results:
        for name in ("0.weight", "3.bias"):
            mean = (first[name] + second[name]) / 2
            assert torch.equal(found[name] if name in found else found[f"model.{name}"], mean)
        for key in ("optim.0.weight.exp_avg", "optim.3.weight.exp_avg_sq"):
            assert torch.equal(found[key], (first[key] + second[key]) / 2)


def whole() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    run = Run()
    run.train(range(STEPS))
    return {n: w.clone() for n, w in run.accelerator.whole_weights(run.model)}, run.held()


def test_whole_weights_are_the_mean(two_ranks: RankPool) -> None:
    (weights, mine), (again, theirs) = two_ranks.run(whole)
    for name, weight in weights.items():
        assert torch.equal(weight, again[name])
        assert torch.equal(weight, (mine[name] + theirs[name]) / 2)


class Halves(torch.nn.Module):
    """Each rank trains another half."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) if dist.get_rank() == 0 else self.two(x)


def unlike(folder: str) -> None:
    accelerator = ShardingPolicy.load("ddp,local_sgd=4").accelerator()
    model: Any = Halves()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(2, 3)).sum())
    optimizer.step()
    Checkpointer(accelerator, folder).save()


def by_accelerate(folder: str) -> None:
    Run().accelerator.save_state(folder)


def test_what_cannot_be_kept_is_refused(two_ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"ranks 0 and 1 have optimizer states of different parameters \(optim.one"):
        two_ranks.run(unlike, str(tmp_path))
    with pytest.raises(RankError, match="keeps rank 0's own training state"):
        two_ranks.run(by_accelerate, str(tmp_path))


def test_explain_says_it() -> None:
    text = explain_policy(ShardingPolicy.load("ddp,local_sgd=8,gradient_clipping=1.0"))
    assert "whose gradients stay where they are" in text
    assert "each rank clips by the norm of its own gradients" in text
