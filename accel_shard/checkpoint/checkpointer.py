"""``Checkpointer``: saves a run as it goes, finds the newest snapshot that can be trusted, and goes on from it."""

from __future__ import annotations

import contextlib
import signal
import time
import uuid
import weakref
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Final

import torch
from accelerate.logging import get_logger

from accel_shard.checkpoint.folder import SnapshotFolder
from accel_shard.checkpoint.meeting import Meeting, check_one_folder
from accel_shard.checkpoint.places import Place, RemotePath, place
from accel_shard.checkpoint.plain import decode, encode
from accel_shard.checkpoint.run_state import Collected, restore, restore_random_state, restore_weights
from accel_shard.checkpoint.scores import Scores
from accel_shard.checkpoint.snapshot import Snapshot, StagedSnapshot
from accel_shard.checkpoint.staging import Stager
from accel_shard.checkpoint.stores import MANIFEST, PIN
from accel_shard.checkpoint.take_over import start_from
from accel_shard.checkpoint.together import attempt, raise_any
from accel_shard.checkpoint.tracker_runs import logged_to, to_go_on
from accel_shard.checkpoint.trust import candidates, is_snapshot, trusted
from accel_shard.checkpoint.writer import Writer
from accel_shard.data import Batches, batches_of
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
        keep: how many of the newest snapshots stay; None is all. Pinned ones and the best stay beside them.
        best: ``min`` or ``max``: :meth:`step` is given scores, saves whenever one is the best so far, and that snapshot
            stays.
        background: copy to host memory and write from a thread while training goes on; one save is in flight at most.
            It needs host memory for this rank's share. A failure is raised by the next call, on every rank.
        patience: seconds that a rank waits in :meth:`save` for the others to call it too.

    Attributes:
        steps: optimizer steps that the run has done, over all its launches.
        progress: plain data of the loop's own (tokens seen, best score), saved and restored with the run. Where ranks
            differ each gets its own back on the same number of ranks; on another number all get rank 0's.
    """

    def __init__(
        self,
        accelerator: PolicyAccelerator,
        folder: str | Place,
        *,
        every: int | None = None,
        minutes: float | None = None,
        keep: int | None = None,
        best: str | None = None,
        background: bool = True,
        patience: float = 300.0,
    ) -> None:
        for name, value in (("every", every), ("minutes", minutes), ("keep", keep), ("patience", patience)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value!r}. Allowed: a number above 0, or None for off.")
        for name, whole in (("every", every), ("keep", keep)):
            if whole is not None and (isinstance(whole, bool) or int(whole) != whole):
                raise ValueError(f"{name} is {whole!r}. Allowed: a whole number from 1 on, or None for off.")
        self.accelerator, self.folder = accelerator, place(folder)
        self.every, self.minutes, self.keep = every, minutes, keep
        self.steps = 0
        self.progress: dict[str, Any] = {}
        self._asked = False
        self._scores = Scores(best)
        self._run, self._tracker_runs = uuid.uuid4().hex, dict[str, str]()
        self._signal: signal.Signals | None = None
        self._saved_at = time.monotonic()
        self._former: dict[int, Any] = {}
        self._meeting = Meeting(patience)
        self._stager = Stager(background=background)
        self._writer = Writer(self._meeting, weakref.WeakMethod(self._committed), background=background)
        self._batches: dict[str, Batches] = {}
        self._cursors: dict[str, Any] = {}
        self._snapshots = SnapshotFolder(self.folder)
        accelerator.before_end.append(self.wait)
        # For those who use no `with`: at the end of the process, or when nobody holds this any more.
        self._last = weakref.finalize(self, self._writer.last_wait)

    def __enter__(self) -> Checkpointer:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            with contextlib.suppress(ValueError):  # not the main thread: no signals, but everything else works
                self._former[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for batches in self._batches.values():
            batches.close()
        try:
            if error is None or isinstance(error, SystemExit):
                self.wait()
            else:
                self._writer.last_wait()
        finally:
            # Only now: a second signal must not end the process while the last save is written.
            for number, handler in self._former.items():
                signal.signal(number, handler)
            self._last.detach()
        if error is None and self._signal is not None:
            signal.raise_signal(self._signal)  # it came after the last step, which did not answer it

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number)

    # ---- saving ----------------------------------------------------------------------------------------------

    def step(self, *, score: float | None = None) -> bool:
        """Count an optimizer step and save if a save is due. Every rank must call it, once a micro-batch or step.

        Inside an accumulation window it does nothing. It sums four numbers over the ranks' hosts.

        Args:
            score: of an evaluation of these weights, for ``best``; rank 0's counts.

        Returns:
            Whether a save was made, or begun.

        Raises:
            ValueError: for a score without ``best``.
            SystemExit: with code 75, after a signal and a save.
            SnapshotError: on every rank, if this save or one in the background failed; training itself is unharmed.
        """
        if not self.accelerator.sync_gradients:
            if score is not None:
                raise ValueError(f"score is {score!r} inside an accumulation window, when no weights have changed yet.")
            return False
        self.steps += 1
        better = self._scores.note(score) and self.accelerator.is_main_process
        by_clock = self.minutes is not None and time.monotonic() - self._saved_at >= 60 * self.minutes
        late, signalled, failed, better = self._meeting.any_rank(
            by_clock, self._signal is not None, self._writer.failed, better
        )
        if failed:
            self._writer.raise_failure()
        due = self.every is not None and self.steps % self.every == 0
        if due or late or signalled or better or self._asked:
            self.save()
        if signalled:
            self.wait()
            self._signal = None
            logger.info("stopped by a signal after step %d; start again to go on", self.steps, main_process_only=True)
            raise SystemExit(PREEMPTED)
        return self._writer.last is not None and self._writer.last[0] == self.steps

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
        if self._writer.last is not None and self._writer.last[0] == self.steps:
            return self._writer.last[1]
        self._meeting.meet()
        failed = self._writer.finish()
        started = time.monotonic()
        staged = self._staged(failed)
        self._writer.write(staged, self.steps)
        self._saved_at = time.monotonic()
        what = f"step {self.steps}: training stood still for {self._saved_at - started:.3f} s to save {staged.target}"
        logger.info("%s", what, main_process_only=True)
        return staged.target

    def _staged(self, failed: bool) -> StagedSnapshot:
        """Agree on a snapshot of this moment; one that is written in the background is copied first.

        Args:
            failed: whether the save before it failed on this rank: then all ranks raise, and this one is not made.
        """
        model, optimizer = self.accelerator.trained
        with torch.no_grad():  # else every local part of a DTensor is taken through autograd, while training waits
            layout = self.accelerator.backend.snapshot_layout(self.accelerator, model, optimizer)
        # All that the ranks must tell each other, in one collective: each is a wait, and training waits too.
        told: Any = None
        with attempt() as failure:
            free = self._snapshots.place_for(self.steps) if self.accelerator.is_main_process else None
            cursors = self._cursors | {name: batches.state_dict() for name, batches in self._batches.items()}
            data = encode(cursors, "place in the data")
            collected = Collected(self.accelerator, layout, self.progress)
            told = (free, str(self.folder), self._stager.unchanged(layout), collected.offer)
        everyones = self._meeting.gather((failed, failure, told))
        if any(late for late, *_ in everyones):
            self._writer.raise_failure()
        raise_any(f"nothing was saved into {str(self.folder)!r}", [failure for _, failure, _ in everyones])
        answers = [answer for *_, answer in everyones]
        check_one_folder([folder for _, folder, _, _ in answers])
        target, number = answers[0][0]
        facts, own = collected.settle([offer for *_, offer in answers])
        facts |= {"step": self.steps, "sequence": number, "launch": self._snapshots.launch, "data": data}
        facts |= self._own_facts()
        keep_plan = all(same for _, _, same, _ in answers)
        return self._stager.stage(target, layout, facts, own, keep_plan=keep_plan)

    def _own_facts(self) -> dict[str, Any]:
        """Return what the manifest says of the run as a whole; rank 0's counts."""
        self._tracker_runs |= logged_to(self.accelerator.trackers)
        return {"run": self._run, "tracker_runs": dict(self._tracker_runs)} | self._scores.facts()

    def _committed(self, staged: StagedSnapshot) -> None:
        self._scores.saved(staged.facts)
        if self.keep is not None and self.accelerator.is_main_process:
            self._snapshots.retain(self.keep, self.best() if self._scores.mode is not None else None)

    def wait(self, limit: float | None = None) -> None:
        """Wait until no save is in flight. Local.

        Args:
            limit: seconds; after them it returns, and the save goes on. The next one waits for it.

        Raises:
            SnapshotError: if the save failed.
        """
        self._writer.wait(limit)

    def best(self) -> Place | None:
        """Return this run's snapshot with the best score, if any is left. Local; rank 0 alone need call it.

        Raises:
            ValueError: if nothing says what is best.
            OSError: if the folder cannot be listed.
        """
        return self._snapshots.best(self._run, self._scores.require())

    def pin(self, snapshot: str | Place) -> None:
        """Keep a snapshot whatever :attr:`keep` says. Local; rank 0 alone need call it.

        Raises:
            SnapshotError: if there is no such snapshot.
        """
        folder = place(snapshot)
        try:
            if not (folder / MANIFEST).is_file():
                raise SnapshotError(f"{str(folder)!r} is no snapshot, so it cannot be pinned.")
            (folder / PIN).touch()
        except OSError as error:
            raise SnapshotError(f"{str(folder)!r} could not be pinned: {error}") from error

    # ---- resuming --------------------------------------------------------------------------------------------

    def resume(self, source: str | Place = "auto", *, weights_only: bool = False) -> bool:
        """Go on from a snapshot, whatever policy and number of ranks wrote it. Every rank must call it.

        Args:
            source: ``auto`` for the newest in the folder that can be trusted, ``none`` for a fresh start, or the path
                of one snapshot, which then must be good; or of a checkpoint that Accelerate, HF Trainer, DeepSpeed or
                ``torch.save`` wrote. The random state of such a one is not taken over.
            weights_only: with a path: take the weights over and nothing else; the run starts at step 0.

        Returns:
            Whether there was one; False is a fresh start.

        Raises:
            SnapshotError: if the named snapshot, or every snapshot in the folder, is bad, or is of another model.
            ValueError: for ``weights_only`` without a path.
        """
        self._writer.settle()
        named = source not in ("auto", "none")
        if weights_only and not named:
            raise ValueError(f"weights_only=True with source {source!r}. Allowed: with the path of a checkpoint.")
        if source == "none":
            return False
        if named and (weights_only or not is_snapshot(place(source))):
            self._start_from(place(source), weights_only)
            return True
        refused = []
        for path in [place(source)] if named else candidates(self._snapshots):
            snapshot, fault = trusted(path)
            if snapshot is not None:
                self._restore(snapshot)
                return True
            refused.append(fault)
            self._snapshots.refused.add(path)
            logger.warning("skipped a snapshot: %s", fault, main_process_only=True)
        if refused:
            raise SnapshotError("no snapshot can be trusted: " + "; ".join(refused))
        return False

    def _start_from(self, path: Place, weights_only: bool) -> None:
        """Start from what something else wrote, or from a snapshot's weights: a run of its own, not yet saved."""
        steps = 0
        if not is_snapshot(path):
            if isinstance(path, RemotePath):
                raise SnapshotError(f"{path} is no snapshot, and what others wrote is read from disks: copy it to one.")
            steps = start_from(self.accelerator, path, weights_only=weights_only)
        else:
            snapshot, fault = trusted(path)
            if snapshot is None:
                raise SnapshotError(f"no snapshot can be trusted: {fault}")
            restore_weights(self.accelerator, snapshot)
            logger.info("started from the weights of %s", path, main_process_only=True)
        self.steps, self._writer.last, self._saved_at = steps, None, time.monotonic()

    def _restore(self, snapshot: Snapshot) -> None:
        self.progress = restore(self.accelerator, snapshot)
        self.steps = snapshot.manifest["step"]
        # One from elsewhere is not in this folder yet, should the loop ask for a save at once.
        self._writer.last = (self.steps, snapshot.folder) if snapshot.folder.parent == self.folder else None
        self._saved_at = time.monotonic()
        facts = snapshot.manifest
        self._run, self._tracker_runs = facts.get("run", self._run), dict(facts.get("tracker_runs", {}))
        self._scores.saved(facts)
        self._cursors = decode(facts.get("data", {}))
        for name, batches in self._batches.items():
            if name in self._cursors:
                batches.load_state_dict(self._cursors[name])
        former, note = facts["world_size"], ""
        if former != self.accelerator.num_processes:
            note = f" (saved by {former} ranks; new ranks got random streams of their own)"
        logger.info("resumed %s after step %d%s", snapshot.folder, self.steps, note, main_process_only=True)
        # Last: what comes before may draw numbers.
        restore_random_state(self.accelerator, snapshot)

    def tracker_arguments(self) -> dict[str, dict[str, Any]]:
        """Return the ``init_kwargs`` with which ``init_trackers`` goes on in the run's own W&B or MLflow run. Local.

        Call it after :meth:`resume`; a fresh start has none. Merge yours in, if you have any.
        """
        return to_go_on(self._tracker_runs)

    # ---- data ------------------------------------------------------------------------------------------------

    def batches(
        self,
        loader: Any,
        *,
        epochs: int | None = None,
        seed: int = 0,
        padding: int | None = None,
        shuffle_window: int = 0,
        name: str = "train",
    ) -> Batches:
        """Iterate over a loader from where the run is: each sample once an epoch, however often the run was stopped.

        The order is a function of ``seed`` and epoch, so it is the same on any number of ranks and workers, as long as
        micro-batch x ranks x accumulation stays what it was. ``shuffle=True``, a sampler or a batch sampler of your own
        decide what it is. What a dataset or collator draws at random belongs to the sample's place in the order.
        Communicates nothing; every rank must iterate alike. Skipped samples of a map-style dataset are not read; of a
        stream, at most ``shuffle_window`` or 64 are read again if it has a state (``datasets`` without a shuffle
        buffer), else all of the epoch's. Every rank reads the whole stream, and one worker process does it.

        The place that is saved is that of the micro-batches handed out so far: do not take any of the next step's.

        Args:
            loader: a prepared loader, or a ``DataLoader``. ``drop_last`` leaves out the end of an epoch that does not
                fill an optimizer step; without it the next epoch fills it up, so no sample is dropped or seen twice.
            epochs: of the whole run, over all its launches; None never ends.
            seed: of the order.
            padding: an index for which the dataset gives a sample of no weight; it fills up an epoch's last step.
            shuffle_window: shuffle a stream within windows of so many samples.
            name: under which the place is saved; each loader of a run needs its own.

        Raises:
            DataOrderError: if the loader's order cannot be fixed, or is not that of the snapshot.
        """
        batches = batches_of(self.accelerator, loader, seed, epochs, padding, shuffle_window)
        if name in self._cursors:
            batches.load_state_dict(self._cursors[name])
        self._batches[name] = batches
        return batches
