"""Every Python block of the README and of the pages in docs/ runs, in order, in one namespace per page."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


Block = tuple[int, str, str | None]


def blocks(page: Path) -> list[Block]:
    """(line number, code, what the page says it prints) of each Python block of a page."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    found = re.finditer(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", text, re.M | re.S)
    return [(text[: m.start()].count("\n") + 1, m.group(1), m.group(2)) for m in found]


def shape(output: str) -> str:
    """Output without its digits: the last of them differ from machine to machine."""
    return re.sub(r"[-+]?\d[\d.,]*(e[-+]\d+)?", "#", output)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_blocks_run_and_print_what_the_page_says(
    page: Path, real_inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "real_inputs").symlink_to(real_inputs, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": page.stem}
    capsys.readouterr()
    for line, code, says in blocks(page):
        exec(compile("\n" * line + code, os.fspath(page), "exec"), namespace)
        printed = capsys.readouterr().out
        assert says is None or shape(printed) == shape(says), f"{page.name}, line {line}, prints\n{printed}"
