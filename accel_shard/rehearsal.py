"""Rehearsal: the real FSDP1, FSDP2, HSDP and DeepSpeed ZeRO on CPU ranks, when no accelerator device is there.

Accelerate alone does something else without a word: ``Accelerator(cpu=True, fsdp_plugin=...)`` becomes plain DDP,
and without ``cpu=True`` each rank becomes an unconnected run of its own. This module is the only one that reaches
into Accelerate's and DeepSpeed's state to prevent that. It depends on these upstream names (accelerate 1.15.0,
deepspeed 0.19.8); :func:`probe` says which one has gone:

* ``accelerate.state.PartialState._shared_state``, a dict with ``distributed_type`` and ``device`` (state.py,
  ``PartialState.__init__``), from which ``AcceleratorState.__init__`` chooses FSDP only if the type is one of the
  multi-device kinds (``self.distributed_type in [DistributedType.MULTI_GPU, ...]``);
* ``PartialState(backend="gloo")`` without ``cpu=True`` keeping the type for DeepSpeed
  (``PartialState._prepare_backend`` returns the given backend untouched when there is no device);
* ``deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"]``, read by ``deepspeed.comm.torch.TorchBackend`` to
  decide whether to compile a shared-memory operator that ZeRO never calls.
"""

from __future__ import annotations

import atexit
import datetime
import os
import time
from pathlib import Path
from typing import Any, Final

from accel_shard.errors import UnsupportedPolicyError
from accel_shard.policy import ShardingPolicy

__all__ = [
    "TIMEOUT_VARIABLE",
    "deepspeed_group_arguments",
    "default_timeout",
    "enter",
    "is_needed",
    "probe",
    "refuse_on_cpu",
]

TIMEOUT_VARIABLE: Final = "ACCEL_SHARD_TIMEOUT_SECONDS"


def is_needed() -> bool:
    """Tell whether this process has no device that can take part in a run of several ranks, or must leave it alone."""
    import torch

    if os.environ.get("ACCELERATE_USE_CPU", "false").lower() == "true":
        return True
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    # Apple's GPU has no collectives; a run of one process may use it.
    return device is None or (device.type == "mps" and "LOCAL_RANK" in os.environ)


def refuse_on_cpu(policy: ShardingPolicy) -> None:
    """Refuse what a CPU rank cannot do, before any process group exists.

    Raises:
        UnsupportedPolicyError: naming the field and the policy to rehearse with instead.
    """
    dtypes = policy.dtypes
    if "fp16" in (dtypes.compute, dtypes.reduce):
        raise UnsupportedPolicyError(
            f"precision has fp16 (compute {dtypes.compute!r}, reduce {dtypes.reduce!r}), which needs an accelerator "
            "device; on CPU Accelerate would compute in fp32 without a word. Rehearse with bf16 or fp32."
        )
    if policy.gradient_compression == "bf16":
        raise UnsupportedPolicyError(
            "gradient_compression 'bf16' needs NCCL. Rehearse with gradient_compression 'fp16' or 'none'."
        )


def enter(policy: ShardingPolicy, timeout: datetime.timedelta | None = None) -> None:
    """Connect the CPU ranks and let Accelerate take them for devices of the policy's backend.

    Every rank must call it before any ``Accelerator`` (for HF Trainer: after ``TrainingArguments`` are made) exists.
    It initialises the gloo process group, if there is a launcher and no group yet (DeepSpeed: Accelerate does).

    Args:
        policy: what will be rehearsed.
        timeout: how long a collective may wait for a rank; None is :func:`default_timeout`.

    Raises:
        UnsupportedPolicyError: if the policy cannot be rehearsed, or upstream has lost a name this rests on.
    """
    refuse_on_cpu(policy)
    atexit.register(_disconnect)
    missing = probe(policy.backend)
    if missing:
        raise UnsupportedPolicyError(
            f"cannot rehearse backend {policy.backend!r} without a device: the installed libraries no longer have "
            f"{', '.join(missing)}. Use the versions of constraints.txt, or a machine with a device."
        )
    if policy.backend == "deepspeed":
        _enter_deepspeed()
        return
    import torch
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=True, timeout=timeout or default_timeout())
    # A second accelerator in one process finds the type that the first one made of it.
    chosen = PartialState._shared_state["distributed_type"]
    if policy.backend in ("fsdp", "fsdp1") and chosen != DistributedType.FSDP:
        # FSDP1 refuses "cpu:0", so the device has no index.
        PartialState._shared_state.update(distributed_type=DistributedType.MULTI_GPU, device=torch.device("cpu"))


def _disconnect() -> None:
    """Leave the process group, and let gloo's threads come to rest before Python ends.

    A gloo thread drops the tensors of a collective after it has reported the end of it, for which it needs Python. If
    Python is ending by then, the thread is ended inside a destructor and the process aborts, after all work was done:
    seen in 5 of 12 runs of FSDP1 on busy cores (torch 2.13).
    """
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    calm, deadline = 0, time.monotonic() + 2.0
    while calm < 3 and time.monotonic() < deadline:
        time.sleep(0.005)  # gives up the interpreter, which a waiting thread then gets
        calm = calm + 1 if all(state == "S" for state in _gloo_threads()) else 0


def _gloo_threads() -> list[str]:
    """Return the scheduler's state of each gloo worker thread, as Linux tells it: S is asleep; elsewhere nothing."""
    states = []
    for task in Path("/proc/self/task").glob("*"):
        try:
            if (task / "comm").read_text().startswith("pt_gloo"):
                states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
        except OSError:
            continue  # it ended meanwhile
    return states


def _enter_deepspeed() -> None:
    # DeepSpeed logs and picks kernels by this variable; set late it would choose by guessing.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    # Semi-private, so guarded by probe(). Without it every CPU start compiles an operator that ZeRO never uses.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def deepspeed_group_arguments() -> dict[str, Any]:
    """Return what ``InitProcessGroupKwargs`` needs so that DeepSpeed's ranks find each other on CPU."""
    return {"backend": "gloo", "timeout": default_timeout()}


def default_timeout() -> datetime.timedelta:
    """Return how long a collective may wait for a rank: torch's half hour, unless the environment says less."""
    return datetime.timedelta(seconds=float(os.environ.get(TIMEOUT_VARIABLE, "1800")))


def probe(backend: str) -> list[str]:
    """Return the upstream names that this module needs for a backend and that are not there any more."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    missing = []
    if not hasattr(PartialState, "_shared_state"):
        missing.append("accelerate.PartialState._shared_state")
    if not hasattr(DistributedType, "MULTI_GPU"):
        missing.append("accelerate.utils.DistributedType.MULTI_GPU")
    if backend == "deepspeed":
        import deepspeed

        if not hasattr(getattr(deepspeed.ops, "__compatible_ops__", None), "__setitem__"):
            missing.append("deepspeed.ops.__compatible_ops__")
    return missing
