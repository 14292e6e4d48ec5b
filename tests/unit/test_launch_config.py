"""Accelerate config files: generated, shipped, read back; and the environment that the launcher makes of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from accel_shard import PolicyError, ShardingPolicy, UnsupportedPolicyError
from accel_shard.environment import fields_from_launch, policy_from_environment
from accel_shard.launch_config import (
    SHIPPED,
    config_folder,
    launch_environment,
    policy_from_config,
    read_config,
    shipped_configs,
    write_config,
)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_file_is_what_its_policy_generates(name: str) -> None:
    file = config_folder() / f"{name}.yaml"
    assert file.read_text() == shipped_configs()[name], "run: accel-shard config --all -o accelerate_configs"
    config = read_config(file)
    assert policy_from_config(config) == ShardingPolicy.load("fsdp2" if name == "multi_node" else name)
    assert "num_processes" not in config
    assert file.read_text().startswith("# " + SHIPPED[name])
    assert {f.stem for f in config_folder().glob("*.yaml")} == set(SHIPPED)


LAUNCHED = ["ddp", "fsdp1", "fsdp2", "fsdp2_offload", "hsdp", "zero2", "zero3_offload"]


@pytest.mark.parametrize("name", LAUNCHED)
def test_the_launcher_makes_the_environment_that_we_read(name: str) -> None:
    """`launch_environment` imitates accelerate's launcher; here the launcher itself runs."""
    script = Path(__file__).with_name("show_environment.py")
    ranks = "4" if name == "hsdp" else "2"
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--num_processes", ranks]
    command += ["--config_file", str(config_folder() / f"{name}.yaml"), "--main_process_port", "0", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    line = next(x for x in done.stdout.splitlines() if x.startswith("ENV "))
    environ = dict(pair.split("=", 1) for pair in line.removeprefix("ENV ").split("\x1f"))
    assert policy_from_environment(environ=environ) == ShardingPolicy.load(name)
    imitated = launch_environment(read_config(config_folder() / f"{name}.yaml"))
    for key, value in imitated.items():
        if key != "ACCELERATE_CONFIG_DS_FIELDS":
            assert environ[key].lower() == value.lower(), key


@pytest.mark.parametrize(
    "line",
    ["zero2,gradient_clipping=0.5,precision=bf16", "fsdp2,wrap=A+B,activation_checkpointing=true", "fsdp1,shard=gradients",
     "fsdp2,wrap=5000", "zero1,offload=optimizer,gradient_accumulation_steps=4", "hsdp,replicas=4", "ddp,compile=true"],
)  # fmt: skip
def test_a_written_config_says_the_whole_policy(line: str) -> None:
    policy = ShardingPolicy.load(line)
    assert policy_from_config(yaml.safe_load(write_config(policy))) == policy


@pytest.mark.parametrize(
    ("line", "lost"),
    [("fsdp2,gradient_clipping=1.0", "gradient_clipping=1.0"), ("ddp,gradient_accumulation_steps=2", "accumulation"),
     ("fsdp2,precision.reduce=bf16", "precision.reduce=bf16"), ("zero2,activation_checkpointing=true", "activation"),
     ("ddp,gradient_compression=fp16", "gradient_compression=fp16"), ("ddp_sharded", "shard=optimizer"),
      ("fsdp2,global_batch_size=8", "global_batch")],
)  # fmt: skip
def test_what_a_config_cannot_carry_is_an_error(line: str, lost: str) -> None:
    with pytest.raises(UnsupportedPolicyError, match=lost):
        write_config(ShardingPolicy.load(line))


FSDP2 = launch_environment(read_config(config_folder() / "fsdp2.yaml"))
ZERO2 = launch_environment(read_config(config_folder() / "zero2.yaml"))


@pytest.mark.parametrize(
    ("environ", "policy", "overrides", "words"),
    [
        (FSDP2, "fsdp1", {}, "backend is 'fsdp' in the accelerate launch config and 'fsdp1' in the policy argument"),
        (ZERO2, "zero3", {}, "shard is 'gradients'"),
        (FSDP2 | {"ACCELERATE_MIXED_PRECISION": "bf16"}, "fsdp2", {}, "precision.compute is 'bf16'"),
        (FSDP2 | {"ACCEL_SHARD_POLICY": "fsdp1"}, None, {}, "ACCEL_SHARD_POLICY"),
        ({"ACCEL_SHARD_POLICY": "fsdp1"}, "fsdp2", {}, "the policy argument"),
        (ZERO2 | {"ACCELERATE_GRADIENT_CLIPPING": "1.0"}, None, {"gradient_clipping": 0.5}, "gradient_clipping"),
        ({}, "ddp,gradient_accumulation_steps=2", {"gradient_accumulation_steps": 4}, "accumulation"),
    ],
)
def test_a_policy_said_twice_is_an_error(environ: dict, policy: str | None, overrides: dict, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        policy_from_environment(policy, environ=environ, **overrides)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (FSDP2 | {"FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}, "fsdp_auto_wrap_policy"),
        (FSDP2 | {"FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true"}, "activation_checkpointing_offload"),
        (FSDP2 | {"FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"}, "fsdp_version 2"),
        (ZERO2 | {"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu"}, "offload_param_device"),
        (ZERO2 | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "4"}, "Allowed: 0, 1, 2, 3"),
        (ZERO2 | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "nowhere.json"}, "does not exist"),
        (FSDP2 | {"ACCELERATE_MIXED_PRECISION": "fp8"}, "fp8"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "Megatron"),
        ({"ACCELERATE_DYNAMO_BACKEND": "EAGER"}, "dynamo_backend is 'EAGER'"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "parallelism_config"),
        (FSDP2 | {"FSDP_VERSION": "1", "FSDP_USE_ORIG_PARAMS": "false"}, "fsdp_use_orig_params"),
        (ZERO2 | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "three"}, "zero_stage is 'three'"),
        (ZERO2 | {"ACCELERATE_GRADIENT_CLIPPING": "abc"}, "gradient_clipping is 'abc'"),
    ],
)
def test_launch_settings_that_no_policy_can_say_are_errors(environ: dict, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        fields_from_launch(environ)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"zero_optimization": {"stage": 2}, "optimizer": {"type": "Adam"}}', "would replace the one in the code"),
        ('{"zero_optimization": {"stage": 2, "round_robin_gradients": true}}', "round_robin"),
        ("{", "not JSON"),
        ("[]", "no JSON object"),
        ('{"bf16": {"enabled": true}}', "no section zero_optimization"),
        ('{"zero_optimization": {"stage": "auto"}}', "stage is 'auto'"),
    ],
)
def test_deepspeed_files_that_would_do_something_else(content: str, words: str, tmp_path) -> None:
    (tmp_path / "ds.json").write_text(content)
    with pytest.raises(PolicyError, match=words):
        fields_from_launch(ZERO2 | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(tmp_path / "ds.json")})


def test_a_deepspeed_file_settles_fields_and_auto_settles_none(tmp_path) -> None:
    (tmp_path / "ds.json").write_text(
        '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},'
        ' "gradient_clipping": 0.3, "gradient_accumulation_steps": "auto", "bf16": {"enabled": true}}'
    )
    environ = ZERO2 | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(tmp_path / "ds.json")}
    policy = policy_from_environment(environ=environ, gradient_accumulation_steps=4)
    assert policy == ShardingPolicy.load(
        "zero3_offload,precision=bf16,gradient_clipping=0.3,gradient_accumulation_steps=4"
    )


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"distributed_type": "XLA"}, "distributed_type is 'XLA'"),
        ({"distributed_type": "FSDP", "fsdp_config": 3}, "wrong kind"),
        ({"distributed_type": "MULTI_GPU", "parallelism_config": {"parallelism_config_tp_size": 2}}, "parallelism"),
    ],
)
def test_configs_that_no_policy_can_say(config: dict, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        policy_from_config(config)


def test_a_policy_may_add_what_the_launch_config_left_at_its_default() -> None:
    policy = policy_from_environment("fsdp2,activation_checkpointing=true,wrap=Block", environ=FSDP2)
    assert policy.activation_checkpointing
