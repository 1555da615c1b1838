"""The process of one contender, as the one that asks sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any, cast

from xtf.bench.contenders import Entry
from xtf.bench.workload import Workload


class Worker:
    """The process of one contender."""

    def __init__(self, entry: Entry, workload: Workload) -> None:
        self.entry = entry
        environment = os.environ | {"OMP_NUM_THREADS": str(workload.threads), "TOKENIZERS_PARALLELISM": "false"}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "xtf.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            text=True,
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def ask(self, do: str, **details: Any) -> dict[str, Any]:
        """Ask, and wait for the answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **details}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip().splitlines()[-8:]
            code = self._process.wait()
            raise ValueError("\n  ".join([f"{self.entry.name} ended with exit code {code} (asked for: {do})", *said]))
        answer = cast("dict[str, Any]", json.loads(line))
        if "error" in answer:
            raise ValueError("\n  ".join([f"{self.entry.name} failed: {answer['error']}", *answer["traceback"]]))
        return answer
