"""``xtf data``: looking at data files before they are trained on."""

from __future__ import annotations

from typing import Annotated

import tyro

from xtf.run import inspect_data, preview_data
from xtf.run.inspect_data import InspectOptions
from xtf.run.preview_data import PreviewOptions

DataCommand = Annotated[
    Annotated[InspectOptions, tyro.conf.subcommand("inspect")] | Annotated[PreviewOptions, tyro.conf.subcommand("preview")],
    tyro.conf.FlagCreatePairsOff,
]
"""What ``xtf data`` can do."""


def main(options: InspectOptions | PreviewOptions) -> None:
    """Do it."""
    if isinstance(options, InspectOptions):
        inspect_data.run(options)
    else:
        preview_data.run(options)
