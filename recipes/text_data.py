"""Text for a causal language model: load documents, hold some out, and pack them into blocks.

Nothing here knows of ranks. All tokens are held in memory, on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils.data import Dataset

__all__ = [
    "IGNORED",
    "PADDING",
    "PackedBlocks",
    "load_blocks",
    "load_documents",
    "split_documents",
]

IGNORED: Final = -100
"""Label of a token that is not scored: torch's default ``ignore_index``."""
PADDING: Final = -1
"""Index of a block without a single scored token."""
SHORT: Final = 60
"""Characters up to which a paragraph may stand in both the training and the held-out text: headings and the like."""
FILE_FORMATS: Final = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}

# ---- documents -----------------------------------------------------------------------------------------------


def load_documents(name: str | None, config: str | None = None, column: str | None = None) -> dict[str, list[str]]:
    """Return the documents of each split: ``train``, and ``validation`` where the dataset brings one.

    Without a name they are the prose of Python's language reference, which the standard library carries; a txt file
    is one document. Without a column they are the column ``text``, else the only one that holds strings.

    Raises:
        ValueError: for a file or dataset that does not exist, one without text, or an unknown column.
    """
    if name is None:
        from pydoc_data.topics import topics

        splits = {"train": list(topics.values())}
    elif Path(name).suffix in FILE_FORMATS and not Path(name).is_file():
        raise ValueError(f"--dataset {name!r}: there is no such file here ({Path.cwd()}).")
    elif Path(name).suffix == ".txt" or (Path(name).is_file() and not Path(name).stat().st_size):
        splits = {"train": [Path(name).read_text(encoding="utf-8")]}
    else:
        loaded = _load_dataset(name, config)
        if "train" not in loaded:
            raise ValueError(f"--dataset {name!r} has no split 'train'; it has {', '.join(loaded)}.")
        chosen = {split: loaded[split] for split in ("train", "validation") if split in loaded}
        splits = {split: _text_column(name, rows, column) for split, rows in chosen.items()}
    splits = {split: [text for text in texts if text and text.strip()] for split, texts in splits.items()}
    if not splits["train"]:
        raise ValueError(f"--dataset {name!r} is empty: it holds no text to train on.")
    return splits


def split_documents(splits: dict[str, list[str]], percentage: int) -> tuple[list[str], list[str]]:
    """Return the documents to train on and those held out.

    The dataset's own validation split is used if there is one. Otherwise every n-th document is held out, or the end
    of each if there are fewer than n; whole paragraphs of it that stand elsewhere too are not trained on.
    """
    if not 1 <= percentage <= 50:
        raise ValueError(f"--validation_split_percentage is {percentage}. Allowed: 1 to 50.")
    documents, every = splits["train"], round(100 / percentage)
    if splits.get("validation"):
        return documents, splits["validation"]
    if len(documents) >= every:
        held_out = documents[::every]
        train = [text for index, text in enumerate(documents) if index % every]
    else:
        ends = [len(text) * (100 - percentage) // 100 for text in documents]
        cuts = [text.rfind("\n", 0, end) + 1 or end for text, end in zip(documents, ends, strict=True)]
        held_out = [text[cut:] for text, cut in zip(documents, cuts, strict=True)]
        train = [text[:cut] for text, cut in zip(documents, cuts, strict=True)]
    known = {part.strip() for text in held_out for part in text.split("\n\n") if len(part.strip()) > SHORT}
    train = ["\n\n".join(part for part in text.split("\n\n") if part.strip() not in known) for text in train]
    return [text for text in train if text.strip()], held_out


def _load_dataset(name: str, config: str | None) -> Any:
    from datasets import load_dataset

    reader = FILE_FORMATS.get(Path(name).suffix)
    try:
        return load_dataset(reader, data_files={"train": name}) if reader else load_dataset(name, config)
    except Exception as error:  # each reader has its own, and so has the hub
        kind = f"a readable {reader} file" if reader else f"on the hub or in its cache, nor a {'/'.join(FILE_FORMATS)}"
        raise ValueError(f"--dataset {name!r} is not {kind}: {error}") from error


def _text_column(name: str, rows: Any, column: str | None) -> list[str]:
    strings = [key for key, kind in rows.features.items() if getattr(kind, "dtype", None) in ("string", "large_string")]
    if column is None and "text" in strings:
        column = "text"
    elif column is None and len(strings) == 1:
        column = strings[0]
    if column not in strings:
        got = "is not set" if column is None else f"{column!r} is not one of them"
        raise ValueError(f"--dataset {name!r} has the text columns {strings or 'none'}; --text_column {got}.")
    return list(rows[column])


# ---- blocks --------------------------------------------------------------------------------------------------


class PackedBlocks(Dataset[dict[str, torch.Tensor]]):
    """Documents, one after the other, cut into blocks of one length, the last filled up with tokens of no weight.

    Index :data:`PADDING` gives a block of those alone.
    """

    def __init__(self, documents: Sequence[str], tokenizer: Any, block_size: int, name: str = "train") -> None:
        if block_size < 2:
            raise ValueError(
                f"--block_size is {block_size}. Allowed: from 2, as a token is predicted from those before."
            )
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        encoded = tokenizer(list(documents), add_special_tokens=False, verbose=False)["input_ids"] if documents else []
        parts = [torch.tensor([*ids, *end], dtype=torch.int32) for ids in encoded]
        tokens = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int32)
        if len(tokens) < block_size:
            raise ValueError(f"the {name} text has {len(tokens)} tokens, fewer than one --block_size of {block_size}.")
        if len(tokens) % block_size == 1:  # a tail of one token has nothing to predict
            tokens = tokens[:-1]
        missing = -len(tokens) % block_size
        self.largest_token = int(tokens.max())
        self.inputs = torch.cat([tokens, tokens.new_zeros(missing)]).view(-1, block_size)
        self.labels = torch.cat([tokens, tokens.new_full((missing,), IGNORED)]).view(-1, block_size)

    def fill_up(self, multiple: int) -> None:
        """Append blocks of weight zero to a multiple, so that ranks which share the blocks out see each one once."""
        missing = -len(self) % multiple
        self.inputs = torch.cat([self.inputs, self.inputs.new_zeros(missing, self.inputs.shape[1])])
        self.labels = torch.cat([self.labels, self.labels.new_full((missing, self.labels.shape[1]), IGNORED)])

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == PADDING:
            inputs = torch.zeros_like(self.inputs[0]).long()
            return {"input_ids": inputs, "labels": torch.full_like(inputs, IGNORED)}
        return {"input_ids": self.inputs[index].long(), "labels": self.labels[index].long()}


def load_blocks(args: Any, tokenizer: Any, config: Any) -> tuple[PackedBlocks, PackedBlocks]:
    """Return the blocks to train on and those held out, as a recipe's arguments and the model's config say."""
    context = getattr(config, "max_position_embeddings", None)
    size = args.block_size or (128 if args.model_name_or_path is None else min(context or 1024, 1024))
    if context and size > context:
        raise ValueError(f"--block_size is {size}, longer than the model's context. Allowed: up to {context}.")
    splits = load_documents(args.dataset, args.dataset_config_name, args.text_column)
    train, held_out = split_documents(splits, args.validation_split_percentage)
    both = PackedBlocks(train, tokenizer, size), PackedBlocks(held_out, tokenizer, size, "validation")
    if (largest := max(blocks.largest_token for blocks in both)) >= config.vocab_size:
        raise ValueError(f"the tokenizer gives token {largest}, and the model knows {config.vocab_size} tokens only.")
    return both
