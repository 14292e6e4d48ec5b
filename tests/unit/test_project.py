"""What holds for the project as a whole: cost of import, sizes, documents that are generated, the wheel."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from accel_shard.support import matrix

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "accel_shard").rglob("*.py"))


@pytest.mark.parametrize(
    "code",
    ["import accel_shard", "import accel_shard; accel_shard.ShardingPolicy.load('fsdp2')", "from accel_shard.cli import main",
     "from accel_shard.cli import main; main(['config', 'zero3'])", "from accel_shard.cli import main; main(['explain', 'hsdp'])"],
)  # fmt: skip
def test_importing_and_asking_for_help_is_cheap(code: str) -> None:
    heavy = (
        "import sys; print('HEAVY', sorted({'torch', 'accelerate', 'transformers', 'deepspeed'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", f"{code}; {heavy}"], capture_output=True, text=True, check=True)
    assert "HEAVY []" in done.stdout


def test_every_public_name_is_there() -> None:
    import accel_shard

    for name in accel_shard.__all__:
        assert name == "PRESETS" or getattr(accel_shard, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Shardingpolicy'"):
        _ = accel_shard.Shardingpolicy


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(ROOT)))
def test_modules_and_functions_stay_small(module: Path) -> None:
    text = module.read_text()
    assert len(text.splitlines()) <= 400
    assert module.stem not in ("utils", "common", "helpers", "types", "misc")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 60 + len((ast.get_docstring(node) or "").splitlines()), node.name


def test_recipe_stays_readable() -> None:
    assert len((ROOT / "recipes" / "finetune.py").read_text().splitlines()) <= 265  # "about 250"


def test_readme_matrix_is_generated() -> None:
    readme = (ROOT / "README.md").read_text()
    written = readme.split("<!-- matrix: accel-shard explain --matrix -->\n")[1].split("<!-- end of matrix -->")[0]
    assert written == matrix(), "run: accel-shard explain --matrix"


def test_readme_names_every_file() -> None:
    readme = (ROOT / "README.md").read_text()
    tree = readme.split("## Files")[1].split("## Limits")[0]
    for file in (*(ROOT / "accel_shard").glob("*.py"), *(ROOT / "recipes").glob("*.py")):
        if file.name != "__init__.py":
            assert re.search(rf"^  {re.escape(file.name)} ", tree, re.M), file.name
    named = re.findall(r"^  (\w+\.py) ", tree, re.M)
    assert all((ROOT / "accel_shard" / n).exists() or (ROOT / "recipes" / n).exists() for n in named)


def test_readme_has_two_commands_near_its_top() -> None:
    readme = (ROOT / "README.md").read_text().split("## What it looks like")[0]
    commands = re.findall(r"```bash\n(.+?)\n```", readme, re.S)
    assert len(commands) == 2
    assert all("\n" not in c and c.startswith("pip install -c constraints.txt") for c in commands)
    assert commands[1].endswith("python -m pytest")


def test_a_wheel_brings_the_configs_and_finds_them(tmp_path: Path) -> None:
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(build, check=True, capture_output=True, text=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "accel_shard/accelerate_configs/fsdp2.yaml" in names
    assert "accel_shard/py.typed" in names
    assert not any(n.startswith(("tests", "recipes")) for n in names)
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = "from accel_shard.launch_config import config_folder; print(config_folder())"
    environ = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(tmp_path / "site" / "accel_shard" / "accelerate_configs")
