"""Random damage to all that xtf reads: every case is a clear error or a correct run.

Never an exception of another kind, a hang, or altered weights taken for those that were saved. A case that fails names its seed;
``PYTHONPATH=.:tests python -m tests.fuzz.test_fuzz training 17`` runs that one again.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.fuzz.subjects import SUBJECTS, Inputs, prepare
from xtf.checkpoint import shard_file

QUICK, ALL = 84, 400
"""Cases of each of the six subjects: 504 in CI, the first of them; 2,400 with the full tier."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return prepare(tmp_path_factory.mktemp("sound"))


def one(subject: str, seed: int, inputs: Inputs, work: Path) -> tuple[str, str]:
    """Run one case, the same at every call."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    return SUBJECTS[subject](Random(f"{subject}/{seed}"), inputs, work)


def many(subject: str, seeds: range, inputs: Inputs, work: Path) -> tuple[int, int]:
    """Run cases; how many were refused, of how many."""
    failed, refused = list[str](), 0
    for seed in seeds:
        try:
            _, told = one(subject, seed, inputs, work / "case")
            refused += told.replace("ran", "").strip(" |") != ""
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            failed.append(f"{subject} {seed}: {type(error).__name__}: {str(error)[:500]}")
    assert not failed, "\n".join(failed)
    return refused, len(seeds)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_damage_is_refused_or_does_not_matter(subject: str, inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused, count = many(subject, range(QUICK), inputs, tmp_path)
    assert refused > count // 3  # that it is damage


@pytest.mark.full
@pytest.mark.parametrize("subject", SUBJECTS)
def test_much_damage_is_refused_or_does_not_matter(subject: str, inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    many(subject, range(QUICK, ALL), inputs, tmp_path)


def test_weights_that_nobody_verified_would_be_found(inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the search can fail: a reader without checksums of data takes altered weights."""

    def unverified(self: Any, at: int) -> memoryview:
        begin = self.begin + at * shard_file.SEGMENT
        return memoryview(os.pread(self.fd, min(shard_file.SEGMENT, self.end - begin), begin))

    monkeypatch.setattr(shard_file._Segments, "_segment", unverified)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(AssertionError, match=r"training \d+: Finding: the state is another than was saved"):
        many("training", range(QUICK), inputs, tmp_path)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(*one(sys.argv[1], int(sys.argv[2]), prepare(Path(folder) / "sound"), Path(folder) / "case"), sep="\n")
