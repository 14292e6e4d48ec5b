# /// script
# dependencies = ["accel-shard[recipes]"]
# ///
"""Train or fine-tune a causal language model on text, sharded by one policy.

    torchrun --nproc-per-node 2 recipes/finetune.py --policy fsdp2
    accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 2 recipes/finetune.py
    accelerate launch ... recipes/finetune.py --model_name_or_path FOLDER_OR_HUB_NAME --dataset FILE_OR_HUB_NAME
    accelerate launch ... recipes/finetune.py --config recipes/configs/finetune_smollm2.yaml --max_steps 10

With no arguments it trains a Llama of 1.8 M parameters from scratch, byte by byte, on Python's own documentation: no
download, no GPU. OUTPUT_DIR gets ``metrics.jsonl``, ``loss.png`` and ``model``, a folder for ``from_pretrained``.
The loss of a step is the mean over its scored tokens, so a global batch gives the same losses however it is split
into ranks and micro-batches.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from accelerate.utils import set_seed
from arguments import RunArguments, option, parse_arguments
from optimizers import build_optimizer
from reporting import Reporter, find_trackers, model_card, plot_losses, sample_text
from text_data import IGNORED, PADDING, load_blocks
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

from accel_shard import Checkpointer, ShardingPolicy, export_model

# ---- Arguments -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(RunArguments):
    """What this recipe takes beside."""

    output_dir: str = option("runs/finetune", "folder of everything that is written")
    seed: int = option(42, "of the weights and of the order of the blocks")
    # Model and data
    model_name_or_path: str | None = option(None, "folder or hub name; default: a small Llama, not trained")
    tokenizer_name: str | None = option(None, "folder or hub name; default: the model's, or bytes")
    dataset: str | None = option(None, "txt, json, jsonl, csv or parquet file, or hub name; default: Python's docs")
    dataset_config_name: str | None = option(None, "configuration of a hub dataset")
    text_column: str | None = option(None, "column with the text; default: 'text', or the only one of strings")
    validation_split_percentage: int = option(10, "held out if the dataset has no split named validation")
    block_size: int | None = option(None, "tokens in a block; default: 128, or the model's context up to 1024")
    # Length and batches: blocks in an optimizer step = per_device_train_batch_size * ranks * accumulation
    max_steps: int = option(-1, "optimizer steps; -1 = by num_train_epochs, or 150 if that is -1 too")
    num_train_epochs: float = option(-1, "passes over the text; -1 = by max_steps")
    per_device_train_batch_size: int = option(4, "blocks in a forward, on each rank")
    per_device_eval_batch_size: int = option(8, "blocks in an evaluation forward, on each rank")
    dataloader_num_workers: int = option(0, "processes that fetch blocks for each rank; the order is the same")
    # Optimizer
    adam_beta1: float = option(0.9, "AdamW's decay of the mean of gradients")
    adam_beta2: float = option(0.95, "AdamW's decay of the mean of squared gradients")
    adam_epsilon: float = option(1e-8, "added to the root of the latter")
    max_grad_norm: float | None = option(None, "clip the global norm; 0 = off; default: the policy's, or 1.0")
    gradient_reduce: str | None = option(None, "all, or owner: with policy ddp_sharded; default: the policy's, or all")
    # Reports
    eval_steps: int = option(50, "optimizer steps between evaluations; one comes before the first, one after the last")
    logging_steps: int = option(1, "optimizer steps between lines of metrics")
    max_new_tokens: int = option(200, "length of the sample written at the end; 0 = none")
    # Stopping and going on: snapshots are in OUTPUT_DIR/checkpoints, and any policy and number of ranks loads them
    save_minutes: float | None = option(None, "minutes between snapshots; default: none are saved by time")
    save_best: bool = option(False, "save whenever the evaluation is the best so far; that snapshot is kept too")

    def __post_init__(self) -> None:
        if self.max_steps == 0:
            raise ValueError("--max_steps is 0. Allowed: whole numbers from 1 on, or -1 for num_train_epochs.")
        if self.max_steps > 0 and self.num_train_epochs > 0:
            raise ValueError(f"--max_steps {self.max_steps} and --num_train_epochs {self.num_train_epochs}: give one.")
        self.check_counts("per_device_train_batch_size", "per_device_eval_batch_size", "eval_steps", "logging_steps")


# ---- Policy and model ------------------------------------------------------------------------------------------


def build_policy(args: Arguments) -> ShardingPolicy:
    """Return what the launch config or ``--policy`` says, with this script's clipping where they say nothing."""
    accumulation, clipping = args.gradient_accumulation_steps, args.max_grad_norm
    policy = ShardingPolicy.from_environment(
        args.policy,
        gradient_accumulation_steps=accumulation,
        gradient_clipping=clipping or None,
        gradient_reduce=args.gradient_reduce,
    )
    if policy.gradient_clipping is None and clipping is None:
        return policy.replace(gradient_clipping=1.0)
    if policy.gradient_clipping is not None and clipping == 0:
        raise ValueError(f"--max_grad_norm is 0, but the policy clips at {policy.gradient_clipping}: say it once.")
    return policy


def load_model(args: Arguments) -> tuple[transformers.PreTrainedModel, Any]:
    """Return the model and its tokenizer."""
    name, tokenizer_name = args.model_name_or_path, args.tokenizer_name or args.model_name_or_path
    try:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_name) if tokenizer_name else ByT5Tokenizer()
        if name is not None:
            return AutoModelForCausalLM.from_pretrained(name), tokenizer
    except (OSError, ValueError) as error:
        got = f"--model_name_or_path {name!r} with --tokenizer_name {args.tokenizer_name!r}"
        raise ValueError(f"{got}: no such folder, nor a model that the hub or its cache has. {error}") from error
    shape = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape, **special)), tokenizer


Batches = list[dict[str, torch.Tensor]]

# ---- Loss ----------------------------------------------------------------------------------------------------


def summed_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the sum, in fp32, of the losses of the batch's scored tokens."""
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1].float().flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"][:, 1:].flatten(), ignore_index=IGNORED, reduction="sum")


def count_tokens(batches: Batches) -> torch.Tensor:
    """Return how many tokens of these batches are scored."""
    return torch.stack([(batch["labels"][:, 1:] != IGNORED).sum() for batch in batches]).sum().float()


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: Any) -> float:
    """Return the mean loss over all tokens of the held-out text; every rank calls it."""
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    for batch in loader:
        totals += torch.stack([summed_loss(model, batch), count_tokens([batch])])
    model.train()
    loss, tokens = accelerator.reduce(totals).tolist()
    return float(loss / tokens)


def perplexity(loss: float) -> float:
    """Return it, finite whatever the loss."""
    return math.exp(min(loss, 700.0))


# ---- Training ------------------------------------------------------------------------------------------------


def train_step(accelerator: Any, model: Any, optimizer: Any, scheduler: Any, batches: Batches) -> list[torch.Tensor]:
    """Do one optimizer step; return this rank's summed loss, all ranks' scored tokens, and the gradients' norm."""
    tokens = accelerator.reduce(count_tokens(batches))
    loss = torch.zeros_like(tokens)
    # backward() divides by the micro-batches and averages over the ranks; divide by the tokens instead.
    scale = accelerator.gradient_accumulation_steps * accelerator.num_processes / tokens
    for batch in batches:
        with accelerator.accumulate(model):
            part = summed_loss(model, batch)
            accelerator.backward(part * scale)
            if accelerator.sync_gradients:
                grad_norm = accelerator.clip_grad_norm_(model.parameters())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        loss += part.detach()
    return [loss, tokens, grad_norm]


@record
def main() -> None:
    """Train, evaluate, export."""
    args = parse_arguments(Arguments, sys.argv[1:], str(__doc__))
    policy, folder = build_policy(args), Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)  # a folder that cannot be written is better known now than at the end
    accelerator = policy.accelerator(log_with=find_trackers(args.report_to), project_dir=args.output_dir)
    set_seed(args.seed)  # the same weights on every rank
    model, tokenizer = load_model(args)
    blocks, held_out = load_blocks(args, tokenizer, model.config)

    ranks, accumulation = accelerator.num_processes, accelerator.gradient_accumulation_steps
    global_batch = args.per_device_train_batch_size * ranks * accumulation
    steps = args.max_steps if args.max_steps > 0 else 150
    if args.num_train_epochs > 0:
        steps = math.ceil(args.num_train_epochs * math.ceil(len(blocks) / global_batch))
    optimizer = build_optimizer(
        args.optimizer, model, lr=args.learning_rate, weight_decay=args.weight_decay,
        betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_epsilon, more=args.optim_args,
    )  # fmt: skip
    scheduler = transformers.get_scheduler(args.lr_scheduler_type, optimizer, args.warmup_steps, steps)
    workers = args.dataloader_num_workers
    train_loader = DataLoader(blocks, args.per_device_train_batch_size, shuffle=True, num_workers=workers)
    held_out.fill_up(args.per_device_eval_batch_size * ranks)
    eval_loader = DataLoader(held_out, args.per_device_eval_batch_size, num_workers=workers)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    accelerator.print(f"policy {policy.to_line()} on {ranks} ranks; {len(blocks)} blocks, {global_batch} in a step")

    when = {"every": args.save_steps, "minutes": args.save_minutes, "best": "min" if args.save_best else None}
    with Checkpointer(accelerator, folder / "checkpoints", keep=args.save_total_limit, **when) as checkpointer:
        resumed = checkpointer.resume(args.resume_from_checkpoint)
        config = {key: value for key, value in vars(args).items() if value is not None}
        accelerator.init_trackers("finetune", config, checkpointer.tracker_arguments())
        batches = checkpointer.batches(train_loader, seed=args.seed, padding=PADDING)
        report, first = Reporter(accelerator, folder, steps, after=checkpointer.steps), checkpointer.steps
        if not resumed:
            loss = evaluate(accelerator, model, eval_loader)
            report.evaluation(0, loss, perplexity=perplexity(loss))
        last = min(steps, first + args.stop_after) if args.stop_after else steps
        for step in range(first + 1, last + 1):
            learning_rate, micro_batches = scheduler.get_last_lr()[0], list(itertools.islice(batches, accumulation))
            loss, tokens, grad_norm = train_step(accelerator, model, optimizer, scheduler, micro_batches)
            report.step_done(tokens)
            if step % args.logging_steps == 0 or step == steps:
                mean = float(accelerator.reduce(loss) / tokens)
                report.train(step, loss=mean, learning_rate=learning_rate, grad_norm=float(grad_norm))
            score = None
            if step % args.eval_steps == 0 or step == steps:
                score = evaluate(accelerator, model, eval_loader)
                report.evaluation(step, score, perplexity=perplexity(score))
            checkpointer.step(score=score if args.save_best else None)
        if last < steps:
            accelerator.print(f"stopped after step {last} of {steps}; go on with --resume_from_checkpoint auto")
            checkpointer.save()
            return accelerator.end_training()

    card = model_card(vars(args), report.scores, {"policy": policy.to_line(), "ranks": ranks, "optimizer steps": steps})
    export_model(accelerator, model, folder / "model", tokenizer=tokenizer, card=card)
    if accelerator.is_main_process:
        plot_losses(report.path, folder / "loss.png")
        if args.max_new_tokens > 0:
            print(sample_text(folder / "model", "The ", args.max_new_tokens))
    accelerator.end_training()


if __name__ == "__main__":
    main()
