"""``python -m xtf.cli``: the command ``xtf`` without its script. So torchrun starts it on each rank."""

import sys

from xtf.cli import main

if __name__ == "__main__":
    sys.exit(main())
