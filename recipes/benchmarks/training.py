"""Whether a matrix optimizer reaches AdamW's loss in three quarters of the steps: real runs of a recipe.

    python recipes/benchmarks/training.py images -o images.json
    python recipes/benchmarks/training.py text -o text.json

Each optimizer is first run once at each of its learning rates. At the best of them it is run with every seed: AdamW for
all of the steps, the others for ``--share`` of them, each with a schedule that ends where it ends. Compared is the mean
loss on held-out data. All runs are single processes on one thread, ``--jobs`` of them at a time; the wall-clock is that
of the processes, of which loading takes a part.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RECIPES = Path(__file__).parents[1]
TASKS: dict[str, tuple[list[str], int]] = {
    "images": (["classify_images.py", "--per_device_train_batch_size", "64"], 200),
    "text": (["finetune.py", "--max_new_tokens", "0", "--per_device_train_batch_size", "8"], 150),
}
RATES = {
    "adamw": [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2],
    "shampoo": [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2],
    "soap": [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2],
    "muon": [2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2],
    "galore": [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2],
}


@dataclass(frozen=True)
class Run:
    """What one run showed: held-out losses by step, and how long it took."""

    optimizer: str
    rate: float
    seed: int
    steps: int
    losses: dict[int, float]
    seconds: float

    @property
    def final(self) -> float:
        """The loss after the last step."""
        return self.losses[self.steps]


def run(task: str, optimizer: str, rate: float, seed: int, steps: int, more: str | None) -> Run:
    """Run a recipe in a process of its own.

    Raises:
        RuntimeError: with the end of what it printed, if it failed.
    """
    (script, *options), _ = TASKS[task]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(RECIPES / script), *options, "--policy", "ddp", "--output_dir", folder,
                   "--optimizer", optimizer, "--learning_rate", str(rate), "--seed", str(seed),
                   "--max_steps", str(steps), "--eval_steps", "10"]  # fmt: skip
        command += ["--optim_args", more] if more else []
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        seconds = time.perf_counter() - start
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-3000:]}")
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}
    return Run(optimizer, rate, seed, steps, losses, seconds)


def draw(runs: list[Run], image: Path, task: str) -> None:
    """Draw the mean loss by step of each optimizer's runs with its best learning rate."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(6, 4), layout="constrained")).subplots()
    for name in dict.fromkeys(r.optimizer for r in runs):
        mine = [r for r in runs if r.optimizer == name]
        steps = sorted(mine[0].losses)
        axes.plot(
            steps, [statistics.mean(r.losses[s] for r in mine) for s in steps], label=f"{name}, lr {mine[0].rate:g}"
        )
    axes.axhline(statistics.mean(r.final for r in runs if r.optimizer == "adamw"), color="gray", linestyle=":")
    axes.set(xlabel="optimizer step", ylabel="held-out loss", yscale="log", title=task)
    axes.legend()
    figure.savefig(image, dpi=150)


def main() -> None:
    """Sweep, compare, print a table, and write figures and curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=tuple(TASKS))
    parser.add_argument("--optimizers", default="adamw,shampoo,soap")
    parser.add_argument("--optim_args", default="{}", help="JSON: optimizer -> its further settings")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--share", type=float, default=0.75, help="of AdamW's steps")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON; the curves are a PNG beside it")
    given = parser.parse_args()
    more, steps = json.loads(given.optim_args), TASKS[given.task][1]
    names, seeds = given.optimizers.split(","), [int(seed) for seed in given.seeds.split(",")]
    budgets = {name: steps if name == "adamw" else round(steps * given.share) for name in names}
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:

        def start(name: str, rate: float, seed: int) -> concurrent.futures.Future[Run]:
            return pool.submit(run, given.task, name, rate, seed, budgets[name], more.get(name))

        sweep = [f.result() for f in [start(name, rate, seeds[0]) for name in names for rate in RATES[name]]]
        best = {name: min((r for r in sweep if r.optimizer == name), key=lambda r: r.final).rate for name in names}
        runs = [f.result() for f in [start(name, best[name], seed) for name in names for seed in seeds]]
    report(given.task, sweep, runs, given.output)


def report(task: str, sweep: list[Run], runs: list[Run], output: Path) -> None:
    """Print the comparison, and write it."""
    by_name: dict[str, list[Run]] = {}
    for r in runs:
        by_name.setdefault(r.optimizer, []).append(r)
    wanted = statistics.mean(r.final for r in by_name["adamw"])
    print(f"| {task} | learning rate | steps | held-out loss, mean (each seed) | seconds |")
    print("| --- | --- | --- | --- | --- |")
    rows: dict[str, Any] = {}
    for name, mine in by_name.items():
        losses = [r.final for r in mine]
        rows[name] = {"loss": statistics.mean(losses), "reached": statistics.mean(losses) <= wanted}
        each = ", ".join(f"{loss:.4f}" for loss in losses)
        seconds = statistics.mean(r.seconds for r in mine)
        print(f"| {name} | {mine[0].rate:g} | {mine[0].steps} | {rows[name]['loss']:.4f} ({each}) | {seconds:.0f} |")
    content = {"rows": rows, "sweep": [asdict(r) for r in sweep], "runs": [asdict(r) for r in runs]}
    output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    draw(runs, output.with_suffix(".png"), task)


if __name__ == "__main__":
    main()
