"""What a snapshot costs beside ``torch.save``, ``torch.distributed.checkpoint`` and Accelerate, on the same state.

    torchrun --nproc-per-node 2 recipes/benchmarks/checkpoint.py -o checkpoint.json

Every rank trains one step of a Llama with AdamW and then saves and loads that state in each way, one after the other,
as often as ``--repetitions`` says, so that whatever else the machine does falls on all of them. Dirty pages are flushed
before each measurement; a figure is that of the slowest rank. Ratios of minima are what can be compared.

Saves end when the data is on the disk, but for those of ``torch.save, no fsync`` and Accelerate's of a DDP run.
``torch.save`` is given state that was gathered before, which is not in its figure but beside it. Files are read
from the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from accel_shard import Checkpointer, ShardingPolicy
from accel_shard.checkpoint import snapshot, storage

Figures = dict[str, float]


class NoHash:
    """Stands in for a hash, to see what hashing costs."""

    def update(self, data: Any) -> None:
        """Do nothing."""

    def hexdigest(self) -> str:
        """Return nothing."""
        return ""


def build(policy: str, megabytes: int) -> tuple[Any, Any, Any]:
    """Return accelerator, model and optimizer with about so many megabytes of fp32 weights and AdamW state in all."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, intermediate, vocabulary = 512, 1376, 8192
    layer, ends = 4 * hidden**2 + 3 * hidden * intermediate, 2 * hidden * vocabulary
    layers = max(1, round((megabytes * 1e6 / 12 - ends) / layer))
    accelerator = ShardingPolicy.load(policy).accelerator()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=8, tie_word_embeddings=False,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    tokens = torch.arange(8).reshape(1, -1)
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    optimizer.zero_grad()
    return accelerator, model, optimizer


class Bench:
    """The ways to save and load, each a method that returns its figures in seconds."""

    def __init__(self, policy: str, megabytes: int, folder: Path) -> None:
        self.accelerator, self.model, self.optimizer = build(policy, megabytes)
        self.folder, self.serial = folder, 0
        self.rank = self.accelerator.process_index
        self.blocking = Checkpointer(self.accelerator, folder / "blocking", background=False)
        self.background = Checkpointer(self.accelerator, folder / "background")
        self.unhashed = Checkpointer(self.accelerator, folder / "unhashed", background=False)
        self.stager = DefaultStager(StagingOptions(False, False, False, False))
        self.group = dist.new_group(backend="gloo")
        self.whole = self._gathered()
        self.bytes = 0  # this rank's share of what is saved; known after the first save

    def _gathered(self) -> dict[str, Any]:
        return self._dictionaries(StateDictOptions(full_state_dict=True, cpu_offload=True))

    def _dictionaries(self, options: StateDictOptions | None = None) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer.optimizer, options=options)
        return {"model": model, "optim": optimizer}

    def _new(self, name: str) -> Path:
        self.serial += 1
        return self.folder / f"{name}-{self.serial}"

    def _ours(self, checkpointer: Checkpointer) -> Figures:
        checkpointer.steps += 1
        start = time.perf_counter()
        checkpointer.save()
        stall = time.perf_counter() - start
        checkpointer.wait()
        return {"stall": stall, "total": time.perf_counter() - start}

    # ---- saves -----------------------------------------------------------------------------------------------

    def save_ours(self) -> Figures:
        """``Checkpointer(background=False)``."""
        return self._ours(self.blocking)

    def save_ours_background(self) -> Figures:
        """``Checkpointer()``: until training goes on, and until the snapshot is committed."""
        return self._ours(self.background)

    def save_ours_without_hashes(self) -> Figures:
        """As the first, with a hash that does nothing."""
        with mock.patch.object(storage, "_hasher", NoHash):
            return self._ours(self.unhashed)

    def save_torch(self, *, fsync: bool = True) -> Figures:
        """``torch.save`` on rank 0 of state that was gathered before, flushed to the disk or not."""
        path, start = self._new("torch"), time.perf_counter()
        if self.rank == 0:
            with path.open("wb") as file:
                torch.save(self.whole, file)
                if fsync:
                    file.flush()
                    os.fsync(file.fileno())
        return _all(start)

    def gather_for_torch(self) -> Figures:
        """What comes before ``torch.save``: the whole state on rank 0."""
        start = time.perf_counter()
        self._gathered()
        return _all(start)

    def save_dcp(self) -> Figures:
        """``torch.distributed.checkpoint.save``, which flushes."""
        start = time.perf_counter()
        dcp.save(self._dictionaries(), checkpoint_id=self._new("dcp"))
        return _all(start)

    def save_dcp_async(self) -> Figures:
        """``async_save`` with threads and a stager that is used again."""
        start = time.perf_counter()
        done: Any = dcp.async_save(
            self._dictionaries(), checkpoint_id=self._new("dcp-async"), async_stager=self.stager,
            process_group=self.group,
        )  # fmt: skip
        if hasattr(done, "staging_completion"):
            done.staging_completion.result()
        stall = time.perf_counter() - start
        (done.upload_completion if hasattr(done, "upload_completion") else done).result()
        return {"stall": stall, "total": time.perf_counter() - start}

    def save_accelerate(self) -> Figures:
        """``Accelerator.save_state``."""
        start = time.perf_counter()
        self.accelerator.save_state(str(self._new("accelerate")))
        return _all(start)

    # ---- loads -----------------------------------------------------------------------------------------------

    def load_ours(self) -> Figures:
        """``Checkpointer.resume``, every byte verified."""
        start = time.perf_counter()
        assert self.blocking.resume(self.sources["ours"])
        return _all(start)

    def load_ours_without_hashes(self) -> Figures:
        """The same; of the files only the sizes are compared."""
        verify = snapshot.Snapshot.verify
        with mock.patch.object(snapshot.Snapshot, "verify", lambda s, **_: verify(s, contents=False)):
            return self.load_ours()

    def load_torch(self) -> Figures:
        """``torch.load`` of the whole on every rank, and ``set_state_dict``."""
        start = time.perf_counter()
        self._set(torch.load(self.sources["torch"], weights_only=True), StateDictOptions(full_state_dict=True))
        return _all(start)

    def load_dcp(self) -> Figures:
        """``torch.distributed.checkpoint.load`` and ``set_state_dict``."""
        start = time.perf_counter()
        state = self._dictionaries()
        dcp.load(state, checkpoint_id=self.sources["dcp"])
        self._set(state, None)
        return _all(start)

    def load_accelerate(self) -> Figures:
        """``Accelerator.load_state``."""
        start = time.perf_counter()
        self.accelerator.load_state(str(self.sources["accelerate"]))
        return _all(start)

    def _set(self, state: dict[str, Any], options: StateDictOptions | None) -> None:
        set_state_dict(
            self.model, self.optimizer.optimizer,
            model_state_dict=state["model"], optim_state_dict=state["optim"], options=options,
        )  # fmt: skip

    def write_sources(self) -> None:
        """Save once in each way, for the loads."""
        self.clear()
        self.serial = 0
        self.save_ours()
        self.save_torch()
        self.save_dcp()
        self.save_accelerate()
        (ours,) = (self.folder / "blocking").glob("step-*")
        names = {"torch": "torch-1", "dcp": "dcp-2", "accelerate": "accelerate-3"}
        self.sources = {"ours": ours} | {kind: self.folder / name for kind, name in names.items()}

    # ---- the machine -----------------------------------------------------------------------------------------

    def disk(self) -> Figures:
        """This rank's share of the bytes, written as they are and flushed: the floor of a save."""
        path, data = self._new("disk").with_suffix(f".{self.rank}"), torch.ones(self.bytes, dtype=torch.uint8)
        start = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            file.write(memoryview(data.numpy()))
            os.fsync(file.fileno())
        return _all(start)

    def copy(self) -> Figures:
        """As many bytes, from memory to memory that is there: the floor of a stall."""
        here, there = torch.ones(self.bytes, dtype=torch.uint8), torch.ones(self.bytes, dtype=torch.uint8)
        dist.barrier()
        start = time.perf_counter()
        there.copy_(here)
        return _all(start)

    def memory_of_a_background_save(self) -> Figures:
        """Return the growth of resident memory, at its peak, in the first save in the background, and the share."""
        process, peak, over = psutil.Process(), 0, threading.Event()
        before = process.memory_info().rss

        def watch() -> None:
            nonlocal peak
            while not over.wait(0.002):
                peak = max(peak, process.memory_info().rss)

        watcher = threading.Thread(target=watch)
        watcher.start()
        self.save_ours_background()
        over.set()
        watcher.join()
        (file,) = self.folder.glob(f"background/*/rank-{self.rank:05d}.safetensors")
        self.bytes = file.stat().st_size
        return {"growth_mb": (peak - before) / 1e6, "share_mb": self.bytes / 1e6}

    def clear(self) -> None:
        """Remove what was written and flush, so that no way pays for another."""
        dist.barrier()
        if self.rank == 0:
            for path in self.folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            os.sync()
        dist.barrier()


SAVES: dict[str, Callable[[Bench], Figures]] = {
    "accel_shard": Bench.save_ours,
    "accel_shard, background": Bench.save_ours_background,
    "accel_shard, no hashes": Bench.save_ours_without_hashes,
    "torch.save, no fsync": lambda bench: bench.save_torch(fsync=False),
    "torch.save": Bench.save_torch,
    "gather for torch.save": Bench.gather_for_torch,
    "dcp.save": Bench.save_dcp,
    "dcp.async_save": Bench.save_dcp_async,
    "accelerate save_state": Bench.save_accelerate,
    "raw write and fsync": Bench.disk,
    "raw copy in memory": Bench.copy,
}
LOADS: dict[str, Callable[[Bench], Figures]] = {
    "accel_shard": Bench.load_ours,
    "accel_shard, no hashes": Bench.load_ours_without_hashes,
    "torch.load": Bench.load_torch,
    "dcp.load": Bench.load_dcp,
    "accelerate load_state": Bench.load_accelerate,
}


def _all(start: float) -> Figures:
    return {"total": time.perf_counter() - start}


def measure(
    bench: Bench, ways: dict[str, Callable[[Bench], Figures]], repetitions: int, *, clear: bool
) -> dict[str, dict[str, list[float]]]:
    """Run every way in turn, again and again, after one round that does not count; the slowest rank's figures."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in ways}
    for repetition in range(repetitions + 1):
        for name, way in ways.items():
            if clear:
                bench.clear()
            dist.barrier()
            for key, value in way(bench).items():
                slowest = torch.tensor(value, dtype=torch.float64)
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                if repetition:
                    found[name].setdefault(key, []).append(slowest.item())
    return found


def report(title: str, found: dict[str, dict[str, list[float]]], base: str, key: str = "total") -> list[str]:
    """Return a Markdown table of minima, medians and ratios to one of the ways."""
    unit = min(found[base][key])
    lines = [
        f"| {title} | stall ms min (median) | total ms min (median) | total / {base} |",
        "| --- | --- | --- | --- |",
    ]
    for name, figures in found.items():
        total = figures["total"]
        stall = figures.get("stall", total)
        cells = [f"{1e3 * min(x):.0f} ({1e3 * statistics.median(x):.0f})" for x in (stall, total)]
        lines.append(f"| {name} | {cells[0]} | {cells[1]} | {min(total) / unit:.2f} |")
    return lines


def targets(saves: dict[str, Any], loads: dict[str, Any], memory: Figures) -> dict[str, tuple[float, float]]:
    """Return what was reached and what is allowed, as ratios of minima."""

    def least(found: dict[str, Any], name: str, key: str = "total") -> float:
        return float(min(found[name][key]))

    ours, background = least(saves, "accel_shard"), saves["accel_shard, background"]
    stall, durable = min(background["stall"]), min(background["total"])
    return {
        "blocking save / dcp.save": (ours / least(saves, "dcp.save"), 1.0),
        "blocking save / torch.save with fsync": (ours / least(saves, "torch.save"), 1.0),
        "background save until durable / dcp.save": (durable / least(saves, "dcp.save"), 1.0),
        "stall / dcp.save": (stall / least(saves, "dcp.save"), 0.10),
        "stall / stall of dcp.async_save": (stall / least(saves, "dcp.async_save", "stall"), 0.50),
        "load / torch.load": (least(loads, "accel_shard") / least(loads, "torch.load"), 1.0),
        "save with hashes / without": (ours / least(saves, "accel_shard, no hashes"), 1.05),
        "extra memory - share, MB": (memory["growth_mb"] - memory["share_mb"], 256.0),
    }


def main() -> None:
    """Measure, print a report, and write it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=600, help="weights and optimizer state in all")
    parser.add_argument("--policy", default="fsdp2", choices=("ddp", "fsdp2"), help="those that all ways can save")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--folder", help="on the disk to measure (default: a new one for temporary files)")
    parser.add_argument("-o", "--output", help="JSON file for all figures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.folder) as made:
        dist.init_process_group("gloo")
        shared = [made]
        dist.broadcast_object_list(shared)
        bench = Bench(args.policy, args.megabytes, Path(shared[0]))
        bench.clear()
        memory = bench.memory_of_a_background_save()
        saves = measure(bench, SAVES, args.repetitions, clear=True)
        bench.write_sources()
        loads = measure(bench, LOADS, args.repetitions, clear=False)
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, memory)
        memory = max(everyones, key=lambda m: m["growth_mb"] - m["share_mb"])
        reached = targets(saves, loads, memory)
        if bench.rank == 0:
            lines = [*report("save", saves, "dcp.save"), "", *report("load", loads, "torch.load"), ""]
            lines += [f"{name}: {got:.2f} (at most {limit:g})" for name, (got, limit) in reached.items()]
            total = bench.bytes * dist.get_world_size() / 1e6
            for name in ("raw write and fsync", "raw copy in memory"):
                lines.append(f"{name}: {total / min(saves[name]['total']):,.0f} MB/s over {total:,.0f} MB of all ranks")
            print("\n".join(lines))
            if args.output:
                content = {
                    "arguments": vars(args),
                    "saves": saves,
                    "loads": loads,
                    "memory": memory,
                    "megabytes": total,
                    "ratios": reached,
                }
                Path(args.output).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        bench.clear()
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
