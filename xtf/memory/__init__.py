"""Device memory over a training step: known before the step runs, drawn, and spent."""

from xtf.memory.fit import fit_tokens
from xtf.memory.measure import measure
from xtf.memory.rehearsal import rehearse
from xtf.memory.timeline import HOST, KINDS, Moment, Timeline

__all__ = ["HOST", "KINDS", "Moment", "Timeline", "fit_tokens", "measure", "rehearse"]
