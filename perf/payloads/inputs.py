"""Sources: parses what `--input-data` names into streams of steps. A step has values for one row of each input.

Used by `preparing.py`. File formats and checks are perf_analyzer's (its docs/input_data.md).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.perf.profiling.model import ModelDescription, Tensor
from penstock.perf.profiling.options import Input

from .tensors import InputError, Values, check_size, of_base64, of_json, random, serialized, strings, text_of, zeros

FLAG = "--input-data"
_GENERATED = ("random", "zero")
Row = Mapping[str, Values]
"""Values of each input for one row. An optional one may be missing."""


@dataclass(frozen=True, slots=True)
class Streams:
    """What is to be sent: the steps of streams. `given`: by the user, as opposed to generated."""

    streams: tuple[tuple[Row, ...], ...]
    given: bool
    notes: tuple[str, ...] = ()


def streams(model: ModelDescription, options: Input) -> Streams:
    """Generate or read what is to be sent. Raises: InputError."""
    inputs = shaped(model, options.shapes)
    if len(options.source) == 1 and options.source[0] in _GENERATED:
        return Streams(((_generated(inputs, options),),), given=False)
    paths = [Path(source) for source in options.source]
    if len(paths) == 1 and paths[0].is_dir():
        row, notes = _of_folder(paths[0], inputs, [each.name for each in model.outputs])
        return Streams(((row,),), given=True, notes=notes)
    shapes = {each.name: each.shape for each in inputs}
    return _of_files(paths, _Reader(model.inputs, shapes, {each.name for each in model.outputs}))


def shaped(model: ModelDescription, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Tensor, ...]:
    """Return a model's inputs, with their free dimensions set by `--shape`. Raises: InputError."""
    if not model.inputs:
        raise InputError(f"model '{model.name}': its metadata names no inputs; tell them with --input NAME:TYPE:-1,2,3")
    inputs_by_name = {each.name: each for each in model.inputs}
    for name, shape in shapes.items():
        if name not in inputs_by_name:
            raise InputError(
                f"--shape {name}: model '{model.name}' has no such input; it has {', '.join(inputs_by_name)}"
            )
        _check_shape(inputs_by_name[name], shape, f"--shape {name}")
    return tuple(replace(each, shape=shapes.get(each.name, each.shape)) for each in model.inputs)


def _check_shape(tensor: Tensor, shape: tuple[int, ...], where: str) -> None:
    fits = len(shape) == len(tensor.shape) and all(
        dim >= 0 and free in (-1, dim) for dim, free in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        takes = f"input '{tensor.name}' takes {text_of(tensor.shape)}"
        raise InputError(f"{where}: shape {text_of(shape)} does not fit, {takes} (-1 is free, rows are not counted)")


def _check_told(tensor: Tensor, where: str) -> None:
    if -1 in tensor.shape:
        text = f"input '{tensor.name}' has the shape {text_of(tensor.shape)}, whose -1 has to be told:"
        raise InputError(f"{where}{text} --shape {tensor.name}:{','.join(str(abs(dim)) for dim in tensor.shape)}")


def _generated(inputs: tuple[Tensor, ...], options: Input) -> Row:
    row = {}
    for each in inputs:
        if each.shape_tensor:
            raise InputError(f"input '{each.name}' is a shape tensor, whose values have to be given with {FLAG}")
        _check_told(each, "")
        # seeded by its name, so that an input's values do not depend on those before it
        rng = np.random.default_rng([options.seed, zlib.crc32(each.name.encode())])
        if each.datatype == "BYTES":
            row[each.name] = strings(each, rng, options.string_length, options.string)
        else:
            row[each.name] = zeros(each) if options.source[0] == "zero" else random(each, rng)
    return row


def _of_folder(folder: Path, inputs: tuple[Tensor, ...], outputs: list[str]) -> tuple[Row, tuple[str, ...]]:
    names = {each.name for each in inputs}
    files = sorted(each.name for each in folder.iterdir())
    for name in files:
        if name not in names and name not in outputs:
            raise InputError(f"{FLAG} {folder}: file '{name}' is named after no input of the model")
    row = {}
    for each in inputs:
        if each.name not in files and each.optional:
            continue
        where = f"{FLAG} {folder / each.name}"
        _check_told(each, f"{where}: ")
        content = _bytes_of(folder / each.name)
        if not content:
            raise InputError(f"{where}: the file is empty")
        if each.datatype == "BYTES":
            lines = content.split(b"\n")
            content = serialized(lines[:-1] if not lines[-1] else lines)
        row[each.name] = Values(each.shape, content)
        check_size(each, row[each.name], where)
    compared = [name for name in files if name in outputs and name not in names]
    return row, (_not_compared(f"{folder}: the files of outputs"),) if compared else ()


@dataclass(frozen=True, slots=True)
class _Reader:
    """Parses the steps of files. `told`: the shapes of inputs whose entries have none."""

    inputs: tuple[Tensor, ...]
    told: Mapping[str, tuple[int, ...]]
    outputs: set[str]

    def row(self, step: Any, where: str) -> Row:
        if not isinstance(step, dict):
            raise InputError(f"{where}: a step is an object with a member for each input")
        for name in step:
            if name not in self.told and name != "model":
                raise InputError(f"{where}: '{name}' is no input of the model")
        row = {}
        for each in self.inputs:
            if each.name in step:
                row[each.name] = self._values(each, step[each.name], f"{where}: input '{each.name}'")
            elif not each.optional:
                raise InputError(f"{where}: input '{each.name}' is missing")
        return row

    def _values(self, tensor: Tensor, entry: Any, where: str) -> Values:
        shape, content = self.told[tensor.name], entry
        if isinstance(entry, dict):
            if "shape" in entry:
                shape = _shape(entry["shape"], where)
                _check_shape(tensor, shape, where)
            content = entry if "b64" in entry else entry.get("content")
        if -1 in shape:
            raise InputError(f"{where}: its shape {text_of(shape)} is not told, neither here ('shape') nor by --shape")
        if isinstance(content, list):
            raw = of_json(tensor, content, where)
        elif isinstance(content, dict) and "b64" in content:
            raw = of_base64(content["b64"], where)
        else:
            raise InputError(f"{where}: it has to be an array, or an object with 'content' or 'b64'")
        values = Values(shape, raw)
        check_size(tensor, values, where)
        return values


def _of_files(paths: list[Path], reader: _Reader) -> Streams:
    read_streams: list[list[Row]] = []
    kinds: set[bool] = set()
    notes: list[str] = []
    for path in paths:
        document = _document(path)
        entries, validation_data = document["data"], document.get("validation_data")
        kinds |= {isinstance(entry, list) for entry in entries}
        if len(kinds) > 1:
            raise InputError(f"{FLAG} {path}: data mixes steps with streams of steps; it has to be one of them")
        where = f"{FLAG} {path}: data"
        if True in kinds:
            read_streams += [_stream(stream, reader, f"{where}[{number}]") for number, stream in enumerate(entries)]
        else:
            # without streams, all steps of all files form one
            read_streams = [[*(read_streams[0] if read_streams else ()), *_stream(entries, reader, where)]]
        if validation_data is not None:
            if not _aligned(validation_data, entries, reader.outputs):
                text = "it has to have an entry for each of data, whose members are outputs of the model"
                raise InputError(f"{FLAG} {path}: validation_data: {text}")
            notes.append(_not_compared(f"{path}: validation_data"))
    return Streams(tuple(map(tuple, read_streams)), given=True, notes=tuple(notes))


def _stream(steps: list[Any], reader: _Reader, where: str) -> list[Row]:
    if not steps:
        raise InputError(f"{where}: the stream has no steps")
    return [reader.row(step, f"{where}[{number}]") for number, step in enumerate(steps)]


def _document(path: Path) -> dict[str, Any]:
    where, text = f"{FLAG} {path}", _bytes_of(path)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: it is no JSON: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("data"), list) or not document["data"]:
        raise InputError(f"{where}: it has to be an object whose member 'data' is an array of one entry at least")
    return document


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{FLAG} {path}: it cannot be read: {error.strerror}") from error


def _shape(shape: Any, where: str) -> tuple[int, ...]:
    if not isinstance(shape, list) or not all(type(dim) is int for dim in shape):
        raise InputError(f"{where}: its 'shape' has to be an array of whole numbers")
    return tuple(shape)


def _aligned(expected: Any, sent: Any, outputs: set[str]) -> bool:
    """Return whether the expected outputs match what is sent, entry by entry."""
    if isinstance(sent, list):
        paired = isinstance(expected, list) and len(expected) == len(sent)
        return paired and all(
            _aligned(expected_entry, sent_entry, outputs)
            for expected_entry, sent_entry in zip(expected, sent, strict=True)
        )
    return isinstance(expected, dict) and expected.keys() <= outputs


def _not_compared(subject: str) -> str:
    return f"{subject} has been read and is not compared: answers are counted and timed, their tensors are not read"
