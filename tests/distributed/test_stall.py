"""What training waits for in a save: one exchange of the ranks, and a new plan only when the state's layout is new."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from test_snapshot import Run
from training import put_together

from accel_shard import Checkpointer

COLLECTIVES = ("all_gather_object", "all_gather_into_tensor", "all_gather", "all_reduce", "broadcast", "barrier")


def exchanges_of_saves(line: str, folder: str) -> tuple[list[dict[str, int]], bool]:
    """Save before there is optimizer state, then three times with it; resume; tell what each save exchanged."""
    counts: list[dict[str, int]] = []

    def counted(name: str) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                counts[-1][name] = counts[-1].get(name, 0) + 1
            return original(*args, **kwargs)

        return mock.patch.object(dist, name, call)

    run = Run(line)
    run.layout()  # FSDP1 asks the ranks for their ranges, once
    with Checkpointer(run.accelerator, folder) as checkpointer:
        for step in range(4):
            checkpointer.steps = step
            checkpointer.wait()
            counts.append({})
            with contextlib.ExitStack() as patches:
                for name in COLLECTIVES:
                    patches.enter_context(counted(name))
                checkpointer.save()
            saved = put_together(run.layout())
            run.train([step])
        checkpointer.resume()
    return counts, all(torch.equal(tensor, saved[key]) for key, tensor in put_together(run.layout()).items())


@pytest.mark.parametrize("line", ["ddp", "fsdp1", "fsdp2", "zero3"])
def test_a_save_exchanges_once_and_what_is_held_only_when_it_is_new(
    line: str, two_ranks: RankPool, tmp_path: Path
) -> None:
    once, twice = ({"all_gather_into_tensor": 1} | more for more in ({}, {"all_gather_object": 1}))
    # Under FSDP1 a rank without elements of a parameter keeps no step count of it, so they tell each other theirs.
    expected = (
        [twice, twice | {"all_gather_object": 2}, twice, twice] if line == "fsdp1" else [twice, twice, once, once]
    )
    for counts, same in two_ranks.run(exchanges_of_saves, line, str(tmp_path)):
        assert counts == expected, "the second has optimizer state"
        assert same


def one_rank_changes(folder: str) -> tuple[list[int], list[int]]:
    """The boxes of one rank alone change: all plan anew, and write what is there now."""
    from accel_shard.checkpoint.plan import gather
    from accel_shard.checkpoint.snapshot import Snapshot
    from accel_shard.checkpoint.staging import Stager
    from accel_shard.layout import Layout, Shard

    rank, stager = dist.get_rank(), Stager(background=True)
    both, kept = torch.arange(8.0), []
    for number in range(3):
        shard = Shard.flat_range((8,), 4 * rank, both[4 * rank : 4 * rank + 4])
        layout = Layout(weights={"w": shard})
        if number == 2 and rank == 1:
            layout.weights["only"] = Shard.whole(torch.full((3,), 5.0))
        keep = all(gather(stager.unchanged(layout)))
        kept.append(int(keep))
        staged = stager.stage(Path(folder) / f"step-{number}", layout, {"sequence": number}, {}, keep_plan=keep)
        staged.write()
    snapshot, whole, only = Snapshot.open(Path(folder) / "step-2"), torch.zeros(8), torch.zeros(3)
    snapshot.verify()
    snapshot.read_shards([("model.w", Shard.whole(whole)), ("model.only", Shard.whole(only))])
    return kept, [int(v) for v in (*whole, *only)]


def test_a_change_on_one_rank_alone_makes_all_plan_anew(two_ranks: RankPool, tmp_path: Path) -> None:
    expected = ([0, 1, 0], [0, 1, 2, 3, 4, 5, 6, 7, 5, 5, 5])
    assert two_ranks.run(one_rank_changes, str(tmp_path)) == [expected, expected]
