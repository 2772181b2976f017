"""Requests that belong together in order: `sequence_batching`."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from penstock.backends.datatypes import BY_CONFIG_NAME
from penstock.batching.sequences.controls import CORRID_DATATYPES
from penstock.batching.spec import Control, SequenceSpec, State
from penstock.server.repository.findings import path_exists, resolve_inside

from .identity import PYTHON, is_platform_handler
from .parse_context import ParseContext, enum_name

HONOURED = (
    "sequence_batching.direct", "sequence_batching.oldest", "sequence_batching.max_sequence_idle_microseconds",
    "sequence_batching.control_input", "sequence_batching.state.input_name", "sequence_batching.state.output_name",
    "sequence_batching.state.data_type", "sequence_batching.state.dims", "sequence_batching.state.initial_state",
    "sequence_batching.state.use_same_buffer_for_input_output", "sequence_batching.iterative_sequence",
)  # fmt: skip
REFUSED = ("sequence_batching.state.use_growable_memory",)

HOLD_BACKLOG_VARIABLE = "TRITONSERVER_BACKLOG_DELAY_SCHEDULER"
"""Like HOLD_VARIABLE in batching.py, an environment variable of Triton's tests: how many must also wait for a place."""
INITIAL_STATE = "initial_state"
"""The folder within the model's that holds the files of initial states."""
DEFAULT_IDLE_US = 1_000_000
_PREFIX = "CONTROL_SEQUENCE_"
_VALUES = {"int32_false_true": "INT32", "fp32_false_true": "FP32", "bool_false_true": "BOOL"}


def read(context: ParseContext) -> None:
    """Read the fields of this module."""
    config = context.config
    if not config.HasField("sequence_batching"):
        return
    batching = config.sequence_batching
    controls = tuple(_read_controls(context, batching.control_input))
    states = tuple(_read_states(context, batching.state))
    direct, oldest = batching.direct, batching.oldest
    if not 0 <= direct.minimum_slot_utilization <= 1:
        text = f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {context.name}"
        context.add_mistake("sequence_batching.direct.minimum_slot_utilization", text)
    if oldest.max_candidate_sequences < 0:
        field = "sequence_batching.oldest.max_candidate_sequences"
        context.add_mistake(field, f"'{field}' must be non-negative for {context.name}")
    spec = SequenceSpec(
        direct=not batching.HasField("oldest"),
        idle_us=batching.max_sequence_idle_microseconds or DEFAULT_IDLE_US,
        controls=controls,
        states=states,
        max_delay_us=direct.max_queue_delay_microseconds,
        min_utilization=direct.minimum_slot_utilization,
        max_candidates=oldest.max_candidate_sequences,
        iterative=batching.iterative_sequence,
    )
    if batching.iterative_sequence and (config.backend != PYTHON or is_platform_handler(config)):
        field = "sequence_batching.iterative_sequence"
        context.add_mistake(field, f"field '{field}' is for Python models: no other backend can rerun a request")
    context.set_value("sequence", spec, "sequence_batching")
    _read_oldest(context, oldest)


def complete(config: Any, max_batch_rows: int) -> None:
    """Complete a ModelConfig's settings of sequences. Source: NormalizeModelConfig of Triton's core."""
    batching = config.sequence_batching
    batching.max_sequence_idle_microseconds = batching.max_sequence_idle_microseconds or DEFAULT_IDLE_US
    if batching.HasField("oldest") and not batching.oldest.preferred_batch_size and max_batch_rows:
        batching.oldest.preferred_batch_size.append(max_batch_rows)


def _read_oldest(context: ParseContext, oldest: Any) -> None:
    prefix = "sequence_batching.oldest"
    if oldest.preferred_batch_size:
        if min(oldest.preferred_batch_size) < 1:
            text = f"sequence batching preferred batch size must be positive for {context.name}"
            context.add_mistake(f"{prefix}.preferred_batch_size", text)
        sizes = tuple(sorted(set(oldest.preferred_batch_size)))
        context.set_value("batching.preferred", sizes, f"{prefix}.preferred_batch_size")
    if oldest.max_queue_delay_microseconds:
        field = f"{prefix}.max_queue_delay_microseconds"
        context.set_value("batching.max_queue_delay_us", oldest.max_queue_delay_microseconds, field)
    if oldest.preserve_ordering:
        context.set_value("batching.preserve_ordering", True, f"{prefix}.preserve_ordering")


def _read_controls(context: ParseContext, inputs: Any) -> Iterator[Control]:
    """Read the controls. Source of the texts: Triton's core, model_config_utils.cc."""
    names: set[str] = set()
    kinds: set[str] = set()
    for each in inputs:
        if not each.name:
            _add_mistake(context, f"sequence batching control tensor must have a name for {context.name}")
        elif each.name in names or len(each.control) > 1:
            text = f"sequence batching control tensor '{each.name}' is specified for multiple control kinds"
            _add_mistake(context, f"{text} for {context.name}")
        elif not each.control:
            _add_mistake(
                context, f"sequence batching control tensor '{each.name}' must specify a control for {context.name}"
            )
        names.add(each.name)
        for control in each.control:
            kind = enum_name(control, "kind")
            if kind in kinds:
                _add_mistake(context, f"sequence batching specifies multiple {kind} tensors for {context.name}")
            kinds.add(kind)
            corrid = kind == f"{_PREFIX}CORRID"
            control_spec = (
                _read_corrid(context, each.name, control) if corrid else _read_flag(context, each.name, kind, control)
            )
            if control_spec is not None:
                yield control_spec


def _read_corrid(context: ParseContext, name: str, control: Any) -> Control:
    kind = f"{_PREFIX}CORRID"
    if any(getattr(control, field) for field in _VALUES):
        fields = "either 'int32_false_true', 'fp32_false_true' or 'bool_false_true'"
        _add_mistake(context, f"sequence batching must not specify {fields} for {kind} for {context.name}")
    datatype = BY_CONFIG_NAME.get(enum_name(control, "data_type"))
    if datatype is None or datatype.name not in CORRID_DATATYPES:
        allowed = "TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
        _add_mistake(
            context, f"unexpected data type for control {kind} for {context.name}. Allowed data types are {allowed}"
        )
    return Control(name, "corrid", datatype.name if datatype else CORRID_DATATYPES[0])


def _read_flag(context: ParseContext, name: str, kind: str, control: Any) -> Control | None:
    about = f"for {kind} for {context.name}"
    given = [field for field in _VALUES if getattr(control, field)]
    if not given:
        fields = "either 'int32_false_true', 'fp32_false_true' or 'bool_false_true'"
        _add_mistake(context, f"sequence batching must specify {fields} {about}")
        return None
    if len(given) > 1:
        fields = "'int32_false_true', 'fp32_false_true' and 'bool_false_true'"
        _add_mistake(context, f"sequence batching specifies more than one from {fields} {about}")
    values = tuple([each + 0 for each in getattr(control, given[0])])  # booleans become 0 and 1, which are numbers
    if len(values) != 2:
        _add_mistake(context, f"sequence batching control '{given[0]}' must have exactly 2 entries {about}")
        return None
    return Control(name, kind.removeprefix(_PREFIX).lower(), _VALUES[given[0]], values)


def _read_states(context: ParseContext, states: Any) -> Iterator[State]:
    """Read the states. Source of the texts: Triton's core, sequence_batch_scheduler.cc."""
    seen: dict[str, set[str]] = {"input": set(), "output": set()}
    for state in states:
        for kind, name in (("input", state.input_name), ("output", state.output_name)):
            if not name:
                _add_mistake(context, f"state must specify '{kind}_name' for {context.name}", "state")
            elif name in seen[kind]:
                _add_mistake(context, f"State {kind} name '{name}' specified more than once.", "state")
            seen[kind].add(name)
        datatype = BY_CONFIG_NAME.get(enum_name(state, "data_type"))
        dims = tuple(state.dims)
        if datatype is None:
            _add_mistake(
                context, f"state '{state.input_name}' must specify 'data_type' for {context.name}", "state.data_type"
            )
            continue
        if any(dim < 1 and dim != -1 for dim in dims):
            text = "dimension must be integer >= 1, or -1 to indicate a variable-size dimension"
            _add_mistake(context, f"state '{state.input_name}' {text} for {context.name}", "state.dims")
            continue
        yield _read_initial_state(context, state, State(state.input_name, state.output_name, datatype.name, dims))


def _read_initial_state(context: ParseContext, declared: Any, state: State) -> State:
    """Read the initial value of a state."""
    if not declared.initial_state:
        return state
    initial = declared.initial_state[0]
    dims = tuple(initial.dims)
    problem = _initial_mistake(declared, initial, state, dims)
    path = None
    if problem is None and initial.WhichOneof("state_data") == "data_file":
        path = resolve_inside(context.folder / INITIAL_STATE, initial.data_file)
        problem = _file_mistake(path, initial.data_file, state, dims)
    if problem is not None:
        _add_mistake(context, problem, "state.initial_state")
        return state
    return State(state.input, state.output, state.datatype, state.shape, path, dims)


def _initial_mistake(declared: Any, initial: Any, state: State, dims: tuple[int, ...]) -> str | None:
    name, count = state.input, len(declared.initial_state)
    if count > 1:
        text = f"initial_state field for state input '{name}' must contain exactly one or zero element."
        return f"{text} Found '{count}' elements."
    if initial.data_type != declared.data_type:
        return f"The data type used for 'initial_state' field of state '{name}' does not match the state data type."
    if not initial.name:
        return f"Field 'name' must be set when using initial_state for state input '{name}'."
    if len(dims) != len(state.shape):
        text = "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input"
        return f"{text} '{name}'. {len(dims)} != {len(state.shape)}"
    if any(dim < 0 for dim in dims):
        return f"'initial_state' field for state input name '{name}' contains variable dimensions."
    for dim, state_dim in zip(dims, state.shape, strict=True):
        if state_dim not in (-1, dim):
            text = f"'initial_state' dim for input name '{name}' doesn't match 'state' dim description."
            return f"{text} {dim} != {state_dim}"
    if initial.WhichOneof("state_data") is None:
        return f"initial_state setting expects state'{name}' to have state_data set"
    return None


def _file_mistake(path: Path | None, name: str, state: State, dims: tuple[int, ...]) -> str | None:
    if path is None:
        return f"'{name}' is outside the folder '{INITIAL_STATE}'"
    if not path_exists(path) or not path.is_file():
        return f"'{INITIAL_STATE}/{name}' does not exist"
    expected_size = prod(dims) * next(
        each.size_bytes for each in BY_CONFIG_NAME.values() if each.name == state.datatype
    )
    size = path.stat().st_size
    if size < expected_size:
        text = f"initial_state setting expects {expected_size} bytes, but the data provided from {name}"
        return f"{text} only has {size} bytes."
    return None


def _add_mistake(context: ParseContext, text: str, field: str = "control_input") -> None:
    context.add_mistake(f"sequence_batching.{field}", text)
