"""TraceConfig: the values of --trace-config. Parsed with the settings, so that a mistake stops the start.

Source: Triton server, docs/user_guide/trace.md (names, defaults and forms), command_line_parser.cc (other accepted
values).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

TRITON, OPENTELEMETRY = "triton", "opentelemetry"
MODES = (TRITON, OPENTELEMETRY)
OFF, TIMESTAMPS, TENSORS = "OFF", "TIMESTAMPS", "TENSORS"
LEVELS = (TIMESTAMPS, TENSORS)
UINT32_MAX, INT32_MAX = 2**32 - 1, 2**31 - 1

# The accepted words, in any case; `min` and `max` are former levels.
_LEVELS_BY_WORD = dict.fromkeys(("true", "on", "min", "max", "timestamps"), TIMESTAMPS)
_LEVELS_BY_WORD |= {"tensors": TENSORS, "off": OFF, "false": OFF}
_FORM = "<setting>=<value> or <mode>,<setting>=<value>"
_COMMON_SETTINGS = ("level", "rate", "count", "mode")
_MODE_SETTINGS = {TRITON: ("file", "log-frequency"), OPENTELEMETRY: ("url", "resource")}
_BATCHING = {"bsp_max_queue_size": 2048, "bsp_schedule_delay": 5000, "bsp_max_export_batch_size": 512}


@dataclass(frozen=True, slots=True)
class Sampling:
    """Which requests of a model are traced: every `rate`-th, at most `count` of them, -1 for no limit.

    `level` is empty if tracing is off. `log_frequency` is how many traces go into one file; 0 puts all into one.
    """

    level: tuple[str, ...] = ()
    rate: int = 1000
    count: int = -1
    log_frequency: int = 0


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """All values of the flags. `url` is as given; `endpoint` is the address."""

    sampling: Sampling = Sampling()
    mode: str = TRITON
    file: str = ""
    url: str = "http://localhost:4318/v1/traces"
    resource: tuple[tuple[str, str], ...] = ()
    batching: tuple[tuple[str, int], ...] = tuple(_BATCHING.items())

    @property
    def endpoint(self) -> str:
        """The collector's URL; without a scheme, as Triton writes `localhost:4318/v1/traces`, http is used."""
        return self.url if "://" in self.url else f"http://{self.url}"

    def rejection_reason(self, sampling: Sampling) -> str:
        """Return why nothing could be traced with `sampling`; "" if it can, or if tracing is off."""
        if not sampling.level:
            return ""
        if self.mode == OPENTELEMETRY:
            return f"level {TENSORS} is not supported in mode {OPENTELEMETRY}" if TENSORS in sampling.level else ""
        if not sampling.rate:
            return "sample rate must be non-zero"
        return "" if self.file else "trace file name is not given"


def parse(entries: Iterable[str]) -> TraceConfig:
    """Parse the values of --trace-config.

    Raises: ValueError.
    """
    builder = _ConfigBuilder()
    for entry in entries:
        mode, comma, setting = entry.partition(",")
        if comma and "=" not in mode:
            name, value = _split_pair(entry, setting)
            builder.set_mode_setting(mode.lower(), name, value)
        else:
            builder.set_common(*_split_pair(entry, entry))
    config = builder.build()
    reason = config.rejection_reason(config.sampling)
    if reason:
        raise ValueError(reason)
    if config.mode == OPENTELEMETRY and not _has_exporter():
        raise ValueError("mode opentelemetry requires a package that is not installed: pip install 'penstock[otel]'")
    return config


def _has_exporter() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        return False


def _split_pair(entry: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"'{entry}' must have the form {_FORM}")
    return name.strip(), value.strip()


def parse_integer(name: str, text: str, low: int, high: int) -> int:
    """Parse an integer within bounds. Raises: ValueError."""
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"{name} must be a whole number, not '{text}'") from None
    if not low <= value <= high:
        raise ValueError(f"{name} must be a whole number from {low} to {high}, not {value}")
    return value


@dataclass
class _ConfigBuilder:
    """The values of the entries read so far."""

    level: list[str] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    resource: dict[str, str] = field(default_factory=dict)
    batching: dict[str, int] = field(default_factory=dict)

    def set_common(self, name: str, value: str) -> None:
        """Add a setting common to all modes."""
        if name == "level":
            level = _LEVELS_BY_WORD.get(value.lower())
            if level is None:
                raise ValueError(f"level must be one of {OFF}, {', '.join(LEVELS)}, not '{value}'")
            self.level.append(level)
        elif name == "mode":
            if value.lower() not in MODES:
                raise ValueError(f"mode must be one of {', '.join(MODES)}, not '{value}'")
            self.texts["mode"] = value.lower()
        elif name == "rate":
            self.numbers["rate"] = parse_integer(name, value, 0, UINT32_MAX)
        elif name == "count":
            self.numbers["count"] = parse_integer(name, value, -1, INT32_MAX)
        else:
            raise ValueError(f"unknown setting '{name}', known: {', '.join(_COMMON_SETTINGS)}, and those of each mode")

    def set_mode_setting(self, mode: str, name: str, value: str) -> None:
        """Add a setting of one mode."""
        if mode not in MODES:
            raise ValueError(f"unknown mode '{mode}', known: {', '.join(MODES)}")
        if mode == OPENTELEMETRY and name in _BATCHING:
            self.batching[name] = _parse_batching(name, name, value)
        elif name not in _MODE_SETTINGS[mode]:
            raise ValueError(f"unknown setting '{name}' of mode {mode}, known: {', '.join(_MODE_SETTINGS[mode])}")
        elif name == "log-frequency":
            self.numbers["log_frequency"] = parse_integer(name, value, 0, UINT32_MAX)
        elif name == "resource":
            key, attribute = _split_pair(f"{mode},{name}={value}", value)
            self.resource[key] = attribute
        else:
            self.texts[name] = _check_url(value) if name == "url" else value

    def build(self) -> TraceConfig:
        """Return the complete configuration."""
        if OFF in self.level and len(self.level) > 1:
            raise ValueError(f"level: {OFF} cannot be combined with other levels")
        level = tuple(name for name in LEVELS if name in self.level)
        batching = (
            _BATCHING
            | (_batching_from_environment() if self.texts.get("mode") == OPENTELEMETRY else {})
            | self.batching
        )
        return TraceConfig(
            sampling=Sampling(level, **self.numbers),
            resource=tuple(self.resource.items()),
            batching=tuple(batching.items()),
            **self.texts,
        )


def _parse_batching(name: str, label: str, text: str) -> int:
    """Parse a setting of span batches; only a delay may be 0."""
    return parse_integer(label, text, int(name != "bsp_schedule_delay"), INT32_MAX)


def _batching_from_environment() -> dict[str, int]:
    """Read the settings of span batches from OpenTelemetry's own environment variables."""
    variables = ((name, f"OTEL_{name.upper()}") for name in _BATCHING)
    return {
        name: _parse_batching(name, variable, os.environ[variable])
        for name, variable in variables
        if os.environ.get(variable)
    }


def _check_url(text: str) -> str:
    """Check a collector's URL."""
    parts = urlsplit(TraceConfig(url=text).endpoint)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"url must look like http://localhost:4318/v1/traces, not '{text}'")
    if parts.username or parts.password:
        # the settings can be read over the network
        raise ValueError("url must not contain a password: set a header in OTEL_EXPORTER_OTLP_HEADERS instead")
    return text
