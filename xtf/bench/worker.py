"""The process of one contender: reads what to do as JSON lines, answers as JSON lines.

    python -m xtf.bench.worker

What libraries print goes to standard error; only answers go to standard output.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any

import torch

from xtf.allocator import keep_freed_memory
from xtf.bench.clock import peak_bytes, reset_peak
from xtf.bench.contenders import Contender, Entry, open_contender
from xtf.bench.machine import measure_machine
from xtf.bench.workload import Workload


def main() -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    server = _Worker()
    for line in sys.stdin:
        try:
            answer = server.answer(json.loads(line))
        except Exception as error:  # whatever a contender raises is told, and ends it
            last = traceback.format_exc().strip().splitlines()
            answer = {"error": f"{type(error).__name__}: {error}", "traceback": last[-12:]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class _Worker:
    def __init__(self) -> None:
        self.contender: Contender | None = None
        self.device = "cpu"

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        do = asked["do"]
        if do == "machine":
            torch.set_num_threads(asked["threads"])
            return measure_machine(asked["device"], asked["dtype"])._asdict()
        if do == "open":
            workload = Workload.of(asked["workload"])
            torch.set_num_threads(workload.threads)
            self.device = workload.device
            if Entry(*asked["entry"]).library == "xtf":
                keep_freed_memory()  # as xtf train does
            self.contender = open_contender(workload, Entry(*asked["entry"]))
            return {"bytes": peak_bytes(self.device)}
        assert self.contender is not None
        if do == "first":
            began = time.perf_counter()
            taken = self.contender()
            return taken._asdict() | {"seconds": time.perf_counter() - began}
        if do == "warm":
            for _ in range(asked["steps"]):
                self.contender()
            reset_peak(self.device)
            return {}
        if do == "step":
            return self.contender()._asdict()
        assert do == "peak", do
        return {"bytes": peak_bytes(self.device)}


if __name__ == "__main__":
    main()
