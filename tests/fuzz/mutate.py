"""Random damage: to bytes, to JSON values, to safetensors headers, and to the files of a folder. Each says what it did."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

DEEP = "[" * 100_000 + "]" * 100_000

VALUES: Sequence[Any] = (
    None, True, False, 0, 1, -1, 3, 7, 2**31, 2**63, 2**200, -(2**70), 0.5, -0.5, 1e308, 1e-320, float("nan"), float("inf"), "", "x", "7",
    "\x00", "..", "/", "a/../../b", "\ud800", "null", "float32", "F32", [], [1],
    [1, 2], [0, -1], [2**62, 2**62], [None], [[]], {}, {"a": 1},
    {"rope_type": "yarn"}, ["full_attention"],
)  # fmt: skip
"""What a JSON value becomes."""


def damage_bytes(rng: Random, data: bytes) -> tuple[str, bytes]:
    """A file's bytes after some accident."""
    at, other = rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)
    low, high = min(at, other), max(at, other)
    match rng.choice(("cut", "flip", "set", "insert", "delete", "double", "nul", "utf8", "empty", "deep", "digits", "swap", "noise")):
        case "cut":
            return f"cut to {at} bytes", data[:at]
        case "flip" if at < len(data):
            return f"a bit of byte {at} flipped", data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        case "set" if at < len(data):
            return f"byte {at} set", data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        case "insert":
            return f"bytes put in at {at}", data[:at] + rng.randbytes(rng.randrange(1, 40)) + data[at:]
        case "delete":
            return f"bytes {low} to {high} taken out", data[:low] + data[high:]
        case "double":
            return f"bytes {low} to {high} doubled", data[:high] + data[low:high] + data[high:]
        case "nul":
            return f"NUL at {at}", data[:at] + b"\x00" * rng.randrange(1, 20) + data[at:]
        case "utf8":
            return f"no UTF-8 at {at}", data[:at] + b"\xff\xfe\x80" + data[at:]
        case "empty":
            return "emptied", b""
        case "deep":
            return "deep brackets", DEEP.encode()
        case "digits":
            return f"digits at {at}", data[:at] + b"9" * 5000 + data[at:]
        case "swap":
            return f"two halves exchanged at {at}", data[at:] + data[:at]
        case _:
            return "noise", rng.randbytes(rng.randrange(1, 400))


def damage_json(rng: Random, value: Any) -> tuple[str, Any]:
    """A JSON value of which one part, anywhere, is another, gone, renamed, or exchanged with a neighbour."""
    value, where = json.loads(json.dumps(value)), "it"
    inner: Any = value
    while True:
        keys: list[Any] = list(inner) if isinstance(inner, dict) else list(range(len(inner))) if isinstance(inner, list) else []
        if not keys:
            return f"{where} replaced", rng.choice(VALUES)
        key = rng.choice(keys)
        where = f"{where}[{key!r}]"
        if not isinstance(inner[key], (dict, list)) or not inner[key] or rng.random() < 0.25:
            break
        inner = inner[key]
    match rng.choice(("value", "value", "value", "delete", "rename", "swap", "text", "add")):
        case "delete":
            del inner[key]
            return f"{where} removed", value
        case "rename" if isinstance(inner, dict):
            inner[f"{key}{rng.choice(('_', ' ', 'x'))}"] = inner.pop(key)
            return f"{where} renamed", value
        case "swap":
            other = rng.choice(keys)
            inner[key], inner[other] = inner[other], inner[key]
            return f"{where} exchanged with {other!r}", value
        case "text":
            inner[key] = str(inner[key])
            return f"{where} as text", value
        case "add":
            if isinstance(inner, dict):
                inner["added"] = rng.choice(VALUES)
            else:
                inner.append(rng.choice([*VALUES, inner[0]]))
            return f"something added beside {where}", value
        case _:
            inner[key] = rng.choice(VALUES)
            return f"{where} = {inner[key]!r:.40}", value


def damage_json_text(rng: Random, text: str) -> tuple[str, bytes]:
    """A JSON text that holds another value, or one key twice."""
    said, value = damage_json(rng, json.loads(text))
    written = json.dumps(value)
    if rng.random() < 0.1 and isinstance(value, dict) and value:
        key, other = rng.choice(list(value)), rng.choice(VALUES)
        written = f"{written[:-1]}, {json.dumps(key)}: {json.dumps(other)}}}"
        said += f", and {key!r} twice"
    return said, written.encode()


def damage_header(rng: Random, data: bytes) -> tuple[str, bytes]:
    """A safetensors file with another header."""
    size = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + size]), data[8 + size :]
    if rng.random() < 0.3:
        length = rng.choice((0, 1, 7, size - 1, size + 1, size + 8, len(data), 2**31, 2**40, 2**63, 2**64 - 1))
        return f"header of {length} bytes", length.to_bytes(8, "little") + data[8:]
    said, value = damage_json(rng, header)
    text = json.dumps(value).encode()
    return f"header: {said}", len(text).to_bytes(8, "little") + text + rest


def damage_file(rng: Random, file: Path) -> str:
    """One file with other contents."""
    data = file.read_bytes()
    kinds: list[Callable[[], tuple[str, bytes]]] = [lambda: damage_bytes(rng, data)]
    if file.suffix == ".json":
        kinds += [lambda: damage_json_text(rng, data.decode())] * 3
    if file.suffix == ".safetensors":
        kinds += [lambda: damage_header(rng, data)] * 2
    said, found = rng.choice(kinds)()
    file.write_bytes(found)
    return f"{file.name}: {said}"


def damage_folder(rng: Random, folder: Path, other: Path | None = None) -> str:
    """One change to the files of a folder. ``other`` is a folder like it, of which a file may get in."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    file, second = rng.choice(files), rng.choice(files)
    kinds = ["contents"] * 8 + ["gone", "copy", "rename", "swap", "link", "folder", "other"]
    if os.geteuid():
        kinds.append("forbidden")
    match rng.choice(kinds):
        case "gone":
            file.unlink()
            return f"{file.name} removed"
        case "copy":
            name = rng.choice(("model.safetensors", "rank-00009.safetensors", "state.json", "x.bin"))
            (folder / name).write_bytes(file.read_bytes())
            return f"{file.name} copied to {name}"
        case "rename":
            file.rename(folder / f"{file.stem}x{file.suffix}")
            return f"{file.name} renamed"
        case "swap":
            a, b = file.read_bytes(), second.read_bytes()
            file.write_bytes(b)
            second.write_bytes(a)
            return f"{file.name} and {second.name} exchanged"
        case "link":
            file.unlink()
            file.symlink_to(rng.choice(("nowhere", file.name, "/dev/null", "..")))
            return f"{file.name} a link to {os.readlink(file)}"
        case "folder":
            file.unlink()
            file.mkdir()
            return f"{file.name} a folder"
        case "forbidden":
            file.chmod(0)
            return f"{file.name} not to be read"
        case "other" if other is not None and (other / file.name).is_file():
            shutil.copy(other / file.name, file)
            return f"{file.name} of another folder"
        case _:
            return damage_file(rng, file)
