"""Settings: every setting of a server, defined once.

Flags, environment variables, the keys of the settings file, the help texts and docs/settings.md are all generated from
the fields of `Settings`. Called by the command line; the composition root reads the result.
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
from .abeja.settings import AbejaSettings
from .deepaas.settings import DeepaasSettings
from .options.backend_config import ONNX, default_rows
from .options.backend_config import parse as parse_backend
from .options.cloud_settings import CloudSettings, parse_range, settings_from_cloud
from .options.dialect_settings import DialectSettings, dialect_conflict
from .options.gpu_settings import GpuSettings, parse_devices, parse_limits
from .options.grpc_settings import GrpcSettings
from .options.http_settings import HttpSettings
from .options.metrics_config import parse as parse_metrics
from .options.model_settings import ModelSettings
from .options.observability_settings import ObservabilitySettings
from .options.process_settings import ProcessSettings
from .options.setting import FALSE_WORDS, PREFIX, TRUE_WORDS, Setting, shown
from .options.sharing import parse_cache, parse_host_policies, parse_resources
from .restricted import GRPC_PREFIX, RestrictedApis
from .tracing.config import parse as parse_tracing
from .v2.forwarding import Forwarding

CONFIG_NAME = PREFIX + "CONFIG"

# Variables that Kubernetes injects into every pod for a Service called "penstock" or "penstock-...". They are ignored.
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")
_SERVICE_VALUE = re.compile(r"(tcp|udp|sctp)://")


class SettingError(ValueError):
    """An invalid setting. The message says where it was given, what was given and what was expected."""


# Parsers of the settings that hold rules. Settings keeps the text, which is parsed again where it is used.
_RULE_PARSERS: dict[str, Callable[[Any], object]] = {
    "trace_config": parse_tracing,
    "http_restricted_api": RestrictedApis.parse,
    "grpc_restricted_protocol": partial(RestrictedApis.parse, prefix=GRPC_PREFIX),
    "metrics_config": parse_metrics,
    "rate_limit_resource": parse_resources,
    "host_policy": parse_host_policies,
    "backend_config": parse_backend,
    "cache_config": parse_cache,
    "chaos": chaos.parse,
    "http_header_forward_pattern": Forwarding.of,
    "grpc_header_forward_pattern": Forwarding.of,
    "sagemaker_safe_port_range": parse_range,
    "default_device": parse_devices,
    "model_load_gpu_limit": parse_limits,
}


@dataclass(frozen=True, kw_only=True)
class Settings(
    ProcessSettings,
    CloudSettings,
    DialectSettings,
    AbejaSettings,
    DeepaasSettings,
    ObservabilitySettings,
    GrpcSettings,
    HttpSettings,
    GpuSettings,
    ModelSettings,
):
    """The settings of one server, checked. Names are Triton's where the meaning is the same.

    The base classes are independent of each other. A dataclass lists the fields of its last base first, which is the
    order of the page.
    """

    def __post_init__(self) -> None:
        """Parse the rules now, so that an invalid one prevents startup."""
        for name, parse in _RULE_PARSERS.items():
            try:
                parse(getattr(self, name))
            except ValueError as error:
                raise SettingError(f"--{name.replace('_', '-')}: {error}") from None
        fronts = self.http_workers > 0
        conflict = chaos.conflict(self.chaos, allowed=self.allow_chaos, fronts=fronts)
        if (
            conflict := conflict
            or dialect_conflict(self.dialect, fronts=fronts)
            or self.clouds_conflict(self.dialect, fronts=fronts)
        ):
            raise SettingError(conflict)

    @property
    def completed_max_batch_size(self) -> int:
        """The max_batch_size of a model whose configuration omits it and whose graph has a batch dimension."""
        return default_rows(self.backend_config, ONNX, self.default_max_batch_size)


def known_settings() -> Iterator[Setting]:
    """Yield every setting, in the order of the page."""
    groups = list(dict.fromkeys(item.metadata["group"] for item in fields(Settings)))
    for item in sorted(fields(Settings), key=lambda item: groups.index(item.metadata["group"])):
        yield Setting(name=item.name, default=item.default, **item.metadata)


def resolve(flags: Mapping[str, str | Sequence[str]], environ: Mapping[str, str]) -> Settings:
    """Make the settings. Precedence: flags, environment, file, a cloud's environment, default.

    `flags` holds the texts from the command line by field name; "config" names the file.
    Raises: SettingError.
    """
    settings = {item.name: item for item in known_settings()}
    texts = _from_environment(settings, environ)
    config = flags.get("config", texts.pop("config", None))
    values = _from_file(settings, Path(str(config))) if config else {}
    values.update({name: _parse_text(settings[name], text, settings[name].environment) for name, text in texts.items()})
    for name, text in flags.items():
        if name != "config":
            values[name] = _parse_text(settings[name], text, settings[name].flag)
    cloud_texts = settings_from_cloud(environ, values.get("dialect", settings["dialect"].default))
    cloud_values = {
        name: _parse_text(settings[name], text, variable)
        for name, (text, variable) in cloud_texts.items()
        if name not in values
    }
    return Settings(**cloud_values, **values)


def _from_environment(settings: Mapping[str, Setting], environ: Mapping[str, str]) -> dict[str, str]:
    texts = {}
    for name, text in environ.items():
        if not name.startswith(PREFIX) or _SERVICE_LINK.search(name):
            continue
        key = name.removeprefix(PREFIX).lower()
        if name.endswith("_PORT") and _SERVICE_VALUE.match(text):
            continue
        if name != CONFIG_NAME and (key not in settings or name != settings[key].environment):
            raise SettingError(
                f"{name}: no such setting{nearest(name.upper(), [i.environment for i in settings.values()])}"
            )
        texts[key] = text
    return texts


def _from_file(settings: Mapping[str, Setting], path: Path) -> dict[str, Any]:
    import tomllib  # imported only if a file is given: takes 10 ms

    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SettingError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, which gives the position, and UnicodeDecodeError
        raise SettingError(f"{path}: {error}") from error
    values = {}
    for name, value in table.items():
        if name not in settings:
            raise SettingError(f"{path}: no such setting '{name}'{nearest(name, settings)}")
        values[name] = _check_value(settings[name], value, f"{path}: {name}")
    if "model_repository" in values:
        paths = values["model_repository"]
        values["model_repository"] = tuple(each if "://" in each else str(path.parent / each) for each in paths)
    return values


def _parse_text(setting: Setting, text: str | Sequence[str], source: str) -> Any:
    """Convert the text of a flag or an environment variable to a value."""
    if isinstance(setting.default, tuple):
        # rules may contain colons, and URLs do
        separator = "\n" if setting.unit == "RULE" or "://" in text else os.pathsep
        parts = text.split(separator) if isinstance(text, str) else text
        return tuple(part for part in parts if part)
    word = str(text).strip()
    value: Any = word
    try:
        if isinstance(setting.default, bool):
            value = {**dict.fromkeys(TRUE_WORDS, True), **dict.fromkeys(FALSE_WORDS, False)}[word.lower()]
        elif setting.unit == "level":
            value = int({"true": "1", "false": "0"}.get(word.lower(), word))  # Triton's --log-verbose accepts either
        elif isinstance(setting.default, (int, float)):
            value = type(setting.default)(word)
        elif setting.choices:
            value = next((choice for choice in setting.choices if choice.lower() == word.lower()), word)
    except (KeyError, ValueError):
        raise _invalid(setting, text, source) from None
    return _check_value(setting, value, source)


def _check_value(setting: Setting, value: Any, source: str) -> Any:
    """Check type and bounds. An integer is accepted for a float, and a single path for a list."""
    kind = type(setting.default)
    if kind is float and type(value) is int:
        with suppress(OverflowError):
            value = float(value)
    if kind is tuple:
        value = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
        if isinstance(value, tuple) and all(isinstance(entry, str) for entry in value):
            return value
    is_valid = type(value) is kind and kind is not tuple
    if is_valid and setting.choices:
        is_valid = value in setting.choices
    if is_valid and setting.bounds:
        is_valid = setting.bounds[0] <= value <= setting.bounds[1]  # false for nan and infinity
    if not is_valid:
        raise _invalid(setting, value, source)
    return value


def _invalid(setting: Setting, value: object, source: str) -> SettingError:
    value_text = (
        "a number of thousands of digits"  # repr fails for such an integer, which a file may contain in hexadecimal
    )
    with suppress(ValueError):
        value_text = repr(value)
    return SettingError(f"{source} must be {setting.expected}, not {value_text}")


def nearest(name: str, names: Iterable[str]) -> str:
    """Suggest the one of `names` that was probably meant, or return ""."""
    import difflib  # only on the way to an error

    found = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean '{found[0]}'?" if found else ""


_PAGE_HEAD = """\
# Settings

Generated from `server/settings.py` by `python -m penstock.server.settings > docs/settings.md`; do not edit.

The value of a setting comes from the first of these that has it: its flag, its environment variable, the settings file,
a cloud's environment ([clouds](clouds.md)), its default. The settings file is TOML and is named by `--config FILE` or
`PENSTOCK_CONFIG`. Its keys are the flag names with underscores (`http_port = 8000`), and paths in it are relative to
the file. An unknown name is an error.

Booleans are `true`, `on`, `1`, `false`, `off` or `0`; a boolean flag without a value means true. Keywords are
case-insensitive in flags and in the environment. In an environment variable, paths are separated by `:`, or by newlines
if one of them is a URL; rules are separated by newlines.

On SIGTERM or SIGINT the server stops reporting ready, accepts connections for `--drain-delay-secs` more, finishes the
accepted requests and exits with status 0. A second signal, at least 0.3 s later, ends it immediately with status 1. See
[reliability.md](reliability.md#the-end-of-a-server).
"""
_TABLE_HEAD = ("| flag | environment | default | value | meaning |", "|---|---|---|---|---|")


def page() -> str:
    """Return the text of docs/settings.md."""
    lines = [_PAGE_HEAD.rstrip("\n")]
    group = ""
    for item in known_settings():
        if item.group != group:
            group = item.group
            lines += ["", f"## {group}", "", *_TABLE_HEAD]
        value = item.expected + (f", {item.unit}" if item.unit else "")
        lines.append(
            f"| `{item.flag}` | `{item.environment}` | {shown(item.default) or 'none'} | {value} | {item.text} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
