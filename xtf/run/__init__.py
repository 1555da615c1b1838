"""What surrounds a training step in a run: progress, metrics, plots, sampling, and the loop itself."""

from xtf.run.metrics import MetricsWriter, read_metrics
from xtf.run.plot import plot_loss
from xtf.run.progress import Progress
from xtf.run.sampling import generate

__all__ = ["MetricsWriter", "Progress", "generate", "plot_loss", "read_metrics"]
