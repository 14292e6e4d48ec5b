"""Tests of accel_shard.check: each trap is found, sane files are left alone, and upstream behaves as we say."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import yaml

from accel_shard.check import Finding, check_file
from accel_shard.errors import PolicyError

E, W = "error", "warning"
WRAP = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
SANE_FSDP2 = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "fsdp_config": WRAP
    | {"fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_state_dict_type": "SHARDED_STATE_DICT"},
}
SANE_ZERO2 = {
    "distributed_type": "DEEPSPEED",
    "mixed_precision": "bf16",
    "deepspeed_config": {"zero_stage": 2, "gradient_clipping": 1.0, "gradient_accumulation_steps": 4},
}
SANE_JSON = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 0.0,
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
        "offload_param": {"device": "none", "pin_memory": True},
        "leaf_module": {"classes": ["Block"]},
    },
}


def write(tmp_path, values, name="config.yaml"):
    path = tmp_path / name
    path.write_text(json.dumps(values) if name.endswith(".json") else yaml.safe_dump(values))
    return path


def fsdp(version=2, top=None, **keys):
    content = {k: v for k, v in (WRAP | {"fsdp_version": version} | keys).items() if v is not ...}
    return {"distributed_type": "FSDP", "fsdp_config": content} | (top or {})


def zero(stage=2, top=None, **keys):
    content = {"zero_stage": stage, "gradient_clipping": 1.0} | keys
    return {"distributed_type": "DEEPSPEED", "deepspeed_config": {k: v for k, v in content.items() if v is not ...}} | (
        top or {}
    )


def ds(stage=2, zero=None, **keys):
    values = {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": 1.0, "zero_optimization": {"stage": stage}}
    values["zero_optimization"] |= zero or {}
    return {k: v for k, v in (values | keys).items() if v is not ...}


F, D, P, Z = "fsdp_config.fsdp_", "deepspeed_config.", "parallelism_config.parallelism_config_", "zero_optimization."
MESH = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2}

ACCELERATE = [
    # misspelt and misplaced keys
    (fsdp(fsdp_reshard_after_foward=False), [(E, F + "reshard_after_foward", "'fsdp_reshard_after_forward'?")]),
    (fsdp(fsdp_cpu_offload=True), [(E, F + "cpu_offload", "'fsdp_offload_params' is meant")]),
    (fsdp(reshard_after_forward=True, ignored_modules="x"), []),
    (fsdp(zero_stage=2), [(E, "fsdp_config.zero_stage", "belongs to deepspeed_config")]),
    (fsdp(num_processes=2), [(E, "fsdp_config.num_processes", "'fsdp_num_processes', which nothing reads")]),
    (zero(zero_stge=3), [(E, D + "zero_stge", "'zero_stage'?")]),
    (zero(fsdp_version=2), [(W, D + "fsdp_version", "belongs to fsdp_config")]),
    (
        fsdp(top={"parallelism_config": {"dp_shard_size": 2} | MESH}),
        [(E, "parallelism_config.dp_shard_size", "write parallelism_config_dp_shard_size")],
    ),
    (fsdp(top={"num_proceses": 2}), [(E, "num_proceses", "refuses to start")]),
    # wrong values
    ({"distributed_type": "FSPD"}, [(E, "distributed_type", "'FSDP'?")]),
    ({"distributed_type": False}, [(E, "distributed_type", "Write 'no' quoted")]),
    ({"compute_environment": "LOCAL_MACHINE"}, [(E, "distributed_type", "is missing")]),
    (fsdp(top={"mixed_precision": False}), [(E, "mixed_precision", "Write 'no' quoted")]),
    (fsdp(top={"mixed_precision": "bfloat16"}), [(E, "mixed_precision", "'bf16'?")]),
    (fsdp(version=3), [(E, F + "version", "Allowed: 1, 2")]),
    (fsdp(fsdp_auto_wrap_policy="TRANSFORMER_WRAP"), [(E, F + "auto_wrap_policy", "'TRANSFORMER_BASED_WRAP'?")]),
    (fsdp(fsdp_state_dict_type="LOCAL_STATE_DICT"), [(E, F + "state_dict_type", "SHARDED_STATE_DICT")]),
    (fsdp(1, fsdp_state_dict_type="LOCAL_STATE_DICT"), []),
    (fsdp(1, fsdp_sharding_strategy="FULLSHARD"), [(E, F + "sharding_strategy", "'FULL_SHARD'?")]),
    (fsdp(1, fsdp_sharding_strategy=2), []),
    (fsdp(fsdp_offload_params="cpu"), [(E, F + "offload_params", "unknown value")]),
    (fsdp(fsdp_reshard_after_forward="FULL_SHARD"), [(E, F + "reshard_after_forward", "takes true")]),
    (fsdp(fsdp_reshard_after_forward="false"), []),
    (fsdp(1, fsdp_reshard_after_forward=True), [(E, F + "reshard_after_forward", "is not read with version 1")]),
    (fsdp(1, fsdp_reshard_after_forward="SHARD_GRAD_OP"), [(E, F + "reshard_after_forward", "which wins")]),
    (fsdp(1, fsdp_reshard_after_forward="FULL_SHARD"), [(W, F + "reshard_after_forward", "says the same")]),
    # FSDP1 keys under version 2
    (fsdp(fsdp_sharding_strategy="SHARD_GRAD_OP"), [(E, F + "sharding_strategy", "fsdp_reshard_after_forward")]),
    (fsdp(fsdp_sharding_strategy="FULL_SHARD"), [(W, F + "sharding_strategy", "for FSDP version 1")]),
    (fsdp(fsdp_forward_prefetch=True), [(E, F + "forward_prefetch", "for FSDP version 1")]),
    (fsdp(fsdp_forward_prefetch=False), [(W, F + "forward_prefetch", "for FSDP version 1")]),
    (fsdp(fsdp_backward_prefetch="BACKWARD_PRE"), [(W, F + "backward_prefetch", "by itself")]),
    (fsdp(fsdp_use_orig_params=False), [(W, F + "use_orig_params", "always keeps")]),
    (fsdp(fsdp_sync_module_states=True), [(W, F + "sync_module_states", "does not need it")]),
    # FSDP keys that need another
    (fsdp(fsdp_auto_wrap_policy=...), [(W, F + "auto_wrap_policy", "NO_WRAP")]),
    (fsdp(fsdp_min_num_params=1000), [(W, F + "min_num_params", "SIZE_BASED_WRAP")]),
    (fsdp(fsdp_auto_wrap_policy="SIZE_BASED_WRAP", fsdp_min_num_params=1000), []),
    (fsdp(fsdp_auto_wrap_policy="SIZE_BASED_WRAP", fsdp_min_num_params=0), [(E, F + "min_num_params", "no wrapping")]),
    (
        fsdp(fsdp_auto_wrap_policy="NO_WRAP", fsdp_transformer_layer_cls_to_wrap="Block"),
        [(E, F + "transformer_layer_cls_to_wrap", "Block is not wrapped")],
    ),
    (fsdp(fsdp_transformer_layer_cls_to_wrap="A,B"), []),
    (fsdp(fsdp_transformer_layer_cls_to_wrap=["A", "B"]), [(E, F + "transformer_layer_cls_to_wrap", "commas")]),
    (
        fsdp(fsdp_activation_checkpointing_offload=True),
        [(E, F + "activation_checkpointing_offload", "fsdp_activation_checkpointing: true")],
    ),
    (fsdp(fsdp_activation_checkpointing_offload=True, fsdp_activation_checkpointing=True), []),
    (
        fsdp(1, fsdp_sync_module_states=False, fsdp_cpu_ram_efficient_loading=True),
        [(E, F + "sync_module_states", "launcher stops")],
    ),
    (fsdp(1, fsdp_sync_module_states=False), [(E, F + "sync_module_states", "its default")]),
    (fsdp(1, fsdp_sync_module_states=False, fsdp_cpu_ram_efficient_loading=False), []),
    # dead sections and top-level keys
    ({"distributed_type": "MULTI_GPU", "fsdp_config": {"fsdp_version": 2}}, [(E, "fsdp_config", "nothing is sharded")]),
    (fsdp(top={"deepspeed_config": {"zero_stage": 2}}), [(E, "deepspeed_config", "not started")]),
    (fsdp(top={"fp8_config": {"backend": "TE"}}), [(W, "fp8_config", "fp8")]),
    (fsdp(top={"mpirun_config": {"mpirun_hostfile": "h"}}), [(W, "mpirun_config", "MULTI_CPU only")]),
    (zero(top={"dynamo_config": {"dynamo_backend": "INDUCTOR"}}), [(E, "dynamo_config", "nothing is compiled")]),
    (fsdp(top={"dynamo_config": {"backend": "inductor"}}), []),
    (fsdp(top={"rdzv_backend": "c10d"}), [(E, "rdzv_backend", "--rdzv_backend")]),
    (fsdp(top={"enable_cpu_affinity": True}), [(E, "enable_cpu_affinity", "never takes it from a file")]),
    (fsdp(top={"tpu_name": "x"}), [(W, "tpu_name", "a TPU reads it")]),
    (
        fsdp(top={"downcast_bf16": "no", "rdzv_backend": "static", "main_training_function": "main", "tpu_env": []}),
        [(W, "downcast_bf16, main_training_function, rdzv_backend, tpu_env", "dead weight")],
    ),
    # parallelism_config
    (fsdp(1, top={"parallelism_config": MESH}), [(E, "parallelism_config", "version 2 only")]),
    ({"distributed_type": "NO", "parallelism_config": MESH}, [(E, "parallelism_config", "dead")]),
    ({"distributed_type": "MULTI_GPU", "parallelism_config": MESH}, [(E, P + "dp_shard_size", "plain DDP")]),
    (
        fsdp(top={"parallelism_config": {"parallelism_config_dp_replicate_size": 2}}),
        [(E, "parallelism_config", "no axis")],
    ),
    (
        fsdp(top={"num_processes": 8, "parallelism_config": MESH}),
        [(E, "parallelism_config", "product"), (W, "num_processes", "baked in")],
    ),
    (fsdp(top={"parallelism_config": MESH}), []),
    # processes and machines
    (fsdp(top={"num_processes": 8}), [(W, "num_processes", "invalid device ordinal")]),
    ({"distributed_type": "NO", "num_processes": 4}, [(E, "num_processes", "starts one")]),
    ({"distributed_type": "MULTI_CPU", "num_processes": 4}, [(W, "num_processes", "mpirun")]),
    (fsdp(top={"num_machines": 2}), [(W, "main_process_ip", "'None'")]),
    (fsdp(top={"num_machines": 2, "main_process_ip": "10.0.0.1"}), []),
    (zero(top={"num_machines": 2}), [(W, D + "deepspeed_hostfile", "this machine alone")]),
    (
        fsdp(top={"num_machines": 2, "main_process_ip": "10.0.0.1", "num_processes": 3}),
        [(E, "num_processes", "not a multiple"), (W, "num_processes", "baked in")],
    ),
    (fsdp(top={"num_machines": 2, "main_process_ip": "10.0.0.1", "num_processes": -1}), []),
    (fsdp(top={"use_cpu": True}), [(E, "use_cpu", "distributed_type FSDP wins")]),
    ({"distributed_type": "MULTI_CPU", "use_cpu": True}, []),
    # DeepSpeed through accelerate keys
    (zero(gradient_clipping=...), [(W, D + "gradient_clipping", "clipped at 1.0")]),
    (zero(gradient_clipping=0.0), [(E, D + "gradient_clipping", "dropped by DeepSpeedPlugin")]),
    (zero(offload_optimizer_device="cpu"), [(W, D + "offload_optimizer_device", "zero_force_ds_cpu_optimizer")]),
    (zero(0, offload_optimizer_device="cpu"), [(E, D + "offload_optimizer_device", "nothing is offloaded")]),
    (zero(offload_param_device="cpu"), [(E, D + "offload_param_device", "below stage 3")]),
    (zero(3, offload_param_device="cpu", zero3_init_flag=True, zero3_save_16bit_model=True), []),
    (
        zero(3, offload_param_device="nvme", offload_param_nvme_path="/nvme"),
        [(E, D + "offload_param_nvme_path", "hands it on to nothing"), (E, D + "offload_param_device", "'none'")],
    ),
    (zero(offload_param_device="disk"), [(E, D + "offload_param_device", "unknown value")]),
    (zero(zero3_init_flag=True), [(W, D + "zero3_init_flag", "below ZeRO stage 3")]),
    (zero(0, top={"mixed_precision": "bf16"}), [(W, D + "zero_stage", "bias correction")]),
    (zero(deepspeed_multinode_launcher="standard"), [(W, D + "deepspeed_multinode_launcher", "num_machines above 1")]),
]

DEEPSPEED = [
    (ds(stage3_param=1), [(E, "stage3_param", "DeepSpeed does not say so")]),
    (ds(_comment="x"), []),
    (ds(amp={"enabled": True}), [(E, "amp", "has been removed")]),
    (ds(zero={"overlap_com": True}), [(E, Z + "overlap_com", "'overlap_comm'?")]),
    (
        ds(3, zero={"offload_param": {"device": "cpu", "pin_memry": True}}),
        [(E, Z + "offload_param.pin_memry", "'pin_memory'?")],
    ),
    (ds(bf16={"enable": True}), [(E, "bf16.enable", "'enabled'?")]),
    (ds(zero_optimization=..., bf16={"enabled": False}), [(E, "zero_optimization", '{"stage": 0}')]),
    (ds(train_micro_batch_size_per_gpu=...), [(E, "train_micro_batch_size_per_gpu", "neither")]),
    (ds(gradient_clipping=...), [(W, "gradient_clipping", "0.0 for off")]),
    (ds(fp16={"enabled": True}, bf16={"enabled": True}), [(E, "fp16.enabled", "both enabled")]),
    (ds(bfloat16={"enabled": True}), [(E, "bfloat16", 'Write "bf16"')]),
    (ds(0, bf16={"enabled": True}), [(W, "bf16.enabled", "bias correction")]),
    (ds(zero={"round_robin_gradients": True}), [(W, Z + "round_robin_gradients", "wrong tensors")]),
    (ds(steps_per_print=10), [(W, "steps_per_print", "infinity")]),
    (ds(optimizer={"type": "AdamW", "params": {"lr": "auto"}}), [(W, "optimizer", "DummyOptim")]),
    (ds(scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}), [(W, "scheduler", "DummyScheduler")]),
    (
        ds(optimizer={"type": "AdamW", "params": {"betas": "auto"}}),
        [(W, "optimizer", "DummyOptim"), (W, "optimizer.params.betas", "Trainer only")],
    ),
    (ds(zero={"allgather_bucket_size": "auto"}), [(E, Z + "allgather_bucket_size", "nothing fills")]),
    (ds(zero={"stage3_max_live_parameters": 10}), [(W, Z + "stage3_max_live_parameters", "below ZeRO stage 3")]),
    (ds(zero={"offload_param": {"device": "cpu"}}), [(E, Z + "offload_param.device", "below stage 3")]),
    (
        ds(zero={"offload_optimizer": {"device": "cpu"}}),
        [(W, Z + "offload_optimizer.device", '"zero_force_ds_cpu_optimizer": false')],
    ),
    (ds(zero={"offload_optimizer": {"device": "cpu"}}, zero_force_ds_cpu_optimizer=False), []),
    (
        ds(zero={"offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}, zero_force_ds_cpu_optimizer=False),
        [(E, Z + "offload_optimizer.device", "taken as cpu")],
    ),
    (
        ds(3, zero={"offload_param": {"device": "cpu", "nvme_path": "/x"}}),
        [(W, Z + "offload_param.nvme_path", 'where "device" is "nvme"')],
    ),
    (
        ds(train_batch_size=10, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=1),
        [(E, "train_batch_size", "any number of ranks")],
    ),
    (ds(train_batch_size=16, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=2), []),
]


def compare(found, expected):
    assert [(f.level, f.key) for f in found] == [(level, key) for level, key, _ in expected], found
    for finding, (_, _, piece) in zip(found, expected, strict=True):
        assert piece in finding.message, finding


@pytest.mark.parametrize(("values", "expected"), ACCELERATE, ids=range(len(ACCELERATE)))
def test_accelerate_config(tmp_path, values, expected):
    compare(check_file(write(tmp_path, values)), expected)


@pytest.mark.parametrize(("values", "expected"), DEEPSPEED, ids=range(len(DEEPSPEED)))
def test_deepspeed_config(tmp_path, values, expected):
    compare(check_file(write(tmp_path, values, "ds.json")), expected)


@pytest.mark.parametrize(
    ("values", "name"), [(SANE_FSDP2, "a.yaml"), (SANE_ZERO2, "a.yaml"), (SANE_FSDP2, "a.json"), (SANE_JSON, "ds.json")]
)
def test_sane_files_are_left_alone(tmp_path, values, name):
    assert check_file(write(tmp_path, values, name)) == []


def test_files_that_accelerate_config_writes_give_no_error(tmp_path):
    boilerplate = {"debug": False, "downcast_bf16": "no", "enable_cpu_affinity": False, "machine_rank": 0}
    boilerplate |= {"num_machines": 1, "num_processes": 8, "rdzv_backend": "static", "same_network": True}
    boilerplate |= {"tpu_use_cluster": False, "tpu_use_sudo": False, "tpu_env": [], "use_cpu": False}
    found = check_file(write(tmp_path, SANE_ZERO2 | boilerplate | {"main_training_function": "main"}))
    assert [f.level for f in found] == [W, W]
    assert "baked in" in found[0].message
    assert set(boilerplate) - set(found[1].key.split(", ")) == {"num_processes"}
    # On two machines same_network matters, and the launcher does not take it from the file.
    found = check_file(write(tmp_path, fsdp(top={"num_machines": 2, "main_process_ip": "h", "same_network": True})))
    compare(found, [(E, "same_network", "--same_network")])


def test_deepspeed_config_file_is_checked_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, ds(zero={"overlap_com": True}, train_batch_size=8, train_micro_batch_size_per_gpu=2), "ds.json")
    values = zero(stage=..., gradient_clipping=..., deepspeed_config_file="ds.json", zero3_init_flag=False)
    found = check_file(write(tmp_path, values | {"num_processes": 2}))
    prefix = D + "deepspeed_config_file."
    expected = [(E, prefix + Z + "overlap_com", "'overlap_comm'?"), (E, prefix + "train_batch_size", "* 2 ranks")]
    compare(found, [*expected, (W, "num_processes", "baked in")])


def test_keys_that_a_deepspeed_config_file_forbids(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = zero(gradient_clipping=1.0, deepspeed_config_file="gone.json", top={"mixed_precision": "no"})
    keys = [D + "gradient_clipping", D + "zero_stage", "mixed_precision", D + "deepspeed_config_file"]
    found = check_file(write(tmp_path, values))
    assert [(f.level, f.key) for f in found] == [(E, key) for key in keys]
    assert "does not exist" in found[-1].message
    assert "DeepSpeedPlugin stop" in found[0].message


def test_missing_deepspeed_skips_names_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.config", None)
    found = check_file(write(tmp_path, ds(zero={"overlap_com": True}), "ds.json"))
    compare(found, [(W, "zero_optimization", "were not checked")])


@pytest.mark.parametrize(
    ("name", "text", "piece"),
    [
        ("a.json", "{", "not JSON"),
        ("a.yaml", "a: [", "not YAML"),
        ("a.yaml", "- a", "holds list"),
        ("a.yaml", "", "holds NoneType"),
        ("a.yaml", "shard: parameters", "neither"),
    ],
)
def test_what_is_no_config_raises(tmp_path, name, text, piece):
    (tmp_path / name).write_text(text)
    with pytest.raises(PolicyError, match=piece):
        check_file(tmp_path / name)


def test_missing_file_raises(tmp_path):
    with pytest.raises(PolicyError, match="does not exist"):
        check_file(tmp_path / "gone.yaml")


def test_deepspeed_config_in_yaml_is_an_error(tmp_path):
    compare(check_file(write(tmp_path, ds(), "ds.yaml")), [(E, "zero_optimization", "JSON only")])


def test_finding_is_frozen_and_import_is_light():
    with pytest.raises(AttributeError):
        Finding(level=E, key="a", message="b").level = W
    code = (
        "import accel_shard.check, sys; sys.exit(any(m in sys.modules for m in ('torch', 'accelerate', 'deepspeed')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- upstream really behaves as the findings say ---------------------------------------------------------------


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """Return the arguments and the environment that `accelerate launch` makes of a config."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import launch

    monkeypatch.setattr(launch, "is_port_in_use", lambda port: False)

    def run(values):
        path = write(tmp_path, {"num_processes": 2} | values)
        args = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
        args, defaults, from_file = _validate_launch_command(args)
        if not args.use_deepspeed:
            return args, launch.prepare_multi_gpu_env(args)
        fields = [*defaults.deepspeed_config, *(["mixed_precision"] if from_file else [])]
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        return args, launch.prepare_deepspeed_cmd_env(args)[1]

    return run


@pytest.fixture
def plugin_of(launched, monkeypatch):
    """Return the FSDP plugin that a launched rank builds."""
    from accelerate import FullyShardedDataParallelPlugin

    def build(values):
        for name, value in launched(values)[1].items():
            if name.startswith("FSDP_"):
                monkeypatch.setenv(name, value)
        return FullyShardedDataParallelPlugin()

    return build


def test_upstream_swallows_misspelt_fsdp_keys(plugin_of):
    plugin = plugin_of(fsdp(fsdp_reshard_after_foward=False, fsdp_cpu_offload=True))
    assert plugin.reshard_after_forward is True
    assert type(plugin.cpu_offload).__name__ == "OffloadPolicy"


def test_upstream_ignores_fsdp1_keys_under_version_2(plugin_of):
    plugin = plugin_of(fsdp(fsdp_sharding_strategy="SHARD_GRAD_OP", fsdp_forward_prefetch=True))
    assert plugin.reshard_after_forward is True
    assert plugin.forward_prefetch is None


def test_upstream_ignores_reshard_after_forward_under_version_1(plugin_of):
    values = fsdp(1, fsdp_reshard_after_forward="SHARD_GRAD_OP", fsdp_sync_module_states=False)
    values["fsdp_config"]["fsdp_cpu_ram_efficient_loading"] = False  # else the plugin looks for a GPU
    plugin = plugin_of(values)
    assert plugin.reshard_after_forward is None
    assert plugin.sharding_strategy.name == "FULL_SHARD"


def test_upstream_refuses_full_shard_under_version_2(plugin_of):
    with pytest.raises(ValueError, match="invalid truth value"):
        plugin_of(fsdp(fsdp_reshard_after_forward="FULL_SHARD"))


def test_upstream_launcher_refuses_sync_module_states_false(launched):
    with pytest.raises(ValueError, match="fsdp_sync_module_states"):
        launched(fsdp(1, fsdp_sync_module_states=False))


def test_upstream_never_copies_arguments_with_a_default(launched):
    args, env = launched(fsdp(top={"rdzv_backend": "c10d", "enable_cpu_affinity": True, "use_cpu": True}))
    assert args.rdzv_backend == "static"
    assert args.enable_cpu_affinity is False
    assert "ACCELERATE_USE_CPU" not in env
    assert "ACCELERATE_CPU_AFFINITY" not in env


def test_upstream_drops_nvme_path_and_dynamo_under_deepspeed(launched):
    values = zero(3, offload_param_nvme_path="/scratch", top={"dynamo_config": {"dynamo_backend": "INDUCTOR"}})
    _, env = launched(values)
    assert not any("/scratch" in value for value in env.values())
    assert not any("DYNAMO" in name for name in env)


def test_upstream_drops_zero_gradient_clipping():
    pytest.importorskip("deepspeed")
    from accelerate import DeepSpeedPlugin
    from deepspeed.runtime.config import get_gradient_clipping

    config = DeepSpeedPlugin(zero_stage=2, gradient_clipping=0.0).deepspeed_config
    assert "gradient_clipping" not in config
    assert get_gradient_clipping(config) == 1.0


def test_upstream_shadows_bfloat16():
    pytest.importorskip("deepspeed")
    from accelerate import DeepSpeedPlugin
    from deepspeed.runtime.precision_config import get_bfloat16_config

    plugin = DeepSpeedPlugin(hf_ds_config=ds(bfloat16={"enabled": True}))
    plugin.set_mixed_precision("no")
    assert get_bfloat16_config(plugin.deepspeed_config).enabled is False


def test_upstream_refuses_keys_next_to_a_deepspeed_config_file(launched, tmp_path, monkeypatch):
    pytest.importorskip("deepspeed")
    from accelerate import DeepSpeedPlugin

    path = str(write(tmp_path, SANE_JSON, "ds.json"))
    values = {"distributed_type": "DEEPSPEED", "mixed_precision": "no"}
    _, env = launched(values | {"deepspeed_config": {"deepspeed_config_file": path}})
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", env["ACCELERATE_CONFIG_DS_FIELDS"])
    with pytest.raises(ValueError, match="will be ignored"):
        DeepSpeedPlugin(hf_ds_config=path)
