"""The layout of optimizers that see the model's own parameters: under DDP, FSDP1, FSDP2 and ZeRO stage 0.

An optimizer that shares out its state itself (:class:`~accel_shard.layout.ShardsState`) describes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from accel_shard.errors import UnsupportedPolicyError
from accel_shard.layout import Layout, Shard, ShardsState
from accel_shard.names import persistent_buffers

if TYPE_CHECKING:
    import torch

__all__ = ["StateShape", "describe", "group_layout", "group_settings", "materialize", "name_parameters", "scalar_on"]

StateShape = tuple[tuple[int, ...], "torch.dtype"]
"""Shape and dtype of a stored state tensor."""


def name_parameters(model: torch.nn.Module) -> tuple[dict[str, torch.nn.Parameter], dict[str, str]]:
    """Return the parameters by canonical name, tied ones once, and the further names of tied ones."""
    from accel_shard.names import canonical

    parameters: dict[str, torch.nn.Parameter] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for raw, parameter in model.named_parameters(remove_duplicate=False):
        name = canonical(raw)
        if id(parameter) in first:
            aliases[name] = first[id(parameter)]
        else:
            first[id(parameter)] = name
            parameters[name] = parameter
    return parameters, aliases


def describe(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    shard_of: Callable[[str, torch.Tensor], Shard],
    *,
    replicated: bool,
) -> Layout:
    """Describe a model, and the state that its optimizer keeps for its parameters.

    Args:
        model: the prepared model, without wrappers that rename (DDP's ``module.``).
        optimizer: the torch optimizer inside the prepared one, or None.
        shard_of: describes a tensor that is laid out as the named parameter is.
        replicated: whether every rank holds everything, so that a state of any shape is the same on each.

    Raises:
        UnsupportedPolicyError: for a state tensor that is not laid out as its parameter, where those are sharded.
    """
    parameters, aliases = name_parameters(model)
    layout = Layout(aliases=aliases)
    names = {id(p): name for name, p in parameters.items()}
    layout.weights = {name: shard_of(name, parameter) for name, parameter in parameters.items()}
    layout.buffers = {name: Shard.whole(buffer) for name, buffer in persistent_buffers(model).items()}
    if optimizer is None:
        return layout
    if isinstance(optimizer, ShardsState):
        optimizer.describe_state(layout, names)
        layout.groups = group_layout(optimizer, names)
        return layout
    for parameter, state in optimizer.state.items():
        name = names[id(parameter)]
        for key, value in state.items():
            if not hasattr(value, "dim") or value.dim() == 0:
                layout.scalars.setdefault(name, {})[key] = value
            elif value.shape == parameter.shape:
                layout.states.setdefault(name, {})[key] = shard_of(name, value)
            elif replicated:
                layout.states.setdefault(name, {})[key] = Shard.whole(value)
            else:
                raise UnsupportedPolicyError(
                    f"{type(optimizer).__name__} keeps {key!r} of {name!r} in shape {tuple(value.shape)}, not the "
                    "parameter's. Such a state is one rank's only when the parameter is sharded; use backend 'ddp'."
                )
    layout.groups = group_layout(optimizer, names)
    return layout


def group_layout(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return the parameter groups as plain data, with names by the ``id`` of the parameter."""
    return [
        {"params": [names[id(p)] for p in group["params"]]} | group_settings(group) for group in optimizer.param_groups
    ]


def group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group's hyperparameters as plain data; a tensor learning rate becomes a number."""
    plain = {}
    for key, value in group.items():
        if key != "params":
            plain[key] = value.item() if hasattr(value, "item") else list(value) if isinstance(value, tuple) else value
    return plain


def materialize(
    layout: Layout,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    shapes: Mapping[str, Mapping[str, StateShape]],
    scalars: Mapping[str, Mapping[str, Any]],
) -> None:
    """Give an optimizer the state that a checkpoint will fill: tensors of the right layout, and scalars.

    What the optimizer had is dropped, so that a parameter that the checkpoint has no state for has none.

    Args:
        layout: of the same model, for the whole shapes.
        model: the prepared model, as for :func:`describe`.
        optimizer: the torch optimizer inside the prepared one.
        shapes: parameter name -> state name -> shape and dtype in the checkpoint.
        scalars: parameter name -> state name -> value.

    Raises:
        UnsupportedPolicyError: for a state that is not laid out as its parameter, where those are sharded.
    """
    import torch

    parameters, _ = name_parameters(model)
    if isinstance(optimizer, ShardsState):
        optimizer.materialize_state({id(p): name for name, p in parameters.items()}, shapes, scalars)
        return
    in_group = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    optimizer.state.clear()
    for name, parameter in parameters.items():
        if id(parameter) not in in_group or (name not in shapes and name not in scalars):
            continue
        group = in_group[id(parameter)]
        state = {key: scalar_on(value, parameter, group) for key, value in scalars.get(name, {}).items()}
        for key, (shape, dtype) in shapes.get(name, {}).items():
            if tuple(shape) == layout.weights[name].shape:
                # Not zeros: it is filled whole, or the load fails.
                state[key] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            elif tuple(parameter.shape) == layout.weights[name].shape and not hasattr(parameter, "placements"):
                state[key] = torch.empty(shape, dtype=dtype, device=parameter.device)
            else:
                raise UnsupportedPolicyError(
                    f"the checkpoint's optimizer state {key!r} of {name!r} has shape {tuple(shape)}, not the "
                    f"parameter's {layout.weights[name].shape}; a sharded parameter cannot carry it. Use backend 'ddp'."
                )
        optimizer.state[parameter] = state


def scalar_on(value: Any, parameter: torch.Tensor, group: Mapping[str, Any]) -> Any:
    """Return a stored scalar where the optimizer wants it: a step count of a fused optimizer lives on the device."""
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    on_device = group.get("fused") or group.get("capturable")
    return value.to(parameter.device) if on_device else value.clone()
