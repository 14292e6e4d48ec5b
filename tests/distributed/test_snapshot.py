"""Snapshots: saved under one policy and number of ranks, resumed under another, as if nothing had happened."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_pool import RankError, RankPool
from safetensors import safe_open
from training import GLOBAL_BATCH, LENGTH, batch_of, dataset, groups, put_together, rate, tiny_llama, token_loss

from accel_shard import Checkpointer, ShardingPolicy

BEFORE, AFTER = (0, 1, 2), (3, 4, 6, 7, 8)  # step 5 is the short batch at the end of the data


class Counter:
    """A registered object, as users have them."""

    def __init__(self) -> None:
        self.value: Any = {"best": float("inf"), "tensor": torch.zeros(2), 3: ("a", None)}

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Run:
    """A tiny Llama with dropout, a frozen weight and a schedule, ready to train, save and resume."""

    def __init__(self, line: str, dropout: float = 0.0) -> None:
        self.accelerator = ShardingPolicy.load(line).accelerator()
        model = tiny_llama(dropout=dropout)
        model.lm_head.weight.requires_grad_(False)
        trained = [{**g, "params": [p for p in g["params"] if p.requires_grad]} for g in groups(model)]
        optimizer = torch.optim.AdamW(trained, lr=3e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(model, optimizer, schedule)
        self.model.train()

    def train(self, steps: Iterable[int]) -> list[float]:
        world, me, losses = self.accelerator.num_processes, self.accelerator.process_index, []
        width = GLOBAL_BATCH // world
        for step in steps:
            tokens = dataset()[batch_of(step)]
            mine = tokens[me * width : (me + 1) * width]
            loss = token_loss(self.model, mine, mine) / (len(tokens) * (LENGTH - 1)) * world
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            losses.append(float(self.accelerator.reduce(loss.detach(), "mean")))
        return losses

    def layout(self) -> Any:
        return self.accelerator.backend.layout(self.accelerator, self.model, self.optimizer)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: weight.detach().clone() for name, weight in self.accelerator.whole_weights(self.model)}


def save(line: str, folder: str, dropout: float = 0.0) -> tuple[Any, ...]:
    """Train, save, go on: what a resumed run must do too."""
    run = Run(line, dropout)
    run.train(BEFORE)
    run.counter.value["best"] = 1.5
    with Checkpointer(run.accelerator, folder) as checkpointer:
        checkpointer.steps, checkpointer.progress = len(BEFORE), {"tokens": 123}
        saved = put_together(run.layout())
        checkpointer.save()
        losses = run.train(AFTER)  # while it is written
        drawn = random.random()
    return losses, run.weights(), drawn, saved


def resume(line: str, folder: str, dropout: float = 0.0) -> tuple[list[float], dict[str, torch.Tensor], float]:
    random.seed(99)
    run = Run(line, dropout)
    with Checkpointer(run.accelerator, folder) as checkpointer:
        assert checkpointer.resume()
        assert (checkpointer.steps, checkpointer.progress) == (len(BEFORE), {"tokens": 123})
    assert run.counter.value["best"] == 1.5
    assert run.counter.value[3] == ("a", None)
    losses = run.train(AFTER)
    return losses, run.weights(), random.random()


PRESETS = ["ddp", "ddp_sharded", "fsdp1", "fsdp2", "zero1", "zero2", "zero3"]


@pytest.mark.parametrize(
    "line", [*PRESETS, "fsdp2_keep_params", "zero3_offload", "fsdp2_offload", "zero2,precision=bf16"]
)
def test_resume_under_the_same_policy_is_bit_equal(line: str, two_ranks: RankPool, tmp_path: Path) -> None:
    """With dropout: the random streams must be the same too."""
    saved = two_ranks.run(save, line, str(tmp_path), dropout=0.2)
    resumed = two_ranks.run(resume, line, str(tmp_path), dropout=0.2)
    for (losses, weights, drawn, _), (again, reached, redrawn) in zip(saved, resumed, strict=True):
        assert again == losses
        assert redrawn == drawn
        assert weights.keys() == reached.keys()
        assert all(torch.equal(weights[name], reached[name]) for name in weights)


# Each kind once as the one that saves and once as the one that loads, with a change of ranks where that can be.
PAIRS = [
    ("ddp", 2, "fsdp2", 4), ("fsdp2", 4, "zero3", 2), ("zero3", 2, "fsdp1", 4), ("fsdp1", 4, "zero1", 2),
    ("zero1", 2, "hsdp", 4), ("hsdp", 4, "zero2", 2), ("zero2", 2, "zero3", 4), ("zero3", 4, "ddp", 2),
    ("zero2", 4, "fsdp1", 2), ("fsdp1", 2, "fsdp2", 2), ("fsdp2", 2, "ddp", 4), ("zero1", 4, "zero2", 4),
    ("ddp", 2, "ddp_sharded", 4), ("ddp_sharded", 4, "fsdp2", 2), ("fsdp2", 2, "ddp_sharded", 2), ("ddp_sharded", 2, "zero2", 4),
    ("zero2", 4, "ddp_sharded", 2), ("ddp_sharded", 2, "ddp_sharded", 4), ("ddp_sharded", 4, "ddp", 2),
]  # fmt: skip


def held(line: str, folder: str) -> dict[str, torch.Tensor]:
    """Everything of a resumed run, put together from all ranks' shards."""
    run = Run(line)
    with Checkpointer(run.accelerator, folder) as checkpointer:
        assert checkpointer.resume()
    return put_together(run.layout())


@pytest.mark.parametrize(("first", "ranks", "second", "others"), PAIRS)
def test_another_policy_and_number_of_ranks(
    first: str, ranks: int, second: str, others: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Every tensor arrives bit-equal, and the run goes on as it would have."""
    pools = {2: "two_ranks", 4: "four_ranks"}
    saver, loader = request.getfixturevalue(pools[ranks]), request.getfixturevalue(pools[others])
    losses, weights, _, saved = saver.run(save, first, str(tmp_path))[0]
    loaded = loader.run(held, second, str(tmp_path))[0]
    assert saved.keys() == loaded.keys()
    assert sum(key.startswith("optim.") for key in saved) == 2 * sum(key.startswith("model.") for key in saved) - 2
    for key, tensor in saved.items():
        assert torch.equal(tensor, loaded[key]), key
        assert not tensor.isnan().any()
    again, reached, _ = loader.run(resume, second, str(tmp_path))[0]
    assert again == pytest.approx(losses, rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(reached[name], weight, rtol=1e-4, atol=1e-5, msg=name)


def with_statistics(line: str, folder: str, mode: str) -> tuple[list[float], list[torch.Tensor]]:
    """A model whose running statistics differ from rank to rank."""
    accelerator = ShardingPolicy.load(f"{line},wrap=Linear" if "fsdp" in line else line).accelerator()
    torch.manual_seed(3)
    model: Any = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.BatchNorm1d(9), torch.nn.Linear(9, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.05))
    checkpointer = Checkpointer(accelerator, folder, background=False)
    losses = []
    if mode == "resume":
        checkpointer.resume()
    for step in range(checkpointer.steps, 6):
        generator = torch.Generator().manual_seed(10 * step + accelerator.process_index)
        loss = model(torch.randn(8, 6, generator=generator)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if mode == "save" and step == 2:
            checkpointer.steps = 3
            checkpointer.save()
    model.eval()
    with torch.no_grad():
        losses.append(model(torch.ones(4, 6)).sum().item())
    return losses[-4:], [b.clone() for b in model.buffers()]


@pytest.mark.parametrize("line", PRESETS)
def test_running_statistics_go_on_as_they_were_on_each_rank(line: str, two_ranks: RankPool, tmp_path: Path) -> None:
    saved = two_ranks.run(with_statistics, line, str(tmp_path), "save")
    resumed = two_ranks.run(with_statistics, line, str(tmp_path), "resume")
    for (losses, buffers), (again, reached) in zip(saved, resumed, strict=True):
        assert again == losses
        assert all(torch.equal(a, b) for a, b in zip(buffers, reached, strict=True))


def prepared_apart(folder: str, mode: str) -> list[float]:
    accelerator = ShardingPolicy.load("ddp").accelerator()
    model: Any = accelerator.prepare(tiny_llama())
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=3e-3))
    checkpointer = Checkpointer(accelerator, folder, background=False)
    if mode == "resume":
        checkpointer.resume()
    losses = []
    for step in range(checkpointer.steps, 4):
        tokens = dataset()[batch_of(step)]
        loss = token_loss(model, tokens, tokens) / tokens.numel()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if mode == "save" and step == 1:
            checkpointer.steps = 2
            checkpointer.save()
    return losses[-2:]


def test_an_optimizer_that_was_prepared_apart_is_saved_too(two_ranks: RankPool, tmp_path: Path) -> None:
    saved = two_ranks.run(prepared_apart, str(tmp_path), "save")
    assert two_ranks.run(prepared_apart, str(tmp_path), "resume") == saved


# ---- the folder ------------------------------------------------------------------------------------------------


def test_every_file_is_plain_safetensors_or_json(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(save, "ddp", str(tmp_path))
    (folder,) = tmp_path.iterdir()
    assert folder.name == "step-000000003"
    stored = 0
    for file in folder.iterdir():
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as tensors:
                stored += sum(tensors.get_tensor(name).numel() for name in tensors.keys())  # noqa: SIM118
        else:
            json.loads(file.read_text())
    manifest = json.loads((folder / "manifest.json").read_text())["manifest"]
    assert stored == sum(int(np.prod(t["shape"])) for t in manifest["tensors"].values()), "replicas are written once"
    sizes = [record["size"] for name, record in manifest["files"].items() if name.endswith(".safetensors")]
    assert len(sizes) == 2
    assert max(sizes) < 1.3 * min(sizes), "both ranks write their share"


def damaged(line: str, folder: str) -> int:
    run = Run(line)
    with Checkpointer(run.accelerator, folder) as checkpointer:
        checkpointer.resume()
    return checkpointer.steps


def save_twice(line: str, folder: str) -> None:
    run = Run(line)
    with Checkpointer(run.accelerator, folder, every=1) as checkpointer:
        for step in range(2):
            run.train([step])
            checkpointer.step()


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 4
    file.write_bytes(content)


DAMAGE = {
    "flipped bit": (
        lambda f: flip_a_bit(f / "rank-00001.safetensors"),
        "rank-00001.safetensors' is not what was written",
    ),
    "truncated file": (lambda f: (f / "rank-00000.safetensors").write_bytes(b"short"), "has 5 bytes"),
    "missing file": (lambda f: (f / "rank-00001.json").unlink(), "rank-00001.json' cannot be read"),
    "changed manifest": (
        lambda f: (f / "manifest.json").write_text((f / "manifest.json").read_text().replace('"step": 2', '"step": 7')),
        "was changed after it was written",
    ),
    "cut manifest": (
        lambda f: (f / "manifest.json").write_bytes((f / "manifest.json").read_bytes()[:-50]),
        "cannot be read",
    ),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "is no snapshot"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_snapshot_is_skipped_for_the_one_before(kind: str, two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(save_twice, "fsdp2", str(tmp_path))
    newest = tmp_path / "step-000000002"
    assert two_ranks.run(damaged, "fsdp2", str(tmp_path)) == [2, 2]
    spoil, words = DAMAGE[kind]
    spoil(newest)
    assert two_ranks.run(damaged, "fsdp2", str(tmp_path)) == [1, 1]
    with pytest.raises(RankError, match=words):
        two_ranks.run(named, "fsdp2", str(newest))


def named(line: str, folder: str) -> None:
    run = Run(line)
    with Checkpointer(run.accelerator, Path(folder).parent) as checkpointer:
        checkpointer.resume(folder)


def wait_for_threads() -> None:
    import threading

    for thread in threading.enumerate():
        if thread.name == "accel_shard save":
            thread.join()


def save_and_go_on(run: Run, checkpointer: Checkpointer) -> None:
    """Save; in the background it is the next step that says what became of it, the same one on all ranks."""
    checkpointer.save()
    wait_for_threads()
    run.train([1])
    checkpointer.step()


def failing_save(line: str, folder: str, failing_rank: int, background: bool) -> None:
    """A save in which one rank's disk is full; then another that works."""
    import errno

    from accel_shard.checkpoint import snapshot

    run = Run(line)
    original = snapshot.write_tensors
    with Checkpointer(run.accelerator, folder, background=background) as checkpointer:
        checkpointer.steps = 1
        checkpointer.save()
        run.train([0])
        checkpointer.steps = 2
        if run.accelerator.process_index == failing_rank:

            def full(*_: Any) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

            snapshot.write_tensors = full
        with pytest.raises(RuntimeError, match=f"rank {failing_rank}: OSError: .*No space left"):
            save_and_go_on(run, checkpointer)
        snapshot.write_tensors = original
        checkpointer.steps = 9
        checkpointer.save()


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_full_disk_fails_on_every_rank_and_touches_nothing(
    failing_rank: int, background: bool, two_ranks: RankPool, tmp_path: Path
) -> None:
    two_ranks.run(failing_save, "zero2", str(tmp_path), failing_rank, background)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000001", "step-000000009"]
    assert two_ranks.run(damaged, "zero2", str(tmp_path)) == [9, 9]


def retained(folder: str) -> list[str]:
    run = Run("ddp")
    with Checkpointer(run.accelerator, folder, every=1, keep=2) as checkpointer:
        for step in range(5):
            run.train([step])
            checkpointer.step()
            checkpointer.wait()
            if step == 0 and run.accelerator.is_main_process:
                checkpointer.pin(Path(folder) / "step-000000001")
    return sorted(p.name for p in Path(folder).iterdir())


def test_retention_keeps_the_newest_and_the_pinned(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(retained, str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000001", "step-000000004", "step-000000005"]


def reused(folder: str) -> str:
    """A new, shorter run in the folder of an old one that came further."""
    run = Run("ddp")
    with Checkpointer(run.accelerator, folder, every=1, keep=1) as checkpointer:
        run.train([0])
        checkpointer.step()
        checkpointer.resume()
    return f"{checkpointer.steps}"


def test_a_reused_folder_with_higher_steps_loses_nothing_of_the_new_run(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(save, "ddp", str(tmp_path))
    assert two_ranks.run(reused, str(tmp_path)) == ["1", "1"], "the newest is the last one committed"
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000001"]


def inside_a_window(folder: str) -> list[int]:
    accelerator = ShardingPolicy.load("ddp,gradient_accumulation_steps=3").accelerator()
    model: Any = torch.nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = []
    with Checkpointer(accelerator, folder, background=False) as checkpointer:
        for micro in range(6):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 2)).sum())
                optimizer.step()
                optimizer.zero_grad()
                if micro == 3:
                    assert checkpointer.save() is None
                checkpointer.step()
            found.append(len(list(Path(folder).glob("step-*"))))
    return found


def test_a_save_inside_an_accumulation_window_waits_for_its_end(two_ranks: RankPool, tmp_path: Path) -> None:
    assert two_ranks.run(inside_a_window, str(tmp_path)) == [[0, 0, 0, 0, 0, 1]] * 2


def signalled(folder: str) -> tuple[int, int]:
    """One rank alone is told to stop; all save the same step and leave."""
    import os
    import signal

    run = Run("fsdp2")
    with Checkpointer(run.accelerator, folder) as checkpointer:
        for step in range(6):
            run.train([step])
            if step == 2 and run.accelerator.process_index == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            try:
                checkpointer.step()
            except SystemExit as leaving:
                return step, int(leaving.code or 0)
    return -1, 0


def test_a_signal_to_one_rank_stops_all_at_one_step_with_a_snapshot(two_ranks: RankPool, tmp_path: Path) -> None:
    assert two_ranks.run(signalled, str(tmp_path)) == [(2, 75), (2, 75)]
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000003"]


def ended_while_saving(folder: str) -> None:
    """`end_training` leaves the process group, which a save in the background still needs."""
    run = Run("ddp")
    checkpointer = Checkpointer(run.accelerator, folder)
    checkpointer.steps = 1
    checkpointer.save()
    run.accelerator.end_training()


def test_the_end_of_training_waits_for_a_save_in_flight(tmp_path: Path) -> None:
    pool = RankPool(2)  # of its own: its ranks are disconnected afterwards
    try:
        pool.run(ended_while_saving, str(tmp_path))
    finally:
        pool.stop()
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000001"]


def one_rank_saves(folder: str, who: int) -> str:
    run = Run("fsdp2")
    checkpointer = Checkpointer(run.accelerator, folder, patience=3)
    if run.accelerator.process_index == who:
        with pytest.raises(RuntimeError, match="not every rank called save within 3 s") as error:
            checkpointer.save()
        return str(error.value)
    return ""


@pytest.mark.parametrize("who", [0, 1])
def test_a_save_on_one_rank_alone_is_an_error_that_names_the_absent(
    who: int, two_ranks: RankPool, tmp_path: Path
) -> None:
    said = two_ranks.run(one_rank_saves, str(tmp_path), who)[who]
    assert f"rank {1 - who}" in said.lower().replace("ranks", "rank")
    assert not list(tmp_path.iterdir())
    two_ranks.stop()  # what was sent in vain must not meet the next test


# ---- without the run -------------------------------------------------------------------------------------------


def export_live(line: str, folder: str) -> None:
    from accel_shard import export_model

    run = Run(line)
    run.train(BEFORE)
    export_model(run.accelerator, run.model, folder)


def test_the_command_lists_checks_compares_prunes_and_exports(
    two_ranks: RankPool, four_ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file

    from accel_shard.cli import main

    folder, other = tmp_path / "a", tmp_path / "b"
    two_ranks.run(save_twice, "zero2", str(folder))
    first, second = folder / "step-000000001", folder / "step-000000002"
    assert main(["checkpoints", "ls", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["step-000000002", "step-000000001"]
    assert "2 ranks" in lines[0]
    assert "backend=deepspeed" in lines[0]
    assert main(["checkpoints", "show", str(first)]) == 0
    assert "model.model.norm.weight  36  float32  1 piece\n" in capsys.readouterr().out
    assert main(["checkpoints", "verify", str(first)]) == 0
    assert main(["checkpoints", "diff", str(first), str(second)]) == 1
    assert "model.lm_head.weight" not in capsys.readouterr().out, "it is frozen"
    # The same state, cut into other pieces by another policy and number of ranks, does not differ.
    four_ranks.run(load_and_save, "fsdp2", str(first), str(other))
    assert main(["checkpoints", "diff", str(first), str(next(other.iterdir()))]) == 0
    two_ranks.run(save, "zero3", str(tmp_path / "c"))
    two_ranks.run(export_live, "zero3", str(tmp_path / "live"))
    arguments = ["--like", str(tmp_path / "live"), "--max-shard-size", "20KB"]
    source = str(next((tmp_path / "c").iterdir()))
    assert main(["checkpoints", "export", source, str(tmp_path / "out"), *arguments]) == 0
    exported: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        exported |= load_file(file)
    live = load_file(tmp_path / "live" / "model.safetensors")
    assert exported.keys() == live.keys()
    assert all(torch.equal(exported[name], live[name]) for name in live)
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    flip_a_bit(second / "rank-00000.safetensors")
    assert main(["checkpoints", "verify", str(second)]) == 2
    assert "rank-00000.safetensors' is not what was written" in capsys.readouterr().err
    assert main(["checkpoints", "prune", str(folder), "--keep", "0"]) == 2
    assert main(["checkpoints", "prune", str(folder), "--keep", "1"]) == 0
    assert [p.name for p in folder.iterdir()] == ["step-000000002"]
    assert main(["checkpoints", "ls", str(tmp_path / "nothing")]) == 2


def load_and_save(line: str, source: str, folder: str) -> None:
    run = Run(line)
    with Checkpointer(run.accelerator, folder) as checkpointer:
        checkpointer.resume(source)
        checkpointer.steps += 1
        checkpointer.save()


# ---- what cannot be loaded -------------------------------------------------------------------------------------


class Pickled:
    """A registered object that only pickle could hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"deep": [{"function": test_every_file_is_plain_safetensors_or_json}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def save_pickled(folder: str) -> None:
    run = Run("ddp")
    run.accelerator.register_for_checkpointing(Pickled())
    Checkpointer(run.accelerator, folder).save()


def test_what_would_need_pickle_is_refused_by_name(two_ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"registered object 1 \(Pickled\).deep\[0\].function is a builtins.function"):
        two_ranks.run(save_pickled, str(tmp_path))
    assert not list(tmp_path.iterdir())


def other_groups(folder: str) -> None:
    accelerator = ShardingPolicy.load("ddp").accelerator()
    model: Any = tiny_llama()
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    Checkpointer(accelerator, folder).resume()


def test_other_parameter_groups_are_an_error(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(save, "ddp", str(tmp_path))
    with pytest.raises(RankError, match=r"2 groups of \[22, 7\] parameters against 1 of \[30\]; only in one.*lm_head"):
        two_ranks.run(other_groups, str(tmp_path))


def odd_optimizer(line: str, folder: str, mode: str) -> list[float]:
    """Adafactor keeps factors of another shape than the parameter."""
    accelerator = ShardingPolicy.load(line).accelerator()
    model: Any = tiny_llama()
    model, optimizer = accelerator.prepare(model, torch.optim.Adafactor(model.parameters(), lr=1e-2))
    losses = []
    checkpointer = Checkpointer(accelerator, folder)
    if mode == "resume":
        checkpointer.resume()
    for step in range(4):
        tokens = dataset()[batch_of(step)]
        if mode == "save" and step == 2:
            checkpointer.steps = 2
            checkpointer.save()
            checkpointer.wait()
        if mode == "resume" and step < 2:
            continue
        loss = token_loss(model, tokens, tokens) / tokens.numel()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[-2:]


def test_states_of_another_shape_survive_where_nothing_is_sharded(two_ranks: RankPool, tmp_path: Path) -> None:
    saved = two_ranks.run(odd_optimizer, "ddp", str(tmp_path), "save")
    assert two_ranks.run(odd_optimizer, "ddp", str(tmp_path), "resume") == saved
    with pytest.raises(RankError, match="which share one flat partition under DeepSpeed"):
        two_ranks.run(odd_optimizer, "zero2", str(tmp_path), "resume")


# ---- the whole matrix: python -m pytest -m matrix --------------------------------------------------------------

CORNERS = [(name, n) for name in PRESETS for n in (1, 2, 4)] + [("hsdp", 4)]


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, RankPool]]:
    """Pools of 1, 2 and 4 ranks of their own."""
    made = {n: RankPool(n) for n in (1, 2, 4)}
    yield made
    for pool in made.values():
        pool.stop()


@pytest.fixture(scope="session")
def corner(pools: dict[int, RankPool], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Any]:
    """Save once under each policy and number of ranks; return the folder, the tensors, and how the run goes on."""

    @cache
    def saved(name: str, ranks: int) -> Any:
        folder = tmp_path_factory.mktemp(f"{name}-{ranks}")
        losses, _, _, tensors = pools[ranks].run(save, name, str(folder))[0]
        return folder, losses, tensors

    return saved


@pytest.mark.matrix
@pytest.mark.parametrize(("second", "others"), CORNERS)
@pytest.mark.parametrize(("first", "ranks"), CORNERS)
def test_matrix(
    first: str, ranks: int, second: str, others: int, pools: dict[int, RankPool], corner: Callable[[str, int], Any]
) -> None:
    folder, losses, tensors = corner(first, ranks)
    loaded = pools[others].run(held, second, str(folder))[0]
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[key], tensors[key]) for key in tensors)
    again, _, _ = pools[others].run(resume, second, str(folder))[0]
    assert again == pytest.approx(losses, rel=1e-5)
    if (first, ranks) == (second, others):
        assert again == losses
