"""Upstream's silent traps, each shown to be one, and shown not to reach a user of a policy."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankError, RankPool
from training import CLIP, batch_of, dataset, groups, oracle, tiny_llama, token_loss, under_policy


class HomeMade(torch.optim.SGD):
    """An optimizer that no library knows."""


def prepare(line: str, optimizer_class: Any = torch.optim.AdamW, **model_options: Any) -> tuple[Any, Any, Any]:
    from accel_shard import ShardingPolicy

    accelerator = ShardingPolicy.load(line).accelerator()
    model = tiny_llama(**model_options)
    return accelerator, *accelerator.prepare(model, optimizer_class(groups(model), lr=1e-3))


# ---- DeepSpeed -------------------------------------------------------------------------------------------------


def engine_settings(line: str) -> tuple[float, dict[str, Any], str]:
    accelerator, model, _ = prepare(line, HomeMade)
    return (
        model.gradient_clipping(),
        accelerator.deepspeed_plugin.deepspeed_config,
        type(model.basic_optimizer).__name__,
    )


@pytest.mark.parametrize(("clip", "wanted"), [("", 0.0), (",gradient_clipping=0.25", 0.25)])
def test_unset_clipping_stays_off_under_deepspeed(clip: str, wanted: float, two_ranks: RankPool) -> None:
    for clipping, config, _ in two_ranks.run(engine_settings, f"zero2{clip}"):
        assert clipping == wanted
        assert "auto" not in str(config)


@pytest.mark.parametrize("line", ["zero1,offload=optimizer", "zero2,offload=optimizer", "zero3_offload"])
def test_own_optimizer_is_kept_under_offload(line: str, two_ranks: RankPool) -> None:
    for _, _, name in two_ranks.run(engine_settings, line):
        assert name == "HomeMade"


def clip_argument(line: str) -> None:
    accelerator, model, _ = prepare(line)
    accelerator.clip_grad_norm_(model.parameters(), 0.75)


@pytest.mark.parametrize("line", ["zero2", "zero2,gradient_clipping=0.5", "fsdp2,gradient_clipping=0.5"])
def test_a_clipping_that_would_be_ignored_or_doubled_is_an_error(line: str, two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match="Say it in one place"):
        two_ranks.run(clip_argument, line)


def bare_accelerator() -> tuple[str, int, int]:
    """What Accelerate alone makes of DeepSpeed on CPU ranks."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
    return accelerator.distributed_type.name, accelerator.num_processes, torch.distributed.get_world_size()


def test_ranks_that_believe_they_are_alone_are_found_out(two_ranks: RankPool) -> None:
    assert two_ranks.run(bare_accelerator) == [("DEEPSPEED", 1, 2)] * 2, "upstream no longer has this trap"
    with pytest.raises(RankError, match="these would be separate runs"):
        two_ranks.run(verify_bare_accelerator)


def verify_bare_accelerator() -> None:
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    from accel_shard import ShardingPolicy
    from accel_shard.verify import verify_connection

    verify_connection(Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2)), ShardingPolicy.load("zero2"))


def small_parameters_sharded() -> int:
    _, model, _ = prepare("zero3")
    return sum(p.numel() for p in model.parameters() if p.ds_status.name == "AVAILABLE" and p.ds_numel >= 10_000)


def test_zero3_does_not_keep_a_small_model_gathered(two_ranks: RankPool) -> None:
    assert two_ranks.run(small_parameters_sharded) == [0, 0]


# ---- FSDP ------------------------------------------------------------------------------------------------------


def bare_fsdp() -> tuple[str, str]:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = torch.nn.Linear(4, 4)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    return accelerator.distributed_type.name, type(model).__name__


def verify_bare_fsdp() -> None:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    from accel_shard import ShardingPolicy
    from accel_shard.verify import expect, verify_prepared

    policy = ShardingPolicy.load("fsdp2,wrap=1")
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = torch.nn.Linear(4, 4)
    counts = expect(model, policy)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    verify_prepared(accelerator, policy, model, optimizer, counts)


def test_asking_for_fsdp_and_getting_ddp_is_an_error(two_ranks: RankPool) -> None:
    upstream = ("MULTI_CPU", "DistributedDataParallel")
    assert two_ranks.run(bare_fsdp) == [upstream] * 2, "upstream no longer has this trap"
    with pytest.raises(RankError, match="Accelerate chose MULTI_CPU"):
        two_ranks.run(verify_bare_fsdp)


def different_starts(line: str) -> list[float]:
    from accel_shard import ShardingPolicy

    accelerator = ShardingPolicy.load(line).accelerator()
    model: Any = tiny_llama()
    if accelerator.process_index:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return [float(weight.sum()) for _, weight in accelerator.whole_weights(model)]


@pytest.mark.parametrize("line", ["ddp", "fsdp1", "fsdp2", "zero2", "zero3"])
def test_every_rank_starts_from_rank_zero(line: str, two_ranks: RankPool) -> None:
    wanted = [float(p.sum()) for p in tiny_llama().parameters()]
    for sums in two_ranks.run(different_starts, line):
        assert sums == pytest.approx(wanted, rel=1e-5, abs=1e-4)


def dropout_losses(line: str, checkpointing: bool) -> list[float]:
    """Losses of a run with dropout; the recomputation must draw the masks that the forward drew."""
    accelerator, model, optimizer = prepare(f"{line},activation_checkpointing={checkpointing}".lower(), dropout=0.3)
    model.train()
    torch.manual_seed(5)
    losses = []
    for step in range(6):
        tokens = dataset()[batch_of(step)]
        loss = token_loss(model, tokens, tokens) / tokens.numel()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("line", ["ddp", "fsdp1", "fsdp2", "zero2", "zero3"])
def test_recomputed_blocks_draw_the_same_dropout(line: str, two_ranks: RankPool) -> None:
    plain = two_ranks.run(dropout_losses, line, False)
    recomputed = two_ranks.run(dropout_losses, line, True)
    assert recomputed[0] == pytest.approx(plain[0], rel=1e-6)
    assert len(set(plain[0])) == 6


# ---- every backend ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["ddp", "fsdp1", "fsdp2", "hsdp", "zero1", "zero3"])
def test_policy_clips_a_loop_that_does_not(line: str, request: pytest.FixtureRequest) -> None:
    pool: RankPool = request.getfixturevalue("four_ranks" if line == "hsdp" else "two_ranks")
    run = pool.run(under_policy, line, steps=6, call_clip=False, sgd=True)[0]
    wanted = oracle(steps=6, sgd=True)
    assert max(wanted.norms) > CLIP
    assert run.losses == pytest.approx(wanted.losses, rel=1e-4)
    unclipped = oracle(steps=6, clip=float("inf"), sgd=True)
    assert unclipped.losses != pytest.approx(wanted.losses, rel=1e-3), "clipping must matter here"


def schedule(line: str) -> list[float]:
    return under_policy(line, steps=10).rates


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("line", ["ddp", "fsdp2", "zero2"])
def test_learning_rate_counts_optimizer_steps(line: str, accumulation: int, two_ranks: RankPool,
                                              four_ranks: RankPool) -> None:  # fmt: skip
    wanted = oracle(steps=10).rates
    for pool in (two_ranks, four_ranks):
        for rates in pool.run(schedule, f"{line},gradient_accumulation_steps={accumulation}"):
            assert rates == wanted


def environment_says_otherwise() -> None:
    from accel_shard import ShardingPolicy

    os.environ.update(ACCELERATE_GRADIENT_ACCUMULATION_STEPS="7")
    accelerator = ShardingPolicy.load("ddp,gradient_accumulation_steps=3").accelerator()
    assert accelerator.gradient_accumulation_steps == 3


def test_accumulation_of_the_policy_wins_over_the_launchers_variable(two_ranks: RankPool) -> None:
    two_ranks.run(environment_says_otherwise)


def masters_of(line: str) -> list[str]:
    """Train a model that was loaded in bf16; return the dtypes of masters, and of the exported weights."""
    accelerator, model, optimizer = prepare(line, dtype=torch.bfloat16)
    tokens = dataset()[:4]
    accelerator.backward(token_loss(model, tokens, tokens) / tokens.numel())
    optimizer.step()
    assert accelerator.prepared is not None
    return [*accelerator.prepared.master, *accelerator.prepared.compute, *accelerator.prepared.reduce,
            str({w.dtype for _, w in accelerator.whole_weights(model)})]  # fmt: skip


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("line", ["ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3"])
def test_a_model_loaded_in_bf16_trains_with_fp32_masters(line: str, compute: str, two_ranks: RankPool) -> None:
    for found in two_ranks.run(masters_of, f"{line},precision={compute}"):
        assert found == ["fp32", compute, "fp32", "{torch.float32}"]


@pytest.mark.parametrize("line", ["ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3"])
def test_pure_bf16_is_given_when_asked_for(line: str, two_ranks: RankPool) -> None:
    four = ",precision.master=bf16,precision.compute=bf16,precision.reduce=bf16"
    for found in two_ranks.run(masters_of, line + four):
        assert found == ["bf16", "bf16", "bf16", "{torch.bfloat16}"]


@pytest.mark.parametrize("line", ["ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3"])
def test_bf16_compute_follows_the_fp32_run(line: str, two_ranks: RankPool) -> None:
    run = two_ranks.run(under_policy, f"{line},precision=bf16", steps=10)[0]
    wanted = oracle(steps=10)
    assert run.losses == pytest.approx(wanted.losses, rel=1e-2)
    assert run.losses != wanted.losses


def trainer_with_its_own_optimizer(line: str, folder: str) -> None:
    from transformers import Trainer

    from accel_shard import ShardingPolicy, VerifyPolicy

    policy = ShardingPolicy.load(line)
    arguments = policy.training_arguments(output_dir=folder, max_steps=1, report_to="none", disable_tqdm=True)
    model, rows = tiny_llama(), dataset()
    optimizer = HomeMade(model.parameters(), lr=0.1)
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model=model, args=arguments, train_dataset=data, optimizers=(optimizer, None))
    trainer.add_callback(VerifyPolicy(policy, trainer))
    trainer.train()


def test_trainer_dropping_an_optimizer_is_an_error(two_ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="given the optimizer HomeMade and trains with AdamW"):
        two_ranks.run(trainer_with_its_own_optimizer, "zero2", str(tmp_path))
    two_ranks.run(trainer_with_its_own_optimizer, "ddp", str(tmp_path))


def test_a_rank_waits_no_longer_than_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from accel_shard import rehearsal

    assert rehearsal.default_timeout().total_seconds() == 1800
    monkeypatch.setenv(rehearsal.TIMEOUT_VARIABLE, "45")
    assert rehearsal.deepspeed_group_arguments()["timeout"].total_seconds() == 45


def own_json(json_file: str) -> dict[str, Any]:
    os.environ.update(
        ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_CONFIG_DS_FIELDS="", ACCELERATE_DEEPSPEED_CONFIG_FILE=json_file
    )
    from accel_shard import ShardingPolicy

    accelerator = ShardingPolicy.from_environment(gradient_clipping=0.5).accelerator()
    model = tiny_llama()
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return accelerator.deepspeed_plugin.deepspeed_config


def test_what_a_deepspeed_json_says_beyond_the_policy_stays(two_ranks: RankPool, tmp_path: Path) -> None:
    zero = {"stage": 2, "reduce_bucket_size": 50_000_000, "allgather_bucket_size": 78}
    content = {"zero_optimization": zero, "gradient_clipping": "auto", "wall_clock_breakdown": True}
    (tmp_path / "ds.json").write_text(json.dumps(content))
    for config in two_ranks.run(own_json, str(tmp_path / "ds.json")):
        assert config["zero_optimization"]["reduce_bucket_size"] == 50_000_000
        assert config["zero_optimization"]["allgather_bucket_size"] == 78
        assert config["wall_clock_breakdown"] is True
        assert config["gradient_clipping"] == 0.5
