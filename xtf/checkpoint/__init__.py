"""Hugging Face checkpoint folders: read by blocks, written leaf by leaf."""

from xtf.checkpoint.folder import CheckpointError as CheckpointError
from xtf.checkpoint.folder import Described as Described
from xtf.checkpoint.folder import read_config as read_config
from xtf.checkpoint.placed import load as load
from xtf.checkpoint.placed import save as save
from xtf.checkpoint.reading import load_leaves as load_leaves
from xtf.checkpoint.reading import load_params as load_params
from xtf.checkpoint.writing import save_leaves as save_leaves
from xtf.checkpoint.writing import save_params as save_params
