"""The script ``xtf``.

It stands outside the package: whatever is imported from there imports torch first, which takes seconds, in which ``--version`` need
not wait and Ctrl-C should end the command without a traceback.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib.metadata import version


def main() -> int:
    """Run the command line (`xtf.cli.main`) and return its exit code."""
    if sys.argv[1:] in (["--version"], ["-V"]):
        print(f"xtf {version('xtf')}")
        return 0
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        # an exception may be lost or wrapped in the midst of an import; nothing was begun that would have to be undone
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    from xtf import cli

    cli.commands()
    signal.signal(signal.SIGINT, before)
    return cli.main()
