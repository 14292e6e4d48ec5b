"""Export under every policy: sharded files, dtypes, tied weights, and what happens when the disk says no."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankError, RankPool
from training import dataset, tiny_llama, token_loss

from accel_shard import ShardingPolicy, export_model

LINES = ["ddp", "fsdp1", "fsdp2", "zero1", "zero3"]


@pytest.mark.parametrize("line", [*LINES, "hsdp", "zero2"])
def test_recomputed_blocks_keep_their_names(line: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    pool: RankPool = request.getfixturevalue("four_ranks" if line == "hsdp" else "two_ranks")
    pool.run(exported, f"{line},activation_checkpointing=true", str(tmp_path / "m"))
    written = load_file(tmp_path / "m" / "model.safetensors")
    wanted = dict(tiny_llama().named_parameters())
    assert written.keys() == wanted.keys()
    assert all(torch.equal(written[name], wanted[name]) for name in wanted)


def test_what_a_killed_export_left_is_cleaned_by_the_next(two_ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / ".m.partial-77").mkdir()
    two_ranks.run(exported, "ddp", str(tmp_path / "m"))
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def exported(line: str, folder: str, fail: bool = False, **options: Any) -> float:
    """Export an untrained model; return the loss that it has here."""
    tied, size = options.pop("tied", False), options.pop("max_shard_size", "5GB")
    accelerator = ShardingPolicy.load(line).accelerator()
    model: Any = tiny_llama(tied=tied)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tokens = dataset()[:4]
    with torch.no_grad():
        loss = token_loss(model, tokens, tokens).item()
    if fail and accelerator.is_main_process:
        import safetensors.torch

        def disk_full(*_: Any, **__: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        original, safetensors.torch.save_file = safetensors.torch.save_file, disk_full
    try:
        export_model(accelerator, model, folder, card="# A card\n", max_shard_size=size)
    finally:
        if fail and accelerator.is_main_process:
            safetensors.torch.save_file = original
    return loss


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("line", LINES)
def test_from_pretrained_gives_the_model_back(line: str, tied: bool, two_ranks: RankPool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    losses = two_ranks.run(exported, line, str(tmp_path / "a" / "model"), tied=tied, max_shard_size="20KB")
    folder = tmp_path / "a" / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = dataset()[:4]
    assert token_loss(model, tokens, tokens).item() == pytest.approx(losses[0], rel=1e-6)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    for name, wanted in tiny_llama(tied=tied).named_parameters():
        assert torch.equal(model.get_parameter(name), wanted), name
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "float32"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(f.name for f in folder.glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values()))
    assert len(files) > 3
    # One tensor that is larger than the limit has a file of its own.
    largest = max(p.numel() for p in tiny_llama().parameters()) * 4
    assert all((folder / f).stat().st_size <= max(20_000, largest) + 2000 for f in files)
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in tiny_llama(tied=tied).parameters())
    assert not [p for p in folder.parent.iterdir() if p.name.startswith(".")], "nothing is left behind"


@pytest.mark.parametrize("line", ["fsdp2", "zero3", "ddp"])
def test_save_dtype(line: str, two_ranks: RankPool, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    two_ranks.run(exported, f"{line},precision.save=bf16", str(tmp_path / "m"))
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "m" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("line", ["ddp", "fsdp2", "zero3"])
def test_a_full_disk_is_an_error_on_every_rank_and_keeps_the_old_export(
    line: str, two_ranks: RankPool, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    two_ranks.run(exported, line, str(folder))
    before = {f.name: f.read_bytes() for f in folder.iterdir()}
    with pytest.raises(RankError, match="No space left on device") as error:
        two_ranks.run(exported, line, str(folder), fail=True)
    assert str(error.value).count("RuntimeError: could not export") == 2
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    two_ranks.run(exported, line, str(folder))  # the ranks are still in step
    assert (folder / "README.md").read_text() == "# A card\n"


def test_recomputation_does_not_leak_into_the_exported_config(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(exported, "fsdp2,activation_checkpointing=true", str(tmp_path / "m"))
    assert json.loads((tmp_path / "m" / "config.json").read_text())["use_cache"] is True


@pytest.mark.parametrize("size", ["5 PB", "-1GB", 0, "big"])
def test_a_size_that_cannot_be_read(size: Any) -> None:
    from accel_shard.export import parse_size

    with pytest.raises(ValueError, match="max_shard_size"):
        parse_size(size)


def peak_of_rank_zero(line: str) -> tuple[int, int, int]:
    """Return (largest bytes held at once beside the state, bytes of one shard file, bytes of the whole model)."""
    import tempfile

    import accel_shard.export as module

    accelerator = ShardingPolicy.load(line).accelerator()
    model: Any = tiny_llama()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    held: list[int] = [0]
    add = module.ShardWriter.add

    def counting(writer: Any, name: str, tensor: torch.Tensor) -> None:
        add(writer, name, tensor)
        held.append(sum(t.numel() * 4 for t in writer._pending.values()))

    module.ShardWriter.add = counting
    try:
        with tempfile.TemporaryDirectory() as folder:
            export_model(accelerator, model, f"{folder}/m{accelerator.process_index and ''}", max_shard_size=20_000)
    finally:
        module.ShardWriter.add = add
    return max(held), 20_000, sum(p.numel() * 4 for p in tiny_llama().parameters())


def test_rank_zero_holds_one_shard_file_at_most(two_ranks: RankPool) -> None:
    peak, shard, whole = two_ranks.run(peak_of_rank_zero, "fsdp2")[0]
    assert 0 < peak <= shard < whole / 4
