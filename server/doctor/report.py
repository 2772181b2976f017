"""Reports: Diagnoses, as text or as JSON."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass

OK, NOTE, WARNING, ERROR = "ok", "note", "warning", "error"
_LEVEL_COLUMNS, _MIN_COLUMNS, _MAX_COLUMNS = 9, 60, 120


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One finding about one part. `remedy` is what to do, in one line; "" if nothing needs doing."""

    level: str
    part: str
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """All findings, in reading order."""

    diagnoses: Sequence[Diagnosis]

    @property
    def status(self) -> int:
        """The exit status: 1 if anything is an error."""
        return int(any(each.level == ERROR for each in self.diagnoses))

    def json(self) -> str:
        """Format the report as JSON."""
        found = [asdict(each) for each in self.diagnoses]
        return json.dumps({"status": self.status, "findings": found}, indent=2)

    def __str__(self) -> str:
        """Format the report as text: a part's name precedes its first line."""
        columns = min(max(shutil.get_terminal_size((100, 24)).columns, _MIN_COLUMNS), _MAX_COLUMNS)
        widest = max((len(each.part) for each in self.diagnoses), default=0)
        lines, part = [], ""
        for each in self.diagnoses:
            lines += _format_lines(each, "" if each.part == part else each.part, widest + 2, columns)
            part = each.part
        counts = {level: sum(each.level == level for each in self.diagnoses) for level in (ERROR, WARNING)}
        counts_text = [f"{count} {level}{'' if count == 1 else 's'}" for level, count in counts.items()]
        return "\n".join([*lines, "", ", ".join(counts_text)])


def size(count: int) -> str:
    """Format a number of bytes as text."""
    for unit, bits in (("TiB", 40), ("GiB", 30), ("MiB", 20)):
        if abs(count) >= 1 << bits:
            return f"{count / (1 << bits):.3g} {unit}"
    return f"{count} bytes"


def _format_lines(diagnosis: Diagnosis, part: str, indent: int, columns: int) -> list[str]:
    prefix = f"{part:<{indent}}{diagnosis.level:<{_LEVEL_COLUMNS}}"
    indent_text = " " * len(prefix)
    texts = [diagnosis.text] + ([f"-> {diagnosis.remedy}"] if diagnosis.remedy else [])
    lines: list[str] = []
    for text in texts:
        lines += textwrap.wrap(
            text, columns, initial_indent=indent_text if lines else prefix,
            subsequent_indent=indent_text + ("   " if lines else ""), break_long_words=False, break_on_hyphens=False,
        ) or [prefix]  # fmt: skip
    return lines
