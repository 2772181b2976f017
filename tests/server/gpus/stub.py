"""The answers of the stub NVML library, which tests can change."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

LIBRARY = "libnvidia-ml.so.1"
H200, L4 = "GPU-aaaa0000-1111-2222-3333-444444444444", "GPU-bbbb0000-1111-2222-3333-444444444444"
SLICES = "MIG-cccc0000-1111-2222-3333-444444444444", "MIG-dddd0000-1111-2222-3333-444444444444"
NOT_SUPPORTED, UNKNOWN, DRIVER_NOT_LOADED, FUNCTION_NOT_FOUND, LOST, MISMATCH = 3, 999, 9, 13, 15, 18

_TWO = {
    H200: {
        "name": "NVIDIA H200",
        "bus_id": "00000000:65:00.0",
        "utilization": "37 12",
        "memory": "150000000000 85000000000 500000000",
        "power": "123456",
        "power_limit": "700000",
        "energy": "5000000",
        "temperature": "41",
        "clocks": "1980 1980 3201 1500",
        "clock_limits": "1980 1980 3201 1545",
        "reasons": "0x44",
        "processes": "self 1000 1 99",
        "mig_mode": "0",
    },
    L4: {"name": "NVIDIA L4", "bus_id": "00000000:17:00.0", "memory": "24000000000 0 0", "processes": ""},
}


class Stub:
    """The stub's file of lines, keyed by their first two words. `library`: the path of the built library."""

    def __init__(self, path: Path, library: Path) -> None:
        self.path = path
        self.library = library
        self._held: list[int] = []
        self._lines: dict[tuple[str, str], str] = {}
        for uuid, values in _TWO.items():
            self._lines.update({(uuid, key): value for key, value in values.items()})
        self._write()

    def say(self, uuid: str, key: str, value: str) -> None:
        """Set a value of a GPU."""
        self._set(uuid, key, value)

    def fail(self, call: str, code: int, uuid: str = "") -> None:
        """Make a call fail for one GPU or for all; `call` may be "every" for one GPU."""
        self._set("fail", f"{call}@{uuid}" if uuid else call, str(code))

    def heal(self) -> None:
        """Clear all failures."""
        self._lines = {words: rest for words, rest in self._lines.items() if words[0] != "fail"}
        self._write()

    def remove(self, uuid: str) -> None:
        """Remove a GPU."""
        self._lines = {words: rest for words, rest in self._lines.items() if words[0] != uuid}
        self._write()

    def slice(self) -> None:
        """Put the first GPU in MIG mode, with two MIG devices."""
        self.say(H200, "mig_mode", "1")
        self._lines.pop((H200, "utilization"), None)
        for number, uuid in enumerate(SLICES, 1):
            self._set("mig", uuid, H200)
            self._set(uuid, "name", "NVIDIA H200 MIG 1g.18gb")
            self._set(uuid, "memory", f"{number}8000000000 {number}000 0")

    def hang(self, call: str) -> None:
        """Make a call hang until `release`."""
        fifo = self.path.with_name(f"{call}.fifo")
        os.mkfifo(fifo)
        self._set("hang", call, str(fifo))

    def release(self) -> None:
        """Release the calls that hang."""
        waited_at = [rest for words, rest in self._lines.items() if words[0] == "hang"]
        self._lines = {words: rest for words, rest in self._lines.items() if words[0] != "hang"}
        self._write()
        self._held += [os.open(fifo, os.O_RDWR) for fifo in waited_at]

    def calls(self) -> Counter[str]:
        """Count the calls so far."""
        noted = Path(f"{self.path}.calls")
        return Counter(noted.read_text("ascii").split() if noted.exists() else ())

    def _set(self, first: str, second: str, rest: str) -> None:
        self._lines[first, second] = rest
        self._write()

    def _write(self) -> None:
        new = self.path.with_suffix(".new")
        new.write_text("".join(f"{a} {b} {rest}\n" for (a, b), rest in self._lines.items()), "ascii")
        new.replace(self.path)
