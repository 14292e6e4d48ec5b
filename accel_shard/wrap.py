"""Which modules of a model are FSDP units: its own word, else its repeated blocks."""

from __future__ import annotations

from collections import Counter

from torch import nn

from accel_shard.errors import PolicyError, unknown_name
from accel_shard.policy import ShardingPolicy

__all__ = ["block_classes", "units_of"]


def block_classes(model: nn.Module, policy: ShardingPolicy) -> tuple[str, ...]:
    """Return the class names of the units that a policy asks for, as they are found in a model.

    ``auto`` takes those of the model's ``_no_split_modules`` that it really has (transformers lists absent ones
    too); else the classes of the items of its largest ``ModuleList`` or ``Sequential`` of equal blocks. A number takes
    the classes of the smallest modules that have at least so many parameters.

    Raises:
        PolicyError: for a class that the model does not have (the message lists those that repeat), or if nothing
            in the model repeats.
    """
    if isinstance(policy.wrap, int):
        return _by_size(model, policy.wrap)
    present = Counter(type(module).__name__ for module in model.modules() if has_parameters(module))
    if policy.wrap != "auto":
        for name in policy.wrap:
            if name not in present:
                raise PolicyError(unknown_name("wrap class", name, _candidates(model, present), "Or use 'auto'."))
        return tuple(policy.wrap)
    own = [name for name in getattr(model, "_no_split_modules", None) or () if name in present]
    blocks = tuple(sorted(own)) or _repeated(model)
    if not blocks:
        raise PolicyError(
            f"wrap is 'auto', but {type(model).__name__} has neither _no_split_modules nor repeated blocks. Give wrap "
            f"class names ({', '.join(_candidates(model, present))}), or a minimum number of parameters."
        )
    return blocks


def units_of(model: nn.Module, policy: ShardingPolicy) -> dict[str, int]:
    """Count the modules of a (not yet prepared) model that must become units, by class name."""
    blocks = block_classes(model, policy)
    return dict(Counter(type(m).__name__ for m in model.modules() if type(m).__name__ in blocks and has_parameters(m)))


def has_parameters(module: nn.Module) -> bool:
    """Tell whether a module owns any parameter, directly or below."""
    return next(module.parameters(), None) is not None


def _by_size(model: nn.Module, minimum: int) -> tuple[str, ...]:
    """Find the smallest modules with at least ``minimum`` parameters. Accelerate's own way trips over ModuleLists."""

    def unclaimed(module: nn.Module) -> int:
        size = sum(p.numel() for p in module.parameters(recurse=False))
        size += sum(unclaimed(child) for child in module.children())
        runs = type(module).forward is not nn.Module.forward  # containers are never called, so cannot be gathered
        if module is model or not runs or size < minimum:
            return size
        found.add(type(module).__name__)
        return 0

    found: set[str] = set()
    unclaimed(model)
    return tuple(sorted(found))


def _repeated(model: nn.Module) -> tuple[str, ...]:
    """Find the blocks of a model that does not name them: the container of equal items with most parameters."""
    best: tuple[int, tuple[str, ...]] = (0, ())
    for module in model.modules():
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) or len(module) < 2:
            continue
        names = Counter(type(child).__name__ for child in module.children() if has_parameters(child))
        repeated = tuple(sorted(name for name, count in names.items() if count > 1))
        size = sum(
            p.numel() for child in module.children() if type(child).__name__ in repeated for p in child.parameters()
        )
        if repeated and size > best[0]:
            best = (size, repeated)
    return best[1]


def _candidates(model: nn.Module, present: Counter[str]) -> list[str]:
    """List class names worth wrapping, the largest first: not the model itself, no single layers of torch."""
    sizes: Counter[str] = Counter()
    for module in model.modules():
        if module is not model and not type(module).__module__.startswith("torch.nn"):
            sizes[type(module).__name__] += sum(p.numel() for p in module.parameters(recurse=True))
    names = [name for name, _ in sizes.most_common() if name in present]
    return names or sorted(present)
