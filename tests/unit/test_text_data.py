"""The data of the recipes: documents, their split, blocks and their order. One process, no network."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="module", autouse=True)
def text_data() -> Iterator[Any]:
    """The module, found as a recipe's script finds it: beside it."""
    sys.path.insert(0, str(RECIPES))
    try:
        import text_data

        yield text_data
    finally:
        sys.path.remove(str(RECIPES))


class Characters:
    """A tokenizer of one token a character."""

    eos_token_id: int | None = 1

    def __call__(self, texts: list[str], **_: object) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}


def arguments(**changes: object) -> SimpleNamespace:
    values = {
        "model_name_or_path": None,
        "block_size": None,
        "dataset": None,
        "dataset_config_name": None,
        "text_column": None,
        "validation_split_percentage": 10,
    }
    return SimpleNamespace(**(values | changes))


def test_blocks_filled_up_to_a_multiple_keep_their_scored_tokens(text_data: Any) -> None:
    blocks = text_data.PackedBlocks(["abcdefgh" * 10], Characters(), 8)
    scored = (blocks.labels != text_data.IGNORED).sum()
    count = len(blocks)
    blocks.fill_up(16)
    assert len(blocks) == 16 > count
    assert (blocks.labels != text_data.IGNORED).sum() == scored
    assert (blocks[15]["labels"] == text_data.IGNORED).all()
    blocks.fill_up(16)
    assert len(blocks) == 16


# ---- blocks --------------------------------------------------------------------------------------------------


def test_packing_keeps_every_token_and_ends_each_document(text_data: Any) -> None:
    blocks = text_data.PackedBlocks(["abcde", "fg"], Characters(), 4)
    inputs = torch.stack([blocks[i]["input_ids"] for i in range(len(blocks))])
    labels = torch.stack([blocks[i]["labels"] for i in range(len(blocks))])
    assert inputs.dtype == labels.dtype == torch.int64
    text = [*map(ord, "abcde"), 1, *map(ord, "fg"), 1]
    assert labels.flatten().tolist() == text[:8], "the tail of one token has nothing to predict"
    assert torch.equal(inputs, labels)
    assert blocks.largest_token == ord("g")

    longer = text_data.PackedBlocks(["abcde", "fgh"], Characters(), 4)
    assert len(longer) == 3
    assert longer[2]["labels"].tolist() == [ord("h"), 1, text_data.IGNORED, text_data.IGNORED]
    assert longer[2]["input_ids"].tolist() == [ord("h"), 1, 0, 0]


def test_a_padding_block_has_weight_zero_in_loss_and_gradient(text_data: Any) -> None:
    blocks = text_data.PackedBlocks(["abcdefgh"], Characters(), 4)
    padding = blocks[text_data.PADDING]
    assert padding["input_ids"].shape == (4,)
    labels = padding["labels"][1:]
    assert (labels != text_data.IGNORED).sum() == 0
    logits = torch.randn(3, 128, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=text_data.IGNORED)
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_too_little_text_and_senseless_blocks_are_errors(text_data: Any) -> None:
    with pytest.raises(ValueError, match=r"validation text has 4 tokens, fewer than one --block_size of 8"):
        text_data.PackedBlocks(["abc"], Characters(), 8, "validation")
    with pytest.raises(ValueError, match=r"has 0 tokens"):
        text_data.PackedBlocks([], Characters(), 8)
    with pytest.raises(ValueError, match=r"--block_size is 1"):
        text_data.PackedBlocks(["abc"], Characters(), 1)


def test_load_blocks_checks_context_and_vocabulary(text_data: Any) -> None:
    config = SimpleNamespace(max_position_embeddings=64, vocab_size=100_000)
    with pytest.raises(ValueError, match=r"--block_size is 65.*up to 64"):
        text_data.load_blocks(arguments(block_size=65), Characters(), config)
    train, held_out = text_data.load_blocks(arguments(block_size=64), Characters(), config)
    assert train.inputs.shape[1] == held_out.inputs.shape[1] == 64
    assert len(train) > 4 * len(held_out) > 0
    with pytest.raises(ValueError, match=r"gives token \d+, and the model knows 90 tokens only"):
        text_data.load_blocks(arguments(block_size=64), Characters(), SimpleNamespace(vocab_size=90))


# ---- documents -----------------------------------------------------------------------------------------------


def test_default_text_is_split_without_leakage(text_data: Any) -> None:
    train, held_out = text_data.split_documents(text_data.load_documents(None), 10)
    assert len(held_out) == 8
    assert sum(map(len, train)) > 300_000
    held = {part.strip() for text in held_out for part in text.split("\n\n") if len(part.strip()) > text_data.SHORT}
    assert len(held) > 50
    trained = {part.strip() for text in train for part in text.split("\n\n")}
    assert not held & trained


def test_split_holds_out_every_nth_and_drops_its_copies(text_data: Any) -> None:
    documents = [f"document number {i}, which is longer than a heading would be, so that it counts" for i in range(20)]
    train, held_out = text_data.split_documents({"train": [*documents, documents[10]]}, 10)
    assert held_out == [documents[0], documents[10], documents[10]]
    assert train == [text for i, text in enumerate(documents) if i not in (0, 10)]
    train, held_out = text_data.split_documents({"train": documents}, 20)
    assert held_out == documents[::5]


def test_split_of_one_document_is_its_end(text_data: Any) -> None:
    text = "".join(f"line {i}\n" for i in range(1000))
    (train,), (held_out,) = text_data.split_documents({"train": [text]}, 10)
    assert train + held_out == text
    assert train.endswith("\n")
    assert 0.09 < len(held_out) / len(text) < 0.11


def test_split_takes_the_validation_split_there_is(text_data: Any) -> None:
    assert text_data.split_documents({"train": ["a"], "validation": ["b"]}, 10) == (["a"], ["b"])
    with pytest.raises(ValueError, match=r"--validation_split_percentage is 0"):
        text_data.split_documents({"train": ["a"]}, 0)


def test_local_files(text_data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"id": 1, "body": "one"}, {"id": 2, "body": "two"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "a.csv").write_text("id,title,text\n1,x,one\n2,y,two\n")
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert text_data.load_documents(str(tmp_path / "a.jsonl")) == {"train": ["one", "two"]}
    assert text_data.load_documents(str(tmp_path / "a.csv")) == {"train": ["one", "two"]}
    assert text_data.load_documents(str(tmp_path / "a.csv"), column="title") == {"train": ["x", "y"]}
    assert text_data.load_documents(str(tmp_path / "a.txt")) == {"train": ["one\n\ntwo\n"]}


def test_errors_of_files_name_the_file_and_the_columns(
    text_data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    with pytest.raises(ValueError, match=r"missing\.json.*no such file"):
        text_data.load_documents(str(tmp_path / "missing.json"))
    for name, text in (("empty.jsonl", ""), ("empty.txt", "  \n"), ("blank.csv", "text,id\n ,1\n")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=rf"{name}.*is empty"):
            text_data.load_documents(str(tmp_path / name))
    (tmp_path / "two.csv").write_text("id,title,body\n1,x,one\n")
    with pytest.raises(ValueError, match=r"text columns \['title', 'body'\]; --text_column is not set"):
        text_data.load_documents(str(tmp_path / "two.csv"))
    with pytest.raises(ValueError, match=r"\['title', 'body'\]; --text_column 'boddy' is not one of them"):
        text_data.load_documents(str(tmp_path / "two.csv"), column="boddy")
    (tmp_path / "broken.json").write_text("{nothing")
    with pytest.raises(ValueError, match=r"broken\.json.*not a readable json file"):
        text_data.load_documents(str(tmp_path / "broken.json"))
