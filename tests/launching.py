"""Real launches: `accelerate launch` and `torchrun` in processes of their own, with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT = 150.0


class LaunchError(AssertionError):
    """A launch failed; the message ends with what it printed."""


def environment(**extra: str) -> dict[str, str]:
    """The environment of a launch: offline, one thread a rank, a minute for a collective."""
    return os.environ | {
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCEL_SHARD_TIMEOUT_SECONDS": "60", "MPLBACKEND": "agg",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    } | extra  # fmt: skip


def start(command: Sequence[str], log: Path, **extra: str) -> subprocess.Popen[str]:
    """Start a launcher in a session of its own, so that its ranks can be ended with it."""
    with log.open("w") as file:
        return subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment(**extra),
            start_new_session=True,
        )  # fmt: skip


def finish(process: subprocess.Popen[str], log: Path, limit: float = LIMIT, *, code: int = 0) -> str:
    """Wait for a launcher; return its output, or raise with it if it failed or outlasted the limit."""
    try:
        got: int | None = process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        got = None
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    output = log.read_text()
    if got is None or (got == 0) != (code == 0):
        raise LaunchError(f"exit code {got} (None: outlasted {limit} s) of {process.args}\n{output[-6000:]}")
    return output


def accelerate(*arguments: str, ranks: int) -> list[str]:
    """The command line of `accelerate launch`."""
    entry = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    return [*entry, "--num_processes", str(ranks), "--main_process_port", "0", *arguments]


def torchrun(*arguments: str, ranks: int) -> list[str]:
    """The command line of `torchrun`."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *arguments]
