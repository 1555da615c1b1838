"""The store of a world that starts anew: what ranks of an earlier attempt have written is not read.

torchrun starts all ranks again when one has failed, with the same store. There, addresses of processes that have ended still stand, and
gloo tries to connect to them ("connectFullMesh failed"). torchrun's count of restarts cannot tell the attempts apart: on several nodes it
counts on that of the failure only.
"""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

_POLL = 0.02  # seconds


def fresh(store: Any, rank: int, size: int, timeout: float) -> Any:
    """A part of the store that only the processes that call this now use.

    Each process leaves a name of its own. The first rank reads the names of all, gives the world that they form a name, and looks again
    until all have found their own names in it: a name that an earlier process has left is replaced when the new one comes.

    Args:
        store: of torch.distributed, shared by all ranks and perhaps by earlier ones.
        rank: this rank.
        size: how many there are.
        timeout: seconds to wait for the others.

    Raises:
        RuntimeError: if they did not come by then.
    """
    own, end = uuid.uuid4().hex, time.monotonic() + timeout
    hellos = [f"xtf/hello/{other}" for other in range(size)]
    store.set(hellos[rank], own)
    members, name = list[str](), ""
    while time.monotonic() < end:
        if rank == 0 and store.check(hellos):
            found = [one.decode() for one in store.multi_get(hellos)]
            if found != members:
                members, name = found, uuid.uuid4().hex
                store.set("xtf/world", json.dumps([name, members]))
            if store.check([f"xtf/{name}/{other}" for other in range(1, size)] or [hellos[0]]):
                store.set(f"xtf/{name}/begin", "")
                return PrefixStore(name, store)
        elif rank and store.check(["xtf/world"]):
            name, members = json.loads(store.get("xtf/world"))
            if len(members) == size and members[rank] == own:
                store.set(f"xtf/{name}/{rank}", "")
                if store.check([f"xtf/{name}/begin"]):
                    return PrefixStore(name, store)
        time.sleep(_POLL)
    raise RuntimeError(f"rank {rank} of {size} waited {timeout:g} s for the other ranks to start; see the first error of each in the log")
