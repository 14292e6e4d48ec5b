"""Snapshots at URLs, by fsspec: the same as on a disk, committed by the manifest. ``file://`` is shared by ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankError, RankPool
from test_snapshot import Run, flip_a_bit, resume, save
from training import put_together

from accel_shard import Checkpointer, SnapshotError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def held(line: str, url: str) -> dict[str, torch.Tensor]:
    run = Run(line)
    assert Checkpointer(run.accelerator, url).resume()
    return put_together(run.layout())


@pytest.mark.parametrize(("first", "second"), [("fsdp2", "zero2"), ("zero3", "fsdp2"), ("ddp", "fsdp1")])
def test_saved_at_a_url_and_resumed_under_another_policy_and_number_of_ranks(
    first: str, second: str, two_ranks: RankPool, four_ranks: RankPool, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/run"
    losses, weights, drawn, saved = two_ranks.run(save, first, url, dropout=0.2)[0]
    again, reached, redrawn = two_ranks.run(resume, first, url, dropout=0.2)[0]
    assert (again, redrawn) == (losses, drawn)
    assert all(torch.equal(reached[name], weights[name]) for name in weights)
    loaded = four_ranks.run(held, second, url)[0]
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[key], saved[key]) for key in saved)
    assert names(tmp_path / "run") == ["step-000000003"]
    assert "manifest.json" in names(tmp_path / "run" / "step-000000003")


# ---- damage ----------------------------------------------------------------------------------------------------


def steps_of(url: str, keep: int | None = None, last: int = 2, pinned: int = 0) -> None:
    run = Run("fsdp2")
    with Checkpointer(run.accelerator, url, every=1, keep=keep) as checkpointer:
        for step in range(last):
            run.train([step])
            checkpointer.step()
            checkpointer.wait()
            if step + 1 == pinned and run.accelerator.is_main_process:
                checkpointer.pin(f"{url}/step-{pinned:09d}")


def resumed_step(url: str, source: str = "auto") -> int:
    run = Run("fsdp2")
    checkpointer = Checkpointer(run.accelerator, url)
    checkpointer.resume(source)
    return checkpointer.steps


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "flipped bit": (lambda f: flip_a_bit(f / "rank-00001.safetensors"), "is not what was written"),
    "truncated": (lambda f: (f / "rank-00000.safetensors").write_bytes(b"short"), "has 5 bytes"),
    "absent": (lambda f: (f / "rank-00001.safetensors").unlink(), "cannot be read"),
    "cut manifest": (lambda f: (f / "manifest.json").write_bytes(b'{"digest'), "cannot be read"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "is no snapshot"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_snapshot_at_a_url_is_skipped_for_the_one_before(
    kind: str, two_ranks: RankPool, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}"
    two_ranks.run(steps_of, url)
    assert two_ranks.run(resumed_step, url) == [2, 2]
    spoil, words = DAMAGE[kind]
    spoil(tmp_path / "step-000000002")
    assert two_ranks.run(resumed_step, url) == [1, 1]
    with pytest.raises(RankError, match=words):
        two_ranks.run(resumed_step, url, f"{url}/step-000000002")


def read_after_it_was_cut(url: str, folder: str) -> str:
    """The object shrinks after it was checked: the read itself must see it."""
    from accel_shard.checkpoint.offline import read_tensor
    from accel_shard.checkpoint.snapshot import Snapshot

    snapshot = Snapshot.open(url)
    snapshot.verify()
    for file in Path(folder).glob("*.safetensors"):
        content = file.read_bytes()
        file.write_bytes(content[: 8 + int.from_bytes(content[:8], "little")])  # the header alone
    said = set()
    for key in snapshot.manifest["tensors"]:
        with pytest.raises(SnapshotError) as error:
            read_tensor(snapshot, key)
        said.add(str(error.value).partition("' ")[2].partition(":")[0])
    return str(said)


def test_a_file_that_shrank_is_an_error_of_the_read(two_ranks: RankPool, tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    two_ranks.run(steps_of, url, last=1)
    said = read_after_it_was_cut(f"{url}/step-000000001", str(tmp_path / "step-000000001"))
    assert said == "{'is no tensor file of this snapshot'}"


# ---- making and removing ---------------------------------------------------------------------------------------


def test_what_a_killed_save_left_is_no_snapshot_and_is_not_written_into(two_ranks: RankPool, tmp_path: Path) -> None:
    left = tmp_path / "step-000000001"
    left.mkdir()
    (left / "rank-00000.safetensors").write_bytes(b"half of it")
    url = f"file://{tmp_path}"
    assert two_ranks.run(resumed_step, url) == [0, 0]
    two_ranks.run(steps_of, url, last=1)
    assert names(tmp_path) == ["step-000000001", "step-000000001-1"]
    assert (left / "rank-00000.safetensors").read_bytes() == b"half of it"
    assert two_ranks.run(resumed_step, url) == [1, 1]


def test_retention_at_a_url_keeps_the_newest_and_the_pinned(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(steps_of, f"file://{tmp_path}", keep=2, last=4, pinned=1)
    assert names(tmp_path) == ["step-000000001", "step-000000003", "step-000000004"]


def failing_save(url: str, failing_rank: int) -> None:
    """One rank's store fails in the middle of a file; the next save works."""
    from accel_shard.checkpoint import stores

    run = Run("zero2")
    original, calls = stores._RemoteSink.write, 0

    def failing(sink: Any, data: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError("the store is gone")
        original(sink, data)

    with Checkpointer(run.accelerator, url, background=False) as checkpointer:
        checkpointer.steps = 1
        if run.accelerator.process_index == failing_rank:
            stores._RemoteSink.write = failing  # type: ignore[method-assign]
        try:
            with pytest.raises(SnapshotError, match=f"rank {failing_rank}: OSError: the store is gone"):
                checkpointer.save()
        finally:
            stores._RemoteSink.write = original  # type: ignore[method-assign]
        torch.distributed.barrier()  # rank 0 has removed what there was
        assert list(Path(url.removeprefix("file://")).iterdir()) == []
        torch.distributed.barrier()
        checkpointer.save()


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_store_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(
    failing_rank: int, two_ranks: RankPool, tmp_path: Path
) -> None:
    two_ranks.run(failing_save, f"file://{tmp_path}", failing_rank)
    assert names(tmp_path) == ["step-000000001"]
    assert two_ranks.run(resumed_step, f"file://{tmp_path}") == [1, 1]


def removal_that_breaks_off(url: str) -> list[str]:
    from fsspec.implementations.local import LocalFileSystem

    from accel_shard.checkpoint.places import place
    from accel_shard.checkpoint.snapshot import find_snapshots, remove_snapshot

    kept = LocalFileSystem.rm

    def broken(*_: Any, **__: Any) -> None:
        raise PermissionError("no")

    LocalFileSystem.rm = broken
    try:
        with pytest.raises(PermissionError):
            remove_snapshot(place(f"{url}/step-000000001"))
    finally:
        LocalFileSystem.rm = kept
    return [path.name for _, path in find_snapshots(place(url))]


def test_a_removal_that_breaks_off_leaves_no_snapshot(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(steps_of, f"file://{tmp_path}")
    assert removal_that_breaks_off(f"file://{tmp_path}") == ["step-000000002"]
    assert names(tmp_path) == ["step-000000001", "step-000000002"], "its files are still there"


# ---- one process -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_rank() -> Iterator[RankPool]:
    """A pool of one rank: memory:// is that process's own."""
    pool = RankPool(1)
    yield pool
    pool.stop()


def all_in_memory(folder: str) -> dict[str, Any]:
    """Save, resume, keep and pin, and use the command, all in the memory of this process."""
    import contextlib
    import io

    from accel_shard import export_model
    from accel_shard.checkpoint.places import place
    from accel_shard.checkpoint.snapshot import find_snapshots
    from accel_shard.cli import main

    url, found = "memory://runs/a", {}
    run = Run("ddp")
    with Checkpointer(run.accelerator, url, every=1, keep=2) as checkpointer:
        assert not checkpointer.resume()
        for step in range(4):
            run.train([step])
            checkpointer.step()
            checkpointer.wait()
            if step == 0:
                checkpointer.pin(f"{url}/step-000000001")
    found["names"] = sorted(path.name for _, path in find_snapshots(place(url)))
    saved = put_together(run.layout())
    run.train([4])
    checkpointer.resume()
    found["back"] = checkpointer.steps == 4 and all(
        torch.equal(t, saved[k]) for k, t in put_together(run.layout()).items()
    )
    export_model(run.accelerator, run.model, f"{folder}/like")
    newest, older = f"{url}/step-000000004", f"{url}/step-000000003"
    for name, arguments in {
        "ls": ["ls", url], "show": ["show", newest], "verify": ["verify", newest], "diff": ["diff", newest, older],
        "export": ["export", newest, f"{folder}/out", "--like", f"{folder}/like"],
        "refused": ["export", newest, "memory://out", "--like", f"{folder}/like"],
        "prune": ["prune", url, "--keep", "1"], "after": ["ls", url], "nothing": ["ls", "memory://nothing"],
    }.items():  # fmt: skip
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = main(["checkpoints", *arguments])
        found[name] = (code, said.getvalue())
    return found


def test_everything_works_in_memory(one_rank: RankPool, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    found = one_rank.run(all_in_memory, str(tmp_path))[0]
    assert found["names"] == ["step-000000001", "step-000000003", "step-000000004"]
    assert found["back"]
    code, text = found["ls"]
    assert code == 0
    assert [line.split()[0] for line in text.splitlines()] == found["names"][::-1]
    assert text.splitlines()[2].endswith("pinned")
    assert found["show"][0] == 0
    assert "model.model.norm.weight  36  float32  1 piece\n" in found["show"][1]
    assert found["verify"] == (0, "memory://runs/a/step-000000004: every byte is as it was written\n")
    assert found["diff"][0] == 1
    assert "model.model.norm.weight  largest difference" in found["diff"][1]
    assert found["export"][0] == 0
    out, like = load_file(tmp_path / "out" / "model.safetensors"), load_file(tmp_path / "like" / "model.safetensors")
    assert out.keys() == like.keys()
    assert all(torch.equal(out[name], like[name]) for name in like)
    assert found["refused"][0] == 2
    assert "target is 'memory://out'. Allowed: a folder on a disk" in found["refused"][1]
    assert found["prune"] == (0, "removed memory://runs/a/step-000000003\n")
    assert [line.split()[0] for line in found["after"][1].splitlines()] == ["step-000000004", "step-000000001"]
    assert found["nothing"] == (2, "accel-shard: 'memory://nothing' holds no snapshots.\n")


def save_in_memory() -> None:
    run = Run("fsdp2")
    Checkpointer(run.accelerator, "memory://x", background=False).save()


def test_memory_of_several_ranks_is_an_error_on_all(two_ranks: RankPool) -> None:
    with pytest.raises(
        RankError, match=r"(?s)rank-00001.*rank 0 sees none: the ranks do not share this store"
    ) as error:
        two_ranks.run(save_in_memory)
    assert str(error.value).count("SnapshotError: could not write 'memory://x/step-000000000'") == 2
