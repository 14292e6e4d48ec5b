"""Which modules of a model are FSDP units: its own word, else its repeated blocks."""

from __future__ import annotations

from collections import Counter

from torch import nn

from accel_shard.errors import PolicyError, unknown_name
from accel_shard.policy import ShardingPolicy

__all__ = ["block_classes", "embeddings_can_be_units", "units_of"]


def block_classes(model: nn.Module, policy: ShardingPolicy) -> tuple[str, ...]:
    """Return the class names of the units that a policy asks for, as they are found in a model.

    ``auto`` takes those of the model's ``_no_split_modules`` that it really has (transformers lists absent ones
    too); else the classes of the items of its largest ``ModuleList`` or ``Sequential`` of equal blocks. A number takes
    the classes of the smallest modules that have at least so many parameters. Both leave out what shares a parameter
    with something outside of it, as BERT's embeddings do with its head: units would make two parameters of it.

    Raises:
        PolicyError: for a class that the model does not have (the message lists those that repeat) or that shares a
            parameter with something outside, or if nothing in the model repeats.
    """
    tied = _tied_to_outside(model)
    if isinstance(policy.wrap, int):
        return tuple(name for name in _by_size(model, policy.wrap) if name not in tied)
    present = Counter(type(module).__name__ for module in model.modules() if has_parameters(module))
    if policy.wrap != "auto":
        for name in policy.wrap:
            if name not in present:
                raise PolicyError(unknown_name("wrap class", name, _candidates(model, present), "Or use 'auto'."))
            if name in tied:
                raise PolicyError(
                    f"wrap class {name!r} shares {tied[name]} with a module outside of it; as a unit it would have one "
                    "of its own. Leave it out, or use 'auto'."
                )
        return tuple(policy.wrap)
    own = [name for name in getattr(model, "_no_split_modules", None) or () if name in present and name not in tied]
    blocks = tuple(sorted(own)) or _repeated(model)
    if not blocks:
        raise PolicyError(
            f"wrap is 'auto', but {type(model).__name__} has neither _no_split_modules nor repeated blocks. Give wrap "
            f"class names ({', '.join(_candidates(model, present))}), or a minimum number of parameters."
        )
    return blocks


def _tied_to_outside(model: nn.Module) -> dict[str, str]:
    """Return the classes with a module that shares a parameter with one outside of it, and that parameter's name."""
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))
    shared = {key for key, found in owners.items() if len(found) > 1}
    tied: dict[str, str] = {}
    for module in model.modules() if shared else ():
        inside = {id(m) for m in module.modules()}
        for name, parameter in module.named_parameters():
            if id(parameter) in shared and not owners[id(parameter)] <= inside:
                tied.setdefault(type(module).__name__, name)
    return tied


def embeddings_can_be_units(model: nn.Module, policy: ShardingPolicy) -> bool:
    """Tell whether the model's embeddings can be units beside those of the policy, as Accelerate makes them of them.

    They cannot where a unit holds them already (ViT), or where they share a parameter with anything but each other:
    T5's encoder would get embeddings of its own.
    """
    try:
        found = [getattr(model, f"get_{kind}_embeddings", lambda: None)() for kind in ("input", "output")]
    except NotImplementedError:  # transformers does not know where this model has them, and Accelerate would ask
        return False
    apart = [module for module in found if module is not None]
    weights = {id(getattr(module, "weight", None)) for module in apart}
    names = [{id(p) for p in module.parameters()} for module in apart]
    if len(apart) == 2 and len(weights) == 2 and names[0] & names[1]:
        return False
    inside, carved = set[int]().union(*names), {id(m) for module in apart for m in module.modules()}
    blocks = block_classes(model, policy)
    return not any(
        any(id(p) in inside for p in module.parameters(recurse=False))
        or (type(module).__name__ in blocks and any(id(m) in carved for m in module.modules()))
        for module in model.modules()
        if id(module) not in carved
    )


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
