"""``python -m xtf.cli``: the command ``xtf`` without its script. So torchrun starts it on each rank."""

import os
import sys

from xtf.cli import main

if __name__ == "__main__":
    code = main()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        # All is written and said. While the interpreter is taken down, a thread of a gloo group may still be there, and the process is
        # aborted ("terminate called without an active exception"): torchrun would call a run failed that was not.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
