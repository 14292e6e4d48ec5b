"""What a Checkpointer keeps beside tensors: the best snapshot, the trackers' run, the place in the data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankError, RankPool
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from accel_shard import Checkpointer, ShardingPolicy


def prepared(**options: Any) -> tuple[Any, Any, Any]:
    accelerator = ShardingPolicy.load("ddp").accelerator(**options)
    model: Any = torch.nn.Linear(3, 3)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return accelerator, model, optimizer


def scored(folder: str, scores: list[float | None], mode: str, resume: bool) -> tuple[str | None, list[str]]:
    """Ranks give scores of their own; rank 0's count."""
    accelerator, _, _ = prepared()
    with Checkpointer(accelerator, folder, keep=1, best=mode) as checkpointer:
        if resume:
            checkpointer.resume()
        for score in scores:
            checkpointer.step(score=None if score is None else score + 100 * accelerator.process_index)
            checkpointer.wait()
        best = checkpointer.best()
    return best.name if best else None, sorted(p.name for p in Path(folder).iterdir())


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_best_is_saved_and_stays(mode: str, two_ranks: RankPool, tmp_path: Path) -> None:
    sign = 1 if mode == "min" else -1
    scores = [sign * s if s is not None else None for s in (3.0, math.nan, 2.0, 2.5, None, 2.0)]
    (best, names), _ = two_ranks.run(scored, str(tmp_path), scores, mode, False)
    assert best == "step-000000003", "of equals, the one that was there"
    assert names == ["step-000000003"], "worse ones are not saved, and the first went when a better one was there"
    (best, names), _ = two_ranks.run(scored, str(tmp_path), [sign * 2.2, sign * 1.0, None], mode, True)
    assert best == "step-000000005", "after a resume only what beats the earlier launch's best counts"
    assert names == ["step-000000005"]


def best_and_newest(folder: str) -> list[str]:
    accelerator, _, _ = prepared()
    with Checkpointer(accelerator, folder, every=1, keep=1, best="min") as checkpointer:
        for score in (5.0, 1.0, 4.0, 3.0):
            checkpointer.step(score=score)
            checkpointer.wait()
    return sorted(p.name for p in Path(folder).iterdir())


def test_the_best_stays_beside_the_newest_and_one_of_another_run_does_not(two_ranks: RankPool, tmp_path: Path) -> None:
    names, _ = two_ranks.run(best_and_newest, str(tmp_path))
    assert names == ["step-000000002", "step-000000004"]
    (best, names), _ = two_ranks.run(scored, str(tmp_path), [9.0], "min", False)
    assert best == "step-000000001", "a fresh run in the same folder has scores of its own"
    assert names == ["step-000000001"]


def senseless(folder: str, what: str) -> None:
    accelerator, _, _ = prepared()
    if what == "mode":
        Checkpointer(accelerator, folder, best="lowest")
    elif what == "score":
        Checkpointer(accelerator, folder).step(score=1.0)
    else:
        Checkpointer(accelerator, folder).best()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("mode", "best is 'lowest'. Allowed: 'min', 'max', or None"),
        ("score", "nothing says which score is better. Give Checkpointer best='min' or best='max'"),
        ("best", "nothing says which score is better"),
    ],
)
def test_scores_without_sense_are_errors(what: str, words: str, two_ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=words):
        two_ranks.run(senseless, str(tmp_path), what)


def tracked(folder: str, logs: str) -> str | None:
    """Log to a real W&B run, offline; return its id on rank 0."""
    import os

    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": logs}
    accelerator, _, _ = prepared(log_with="wandb")
    with Checkpointer(accelerator, folder, every=1) as checkpointer:
        checkpointer.resume()
        accelerator.init_trackers("run", init_kwargs=checkpointer.tracker_arguments())
        accelerator.log({"loss": 1.0}, step=checkpointer.steps)
        checkpointer.step()
    run = accelerator.get_tracker("wandb", unwrap=True).id if accelerator.is_main_process else None
    for tracker in accelerator.trackers:
        tracker.finish()
    return run


def test_a_resumed_run_logs_to_the_run_that_it_had(two_ranks: RankPool, tmp_path: Path) -> None:
    first, _ = two_ranks.run(tracked, str(tmp_path / "snapshots"), str(tmp_path))
    again, _ = two_ranks.run(tracked, str(tmp_path / "snapshots"), str(tmp_path))
    other, _ = two_ranks.run(tracked, str(tmp_path / "others"), str(tmp_path))
    assert first == again
    assert first != other


def two_loaders(folder: str, mode: str) -> list[list[int]]:
    """Two loaders in one run, each with a place of its own."""
    accelerator, _, _ = prepared()
    seen: list[list[int]] = [[], []]
    with Checkpointer(accelerator, folder) as checkpointer:
        checkpointer.resume()
        rows = [DataLoader(list(range(size)), 2, shuffle=True) for size in (20, 12)]
        sources = [checkpointer.batches(accelerator.prepare(row), name=f"loader {i}") for i, row in enumerate(rows)]
        for step in range(3 if mode == "first" else 4):
            for index, source in enumerate(sources):
                if index == 0 or step % 2 == 0:
                    seen[index] += accelerator.gather(next(source)).tolist()
            checkpointer.step()
        if mode == "first":
            checkpointer.save()
    return seen


def test_each_loader_of_a_run_has_its_place(two_ranks: RankPool, tmp_path: Path) -> None:
    first = two_ranks.run(two_loaders, str(tmp_path), "first")[0]
    rest = two_ranks.run(two_loaders, str(tmp_path), "rest")[0]
    assert [len(a) for a in first] == [12, 8]
    assert len(set(first[0] + rest[0][:8])) == 20, "an epoch of the first"
    assert len(set(first[1] + rest[1][:4])) == 12, "an epoch of the second"


def abandoned(folder: str) -> bool:
    """Use no `with`, and let go while a save may be in flight."""
    import gc
    import weakref

    accelerator, _, _ = prepared()
    checkpointer = Checkpointer(accelerator, folder)
    checkpointer.save()
    known = weakref.ref(checkpointer)
    del accelerator, checkpointer
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    gc.collect()
    return known() is None


def test_a_checkpointer_that_nobody_holds_ends_its_save_and_goes(two_ranks: RankPool, tmp_path: Path) -> None:
    assert two_ranks.run(abandoned, str(tmp_path)) == [True, True]
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000000"]


def other_batch(folder: str, size: int) -> None:
    accelerator, _, _ = prepared()
    with Checkpointer(accelerator, folder) as checkpointer:
        checkpointer.resume()
        next(checkpointer.batches(DataLoader(list(range(20)), size)))
        checkpointer.step()
        checkpointer.save()


def test_another_global_batch_is_refused(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(other_batch, str(tmp_path), 2)
    with pytest.raises(RankError, match=r"samples in an optimizer step .* the snapshot has 4, this run 6"):
        two_ranks.run(other_batch, str(tmp_path), 3)


def test_snapshots_open_with_safetensors_alone(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(best_and_newest, str(tmp_path))
    stored = [load_file(file) for file in (tmp_path / "step-000000004").glob("*.safetensors")]
    assert {name for tensors in stored for name in tensors} == {"model.weight", "model.bias"}


def split(folder: str, size: int) -> list[int]:
    from accelerate.utils import DataLoaderConfiguration

    accelerator, _, _ = prepared(dataloader_config=DataLoaderConfiguration(split_batches=True))
    batch: list[int] = next(Checkpointer(accelerator, folder).batches(DataLoader(list(range(8)), size))).tolist()
    return batch


def test_a_batch_that_is_split_over_ranks(two_ranks: RankPool, tmp_path: Path) -> None:
    assert two_ranks.run(split, str(tmp_path), 4) == [[0, 1], [2, 3]]
    with pytest.raises(RankError, match="2 ranks do not divide a batch of 3"):
        two_ranks.run(split, str(tmp_path), 3)


def save_one_weight(folder: str) -> tuple[float, list[str]]:
    accelerator = ShardingPolicy.load("ddp").accelerator()
    model: Any = torch.nn.Linear(1, 1, bias=False)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    weight = model.module.weight
    with torch.no_grad(), Checkpointer(accelerator, folder) as checkpointer:
        weight.fill_(4.0)
        checkpointer.save()
        checkpointer.wait()
        weight.fill_(5.0)
        assert checkpointer.resume()
    return float(weight), sorted(path.name for path in Path(folder).glob("step-*/*.safetensors"))


def test_ranks_that_have_nothing_to_save(four_ranks: RankPool, tmp_path: Path) -> None:
    assert four_ranks.run(save_one_weight, str(tmp_path)) == [(4.0, ["rank-00000.safetensors"])] * 4
