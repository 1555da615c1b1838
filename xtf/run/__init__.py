"""What surrounds a training step in a run: recipes, data, progress, metrics, plots, sampling, and the loop itself."""

from xtf.run.metrics import MetricsWriter, read_metrics
from xtf.run.plot import plot_loss
from xtf.run.progress import Progress
from xtf.run.recipe import Batches, Data, Evaluation, Files, Opened, Recipe, Schedule
from xtf.run.sampling import generate
from xtf.run.standard import standard
from xtf.run.training_data import DemoText, FileData

__all__ = [
    "Batches",
    "Data",
    "DemoText",
    "Evaluation",
    "FileData",
    "Files",
    "MetricsWriter",
    "Opened",
    "Progress",
    "Recipe",
    "Schedule",
    "generate",
    "plot_loss",
    "read_metrics",
    "standard",
]
