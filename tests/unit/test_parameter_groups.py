"""Which parameters a matrix optimizer gets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from training import tiny_llama

from accel_shard import Shampoo, parameter_groups


def named(model: nn.Module, groups: list[dict]) -> dict[tuple[str, float], list[str]]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {(g["core"], g["weight_decay"]): [names[id(p)] for p in g["params"]] for g in groups}


def test_matrices_are_preconditioned_and_embeddings_heads_and_vectors_are_not() -> None:
    model = tiny_llama()
    found = named(model, parameter_groups(model, weight_decay=0.2))
    assert found["adamw", 0.2] == ["model.embed_tokens.weight", "lm_head.weight"]
    assert all(name.endswith("norm.weight") for name in found["adamw", 0.0])
    assert len(found["matrix", 0.2]) == 3 * 7
    assert sum(map(len, found.values())) == len(list(model.parameters()))


def test_a_tied_embedding_is_there_once_and_a_frozen_parameter_not() -> None:
    model = tiny_llama(tied=True)
    model.model.norm.weight.requires_grad_(False)
    found = named(model, parameter_groups(model, weight_decay=0.2))
    assert found["adamw", 0.2] == ["model.embed_tokens.weight"]
    assert "model.norm.weight" not in found["adamw", 0.0]


def test_names_that_the_user_gives_replace_the_usual_ones() -> None:
    model = nn.ModuleDict({"first": nn.Linear(3, 4, bias=False), "score": nn.Linear(4, 2, bias=False)})
    assert named(model, parameter_groups(model, adamw_names=("first",)))["adamw", 0.1] == ["first.weight"]


def test_a_stack_of_matrices_is_updated_as_each_alone() -> None:
    torch.manual_seed(0)
    stack = nn.Module()
    stack.experts = nn.Parameter(torch.randn(3, 4, 5))
    apart = nn.ParameterList(nn.Parameter(matrix.clone()) for matrix in stack.experts.detach())
    together = Shampoo(parameter_groups(stack), lr=0.1, start_preconditioning_step=1)
    alone = Shampoo([{"params": list(apart), "weight_decay": 0.1}], lr=0.1, start_preconditioning_step=1)
    for seed in range(3):
        gradient = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(seed))
        stack.experts.grad = gradient.clone()
        for parameter, part in zip(apart, gradient, strict=True):
            parameter.grad = part.clone()
        together.step()
        alone.step()
    torch.testing.assert_close(stack.experts.detach(), torch.stack([p.detach() for p in apart]), rtol=1e-6, atol=1e-7)


def test_an_unknown_setting_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="Did you mean 'betas'"):
        Shampoo([nn.Parameter(torch.zeros(2, 2))], betaz=(0.9, 0.9))


def test_the_guides_own_core_trains() -> None:
    text = (Path(__file__).parents[2] / "recipes" / "from_adamw_to_shampoo.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "class Orthogonal" in block)
    model = nn.Linear(4, 3)
    names: dict = {"model": model}
    exec(code, names)
    losses = []
    for _ in range(5):
        loss = (model(torch.ones(2, 4)) - 3).square().mean()
        loss.backward()
        names["optimizer"].step()
        names["optimizer"].zero_grad()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
