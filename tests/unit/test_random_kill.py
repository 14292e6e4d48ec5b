"""Ranks that are killed at random moments of training and saving: what is resumed is the last commit, whole.

One run goes on through all launches. Each launch is two connected ranks in fresh processes (forks of a server that has
imported everything), which resume, say what they hold, save, and then train and save until one of them or both are
killed. What they must hold at a step is computed apart, by the same optimizer without any saving.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import mmap
import os
import random
import select
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

from test_crash import CONTEXT, run, warm_up

KILLS, RANKS, WIDTH, SEED = 100, 2, 600, 20
BETWEEN, COPYING, WRITING, REMOVING = range(4)
PHASES = ("between saves", "copying", "writing", "removing")


def new_model() -> tuple[Any, Any]:
    """A model of 1.4 MB, so that its tensors are cut and shared out among the ranks."""
    import torch

    model = torch.nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((torch.arange(p.numel()) % 97).reshape(p.shape) / 64)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: Any, optimizer: Any, step: int) -> None:
    """One step whose gradients depend on nothing but its number."""
    import torch

    for p in model.parameters():
        p.grad = (torch.arange(p.numel()) % 89).reshape(p.shape) * ((step * 7) % 13 - 6) / 512
    optimizer.step()


def digest(model: Any, optimizer: Any) -> str:
    """Of every bit of the weights and of the optimizer's state."""
    found = hashlib.blake2b(digest_size=16)
    for p in model.parameters():
        state = optimizer.state.get(p, {})
        assert not state or state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        for tensor in (p.detach(), *(state[key] for key in sorted(state))):
            found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def watch(phase: mmap.mmap, rank: int) -> None:
    """Keep in shared memory what this rank is doing, for the one that kills it."""
    from accel_shard.checkpoint.folder import SnapshotFolder
    from accel_shard.checkpoint.snapshot import StagedSnapshot
    from accel_shard.checkpoint.staging import Stager

    def watched(function: Any, number: int) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            phase[rank] = number
            try:
                return function(*args, **kwargs)
            finally:
                phase[rank] = BETWEEN

        return call

    Stager.stage = watched(Stager.stage, COPYING)
    StagedSnapshot.write = watched(StagedSnapshot.write, WRITING)
    SnapshotFolder.retain = watched(SnapshotFolder.retain, REMOVING)


def rank_of_a_launch(
    rank: int, launch: int, folder: Path, options: dict[str, Any], phase: mmap.mmap, pipe: int
) -> None:
    """Resume, say so, save, say so, and go on until killed."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    from accel_shard import Checkpointer, ShardingPolicy

    def say(**words: Any) -> None:
        os.write(pipe, (json.dumps({"rank": rank, **words}) + "\n").encode())

    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store-{launch}"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=datetime.timedelta(seconds=60))
    accelerator = ShardingPolicy.load("ddp").accelerator()
    model, optimizer = new_model()
    accelerator.prepare(model, optimizer)
    watch(phase, rank)
    place = folder / "snapshots"
    with Checkpointer(accelerator, place, every=1, **options) as checkpointer:
        checkpointer.resume()
        say(resumed=checkpointer.steps, digest=digest(model, optimizer))
        started = time.monotonic()
        train(model, optimizer, checkpointer.steps)
        checkpointer.step()
        checkpointer.wait()
        names = sorted(p.name for p in place.iterdir()) if rank == 0 else None
        say(saved=checkpointer.steps, names=names, took=time.monotonic() - started)
        while True:
            train(model, optimizer, checkpointer.steps)
            checkpointer.step()


def forks(launch: int, folder: Path, options: dict[str, Any], phase: mmap.mmap) -> tuple[list[int], int]:
    """Start the ranks; return their process ids and the end of the pipe on which they speak."""
    reader, writer = os.pipe()
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            try:
                os.close(reader)
                rank_of_a_launch(rank, launch, folder, options, phase, writer)
            except BaseException as error:
                os.write(writer, (json.dumps({"rank": rank, "ended": repr(error)[:300]}) + "\n").encode())
            finally:
                os._exit(1)
        children.append(child)
    os.close(writer)
    return children, reader


def heard(reader: int, until: int, limit: float = 60.0) -> list[dict[str, Any]]:
    """Read what the ranks say until so many have saved, or until they are all gone."""
    text, deadline = b"", time.monotonic() + limit
    while text.count(b'"saved"') < until:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"ranks hang after saying {text.decode()}"
        piece = os.read(reader, 1 << 16)
        if not piece:
            break
        text += piece
    return [json.loads(line) for line in text.splitlines()]


def newest_commit(place: Path) -> int:
    """The step of the last commit, read without the package."""
    manifests = [json.loads((p / "manifest.json").read_text())["manifest"] for p in place.glob("step-*")]
    return int(max(manifests, key=lambda m: m["sequence"])["step"]) if manifests else 0


def kill_at_random(folder: str, kills: int, answer: Any) -> None:
    """Launch and kill so often; answer with what each launch said and how it was killed."""
    warm_up()
    chance, phase, span = random.Random(SEED), mmap.mmap(-1, RANKS), 0.3
    for launch in range(kills + 1):
        options = {"keep": chance.choice([1, 2]), "background": chance.random() < 0.5}
        victims = chance.choice([[0], [1], [0, 1]])
        committed = newest_commit(Path(folder, "snapshots"))
        children, reader = forks(launch, Path(folder), options, phase)
        said = heard(reader, until=RANKS)
        times = [words["took"] for words in said if "took" in words]
        span = min([span, *times])  # of one step and save, on a machine that is sometimes busy
        time.sleep(chance.uniform(0, 4 * span))  # the random moment
        for rank in victims:
            os.kill(children[rank], signal.SIGKILL)
        last = heard(reader, until=RANKS + 1) if len(victims) < RANKS else []  # the other ends by itself
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        os.close(reader)
        doing = max((phase[rank] for rank in victims), key=lambda p: p != BETWEEN)
        phase[:] = bytes(RANKS)
        answer.send((options, committed, victims, codes, said, last, doing))
    answer.send(None)


def expected(steps: int) -> list[str]:
    """What is held after 0, 1, 2, ... steps, by a run that never saved."""
    model, optimizer = new_model()
    found = [digest(model, optimizer)]
    for step in range(steps):
        train(model, optimizer, step)
        found.append(digest(model, optimizer))
    return found


def check(folder: Path, kills: int) -> Counter[str]:
    """Kill so often, check every launch, and return what the kills hit."""
    ours, theirs = CONTEXT.Pipe()
    assert run(kill_at_random, str(folder), kills, theirs, limit=400) == 0
    rows, hit = [], Counter[str]()
    while (row := ours.recv()) is not None:
        rows.append(row)
    right = expected(max(words.get("saved", 0) for row in rows for words in row[4]))
    saved_before = 0
    hit.update(PHASES[doing] for *_, doing in rows[:-1])  # what the last one left, nobody looked at
    for options, committed, victims, codes, said, last, _ in rows:
        resumed = [words for words in said if "resumed" in words]
        assert len(resumed) == RANKS, said
        assert {words["resumed"] for words in resumed} == {committed}, "the last commit, no older one"
        assert {words["digest"] for words in resumed} == {right[committed]}, "every bit of it, and no mixture"
        assert committed >= saved_before, "a save that was reported is never lost"
        saved = [words for words in said if "saved" in words]
        assert [words["saved"] for words in saved] == [committed + 1] * RANKS, said
        (names,) = [words["names"] for words in saved if words["names"]]
        assert all(name.startswith("step-") for name in names), f"what the kill left is cleared up: {names}"
        assert len(names) <= options["keep"], names
        assert all(codes[rank] == -signal.SIGKILL for rank in victims), (codes, said)
        assert all("ended" in words for words in last), "the other rank fails; it neither hangs nor goes on alone"
        saved_before = committed + 1
    return hit


def test_killed_at_random_moments(tmp_path: Path) -> None:
    hit = check(tmp_path, kills=KILLS)
    assert sum(hit.values()) == KILLS
    assert hit["copying"] + hit["writing"] >= KILLS // 4, hit
    assert hit["between saves"] < KILLS * 2 // 3, hit
