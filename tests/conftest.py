"""What every test may ask for, and what every test runs under."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: tests are small, and run beside each other

import pytest
import shapes
from hypothesis import settings

shapes.install()  # before anything imports xtf

settings.register_profile("xtf", deadline=None)  # machines with two busy cores say nothing about one example's time
settings.load_profile("xtf")


@pytest.fixture(scope="session")
def real_inputs(pytestconfig: pytest.Config) -> Path:
    """The folder of real weights, tokenizers and texts that ``tests/real_inputs.py`` fetches."""
    folder = Path(os.environ.get("REAL_INPUTS", pytestconfig.rootpath / "real_inputs"))
    if not (folder / "text" / "c4.jsonl").exists():
        pytest.fail(
            f"no real inputs in {folder}: run `python tests/real_inputs.py {folder}`, or set REAL_INPUTS to where they are", pytrace=False
        )
    return folder
