"""Every shipped config runs the recipe for real, with the losses and the weights of a plain single-process loop."""

from __future__ import annotations

import json
import math
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import ROOT, accelerate, finish, start, torchrun

from accel_shard.launch_config import SHIPPED

STEPS, SIZE, GLOBAL_BATCH, CLIP, RATE = 20, 48, 8, 0.5, 3e-3


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real prose, of as many blocks as no number of ranks divides: the last batch of an epoch is uneven."""
    from pydoc_data.topics import topics

    file = tmp_path_factory.mktemp("text") / "prose.txt"
    file.write_text("\n\n".join(topics[name] for name in sorted(topics))[:2450])
    return file


@pytest.fixture(scope="session")
def plain(text: Path) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, learning rates and weights of a loop in plain torch: no ranks, no accumulation, no package."""
    from accelerate.utils import set_seed
    from text_data import PackedBlocks, load_documents, split_documents
    from torch.utils.data import RandomSampler
    from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM, get_scheduler

    from accel_shard.sample_order import epoch_order

    tokenizer = ByT5Tokenizer()
    set_seed(42)
    shape = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id,
                                         eos_token_id=tokenizer.eos_token_id, bos_token_id=None, **shape))  # fmt: skip
    train, _ = split_documents(load_documents(str(text)), 10)
    blocks = PackedBlocks(train, tokenizer, SIZE)
    assert len(blocks) % GLOBAL_BATCH, "the last batch must be uneven"
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) is many] for many in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    schedule = get_scheduler("cosine", optimizer, 3, STEPS)
    losses, rates, done = [], [], 0
    while done < STEPS:
        order = list(epoch_order(RandomSampler(blocks), 42, done // math.ceil(len(blocks) / GLOBAL_BATCH)))
        for at in range(0, len(order), GLOBAL_BATCH):
            if done == STEPS:
                break
            chosen = [blocks[i] for i in order[at : at + GLOBAL_BATCH]]
            inputs, labels = (torch.stack([c[k] for c in chosen]) for k in ("input_ids", "labels"))
            logits = model(input_ids=inputs).logits[:, :-1].flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            rates.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            done += 1
    return losses, rates, {name: p.detach().clone() for name, p in model.named_parameters()}


def recipe(text: Path, folder: Path, *, per_rank: int, accumulation: int) -> list[str]:
    return [
        str(ROOT / "recipes" / "finetune.py"), "--dataset", str(text), "--output-dir", str(folder),
        "--block-size", str(SIZE), "--max-steps", str(STEPS), "--per-device-train-batch-size", str(per_rank),
        "--gradient-accumulation-steps", str(accumulation), "--max-grad-norm", str(CLIP), "--learning-rate", str(RATE),
        "--warmup-steps", "3", "--eval-steps", str(STEPS), "--max-new-tokens", "0",
    ]  # fmt: skip


def check(folder: Path, plain: Any) -> None:
    """The recipe's losses, rates and exported weights are those of plain torch."""
    losses, rates, weights = plain
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in steps] == pytest.approx(losses, rel=1e-4)
    assert [row["learning_rate"] for row in steps] == pytest.approx(rates, rel=1e-9)
    assert all(row["grad_norm"] > 0 and row["tokens_per_second"] > 0 for row in steps)
    evaluations = [row["eval_loss"] for row in rows if "eval_loss" in row]
    assert evaluations[-1] < evaluations[0] - 1
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    exported = dict(model.named_parameters())
    assert exported.keys() == weights.keys()
    for name, wanted in weights.items():
        torch.testing.assert_close(exported[name].detach(), wanted, rtol=1e-4, atol=1e-4, msg=name)
    assert AutoTokenizer.from_pretrained(folder / "model")("abc").input_ids
    assert "accel_shard" in (folder / "model" / "README.md").read_text()
    assert (folder / "loss.png").stat().st_size > 1000


@pytest.mark.parametrize("name", [n for n in SHIPPED if n != "multi_node"])
def test_accelerate_launch_with_every_shipped_config(name: str, text: Path, plain: Any, tmp_path: Path) -> None:
    ranks = 4 if name == "hsdp" else 2
    script = recipe(text, tmp_path / "out", per_rank=GLOBAL_BATCH // ranks // 2, accumulation=2)
    config = ROOT / "accelerate_configs" / f"{name}.yaml"
    log = tmp_path / "log"
    output = finish(start(accelerate("--config_file", str(config), *script, ranks=ranks), log), log)
    assert f"on {ranks} ranks" in output
    check(tmp_path / "out", plain)


@pytest.mark.parametrize(("policy", "ranks", "accumulation"), [("fsdp2", 2, 4), ("ddp", 1, 1)])
def test_torchrun_with_a_named_policy(policy: str, ranks: int, accumulation: int, text: Path, plain: Any,
                                      tmp_path: Path) -> None:  # fmt: skip
    per_rank = GLOBAL_BATCH // ranks // accumulation
    script = [*recipe(text, tmp_path / "out", per_rank=per_rank, accumulation=accumulation), "--policy", policy]
    log = tmp_path / "log"
    command = torchrun(*script, "--report-to", "tensorboard", "--max-new-tokens", "8", ranks=ranks)
    output = finish(start(command, log), log)
    check(tmp_path / "out", plain)
    assert list((tmp_path / "out").rglob("events.out.tfevents.*"))
    assert output.splitlines()[-1].startswith("The ") or "\nThe " in output, "a sample of text"


def test_two_nodes(text: Path, plain: Any, tmp_path: Path) -> None:
    """The multi-node config, as two launchers on one machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = ROOT / "accelerate_configs" / "multi_node.yaml"
    script = recipe(text, tmp_path / "out", per_rank=GLOBAL_BATCH // 2, accumulation=1)
    entry = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", str(config)]
    nodes = []
    for rank in (0, 1):
        log = tmp_path / f"log{rank}"
        where = ["--machine_rank", str(rank), "--main_process_ip", "127.0.0.1", "--main_process_port", str(port)]
        nodes.append((start([*entry, "--num_processes", "2", *where, *script], log), log))
    outputs = [finish(process, log) for process, log in nodes]
    assert "on 2 ranks" in outputs[0]
    check(tmp_path / "out", plain)


def test_a_deepspeed_json_that_leaves_a_gather_in_flight_at_the_end(text: Path, plain: Any, tmp_path: Path) -> None:
    """With this prefetch bucket DeepSpeed still fetches when the export begins to gather."""
    zero = {"stage": 3, "stage3_prefetch_bucket_size": 33177}
    autos = dict.fromkeys(
        ("gradient_accumulation_steps", "gradient_clipping", "train_micro_batch_size_per_gpu"), "auto"
    )
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": zero} | autos))
    keys = ["compute_environment: LOCAL_MACHINE", "distributed_type: DEEPSPEED", "deepspeed_config:"]
    (tmp_path / "launch.yaml").write_text("\n".join([*keys, f"  deepspeed_config_file: {tmp_path / 'ds.json'}"]))
    script = recipe(text, tmp_path / "out", per_rank=GLOBAL_BATCH // 2, accumulation=1)
    log = tmp_path / "log"
    finish(start(accelerate("--config_file", str(tmp_path / "launch.yaml"), *script, ranks=2), log), log)
    check(tmp_path / "out", plain)
