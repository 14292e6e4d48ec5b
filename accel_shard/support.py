"""Which field of a policy each backend honours: data, not code.

Every (field, backend, value) is either *exact* or *refused*. A refusal gives the reason and the change that
leads to the nearest policy that works. Error messages, ``accel-shard explain``, the matrix in README and the
parity tests read this table; nothing else decides what is supported. A field that has no row here is exact on
every backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Final

__all__ = ["BACKENDS", "FIELDS", "REFUSALS", "Refusal", "find_refusal", "matrix"]

BACKENDS: Final = ("ddp", "fsdp1", "fsdp", "deepspeed")

# Dotted names are parts of `precision`. The order is the one in which a person reads a policy.
FIELDS: Final = (
    "shard",
    "replicas",
    "tensor_parallel",
    "context_parallel",
    "precision.master",
    "precision.compute",
    "precision.reduce",
    "precision.save",
    "wrap",
    "offload",
    "offload_path",
    "activation_checkpointing",
    "compile",
    "gradient_clipping",
    "gradient_accumulation_steps",
    "global_batch_size",
    "gradient_reduce",
    "gradient_compression",
    "local_sgd",
)

ANY: Final = "anything but the default"

# Values that mean "not asked for": a refusal for ANY does not apply to them.
DEFAULTS: Final[Mapping[str, object]] = {
    "replicas": 1,
    "tensor_parallel": 1,
    "context_parallel": 1,
    "wrap": "auto",
    "offload": "none",
    "offload_path": None,
    "activation_checkpointing": False,
    "compile": False,
    "gradient_reduce": "all",
    "gradient_compression": "none",
    "local_sgd": 1,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """One thing that some backends cannot honour."""

    field: str
    """The field, as in :data:`FIELDS`."""
    backends: tuple[str, ...]
    values: tuple[object, ...] | str = ANY
    """The refused values; :data:`ANY` means every value but the default."""
    when: Mapping[str, tuple[object, ...]] = dataclass_field(default_factory=dict)
    """Further fields that must have one of these values for the refusal to apply."""
    reason: str
    instead: Mapping[str, object]
    """Changes that turn the refused policy into the nearest one that works."""

    def applies(self, values: Mapping[str, object]) -> bool:
        """Tell whether a policy with these (flattened) field values is refused by this row."""
        if not isinstance(self.values, str):
            hit = values[self.field] in self.values
        else:
            hit = values[self.field] != DEFAULTS[self.field]
        return hit and all(values[name] in allowed for name, allowed in self.when.items())


_ALL = BACKENDS
_FSDP = ("fsdp1", "fsdp")

REFUSALS: Final[tuple[Refusal, ...]] = (
    Refusal(
        field="shard",
        backends=("ddp",),
        values=("gradients", "parameters"),
        reason="DDP keeps whole gradients and parameters on every rank",
        instead={"backend": "fsdp"},
    ),
    Refusal(
        field="shard",
        backends=_FSDP,
        values=("none",),
        reason="FSDP always shards; its NO_SHARD strategy is deprecated by PyTorch in favour of DDP",
        instead={
            "backend": "ddp",
            "replicas": 1,
            "wrap": "auto",
            "offload": "none",
            "precision.reduce": "fp32",
        },
    ),
    Refusal(
        field="shard",
        backends=_FSDP,
        values=("optimizer",),
        reason="FSDP reduce-scatters gradients, so it shards them whenever it shards the optimizer state",
        instead={"shard": "gradients"},
    ),
    Refusal(
        field="replicas",
        backends=("ddp",),
        reason="under DDP every rank is a replica already, and an optimizer state that is shared out is so over all",
        instead={"replicas": 1},
    ),
    Refusal(
        field="replicas",
        backends=("fsdp1",),
        reason="Accelerate gives FSDP1 no process groups, so HYBRID_SHARD always replicates across nodes, "
        "whatever the number asked for",
        instead={"backend": "fsdp"},
    ),
    Refusal(
        field="replicas",
        backends=("deepspeed",),
        reason="ZeRO hierarchical partitioning keeps a second copy of the weights only; gradients and "
        "optimizer state stay sharded over all ranks",
        instead={"backend": "fsdp", "shard": "parameters", "offload": "none", "offload_path": None},
    ),
    Refusal(
        field="tensor_parallel",
        backends=_ALL,
        reason="Accelerate 1.15 prepares tensor parallelism with a class that transformers 5 removed",
        instead={"tensor_parallel": 1},
    ),
    Refusal(
        field="context_parallel",
        backends=_ALL,
        reason="ring attention has no CPU kernels, so it cannot be rehearsed or tested here yet",
        instead={"context_parallel": 1},
    ),
    Refusal(
        field="precision.compute",
        backends=("deepspeed",),
        values=("bf16", "fp16"),
        when={"shard": ("none",)},
        reason="DeepSpeed's ZeRO stage 0 runs one extra optimizer step with zero gradients at start in 16 bit",
        instead={"shard": "optimizer"},
    ),
    Refusal(
        field="precision.master",
        backends=("deepspeed",),
        values=("bf16",),
        when={"offload": ("optimizer", "parameters")},
        reason="DeepSpeed's offloaded optimizer keeps its masters in fp32",
        instead={"precision.master": "fp32"},
    ),
    Refusal(
        field="precision.reduce",
        backends=("ddp",),
        values=("fp16",),
        reason="DDP reduces gradients in the dtype of the weights, and torch unscales no fp16 gradients; fewer bytes "
        "are had by gradient_compression",
        instead={"precision.reduce": "fp32"},
    ),
    Refusal(
        field="precision.reduce",
        backends=("ddp",),
        values=("bf16",),
        when={"precision.master": ("fp32",), "shard": ("none",)},
        reason="DDP reduces gradients in the dtype of the weights, which here are the masters; fewer bytes are had by "
        "gradient_compression, or with masters apart: shard 'optimizer'",
        instead={"precision.reduce": "fp32"},
    ),
    Refusal(
        field="precision.reduce",
        backends=("ddp",),
        values=("bf16",),
        when={"precision.master": ("fp32",), "precision.compute": ("fp32", "fp16")},
        reason="DDP reduces gradients in the dtype of the weights, and weights of bf16 compute in bf16",
        instead={"precision.compute": "bf16"},
    ),
    Refusal(
        field="precision.reduce",
        backends=("deepspeed",),
        values=("bf16", "fp16"),
        when={"precision.compute": ("fp32",)},
        reason="DeepSpeed reduces fp32 gradients in fp32",
        instead={"precision.reduce": "fp32"},
    ),
    Refusal(
        field="wrap",
        backends=("ddp", "deepspeed"),
        when={"activation_checkpointing": (False,)},
        reason="only FSDP has units to wrap; elsewhere wrap names the blocks to recompute",
        instead={"wrap": "auto"},
    ),
    Refusal(
        field="offload",
        backends=("ddp",),
        reason="DDP keeps everything on the device",
        instead={"backend": "deepspeed", "shard": "optimizer", "offload": "optimizer"},
    ),
    Refusal(
        field="offload",
        backends=("fsdp1",),
        reason="FSDP1 pins host memory unconditionally, so it cannot be rehearsed without a device",
        instead={"backend": "fsdp", "offload": "parameters"},
    ),
    Refusal(
        field="offload",
        backends=("fsdp",),
        values=("optimizer",),
        reason="FSDP moves parameters, gradients and optimizer state to the host together or not at all",
        instead={"offload": "parameters"},
    ),
    Refusal(
        field="offload",
        backends=("deepspeed",),
        when={"shard": ("none",)},
        reason="ZeRO-Offload needs a sharded optimizer state",
        instead={"shard": "optimizer", "offload": "optimizer"},
    ),
    Refusal(
        field="offload",
        backends=("deepspeed",),
        values=("parameters",),
        when={"shard": ("optimizer", "gradients")},
        reason="DeepSpeed offloads parameters only when it shards them (ZeRO stage 3)",
        instead={"shard": "parameters"},
    ),
    Refusal(
        field="offload_path",
        backends=("ddp", *_FSDP),
        reason="only DeepSpeed (ZeRO-Infinity) offloads to a file system",
        instead={"offload_path": None},
    ),
    Refusal(
        field="offload_path",
        backends=("deepspeed",),
        when={"shard": ("none", "optimizer", "gradients")},
        reason="ZeRO-Infinity needs sharded parameters (stage 3)",
        instead={"shard": "parameters"},
    ),
    Refusal(
        field="gradient_reduce",
        backends=_FSDP,
        reason="FSDP sends each gradient to the rank that updates it as it is",
        instead={"gradient_reduce": "all"},
    ),
    Refusal(
        field="gradient_reduce",
        backends=("deepspeed",),
        reason="DeepSpeed decides by the ZeRO stage who gets a gradient",
        instead={"gradient_reduce": "all"},
    ),
    Refusal(
        field="gradient_reduce",
        backends=("ddp",),
        when={"shard": ("none",)},
        reason="every rank updates every weight, and needs its gradient",
        instead={"shard": "optimizer"},
    ),
    Refusal(
        field="gradient_reduce",
        backends=("ddp",),
        when={"gradient_compression": ("fp16", "bf16", "powersgd")},
        reason="each is a communication hook, and DDP has one",
        instead={"gradient_compression": "none"},
    ),
    Refusal(
        field="gradient_reduce",
        backends=("ddp",),
        when={"precision.compute": ("fp16",)},
        reason="a rank would see what overflowed in its own share only",
        instead={"gradient_reduce": "all"},
    ),
    Refusal(
        field="gradient_compression",
        backends=(*_FSDP, "deepspeed"),
        reason="compression hooks exist for DDP only; here the dtype on the wire is precision.reduce",
        instead={"gradient_compression": "none"},
    ),
    Refusal(
        field="local_sgd",
        backends=(*_FSDP, "deepspeed"),
        reason="ranks that train by themselves each need all weights and all of the optimizer state",
        instead={"local_sgd": 1},
    ),
    Refusal(
        field="local_sgd",
        backends=("ddp",),
        when={"shard": ("optimizer",)},
        reason="a rank that trains by itself needs all of the optimizer state",
        instead={"local_sgd": 1},
    ),
    Refusal(
        field="local_sgd",
        backends=("ddp",),
        when={"gradient_compression": ("fp16", "bf16", "powersgd")},
        reason="no gradients are sent, so there is nothing to compress",
        instead={"gradient_compression": "none"},
    ),
    Refusal(
        field="local_sgd",
        backends=("ddp",),
        when={"precision.compute": ("fp16",)},
        reason="each rank would scale its loss by another number and skip other steps",
        instead={"precision.compute": "bf16"},
    ),
)


def find_refusal(backend: str, values: Mapping[str, object]) -> Refusal | None:
    """Return the first row that refuses these (flattened) field values on this backend, if any."""
    return next((r for r in REFUSALS if backend in r.backends and r.applies(values)), None)


def matrix() -> str:
    """Render the whole table as Markdown: one row a field, one column a backend."""
    lines = [
        "| field | " + " | ".join(f"`{b}`" for b in BACKENDS) + " |",
        "| --- |" + " --- |" * len(BACKENDS),
    ]
    for name in FIELDS:
        cells = [_cell([r for r in REFUSALS if r.field == name and backend in r.backends]) for backend in BACKENDS]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(rows: list[Refusal]) -> str:
    if not rows:
        return "exact"
    if any(isinstance(r.values, str) and not r.when for r in rows):
        return "refused"
    parts = []
    for row in rows:
        values = "any" if isinstance(row.values, str) else ", ".join(f"`{v}`" for v in row.values)
        given = "; ".join(f"{k} {'/'.join(map(str, v))}" for k, v in row.when.items())
        parts.append(f"{values} ({given})" if given else values)
    return "exact, but not " + "; not ".join(parts)
