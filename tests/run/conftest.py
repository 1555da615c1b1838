"""What tests of commands share."""

from __future__ import annotations

from pathlib import Path

import pytest

import xtf
from xtf.data.text import TOKENIZER_FILE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with the demo's tokenizer."""
    path = tmp_path_factory.mktemp("checkpoints") / "model"
    model = xtf.models.preset("tiny-moe")
    xtf.save_params(model, model.init(1), path, tokenizer_from=TOKENIZER_FILE.parent)
    return path
