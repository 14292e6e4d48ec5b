"""Weights of facebookresearch/optimizers after each step, for our cores to be compared with.

    python tests/data/make_reference_trajectories.py PATH_OF_ITS_CHECKOUT

writes ``reference_trajectories.npz`` beside this file: gradients, first weights, and for each case of ``CASES`` the
weights after each step, in float64. Its source runs on Python 3.11, though it installs on 3.12 only; nothing of it is
in this project. The file in the repository was made from its commit f606606.

It keeps learning rates and bias corrections in float32. All numbers here are sums of few powers of two, so that this
changes nothing.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

SHAPES = {"matrix": (6, 5), "vector": (8,), "row": (1, 7), "cube": (2, 3, 4)}
STEPS = 12
BETAS = (0.5, 0.75)
ABSOLUTE = {"epsilon": 2.0**-20, "relative_epsilon": False}

# For each case the name of the core, our settings, and the parameters that it can have. SOAP's basis is only determined
# where the factors have full rank, or all but one.
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "eigh_adam": (
        "shampoo",
        {
            "betas": BETAS,
            **ABSOLUTE,
            "precondition_frequency": 3,
            "start_preconditioning_step": 3,
            "grafting": "adam",
            "weight_decay": 0.125,
        },
        tuple(SHAPES),
    ),
    "sum_adagrad": (
        "shampoo",
        {
            "betas": (0.0, 1.0),
            **ABSOLUTE,
            "precondition_frequency": 1,
            "start_preconditioning_step": 1,
            "grafting": "adagrad",
            "grafting_epsilon": 2.0**-30,
        },
        tuple(SHAPES),
    ),
    "sgd_nesterov": (
        "shampoo",
        {
            "betas": BETAS,
            **ABSOLUTE,
            "precondition_frequency": 2,
            "start_preconditioning_step": 4,
            "grafting": "sgd",
            "momentum": 0.5,
            "use_nesterov": True,
        },
        tuple(SHAPES),
    ),
    "ungrafted_dampening": (
        "shampoo",
        {
            "betas": BETAS,
            **ABSOLUTE,
            "precondition_frequency": 2,
            "start_preconditioning_step": 2,
            "grafting": "none",
            "use_bias_correction": False,
            "momentum": 0.75,
            "dampening": 0.25,
        },
        tuple(SHAPES),
    ),
    "newton_adam": (
        "shampoo",
        {
            "betas": BETAS,
            "epsilon": 2.0**-10,
            "relative_epsilon": False,
            "precondition_frequency": 2,
            "start_preconditioning_step": 2,
            "grafting": "adam",
            "root_method": "newton",
        },
        tuple(SHAPES),
    ),
    "exponents_rmsprop": (
        "shampoo",
        {
            "betas": BETAS,
            **ABSOLUTE,
            "precondition_frequency": 2,
            "start_preconditioning_step": 2,
            "grafting": "rmsprop",
            "inverse_exponent_override": {1: 0.25, 2: {0: 0.5}, 3: {0: 0.0, 1: 0.375}},
        },
        tuple(SHAPES),
    ),
    "late_start": (
        "shampoo",
        {
            "betas": BETAS,
            **ABSOLUTE,
            "precondition_frequency": 2,
            "start_preconditioning_step": 7,
            "grafting": "adam",
            "grafting_beta2": 0.5,
        },
        tuple(SHAPES),
    ),
    "beta3": (
        "shampoo",
        {
            "betas": BETAS,
            "beta3": 0.25,
            **ABSOLUTE,
            "precondition_frequency": 1,
            "start_preconditioning_step": 1,
            "grafting": "none",
        },
        tuple(SHAPES),
    ),
    "pseudo_inverse": (
        "shampoo",
        {
            "betas": (0.0, 1.0),
            "epsilon": 0.0,
            "relative_epsilon": False,
            "pseudo_inverse": True,
            "precondition_frequency": 1,
            "start_preconditioning_step": 1,
            "grafting": "none",
        },
        ("matrix", "vector"),
    ),
    "trace_scaling": (
        "shampoo",
        {
            "betas": BETAS,
            **ABSOLUTE,
            "precondition_frequency": 2,
            "start_preconditioning_step": 2,
            "grafting": "none",
            "trace_scaling_exponent": 0.5,
        },
        tuple(SHAPES),
    ),
    "soap": (
        "soap",
        {
            "betas": BETAS,
            "epsilon": 2.0**-20,
            "precondition_frequency": 2,
            "start_preconditioning_step": 2,
            "weight_decay": 0.125,
        },
        ("matrix", "cube"),
    ),
    "soap_one_sided": (
        "soap",
        {
            "betas": BETAS,
            "epsilon": 2.0**-20,
            "precondition_frequency": 3,
            "start_preconditioning_step": 5,
            "ignored_basis_change_dims": {2: [0], 3: [0, 2]},
            "inverse_exponent": 0.375,
            "weight_decay": 0.0,
        },
        ("matrix", "cube"),
    ),
    "soap_sum": (
        "soap",
        {
            "betas": (0.0, 1.0),
            "epsilon": 2.0**-20,
            "precondition_frequency": 1,
            "start_preconditioning_step": 1,
            "momentum": 0.5,
            "weight_decay": 0.0,
        },
        ("matrix", "cube"),
    ),
    "muon": ("muon", {"momentum": 0.5, "nesterov": False, "weight_decay": 0.125, "ns_dtype": "float64"}, ("matrix",)),
    "muon_nesterov": (
        "muon",
        {"momentum": 0.5, "nesterov": True, "weight_decay": 0.0, "ns_dtype": "float64", "ns_steps": 3},
        ("matrix",),
    ),
}
LR = 2.0**-5


def problem() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return first weights and gradients (a leading dimension: steps)."""
    random = np.random.default_rng(20)
    weights = {name: random.standard_normal(shape) for name, shape in SHAPES.items()}
    # The length changes from step to step, so that no mean hides an error of another.
    lengths = 2.0 ** random.integers(-2, 3, STEPS)
    return weights, {n: np.stack([s * random.standard_normal(shape) for s in lengths]) for n, shape in SHAPES.items()}


def theirs(core: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the reference's arguments for a case."""
    import distributed_shampoo as ds
    import torch
    from distributed_shampoo.shampoo_types import ClassicMomentumConfig

    common: dict[str, Any] = {
        "lr": LR, "betas": settings.get("betas", (settings.get("momentum"), 1.0)), "weight_decay": settings.get("weight_decay", 0.0),
        "precondition_frequency": settings.get("precondition_frequency", 1),
        "start_preconditioning_step": settings.get("start_preconditioning_step", -1),
        "use_bias_correction": settings.get("use_bias_correction", True),
        "distributed_config": ds.SingleDeviceDistributedConfig(target_parameter_dimensionality=math.inf),
    }  # fmt: skip
    if settings.get("beta3") is not None:
        common["beta3"] = settings["beta3"]
    if settings.get("epsilon") is not None:
        common["epsilon"] = settings["epsilon"]
    if core != "muon" and settings.get("momentum"):
        common["iterate_averaging_config"] = ClassicMomentumConfig(
            momentum=settings["momentum"],
            dampening=settings.get("dampening", 0.0),
            use_nesterov=settings.get("use_nesterov", False),
        )
    double = {"factor_matrix_dtype": torch.float64}
    if core == "muon":
        momentum = settings["momentum"]
        if settings["nesterov"]:
            common["beta3"] = momentum * momentum  # g looks ahead by the mean: m (m b + (1 - m) g) + (1 - m) g
        config: Any = ds.SpectralDescentPreconditionerConfig(
            orthogonalization_config=ds.NewtonSchulzOrthogonalizationConfig(
                num_iterations=settings.get("ns_steps", 5),
                coefficients=(3.4445, -4.7750, 2.0315),
                scale_by_dims_fn=lambda columns, rows: math.sqrt(max(1.0, rows / columns)),
            )
        )
        common["distributed_config"] = ds.SingleDeviceDistributedConfig(target_parameter_dimensionality=2)
    elif core == "soap":
        exponent = settings.get("inverse_exponent", 0.5)
        config = ds.EigenvalueCorrectedShampooPreconditionerConfig(
            **double, factor_matrix_eigenvectors_dtype=torch.float64, corrected_eigenvalues_dtype=torch.float64,
            ignored_basis_change_dims=settings.get("ignored_basis_change_dims", {}),
            inverse_exponent_override=dict.fromkeys((1, 2, 3), exponent),
            amortized_computation_config=ds.EighEigendecompositionConfig(),
        )  # fmt: skip
    else:
        config = ds.RootInvShampooPreconditionerConfig(
            **double, inv_factor_matrix_dtype=torch.float64,
            inverse_exponent_override=settings.get("inverse_exponent_override", {}),
            use_trace_scaling="trace_scaling_exponent" in settings,
            amortized_computation_config=_root_config(settings),
        )  # fmt: skip
        common["grafting_config"] = _grafting(settings)
    return {**common, "preconditioner_config": config}


def _root_config(settings: dict[str, Any]) -> Any:
    import distributed_shampoo as ds

    if settings.get("root_method") == "newton":
        return ds.CoupledNewtonConfig(tolerance=1e-13)
    if settings.get("pseudo_inverse"):
        return ds.EigenConfig(rank_deficient_stability_config=ds.PseudoInverseConfig())
    return ds.EigenConfig()


def _grafting(settings: dict[str, Any]) -> Any:
    import distributed_shampoo as ds

    epsilon, beta2 = settings.get("grafting_epsilon", 1e-8), settings.get("grafting_beta2", settings["betas"][1])
    made = {
        "none": lambda: None,
        "sgd": ds.SGDPreconditionerConfig,
        "adagrad": lambda: ds.AdaGradPreconditionerConfig(epsilon=epsilon),
        "rmsprop": lambda: ds.RMSpropPreconditionerConfig(beta2=beta2, epsilon=epsilon),
        "adam": lambda: ds.AdamPreconditionerConfig(beta2=beta2, epsilon=epsilon),
    }
    return made[settings["grafting"]]()


def main(checkout: str) -> None:
    """Run all cases and write the file."""
    sys.path.insert(0, checkout)
    import torch
    from distributed_shampoo import DistributedShampoo

    weights, gradients = problem()
    found = {f"weights/{n}": w for n, w in weights.items()} | {f"gradients/{n}": g for n, g in gradients.items()}
    for case, (core, settings, names) in CASES.items():
        parameters = {name: torch.nn.Parameter(torch.from_numpy(weights[name].copy())) for name in names}
        optimizer = DistributedShampoo(list(parameters.values()), **theirs(core, settings))
        steps: dict[str, list[np.ndarray]] = {name: [] for name in names}
        for step in range(STEPS):
            for name, parameter in parameters.items():
                parameter.grad = torch.from_numpy(gradients[name][step].copy())
            optimizer.step()
            for name, parameter in parameters.items():
                steps[name].append(parameter.detach().numpy().copy())
        found |= {f"{case}/{name}": np.stack(each) for name, each in steps.items()}
        moved = {name: float(np.abs(each[-1] - weights[name]).max()) for name, each in steps.items()}
        print(case, {name: round(value, 3) for name, value in moved.items()})
    np.savez_compressed(Path(__file__).with_name("reference_trajectories.npz"), **found)


if __name__ == "__main__":
    main(sys.argv[1])
