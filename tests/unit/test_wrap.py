"""Units: the model's own word, else its repeated blocks; a wrong class lists the candidates."""

from __future__ import annotations

import pytest
from torch import nn
from training import tiny_llama

from accel_shard import PolicyError, ShardingPolicy
from accel_shard.names import canonical
from accel_shard.wrap import block_classes, units_of

AUTO = ShardingPolicy.load("fsdp2")


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small = nn.ModuleList(nn.Linear(2, 2) for _ in range(9))
        self.tower = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(8, 1))


def test_no_split_modules_win_and_absent_ones_are_left_out() -> None:
    model = tiny_llama()
    assert block_classes(model, AUTO) == ("LlamaDecoderLayer",)
    model._no_split_modules = ["LlamaDecoderLayer", "NotInThisModel"]
    assert units_of(model, AUTO) == {"LlamaDecoderLayer": 3}


def test_else_the_repeated_blocks_with_most_parameters() -> None:
    assert block_classes(Plain(), AUTO) == ("Block",)
    assert units_of(Plain(), AUTO) == {"Block": 3}


def test_a_wrong_class_lists_the_candidates() -> None:
    with pytest.raises(PolicyError, match="Did you mean 'LlamaDecoderLayer'") as error:
        block_classes(tiny_llama(), ShardingPolicy.load("fsdp2,wrap=LlamaDecodeLayer"))
    assert "LlamaMLP" in str(error.value)
    assert block_classes(Plain(), ShardingPolicy.load("fsdp2,wrap=Block+Linear")) == ("Block", "Linear")


def test_a_model_without_blocks_is_told_what_to_say() -> None:
    with pytest.raises(PolicyError, match="Give wrap class names"):
        block_classes(Block(), AUTO)


def test_what_shares_a_parameter_with_something_outside_is_no_unit() -> None:
    model = Plain()
    model.tower[0].inner.bias = model.tower[1].inner.bias
    model.tower[3].weight = nn.Parameter(model.small[0].weight)  # the same numbers are not the same parameter
    with pytest.raises(PolicyError, match=r"wrap class 'Block' shares inner\.bias"):
        block_classes(model, ShardingPolicy.load("fsdp2,wrap=Block"))
    assert "Linear" not in block_classes(model, ShardingPolicy.load("fsdp2,wrap=4"))


def test_a_size_takes_the_smallest_modules_that_reach_it() -> None:
    assert units_of(Plain(), ShardingPolicy.load("fsdp2,wrap=72")) == {"Linear": 13}
    assert units_of(Plain(), ShardingPolicy.load("fsdp2,wrap=73")) == {"Sequential": 1}
    assert units_of(Plain(), ShardingPolicy.load("fsdp2,wrap=100000")) == {}
    assert units_of(tiny_llama(), ShardingPolicy.load("fsdp2,wrap=9000")) == {"LlamaDecoderLayer": 3}


@pytest.mark.parametrize(
    "name", ["_orig_mod.a.b", "a._fsdp_wrapped_module.b", "a._checkpoint_wrapped_module._orig_mod.b"]
)
def test_canonical_names(name: str) -> None:
    assert canonical(name) == "a.b"
    assert canonical("module.b") == "module.b", "a user's own module may be called so"
