"""Which snapshot of a run is the best, by the scores that its loop gives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["Scores"]


class Scores:
    """The score of this step and the best one that was saved. Local; rank 0's counts.

    Args:
        mode: ``min`` or ``max``; None if nothing is scored.

    Raises:
        ValueError: for another mode.
    """

    def __init__(self, mode: str | None) -> None:
        if mode not in (None, "min", "max"):
            raise ValueError(f"best is {mode!r}. Allowed: 'min', 'max', or None for off.")
        self.mode, self._now, self._best = mode, math.nan, math.nan

    def note(self, score: float | None) -> bool:
        """Take the score of a step, if it has one; return whether it is the best so far. NaN never is.

        Raises:
            ValueError: for a score when nothing says which is better.
        """
        if score is not None:
            self.require()
        self._now = math.nan if score is None else float(score)
        return self._is_best()

    def _is_best(self) -> bool:
        if math.isnan(self._now) or math.isnan(self._best):
            return not math.isnan(self._now)
        return self._now < self._best if self.mode == "min" else self._now > self._best

    def require(self) -> str:
        """Return the mode.

        Raises:
            ValueError: if there is none.
        """
        if self.mode is None:
            raise ValueError("nothing says which score is better. Give Checkpointer best='min' or best='max'.")
        return self.mode

    def facts(self) -> dict[str, float]:
        """Return what a snapshot of this step says."""
        values = {"score": self._now, "best_score": self._now if self._is_best() else self._best}
        return {name: value for name, value in values.items() if not math.isnan(value)}

    def saved(self, facts: Mapping[str, Any]) -> None:
        """Take over what a snapshot says that was committed, or gone on from."""
        self._best = facts.get("best_score", math.nan)
