"""`prepare` under a policy: units, frozen weights, options, and every difference found out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_pool import RankError, RankPool
from training import dataset, oracle, tiny_llama, token_loss, under_policy

from accel_shard import PolicyError, ShardingPolicy, UnsupportedPolicyError, rehearsal


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(width, 3 * width), torch.nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.two(torch.tanh(self.one(x)))


class Tower(torch.nn.Module):
    """A home-made model: no transformers class, odd sizes, a buffer, a scalar and a one-row parameter."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(3))
        self.row = torch.nn.Parameter(torch.randn(1, width))
        self.gain = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("offset", torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (x + self.row) * self.gain + self.offset


def steps_of(model: Any, optimizer: Any, backward: Any, rows: slice) -> list[float]:
    x = torch.randn(8, 7, generator=torch.Generator().manual_seed(3))[rows]
    losses = []
    for _ in range(5):
        loss = model(x).square().mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def freeze(model: Tower, frozen: bool) -> Tower:
    for parameter in model.blocks[1].parameters():
        parameter.requires_grad_(not frozen)
    return model


def tower_run(line: str, frozen: bool) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    accelerator = ShardingPolicy.load(line).accelerator()
    model: Any = freeze(Tower(), frozen)
    optimizer: Any = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    half = slice(accelerator.process_index, None, 2)
    losses = steps_of(model, optimizer, accelerator.backward, half)
    mean = accelerator.reduce(torch.tensor(losses), "mean").tolist()
    weights = {name: w.detach().clone() for name, w in accelerator.whole_weights(model)}
    return mean, weights, accelerator.prepared


LINES = ["ddp", "fsdp1", "fsdp2", "fsdp2_keep_params", "zero1", "zero2", "zero3"]


@pytest.mark.parametrize("frozen", [False, True], ids=["all", "frozen"])
@pytest.mark.parametrize("line", LINES)
def test_a_home_made_model_with_odd_sizes(line: str, frozen: bool, two_ranks: RankPool) -> None:
    model = freeze(Tower(), frozen)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    wanted = steps_of(model, optimizer, torch.Tensor.backward, slice(None))
    for losses, weights, _ in two_ranks.run(tower_run, line, frozen):
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert list(weights) == [name for name, _ in model.named_parameters()]
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("line", ["fsdp1", "fsdp2"])
def test_units_are_the_blocks_the_classes_or_by_size(line: str, two_ranks: RankPool) -> None:
    assert two_ranks.run(tower_run, line, False)[0][2].units == {"Tower": 1, "Block": 3}
    assert two_ranks.run(tower_run, f"{line},wrap=Linear", False)[0][2].units == {"Tower": 1, "Linear": 6}
    assert two_ranks.run(tower_run, f"{line},wrap=300", False)[0][2].units == {"Tower": 1, "Block": 3}
    with pytest.raises(RankError, match="Did you mean 'Block'"):
        two_ranks.run(tower_run, f"{line},wrap=Blok", False)


# ---- options ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hook", "tolerance"), [("fp16", 1e-3), ("powersgd", 5e-2)])
def test_gradient_compression_stays_near_the_exact_run(hook: str, tolerance: float, two_ranks: RankPool) -> None:
    run = two_ranks.run(under_policy, f"ddp,gradient_compression={hook}", steps=8)[0]
    wanted = oracle(steps=8)
    assert run.losses == pytest.approx(wanted.losses, rel=tolerance)
    assert run.losses != pytest.approx(wanted.losses, rel=1e-7), "the hook must be there"


@pytest.mark.parametrize("line", ["ddp", "fsdp1", "fsdp2", "zero2"])
def test_compile(line: str, two_ranks: RankPool) -> None:
    plain = two_ranks.run(tower_run, line, False, limit=200)
    compiled = two_ranks.run(tower_run, f"{line},compile=true", False, limit=200)
    assert compiled[0][0] == pytest.approx(plain[0][0], rel=1e-5)
    assert list(compiled[0][1]) == list(plain[0][1]), "canonical names"


def accelerator_with(line: str, **arguments: Any) -> None:
    ShardingPolicy.load(line).accelerator(**arguments)


@pytest.mark.parametrize("name", ["mixed_precision", "fsdp_plugin", "gradient_accumulation_steps", "cpu"])
def test_an_argument_that_the_policy_says_is_an_error(name: str, two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match="is said by the policy's field"):
        two_ranks.run(accelerator_with, "fsdp2", **{name: 1})


def ddp_handlers() -> tuple[bool, int]:
    from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs

    handlers = [DistributedDataParallelKwargs(find_unused_parameters=True), InitProcessGroupKwargs()]
    accelerator = ShardingPolicy.load("ddp,gradient_compression=fp16").accelerator(kwargs_handlers=handlers)
    model: Any = accelerator.prepare(torch.nn.Linear(2, 2))
    return model.find_unused_parameters, len(model._comm_hooks)


def test_handlers_of_the_caller_complete_those_of_the_policy(two_ranks: RankPool) -> None:
    assert two_ranks.run(ddp_handlers) == [(True, 1)] * 2


def loader_of(line: str, batch_size: int) -> int:
    accelerator = ShardingPolicy.load(line).accelerator()
    data = torch.utils.data.TensorDataset(torch.randn(32, 7))
    model: Any = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(data, batch_size=batch_size)
    model, _, _ = accelerator.prepare(model, optimizer, loader)
    return getattr(model, "train_batch_size", lambda: 0)()


@pytest.mark.parametrize("line", ["ddp", "zero2"])
def test_global_batch_size_is_checked_against_the_loader(line: str, two_ranks: RankPool) -> None:
    line += ",global_batch_size=16,gradient_accumulation_steps=2"
    with pytest.raises(RankError, match="What fits: 4"):
        two_ranks.run(loader_of, line, 8)
    assert two_ranks.run(loader_of, line, 4) == ([16, 16] if line.startswith("zero") else [0, 0])


# ---- differences are found out ---------------------------------------------------------------------------------


def tampered(line: str, how: str) -> None:
    """Change Accelerate's plugin behind the policy's back, as a stray line of code or another version might."""
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    accelerator = ShardingPolicy.load(line).accelerator()
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None) if "fsdp" in line else None
    if how == "dtype" and line == "fsdp2":
        plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    elif how == "dtype":
        plugin.mixed_precision_policy = MixedPrecision(param_dtype=torch.bfloat16)
    elif how == "units":
        accelerator.backend.before_prepare = lambda *_: setattr(plugin, "auto_wrap_policy", None)
    elif how == "clipping":
        accelerator.deepspeed_plugin.deepspeed_config["gradient_clipping"] = 1.0
    elif how == "stage":
        accelerator.deepspeed_plugin.deepspeed_config["zero_optimization"]["stage"] = 1
    elif how == "accumulation":
        accelerator.gradient_accumulation_steps = 3
    model: Any = Tower()
    parameters = list(Tower().parameters()) if how == "optimizer" else list(model.parameters())
    if how == "one rank" and accelerator.process_index == 1:
        accelerator.gradient_accumulation_steps = 3
    accelerator.prepare(model, torch.optim.SGD(parameters, lr=0.1))


@pytest.mark.parametrize(
    ("line", "how", "words"),
    [
        ("fsdp1", "dtype", "precision.compute: fp32 was asked for, bf16 is there"),
        ("fsdp2", "dtype", "precision.compute: fp32 was asked for, bf16 is there"),
        ("fsdp1", "units", "wrap: 0 of 3 Block modules are FSDP units"),
        ("fsdp2", "units", "wrap: 0 of 3 Block modules are FSDP units"),
        ("zero2", "clipping", "gradient_clipping: None asked for, 1.0 set"),
        ("zero2", "stage", "ZeRO stage 2 was asked for, ZeRO stage 1 was prepared"),
        ("ddp", "accumulation", "gradient_accumulation_steps: 1 asked for, 3 set"),
        ("ddp", "optimizer", "14 of its parameters are not the prepared model's"),
        ("ddp", "one rank", "another rank found a difference"),
    ],
)
def test_a_difference_is_an_error_on_every_rank(line: str, how: str, words: str, two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match=words) as error:
        two_ranks.run(tampered, line, how)
    assert str(error.value).count("PolicyNotAppliedError: policy [") == 2


# ---- rehearsal -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [("fsdp2,precision=fp16", "needs an accelerator device"), ("ddp,gradient_compression=bf16", "needs NCCL")],
)
def test_what_a_cpu_cannot_do_is_refused_before_anything_starts(line: str, words: str) -> None:
    with pytest.raises(UnsupportedPolicyError, match=words):
        rehearsal.refuse_on_cpu(ShardingPolicy.load(line))


@pytest.mark.parametrize("backend", ["ddp", "fsdp", "fsdp1", "deepspeed"])
def test_the_upstream_names_that_rehearsal_rests_on_are_there(backend: str) -> None:
    assert rehearsal.probe(backend) == [], "upstream moved: mend accel_shard/rehearsal.py, its docstring says where"


def test_a_missing_upstream_name_is_a_clear_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed

    monkeypatch.setattr(deepspeed.ops, "__compatible_ops__", None)
    with pytest.raises(UnsupportedPolicyError, match=r"no longer have deepspeed\.ops\.__compatible_ops__"):
        rehearsal.enter(ShardingPolicy.load("zero2"))


def test_a_sharded_run_without_a_launcher_is_refused() -> None:
    with pytest.raises(PolicyError, match="this process was started alone"):
        ShardingPolicy.load("fsdp2").accelerator()


def hsdp_on_two() -> None:
    ShardingPolicy.load("hsdp").accelerator()


def test_hybrid_sharding_needs_enough_ranks(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match="at least 4 ranks"):
        two_ranks.run(hsdp_on_two)


def under_another_launch(line: str) -> None:
    import os

    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP")
    ShardingPolicy.load(line).accelerator()


def test_a_policy_in_the_code_that_contradicts_the_launch_config(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match="backend is 'fsdp' in the accelerate launch config and 'ddp'"):
        two_ranks.run(under_another_launch, "ddp")
    two_ranks.run(under_another_launch, "fsdp2")


def second_model_of_another_size(line: str) -> list[int]:
    """Two runs in one process, as in a notebook; the second must not inherit the first one's units or sizes."""
    held = []
    for width in (7, 10):
        accelerator = ShardingPolicy.load(line).accelerator()
        model: Any = Tower(width)
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        held.append(accelerator.prepared.weights)
        accelerator._models.clear()
    return held


@pytest.mark.parametrize("line", ["ddp", "fsdp1", "fsdp2"])
def test_two_runs_in_one_process(line: str, two_ranks: RankPool) -> None:
    totals = [sum(x) for x in zip(*two_ranks.run(second_model_of_another_size, line), strict=True)]
    copies = 2 if line == "ddp" else 1
    assert totals == [copies * sum(p.numel() for p in Tower(w).parameters()) for w in (7, 10)]


def losses_in_eval(line: str) -> tuple[float, float]:
    accelerator = ShardingPolicy.load(line).accelerator()
    model: Any = tiny_llama()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    tokens = dataset()[:4]
    with torch.no_grad():
        model.eval()
        return token_loss(model, tokens, tokens).item(), token_loss(tiny_llama(), tokens, tokens).item()


@pytest.mark.parametrize("line", LINES)
def test_evaluation_before_training(line: str, two_ranks: RankPool) -> None:
    for got, wanted in two_ranks.run(losses_in_eval, line):
        assert got == pytest.approx(wanted, rel=1e-5)


# ---- what a first user tried -----------------------------------------------------------------------------------


class Sandwich(torch.nn.Module):
    """Layers of the root before and after its blocks, as most models outside transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(12)
        self.first = torch.nn.Linear(7, 7)
        self.blocks = torch.nn.ModuleList(Block(7) for _ in range(3))
        self.last = torch.nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def sandwich_run(line: str) -> tuple[list[float], torch.dtype]:
    accelerator = ShardingPolicy.load(line).accelerator()
    model: Any = Sandwich()
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    losses = steps_of(model, optimizer, accelerator.backward, slice(accelerator.process_index, None, 2))
    return accelerator.reduce(torch.tensor(losses), "mean").tolist(), model(torch.ones(2, 7)).dtype


@pytest.mark.parametrize("four", ["bf16", "pure"])
@pytest.mark.parametrize("line", [*LINES, "fsdp2_offload"])
def test_bf16_on_a_home_made_model(line: str, four: str, two_ranks: RankPool) -> None:
    pure = ",precision.master=bf16,precision.compute=bf16,precision.reduce=bf16"
    model = Sandwich()
    wanted = steps_of(model, torch.optim.Adam(model.parameters(), lr=1e-2), torch.Tensor.backward, slice(None))
    for losses, dtype in two_ranks.run(sandwich_run, line + (",precision=bf16" if four == "bf16" else pure)):
        assert losses == pytest.approx(wanted, rel=3e-2)
        assert dtype == torch.float32


def prepared_apart(line: str) -> float:
    """Model and optimizer in calls of their own; the policy clips all the same."""
    accelerator = ShardingPolicy.load(f"{line},gradient_clipping=0.001").accelerator()
    model: Any = Tower()
    model = accelerator.prepare(model)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    before = torch.cat([w.detach().reshape(-1).clone() for _, w in accelerator.whole_weights(model)])
    accelerator.backward(model(torch.ones(2, 7)).square().sum())
    optimizer.step()
    after = torch.cat([w.detach().reshape(-1) for _, w in accelerator.whole_weights(model)])
    return float((after - before).norm())


@pytest.mark.parametrize("line", ["ddp", "fsdp1"])
def test_clipping_holds_when_objects_are_prepared_apart(line: str, two_ranks: RankPool) -> None:
    for moved in two_ranks.run(prepared_apart, line):
        assert moved == pytest.approx(0.001, rel=1e-2)


def loaders_apart(line: str) -> None:
    accelerator = ShardingPolicy.load(f"{line},global_batch_size=64").accelerator()
    data = torch.utils.data.TensorDataset(torch.randn(32, 7))
    accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=4))


def test_a_loader_prepared_alone_is_checked(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match="What fits: 32"):
        two_ranks.run(loaders_apart, "ddp")


def clip_a_subset(line: str, leave_out: bool) -> float:
    accelerator = ShardingPolicy.load(line).accelerator()
    model: Any = freeze(Tower(), True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(2, 7)).square().sum())
    trainable = [p for p in model.parameters() if p.requires_grad]
    return float(accelerator.clip_grad_norm_(trainable[1:] if leave_out else trainable, 0.5))


@pytest.mark.parametrize("line", ["ddp", "fsdp1", "fsdp2"])
def test_the_norm_of_the_trainable_parameters_is_the_global_one(line: str, two_ranks: RankPool) -> None:
    model = freeze(Tower(), True)
    model(torch.ones(2, 7)).square().sum().backward()
    wanted = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert two_ranks.run(clip_a_subset, line, False) == pytest.approx([float(wanted)] * 2, rel=1e-5)
    if line == "fsdp1":
        with pytest.raises(RankError, match="only the 2-norm of all trainable parameters"):
            two_ranks.run(clip_a_subset, line, True)


def buffers_differ(line: str) -> list[float]:
    accelerator = ShardingPolicy.load(line).accelerator()
    model: Any = Tower()
    model.offset = torch.arange(7.0) if accelerator.is_main_process else torch.arange(7.0).flip(0)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return next(b for n, b in model.named_buffers() if n.endswith("offset")).tolist()


@pytest.mark.parametrize("line", ["fsdp1", "fsdp2", "zero2", "zero3"])
def test_buffers_start_from_rank_zero_whatever_their_sum(line: str, two_ranks: RankPool) -> None:
    assert two_ranks.run(buffers_differ, line) == [list(map(float, range(7)))] * 2


def load_state_of(line: str) -> None:
    ShardingPolicy.load(line).accelerator().load_state("anywhere")


def test_load_state_is_refused_where_it_loses_the_optimizer(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match="restores no optimizer state under FSDP1"):
        two_ranks.run(load_state_of, "fsdp1")


def trainer_from_other_weights(line: str, folder: str) -> dict[str, torch.Tensor]:
    """A plain Trainer whose ranks start apart; return what it exports after no training to speak of."""
    from safetensors.torch import load_file
    from transformers import Trainer

    from accel_shard import VerifyPolicy

    policy = ShardingPolicy.load(line)
    arguments = policy.training_arguments(
        output_dir=folder, max_steps=1, learning_rate=0.0, report_to="none", disable_tqdm=True, save_strategy="no"
    )
    model = tiny_llama()
    if torch.distributed.get_rank():
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
    data = [{"input_ids": row, "labels": row} for row in dataset()]
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    follower = VerifyPolicy(policy, trainer)
    trainer.add_callback(follower)
    trainer.train()
    follower.export(f"{folder}/model")
    return load_file(f"{folder}/model/model.safetensors")


@pytest.mark.parametrize("line", ["ddp", "fsdp1", "fsdp2", "zero2", "zero3"])
def test_a_trainer_starts_from_rank_zero_and_exports(line: str, two_ranks: RankPool, tmp_path: Any) -> None:
    wanted = dict(tiny_llama().named_parameters())
    for weights in two_ranks.run(trainer_from_other_weights, line, str(tmp_path)):
        assert weights.keys() == wanted.keys()
        assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


def trainer_under_another_launch() -> None:
    import os

    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP")
    ShardingPolicy.load("ddp").training_arguments(output_dir="unused")


def test_trainer_arguments_against_the_launch_config(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match="backend is 'fsdp' in the accelerate launch config and 'ddp'"):
        two_ranks.run(trainer_under_another_launch)
