"""Runs that start from what Accelerate, HF Trainer, DeepSpeed and torch.save wrote, each really produced by its tool."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from listening import listening
from rank_pool import RankPool, _forget_accelerate
from training import GLOBAL_BATCH, LENGTH, batch_of, dataset, put_together, rate, token_loss

from accel_shard import Checkpointer, ShardingPolicy
from accel_shard.errors import SnapshotError

BEFORE, AFTER = (0, 1, 2), (3, 4)


def a_model(*, tied: bool = True) -> torch.nn.Module:
    """Tied weights, a frozen one, odd sizes, and a persistent buffer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=36, intermediate_size=53, num_hidden_layers=3, num_attention_heads=2, mlp_bias=True,
        max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    model.model.norm.weight.requires_grad_(False)
    model.register_buffer("ticks", torch.full((3,), 7.0))
    with torch.no_grad():
        model.model.norm.weight.add_(torch.linspace(0, 0.1, 36))
    return model


def an_optimizer(model: torch.nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Two groups, each in an order of the user's own, which is not the model's."""
    backwards = [p for p in reversed(list(model.parameters())) if p.requires_grad]
    matrices, others = [p for p in backwards if p.dim() > 1], [p for p in backwards if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3, **options)


def train(run: Any, steps: Iterable[int]) -> list[float]:
    """Optimizer steps of any run with a model, an optimizer, a schedule and a way to go backward."""
    losses = []
    world, me = torch.distributed.get_world_size(), torch.distributed.get_rank()
    width = GLOBAL_BATCH // world
    for step in steps:
        tokens = dataset()[batch_of(step)]
        mine = tokens[me * width : (me + 1) * width]
        loss = token_loss(run.model, mine, mine) / (len(tokens) * (LENGTH - 1)) * world
        run.backward(loss)
        run.optimizer.step()
        run.schedule.step()
        run.optimizer.zero_grad()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(float(total) / world)
    return losses


class Count:
    """A registered object."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


class Live:
    """A run under a policy, of the same model with other weights."""

    def __init__(self, line: str, *, model: Callable[[], torch.nn.Module] = a_model, scale: float = 0.5) -> None:
        self.accelerator = ShardingPolicy.load(line).accelerator()
        made = model()
        with torch.no_grad():
            for tensor in (*made.parameters(), made.ticks):
                tensor.mul_(scale)
        optimizer = an_optimizer(made)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(made, optimizer, schedule)
        self.backward = self.accelerator.backward
        self.count = Count()
        self.accelerator.register_for_checkpointing(self.count)

    def held(self) -> dict[str, torch.Tensor]:
        return together(self.accelerator.backend.layout(self.accelerator, self.model, self.optimizer))


def together(layout: Any) -> dict[str, torch.Tensor]:
    """Everything of a layout, and the step counts."""
    from accel_shard.checkpoint.plan import gather

    return put_together(layout) | {
        f"step.{n}": s["step"].clone() for held in gather(layout.scalars) for n, s in held.items()
    }


def held_by(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """What a run holds, by torch's own means; DeepSpeed's public ones lose the second group's optimizer state."""
    from accel_shard.backends.zero_layout import describe_zero

    if hasattr(model, "zero_optimization_stage"):
        return together(describe_zero(model))
    found = {}
    for name, p in (model.module if hasattr(model, "module") else model).named_parameters():
        state = getattr(optimizer, "optimizer", optimizer).state.get(p, {})
        for key, value in {"weight": p, **state}.items():
            whole = (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
            prefix = {"weight": "model", "step": "step"}.get(key)
            found[f"{prefix}.{name}" if prefix else f"optim.{name}.{key}"] = whole
    return found


# ---- what each tool writes -------------------------------------------------------------------------------------


def by_our_accelerator(line: str, folder: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """``save_state`` of a ``PolicyAccelerator``, which is an ``Accelerator``; for FSDP both kinds of state dict."""
    run = Live(line, scale=1.0)
    train(run, BEFORE)
    run.count.value = 5
    run.accelerator.save_state(f"{folder}/save_state")
    if line == "fsdp2":  # on a CPU torch 2.13 crashes in FSDP1's full weights, and has both moments be the second
        plugin = run.accelerator.state.fsdp_plugin
        plugin.state_dict_config = plugin.optim_state_dict_config = None
        plugin.set_state_dict_type("FULL_STATE_DICT")
        run.accelerator.save_state(f"{folder}/full")
    held = run.held() if line == "fsdp1" else held_by(run.model, run.optimizer)
    return held, train(run, AFTER)


class Plain:
    """Plain Accelerator on DDP: it steps the schedule once a rank, so the schedule is made for that."""

    def __init__(self) -> None:
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True)
        model = a_model()
        optimizer = an_optimizer(model)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: rate(count // 2))
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(model, optimizer, schedule)
        self.backward = self.accelerator.backward


def by_plain_accelerate(folder: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    run = Plain()
    train(run, BEFORE)
    assert run.schedule.state_dict()["last_epoch"] == 2 * len(BEFORE)
    run.accelerator.save_state(f"{folder}/save_state", safe_serialization=False)
    run.accelerator.save_model(run.model, f"{folder}/shards", max_shard_size="20KB")
    run.accelerator.save_model(run.model, f"{folder}/bins", max_shard_size="20KB", safe_serialization=False)
    return held_by(run.model, run.optimizer), train(run, AFTER)


class Distributed:
    """DDP without Accelerate."""

    def __init__(self) -> None:
        self.model = torch.nn.parallel.DistributedDataParallel(a_model())
        self.optimizer = an_optimizer(self.model)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rate)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


def by_name(run: Distributed) -> torch.optim.Optimizer:
    """The same optimizer, made of names, in the model's order."""
    named = [(name, p) for name, p in run.model.named_parameters() if p.requires_grad]
    groups = [
        {**group, "params": [(name, p) for name, p in named if (p.dim() > 1) is many]}
        for many, group in zip((True, False), run.optimizer.param_groups, strict=True)
    ]
    optimizer = torch.optim.AdamW(groups)
    optimizer.state.update(run.optimizer.state)
    return optimizer


def by_torch(folder: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    import argparse

    import numpy as np

    run = Distributed()
    train(run, BEFORE)
    if torch.distributed.get_rank() == 0:
        content = {
            "epoch": 0, "global_step": 3, "model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(),
            "scheduler": run.schedule.state_dict(), "args": argparse.Namespace(lr=3e-3, out=Path("runs")),
            "best": np.float64(1.5),
        }  # fmt: skip
        torch.save(content, f"{folder}/all.pt")
        torch.save(run.model.module.state_dict(), f"{folder}/bare.pt")
        torch.save(content | {"optimizer": by_name(run).state_dict()}, f"{folder}/named.pt")
    return held_by(run.model, run.optimizer), train(run, AFTER)


class Engine:
    """DeepSpeed without Accelerate."""

    def __init__(self, stage: int, bf16: bool) -> None:
        import deepspeed
        from deepspeed.ops import __compatible_ops__

        __compatible_ops__["deepspeed_shm_comm"] = False  # compiled at every start on a CPU, and never used
        world = torch.distributed.get_world_size()
        model: Any = a_model()
        optimizer: Any = an_optimizer(model)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        config = {
            "train_micro_batch_size_per_gpu": GLOBAL_BATCH // world, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": bf16},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
        }  # fmt: skip
        self.model, self.optimizer, _, self.schedule = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, lr_scheduler=schedule
        )
        self.backward = self.model.backward
        self.optimizer = self
        self.schedule = self

    def zero_grad(self) -> None: ...

    def step(self) -> None:
        """The engine steps optimizer and schedule in one call; the loop asks for both."""
        self._asked = not getattr(self, "_asked", False)
        if self._asked:
            self.model.step()


def by_deepspeed(stage: int, bf16: bool, folder: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    run = Engine(stage, bf16)
    train(run, BEFORE)
    run.model.save_checkpoint(f"{folder}/deepspeed")
    held = held_by(run.model, None)
    torch.distributed.barrier()
    for name, weight in get_fp32_state_dict_from_zero_checkpoint(f"{folder}/deepspeed").items():
        if name.startswith("model.layers"):
            assert torch.equal(held[f"model.{name}"], weight), "what DeepSpeed's own converter makes of it"
    return held, train(run, AFTER)


def by_trainer(line: str, folder: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    from transformers import Trainer, TrainerCallback

    policy = ShardingPolicy.load(line)
    arguments = policy.training_arguments(
        output_dir=folder, max_steps=len(BEFORE) + len(AFTER), per_device_train_batch_size=4, save_steps=len(BEFORE),
        logging_steps=1, report_to="none", disable_tqdm=True, seed=3,
    )  # fmt: skip
    rows = torch.cat([batch_of(step) for step in (*BEFORE, *AFTER)])
    data = [{"input_ids": tokens, "labels": tokens} for tokens in dataset()[rows]]
    held: dict[str, torch.Tensor] = {}

    class Ordered(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(data)

        def create_optimizer(self, *_: Any) -> Any:
            self.optimizer = self.optimizer or an_optimizer(self.model)
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, rate)
            return self.lr_scheduler

    class Look(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == len(BEFORE):
                held.update(held_by(trainer.model_wrapped, trainer.optimizer))

    trainer = Ordered(model=a_model(), args=arguments, train_dataset=data, callbacks=[Look()])
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return held, losses[len(BEFORE) :]


SOURCES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "accelerate ddp": (by_our_accelerator, ("ddp",)),
    "plain accelerate": (by_plain_accelerate, ()),
    "accelerate fsdp1": (by_our_accelerator, ("fsdp1",)),
    "accelerate fsdp2": (by_our_accelerator, ("fsdp2",)),
    "accelerate zero3": (by_our_accelerator, ("zero3",)),
    "torch": (by_torch, ()),
    "deepspeed 1 bf16": (by_deepspeed, (1, True)),
    "deepspeed 2": (by_deepspeed, (2, False)),
    "deepspeed 3": (by_deepspeed, (3, False)),
    "deepspeed 2 by 4": (by_deepspeed, (2, False)),
    "deepspeed 3 by 4": (by_deepspeed, (3, False)),
    "trainer ddp": (by_trainer, ("ddp",)),
    "trainer fsdp2": (by_trainer, ("fsdp2",)),
    "trainer zero2": (by_trainer, ("zero2",)),
}


class Written:
    """Checkpoints of this session, each written when it is first asked for."""

    def __init__(self, pool: Callable[[int], RankPool], root: Path) -> None:
        self._pool, self._root = pool, root
        self._done: dict[str, Any] = {}

    def __call__(self, source: str) -> tuple[Path, dict[str, torch.Tensor], list[float]]:
        folder = self._root / source.replace(" ", "-")
        if source not in self._done:
            folder.mkdir(exist_ok=True)
            function, arguments = SOURCES[source]
            self._done[source] = self._pool(4 if "by 4" in source else 2).run(function, *arguments, str(folder))[0]
        return folder, *self._done[source]


@pytest.fixture(scope="module")
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    pools = {2: "two_ranks", 4: "four_ranks"}
    return Written(lambda ranks: request.getfixturevalue(pools[ranks]), tmp_path_factory.mktemp("foreign"))


def imported(line: str, path: str) -> tuple[int, dict[str, torch.Tensor], list[float], int]:
    run = Live(line)
    with Checkpointer(run.accelerator, Path(path).parent / "snapshots") as checkpointer:
        assert checkpointer.resume(path)
        held = run.held()
        return checkpointer.steps, held, train(run, AFTER), run.count.value


# source, what of it, policy, ranks: each kind of file into several policies, at the same number of ranks and another
CASES = [
    ("accelerate ddp", "save_state", "ddp", 2), ("accelerate ddp", "save_state", "zero2", 4),
    ("accelerate ddp", "save_state", "ddp_sharded", 2), ("deepspeed 2", "deepspeed", "ddp_sharded", 4),
    ("plain accelerate", "save_state", "fsdp2", 2),
    ("accelerate fsdp1", "save_state", "zero3", 4), ("accelerate fsdp1", "save_state", "fsdp1", 2),
    ("accelerate fsdp2", "save_state", "fsdp2", 2), ("accelerate fsdp2", "save_state", "fsdp1", 4),
    ("accelerate fsdp2", "full", "zero1", 2),
    ("accelerate zero3", "save_state", "zero3", 2), ("accelerate zero3", "save_state", "hsdp", 4),
    ("torch", "all.pt", "zero3", 2), ("torch", "all.pt", "fsdp2", 4),
    ("torch", "named.pt", "zero1", 2),
    ("deepspeed 1 bf16", "deepspeed", "zero1,precision=bf16", 2),
    ("deepspeed 2", "deepspeed", "ddp", 2), ("deepspeed 2", "deepspeed/global_step3", "zero3", 4),
    ("deepspeed 3", "deepspeed", "zero2", 2),
    ("deepspeed 2 by 4", "deepspeed", "fsdp2", 2), ("deepspeed 3 by 4", "deepspeed", "zero3", 2),
    ("trainer ddp", "checkpoint-3", "fsdp2", 2), ("trainer fsdp2", "checkpoint-3", "ddp", 4),
    ("trainer zero2", "checkpoint-3", "fsdp1", 2),
]  # fmt: skip


@pytest.mark.parametrize(("source", "part", "line", "ranks"), CASES, indirect=["ranks"])
def test_every_tensor_arrives_and_the_run_goes_on(
    source: str, part: str, line: str, ranks: RankPool, written: Written
) -> None:
    folder, held, losses = written(source)
    steps, reached, again, count = ranks.run(imported, line, str(folder / part))[0]
    assert steps == len(BEFORE)
    assert count == (5 if source.startswith("accelerate") else 0)
    assert sum(key.startswith("optim.") for key in held) == 2 * sum(key.startswith("model.") for key in held) - 2
    for key, tensor in held.items():
        assert torch.equal(tensor, reached[key]), key
        assert not tensor.isnan().any()
    assert reached["buffer.ticks"].tolist() == [7.0] * 3
    assert all(step == len(BEFORE) for key, step in reached.items() if key.startswith("step."))
    assert again == pytest.approx(losses, rel=1e-5)
    assert abs(losses[0] - losses[1]) > 1e-3
    if source == f"accelerate {line}" and ranks.world == 2:
        assert again == losses


# ---- weights alone ---------------------------------------------------------------------------------------------


def weights_of(line: str, path: str) -> tuple[dict[str, torch.Tensor], int, list[str]]:
    with listening(logging.INFO) as lines:
        run = Live(line)
        train(run, [0])
        before = run.held()
        checkpointer = Checkpointer(run.accelerator, Path(path).parent / "snapshots")
        checkpointer.steps = 1
        assert checkpointer.resume(path, weights_only=True)
        after = run.held()
        kept = [key for key in before if not key.startswith(("model.", "buffer."))]
        assert kept
        assert all(torch.equal(before[key], after[key]) for key in kept)
        assert run.schedule.state_dict()["last_epoch"] == 1
    return {key: after[key] for key in after if key not in kept}, checkpointer.steps, lines


@pytest.mark.parametrize(
    ("source", "part", "line"),
    [
        ("torch", "bare.pt", "zero1"), ("accelerate ddp", "save_state", "fsdp2"),
        ("plain accelerate", "shards", "zero3"), ("plain accelerate", "bins", "fsdp1"),
    ],
)  # fmt: skip
def test_the_weights_alone(source: str, part: str, line: str, two_ranks: RankPool, written: Written) -> None:
    folder, held, _ = written(source)
    reached, steps, lines = two_ranks.run(weights_of, line, str(folder / part))[0]
    assert steps == 0
    weights = {key: value for key, value in held.items() if key.startswith("model.")}
    assert {**weights, "buffer.ticks": reached["buffer.ticks"]}.keys() == reached.keys()
    assert all(torch.equal(weight, reached[key]) for key, weight in weights.items())
    assert "its weights alone" in lines[-1]
    left = "the optimizer, schedulers, registered objects, random_states_*.pkl"
    assert (f"Not taken over: {left}" in lines[-1]) is (part == "save_state")
    if part in ("shards", "bins"):
        assert len(list((folder / part).glob("*-of-*"))) > 5


def from_a_snapshot(folder: str) -> tuple[dict[str, torch.Tensor], int, list[str]]:
    run = Live("fsdp2", scale=1.0)
    train(run, BEFORE)
    with Checkpointer(run.accelerator, folder, background=False) as checkpointer:
        checkpointer.steps = 3
        path = checkpointer.save()
    wanted = run.held()
    _forget_accelerate({name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")})
    reached, steps, lines = weights_of("zero2", str(path))
    assert all(torch.equal(wanted[key], weight) for key, weight in reached.items())
    return reached, steps, lines


def test_the_weights_of_a_snapshot_alone(two_ranks: RankPool, tmp_path: Path) -> None:
    reached, steps, _ = two_ranks.run(from_a_snapshot, str(tmp_path))[0]
    assert steps == 0
    assert len(reached) > 20


def only_with_a_path(folder: str) -> None:
    checkpointer = Checkpointer(Live("ddp").accelerator, folder)
    with pytest.raises(ValueError, match=r"weights_only=True with source 'auto'\. Allowed: with the path"):
        checkpointer.resume(weights_only=True)
    assert not checkpointer.resume("auto"), "a folder of something else is never taken by itself"


def test_auto_takes_no_foreign_folder(two_ranks: RankPool, written: Written) -> None:
    folder, _, _ = written("accelerate ddp")
    assert (folder / "save_state" / "model.safetensors").exists()
    two_ranks.run(only_with_a_path, str(folder))


# ---- refusals --------------------------------------------------------------------------------------------------


def attempted(path: str, kind: str = "same", weights_only: bool = False) -> str:
    """The error that every rank gets, and a sign that the run was not touched."""
    accelerator = ShardingPolicy.load("ddp").accelerator()
    other: dict[str, Callable[[], Any]] = {
        "untied": lambda: a_model(tied=False),
        "other model": lambda: torch.nn.Linear(4, 4),
    }
    model = other.get(kind, a_model)()
    optimizer: Any = an_optimizer(model)
    if kind == "sgd":
        optimizer = torch.optim.SGD([{"params": g["params"]} for g in optimizer.param_groups], lr=0.1, momentum=0.9)
    if kind == "one group":
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    if kind == "all":
        optimizer = torch.optim.AdamW(
            [{"params": [p for p in model.parameters() if (p.dim() > 1) is many]} for many in (True, False)]
        )
    if kind == "other members":
        optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop())
    if kind == "other order":
        optimizer.param_groups[0]["params"].reverse()
    schedules = [] if kind == "no schedule" else [torch.optim.lr_scheduler.LambdaLR(optimizer, rate)]
    model, optimizer, *_ = accelerator.prepare(model, optimizer, *schedules)
    if kind == "objects":
        accelerator.register_for_checkpointing(Count(), Count())
    before = [p.detach().clone() for p in model.parameters()]
    checkpointer = Checkpointer(accelerator, Path(path).parent / "snapshots")
    with pytest.raises(SnapshotError) as caught:
        checkpointer.resume(path, weights_only=weights_only)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert checkpointer.steps == 0
    return str(caught.value)


REFUSED = [
    (
        "torch",
        "all.pt",
        "other model",
        r"is of another model: it lacks weight, bias; only it has lm_head.weight, .* and 35 more",
    ),
    ("torch", "all.pt", "untied", "group 0 in .* has 22 parameters, by number only, and this run's group has 23"),
    ("torch", "bare.pt", "same", "holds no optimizer state, and this run has an optimizer.*weights_only=True"),
    ("torch", "all.pt", "sgd", "is of another optimizer than this run's SGD: its parameter group 0 has no.*momentum"),
    (
        "torch",
        "all.pt",
        "one group",
        r"has 2 parameter groups of \[22, 15\] parameters, and this run's has 1 of \[37\]",
    ),
    ("torch", "all.pt", "all", "group 1 in .* has 15 parameters, by number only, and this run's group has 16"),
    ("torch", "all.pt", "other order", "its parameters come in another order"),
    ("torch", "all.pt", "no schedule", "has 1 schedulers, and this run has 0"),
    (
        "accelerate fsdp2",
        "save_state",
        "other members",
        "parameter group 0 is not the same: nothing only in .*gate_proj.bias only in this run",
    ),
    ("accelerate ddp", "save_state", "objects", "has 1 registered objects, and this run has 2"),
    ("accelerate ddp", "nowhere", "same", "nowhere' does not exist. Allowed: a snapshot; a folder of Accelerate"),
    ("accelerate ddp", ".", "same", "is no snapshot: it has no manifest.json"),
]


@pytest.mark.parametrize(("source", "part", "kind", "words"), REFUSED, ids=[f"{r[0]}-{r[2]}" for r in REFUSED])
def test_what_does_not_fit_is_refused_on_every_rank(
    source: str, part: str, kind: str, words: str, two_ranks: RankPool, written: Written
) -> None:
    folder, _, _ = written(source)
    said = two_ranks.run(attempted, str(folder / part), kind)
    assert said[0] == said[1]
    assert re.search(words, said[0]), said[0]


def test_a_file_of_a_rank_is_missing(two_ranks: RankPool, written: Written, tmp_path: Path) -> None:
    folder, _, _ = written("deepspeed 2")
    shutil.copytree(folder / "deepspeed", tmp_path / "copy")
    (tmp_path / "copy" / "global_step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    said = two_ranks.run(attempted, str(tmp_path / "copy"))
    assert "2 ranks saved" in said[0]
    assert "the files of 1 are there" in said[0]


def half_there(path: str) -> str:
    run = Live("fsdp2")
    with pytest.raises(SnapshotError) as caught:
        Checkpointer(run.accelerator, Path(path).parent / "snapshots").resume(path)
    return str(caught.value)


def test_a_piece_that_one_rank_misses_fails_on_every_rank(
    two_ranks: RankPool, written: Written, tmp_path: Path
) -> None:
    """Rank 0 reads its own rows only, and they are all there."""
    folder, _, _ = written("accelerate fsdp2")
    shutil.copytree(folder / "save_state", tmp_path / "copy")
    (tmp_path / "copy" / "pytorch_model_fsdp_0" / "__1_0.distcp").unlink()
    said = two_ranks.run(half_there, str(tmp_path / "copy"))
    assert said[0] == said[1]
    assert "__1_0.distcp' cannot be read" in said[0]


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


def poison(file: Path, evil: Evil) -> None:
    """Put it into a file as an attacker would: beside all that belongs there."""
    if file.name == ".metadata":
        import pickle

        index = pickle.loads(file.read_bytes())
        index.planner_data["evil"] = evil
        file.write_bytes(pickle.dumps(index))
    else:
        torch.save({**torch.load(file, weights_only=False), "evil": evil}, file)


@pytest.mark.parametrize(
    ("source", "part", "file"),
    [
        ("accelerate ddp", "save_state", "optimizer.bin"),
        ("plain accelerate", "save_state", "pytorch_model.bin"),
        ("accelerate fsdp2", "save_state", "pytorch_model_fsdp_0/.metadata"),
        ("deepspeed 2", "deepspeed", "global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("deepspeed 3", "deepspeed", "global_step3/zero_pp_rank_0_mp_rank_00_model_states.pt"),
    ],
)
def test_code_in_a_file_is_refused_and_not_run(
    source: str, part: str, file: str, two_ranks: RankPool, written: Written, tmp_path: Path
) -> None:
    folder, _, _ = written(source)
    shutil.copytree(folder / part, tmp_path / "copy")
    mark = tmp_path / "mark"
    poison(tmp_path / "copy" / file, Evil(mark))
    said = two_ranks.run(attempted, str(tmp_path / "copy"))
    assert said[0] == said[1]
    assert "posix.system" in said[0]
    assert Path(file).name in said[0]
    assert not mark.exists()
    try:
        torch.load(tmp_path / "copy" / file, weights_only=False)
    except Exception:  # .metadata is a pickle of its own
        import pickle

        pickle.loads((tmp_path / "copy" / file).read_bytes())
    assert mark.exists(), "it would have run"


def with_more(path: str, target: str) -> list[str]:
    """A model that has less than the source: what is left over is said by name, not dropped in silence."""
    content = torch.load(path, weights_only=True)
    if torch.distributed.get_rank() == 0:
        torch.save(content | {"head.weight": torch.ones(2), "head.bias": torch.ones(1)}, target)
    torch.distributed.barrier()
    with listening(logging.INFO) as lines:
        run = Live("fsdp2")
        Checkpointer(run.accelerator, Path(target).parent / "snapshots").resume(target, weights_only=True)
    return lines


def test_what_is_left_over_is_said_by_name(two_ranks: RankPool, written: Written, tmp_path: Path) -> None:
    folder, _, _ = written("torch")
    lines = two_ranks.run(with_more, str(folder / "bare.pt"), str(tmp_path / "more.pt"))[0]
    assert any("holds tensors that this run's model has not: head.bias, head.weight" in line for line in lines)


def test_what_is_not_taken_over_is_said_by_name(two_ranks: RankPool, written: Written) -> None:
    folder, _, _ = written("torch")
    said = two_ranks.run(heard_from, str(folder / "all.pt"))[0][-1]
    assert said.endswith("Not taken over: epoch, args, best, random state, position in the data beyond the step count")


def heard_from(path: str) -> list[str]:
    with listening(logging.INFO) as lines:
        run = Live("ddp")
        assert Checkpointer(run.accelerator, Path(path).parent / "snapshots").resume(path)
    return lines


def tied_and_apart(folder: str) -> str:
    """A source whose two weights differ, and a run that ties them: one of them would be lost."""
    if torch.distributed.get_rank() == 0:
        state = dict(a_model().state_dict())
        torch.save(state | {"lm_head.weight": state["lm_head.weight"] + 1}, f"{folder}/apart.pt")
    torch.distributed.barrier()
    run = Live("fsdp2")
    with pytest.raises(SnapshotError) as caught:
        Checkpointer(run.accelerator, folder).resume(f"{folder}/apart.pt", weights_only=True)
    return str(caught.value)


def test_weights_that_this_run_ties_and_the_source_does_not(two_ranks: RankPool, tmp_path: Path) -> None:
    said = two_ranks.run(tied_and_apart, str(tmp_path))[0]
    assert "'model.embed_tokens.weight' is tied to another weight in this run, and the two differ" in said


def by_cosine(folder: str) -> str:
    """A schedule whose length is counted in the steps that Accelerate takes once a rank."""
    from accelerate import Accelerator

    def prepared(accelerator: Any) -> Any:
        model: Any = torch.nn.Linear(3, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        return accelerator.prepare(model, optimizer, schedule)

    plain = Accelerator(cpu=True)
    model, optimizer, schedule = prepared(plain)
    plain.backward(model(torch.ones(2, 3)).sum())
    optimizer.step()
    schedule.step()
    plain.save_state(folder)
    _forget_accelerate({name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")})
    ours = ShardingPolicy.load("ddp").accelerator()
    _, _, schedule = prepared(ours)
    schedule.scheduler.T_max = 10
    with pytest.raises(SnapshotError) as caught:
        Checkpointer(ours, f"{folder}/snapshots").resume(folder)
    return str(caught.value)


def test_a_schedule_that_counts_ranks_and_cannot_be_converted(two_ranks: RankPool, tmp_path: Path) -> None:
    said = two_ranks.run(by_cosine, str(tmp_path))[0]
    assert "counted 2 steps in 1 optimizer steps" in said
    assert "T_max would have to be counted so too" in said


def as_fused_adam_writes(path: str, target: str) -> None:
    """The steps counted once a group, and none of torch's flags: apex's and DeepSpeed's FusedAdam, which need a GPU."""
    content = torch.load(path, weights_only=False)
    for state in content["optimizer"]["state"].values():
        del state["step"]
    for group in content["optimizer"]["param_groups"]:
        for flag in ("amsgrad", "foreach", "maximize", "capturable", "differentiable", "fused"):
            del group[flag]
        group |= {"step": 3, "bias_correction": True}
    torch.save(content, target)


def test_an_adam_that_counts_steps_by_group(two_ranks: RankPool, written: Written, tmp_path: Path) -> None:
    folder, _, losses = written("torch")
    as_fused_adam_writes(str(folder / "all.pt"), str(tmp_path / "fused.pt"))
    steps, reached, again, _ = two_ranks.run(imported, "zero2", str(tmp_path / "fused.pt"))[0]
    assert steps == 3
    counted = [step for key, step in reached.items() if key.startswith("step.")]
    assert len(counted) == 37
    assert all(step == 3 for step in counted)
    assert again == pytest.approx(losses, rel=1e-5)
