"""Every command of the README and of the pages in docs/ that is marked ``<!-- ci: run -->`` runs, in order, in one folder per page.

So that this takes seconds, the model is the real one's first layers, files are the real ones' beginnings, batches are small and steps
few; whatever else a command says is done as it says.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import xtf
from xtf.checkpoint import read_config

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SMALLER = {
    "--steps": "2",
    "--seq": "64",
    "--tokens-per-step": "256",
    "--held-out": "2",
    "--evaluate-every": "1",
    "--save-every": "1",
    "--tokens": "4",
}


def parts(page: Path) -> list[tuple[str, str]]:
    """(name of a file, or "" for commands; text) of each marked block, in order."""
    found = re.finditer(r"^<!-- (?:ci: run|file: (\S+)) -->\n```\w+\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    return [(match.group(1) or "", match.group(2)) for match in found]


def smaller(command: str) -> str:
    for flag, value in SMALLER.items():
        command = re.sub(rf"{flag} \d+", f"{flag} {value}", command)
    command = re.sub(r"steps=\d+", "steps=2", command).replace("--model smollm2-135m ", "--model real_inputs/smollm2-135m ")
    if "my_recipe" in command or "--resume" in command:
        return command
    more = "--backend eager" if "--held-out" in command else "--backend eager --held-out 2"
    return re.sub(r"(xtf(?:\.cli)? train )", rf"\1{more} ", command)


@pytest.fixture(scope="module")
def inputs(real_inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real inputs: the first two layers of the model, the first rows of the files."""
    folder = tmp_path_factory.mktemp("real_inputs")
    for name in ("chat", "text"):
        (folder / name).mkdir()
        for file in (real_inputs / name).glob("*.jsonl"):
            rows = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n")[:12]]
            rows = [row | {"content": row["content"][:1500]} if "content" in row else row for row in rows]
            (folder / name / file.name).write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    calls = real_inputs / "chat" / "tool_calls.json"
    (folder / "chat" / calls.name).write_text(json.dumps(json.loads(calls.read_text(encoding="utf-8"))[:12]), encoding="utf-8")
    small, whole = folder / "smollm2-135m", real_inputs / "smollm2-135m"
    config = read_config(whole)
    rest = [rf"model\.layers\.{i}\..*" for i in range(2, config["num_hidden_layers"])]
    model = xtf.models.from_hf(config | {"num_hidden_layers": 2})
    xtf.save_params(model, xtf.load_params(model, whole, ignore=rest), small, tokenizer_from=whole)
    return folder


@pytest.mark.parametrize("page", [page for page in PAGES if parts(page)], ids=lambda page: page.name)
def test_commands_run(page: Path, inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "real_inputs").symlink_to(inputs, target_is_directory=True)
    (tmp_path / "bin").mkdir()
    for name, module in (("xtf", "xtf.cli"), ("torchrun", "torch.distributed.run")):
        script = tmp_path / "bin" / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        script.chmod(0o755)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    env = os.environ | {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    env |= {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for name, block in parts(page):
        if name:
            (tmp_path / name).write_text(block)
            continue
        for command in block.replace("\\\n", " ").splitlines():
            done = subprocess.run(["bash", "-c", smaller(command)], cwd=tmp_path, env=env, capture_output=True, text=True)
            assert done.returncode == 0, f"{page.name}: {smaller(command)}\n{done.stdout}\n{done.stderr}"
