"""HF Trainer under a policy: `trainer_script.py OUTPUT POLICY|launched|plain`. Rank 0 writes its losses to OUTPUT."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

sys.path.insert(0, str(Path(__file__).parents[1]))
from training import GLOBAL_BATCH, dataset, tiny_llama


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """40 samples, all of one length."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = dataset()[index]
        return {"input_ids": tokens, "labels": tokens}


def optimizer_for(policy: Any) -> dict[str, Any]:
    """What Trainer must be told of a matrix optimizer, and under ``ddp_sharded``: it makes its optimizer itself."""
    if "MATRIX_OPTIMIZER" in os.environ:
        from accel_shard.optim.cores.shampoo import ShampooCore
        from accel_shard.optim.matrix import MatrixOptimizer

        settings = {"precondition_frequency": 2, "epsilon": 1e-3, "max_preconditioner_dim": 32, "lr": 3e-3}
        return {"optimizer_cls_and_kwargs": (MatrixOptimizer, {"core": ShampooCore(), **settings})}
    if policy is None or (policy.backend, policy.shard) != ("ddp", "optimizer") or "PLAIN_OPTIMIZER" in os.environ:
        return {}
    from accel_shard import ShardedOptimizer

    return {"optimizer_cls_and_kwargs": (ShardedOptimizer, {"optimizer": torch.optim.AdamW, "lr": 3e-3})}


def main() -> None:
    output, source = sys.argv[1:]
    common: dict[str, Any] = {
        "output_dir": output + ".d", "max_steps": 8, "learning_rate": 3e-3, "logging_steps": 1,
        "save_strategy": "steps" if "SAVE_AT" in os.environ else "no", "save_steps": int(os.environ.get("SAVE_AT", "1")),
        "report_to": "none", "seed": 3, "warmup_steps": 2, "weight_decay": 0.1, "disable_tqdm": True,
    }  # fmt: skip
    policy = None
    if source == "plain":
        arguments = TrainingArguments(
            **common, use_cpu=True, per_device_train_batch_size=GLOBAL_BATCH, max_grad_norm=0.5
        )
    else:
        from accel_shard import ShardingPolicy

        named = None if source == "launched" else source
        policy = ShardingPolicy.from_environment(named, gradient_clipping=0.5, gradient_accumulation_steps=2)
        policy = policy.replace(global_batch_size=GLOBAL_BATCH)
        arguments = policy.training_arguments(**common)
    trainer = Trainer(model=tiny_llama(), args=arguments, train_dataset=Samples(), **optimizer_for(policy))
    if policy is not None:
        from accel_shard import VerifyPolicy

        trainer.add_callback(VerifyPolicy(policy, trainer))
    trainer.train(resume_from_checkpoint=os.environ.get("RESUME"))
    if os.environ.get("RANK", "0") == "0":
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        Path(output).write_text(json.dumps({"losses": losses, "kind": trainer.accelerator.distributed_type.name}))


main()
