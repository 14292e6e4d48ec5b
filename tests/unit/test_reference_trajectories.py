"""Our cores against facebookresearch/optimizers: the same gradients, the weights after each step."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from stepping import DOUBLE, Stepper, as_the_reference, relative
from stepping import one_thread as one_thread

from accel_shard.optim.cores.muon import MuonCore
from accel_shard.optim.cores.schedule import start_step
from accel_shard.optim.cores.shampoo import ShampooCore
from accel_shard.optim.cores.soap import SOAPCore

DATA = Path(__file__).parents[1] / "data"
sys.path.insert(0, str(DATA))
from make_reference_trajectories import CASES, LR, SHAPES, STEPS, problem  # noqa: E402

CORES = {"shampoo": ShampooCore, "soap": SOAPCore, "muon": MuonCore}
# The order of sums differs, and the root of a factor without full rank, as a vector's is in its first steps, multiplies
# that by up to 1 / sqrt(epsilon) = 1,000; a pseudo-inverse without epsilon by more. Coupled Newton stops at a tolerance.
TOLERANCE = {"newton_adam": 1e-10, "pseudo_inverse": 1e-7}


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("case", "name"), [(case, name) for case, (_, _, names) in CASES.items() for name in names])
def test_trajectory(case: str, name: str) -> None:
    core, settings, _ = CASES[case]
    with np.load(DATA / "reference_trajectories.npz", allow_pickle=False) as stored:
        want = torch.from_numpy(stored[f"{case}/{name}"])
        first, gradients = torch.from_numpy(stored[f"weights/{name}"]), torch.from_numpy(stored[f"gradients/{name}"])
    shape = SHAPES[name]
    made = CORES[core]()
    double = {option: value for option, value in DOUBLE.items() if option in made.defaults}
    given = {**made.defaults, **settings, **double, "lr": LR}
    start = start_step(given) if core != "muon" else 1
    stepper = Stepper(made, first.view(1, *shape), as_the_reference(start), **given)
    for step in range(STEPS):
        stepper.step(gradients[step].view(1, *shape))
        assert relative(stepper.weights.view(first.shape), want[step]) < TOLERANCE.get(case, 1e-9), step
    assert relative(want[-1], first) > 0.01
    assert stepper.kept.tolist() == [0]


def test_the_file_is_of_these_gradients() -> None:
    weights, gradients = problem()
    with np.load(DATA / "reference_trajectories.npz", allow_pickle=False) as stored:
        for name in SHAPES:
            np.testing.assert_array_equal(stored[f"weights/{name}"], weights[name])
            np.testing.assert_array_equal(stored[f"gradients/{name}"], gradients[name])
        assert {key.split("/")[0] for key in stored.files} == {*CASES, "weights", "gradients"}
