"""Models of transformers that are no Llama: embeddings inside a block, tied heads, an encoder beside a decoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_pool import RankError, RankPool

from accel_shard import ShardingPolicy

SMALL: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def build(kind: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A model, and a batch of four samples for it."""
    import transformers

    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 30, (4, 9), generator=draw)
    if kind == "bert":
        config = transformers.BertConfig(vocab_size=31, max_position_embeddings=16, **SMALL)
        return transformers.BertForMaskedLM(config), {"input_ids": tokens, "labels": tokens}
    if kind == "vit":
        config = transformers.ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=5, **SMALL)
        images = torch.randn(4, 1, 8, 8, generator=draw)
        return transformers.ViTForImageClassification(config), {"pixel_values": images, "labels": tokens[:, 0] % 5}
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=31, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}
    config = transformers.T5Config(
        vocab_size=31, d_model=16, d_kv=8, d_ff=20, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), {"input_ids": tokens, "labels": tokens[:, :5].contiguous()}


def losses_of(model: Any, optimizer: Any, backward: Any, batch: dict[str, torch.Tensor]) -> list[float]:
    """Three steps on the same batch."""
    losses = []
    for _ in range(3):
        loss = model(**batch).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def under_policy(line: str, kind: str) -> list[float]:
    accelerator = ShardingPolicy.load(line).accelerator()
    model, batch = build(kind)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    mine = {name: value[accelerator.process_index :: 2].contiguous() for name, value in batch.items()}
    losses = losses_of(model, optimizer, accelerator.backward, mine)
    mean: list[float] = accelerator.reduce(torch.tensor(losses), "mean").tolist()
    return mean


@pytest.mark.parametrize("kind", ["bert", "vit", "gpt2", "t5"])
@pytest.mark.parametrize("line", ["fsdp1", "fsdp2", "zero3"])
def test_a_family_trains_as_in_one_process(line: str, kind: str, two_ranks: RankPool) -> None:
    model, batch = build(kind)
    alone = losses_of(model, torch.optim.AdamW(model.parameters(), lr=1e-2), torch.Tensor.backward, batch)
    assert alone[2] < alone[0]
    for losses in two_ranks.run(under_policy, line, kind):
        assert losses == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize("line", ["fsdp1", "fsdp2"])
def test_a_unit_that_would_untie_a_weight_is_refused(line: str, two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"'BertEmbeddings' shares word_embeddings\.weight"):
        two_ranks.run(under_policy, f"{line},wrap=BertEmbeddings+BertLayer", "bert")


def units_of_vit() -> tuple[dict[str, int], bool]:
    accelerator = ShardingPolicy.load("fsdp2").accelerator()
    model, _ = build("vit")
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return accelerator.prepared.units, model.get_input_embeddings() is not None


def test_embeddings_inside_a_unit_are_no_unit_of_their_own(two_ranks: RankPool) -> None:
    for units, answers in two_ranks.run(units_of_vit):
        assert units == {"ViTForImageClassification": 1, "ViTEmbeddings": 1, "ViTLayer": 2, "LayerNorm": 1}
        assert answers, "the model says again where its embeddings are"
