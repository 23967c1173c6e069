"""Checkpoints: saved whole or not at all, verified when loaded, independent of the world."""

from oarlock.checkpoint.checkpoints import Checkpoints as Checkpoints
from oarlock.checkpoint.checkpoints import Loaded as Loaded
from oarlock.checkpoint.storage import Checkpoint as Checkpoint
