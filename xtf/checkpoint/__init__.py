"""Checkpoints: Hugging Face folders, read by blocks and written leaf by leaf; and the whole state of training, each rank its part."""

from xtf.checkpoint.background import StateSaver as StateSaver
from xtf.checkpoint.folder import CheckpointError as CheckpointError
from xtf.checkpoint.folder import Described as Described
from xtf.checkpoint.folder import read_config as read_config
from xtf.checkpoint.kept import latest as latest
from xtf.checkpoint.kept import prune as prune
from xtf.checkpoint.kept import remove_leftovers as remove_leftovers
from xtf.checkpoint.placed import load as load
from xtf.checkpoint.placed import save as save
from xtf.checkpoint.reading import load_leaves as load_leaves
from xtf.checkpoint.reading import load_params as load_params
from xtf.checkpoint.reading import open_leaves as open_leaves
from xtf.checkpoint.saving import save_state as save_state
from xtf.checkpoint.training import load_newest_state as load_newest_state
from xtf.checkpoint.training import load_state as load_state
from xtf.checkpoint.writing import save_blocks as save_blocks
from xtf.checkpoint.writing import save_leaves as save_leaves
from xtf.checkpoint.writing import save_params as save_params
