"""The policy as data: vocabulary, presets, forms, refusals."""

from __future__ import annotations

import dataclasses
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_shard import PRESETS, PolicyError, Precision, ShardingPolicy, UnsupportedPolicyError
from accel_shard.environment import policy_from_environment
from accel_shard.support import BACKENDS, FIELDS, REFUSALS, find_refusal, matrix

CHOICES = {
    "shard": ["none", "optimizer", "gradients", "parameters"],
    "backend": ["auto", "ddp", "fsdp", "fsdp1", "deepspeed"],
    "replicas": [1, 2, 3],
    "precision": ["fp32", "bf16", "fp16", {"master": "bf16", "compute": "bf16", "reduce": "bf16", "save": "fp16"}],
    "wrap": ["auto", ["Block"], ["Block", "Other"], 1000],
    "offload": ["none", "optimizer", "parameters"],
    "activation_checkpointing": [True, False],
    "gradient_clipping": [None, 1, 0.1],
    "gradient_accumulation_steps": [1, 4],
    "global_batch_size": [None, 64],
    "gradient_compression": ["none", "fp16", "powersgd"],
    "gradient_reduce": ["all", "owner"],
    "local_sgd": [1, 8],
}


@given(values=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in CHOICES.items()}))
def test_every_policy_is_refused_with_a_way_out_or_survives_every_form(values: dict) -> None:
    try:
        policy = ShardingPolicy(**values)
    except UnsupportedPolicyError as error:
        if "The nearest policy that works has" not in str(error):
            raise
        return
    assert ShardingPolicy.load(policy.to_dict()) == policy
    assert ShardingPolicy.load(policy.to_line()) == policy
    assert policy_from_environment(environ=policy.to_environment()) == policy
    assert policy_from_environment(policy.to_line(), environ={}) == policy
    assert policy.replace() == policy


@given(values=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in CHOICES.items()}))
def test_yaml_round_trip(values: dict, tmp_path_factory: pytest.TempPathFactory) -> None:
    try:
        policy = ShardingPolicy(**values)
    except UnsupportedPolicyError:
        return
    file = tmp_path_factory.getbasetemp() / "policy.yaml"
    file.write_text(policy.to_yaml())
    assert ShardingPolicy.load(file) == policy
    assert ShardingPolicy.load(f"{file},gradient_accumulation_steps=9").gradient_accumulation_steps == 9


@given(values=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in CHOICES.items()}))
def test_the_nearest_policy_of_a_refusal_works(values: dict) -> None:
    plain = dict(values)
    for _ in range(len(REFUSALS)):
        try:
            ShardingPolicy.load(plain)
            return
        except UnsupportedPolicyError:
            refusal = find_refusal(_backend(plain), _flat(plain))
            assert refusal is not None
            before = dict(plain)
            _apply(plain, refusal.instead)
            assert plain != before, "a way out that changes nothing"
    pytest.fail(f"following the ways out of {values} never ends")


def _backend(values: dict) -> str:
    if values["backend"] != "auto":
        return values["backend"]
    return "ddp" if values["shard"] in ("none", "optimizer") else "fsdp"


def _flat(values: dict) -> dict:
    default = ShardingPolicy().flat()
    dtypes = dataclasses.asdict(Precision.parse(values["precision"]))
    flat = default | {k: v for k, v in values.items() if k != "precision"}
    return flat | {f"precision.{k}": v for k, v in dtypes.items()} | {"backend": _backend(values)}


def _apply(values: dict, changes: dict) -> None:
    for name, value in changes.items():
        if name.startswith("precision."):
            four = dataclasses.asdict(Precision.parse(values["precision"])) | {name.partition(".")[2]: value}
            values["precision"] = four if four["master"] == "fp32" else "fp32"
        else:
            values[name] = value


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda r: f"{r.field}-{'-'.join(r.backends)}")
def test_every_refusal_can_happen_and_its_way_out_leads_out(refusal) -> None:
    reachable = 0
    varied = ("shard", "offload", "precision", "gradient_compression")
    for backend, *values in product(refusal.backends, *(CHOICES[n] for n in varied)):
        shard, offload, precision, compression = values
        wanted = {"tensor_parallel": 2, "context_parallel": 2, "offload_path": "nvme"}
        plain = {"backend": backend, "shard": shard, "offload": offload, "precision": precision}
        if refusal.field in ("gradient_reduce", "local_sgd"):
            plain["gradient_compression"] = compression
        if refusal.field in wanted:
            plain[refusal.field] = wanted[refusal.field]
        elif refusal.field in ("replicas", "wrap", "gradient_compression", "gradient_reduce", "local_sgd"):
            plain[refusal.field] = CHOICES[refusal.field][1]
        elif refusal.field.startswith("precision."):
            plain["precision"] = {refusal.field.partition(".")[2]: refusal.values[0]}
            if refusal.field == "precision.master":
                plain["precision"] |= {"compute": "bf16", "reduce": "bf16"}
        if plain.get("offload_path") and offload == "none":
            continue
        try:
            ShardingPolicy.load(plain)
        except UnsupportedPolicyError as error:
            reachable += refusal.reason in str(error)
    assert reachable, "no policy meets this row"


@pytest.mark.parametrize("name", PRESETS)
def test_presets_load_by_name_and_resolve_auto(name: str) -> None:
    policy = ShardingPolicy.load(name)
    assert policy.backend in BACKENDS
    assert policy == ShardingPolicy.load({"preset": name})
    stage = {"ddp": 0, "ddp_sharded": 1, "zero1": 1, "zero2": 2, "fsdp2_keep_params": 2}.get(name, 3)
    assert policy.zero_stage == stage


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("fsdp3", "Did you mean 'fsdp2'"),
        ("zero2,gradient_cliping=1", "Did you mean 'gradient_clipping'"),
        ("fsdp2,precision.reduc=bf16", "Did you mean 'reduce'"),
        ("fsdp2,precision=bf61", "Did you mean 'bf16'"),
        ("fsdp2,shard=params", "Allowed: none, optimizer, gradients, parameters"),
        ("fsdp2,gradient_clipping=0", "a number above 0"),
        ("fsdp2,gradient_clipping=-1", "a number above 0"),
        ("fsdp2,gradient_accumulation_steps=0", "whole numbers from 1 on"),
        ("fsdp2,gradient_accumulation_steps=1.5", "whole numbers from 1 on"),
        ("ddp_sharded,gradient_reduce=owners", "Did you mean 'owner'"),
        ("ddp,local_sgd=0", "local_sgd is 0. Allowed: whole numbers from 1 on"),
        ("ddp,local_sgd=none", "whole numbers from 1 on"),
        ("fsdp2,replicas=true", "whole numbers from 1 on"),
        ("fsdp2,compile=maybe", "Allowed: true, false"),
        ("fsdp2,wrap=0", "wrap is 0"),
        ("fsdp2,wrap=1e6", "wrap is"),
        ("fsdp2,gradient_clipping=1,gradient_clipping=2", "says a field twice"),
        ("FSDP2", "Did you mean 'fsdp2'"),
        ("fsdp2,precision=BF16", "Did you mean 'bf16'"),
        ("fsdp2,gradient_clipping", "not of the form field=value"),
        ("nowhere.yaml", "does not exist"),
        ("fsdp2,offload_path=/nvme", "offload is 'none'"),
        ("fsdp2,precision.master=bf16", "Set both to bf16"),
        ("fsdp2,precision.master=fp16", "underflow"),
    ],
)
def test_senseless_policies_say_what_is_allowed(source: str, words: str) -> None:
    with pytest.raises(PolicyError, match=words.replace("(", "\\(")):
        ShardingPolicy.load(source)


@pytest.mark.parametrize(
    ("text", "words"), [("- 1", "a mapping"), ("a: [", "not YAML"), ("distributed_type: FSDP", "accelerate config")]
)
def test_files_that_are_no_policy(text: str, words: str, tmp_path) -> None:
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(PolicyError, match=words):
        ShardingPolicy.load(tmp_path / "p.yaml")


def test_support_table_speaks_of_real_fields_only() -> None:
    known = set(ShardingPolicy().flat()) - {"backend"}
    assert set(FIELDS) == known
    for refusal in REFUSALS:
        assert refusal.field in known
        assert set(refusal.when) <= known
        assert set(refusal.instead) <= known | {"backend"}
        assert set(refusal.backends) <= set(BACKENDS)
    assert matrix().count("\n") == len(FIELDS) + 2


def test_precision_shorthands_are_one_dtype_of_compute() -> None:
    assert Precision.parse("bf16") == Precision(master="fp32", compute="bf16", reduce="fp32", save="fp32")
    assert ShardingPolicy.load("fsdp2,precision=bf16,precision.reduce=bf16").dtypes.reduce == "bf16"
    assert ShardingPolicy.load("fsdp2").replace(**{"precision.save": "bf16"}).dtypes.save == "bf16"


def test_the_recipes_policy_files_are_policies() -> None:
    files = list((Path(__file__).parents[2] / "recipes" / "policies").glob("*.yaml"))
    assert [file.stem for file in files] == ["ddp_sharded"]
    for file in files:
        assert ShardingPolicy.load(file).replace(gradient_clipping=None) == ShardingPolicy.load(file.stem)
