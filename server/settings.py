"""Settings: everything a server can be told, each written once.

Flags, environment names, the keys of the settings file, the help texts and docs/settings.md are all made from the
fields of `Settings`. Called by the command line; the composition root reads the result.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from . import chaos
from .http.limits import Limits
from .options.backend_config import ONNX, rows_of
from .options.backend_config import parse as parse_backend
from .options.cache_config import parse as parse_cache
from .options.cloud_settings import CLOUD_RULES, said_by_clouds
from .options.dialect_settings import lacks
from .options.gpu_settings import GPU_RULES
from .options.metrics_config import parse as parse_metrics
from .options.process_settings import ProcessSettings
from .options.setting import COUNT, FALSE_WORDS, PORTS, PREFIX, SECONDS, TRUE_WORDS, Setting, setting, shown
from .options.sharing import parse_host_policies, parse_resources
from .restricted import GRPC_PREFIX, Restricted
from .tracing.config import parse as parse_tracing
from .v2.forwarding import Forwarding

CONFIG_NAME = PREFIX + "CONFIG"

# What Kubernetes injects into every pod for a Service called "penstock" or "penstock-...". Not meant for us.
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")
_SERVICE_VALUE = re.compile(r"(tcp|udp|sctp)://")
_LIMITS = Limits()
_FIRST_GROUPS = ("Models", "GPU", "HTTP", "gRPC")
"""The order of the page; the others follow as they are stated."""


class SettingError(ValueError):
    """A setting that cannot be used: where it was given, what was given, what was wanted."""


# What reads the settings that are rules. They are read again where they are used: what is kept is the text.
_RULES: dict[str, Callable[[Any], object]] = {
    "trace_config": parse_tracing,
    "http_restricted_api": Restricted.parse,
    "grpc_restricted_protocol": partial(Restricted.parse, prefix=GRPC_PREFIX),
    "metrics_config": parse_metrics,
    "rate_limit_resource": parse_resources,
    "host_policy": parse_host_policies,
    "backend_config": parse_backend,
    "cache_config": parse_cache,
    "chaos": chaos.parse,
    "http_header_forward_pattern": Forwarding.of,
    "grpc_header_forward_pattern": Forwarding.of,
    **CLOUD_RULES,
    **GPU_RULES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(ProcessSettings):
    """One server's settings, checked. Names are Triton's where the meaning is the same."""

    model_repository: tuple[str, ...] = setting(
        (), "Models",
        "What to serve: a model repository, here or at a URL, or a single .onnx file or SavedModel. Repeatable; the "
        "same as PATH arguments.",
        unit="path",
    )  # fmt: skip
    model_load_thread_count: int = setting(
        4, "Models", "How many models load at the same time.", unit="models", bounds=(1, 256)
    )
    default_max_batch_size: int = setting(
        64, "Models", "The max_batch_size of a model whose configuration does not say and whose graph has room for "
        "rows (Triton: 4, in --backend-config).", unit="rows", bounds=(1, 2**20),
    )  # fmt: skip
    model_control_mode: str = setting(
        "none", "Models", "How models come and go. none: as they are found at start. poll: as their files change. "
        "explicit: as load and unload requests say, and only --load-model at start.",
        choices=("none", "poll", "explicit"),
    )  # fmt: skip
    load_model: tuple[str, ...] = setting(
        (), "Models", "A model to load at start in mode explicit; `*` for all. Repeatable.", unit="NAME"
    )
    repository_poll_secs: float = setting(
        15.0, "Models", "How often the files are looked at in mode poll, at most 20 times a second. 0: never.",
        unit="seconds", bounds=(0.0, 86400.0),
    )  # fmt: skip
    model_load_retry_count: int = setting(
        0, "Models", "How often a version that does not load is tried again.", unit="times", bounds=(0, 1000)
    )
    model_config_name: str = setting(
        "", "Models", "A model's configs/NAME.pbtxt, where there is one, stands in for its config.pbtxt.", unit="NAME"
    )
    exit_on_error: bool = setting(
        False, "Models", "Stop the server when a model cannot be served at start. Off here (Triton: on): a broken "
        "model is UNAVAILABLE and does not stop the others.",
    )  # fmt: skip
    strict_readiness: bool = setting(
        True, "Models", "Ready only when every model is ready. Off: ready as soon as loading has ended."
    )
    id: str = setting(
        "triton", "Models", "The name in the server metadata. Triton's by default: its example clients demand it."
    )

    allow_http: bool = setting(True, "HTTP", "Serve the v2 protocol over HTTP.")
    http_address: str = setting(
        "127.0.0.1", "HTTP", "Address to listen on. This machine only by default (Triton: 0.0.0.0, all addresses).",
        unit="address",
    )  # fmt: skip
    http_port: int = setting(
        8000, "HTTP", "Port to listen on; 0 lets the system choose.", unit="TCP port", bounds=PORTS
    )
    http_max_input_size: int = setting(
        _LIMITS.max_body_bytes, "HTTP", "Largest request body, as sent and after decompression.",
        unit="bytes", bounds=(1, 2**40),
    )  # fmt: skip
    http_max_connections: int = setting(
        _LIMITS.max_connections, "HTTP", "Most connections open at once; more are refused.",
        unit="connections", bounds=COUNT,
    )  # fmt: skip
    http_max_header_bytes: int = setting(
        _LIMITS.max_header_bytes, "HTTP", "Largest request line and headers together.", unit="bytes", bounds=COUNT
    )
    http_max_headers: int = setting(
        _LIMITS.max_headers, "HTTP", "Most headers in one request.", unit="headers", bounds=COUNT
    )
    http_max_json_depth: int = setting(
        _LIMITS.max_json_depth, "HTTP", "Deepest nesting of request JSON.", unit="levels", bounds=(1, 1024)
    )
    http_header_forward_pattern: str = setting(
        "", "HTTP", "Header fields whose names match become parameters of the request. A regular expression, searched "
        "for in any case.", unit="PATTERN",
    )  # fmt: skip
    grpc_header_forward_pattern: str = setting("", "gRPC", "The same for metadata of calls.", unit="PATTERN")
    allow_client_shm: bool = setting(
        False, "Shared memory", "Let clients register system and CUDA shared memory, and place tensors there. Whoever "
        "reaches the server can then name any object in /dev/shm that it may open.",
    )  # fmt: skip
    http_max_chunks: int = setting(
        _LIMITS.max_chunks, "HTTP", "Most chunks in one chunked request body.", unit="chunks", bounds=COUNT
    )
    http_receive_timeout_secs: float = setting(
        _LIMITS.receive_timeout_s, "HTTP", "A request must have arrived whole this long after its first byte.",
        unit="seconds", bounds=SECONDS,
    )  # fmt: skip
    http_idle_timeout_secs: float = setting(
        _LIMITS.idle_timeout_s, "HTTP", "A connection without a request is closed after this.",
        unit="seconds", bounds=SECONDS,
    )  # fmt: skip
    http_write_timeout_secs: float = setting(
        _LIMITS.write_timeout_s, "HTTP", "A client that takes nothing of its answer for this long is dropped.",
        unit="seconds", bounds=SECONDS,
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Read the rules now, so that a mistake in one stops the start."""
        for name, read in _RULES.items():
            try:
                read(getattr(self, name))
            except ValueError as error:
                raise SettingError(f"--{name.replace('_', '-')}: {error}") from None
        fronts = self.http_workers > 0
        lacking = chaos.lacks(self.chaos, allowed=self.allow_chaos, fronts=fronts)
        if lacking := lacking or lacks(self.dialect, fronts=fronts) or self.clouds_lack(fronts=fronts):
            raise SettingError(lacking)

    @property
    def completed_max_batch_size(self) -> int:
        """The max_batch_size of a model whose configuration does not say, where its graph has room for rows."""
        return rows_of(self.backend_config, ONNX, self.default_max_batch_size)

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


def known_settings() -> Iterator[Setting]:
    """Give every setting, in the order of the page."""
    groups = list(dict.fromkeys((*_FIRST_GROUPS, *(item.metadata["group"] for item in fields(Settings)))))
    for item in sorted(fields(Settings), key=lambda item: groups.index(item.metadata["group"])):
        yield Setting(name=item.name, default=item.default, **item.metadata)


def resolve(flags: Mapping[str, str | Sequence[str]], environ: Mapping[str, str]) -> Settings:
    """Make the settings: flags before environment before file before a cloud's environment before default.

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
    said = said_by_clouds(environ, values.get("dialect", known["dialect"].default))
    below = {name: _parsed(known[name], text, where) for name, (text, where) in said.items() if name not in values}
    return Settings(**below, **values)


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
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, which names the place, and UnicodeDecodeError
        raise SettingError(f"{path}: {error}") from error
    values = {}
    for name, value in table.items():
        if name not in known:
            raise SettingError(f"{path}: no such setting '{name}'{nearest(name, known)}")
        values[name] = _checked(known[name], value, f"{path}: {name}")
    if "model_repository" in values:
        given = values["model_repository"]
        values["model_repository"] = tuple(each if "://" in each else str(path.parent / each) for each in given)
    return values


def _parsed(known: Setting, text: str | Sequence[str], where: str) -> Any:
    """Make a value of what a flag or the environment gave."""
    if isinstance(known.default, tuple):
        # a rule may have a colon in it, and a URL has one
        separator = "\n" if known.unit == "RULE" or "://" in text else os.pathsep
        parts = text.split(separator) if isinstance(text, str) else text
        return tuple(part for part in parts if part)
    word = str(text).strip()
    value: Any = word
    try:
        if isinstance(known.default, bool):
            value = {**dict.fromkeys(TRUE_WORDS, True), **dict.fromkeys(FALSE_WORDS, False)}[word.lower()]
        elif known.unit == "level":
            value = int({"true": "1", "false": "0"}.get(word.lower(), word))  # Triton's --log-verbose takes either
        elif isinstance(known.default, (int, float)):
            value = type(known.default)(word)
        elif known.choices:
            value = next((choice for choice in known.choices if choice.lower() == word.lower()), word)
    except (KeyError, ValueError):
        raise _refused(known, text, where) from None
    return _checked(known, value, where)


def _checked(known: Setting, value: Any, where: str) -> Any:
    """Check type and bounds; a whole number is also a good float, and one path a list of one."""
    kind = type(known.default)
    if kind is float and type(value) is int:
        with suppress(OverflowError):
            value = float(value)
    if kind is tuple:
        value = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
        if isinstance(value, tuple) and all(isinstance(entry, str) for entry in value):
            return value
    good = type(value) is kind and kind is not tuple
    if good and known.choices:
        good = value in known.choices
    if good and known.bounds:
        good = known.bounds[0] <= value <= known.bounds[1]  # nan is not, nor infinity
    if not good:
        raise _refused(known, value, where)
    return value


def _refused(known: Setting, value: object, where: str) -> SettingError:
    given = "thousands of digits"  # of which Python writes none; a file may have them in hexadecimal
    with suppress(ValueError):
        given = repr(value)
    return SettingError(f"{where}: got {given}, wanted {known.wanted}")


def nearest(name: str, names: Iterable[str]) -> str:
    """Say which of `names` was probably meant, or nothing."""
    import difflib  # only on the way to an error

    found = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean '{found[0]}'?" if found else ""


_PAGE_HEAD = """\
# Settings

Made from `server/settings.py` by `python -m penstock.server.settings > docs/settings.md`; do not edit.

A setting is taken from the first of: its flag, its environment name, the settings file, what a cloud says
([clouds](clouds.md)), its default. The file is TOML, named by `--config FILE` or `PENSTOCK_CONFIG`; its keys are the
flags' names with underscores (`http_port = 8000`), and paths in it are relative to it. A name that is not on this page
is an error. Booleans are `true`, `on`, `1`, `false`, `off` or `0`; a boolean flag alone means true. In flags and the
environment words stand in any case; in the environment several paths are separated by `:`, or by line ends if one of
them is a URL, and several rules by line ends.

On SIGTERM or SIGINT the server stops being ready, turns away who connects after `--drain-delay-secs`, finishes what it
has accepted and exits with 0. A second signal, 0.3 s later or more, ends it at once with 1. See
[reliability.md](reliability.md#the-end-of-a-server).
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


if __name__ == "__main__":
    sys.stdout.write(page())
