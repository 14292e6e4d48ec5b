"""A run stopped anywhere and resumed by fresh processes: the same samples, the same losses, the same weights, bit for bit.

Each case below is one in which Accelerate 1.15's own ``save_state`` and ``load_state`` go wrong by up to 3.7 in the
loss: they replay the first epoch's order, skip in the wrong one, or leave dropout with other random numbers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DataLoaderConfiguration
from rank_pool import RankPool
from torch.utils.data import DataLoader, Dataset, IterableDataset
from training import LENGTH, dataset, groups, tiny_llama, token_loss

from accel_shard import Checkpointer, ShardingPolicy

SAMPLES, SIZE, EPOCHS = 64, 4, 2


@pytest.fixture(scope="session")
def fresh_ranks() -> Iterator[RankPool]:
    """Two ranks that never see the first part of a run."""
    pool = RankPool(2)
    yield pool
    pool.stop()


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class Flow(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


def noisy(indices: list[int]) -> dict[str, torch.Tensor]:
    """Rows of numbers that depend on the sample, with noise that the collator draws, as masking does."""
    rows = torch.stack([torch.randn(6, generator=torch.Generator().manual_seed(i)) for i in indices])
    return {"id": torch.tensor(indices), "x": rows + 0.3 * torch.randn(rows.shape)}


def loader(kind: str, workers: int, size: int) -> DataLoader[Any]:
    # The pool's ranks were spawned, and so would their workers be; those of a launched script are forked.
    options: dict[str, Any] = {"num_workers": workers, "collate_fn": noisy}
    options |= {"multiprocessing_context": "fork"} if workers else {}
    if "stream" in kind:
        return DataLoader(Flow(), size, **options)
    return DataLoader(Rows(), size, shuffle=True, **options)


def settings(kind: str) -> DataLoaderConfiguration:
    return DataLoaderConfiguration(
        use_seedable_sampler="seedable" in kind,
        use_stateful_dataloader="stateful" in kind,
        dispatch_batches=True if "dispatched" in kind else None if "stream" not in kind else False,
    )


Seen = list[tuple[list[int], float]]


def small_run(
    folder: str, kind: str, workers: int, accumulation: int, stop: int | None, ask_after: int | None
) -> tuple[Seen, list[torch.Tensor]]:
    """Train two epochs as a user's loop does, from where the folder says; stop with a snapshot after ``stop`` steps."""
    torch.manual_seed(3)
    accelerator = ShardingPolicy.load(f"ddp,gradient_accumulation_steps={accumulation}").accelerator(
        dataloader_config=settings(kind)
    )
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)
    )
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule: Any = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 16)
    parts = (model, optimizer, loader(kind, workers, SIZE // accumulation), schedule)
    model, optimizer, prepared, schedule = accelerator.prepare(*parts)
    seen: Seen = []
    micro = 0
    with Checkpointer(accelerator, folder) as checkpointer:
        torch.manual_seed(random.randrange(1 << 30) if any(Path(folder).glob("step-*")) else 4)
        checkpointer.resume()
        for batch in checkpointer.batches(prepared, epochs=EPOCHS):
            with accelerator.accumulate(model):
                loss = (model(batch["x"]).squeeze(1) - batch["x"].sum(1)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            seen.append(
                (accelerator.gather(batch["id"]).tolist(), float(accelerator.gather(loss.detach()[None]).sum()))
            )
            micro += 1
            if micro == ask_after:
                assert checkpointer.save() is None, "inside a window"
            checkpointer.step()
            if checkpointer.steps == stop and accelerator.sync_gradients:
                checkpointer.save()
                break
    return seen, [p.detach().clone() for p in model.parameters()]


MIDDLE, BOUNDARY, SECOND = 3, 8, 11  # steps; an epoch has 8
CASES = {
    # name: kind, workers, accumulation, stop after step, micro-batch after which a save is asked for
    "default sampler, epoch 0": ("default", 0, 1, MIDDLE, None),
    "default sampler, epoch 1": ("default", 0, 1, SECOND, None),
    "default sampler, boundary": ("default", 0, 1, BOUNDARY, None),
    "default sampler, workers": ("default", 2, 1, SECOND, None),
    "seedable, epoch 0": ("seedable", 0, 1, MIDDLE, None),
    "seedable, epoch 1": ("seedable", 0, 1, SECOND, None),
    "seedable, boundary": ("seedable", 0, 1, BOUNDARY, None),
    "seedable, workers": ("seedable", 2, 1, MIDDLE, None),
    "seedable, workers, epoch 1": ("seedable", 2, 1, SECOND, None),
    "stateful, epoch 0": ("stateful", 0, 1, MIDDLE, None),
    "stateful, epoch 1": ("stateful", 0, 1, SECOND, None),
    "stateful, workers": ("stateful", 2, 1, MIDDLE, None),
    "stateful seedable, epoch 1": ("stateful seedable", 0, 1, SECOND, None),
    "stateful seedable, workers": ("stateful seedable", 2, 1, MIDDLE, None),
    "stream dispatched": ("stream dispatched", 0, 1, MIDDLE, None),
    "stream, workers, epoch 1": ("stream", 2, 1, SECOND, None),
    "accumulation, asked for inside a window": ("seedable", 0, 4, MIDDLE, 10),
    "accumulation, at a window's edge": ("seedable", 0, 4, SECOND, None),
}


@pytest.mark.parametrize("case", CASES)
def test_where_accelerates_own_resume_goes_wrong(
    case: str, two_ranks: RankPool, fresh_ranks: RankPool, tmp_path: Path
) -> None:
    kind, workers, accumulation, stop, ask_after = CASES[case]
    same = (kind, workers, accumulation)
    whole, weights = two_ranks.run(small_run, str(tmp_path / "whole"), *same, None, None)[0]
    first, _ = two_ranks.run(small_run, str(tmp_path / "parts"), *same, stop, ask_after)[0]
    rest, reached = fresh_ranks.run(small_run, str(tmp_path / "parts"), *same, None, None)[0]
    assert len(first) == stop * accumulation
    assert first + rest == whole
    assert all(torch.equal(a, b) for a, b in zip(weights, reached, strict=True))
    epoch = len(whole) // EPOCHS
    for part in (whole[:epoch], whole[epoch:]):
        assert sorted(i for ids, _ in part for i in ids) == list(range(SAMPLES)), "each sample once an epoch"


# ---- every policy, after any step ------------------------------------------------------------------------------

STEPS = 6  # of 8 samples; an epoch has 44, so one ends in the middle of the last step


def tokens_and_noise(rows: list[torch.Tensor]) -> torch.Tensor:
    """Tokens, a tenth of them replaced at random."""
    tokens = torch.stack(rows)
    return torch.where(torch.rand(tokens.shape) < 0.1, 0, tokens)


def policy_run(line: str, folder: str, source: str, every: int | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train a Llama with dropout from a snapshot on."""
    accelerator = ShardingPolicy.load(line).accelerator()
    model: Any = tiny_llama(dropout=0.2)
    optimizer: Any = torch.optim.AdamW(groups(model), lr=3e-3)
    schedule: Any = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    size = 8 // accelerator.num_processes
    options: Any = {"num_workers": 2, "multiprocessing_context": "fork"} if accelerator.num_processes == 2 else {}
    data: Any = DataLoader(list(dataset()), size, shuffle=True, collate_fn=tokens_and_noise, **options)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    model.train()
    losses = []
    with Checkpointer(accelerator, folder, every=every) as checkpointer:
        checkpointer.resume(source)
        batches = checkpointer.batches(data, seed=1)
        while checkpointer.steps < STEPS:
            tokens = next(batches)
            loss = token_loss(model, tokens, tokens) / (len(tokens) * (LENGTH - 1))
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
            checkpointer.step()
    return losses, {name: weight.detach().clone() for name, weight in accelerator.whole_weights(model)}


@pytest.mark.parametrize("line", ["ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3"])
def test_stopped_after_any_step_with_workers_and_dropout(
    line: str, two_ranks: RankPool, fresh_ranks: RankPool, tmp_path: Path
) -> None:
    losses, weights = two_ranks.run(policy_run, line, str(tmp_path), "none", 1)[0]
    assert len(set(losses)) == STEPS
    for step in range(1, STEPS):
        snapshot = str(tmp_path / f"step-{step:09d}")
        rest, reached = fresh_ranks.run(policy_run, line, str(tmp_path / "other"), snapshot, None)[0]
        assert rest == losses[step:], step
        assert all(torch.equal(weights[name], reached[name]) for name in weights), step


@pytest.mark.parametrize("line", ["ddp", "hsdp"])
def test_on_four_ranks_whose_sums_depend_on_their_order(line: str, four_ranks: RankPool, tmp_path: Path) -> None:
    losses, weights = four_ranks.run(policy_run, line, str(tmp_path), "none", 1)[0]
    four_ranks.stop()  # the next run starts fresh ones
    rest, reached = four_ranks.run(policy_run, line, str(tmp_path / "other"), str(tmp_path / "step-000000003"), None)[0]
    assert rest == losses[3:]
    assert all(torch.equal(weights[name], reached[name]) for name in weights)
