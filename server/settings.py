"""Settings: everything a server can be told, each written once.

Flags, environment names, the keys of the settings file, the help texts and docs/settings.md are all made from the
fields of `Settings`. Called by the command line; the composition root reads the result.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .http.limits import Limits

PREFIX = "PENSTOCK_"
CONFIG_NAME = PREFIX + "CONFIG"
TRUE_WORDS = ("true", "1")
FALSE_WORDS = ("false", "0")

# What Kubernetes injects into every pod for a Service called "penstock" or "penstock-...". Not meant for us.
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")
_SERVICE_VALUE = re.compile(r"(tcp|udp|sctp)://")
_LIMITS = Limits()


class SettingError(ValueError):
    """A setting that cannot be used: where it was given, what was given, what was wanted."""


def _setting(
    default: Any, group: str, text: str, *, unit: str = "", bounds: tuple[float, float] | None = None,
    choices: tuple[str, ...] = (),
) -> Any:  # fmt: skip
    meta = {"group": group, "text": text, "unit": unit, "bounds": bounds, "choices": choices}
    return field(default=default, metadata=meta)


_PORTS = (0, 65535)
_SECONDS = (0.01, 86400.0)
_COUNT = (1, 2**31 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One server's settings, checked. Names are Triton's where the meaning is the same."""

    model_repository: tuple[str, ...] = _setting(
        (), "Models",
        "What to serve: a model repository or a single .onnx file. Repeatable; the same as PATH arguments.",
        unit="path",
    )  # fmt: skip
    model_load_thread_count: int = _setting(
        4, "Models", "How many models load at the same time.", unit="models", bounds=(1, 256)
    )
    default_max_batch_size: int = _setting(
        64, "Models", "The max_batch_size of a model whose configuration does not say and whose graph has room for "
        "rows (Triton: 4, in --backend-config).", unit="rows", bounds=(1, 2**20),
    )  # fmt: skip
    exit_on_error: bool = _setting(
        False, "Models", "Stop the server when a model cannot be served at start. Off here (Triton: on): a broken "
        "model is UNAVAILABLE and does not stop the others.",
    )  # fmt: skip
    strict_readiness: bool = _setting(
        True, "Models", "Ready only when every model is ready. Off: ready as soon as loading has ended."
    )
    id: str = _setting(
        "triton", "Models", "The name in the server metadata. Triton's by default: its example clients demand it."
    )

    allow_http: bool = _setting(True, "HTTP", "Serve the v2 protocol over HTTP.")
    http_address: str = _setting(
        "127.0.0.1", "HTTP", "Address to listen on. This machine only by default (Triton: 0.0.0.0, all addresses).",
        unit="address",
    )  # fmt: skip
    http_port: int = _setting(
        8000, "HTTP", "Port to listen on; 0 lets the system choose.", unit="TCP port", bounds=_PORTS
    )
    http_max_input_size: int = _setting(
        _LIMITS.max_body_bytes, "HTTP", "Largest request body, as sent and after decompression.",
        unit="bytes", bounds=(1, 2**40),
    )  # fmt: skip
    http_max_connections: int = _setting(
        _LIMITS.max_connections, "HTTP", "Most connections open at once; more are refused.",
        unit="connections", bounds=_COUNT,
    )  # fmt: skip
    http_max_header_bytes: int = _setting(
        _LIMITS.max_header_bytes, "HTTP", "Largest request line and headers together.", unit="bytes", bounds=_COUNT
    )
    http_max_headers: int = _setting(
        _LIMITS.max_headers, "HTTP", "Most headers in one request.", unit="headers", bounds=_COUNT
    )
    http_max_json_depth: int = _setting(
        _LIMITS.max_json_depth, "HTTP", "Deepest nesting of request JSON.", unit="levels", bounds=(1, 1024)
    )
    http_max_chunks: int = _setting(
        _LIMITS.max_chunks, "HTTP", "Most chunks in one chunked request body.", unit="chunks", bounds=_COUNT
    )
    http_receive_timeout_secs: float = _setting(
        _LIMITS.receive_timeout_s, "HTTP", "A request must have arrived whole this long after its first byte.",
        unit="seconds", bounds=_SECONDS,
    )  # fmt: skip
    http_idle_timeout_secs: float = _setting(
        _LIMITS.idle_timeout_s, "HTTP", "A connection without a request is closed after this.",
        unit="seconds", bounds=_SECONDS,
    )  # fmt: skip
    http_write_timeout_secs: float = _setting(
        _LIMITS.write_timeout_s, "HTTP", "A client that takes nothing of its answer for this long is dropped.",
        unit="seconds", bounds=_SECONDS,
    )  # fmt: skip

    allow_metrics: bool = _setting(True, "Metrics", "Serve metrics on a port of their own, beside the HTTP port.")
    metrics_address: str = _setting(
        "", "Metrics", "Address of the metrics port; empty: that of --http-address.", unit="address"
    )
    metrics_port: int = _setting(
        8002, "Metrics", "Port of the metrics; 0 lets the system choose.", unit="TCP port", bounds=_PORTS
    )

    exit_timeout_secs: float = _setting(
        30.0, "Stopping", "How long accepted requests may take to finish after SIGTERM or SIGINT. What is left then "
        "is dropped and the exit status is 1.",
        unit="seconds", bounds=(0.0, 86400.0),
    )  # fmt: skip
    drain_delay_secs: float = _setting(
        0.0, "Stopping", "How long to go on accepting after ready went false, for a load balancer to notice.",
        unit="seconds", bounds=(0.0, 86400.0),
    )  # fmt: skip

    log_format: str = _setting(
        "auto", "Logs", "One line of text or one JSON object per event; auto: text on a terminal, JSON otherwise.",
        choices=("auto", "text", "json"),
    )  # fmt: skip
    log_verbose: int = _setting(0, "Logs", "1 and above: log debug messages too.", unit="level", bounds=(0, 9))
    log_info: bool = _setting(True, "Logs", "Log informational messages.")
    log_warning: bool = _setting(True, "Logs", "Log warnings.")
    log_error: bool = _setting(True, "Logs", "Log errors.")
    access_log: bool = _setting(False, "Logs", "Log every HTTP request. Costs throughput.")

    def limits(self) -> Limits:
        """Give the fast lane's part."""
        return Limits(
            max_body_bytes=self.http_max_input_size,
            max_header_bytes=self.http_max_header_bytes,
            max_headers=self.http_max_headers,
            max_json_depth=self.http_max_json_depth,
            max_chunks=self.http_max_chunks,
            receive_timeout_s=self.http_receive_timeout_secs,
            idle_timeout_s=self.http_idle_timeout_secs,
            write_timeout_s=self.http_write_timeout_secs,
            max_connections=self.http_max_connections,
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """What is said about one setting: the field it fills, and all that is made from it."""

    name: str
    default: Any
    group: str
    text: str
    unit: str
    bounds: tuple[float, float] | None
    choices: tuple[str, ...]

    @property
    def flag(self) -> str:
        """The command-line flag."""
        return "--" + self.name.replace("_", "-")

    @property
    def environment(self) -> str:
        """The environment name."""
        return PREFIX + self.name.upper()

    @property
    def wanted(self) -> str:
        """What a value must look like, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if isinstance(self.default, bool):
            return "true or false"
        if self.bounds:
            kind = "a whole number" if isinstance(self.default, int) else "a number"
            return f"{kind} from {self.bounds[0]:.15g} to {self.bounds[1]:.15g}"
        return "a list of texts" if isinstance(self.default, tuple) else "a text"


def known_settings() -> Iterator[Setting]:
    """Give every setting, in the order of the page."""
    for item in fields(Settings):
        yield Setting(name=item.name, default=item.default, **item.metadata)


def resolve(flags: Mapping[str, str | Sequence[str]], environ: Mapping[str, str]) -> Settings:
    """Make the settings: flags before environment before file before default.

    `flags` holds what the command line gave, as texts by field name; "config" names the file.
    Raises: SettingError.
    """
    known = {item.name: item for item in known_settings()}
    given = _from_environment(known, environ)
    config = flags.get("config", given.pop("config", None))
    values = _from_file(known, Path(str(config))) if config else {}
    values.update({name: _parsed(known[name], text, known[name].environment) for name, text in given.items()})
    for name, text in flags.items():
        if name != "config":
            values[name] = _parsed(known[name], text, known[name].flag)
    return Settings(**values)


def _from_environment(known: Mapping[str, Setting], environ: Mapping[str, str]) -> dict[str, str]:
    given = {}
    for name, text in environ.items():
        if not name.startswith(PREFIX) or _SERVICE_LINK.search(name):
            continue
        key = name.removeprefix(PREFIX).lower()
        if name.endswith("_PORT") and _SERVICE_VALUE.match(text):
            continue
        if name != CONFIG_NAME and (key not in known or name != known[key].environment):
            raise SettingError(
                f"{name}: no such setting{nearest(name.upper(), [i.environment for i in known.values()])}"
            )
        given[key] = text
    return given


def _from_file(known: Mapping[str, Setting], path: Path) -> dict[str, Any]:
    import tomllib  # only when a file is given: 10 ms

    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SettingError(f"{path}: {error.strerror}") from error
    except ValueError as error:  # also TOMLDecodeError, which names line and column, and UnicodeDecodeError
        raise SettingError(f"{path}: {error}") from error
    values = {}
    for name, value in table.items():
        if name not in known:
            raise SettingError(f"{path}: no such setting '{name}'{nearest(name, known)}")
        values[name] = _checked(known[name], value, f"{path}: {name}")
    if "model_repository" in values:
        values["model_repository"] = tuple(str(path.parent / entry) for entry in values["model_repository"])
    return values


def _parsed(known: Setting, text: str | Sequence[str], where: str) -> Any:
    """Make a value of what a flag or the environment gave."""
    if isinstance(known.default, tuple):
        parts = text.split(os.pathsep) if isinstance(text, str) else text
        return tuple(part for part in parts if part)
    word = str(text).strip()
    value: Any = word
    try:
        if isinstance(known.default, bool):
            value = {**dict.fromkeys(TRUE_WORDS, True), **dict.fromkeys(FALSE_WORDS, False)}[word.lower()]
        elif isinstance(known.default, (int, float)):
            value = type(known.default)(word)
    except (KeyError, ValueError):
        raise _refused(known, text, where) from None
    return _checked(known, value, where)


def _checked(known: Setting, value: Any, where: str) -> Any:
    """Check type and bounds; a whole number is also a good float, and one path a list of one."""
    kind = type(known.default)
    if kind is float and type(value) is int:
        value = float(value)
    if kind is tuple:
        value = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
        if isinstance(value, tuple) and all(isinstance(entry, str) for entry in value):
            return value
    good = type(value) is kind and kind is not tuple
    if good and known.choices:
        good = value in known.choices
    if good and known.bounds:
        good = math.isfinite(value) and known.bounds[0] <= value <= known.bounds[1]
    if not good:
        raise _refused(known, value, where)
    return value


def _refused(known: Setting, value: object, where: str) -> SettingError:
    return SettingError(f"{where}: got {value!r}, wanted {known.wanted}")


def nearest(name: str, names: Iterable[str]) -> str:
    """Say which of `names` was probably meant, or nothing."""
    import difflib  # only on the way to an error

    found = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean '{found[0]}'?" if found else ""


_PAGE_HEAD = """\
# Settings

Made from `server/settings.py` by `python -m penstock.server.settings > docs/settings.md`; do not edit.

A setting is taken from the first of: its flag, its environment name, the settings file, its default. The file is TOML,
named by `--config FILE` or `PENSTOCK_CONFIG`; its keys are the flags' names with underscores (`http_port = 8000`), and
paths in it are relative to it. A name that is not on this page is an error. Booleans are `true`, `false`, `1` or `0`;
a boolean flag alone means true. In the environment several paths are separated by `:`.

On SIGTERM or SIGINT the server stops being ready, stops accepting after `--drain-delay-secs`, finishes what it has
accepted and exits with 0. A second signal, 0.3 s later or more, ends it at once with 1.
"""
_TABLE_HEAD = ("| flag | environment | default | value | meaning |", "|---|---|---|---|---|")


def page() -> str:
    """Write docs/settings.md."""
    lines = [_PAGE_HEAD.rstrip("\n")]
    group = ""
    for item in known_settings():
        if item.group != group:
            group = item.group
            lines += ["", f"## {group}", "", *_TABLE_HEAD]
        value = item.wanted + (f", {item.unit}" if item.unit else "")
        lines.append(
            f"| `{item.flag}` | `{item.environment}` | {shown(item.default) or 'none'} | {value} | {item.text} |"
        )
    return "\n".join(lines) + "\n"


def shown(value: object) -> str:
    """Write a default as a person would type it; nothing for none."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return f"{value:.15g}"
    return str(value or "")


if __name__ == "__main__":
    sys.stdout.write(page())
