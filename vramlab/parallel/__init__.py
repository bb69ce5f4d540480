"""Several cards: ranks from a notebook cell, and the ways in which they share the work."""

from vramlab.parallel.data import RankWindow, ddp, unused_parameters, windows
from vramlab.parallel.launch import LaunchError, launch

__all__ = ["LaunchError", "RankWindow", "ddp", "launch", "unused_parameters", "windows"]
