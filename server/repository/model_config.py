"""The fields of a ModelConfig: each is honored, documentation, a hint, or rejected. No field is ignored silently.

Used by scan.py. docs/compatibility-triton.md has one row per field; a test keeps it consistent with `fields/`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .fields import batching, ensembles, gpu, identity, instances, optimization, sequences, serving, tensors
from .fields.parse_context import ParseContext
from .findings import Finding
from .gpus import Gpus
from .parsed_config import ParsedConfig

MODEL_FILE = "model.onnx"

_FIELD_MODULES = (identity, batching, tensors, instances, gpu, optimization, sequences, ensembles, serving)
HONOURED = tuple(name for part in _FIELD_MODULES for name in part.HONOURED)
REFUSED = tuple(name for part in _FIELD_MODULES for name in getattr(part, "REFUSED", ()))
REASONS = {name: why for part in _FIELD_MODULES for name, why in getattr(part, "REASONS", {}).items()}
HINTS = {name: why for part in _FIELD_MODULES for name, why in getattr(part, "HINTS", {}).items()}
"""Fields that tell Triton how to run a model without changing answers, and why they have no effect here."""
DOCUMENTATION = tuple(name for part in _FIELD_MODULES for name in getattr(part, "DOCUMENTATION", ()))


def read(
    folder: Path, path: Path, config: Any, lines: Mapping[str, int], gpus: Gpus | None = None
) -> tuple[ParsedConfig, list[Finding]]:
    """Read one ModelConfig, collecting every mistake.

    `folder` is the model's, and has its name. `path` is the configuration's, and `lines` are the lines of its fields.
    `gpus`: the GPUs present. None: the runtime decides.
    """
    context = ParseContext(folder, path, config, lines, gpus or Gpus.from_numbers(None))
    context.name = folder.name
    for field in REFUSED:
        warned_elsewhere = config.backend == identity.PYTHON and field.startswith(
            "optimization."
        )  # optimization.py warns of it
        if not warned_elsewhere and any(_is_set(config, field.split("."))):
            why = f": {REASONS[field]}" if field in REASONS else ""
            context.add_mistake(field, f"field '{field}' is not supported{why}")
    for field, why in HINTS.items():
        if any(_is_set(config, field.split("."))):
            context.add_warning(field, f"field '{field}' has no effect: {why}")
    for part in _FIELD_MODULES:
        part.read(context)
    return ParsedConfig(path, context.values, context.locations), context.findings


def _is_set(message: Any, names: list[str]) -> Iterator[bool]:
    """Yield whether the field at the end of a dotted path is set, for every element on the way."""
    field = message.DESCRIPTOR.fields_by_name[names[0]]
    value = getattr(message, names[0])
    if len(names) == 1:
        yield message.HasField(names[0]) if field.has_presence else bool(value)
        return
    inner: Iterable[Any] = value if field.is_repeated else [value]
    for element in inner:
        yield from _is_set(element, names[1:])
