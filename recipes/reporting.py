"""What a run tells: ``metrics.jsonl``, trackers, a progress line, ``loss.png``, the model card, a sample of text."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import tqdm

__all__ = ["Reporter", "find_trackers", "model_card", "plot_losses", "sample_text"]

VERSIONS: Final = ("accel-shard", "accelerate", "datasets", "deepspeed", "torch", "transformers")


def find_trackers(report_to: str) -> list[str] | None:
    """Return the trackers that ``--report_to`` names, separated by commas; None for ``none``.

    Raises:
        ValueError: for a tracker that is unknown or not installed; Accelerate would leave it out in silence.
    """
    installed = [str(name) for name in get_available_trackers()]
    if report_to in ("none", "all"):
        return installed if report_to == "all" and installed else None
    names = [name.strip() for name in report_to.split(",")]
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise ValueError(f"--report_to {name!r} is unknown. Allowed: none, all, {', '.join(LOGGER_TYPE_TO_CLASS)}.")
        if name not in installed:
            raise ValueError(f"--report_to {name!r} is not installed. Install it, or use one of: none, {installed}.")
    return names


class Reporter:
    """Reports a run; every rank makes one and calls it, rank 0 alone writes.

    ``metrics.jsonl`` gets one object a line. It starts empty, or with the lines up to the step ``after`` which a
    resumed run goes on, so that no step is doubled or missing. A terminal shows a bar, anything else plain lines.
    Speed is counted in ``unit``: tokens, images.
    """

    def __init__(
        self, accelerator: Accelerator, folder: Path, num_steps: int, after: int = 0, unit: str = "tokens"
    ) -> None:
        self.accelerator, self.path, self.num_steps = accelerator, folder / "metrics.jsonl", num_steps
        self.unit = unit
        if accelerator.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            former = self.path.read_text().splitlines() if after and self.path.is_file() else []
            self.path.write_text("".join(f"{line}\n" for line in former if json.loads(line)["step"] <= after))
        self.scores: dict[int, float] = {}
        self.plain = not sys.stderr.isatty()
        self.bar = tqdm(total=num_steps, initial=after, disable=self.plain, unit="step", dynamic_ncols=True)
        self.started, self.count = time.perf_counter(), torch.zeros((), device=accelerator.device)

    def step_done(self, count: torch.Tensor) -> None:
        """Count one optimizer step and its tokens or images, without waiting for the device."""
        self.count += count
        self.bar.update()

    def train(self, step: int, **metrics: float) -> None:
        """Report an optimizer step, with the speed since the last report."""
        count = self.count.item()  # waits for the device, so before the clock is read
        speed = metrics[f"{self.unit}_per_second"] = count / (time.perf_counter() - self.started)
        self._write({"step": step} | metrics)
        line = "  ".join(f"{name} {metrics[name]:.4g}" for name in ("loss", "grad_norm", "learning_rate"))
        line += f"  {speed:,.0f} {self.unit}/s  {_memory(self.accelerator.device)}"
        self.bar.set_postfix_str(line)
        if self.plain:
            self.accelerator.print(f"step {step:>{len(str(self.num_steps))}}/{self.num_steps}  {line}", flush=True)
        self.started, self.count = time.perf_counter(), torch.zeros_like(self.count)

    def evaluation(self, step: int, loss: float, **scores: float) -> None:
        """Report an evaluation; its time does not count as training."""
        self.scores[step] = loss
        self._write({"step": step, "eval_loss": loss} | scores)
        line = f"step {step}/{self.num_steps}  eval_loss {loss:.4f}"
        line += "".join(f"  {name} {value:.4g}" for name, value in scores.items())
        if self.accelerator.is_main_process:
            self.bar.write(line)
        if step == self.num_steps:
            self.bar.close()
        self.started, self.count = time.perf_counter(), torch.zeros_like(self.count)

    def _write(self, values: Mapping[str, float]) -> None:
        if self.accelerator.is_main_process:
            with self.path.open("a") as file:
                file.write(json.dumps(values) + "\n")
        self.accelerator.log({key: value for key, value in values.items() if key != "step"}, step=int(values["step"]))


def _memory(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB peak"
    return f"{psutil.Process().memory_info().rss / 2**30:.2f} GiB resident"


def plot_losses(metrics: Path, image: Path, unit: str = "token") -> None:
    """Draw training and validation loss by step; without matplotlib do nothing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    axes = (figure := Figure(figsize=(6, 4), layout="constrained")).subplots()
    for key, label, style in (("loss", "training", "-"), ("eval_loss", "validation", "o-")):
        chosen = [row for row in rows if key in row]
        axes.plot([row["step"] for row in chosen], [row[key] for row in chosen], style, label=label)
    axes.set(xlabel="optimizer step", ylabel=f"loss (nats per {unit})")
    axes.legend()
    figure.savefig(image, dpi=150)


def model_card(arguments: Mapping[str, Any], scores: Mapping[int, float], facts: Mapping[str, object]) -> str:
    """Return the README of the exported model: front matter for the hub, how to load it, how it was made."""
    base, dataset = arguments["model_name_or_path"], arguments["dataset"]
    hub = {"base_model": base, "datasets": dataset}
    front = ["library_name: transformers", "pipeline_tag: text-generation", "tags: [accel-shard]"]
    front += [f"{key}: {value}" for key, value in hub.items() if value and not Path(value).exists()]
    results = {f"validation loss after step {step}": f"{loss:.4f}" for step, loss in scores.items()}
    said = {name: value for name, value in arguments.items() if value is not None and name not in ("config", *facts)}
    rows = "\n".join(f"| {name} | {value} |" for name, value in (results | dict(facts) | said).items())
    installed = {str(item.name).replace("_", "-").lower(): item.version for item in importlib.metadata.distributions()}
    versions = ", ".join(f"{name} {installed[name]}" for name in VERSIONS if name in installed)
    header = "\n".join(front)
    return f"""---\n{header}\n---\n\n# {Path(base).name if base else "A small Llama"}, trained with accel_shard\n
From {base or "random weights"}, trained on {dataset or "the prose of Python's language reference (PSF-2.0)"}.\n
```python
from transformers import AutoModelForCausalLM, AutoTokenizer\n
model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```\n\n## Training\n\n| what | value |\n| --- | --- |\n{rows}\n\nVersions: {versions}.\n"""


def sample_text(folder: Path, prompt: str, max_new_tokens: int) -> str:
    """Load the exported folder as a user would and return what it writes. One rank may call it alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.integrations import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()  # else ZeRO-3 would shard this model too, which all ranks would have to do together
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    inputs = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
    options = {"attention_mask": torch.ones_like(inputs), "do_sample": True, "temperature": 0.7, "top_k": 50}
    output = model.generate(inputs, max_new_tokens=max_new_tokens, pad_token_id=tokenizer.eos_token_id or 0, **options)
    return str(tokenizer.decode(output[0], skip_special_tokens=True))
