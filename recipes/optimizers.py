"""The optimizers of the recipes: AdamW, and matrix optimizers beside AdamW for what is no matrix."""

from __future__ import annotations

from typing import Any, Final

import torch
import yaml

import accel_shard
from accel_shard import parameter_groups
from accel_shard.errors import unknown_name

__all__ = ["OPTIMIZERS", "build_optimizer"]

OPTIMIZERS: Final = {
    "adamw": torch.optim.AdamW,
    "shampoo": accel_shard.Shampoo,
    "soap": accel_shard.SOAP,
    "muon": accel_shard.Muon,
    "galore": accel_shard.GaLore,
}


def build_optimizer(
    name: str, model: torch.nn.Module, *, lr: float, weight_decay: float, betas: tuple[float, float], eps: float,
    more: str | None,
) -> torch.optim.Optimizer:  # fmt: skip
    """Return an optimizer that decays matrices only.

    Args:
        name: a key of :data:`OPTIMIZERS`.
        model: not prepared yet.
        lr: learning rate, of all parameters.
        weight_decay: of parameters of two dimensions or more.
        betas: of AdamW; under a matrix optimizer of what is no matrix.
        eps: as ``betas``.
        more: further settings of the optimizer, as ``name=value,name=value``.

    Raises:
        ValueError: for a name that is not in :data:`OPTIMIZERS`, or a setting that the optimizer does not know.
    """
    if name not in OPTIMIZERS:
        raise ValueError(unknown_name("--optimizer", name, tuple(OPTIMIZERS)))
    settings = dict(_parse(part) for part in more.split(",")) if more else {}
    groups = parameter_groups(model, weight_decay=weight_decay)
    if name != "adamw":
        return OPTIMIZERS[name](groups, lr=lr, adamw_betas=betas, adamw_eps=eps, **settings)
    alike: dict[float, list[Any]] = {}
    for group in groups:
        alike.setdefault(group["weight_decay"], []).extend(group["params"])
    plain = [{"params": params, "weight_decay": decay} for decay, params in alike.items()]
    try:
        return torch.optim.AdamW(plain, **{"lr": lr, "betas": betas, "eps": eps} | settings)
    except TypeError as error:
        raise ValueError(f"--optim_args {more!r}: {error}") from error


def _parse(part: str) -> tuple[str, Any]:
    name, separator, value = part.partition("=")
    if not separator:
        raise ValueError(f"--optim_args: {part!r} is not of the form name=value.")
    return name.strip(), yaml.safe_load(value)
