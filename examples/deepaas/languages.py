"""A DEEPaaS model without dependencies: which language a text is in, by its pairs of letters."""

import csv
import io
import json
from pathlib import Path
from typing import Any

from webargs import fields, validate

FIRST = {
    "english": "the quick brown fox jumps over the lazy dog and then it runs with the others through the old town",
    "german": "der schnelle braune fuchs springt ueber den faulen hund und dann laeuft er durch die stadt",
    "spanish": "el rapido zorro marron salta sobre el perro perezoso y luego corre con los otros por la ciudad vieja",
}
LEARNED = Path(__file__).with_name("learned.json")

schema = {
    "languages": fields.List(fields.Nested({"language": fields.Str(), "share": fields.Float()}), required=True),
    "letters": fields.Int(),
}

_counts: dict[str, dict[str, int]] = {}
_read: list[int] = []
"""When LEARNED was written that has been read."""


def get_metadata() -> dict[str, Any]:
    """Describe the model."""
    return {
        "name": "languages",
        "version": "1",
        "description": "Which language a text is in, by its pairs of letters.",
        "author": "Penstock",
        "license": "Apache-2.0",
        "languages": sorted({**FIRST, **_learned()}),
    }


def warm() -> None:
    """Count what is known of each language."""
    _read[:] = [_written_ns()]
    for language, text in {**FIRST, **_learned()}.items():
        _counts[language] = _pairs(text)


def get_predict_args() -> dict[str, Any]:
    """Say what predict takes."""
    return {
        "text": fields.Str(missing=None, description="The text; or send a file"),
        "file": fields.Field(missing=None, type="file", location="form", description="A text in UTF-8"),
        "among": fields.List(fields.Str(), missing=None, description="Only these languages"),
        "most": fields.Int(missing=3, validate=validate.Range(min=1, max=10), description="How many to tell of"),
        "accept": fields.Str(
            missing="application/json",
            validate=validate.OneOf(["application/json", "text/csv"]),
            description="What the answer is to be",
        ),
    }


def predict(text: str | None, file: Any, among: list[str] | None, most: int, accept: str) -> Any:
    """Say how likely each language is."""
    if _read != [_written_ns()]:
        warm()  # a training has ended since: it had a process of its own
    if file is not None:
        text = Path(file.filename).read_text("utf-8")
    pairs = _pairs(text or "")
    likeness = {name: _likeness(pairs, counts) for name, counts in _counts.items() if not among or name in among}
    total = sum(likeness.values()) or 1
    best = sorted(likeness, key=lambda name: likeness[name], reverse=True)[:most]
    found = [{"language": name, "share": round(likeness[name] / total, 3)} for name in best]
    if accept == "text/csv":
        table = io.StringIO()
        csv.writer(table).writerows([each["language"], each["share"]] for each in found)
        return table.getvalue()
    return {"languages": found, "letters": len(text or "")}


def get_train_args() -> dict[str, Any]:
    """Say what train takes."""
    return {
        "language": fields.Str(required=True, description="What language it is"),
        "file": fields.Field(required=True, type="file", location="form", description="A text in that language"),
        "epochs": fields.Int(missing=3, validate=validate.Range(min=1), description="How often to read it"),
    }


def train(language: str, file: Any, epochs: int) -> dict[str, Any]:
    """Learn a language. Lines that name an epoch say how far it is."""
    text = Path(file.filename).read_text("utf-8")
    for epoch in range(1, epochs + 1):
        pairs = _pairs(text)
        print(f"Epoch {epoch}/{epochs}: {len(pairs)} pairs of letters", flush=True)
    LEARNED.write_text(json.dumps({**_learned(), language: text}), "utf-8")
    return {"language": language, "pairs": len(pairs)}


def _written_ns() -> int:
    return LEARNED.stat().st_mtime_ns if LEARNED.exists() else 0


def _learned() -> dict[str, str]:
    return json.loads(LEARNED.read_text("utf-8")) if LEARNED.exists() else {}


def _pairs(text: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for pair in zip(text.lower(), text.lower()[1:], strict=False):
        counts["".join(pair)] = counts.get("".join(pair), 0) + 1
    return counts


def _likeness(pairs: dict[str, int], counts: dict[str, int]) -> float:
    shared = sum(count * counts.get(pair, 0) for pair, count in pairs.items())
    return shared / (sum(count * count for count in counts.values()) ** 0.5 or 1)
