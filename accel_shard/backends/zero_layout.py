"""The layout of DeepSpeed ZeRO stages 1 to 3: a contiguous range of each flattened parameter.

The client optimizer sees flat fp32 partitions, one a parameter group (stages 1 and 2) or sub-group (3). Private
upstream names (deepspeed 0.19.8), all of them here; :func:`probe` says which has gone:

* stages 1 and 2: ``param._hp_mapping`` (``lp_fragment_address``, ``hp_fragment``, ``hp_fragment_address``),
  ``optimizer.single_partition_of_fp32_groups``, ``bit16_groups``, ``update_lp_params``,
  ``_hp_optimizer_states_linked``, ``_lazy_init_hp_params_optimizer_state``;
* stage 3: ``optimizer.fp32_partitioned_groups_flat``, ``fp16_groups``, ``sub_group_to_group_id``, ``grad_position``,
  ``get_param_id``, ``persistent_parameters``; ``param.ds_tensor``, ``ds_shape``, ``ds_numel``, ``ds_process_group``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from accel_shard.backends.parameter_layout import StateShape, group_settings, name_parameters, scalar_on
from accel_shard.errors import UnsupportedPolicyError
from accel_shard.layout import FlatTensor, Held, Layout, Shard, ShardsState
from accel_shard.names import persistent_buffers

if TYPE_CHECKING:
    import torch

__all__ = ["describe_zero", "flat_tensors", "materialize_zero", "probe", "refresh_zero", "watch"]

_NAMES: Final = {
    2: (
        "single_partition_of_fp32_groups",
        "bit16_groups",
        "update_lp_params",
        "_hp_optimizer_states_linked",
        "_lazy_init_hp_params_optimizer_state",
    ),
    3: (
        "fp32_partitioned_groups_flat",
        "fp16_groups",
        "sub_group_to_group_id",
        "grad_position",
        "get_param_id",
        "persistent_parameters",
    ),
}


def probe(engine: Any) -> None:
    """Refuse to describe an engine whose private names have moved.

    Raises:
        UnsupportedPolicyError: naming what is missing.
    """
    wanted = _NAMES[3 if engine.zero_optimization_stage() == 3 else 2]
    missing = [name for name in wanted if not hasattr(engine.optimizer, name)]
    if missing:
        raise UnsupportedPolicyError(
            f"this version of DeepSpeed no longer has {', '.join(missing)} on its ZeRO optimizer, by which its "
            "shards are found. Use the version of constraints.txt."
        )


@dataclass(frozen=True, slots=True)
class _Piece:
    """One parameter's range inside a flat partition of this rank."""

    parameter: Any
    start: int
    """First element, counted in the flattened parameter."""
    offset: int
    """First element, counted in the flat partition."""
    count: int


@dataclass(frozen=True, slots=True)
class _Flat:
    """One flat partition of this rank, with the parameters that have a range in it (perhaps of no elements)."""

    tensor: Any
    group: int
    pieces: tuple[_Piece, ...]


def describe_zero(engine: Any) -> Layout:
    """Describe what this rank holds of an engine in stage 1, 2 or 3. Local: communicates nothing."""
    probe(engine)
    parameters, aliases = name_parameters(engine.module)
    names = {id(p): name for name, p in parameters.items()}
    layout = Layout(aliases=aliases)
    layout.weights = {name: _frozen(engine, p) for name, p in parameters.items() if not p.requires_grad}
    layout.buffers = {name: Shard.whole(buffer) for name, buffer in persistent_buffers(engine.module).items()}
    base = engine.basic_optimizer
    members: dict[int, list[str]] = {index: [] for index in range(len(base.param_groups))}
    for flat in _flats(engine):
        state = base.state.get(flat.tensor, {})
        for piece in flat.pieces:
            name, shape = names[id(piece.parameter)], _shape(piece.parameter)
            members[flat.group].append(name)
            layout.weights[name] = _range(shape, piece, flat.tensor)
            for key, value in state.items():
                if not hasattr(value, "dim") or value.dim() == 0:
                    layout.scalars.setdefault(name, {})[key] = value
                elif value.shape == flat.tensor.shape:
                    layout.states.setdefault(name, {})[key] = _range(shape, piece, value)
                else:
                    raise UnsupportedPolicyError(
                        f"{type(base).__name__} keeps the state {key!r} in shape {tuple(value.shape)}, not that of "
                        "DeepSpeed's flat partition, so it belongs to no parameter. Use backend 'ddp'."
                    )
    if isinstance(base, ShardsState):
        base.describe_state(layout, names)
    # The model's order, which is the same on every backend.
    layout.weights = {name: layout.weights[name] for name in parameters if name in layout.weights}
    # The user's order: files of others number the parameters in it.
    layout.groups = [
        {"params": members[index]} | group_settings(group) for index, group in enumerate(base.param_groups)
    ]
    return layout


def watch(engine: Any) -> set[int]:
    """Return a set to which backward adds the ``id`` of each parameter that it reaches.

    For one that it does not, stages 1 and 2 have zeros, and stage 3 (deepspeed 0.19.8) the gradient of an earlier step.
    """
    reached: set[int] = set()

    def reach(number: int, _: torch.Tensor) -> None:
        reached.add(number)

    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            parameter.register_hook(partial(reach, id(parameter)))
    return reached


def flat_tensors(engine: Any, reached: set[int] | None) -> list[FlatTensor]:
    """Describe the flat partitions that the client optimizer is stepped with. Local: communicates nothing."""
    probe(engine)
    return [
        FlatTensor(
            flat.tensor,
            flat.group,
            tuple(Held(p.parameter, _shape(p.parameter), p.start, p.offset, p.count) for p in flat.pieces),
            alone=True,
            reached=reached,
        )
        for flat in _flats(engine)
    ]


def materialize_zero(
    engine: Any, shapes: Mapping[str, Mapping[str, StateShape]], scalars: Mapping[str, Mapping[str, Any]]
) -> None:
    """Give the client optimizer state for its flat partitions, of the kinds that the checkpoint has.

    Raises:
        UnsupportedPolicyError: if parameters that share a partition have different kinds of state or scalars.
    """
    import torch

    probe(engine)
    parameters, _ = name_parameters(engine.module)
    names = {id(p): name for name, p in parameters.items()}
    base = engine.basic_optimizer
    base.state.clear()
    if isinstance(base, ShardsState):
        base.materialize_state(names, shapes, scalars)
    for flat in () if isinstance(base, ShardsState) else _flats(engine):
        owners = [names[id(piece.parameter)] for piece in flat.pieces]
        kinds = {name: {key: dtype for key, (_, dtype) in shapes.get(name, {}).items()} for name in owners}
        _same("optimizer states", kinds)
        _same("scalars", {name: {k: _plain(v) for k, v in scalars.get(name, {}).items()} for name in owners})
        if not owners or not (kinds[owners[0]] or scalars.get(owners[0])):
            continue
        for name in owners:
            for key, (shape, _) in shapes.get(name, {}).items():
                if tuple(shape) != _shape(parameters[name]):
                    raise UnsupportedPolicyError(
                        f"the checkpoint's optimizer state {key!r} of {name!r} has shape {tuple(shape)}, unlike the "
                        "parameter's; a flat partition cannot carry it. Use backend 'ddp'."
                    )
        group = base.param_groups[flat.group]
        state: dict[str, Any] = {k: scalar_on(v, flat.tensor, group) for k, v in scalars.get(owners[0], {}).items()}
        state |= {key: torch.zeros_like(flat.tensor, dtype=dtype) for key, dtype in kinds[owners[0]].items()}
        base.state[flat.tensor] = state
    if engine.zero_optimization_stage() < 3:
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()


def refresh_zero(engine: Any) -> None:
    """Bring the weights that forward uses up to date with filled masters. Every rank must call it; it all-gathers."""
    import torch

    optimizer = engine.optimizer
    if engine.zero_optimization_stage() < 3:
        optimizer.update_lp_params()
        return
    for flat in _flats(engine):
        for piece in flat.pieces:
            master = flat.tensor.narrow(0, piece.offset, piece.count)
            piece.parameter.ds_tensor.view(-1)[: piece.count].copy_(master)
    kept = optimizer.persistent_parameters
    if kept:
        # DeepSpeed gathers into views that it makes without gradients, and may not fill with them.
        with torch.no_grad():
            kept[0].partition(kept, has_been_updated=False)
            kept[0].all_gather(kept)


def _flats(engine: Any) -> Iterator[_Flat]:
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        import torch.distributed as dist

        for index, tensor in enumerate(optimizer.fp32_partitioned_groups_flat):
            pieces = []
            for parameter in optimizer.fp16_groups[index]:
                _, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
                start = min(size * dist.get_rank(parameter.ds_process_group), parameter.ds_numel)
                pieces.append(_Piece(parameter, start, offset, min(size, parameter.ds_numel - start)))
            yield _Flat(tensor, optimizer.sub_group_to_group_id[index], tuple(pieces))
        return
    for index, tensor in enumerate(optimizer.single_partition_of_fp32_groups):
        pieces = []
        for parameter in optimizer.bit16_groups[index]:
            mapping = parameter._hp_mapping
            if mapping is None:  # all of it lives on other ranks
                pieces.append(_Piece(parameter, 0, 0, 0))
            else:
                address = mapping.lp_fragment_address
                pieces.append(_Piece(parameter, address.start, mapping.hp_fragment_address.start, address.numel))
        yield _Flat(tensor, index, tuple(pieces))


def _range(shape: tuple[int, ...], piece: _Piece, flat: torch.Tensor) -> Shard:
    return Shard.flat_range(shape, piece.start, flat.detach().narrow(0, piece.offset, piece.count))


def _frozen(engine: Any, parameter: Any) -> Shard:
    """Describe a weight that has no master: whole in stages 1 and 2, a partition in stage 3."""
    if engine.zero_optimization_stage() < 3:
        return Shard.whole(parameter)
    import torch.distributed as dist

    local = parameter.ds_tensor.detach().view(-1)
    start = min(local.numel() * dist.get_rank(parameter.ds_process_group), parameter.ds_numel)
    return Shard.flat_range(_shape(parameter), start, local[: min(local.numel(), parameter.ds_numel - start)])


def _shape(parameter: Any) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _same(what: str, by_name: Mapping[str, object]) -> None:
    values = list(by_name.items())
    for name, value in values[1:]:
        if value != values[0][1]:
            raise UnsupportedPolicyError(
                f"the checkpoint has different {what} for {values[0][0]!r} ({values[0][1]}) and {name!r} ({value}), "
                "which share one flat partition under DeepSpeed. Load it with another backend."
            )
