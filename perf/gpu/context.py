"""The context of a part: the device to check, the model sizes, the findings of earlier parts, and the deadline."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .models import FP16, FP32, FULL, SMALL, Variant, model_file
from .rows import Row, parse_row

GPU = "cuda:0"
KINDS = ("cnn", "encoder", "mlp")
MEASURED = tuple((kind, precision) for precision in (FP16, FP32) for kind in KINDS)
"""The models whose rates are measured, the most important first."""
_DEFAULT_ROWS = 32


@dataclass(frozen=True, slots=True)
class CheckContext:
    """What a part is told. It is passed to the part's process as command-line words.

    `quick`: small models and short loads. `end_s`: on the monotonic clock, which all processes share.
    """

    device: str
    folder: Path
    quick: bool = False
    end_s: float = float("inf")
    earlier: tuple[Row, ...] = field(default=(), repr=False)

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU is checked, and not a stand-in."""
        return self.device != "cpu"

    def variant(self, kind: str, precision: str) -> Variant:
        """Return a model at the size that is checked."""
        return Variant(kind, precision, SMALL if self.quick else FULL)

    def file(self, variant: Variant) -> Path:
        """Return its file, written if necessary."""
        return model_file(self.folder / "models", variant)

    def measured(self) -> tuple[tuple[str, str], ...]:
        """Return the kinds and precisions whose rates are measured."""
        return MEASURED[: len(KINDS)] if self.quick else MEASURED

    def judged(self, row: Row) -> Row:
        """Return a Row that holds a speed against what a GPU should reach; for a stand-in the Row is not judged."""
        return row if self.on_gpu and not self.quick else replace(row, held=None, wanted="")

    def seconds(self, full: float) -> float:
        """Return how long a load lasts that lasts this long on a GPU."""
        return min(full, 0.1) if self.quick else full

    def remaining_s(self) -> float:
        """Return the time that the part has left."""
        return self.end_s - time.monotonic()

    def figure_of(self, name: str) -> float | None:
        """Return the figure of an earlier Row, if there is one."""
        for row in self.earlier:
            if row.what == name and isinstance(row.value, float | int):
                return float(row.value)
        return None

    def best_rows(self, variant: Variant) -> int:
        """Return the batch at which the model is fastest offline, or a default if nobody has measured it."""
        return int(self.figure_of(best_batch(variant)) or _DEFAULT_ROWS)

    def words(self) -> list[str]:
        """Format it for another process, without the Rows."""
        fields: Mapping[str, Any] = {
            "device": self.device, "folder": str(self.folder), "quick": self.quick, "end_s": self.end_s
        }  # fmt: skip
        return [json.dumps(fields)]


def from_arguments(text: str, rows: Path) -> CheckContext:
    """Parse what `CheckContext.text` wrote; the Rows are lines of a file."""
    fields = json.loads(text)
    lines = rows.read_text("utf-8").splitlines() if rows.exists() else []
    earlier = tuple(row for row in map(parse_row, lines) if row is not None)
    return CheckContext(fields["device"], Path(fields["folder"]), fields["quick"], fields["end_s"], earlier)


def best_batch(variant: Variant) -> str:
    """Return the name of the Row with the fastest batch."""
    return f"{variant.name}: best batch"


def best_rate(variant: Variant) -> str:
    """Return the name of the Row with the rate of that batch."""
    return f"{variant.name}: offline at its best batch"


def out_folder() -> Path | None:
    """Return the folder that the machine's lender copies back, if there is one."""
    folder_name = os.environ.get("OUT")
    return Path(folder_name) if folder_name else None
