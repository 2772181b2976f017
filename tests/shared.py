"""A client's shared host memory, in the form in which a request that names it brings it to a batch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from penstock.backends.backend import Array
from penstock.backends.device_array import DeviceArray
from penstock.server.v2.regions import Regions
from penstock.server.v2.system_regions import SystemRegions


class SharedArrays:
    """A client's regions, each with one array at an offset that is not page-aligned. `regions` are the server's."""

    def __init__(self, folder: Path) -> None:
        self.regions = Regions(allowed=True)
        self.system = SystemRegions(self.regions, folder)
        self._folder = folder

    def hold(self, name: str, values: Array, offset: int = 40) -> Any:
        """Put an array into a region of this name. Returns: the DeviceArray that a request contains."""
        (self._folder / name).write_bytes(bytes(offset) + values.tobytes())
        self.system.register(name, name, offset, values.nbytes)
        return self.array(name, values.shape, values.dtype)

    def array(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return the contents of a region, from its first byte."""
        return DeviceArray(self.regions.find(name, 0, 1), 0, shape, dtype)

    def truncate(self, name: str, size: int = 0) -> None:
        """Truncate the memory, as its client may at any time."""
        os.truncate(self._folder / name, size)
