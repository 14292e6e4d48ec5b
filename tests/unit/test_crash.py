"""A save that is killed at any of its file operations: the snapshot before it, or it, is there whole."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch", "accelerate", "accel_shard.accelerator", "accel_shard.checkpoint.checkpointer"]
)


def build(folder: str, **options: Any) -> tuple[Any, Any]:
    """One process, a small model, its checkpointer."""
    import torch

    from accel_shard import Checkpointer, ShardingPolicy

    torch.set_num_threads(1)
    accelerator = ShardingPolicy.load("ddp").accelerator()
    model = torch.nn.Linear(30, 30)
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return model, Checkpointer(accelerator, folder, background=False, **options)


def set_weights(model: Any, value: float) -> None:
    for parameter in model.parameters():
        parameter.data.fill_(value)


def save_and_die(folder: str, operation: int) -> None:
    """Save steps 1 and 2; in the save of step 3 die after so many file operations, or not at all if there are fewer."""
    from accel_shard.checkpoint import places

    model, checkpointer = build(folder, keep=1)
    for step in (1, 2):
        set_weights(model, step)
        checkpointer.steps = step
        checkpointer.save()
    count = 0

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            if count == operation:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            return function(*args, **kwargs)

        return call

    os.fsync, os.rmdir, os.unlink = watched(os.fsync), watched(os.rmdir), watched(os.unlink)
    for name in ("open", "mkdir", "rename"):
        setattr(Path, name, watched(getattr(Path, name)))
    places.RemotePath.opened = watched(places.RemotePath.opened)  # all that is ever asked of a store
    set_weights(model, 3)
    checkpointer.steps = 3
    checkpointer.save()


def resumed(folder: str, answer: int) -> None:
    model, checkpointer = build(folder)
    checkpointer.resume()
    weights = sorted({float(v) for p in model.parameters() for v in p.data.flatten()})
    os.write(answer, json.dumps([checkpointer.steps, weights]).encode())
    checkpointer.steps += 10
    checkpointer.save()  # what a crash left behind is in nobody's way


def run(target: Callable[..., None], *args: Any, limit: float = 200.0) -> int:
    process = CONTEXT.Process(target=target, args=args)
    process.start()
    process.join(limit)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(f"{target.__name__} outlasted {limit} s")
    return process.exitcode


def warm_up() -> None:
    """Import, before the forks, what each of them would import for itself; the optimizer's class alone takes seconds."""
    import deepspeed  # noqa: F401  # Accelerate asks it whether a model is its own
    import torch
    from accelerate import Accelerator  # noqa: F401

    torch.set_num_threads(1)
    torch.optim.AdamW(torch.nn.Linear(1, 1).parameters())


def forked(target: Callable[..., None], *args: Any) -> int:
    """Run in a fork of this process, which has imported everything but computed nothing; return its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            target(*args)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_everywhere(folder: str, answer: Any) -> None:
    """Kill a save after 0, 1, 2, ... operations until it survives; report what each left behind."""
    warm_up()
    for operation in range(100):
        place = f"{folder}/{operation}"
        code = forked(save_and_die, place, operation)
        reader, writer = os.pipe()
        again = forked(resumed, place, writer)
        answer.send((code, again, json.loads(os.read(reader, 1 << 16) or b"null")))
        if code != -signal.SIGKILL:
            break
    answer.send(None)


@pytest.mark.parametrize("place", ["", "file://"])
def test_killed_at_every_file_operation(place: str, tmp_path: Path) -> None:
    ours, theirs = CONTEXT.Pipe()
    assert run(kill_everywhere, f"{place}{tmp_path}", theirs) == 0
    found = []
    while (row := ours.recv()) is not None:
        found.append(row)
    codes = [code for code, _, _ in found]
    assert codes == [-signal.SIGKILL] * (len(found) - 1) + [0]
    assert len(found) > 10, "operations were injected"
    assert all(again == 0 for _, again, _ in found)
    steps = [step for _, _, (step, _) in found]
    assert all(weights == [float(step)] for _, _, (step, weights) in found), "one snapshot, not a mixture"
    assert set(steps) == {2, 3}, "the one before until the commit, then the new one; never an older one"
    assert steps == sorted(steps)


def fill_the_disk(folder: str, answer: Any) -> None:
    """Every write of a save fails once, one after the other; training goes on and the old snapshot stays."""
    import errno

    from accel_shard import SnapshotError
    from accel_shard.checkpoint import storage

    model, checkpointer = build(folder)
    set_weights(model, 1)
    checkpointer.steps = 1
    checkpointer.save()
    write, failed = storage._HashingFile.write, 0
    for fail_at in range(100):
        count = 0

        def full(file: Any, data: Any, fail_at: int = fail_at) -> None:
            nonlocal count
            count += 1
            if count > fail_at:
                raise OSError(errno.EIO, "Input/output error")
            write(file, data)

        storage._HashingFile.write = full
        checkpointer.steps = 2
        with contextlib.suppress(SnapshotError):
            checkpointer.save()
            break
        failed += 1
        assert [p.name for p in Path(folder).iterdir()] == ["step-000000001"]
    answer.send((failed, sorted(p.name for p in Path(folder).iterdir())))


def test_a_disk_that_fails_at_any_write_leaves_the_old_snapshot_alone(tmp_path: Path) -> None:
    ours, theirs = CONTEXT.Pipe()
    assert run(fill_the_disk, str(tmp_path), theirs) == 0
    failed, names = ours.recv()
    assert failed >= 5
    assert names == ["step-000000001", "step-000000002"]
