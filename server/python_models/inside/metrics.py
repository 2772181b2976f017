"""A model's own metrics, and its log.

The server adds up the values from all workers of a model; `value` is what this worker alone has counted.
Source: python_backend, src/metric.cc and src/metric_family.cc; core, src/metric_family.cc for what each kind rejects.
"""

from __future__ import annotations

import enum
import math
import sys
from typing import Any, ClassVar

from penstock.server.python_models.messages import LABEL_NAME, METRIC, METRIC_NAME

from .errors import TritonModelException, as_text
from .server_proxy import ServerProxy

_DELETED = (
    "Invalid metric operation as the corresponding 'MetricFamily' has been deleted. The 'MetricFamily' object should "
    "be deleted AFTER its corresponding 'Metric' objects have been deleted."
)


class MetricKind(enum.Enum):
    """The kind of a metric family."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric:
    """One metric; valid until its family is deleted."""

    def __init__(self, family: _Family, labels: dict[str, str], buckets: list[float]) -> None:
        self._server = family.server
        self._kind = family.kind
        self._value = 0.0
        self.deleted = False
        self._message = {
            "family": family.name, "kind": family.kind.value, "help": family.description, "labels": labels,
            "buckets": buckets, "value": 0.0,
        }  # fmt: skip
        self._server.send_message(METRIC, 0, self._message | {"do": "make"})

    def increment(self, value: float) -> None:
        """Add to the value. Raises: TritonModelException for a negative value on a counter, and for a histogram."""
        operation = "increment"
        if self._kind is MetricKind.COUNTER and value < 0:
            text = "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values."
            raise TritonModelException(f"Failed to {operation} metric value: {text}")
        self._send_operation(operation, value, "Increment", (MetricKind.COUNTER, MetricKind.GAUGE))
        self._value += value

    def set(self, value: float) -> None:
        """Set the value. Raises: TritonModelException unless it is a gauge."""
        self._send_operation("set", value, "Set", (MetricKind.GAUGE,))
        self._value = float(value)

    def observe(self, value: float) -> None:
        """Count a value. Raises: TritonModelException unless it is a histogram."""
        self._send_operation("observe", value, "Observe", (MetricKind.HISTOGRAM,))

    def value(self) -> float:
        """Return this worker's value. Raises: TritonModelException for a histogram."""
        self._check("get", "Value", (MetricKind.COUNTER, MetricKind.GAUGE))
        return self._value

    def _send_operation(self, operation: str, value: float, name: str, kinds: tuple[MetricKind, ...]) -> None:
        self._check(operation, name, kinds)
        number = float(value)  # JSON has no NaN or infinities: they are sent as text
        self._server.send_message(
            METRIC, 0, self._message | {"do": operation, "value": number if math.isfinite(number) else str(number)}
        )

    def _check(self, operation: str, name: str, kinds: tuple[MetricKind, ...]) -> None:
        if self.deleted:
            raise TritonModelException(f"Failed to {operation} metric value: {_DELETED}")
        if self._kind not in kinds:
            text = f"TRITONSERVER_METRIC_KIND_{self._kind.name} does not support {name}"
            raise TritonModelException(f"Failed to {operation} metric value: {text}")


class _Family:
    """The metrics of one name, while a MetricFamily of this worker refers to it."""

    def __init__(self, server: ServerProxy, name: str, description: str, kind: MetricKind) -> None:
        self.server = server
        self.name = name
        self.description = description
        self.kind = kind
        self.metrics: dict[tuple[tuple[str, str], ...], Metric] = {}

    def __del__(self) -> None:
        for metric in self.metrics.values():
            metric.deleted = True
        message: dict[str, Any] = {"family": self.name, "kind": self.kind.value, "help": self.description}
        self.server.queue_message(METRIC, 0, message | {"labels": {}, "buckets": [], "do": "drop family", "value": 0.0})


class MetricFamily:
    """The metrics of one name. Families of the same name share their state, and so do their metrics of the same labels.

    Raises: TritonModelException for an invalid name, or one that a family of another kind has.
    """

    COUNTER: ClassVar[MetricKind] = MetricKind.COUNTER
    GAUGE: ClassVar[MetricKind] = MetricKind.GAUGE
    HISTOGRAM: ClassVar[MetricKind] = MetricKind.HISTOGRAM
    _server: ClassVar[ServerProxy]

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        if not isinstance(kind, MetricKind):
            raise TypeError(f"kind: expected MetricFamily.COUNTER, GAUGE or HISTOGRAM, got {kind!r}")
        if not METRIC_NAME.match(name):
            raise TritonModelException(f"Error when creating MetricFamily: invalid metric name '{name}'")
        server = self._server
        server.start_sender()
        with server.creation_lock:
            family = server.families.get(name)
            if family is None:
                family = server.families[name] = _Family(server, name, description, kind)
        if family.kind is not kind:
            text = f"'{name}' already exists as a {family.kind.value}, not as a {kind.value}"
            raise TritonModelException(f"Error when creating MetricFamily: {text}")
        self._family: _Family = family

    def Metric(self, labels: dict[str, str] | None = None, buckets: list[float] | None = None) -> Metric:  # noqa: N802
        """Make a metric. Raises: TritonModelException for invalid labels or buckets."""
        labels = labels or {}
        for key, value in labels.items():
            pair: tuple[Any, Any] = key, value
            if not all(isinstance(each, str) for each in pair) or not LABEL_NAME.match(key):
                raise TritonModelException(f"Error when creating Metric: invalid label {key!r}: {value!r}")
        if (buckets is not None) is not (self._family.kind is MetricKind.HISTOGRAM):
            raise TritonModelException(
                "Error when creating Metric: a histogram requires buckets, and other kinds do not accept them"
            )
        bounds = [float(bound) for bound in buckets or ()]
        if bounds != sorted(set(bounds)) or any(map(math.isnan, bounds)):
            raise TritonModelException("Error when creating Metric: buckets must be in ascending order")
        bounds = [bound for bound in bounds if math.isfinite(bound)]  # the infinite bucket always exists
        ordered = tuple(sorted(labels.items()))
        with self._server.creation_lock:
            if ordered not in self._family.metrics:
                self._family.metrics[ordered] = Metric(self._family, labels, bounds)
            return self._family.metrics[ordered]


class LogLevel(enum.Enum):
    """The level of a log line."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    VERBOSE = "verbose"


class Logger:
    """The server's log. All methods are class methods."""

    LogLevel: ClassVar[Any] = LogLevel
    INFO: ClassVar[LogLevel] = LogLevel.INFO
    WARNING: ClassVar[LogLevel] = LogLevel.WARNING
    ERROR: ClassVar[LogLevel] = LogLevel.ERROR
    VERBOSE: ClassVar[LogLevel] = LogLevel.VERBOSE
    _server: ClassVar[ServerProxy]

    @classmethod
    def log(cls, message: str | bytes, level: LogLevel = LogLevel.INFO) -> None:
        """Write a line, with the caller's file and line number."""
        if not isinstance(level, LogLevel):
            raise TypeError(f"level: expected one of Logger's, got {type(level)}")
        cls._write(message, level)

    @classmethod
    def log_info(cls, message: str | bytes) -> None:
        cls._write(message, LogLevel.INFO)

    @classmethod
    def log_warn(cls, message: str | bytes) -> None:
        cls._write(message, LogLevel.WARNING)

    @classmethod
    def log_error(cls, message: str | bytes) -> None:
        cls._write(message, LogLevel.ERROR)

    @classmethod
    def log_verbose(cls, message: str | bytes) -> None:
        cls._write(message, LogLevel.VERBOSE)

    @classmethod
    def _write(cls, message: str | bytes, level: LogLevel) -> None:
        text = as_text("the message of a line", message)
        caller = sys._getframe(2)  # noqa: SLF001 - as logging does
        cls._server.log(level.value, text, caller.f_code.co_filename, caller.f_lineno)
