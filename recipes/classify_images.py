# /// script
# dependencies = ["accel-shard[recipes]"]
# ///
"""Train a vision transformer on handwritten digits, sharded by one policy.

    torchrun --nproc-per-node 2 recipes/classify_images.py --policy fsdp2
    accelerate launch --config_file accelerate_configs/zero2.yaml --num_processes 2 recipes/classify_images.py

A ViT of 0.2 M parameters learns 1437 scans of 8 x 8 pixels in a minute on two cores; 360 are held out. Nothing is
downloaded. OUTPUT_DIR gets ``metrics.jsonl``, ``loss.png`` and ``model``, a folder for ``from_pretrained``.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from accelerate.utils import set_seed
from arguments import RunArguments, option, parse_arguments
from image_data import CLASSES, IGNORED, PADDING, SIDE, split_digits
from optimizers import build_optimizer
from reporting import Reporter, find_trackers, plot_losses
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader
from transformers import ViTConfig, ViTForImageClassification

from accel_shard import Checkpointer, ShardingPolicy, export_model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(RunArguments):
    """What this recipe takes beside."""

    output_dir: str = option("runs/digits", "folder of everything that is written")
    seed: int = option(42, "of the weights and of the order of the images")
    max_steps: int = option(200, "optimizer steps")
    per_device_train_batch_size: int = option(32, "images in a forward, on each rank")
    max_grad_norm: float | None = option(None, "clip the global norm; default: the policy's, or not")
    eval_steps: int = option(25, "optimizer steps between evaluations; one comes before the first, one after the last")

    def __post_init__(self) -> None:
        self.check_counts("max_steps", "per_device_train_batch_size", "eval_steps")


def build_model() -> ViTForImageClassification:
    """Return a small ViT that reads the image as 16 patches."""
    shape = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    image = {"image_size": SIDE, "patch_size": 2, "num_channels": 1, "num_labels": CLASSES}
    return ViTForImageClassification(ViTConfig(**shape, **image, initializer_range=0.1))


def summed_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the images' losses, and how many were classified rightly."""
    logits = model(pixel_values=batch["pixel_values"]).logits.float()
    loss = F.cross_entropy(logits, batch["labels"], ignore_index=IGNORED, reduction="sum")
    return loss, (logits.argmax(-1) == batch["labels"]).sum()


def count_images(batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Return how many images of these batches are scored."""
    return torch.stack([(batch["labels"] != IGNORED).sum() for batch in batches]).sum().float()


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: Any) -> tuple[float, float]:
    """Return mean loss and accuracy over the images held out; every rank calls it."""
    model.eval()
    totals = torch.zeros(3, device=accelerator.device)
    for batch in loader:
        totals += torch.stack([*summed_loss(model, batch), count_images([batch])])
    model.train()
    loss, right, images = accelerator.reduce(totals).tolist()
    return loss / images, right / images


def train_step(accelerator: Any, model: Any, optimizer: Any, scheduler: Any, batches: list[Any]) -> list[torch.Tensor]:
    """Do one optimizer step; return its mean loss, how many images it had, and the gradients' norm (0: not clipped)."""
    images = accelerator.reduce(count_images(batches))
    loss, grad_norm = torch.zeros_like(images), torch.zeros_like(images)
    # backward() divides by the micro-batches and averages over the ranks; divide by the images instead.
    scale = accelerator.gradient_accumulation_steps * accelerator.num_processes / images
    for batch in batches:
        with accelerator.accumulate(model):
            part, _ = summed_loss(model, batch)
            accelerator.backward(part * scale)
            if accelerator.sync_gradients and accelerator.policy.gradient_clipping is not None:
                grad_norm = accelerator.clip_grad_norm_(model.parameters())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        loss += part.detach()
    return [accelerator.reduce(loss) / images, images, grad_norm]


@record
def main() -> None:
    """Train, evaluate, export."""
    args = parse_arguments(Arguments, sys.argv[1:], str(__doc__))
    policy = ShardingPolicy.from_environment(
        args.policy, gradient_accumulation_steps=args.gradient_accumulation_steps, gradient_clipping=args.max_grad_norm
    )
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    accelerator = policy.accelerator(log_with=find_trackers(args.report_to), project_dir=args.output_dir)
    set_seed(args.seed)  # the same weights on every rank
    model, (images, held_out) = build_model(), split_digits()
    ranks, accumulation = accelerator.num_processes, accelerator.gradient_accumulation_steps
    optimizer = build_optimizer(
        args.optimizer, model, lr=args.learning_rate, weight_decay=args.weight_decay, betas=(0.9, 0.999), eps=1e-8,
        more=args.optim_args,
    )  # fmt: skip
    scheduler = transformers.get_scheduler(args.lr_scheduler_type, optimizer, args.warmup_steps, args.max_steps)
    held_out.fill_up(64 * ranks)
    loaders = DataLoader(images, args.per_device_train_batch_size, shuffle=True), DataLoader(held_out, 64)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(model, optimizer, *loaders, scheduler)

    when = {"every": args.save_steps, "keep": args.save_total_limit}
    with Checkpointer(accelerator, folder / "checkpoints", **when) as checkpointer:
        resumed = checkpointer.resume(args.resume_from_checkpoint)
        accelerator.init_trackers("digits", init_kwargs=checkpointer.tracker_arguments())
        batches = checkpointer.batches(train_loader, seed=args.seed, padding=PADDING)
        first, steps = checkpointer.steps, args.max_steps
        report = Reporter(accelerator, folder, steps, after=first, unit="images")
        if not resumed:
            loss, accuracy = evaluate(accelerator, model, eval_loader)
            report.evaluation(0, loss, accuracy=accuracy)
        last = min(steps, first + args.stop_after) if args.stop_after else steps
        for step in range(first + 1, last + 1):
            learning_rate, micro_batches = scheduler.get_last_lr()[0], list(itertools.islice(batches, accumulation))
            loss, count, norm = train_step(accelerator, model, optimizer, scheduler, micro_batches)
            report.step_done(count)
            report.train(step, loss=float(loss), learning_rate=learning_rate, grad_norm=float(norm))
            if step % args.eval_steps == 0 or step == steps:
                loss, accuracy = evaluate(accelerator, model, eval_loader)
                report.evaluation(step, loss, accuracy=accuracy)
            checkpointer.step()
        if last < steps:
            accelerator.print(f"stopped after step {last} of {steps}; go on with --resume_from_checkpoint auto")
            checkpointer.save()
            return accelerator.end_training()

    export_model(accelerator, model, folder / "model")
    if accelerator.is_main_process:
        plot_losses(report.path, folder / "loss.png", unit="image")
    accelerator.end_training()


if __name__ == "__main__":
    main()
