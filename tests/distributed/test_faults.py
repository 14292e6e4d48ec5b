"""What disks, folders, ranks and signals do to snapshots: every failure is said on every rank, and nothing is lost."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import resource
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from listening import listening
from rank_pool import RankError, RankPool

from accel_shard import Checkpointer, ShardingPolicy, SnapshotError
from accel_shard.checkpoint import snapshot as snapshot_module
from accel_shard.checkpoint.leftovers import claimed, partial_for
from accel_shard.checkpoint.snapshot import Snapshot, StagedSnapshot, remove_snapshot
from accel_shard.checkpoint.staging import HostMemory
from accel_shard.checkpoint.stores import PIN

WIDTH = 600  # 1.4 MB of weights: large enough to be cut and written by both ranks


class Small:
    """A prepared layer whose weights and optimizer state all have one value, which says of what step they are."""

    def __init__(self, folder: str | Path, **options: Any) -> None:
        self.accelerator = ShardingPolicy.load("ddp").accelerator()
        self.rank = self.accelerator.process_index
        self.model = torch.nn.Linear(WIDTH, WIDTH)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.accelerator.prepare(self.model, self.optimizer)
        self.checkpointer = Checkpointer(self.accelerator, folder, **options)

    def fill(self, value: int) -> None:
        for p in self.model.parameters():
            p.data.fill_(value)
            state = self.optimizer.state[p]
            state["step"] = torch.tensor(float(value))
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.full_like(p, value, requires_grad=False)

    def save(self, step: int) -> None:
        self.fill(step)
        self.checkpointer.steps = step
        self.checkpointer.save()
        self.checkpointer.wait()

    def held(self) -> set[float]:
        tensors = [p.data for p in self.model.parameters()]
        tensors += [t for state in self.optimizer.state.values() for t in state.values()]
        assert len(tensors) == 8
        return {float(v) for t in tensors for v in t.unique()}


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    former = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, former)


def names(folder: str | Path) -> list[str]:
    return sorted(p.name for p in Path(folder).iterdir())


def save_steps(folder: str, *steps: int) -> None:
    small = Small(folder)
    for step in steps:
        small.save(step)


def resumed(folder: str, source: str = "auto") -> tuple[int, set[float], list[str]]:
    """Resume; return the step, the values held, and what was said."""
    with listening() as said:
        small = Small(folder)
        small.checkpointer.resume(source)
        return small.checkpointer.steps, small.held(), said


# ---- bytes -----------------------------------------------------------------------------------------------------

FILES = ["manifest.json", "rank-00000.json", "rank-00000.safetensors", "rank-00001.json", "rank-00001.safetensors"]


def test_one_flipped_bit_in_any_file_or_a_missing_one_is_found(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(save_steps, str(tmp_path), 1, 2)
    newest = tmp_path / "step-000000002"
    assert names(newest) == FILES
    assert [row[:2] for row in two_ranks.run(resumed, str(tmp_path))] == [(2, {2.0})] * 2
    for name in FILES:
        good = (newest / name).read_bytes()
        damaged: list[bytes | None] = [None]
        for at in (0, len(good) // 2, len(good) - 1):
            damaged.append(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        for content in damaged:
            (newest / name).unlink(missing_ok=True)
            if content is not None:
                (newest / name).write_bytes(content)
            (step, held, said), (other, others, _) = two_ranks.run(resumed, str(tmp_path))
            assert (step, held, other, others) == (1, {1.0}, 1, {1.0}), name
            assert any(newest.name in words and name.partition(".")[0] in words for words in said), (name, said)
        (newest / name).write_bytes(good)
    assert two_ranks.run(resumed, str(tmp_path))[0][0] == 2


def unreadable(folder: str, where: str) -> tuple[int, str]:
    """Rank 1's disk fails while the newest is hashed, or after that, while it is loaded."""
    small = Small(folder)
    hash_file = snapshot_module.hash_file

    def failing_hash(path: Path, name: str) -> str:
        if "step-000000002" in str(path) and small.rank == 1:
            raise OSError(errno.EIO, "Input/output error")
        return hash_file(path, name)

    def failing_read(*_: Any) -> None:
        if small.rank == 1:
            raise OSError(errno.EIO, "Input/output error")

    with (
        replaced(snapshot_module, "hash_file", failing_hash)
        if where == "hash"
        else replaced(Snapshot, "read_into", failing_read)
    ):
        try:
            small.checkpointer.resume()
        except SnapshotError as error:
            return -1, str(error)
    return small.checkpointer.steps, ""


def test_a_disk_that_cannot_be_read(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(save_steps, str(tmp_path), 1, 2)
    assert two_ranks.run(unreadable, str(tmp_path), "hash") == [(1, "")] * 2
    for step, said in two_ranks.run(unreadable, str(tmp_path), "read"):
        assert step == -1
        assert "rank 1: OSError: [Errno 5] Input/output error" in said


# ---- disks that are full, fail, or cannot be written -------------------------------------------------------------


def save_on(folder: str, failing: int, background: bool, break_disk: Callable[[], Any]) -> tuple[str, list[str]]:
    """Save 1; save 2 while one rank's disk is broken; go on and save 3. Return the error and what was there then."""
    small = Small(folder, background=background)
    small.save(1)
    with break_disk() if small.rank == failing else contextlib.nullcontext(), pytest.raises(SnapshotError) as error:
        small.save(2)
    small.accelerator.wait_for_everyone()
    there = names(folder)
    small.accelerator.wait_for_everyone()
    small.save(3)
    return str(error.value), there


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """The kernel lets no file grow beyond 100 kB: a real failure in the middle of a write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def full_device() -> Iterator[None]:
    """What is written goes to the kernel's device that is always full."""
    opened = Path.open

    def elsewhere(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        wanted = mode == "xb" and path.suffix == ".safetensors"
        return opened(Path("/dev/full"), "wb") if wanted else opened(path, mode, *args, **kwargs)

    with replaced(Path, "open", elsewhere):
        yield


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("break_disk", "words"), [(small_files, "File too large"), (full_device, "No space left")])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_full_disk_is_said_on_every_rank(
    failing: int, break_disk: Any, words: str, background: bool, two_ranks: RankPool, tmp_path: Path
) -> None:
    for said, there in two_ranks.run(save_on, str(tmp_path), failing, background, break_disk):
        assert f"rank {failing}: OSError: [Errno" in said
        assert words in said
        assert there == ["step-000000001"]
    assert names(tmp_path) == ["step-000000001", "step-000000003"]
    assert [row[:2] for row in two_ranks.run(resumed, str(tmp_path))] == [(3, {3.0})] * 2


def every_call_fails_once(folder: str, failing: int, name: str) -> int:
    """Save until none of this operation's calls fails any more; return how many did."""
    owner = os if name == "fsync" else Path
    small, real = Small(folder, background=False), getattr(owner, name)
    small.save(1)
    for fail_at in range(50):
        count = 0

        def call(*args: Any, fail_at: int = fail_at, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if small.rank == failing and count == fail_at + 1:
                raise OSError(errno.EIO, "Input/output error")
            return real(*args, **kwargs)

        with replaced(owner, name, call):
            said = ""
            try:
                small.save(2)
            except SnapshotError as error:
                said = str(error)
        if not said:
            return fail_at
        assert f"rank {failing}: OSError: [Errno 5]" in said
        small.accelerator.wait_for_everyone()
        assert names(folder) == ["step-000000001"]
        small.accelerator.wait_for_everyone()
    raise AssertionError("it never worked again")


@pytest.mark.parametrize(
    ("failing", "name", "calls"), [(0, "fsync", 5), (1, "fsync", 2), (0, "rename", 1), (0, "mkdir", 1)]
)
def test_an_operation_that_fails_leaves_nothing_behind(
    failing: int, name: str, calls: int, two_ranks: RankPool, tmp_path: Path
) -> None:
    found = two_ranks.run(every_call_fails_once, str(tmp_path), failing, name)
    assert found[0] == found[1] >= calls
    assert names(tmp_path) == ["step-000000001", "step-000000002"]
    assert [row[:2] for row in two_ranks.run(resumed, str(tmp_path))] == [(2, {2.0})] * 2


def into_a_closed_folder(folder: str) -> str:
    """Root may write anywhere, so that it has to be nobody for a moment."""
    small = Small(folder)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(SnapshotError) as error:
            small.save(1)
    finally:
        os.seteuid(user)
    return str(error.value)


def test_a_folder_that_cannot_be_written(two_ranks: RankPool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o555)
        for said in two_ranks.run(into_a_closed_folder, folder):
            assert "rank 0: PermissionError" in said
            assert folder in said
        assert names(folder) == []
        Path(folder).chmod(0o700)
        two_ranks.run(save_steps, folder, 1)
        assert names(folder) == ["step-000000001"]


def vanishing(folder: str) -> str:
    """Somebody removes the whole folder, first while a save is written, then between two saves."""
    small = Small(folder)
    write = snapshot_module.write_tensors

    def gone(path: Path, entries: Any) -> Any:
        if small.rank == 1:
            shutil.rmtree(folder)
        return write(path, entries)

    small.save(1)
    with replaced(snapshot_module, "write_tensors", gone), pytest.raises(SnapshotError) as error:
        small.save(2)
    small.save(3)
    small.accelerator.wait_for_everyone()
    if small.rank == 0:
        shutil.rmtree(folder)
    small.accelerator.wait_for_everyone()
    small.save(4)
    return str(error.value)


def test_a_folder_that_vanishes(two_ranks: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    for said in two_ranks.run(vanishing, str(folder)):
        assert "No such file or directory" in said
    assert names(folder) == ["step-000000004"]
    assert [row[:2] for row in two_ranks.run(resumed, str(folder))] == [(4, {4.0})] * 2


# ---- what killed runs leave, and other runs do -----------------------------------------------------------------


def test_what_a_dead_save_left_goes_and_what_a_living_one_has_stays(two_ranks: RankPool, tmp_path: Path) -> None:
    dead, living, unknown = (partial_for(tmp_path / f"step-00000000{n}") for n in (7, 8, 9))
    trash = tmp_path / ".step-000000006.trash-0123456789ab"
    for path in (dead, living, unknown, trash):
        path.mkdir()
        (path / "rank-00000.safetensors").write_bytes(b"much")
    (tmp_path / ".saving-" / "x").parent.with_name(f".saving-{dead.name[-12:]}").touch()
    with claimed(living):
        two_ranks.run(save_steps, str(tmp_path), 1)
        lock = f".saving-{living.name[-12:]}"
        assert names(tmp_path) == sorted([lock, living.name, unknown.name, "step-000000001"])
    assert lock in names(tmp_path), "the folder is still there, so its mark stays"
    two_ranks.run(save_steps, str(tmp_path), 2)
    assert names(tmp_path) == [unknown.name, "step-000000001", "step-000000002"]


def without_locks(folder: str) -> None:
    def refused(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    with replaced(fcntl, "flock", refused):
        save_steps(folder, 1, 2)


def test_a_file_system_without_locks_saves_and_clears_nothing_up(two_ranks: RankPool, tmp_path: Path) -> None:
    unknown = partial_for(tmp_path / "step-000000009")
    unknown.mkdir()
    (tmp_path / f".saving-{unknown.name[-12:]}").touch()
    two_ranks.run(without_locks, str(tmp_path))
    assert names(tmp_path) == sorted(
        [f".saving-{unknown.name[-12:]}", unknown.name, "step-000000001", "step-000000002"]
    )


def two_runs(folder: str) -> str:
    """Two runs, which know nothing of each other, save into one folder at once."""
    first, second = Small(folder, keep=1), Small(folder, keep=1)
    first.save(1)
    for value, small in ((2, first), (3, second)):
        small.fill(value)
        small.checkpointer.steps = value
        small.checkpointer.save()
    first.checkpointer.wait()
    second.checkpointer.wait()
    said = ""
    for step in range(4, 8):
        for small in (first, second):
            try:
                small.save(step)
            except SnapshotError as error:
                said = str(error)
                break
    return said


def test_two_runs_in_one_folder_are_told(two_ranks: RankPool, tmp_path: Path) -> None:
    for said in two_ranks.run(two_runs, str(tmp_path)):
        assert "written by another run after this one had begun" in said
        assert str(tmp_path) in said
    for step, held, said in two_ranks.run(resumed, str(tmp_path)):
        assert held == {float(step)}, "whosever it is, it is no mixture"
        assert not said


def test_a_snapshot_pinned_while_it_is_removed_stays(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(save_steps, str(tmp_path), 1, 2)
    first, second = tmp_path / "step-000000001", tmp_path / "step-000000002"
    (first / PIN).touch()
    assert not remove_snapshot(first)
    assert remove_snapshot(second)
    assert names(tmp_path) == [first.name]
    assert [row[:2] for row in two_ranks.run(resumed, str(tmp_path))] == [(1, {1.0})] * 2


def keep_two(folder: str) -> None:
    small = Small(folder, keep=2)
    assert small.checkpointer.resume()
    assert small.held() == {2.0}
    small.save(4)
    small.accelerator.wait_for_everyone()
    assert names(folder) == ["step-000000002", "step-000000003", "step-000000004", "step-notes"]
    small.accelerator.wait_for_everyone()
    small.save(5)


def test_what_was_refused_does_not_count_and_what_is_no_snapshot_stays(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(save_steps, str(tmp_path), 1, 2, 3)
    (tmp_path / "step-000000003" / "rank-00000.json").write_text("{}")
    (tmp_path / "step-notes").mkdir()
    two_ranks.run(keep_two, str(tmp_path))
    assert names(tmp_path) == ["step-000000003", "step-000000004", "step-000000005", "step-notes"]


# ---- ranks that do not see the same ----------------------------------------------------------------------------


def on_disks_of_their_own(root: str, action: Callable[[str], Any]) -> tuple[str, int]:
    """One name, another folder on each rank, as on disks of nodes."""
    former, rank = Path.cwd(), torch.distributed.get_rank()
    place = Path(root) / f"node-{rank}"
    place.mkdir(exist_ok=True)
    os.chdir(place)
    try:
        with pytest.raises(SnapshotError) as error:
            action("snapshots")
    finally:
        os.chdir(former)
    return str(error.value), len(list(place.glob("**/step-*")))


def save_one(folder: str) -> None:
    save_steps(folder, 1)


def test_saving_to_disks_that_are_not_shared(two_ranks: RankPool, tmp_path: Path) -> None:
    for said, there in two_ranks.run(on_disks_of_their_own, str(tmp_path), save_one):
        assert "rank 1: " in said
        assert "the ranks do not share this disk" in said
        assert not there


@pytest.mark.parametrize(
    ("on_nodes", "words"),
    [((0,), r"ranks \[1\] do not see it"), ((1,), r"ranks \[1\] see snapshots there, rank 0 does not"), ((0, 1), "not the same on each")],
)  # fmt: skip
def test_resuming_from_disks_that_are_not_shared(
    on_nodes: tuple[int, ...], words: str, two_ranks: RankPool, tmp_path: Path
) -> None:
    for node in on_nodes:
        two_ranks.run(save_steps, str(tmp_path / f"node-{node}" / "snapshots"), 1)
    for said, there in two_ranks.run(on_disks_of_their_own, str(tmp_path), resumed):
        assert "the ranks do not share 'snapshots" in said
        assert there in (0, 1)
    with pytest.raises(RankError, match=words):
        two_ranks.run(let_it_fail, str(tmp_path))


def let_it_fail(root: str) -> None:
    said, _ = on_disks_of_their_own(root, resumed)
    raise AssertionError(said)


def given_different_folders(root: str) -> str:
    small = Small(f"{root}/{torch.distributed.get_rank()}")
    with pytest.raises(SnapshotError) as error:
        small.save(1)
    return str(error.value)


def test_ranks_that_are_given_different_folders(two_ranks: RankPool, tmp_path: Path) -> None:
    assert all(
        "folder differs from rank to rank" in said for said in two_ranks.run(given_different_folders, str(tmp_path))
    )


def one_rank_cannot(folder: str, what: str) -> str:
    """Rank 1 alone holds something that cannot be saved; then it does not any more."""
    small = Small(folder)
    small.fill(1)
    state = next(iter(small.optimizer.state.values()))
    if small.rank == 1 and what == "progress":
        small.checkpointer.progress = {"function": len}
    if small.rank == 1 and what == "copy":
        failing = replaced(HostMemory, "hold", out_of_memory)
    else:
        failing = contextlib.nullcontext()
    if what == "state":
        state["scale"] = float(small.rank)
    with failing, pytest.raises(SnapshotError) as error:
        save_now(small)
    small.checkpointer.progress = {}
    state.pop("scale", None)
    small.save(1)
    return str(error.value)


def save_now(small: Small) -> None:
    small.checkpointer.save()
    small.checkpointer.wait()


def out_of_memory(*_: Any) -> Any:
    raise MemoryError("no host memory")


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("progress", "rank 1: progress.function is a builtins.builtin_function_or_method"),
        ("copy", "rank 1: could not copy the state to host memory: MemoryError: no host memory"),
        ("state", "'scale' of 'weight' is a number, or data without a shape, and rank 1 has another"),
    ],
)
def test_what_one_rank_cannot_save_is_said_by_all(what: str, words: str, two_ranks: RankPool, tmp_path: Path) -> None:
    said = two_ranks.run(one_rank_cannot, str(tmp_path), what)
    assert said[0] == said[1]
    assert words in said[0]
    assert names(tmp_path) == ["step-000000001"]


class Tally:
    """A registered object that counts what this rank saw."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def tally(folder: str, mode: str) -> tuple[int, dict[str, Any], bool]:
    small = Small(folder)
    counted = Tally(10 + small.rank if mode == "save" else 0)
    small.accelerator.register_for_checkpointing(counted)
    if mode == "save":
        small.checkpointer.progress = {"tokens": 100 + small.rank}
        small.save(1)
    else:
        small.checkpointer.resume()
    facts = Snapshot.open(f"{folder}/step-000000001").manifest
    return counted.count, small.checkpointer.progress, facts["differed"] == ["progress", "objects"]


def test_each_rank_gets_what_it_counted_itself(two_ranks: RankPool, tmp_path: Path) -> None:
    saved = two_ranks.run(tally, str(tmp_path), "save")
    assert saved == [(10, {"tokens": 100}, True), (11, {"tokens": 101}, True)]
    assert two_ranks.run(tally, str(tmp_path), "resume") == saved


# ---- saves in flight -------------------------------------------------------------------------------------------


def impatient(folder: str) -> None:
    """The loop gives up waiting for a slow save, changes the state, and saves again."""
    small, release, write = Small(folder), threading.Event(), StagedSnapshot.write

    def slow(staged: StagedSnapshot, group: Any = None) -> None:
        assert release.wait(60)
        write(staged, group)

    with replaced(StagedSnapshot, "write", slow):
        small.fill(1)
        small.checkpointer.steps = 1
        small.checkpointer.save()
        small.checkpointer.wait(limit=0.01)
        threading.Timer(0.3, release.set).start()
        small.save(2)


def test_a_save_that_was_not_waited_for_is_no_mixture(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(impatient, str(tmp_path))
    for step in (1, 2):
        folder = str(tmp_path / f"step-00000000{step}")
        assert [row[:2] for row in two_ranks.run(resumed, str(tmp_path), folder)] == [(step, {float(step)})] * 2


def signalled_at_the_end(folder: str) -> list[Any]:
    """A signal comes when the loop is over and its last save still in flight."""
    small, release, write = Small(folder), threading.Event(), StagedSnapshot.write
    found: list[Any] = []

    def slow(staged: StagedSnapshot, group: Any = None) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        assert release.wait(60)
        write(staged, group)

    former = signal.signal(signal.SIGTERM, lambda *_: found.append(names(folder)))
    try:
        with replaced(StagedSnapshot, "write", slow), small.checkpointer:
            threading.Timer(0.3, release.set).start()
            small.fill(1)
            small.checkpointer.steps = 1
            small.checkpointer.save()
    finally:
        signal.signal(signal.SIGTERM, former)
    return found


def test_a_signal_during_the_last_save_is_given_on_after_it(two_ranks: RankPool, tmp_path: Path) -> None:
    assert two_ranks.run(signalled_at_the_end, str(tmp_path))[0] == [["step-000000001"]]


def save_after_a_named_resume(folder: str, other: str) -> list[str]:
    small = Small(other)
    small.checkpointer.resume(f"{folder}/step-000000001")
    small.checkpointer.save()
    small.checkpointer.wait()
    return names(other)


def test_a_save_right_after_a_resume_from_elsewhere_is_made(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(save_steps, str(tmp_path / "a"), 1)
    assert two_ranks.run(save_after_a_named_resume, str(tmp_path / "a"), str(tmp_path / "b"))[0] == ["step-000000001"]


# ---- names and kinds of data -----------------------------------------------------------------------------------


class Odd(torch.nn.Module):
    """Names that meet those of pieces and of states, and shapes without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("w", torch.nn.Parameter(torch.zeros(WIDTH, WIDTH)))
        pieces = torch.nn.Module()
        for start in ("0", str(WIDTH // 2)):  # the first piece of `w` is called `w@0.0`
            inner = torch.nn.Module()
            inner.register_parameter("0", torch.nn.Parameter(torch.zeros(3)))
            self.add_module(f"w@{start}", inner)
        pieces.register_parameter("b", torch.nn.Parameter(torch.zeros(2)))
        self.add_module("w/ä☃ ", pieces)
        self.register_parameter("empty", torch.nn.Parameter(torch.zeros(0, 5)))
        self.register_buffer("flags", torch.zeros(7, dtype=torch.bool))


def odd(folder: str, mode: str) -> dict[str, Any]:
    accelerator = ShardingPolicy.load("ddp").accelerator()
    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator.prepare(model, optimizer)
    checkpointer = Checkpointer(accelerator, folder)
    if mode == "save":
        for number, p in enumerate(model.parameters(), 1):
            p.data.copy_((torch.arange(p.numel()) % 251 + number).reshape(p.shape))
            optimizer.state[p] = {
                "a": p.data + 0.5, "b.a": p.data * 2, "b%2Ea": p.data * 3, "mask": p.data > 5,
                "eighth": (p.data % 7).to(torch.float8_e4m3fn), "nothing": torch.zeros(0, 3),
            }  # fmt: skip
        model.flags.copy_(torch.arange(7) % 2 == 0)
        checkpointer.progress = {
            "nan": math.nan, "inf": -math.inf, "zero": -0.0, "large": 10**300, 5: (1, "x"), "ü": [None, True], "e": {},
        }  # fmt: skip
        checkpointer.steps = 1
        checkpointer.save()
        checkpointer.wait()
    else:
        assert checkpointer.resume()
    state = {name: dict(optimizer.state[p]) for name, p in model.named_parameters()}
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return {"state": state, "weights": weights, "flags": model.flags, "progress": checkpointer.progress}


def test_odd_names_and_kinds_come_back(two_ranks: RankPool, tmp_path: Path) -> None:
    saved, loaded = (two_ranks.run(odd, str(tmp_path), mode)[1] for mode in ("save", "resume"))
    assert len(saved["weights"]) == 5
    for kind in ("weights", "flags"):
        torch.testing.assert_close(loaded[kind], saved[kind], rtol=0, atol=0)
    for name, states in saved["state"].items():
        assert loaded["state"][name].keys() == states.keys(), name
        for key, tensor in states.items():
            again = loaded["state"][name][key]
            assert again.dtype == tensor.dtype
            assert torch.equal(again.view(torch.uint8), tensor.view(torch.uint8)), (name, key)
    before, after = saved["progress"], loaded["progress"]
    assert math.isnan(after.pop("nan"))
    assert math.isnan(before.pop("nan"))
    assert after == before
    assert math.copysign(1, after["zero"]) == -1


def kept_by_number(folder: str) -> None:
    small = Small(folder)
    small.fill(1)
    next(iter(small.optimizer.state.values()))[0] = torch.zeros(WIDTH, WIDTH)
    small.checkpointer.save()


def test_a_state_without_a_name_is_refused(two_ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="under 0, a int"):
        two_ranks.run(kept_by_number, str(tmp_path))


@pytest.mark.parametrize(
    ("option", "value"),
    [("every", 0), ("every", 2.5), ("every", True), ("keep", 1.5), ("keep", 0), ("minutes", math.nan)],
)
def test_options_that_make_no_sense(option: str, value: Any, two_ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=f"ValueError: {option} is {value!r}. Allowed"):
        two_ranks.run(with_option, str(tmp_path), option, value)


def with_option(folder: str, option: str, value: Any) -> None:
    Small(folder, **{option: value})
