"""Parameter groups for a matrix optimizer: which parameters of a model are matrices in its sense."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from torch import nn

__all__ = ["ADAMW_NAMES", "parameter_groups"]

ADAMW_NAMES: Final = ("embed", "token", "position", "lm_head", "classifier", "score")
"""Parts of parameter names that say embedding or head: rows that are looked up, not mixed, or a side of any length."""


def parameter_groups(
    model: nn.Module, *, weight_decay: float = 0.1, adamw_names: Sequence[str] = ADAMW_NAMES
) -> list[dict[str, Any]]:
    """Return groups for ``Shampoo``, ``SOAP``, ``Muon`` and ``GaLore``: matrices to them, the rest to AdamW.

    To AdamW go parameters of one dimension (without weight decay), and with it those of ``nn.Embedding``, of what
    transformers calls the output embeddings, and those with one of ``adamw_names`` in their names. A parameter of three
    dimensions is a stack of matrices, as experts are: each is preconditioned by itself. Convolutions are matrices of
    their output channels. Frozen parameters are left out.

    Args:
        model: before or after ``prepare``; under FSDP1 and DeepSpeed before.
        weight_decay: of all parameters of two dimensions or more.
        adamw_names: parts of names; ``()`` for none.
    """
    looked_up = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    looked_up |= {id(p) for p in head.parameters()} if isinstance(head, nn.Module) else set()
    groups: dict[tuple[str, float, int], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 empties what it loads; this is the whole
        core = "matrix"
        if len(shape) < 2 or id(parameter) in looked_up or any(part in name for part in adamw_names):
            core = "adamw"
        decay = weight_decay if len(shape) > 1 else 0.0
        stacked = shape[0] if core == "matrix" and len(shape) == 3 else 1
        group = groups.setdefault((core, decay, stacked), {"params": [], "core": core, "weight_decay": decay})
        if stacked > 1:
            group |= {"row_dims": 2, "heads": stacked}
        group["params"].append(parameter)
    return list(groups.values())
