"""A training run of a tiny Llama, as an oracle in plain torch and under a policy: the same data, the same steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

SAMPLES, LENGTH, VOCABULARY, GLOBAL_BATCH, STEPS = 44, 16, 96, 8, 20
CLIP, LEARNING_RATE, WARMUP = 0.5, 3e-3, 4


@dataclass
class Run:
    """What a run shows: one number an optimizer step, and the weights at the end."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    weights: dict[str, torch.Tensor]


def tiny_llama(*, tied: bool = False, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A Llama with sizes that no number of ranks divides evenly."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY + 1, hidden_size=36, intermediate_size=52, num_hidden_layers=3, num_attention_heads=2,
        max_position_embeddings=64, tie_word_embeddings=tied, attention_dropout=dropout,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


def dataset() -> torch.Tensor:
    """``(SAMPLES, LENGTH)`` tokens of a sequence that can be learned."""
    generator = torch.Generator().manual_seed(7)
    start = torch.randint(0, VOCABULARY, (SAMPLES, 1), generator=generator)
    stride = torch.randint(1, 4, (SAMPLES, 1), generator=generator)
    return (start + stride * torch.arange(LENGTH)) % VOCABULARY


def batch_of(step: int) -> torch.Tensor:
    """Indices of the samples of one optimizer step; the last one of each pass over the data is smaller."""
    per_epoch = math.ceil(SAMPLES / GLOBAL_BATCH)
    epoch, position = divmod(step, per_epoch)
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
    return order[position * GLOBAL_BATCH : (position + 1) * GLOBAL_BATCH]


def rate(step: int) -> float:
    """Warm-up, then a linear fall, counted in optimizer steps."""
    return min(1.0, (step + 1) / WARMUP) * (1 - step / STEPS)


def token_loss(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the cross entropy of all labels that are not -100."""
    logits = model(input_ids=tokens).logits.float()
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), ignore_index=-100, reduction="sum"
    )


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices only, as everybody trains."""
    named = list(model.parameters())
    return [
        {"params": [p for p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in named if p.dim() <= 1], "weight_decay": 0.0},
    ]


def optimizer_for(model: torch.nn.Module, *, sgd: bool) -> torch.optim.Optimizer:
    """AdamW, or SGD where the size of the gradients must show (Adam divides it away)."""
    return torch.optim.SGD(groups(model), lr=0.3) if sgd else torch.optim.AdamW(groups(model), lr=LEARNING_RATE)


def oracle(steps: int = STEPS, clip: float = CLIP, sgd: bool = False, **model_options: Any) -> Run:
    """One process, plain torch, the whole global batch at once."""
    model = tiny_llama(**model_options)
    optimizer = optimizer_for(model, sgd=sgd)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    data, run = dataset(), Run([], [], [], {})
    for step in range(steps):
        tokens = data[batch_of(step)]
        loss = token_loss(model, tokens, tokens) / (tokens.shape[0] * (LENGTH - 1))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        run.rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
        run.norms.append(float(norm))
    run.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return run


def under_policy(line: str, *, steps: int = STEPS, clip: float | None = CLIP, call_clip: bool = True,
                 sgd: bool = False, **model_options: Any) -> Run:  # fmt: skip
    """The same run on the ranks of this process's group, by the policy; weights on rank 0 only."""
    from accel_shard import ShardingPolicy

    policy = ShardingPolicy.load(line).replace(**({} if clip is None else {"gradient_clipping": clip}))
    accelerator = policy.accelerator()
    model: Any = tiny_llama(**model_options)
    optimizer: Any = optimizer_for(model, sgd=sgd)
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    data, run = dataset(), Run([], [], [], {})
    accumulation, world = policy.gradient_accumulation_steps, accelerator.num_processes
    width = math.ceil(GLOBAL_BATCH / (world * accumulation))
    for step in range(steps):
        whole = batch_of(step)
        padded = torch.cat([whole, whole.new_full((width * world * accumulation - len(whole),), -1)])
        mine = padded.view(accumulation, world, width)[:, accelerator.process_index]
        scored, summed = len(whole) * (LENGTH - 1), torch.zeros(())
        run.rates.append(optimizer.param_groups[0]["lr"])
        for indices in mine:
            with accelerator.accumulate(model):
                tokens = data[indices.clamp(min=0)]
                labels = torch.where(indices[:, None] >= 0, tokens, -100)
                total = token_loss(model, tokens, labels)
                accelerator.backward(total / scored * world * accumulation)
                if accelerator.sync_gradients and call_clip:
                    run.norms.append(float(accelerator.clip_grad_norm_(model.parameters())))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                summed += total.detach()
        run.losses.append(float(accelerator.reduce(summed, "sum")) / scored)
    for name, weight in accelerator.whole_weights(model):
        if accelerator.is_main_process:
            run.weights[name] = weight.detach().float().clone()
    return run


def put_together(layout: Any) -> dict[str, torch.Tensor]:
    """Everything of a layout, put together from all ranks' shards; NaN where nobody has it. Every rank calls it."""
    from accel_shard.checkpoint.plan import gather

    whole: dict[str, torch.Tensor] = {}
    for parts in gather({key: (s.shape, s.dtype, [(b, t.clone()) for b, t in s.parts]) for key, s in layout.tensors()}):
        for key, (shape, dtype, boxes) in parts.items():
            tensor = whole.setdefault(key, torch.full(shape, torch.nan, dtype=dtype))
            for box, piece in boxes:
                tensor[box.slices()] = piece
    return whole
