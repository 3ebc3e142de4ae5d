"""The IO model: what attention computes, and what it moves through device memory, standard and in tiles.

`standard` models the plain computation, each step of which writes its matrix of scores to memory; `tiled` the kernels
of flashtile. Both give one `Work` for each kernel: products, exponentials, random numbers, and what of each tensor is
read and written. `Device` turns that into the least time, and says what bounds it. docs/io_model.md tells what is
counted, what is assumed, and how far the predictions lie from what a GPU counts.
"""

from flashtile.io_model.devices import DEVICES, Device, find_device, measure_cpu
from flashtile.io_model.shape import Shape
from flashtile.io_model.standard import standard
from flashtile.io_model.text import comparison, summary, sweep_table
from flashtile.io_model.tiled import Cut, SweepPoint, kernels_of, sweep, tiled
from flashtile.io_model.work import Computation, Transfer, Work

__all__ = [
    "DEVICES",
    "Computation",
    "Cut",
    "Device",
    "Shape",
    "SweepPoint",
    "Transfer",
    "Work",
    "comparison",
    "find_device",
    "kernels_of",
    "measure_cpu",
    "standard",
    "summary",
    "sweep",
    "sweep_table",
    "tiled",
]
