"""The kernels of this folder, compiled for this machine where they are first used.

One text of C++ without any header of torch: two seconds with GCC or Clang. What was compiled is kept in ``$XDG_CACHE_HOME/xtf/native``,
under a digest of the text, the command, the compiler and the processor.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from xtf.files import default_cache_dir

_log = logging.getLogger("xtf.ops")
_HERE = Path(__file__).parent
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they cannot be had: the reason is logged, once."""
    try:
        found = ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.SubprocessError, _Impossible) as error:
        reason = (str(getattr(error, "stderr", None) or "").strip() or str(error)).splitlines()[0]
        _log.warning("attention and grouped products use torch's own kernels, which are slower: ours could not be compiled: %s", reason)
        return None
    found.xtf_attention_scratch.restype = ctypes.c_int64
    # With narrower vectors than AVX's, torch's kernels are faster.
    return found if found.xtf_width() >= 8 else None


class _Impossible(Exception):
    """What stands in the way of compiling."""


def _compiled() -> Path:
    if platform.machine().lower() not in ("x86_64", "amd64") or os.name != "posix":
        raise _Impossible(f"they are for x86 with AVX on Linux and macOS, this is {platform.machine()} with {platform.system()}")
    compiler = _compiler()
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
    # torch's own copy of the OpenMP runtime: a second one would bring threads of its own
    runtime = [str(file) for file in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))[:1]]
    command = [*compiler, *_FLAGS, str(_HERE / "kernels.cpp"), *runtime]
    texts = [file.read_text() for file in sorted(_HERE.glob("*.[ch]*"))]
    key = hashlib.sha256("\0".join([*texts, *command, version, _processor()]).encode()).hexdigest()[:20]
    target = default_cache_dir() / "native" / f"kernels-{key}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".building-") as folder:
        made = Path(folder) / target.name
        subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, check=True)
        made.replace(target)
    return target


def _compiler() -> list[str]:
    """``$CXX``, or a compiler by its usual names."""
    wanted = shlex.split(os.environ.get("CXX", ""))
    for command in [wanted] if wanted else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    raise _Impossible(f"no C++ compiler ({shlex.join(wanted) or 'c++, g++ or clang++'}); install g++, or say with CXX where one is")


def _processor() -> str:
    """What ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(next((line for line in lines if line.startswith(name)), "") for name in ("model name", "flags"))
