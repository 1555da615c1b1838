"""transformers as a contender: its model in its fastest form, torch's fused AdamW.

What it can be told: grouped products for experts, torch's attention, and packed documents by ``position_ids`` that begin anew at each
(its mask is then block-diagonal). ``num_items_in_batch`` makes its loss the mean over all targets, first tokens of documents left out.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import torch

from xtf.bench.clock import seconds_now
from xtf.bench.contenders import Entry, Taken
from xtf.bench.own import LEARNING_RATE
from xtf.bench.workload import Workload


def open_contender(workload: Workload, entry: Entry) -> HuggingFace:
    """See `xtf.bench.contenders.open_contender`."""
    return HuggingFace(workload, entry)


class HuggingFace:
    """A model of transformers, and its optimizer."""

    def __init__(self, workload: Workload, entry: Entry) -> None:
        transformers = import_module("transformers")
        self.workload = workload
        dtype = getattr(torch, workload.dtype)
        options: dict[str, Any] = {"attn_implementation": "sdpa", "dtype": dtype}
        if any("expert" in name for name in workload.config):
            options["experts_implementation"] = "grouped_mm"
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(workload.weights, **options).to(workload.device).train()
        self.forward: Any = torch.compile(self.model) if entry.backend == "inductor" else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
        batch = workload.batch()
        labels = batch["labels"].clone()
        starts = torch.tensor([0, *workload.lengths[:-1]]).cumsum(0)
        labels[0, starts] = -100
        positions = torch.cat([torch.arange(n) for n in workload.lengths])[None].to(workload.device)
        self.given: dict[str, Any] = {"input_ids": batch["input_ids"], "labels": labels, "use_cache": False}
        if len(workload.lengths) > 1:
            self.given["position_ids"] = positions
        if "output_router_logits" in inspect.signature(self.model.forward).parameters:
            self.given["output_router_logits"] = False

    def __call__(self) -> Taken:
        device = self.workload.device
        began = seconds_now(device)
        loss = self.forward(**self.given).loss
        loss.backward()
        middle = seconds_now(device)
        self.optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        self.optimizer.zero_grad(set_to_none=True)
        ended = seconds_now(device)
        return Taken(ended - began, ended - middle, float(loss.detach()))
