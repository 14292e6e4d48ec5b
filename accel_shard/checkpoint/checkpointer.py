"""``Checkpointer``: saves a run as it goes, finds the newest snapshot that can be trusted, and goes on from it."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from accelerate.logging import get_logger

from accel_shard.checkpoint.places import Place, place
from accel_shard.checkpoint.plan import Answer, gather, on_rank_zero
from accel_shard.checkpoint.run_state import Offer, collect, restore, restore_random_state
from accel_shard.checkpoint.snapshot import (
    MANIFEST,
    PIN,
    Snapshot,
    StagedSnapshot,
    find_snapshots,
    next_snapshot,
    remove_snapshot,
)
from accel_shard.checkpoint.staging import Stager
from accel_shard.errors import SnapshotError

if TYPE_CHECKING:
    from accel_shard.accelerator import PolicyAccelerator

__all__ = ["PREEMPTED", "Checkpointer"]

logger = get_logger(__name__)

PREEMPTED: Final = 75
"""Exit code after a signal: the run saved and left (EX_TEMPFAIL: try again later)."""


class Checkpointer:
    """Saves and resumes the run of a :class:`~accel_shard.PolicyAccelerator`. Every rank makes one, after ``prepare``.

    ``with Checkpointer(accelerator, folder, every=500, keep=3) as checkpointer`` also takes SIGTERM and SIGUSR1: when
    any rank gets one, all ranks agree at the end of an optimizer step, save, and leave with exit code 75.

    Args:
        accelerator: with exactly one prepared model and one optimizer.
        folder: where the snapshots are: a folder, or a URL that fsspec knows (``s3://bucket/run``); all ranks must
            see it.
        every: save each so many optimizer steps; None never by itself.
        minutes: save when so many minutes have passed since the last one; None never.
        keep: how many of the newest snapshots stay; None is all. Pinned ones stay beside them.
        background: copy to host memory and write from a thread while training goes on; one save is in flight at most.
            It needs host memory for this rank's share. A failure is raised by the next call, on every rank.
        patience: seconds that a rank waits in :meth:`save` for the others to call it too.

    Attributes:
        steps: optimizer steps that the run has done, over all its launches.
        progress: plain data of the loop's own (tokens seen, best score), saved and restored with the run.
    """

    def __init__(
        self,
        accelerator: PolicyAccelerator,
        folder: str | Place,
        *,
        every: int | None = None,
        minutes: float | None = None,
        keep: int | None = None,
        background: bool = True,
        patience: float = 300.0,
    ) -> None:
        for name, value in (("every", every), ("minutes", minutes), ("keep", keep), ("patience", patience)):
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value!r}. Allowed: a number above 0, or None for off.")
        self.accelerator, self.folder = accelerator, place(folder)
        self.every, self.minutes, self.keep = every, minutes, keep
        self.steps = 0
        self.progress: dict[str, Any] = {}
        self._asked = self._signalled = False
        self._saved_at_step, self._saved_at = -1, time.monotonic()
        self._saved_as: Place | None = None
        self._former: dict[int, Any] = {}
        self._patience = datetime.timedelta(seconds=patience)
        # Over the hosts, so that no device has to be waited for: a group to agree on signals and clocks, one to meet
        # before a save, one for the thread that writes.
        several = _ranks() > 1
        self._control = dist.new_group(backend="gloo") if several else None
        self._meeting = dist.new_group(backend="gloo", timeout=self._patience) if several else None
        self._writers = dist.new_group(backend="gloo") if several else None
        self._background, self._stager = background, Stager(background=background)
        self._thread: threading.Thread | None = None
        self._failure: SnapshotError | None = None
        self._known: dict[Place, int] = {}
        accelerator.before_end.append(self.wait)
        atexit.register(self._last_wait)  # for those who use no `with`

    def __enter__(self) -> Checkpointer:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            with contextlib.suppress(ValueError):  # not the main thread: no signals, but everything else works
                self._former[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        if error is None or isinstance(error, SystemExit):
            self.wait()
        else:
            self._last_wait()
        atexit.unregister(self._last_wait)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    # ---- saving ----------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Count an optimizer step and save if a save is due. Every rank must call it, once a micro-batch or step.

        Inside an accumulation window it does nothing. It sums three numbers over the ranks' hosts.

        Returns:
            Whether a save was made, or begun.

        Raises:
            SystemExit: with code 75, after a signal and a save.
            SnapshotError: on every rank, if this save or one in the background failed; training itself is unharmed.
        """
        if not self.accelerator.sync_gradients:
            return False
        self.steps += 1
        by_clock = self.minutes is not None and time.monotonic() - self._saved_at >= 60 * self.minutes
        late, signalled, failed = self._any_rank(by_clock, self._signalled, self._failure is not None)
        if failed:
            self.wait()
            raise SnapshotError("a save in the background failed on another rank; see its message")
        due = self.every is not None and self.steps % self.every == 0
        if due or late or signalled or self._asked:
            self.save()
        if signalled:
            self.wait()
            logger.info("stopped by a signal after step %d; start again to go on", self.steps, main_process_only=True)
            raise SystemExit(PREEMPTED)
        return due or late or self._saved_at_step == self.steps

    def save(self) -> Place | None:
        """Save now, or at the end of the accumulation window if one is open (then None is returned).

        Every rank must call it. In the background the folder appears some time later; :meth:`wait` waits for it.

        Raises:
            SnapshotError: on every rank, if any could not write; earlier snapshots are untouched.
        """
        if not self.accelerator.sync_gradients:
            self._asked = True
            return None
        self._asked = False
        if self._saved_at_step == self.steps:
            return self._saved_as
        self._meet()
        self.wait()
        started = time.monotonic()
        model, optimizer = self.accelerator.trained
        with torch.no_grad():  # else every local part of a DTensor is taken through autograd, while training waits
            layout = self.accelerator.backend.layout(self.accelerator, model, optimizer)
        # All that the ranks must tell each other, in one collective: each is a wait, and training waits too.
        free = Answer.ask(lambda: next_snapshot(self.folder, self.steps, self._known))
        told = gather((free, self._stager.unchanged(layout), Offer.of(layout)))
        target, sequence = told[0][0].result()
        facts, own = collect(self.accelerator, layout, self.progress, [offer for _, _, offer in told])
        facts |= {"step": self.steps, "sequence": sequence}
        staged = self._stager.stage(target, layout, facts, own, keep_plan=all(same for _, same, _ in told))
        if not self._background:
            self._write(staged, None)
        else:
            self._thread = threading.Thread(
                target=self._write_quietly, args=(staged,), name="accel_shard save", daemon=True
            )
            self._thread.start()
        self._saved_at_step, self._saved_as, self._saved_at = self.steps, target, time.monotonic()
        stood = time.monotonic() - started
        logger.info(
            "step %d: training stood still for %.3f s to save %s", self.steps, stood, target, main_process_only=True
        )
        return self._saved_as

    def _meet(self) -> None:
        if self._meeting is None:
            return
        try:
            dist.monitored_barrier(self._meeting, timeout=self._patience, wait_all_ranks=True)
        except RuntimeError as error:
            raise SnapshotError(
                f"not every rank called save within {self._patience.total_seconds():g} s, so nothing was saved. Every "
                f"rank must call it, not the main process alone. {error}"
            ) from error

    def _write(self, staged: StagedSnapshot, group: dist.ProcessGroup | None) -> None:
        staged.write(group)
        self._retain()

    def _write_quietly(self, staged: StagedSnapshot) -> None:
        try:
            self._write(staged, self._writers)
        except SnapshotError as error:
            self._failure = error
        except Exception as error:  # a rank is gone; what it was must reach the loop, not the thread's end
            self._failure = SnapshotError(f"the save to {str(staged.target)!r} broke off: {error!r}")

    def wait(self, limit: float | None = None) -> None:
        """Wait until no save is in flight.

        Args:
            limit: seconds; after them the save is left to itself.

        Raises:
            SnapshotError: if the save failed.
        """
        if self._thread is not None:
            self._thread.join(limit)
            if self._thread.is_alive():
                logger.warning("a save was still in flight after %s s and is given up", limit)
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            self._saved_at_step = -1
            raise failure

    def _last_wait(self) -> None:
        """Give a save in flight a minute more. Ranks may be gone by now, and no error of its own may hide theirs."""
        try:
            self.wait(limit=60.0)
        except SnapshotError as error:
            logger.error("%s", error)

    def pin(self, snapshot: str | Place) -> None:
        """Keep a snapshot whatever :attr:`keep` says. Local; rank 0 alone need call it.

        Raises:
            SnapshotError: if there is no such snapshot.
        """
        folder = place(snapshot)
        if not (folder / MANIFEST).is_file():
            raise SnapshotError(f"{str(folder)!r} is no snapshot, so it cannot be pinned.")
        (folder / PIN).touch()

    def _retain(self) -> None:
        """Remove what :attr:`keep` does not keep; only ever called after a newer commit."""
        if self.keep is None or not self.accelerator.is_main_process:
            return
        try:
            for _, path in sorted(find_snapshots(self.folder, self._known), reverse=True)[self.keep :]:
                if not (path / PIN).exists():
                    self._known.pop(path, None)
                    remove_snapshot(path)
        except OSError as error:  # the new snapshot is safe, and the other ranks know nothing of this
            logger.warning("could not remove old snapshots from %s: %s", self.folder, error)

    # ---- resuming --------------------------------------------------------------------------------------------

    def resume(self, source: str | Place = "auto") -> bool:
        """Go on from a snapshot, whatever policy and number of ranks wrote it. Every rank must call it.

        Args:
            source: ``auto`` for the newest in the folder that can be trusted, ``none`` for a fresh start, or the path
                or URL of one snapshot, which then must be good.

        Returns:
            Whether there was one; False is a fresh start.

        Raises:
            SnapshotError: if the named snapshot, or every snapshot in the folder, is bad, or is of another model.
        """
        self.wait()
        if source == "none":
            return False
        named = source != "auto"
        if named:
            candidates = [place(source)]
        else:
            candidates = on_rank_zero(lambda: [path for _, path in sorted(find_snapshots(self.folder), reverse=True)])
        refused = []
        for path in candidates:
            snapshot, fault = self._trusted(path)
            if snapshot is not None:
                self._restore(snapshot)
                return True
            refused.append(fault)
            logger.warning("skipped a snapshot: %s", fault, main_process_only=True)
        if refused:
            raise SnapshotError("no snapshot can be trusted: " + "; ".join(refused))
        return False

    def _trusted(self, path: Place) -> tuple[Snapshot | None, str]:
        """Check a snapshot with all ranks, each its share of the files."""
        snapshot, fault = None, ""
        try:
            snapshot = Snapshot.open(path)
            snapshot.verify(share=(self.accelerator.process_index, _ranks()))
        except SnapshotError as error:
            fault = str(error)
        faults = [text for text in gather(fault) if text]
        return (None, faults[0]) if faults else (snapshot, "")

    def _restore(self, snapshot: Snapshot) -> None:
        self.progress = restore(self.accelerator, snapshot)
        self.steps = self._saved_at_step = snapshot.manifest["step"]
        self._saved_as, self._saved_at = snapshot.folder, time.monotonic()
        former = snapshot.manifest["world_size"]
        note = "" if former == _ranks() else f" (saved by {former} ranks; new ranks got random streams of their own)"
        logger.info("resumed %s after step %d%s", snapshot.folder, self.steps, note, main_process_only=True)
        # Last: what comes before may draw numbers.
        restore_random_state(self.accelerator, snapshot)

    def _any_rank(self, *flags: bool) -> list[bool]:
        votes = torch.tensor(flags, dtype=torch.int32)
        if self._control is not None:
            dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._control)
        return [bool(vote) for vote in votes.tolist()]


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
