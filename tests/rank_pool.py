"""Ranks for tests: processes started once a session, connected by gloo, that run functions sent to them.

The idea is that of torch's continuous multi-process tests: the start of a rank (importing torch, connecting) costs
seconds, a test on warm ranks costs milliseconds. A task that outlasts its limit fails with the stack of every rank.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

FOREIGN = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "ACCEL_SHARD_")


class RankPool:
    """``world`` connected processes. ``run`` sends one function to all of them and returns their results in order."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        atexit.register(self.stop)

    def run(self, function: Callable[..., Any], *args: Any, limit: float = 120.0, **kwargs: Any) -> list[Any]:
        """Run ``function(*args, **kwargs)`` on every rank; raise if any rank raised, with its traceback."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + limit
        while len(results) < self.world:
            waiting = [p for r, p in enumerate(self._pipes) if r not in results]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                stacks = self._stacks(set(range(self.world)) - results.keys())
                self.stop()
                raise TimeoutError(f"{function.__name__} outlasted {limit} s; ranks done: {sorted(results)}\n{stacks}")
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    results[rank] = pipe.recv()
                except EOFError:
                    self.stop()
                    raise RuntimeError(f"rank {rank} died in {function.__name__}") from None
        failures = [f"--- rank {r} ---\n{results[r][1]}" for r in range(self.world) if not results[r][0]]
        if failures:
            endings = {results[r][1].strip().rpartition("\n")[2] for r in range(self.world)}
            if len(failures) < self.world or len(endings) > 1:
                self.stop()  # ranks that failed apart are out of step in their collectives
            raise RankError("\n".join(failures))
        return [results[r][1] for r in range(self.world)]

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            arguments = (rank, self.world, port, theirs, str(self._stack_file(rank)))
            process = context.Process(target=_serve, args=arguments)  # no daemon: loaders have workers
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _stack_file(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank{rank}"

    def _stacks(self, ranks: set[int]) -> str:
        for rank in ranks:
            os.kill(self._processes[rank].pid, signal.SIGUSR2)
        for rank in ranks:
            self._processes[rank].join(timeout=1.0)  # gives the handler time to write
        return "\n".join(f"--- rank {r} ---\n{self._stack_file(r).read_text()}" for r in sorted(ranks))

    def stop(self) -> None:
        """End every rank; the next ``run`` starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes = [], []


class RankError(AssertionError):
    """One or more ranks raised; the message holds their tracebacks."""


def _serve(rank: int, world: int, port: int, pipe: Connection, stack_file: str) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", ACCEL_SHARD_TIMEOUT_SECONDS="60",
        DS_ACCELERATOR="cpu",
    )  # fmt: skip
    stacks = Path(stack_file).open("w")  # noqa: SIM115  # faulthandler writes to it as long as the rank lives
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    import datetime

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60))
    clean = dict(os.environ)
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        _forget_accelerate(clean)
        _leave_groups()
        torch.manual_seed(1234)
        try:
            pipe.send((True, function(*args, **kwargs)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        sys.stdout.flush()


def _forget_accelerate(environ: dict[str, str]) -> None:
    """Give the next task a process in which Accelerate was never used; the process group stays."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    for name in list(os.environ):
        if name not in environ and name.startswith(FOREIGN):
            del os.environ[name]


def _leave_groups() -> None:
    """Leave the groups of earlier tasks' checkpointers, once all ranks are done with them.

    Each gloo group has a thread that wakes up a hundred times a second; after some hundred tasks they take all there is.
    """
    import torch.distributed as dist

    gc.collect()  # what holds a group keeps its thread
    for group in list(dist.distributed_c10d._world.pg_map):
        if group.group_desc.startswith("accel_shard"):
            dist.destroy_process_group(group)
