"""The runs that trackers log to, so that a resumed run goes on in the same one instead of beginning another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

__all__ = ["logged_to", "to_go_on"]

# tracker: (how to read its run's id, the arguments of init_trackers that go on with it). Others, as TensorBoard, go on
# in the folder or run that they are given.
_KNOWN: Final[dict[str, tuple[Callable[[Any], str], Callable[[str], dict[str, Any]]]]] = {
    "wandb": (lambda tracker: tracker.run.id, lambda run: {"id": run, "resume": "allow"}),
    "mlflow": (lambda tracker: tracker.active_run.info.run_id, lambda run: {"run_id": run}),
}


def logged_to(trackers: list[Any]) -> dict[str, str]:
    """Return the id of each tracker's run, where it has one to go on with. Only the main process's trackers do."""
    found = {}
    for tracker in trackers:
        if tracker.name in _KNOWN and getattr(tracker, "tracker", None) is not None:
            found[tracker.name] = str(_KNOWN[tracker.name][0](tracker))
    return found


def to_go_on(runs: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the ``init_kwargs`` of ``Accelerator.init_trackers`` that go on with these runs."""
    return {name: _KNOWN[name][1](run) for name, run in runs.items() if name in _KNOWN}
