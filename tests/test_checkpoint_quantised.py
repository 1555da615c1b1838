"""FP8 in blocks and MXFP4, as they are published: any block of any size, against whole-tensor code and transformers'."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from xtf import models, optim, tree
from xtf.checkpoint import CheckpointError, load, load_leaves, load_params, reading, save_params
from xtf.checkpoint.folder import Resolved
from xtf.checkpoint.quantised import MXFP4, BlockFP8
from xtf.checkpoint_map import Interleaved, Named, Source, Transposed
from xtf.mesh import Mesh, simulate
from xtf.spec import Init, ParamSpec
from xtf.step import train_step
from xtf.transforms import shard

FP8 = torch.float8_e4m3fn


class InMemory:
    """A tensor as a checkpoint gives it, that counts what is read of it."""

    def __init__(self, tensor: Tensor, dtype: str) -> None:
        self.tensor, self.shape, self.dtype, self.file, self.read_elements = tensor, tuple(tensor.shape), dtype, Path("here"), 0

    def read(self, ranges: Any) -> Tensor:
        found = self.tensor[tuple(slice(*r) for r in ranges)]
        assert found.shape == tuple(b - a for a, b in ranges)
        self.read_elements += found.numel()
        return found


@st.composite
def ranges(draw: st.DrawFn, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    found = [sorted((draw(st.integers(0, n - 1)), draw(st.integers(1, n)))) for n in shape]
    return [(a, max(a + 1, b)) for a, b in found]


def fp8_of(shape: tuple[int, ...], block: tuple[int, int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales, and the weights that they stand for, element by element."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randn(shape, generator=generator).mul(50).to(FP8)
    scales = torch.rand(*shape[:-2], *(math.ceil(n / b) for n, b in zip(shape[-2:], block, strict=True)), generator=generator) + 0.5
    whole = scales.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)[..., : shape[-2], : shape[-1]]
    return codes, scales, codes.float() * whole


@settings(max_examples=150, deadline=None)
@given(st.data(), st.lists(st.integers(1, 11), min_size=2, max_size=3), st.tuples(st.integers(1, 5), st.integers(1, 5)))
def test_any_range_of_fp8(data: st.DataObject, shape: list[int], block: tuple[int, int]) -> None:
    codes, scales, want = fp8_of(tuple(shape), block)
    weight, scale = InMemory(codes, "F8_E4M3"), InMemory(scales, "F32")
    wanted = data.draw(ranges(tuple(shape)))
    got = BlockFP8(weight, scale, block).read(wanted)
    assert torch.equal(got, want[tuple(slice(*r) for r in wanted)])
    assert weight.read_elements == got.numel() and scale.read_elements <= got.numel()


def mxfp4_of(experts: int, out: int, groups: int, seed: int = 0, low: int = 0, high: int = 255) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (experts, out, groups, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(low, high, (experts, out, groups), generator=generator, dtype=torch.uint8)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 5), st.integers(1, 3))
def test_any_range_of_mxfp4_is_what_transformers_gives(data: st.DataObject, experts: int, out: int, groups: int) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = mxfp4_of(experts, out, groups)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).float()
    codes, scale = InMemory(blocks, "U8"), InMemory(scales, "U8")
    tensor = MXFP4(codes, scale)
    assert tensor.shape == tuple(theirs.shape) == (experts, 32 * groups, out)
    wanted = data.draw(ranges(tensor.shape))
    got = tensor.read(wanted)
    assert torch.equal(got, theirs[tuple(slice(*r) for r in wanted)])
    (e0, e1), (h0, h1), (f0, f1) = wanted
    assert scale.read_elements == (e1 - e0) * (f1 - f0) * (math.ceil(h1 / 32) - h0 // 32) == codes.read_elements // 16


def test_mxfp4_by_hand() -> None:
    blocks = torch.zeros(1, 1, 1, 16, dtype=torch.uint8)
    blocks[..., :4] = torch.tensor([0x21, 0x73, 0xA9, 0xFC], dtype=torch.uint8)
    got = MXFP4(InMemory(blocks, "U8"), InMemory(torch.full((1, 1, 1), 128, dtype=torch.uint8), "U8")).read([(0, 1), (0, 10), (0, 1)])
    assert got.flatten().tolist() == [1, 2, 3, 12, -1, -2, -4, -12, 0, 0]


# Whole checkpoints

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 48, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 24, "vocab_size": 29, "moe_intermediate_size": 20, "num_experts": 3, "num_experts_per_tok": 2,
}  # fmt: skip
DENSE = {"model_type": "llama", **{k: v for k, v in CONFIG.items() if k not in ("model_type",) and "expert" not in k and "moe" not in k}}

DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 48, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 2, "q_lora_rank": 20, "kv_lora_rank": 9, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7,
    "vocab_size": 29, "moe_intermediate_size": 20, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
}  # fmt: skip


def fp8_checkpoint(
    folder: Path, config: Mapping[str, Any], block: tuple[int, int], stated: Any, scales: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """A checkpoint whose projections are in FP8 and whose norms, router, embedding and head are not. Returns the plain weights."""
    model = models.from_hf(config)
    save_params(model, model.init(0), folder)
    stored, plain = dict[str, Tensor](), load_file(folder / "model.safetensors")
    for i, (name, tensor) in enumerate(plain.items()):
        if "_proj" not in name:
            stored[name] = tensor if "correction" in name else tensor.bfloat16()
            plain[name] = stored[name].float()
            continue
        codes, scale, _ = fp8_of(tuple(tensor.shape), block, seed=i)
        stored[name], stored[f"{name}_scale_inv"] = codes, scale.to(scales)
        whole = scale.to(scales).float().repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
        plain[name] = codes.float() * whole[: tensor.shape[0], : tensor.shape[1]]
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(config) | ({"quantization_config": stated} if stated is not None else {})))
    return plain


def plain_params(tmp_path: Path, model: Any, plain: Mapping[str, Tensor]) -> dict[str, Tensor]:
    folder = tmp_path / "plain"
    folder.mkdir()
    save_file({name: t.contiguous() for name, t in plain.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return tree.items(load_params(model, folder))


DEEPSEEK = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [16, 8]}


@pytest.mark.parametrize("config", [CONFIG, DENSE, DEEPSEEK_V3], ids=["qwen3_moe", "llama", "deepseek_v3"])
@pytest.mark.parametrize(
    ("block", "stated", "scales"),
    [
        ((16, 8), DEEPSEEK, torch.float32),
        ((16, 8), DEEPSEEK, torch.bfloat16),
        ((128, 128), {"quant_method": "fp8"}, torch.float32),
        ((128, 128), None, torch.float32),
    ],
)
def test_an_fp8_checkpoint(tmp_path: Path, config: dict[str, Any], block: tuple[int, int], stated: Any, scales: torch.dtype) -> None:
    plain = fp8_checkpoint(tmp_path / "ckpt", config, block, stated, scales)
    model = models.from_hf(tmp_path / "ckpt")
    assert "quantization_config" not in model.hf_config
    got, want = tree.items(load_params(model, tmp_path / "ckpt")), plain_params(tmp_path, model, plain)
    assert got.keys() == want.keys() and all(torch.equal(got[path], want[path]) for path in want)
    rounded = tree.items(load_params(models.from_hf(tmp_path / "ckpt", dtype=torch.bfloat16), tmp_path / "ckpt"))
    assert all(torch.equal(rounded[path], want[path].to(rounded[path].dtype)) for path in want)
    assert {leaf.dtype for path, leaf in rounded.items() if "correction" not in path} == {torch.bfloat16}
    if config is CONFIG and block == (16, 8):  # ranks whose parts do not lie along blocks

        def run(ranks: Mesh) -> bool:
            step = shard(ranks["data"])(train_step(model, optim.sgd(lr=0.1)))
            whole = tree.items(step.full(load(step, tmp_path / "ckpt").params))
            return all(torch.equal(whole[path], want[path]) for path in want)

        assert all(simulate(run, data=5))


def test_fused_experts_in_fp8(tmp_path: Path) -> None:
    """As transformers saves its FP8 experts: a scale per block of each expert."""
    spec = ParamSpec((3, 10, 7), torch.float32, (None,) * 3, Init.normal(1.0))
    codes, scales, want = fp8_of((3, 10, 7), (4, 3))
    save_file({"experts.gate_up_proj": codes, "experts.gate_up_proj_scale_inv": scales}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 3]}}))
    got = load_params(Resolved({"w": spec}, {"w": Named("experts.gate_up_proj")}, {}), tmp_path)
    assert torch.equal(got["w"], want)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t, s: t.pop(s), r"float8_e4m3fn without scales: expected .*q_proj\.weight_scale_inv \(3, 6\) in F32"),
        (lambda t, s: t.update({s: torch.zeros(3, 5)}), r"its scales are \(3, 5\) in F32: expected .* \(3, 6\)"),
        (lambda t, s: t.update({s: torch.zeros(3, 6, dtype=torch.uint8)}), r"its scales are \(3, 6\) in U8"),
    ],
)
def test_scales_that_do_not_fit_are_named(tmp_path: Path, change: Any, says: str) -> None:
    fp8_checkpoint(tmp_path, CONFIG, (16, 8), DEEPSEEK)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    change(tensors, f"{name}_scale_inv")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=says) as caught:
        load_params(models.from_hf(tmp_path), tmp_path)
    assert caught.value.misshapen == (name,) and caught.value.missing == caught.value.extra == ()


def test_a_model_that_is_itself_in_float8_is_read_as_it_stands(tmp_path: Path) -> None:
    spec = ParamSpec((4, 3), FP8, (None, None), Init.constant(0.0))
    model, value = Resolved({"w": spec}, {"w": Named("w")}, {}), torch.randn(4, 3).to(FP8)
    save_params(model, {"w": value}, tmp_path / "ckpt")
    assert torch.equal(load_params(model, tmp_path / "ckpt")["w"].float(), value.float())


# GPT-OSS

GATE_UP: Source = Interleaved(Transposed(Named("experts.gate_up_proj")), 1)
DOWN: Source = Transposed(Named("experts.down_proj"))


def gpt_oss(experts: int = 3, inner: int = 32, hidden: int = 64, dtype: torch.dtype = torch.float32) -> Resolved:
    """The experts of a layer of GPT-OSS, in our leaves."""
    shapes = {"gate_up": (experts, 2 * inner, hidden), "gate_up_bias": (experts, 2 * inner), "down": (experts, hidden, inner)}
    specs = {name: ParamSpec(shape, dtype, (None,) * len(shape), Init.normal(1.0)) for name, shape in shapes.items()}
    sources: dict[str, Source] = {
        "gate_up": GATE_UP,
        "gate_up_bias": Interleaved(Named("experts.gate_up_proj_bias"), 1),
        "down": DOWN,
    }
    return Resolved(specs, sources, {})


def gpt_oss_checkpoint(folder: Path) -> dict[str, Tensor]:
    """It in MXFP4, and what transformers makes of it."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored = dict[str, Tensor]()
    stored["experts.gate_up_proj_blocks"], stored["experts.gate_up_proj_scales"] = mxfp4_of(3, 64, 2)
    stored["experts.down_proj_blocks"], stored["experts.down_proj_scales"] = mxfp4_of(3, 64, 1, seed=1)
    stored["experts.gate_up_proj_bias"] = torch.randn(3, 64).bfloat16()
    folder.mkdir()
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["x"]}}))
    found = {"experts.gate_up_proj_bias": stored["experts.gate_up_proj_bias"]}
    for name in ("experts.gate_up_proj", "experts.down_proj"):
        found[name] = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=torch.bfloat16)
    return found


def halves(stored: Tensor, dim: int) -> Tensor:
    """Every second along a dim, then the others: gate, then up."""
    places = torch.arange(stored.shape[dim])
    return torch.cat([stored.index_select(dim, places[::2]), stored.index_select(dim, places[1::2])], dim)


def test_the_experts_of_gpt_oss_in_mxfp4_and_in_bfloat16(tmp_path: Path) -> None:
    theirs = gpt_oss_checkpoint(tmp_path / "packed")
    want = {
        "gate_up": halves(theirs["experts.gate_up_proj"], 2).mT,
        "gate_up_bias": halves(theirs["experts.gate_up_proj_bias"], 1),
        "down": theirs["experts.down_proj"].mT,
    }
    for dtype in (torch.bfloat16, torch.float32):
        got = load_params(gpt_oss(dtype=dtype), tmp_path / "packed")
        assert all(torch.equal(got[name], want[name].to(dtype)) for name in want)
    plain = gpt_oss(dtype=torch.bfloat16)
    save_params(plain, load_params(plain, tmp_path / "packed"), tmp_path / "plain")
    written = load_file(tmp_path / "plain" / "model.safetensors")
    assert written.keys() == theirs.keys() and all(torch.equal(written[name], theirs[name]) for name in theirs)
    assert all(torch.equal(load_params(plain, tmp_path / "plain")[name], want[name]) for name in want)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_ranks_read_any_part_of_mxfp4_experts(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("gpt_oss") / "packed"
    gpt_oss_checkpoint(folder)
    model = gpt_oss()
    whole = load_params(model, folder)
    wanted = {name: data.draw(ranges(spec.shape)) for name, spec in model.specs.items()}
    got = load_leaves(model, folder, wanted.__getitem__)
    assert all(torch.equal(got[name], whole[name][tuple(slice(*r) for r in wanted[name])]) for name in wanted)


@pytest.mark.parametrize("piece", [1, 100, 3000, 10_000])
def test_leaves_are_put_together_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    gpt_oss_checkpoint(tmp_path / "packed")
    whole = load_params(gpt_oss(), tmp_path / "packed")
    sizes, plain_fill = list[int](), reading.fill
    monkeypatch.setattr(reading, "_PIECE", piece)
    monkeypatch.setattr(reading, "fill", lambda *args: (sizes.append(args[4].numel()), plain_fill(*args)))
    again = load_params(gpt_oss(), tmp_path / "packed")
    assert all(torch.equal(again[name], whole[name]) for name in whole)
    assert max(sizes) <= max(piece, 64 * 64) and sum(sizes) == sum(leaf.numel() for leaf in whole.values())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("experts.down_proj_scales"), r"down_proj is MXFP4 without scales: expected .*_scales \(3, 64, 1\) in U8"),
        (lambda t: t.update({"experts.down_proj_scales": torch.zeros(3, 64, 2, dtype=torch.uint8)}), r"its scales are \(3, 64, 2\) in U8"),
        (lambda t: t.update({"experts.down_proj_blocks": torch.zeros(3, 64, 1, 8, dtype=torch.uint8)}), "the last dim of MXFP4 is 16"),
        (lambda t: t.update({"experts.down_proj_blocks": t["experts.gate_up_proj_blocks"].clone()}), r"its scales are \(3, 64, 1\)"),
    ],
)
def test_mxfp4_that_does_not_fit_is_named(tmp_path: Path, change: Any, says: str) -> None:
    gpt_oss_checkpoint(tmp_path / "packed")
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "packed" / "model.safetensors")
    with pytest.raises(CheckpointError, match=says) as caught:
        load_params(gpt_oss(), tmp_path / "packed")
    assert caught.value.misshapen == ("experts.down_proj",)


# config.json


@pytest.mark.parametrize("config", [CONFIG, DENSE], ids=["qwen3_moe", "llama"])
@pytest.mark.parametrize(
    ("stated", "says"),
    [
        ({"quant_method": "awq"}, "quantised by 'awq'; plain weights are read, block-wise 'fp8'"),
        ({"quant_method": "compressed-tensors"}, "quantised by 'compressed-tensors'"),
        ({}, "quantised by None"),
        ({"quant_method": "fp8", "weight_block_size": None}, "weight_block_size=None; expected two sizes"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, r"weight_block_size=\[128, 0\]"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "activation_scheme='static'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2'"),
        ("fp8", "'fp8' is a str"),
    ],
)
def test_other_quantisations_are_refused_by_name(config: dict[str, Any], stated: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        models.from_hf(config | {"quantization_config": stated})


@pytest.mark.parametrize("config", [CONFIG, DENSE, DEEPSEEK_V3], ids=["qwen3_moe", "llama", "deepseek_v3"])
@pytest.mark.parametrize("stated", [DEEPSEEK, DEEPSEEK | {"scale_fmt": "ue8m0"}, {"quant_method": "mxfp4"}, None])
def test_published_quantisations_are_accepted(config: dict[str, Any], stated: Any) -> None:
    assert models.from_hf(config | {"quantization_config": stated}).hf_config == models.from_hf(config).hf_config
