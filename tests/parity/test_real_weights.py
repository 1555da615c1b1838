"""SmolLM2-135M's real weights on real text, beside transformers in float32."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import xtf
from xtf import tree
from xtf.checkpoint_map import Named


def test_logits_loss_and_gradients(real_inputs: Path) -> None:
    folder = real_inputs / "smollm2-135m"
    texts = [json.loads(line)["content"] for line in (real_inputs / "text" / "wiki.jsonl").read_text().splitlines()[:2]]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer(text[:1000])["input_ids"][:64] for text in texts])
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = theirs(ids, labels=ids)
    expected.loss.backward()

    model = xtf.models.from_hf(folder)
    params = xtf.load_params(model, folder)
    logits = model.logits(params, ids)
    assert (logits - expected.logits.detach()).abs().max() <= 1e-5 * expected.logits.detach().abs().max()

    batch = {"input_ids": ids, "labels": ids}
    grads, loss = torch.func.grad_and_value(model.loss)(params, batch)
    assert abs(float(loss) - float(expected.loss.detach())) <= 1e-6 * float(expected.loss.detach())
    named = dict(theirs.named_parameters())
    for path, grad in tree.items(grads).items():
        source = model.sources[path]
        assert isinstance(source, Named)
        want = named[source.name].grad
        assert want is not None
        assert (grad - want).abs().max() <= 1e-4 * want.abs().max(), path
