"""Options: those of `deepaas-run`, each defined once. Read by command.py and cli.py.

Source: deepaas 2.6.0, config.py and cmd/run.py, and 2.1.0, for options that its images use; oslo.log's options;
oslo.config's types.py for valid values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.server.settings import SettingError

VERSION = "2.6.0"
"""The version of the original that is reported."""
_BOOLEANS = {
    **dict.fromkeys(("true", "1", "on", "yes"), True),
    **dict.fromkeys(("false", "0", "off", "no"), False),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Option:
    """One option. `name` is used in files and variables, `flag_name` on the command line."""

    name: str
    default: Any
    help: str
    kind: str = "String"
    convert: Callable[[str], Any] = str
    aliases: tuple[str, ...] = ()

    @property
    def flag_name(self) -> str:
        """The name in the form of a flag."""
        return self.name.replace("_", "-")

    @property
    def unit(self) -> str:
        """The placeholder of the value in the help text."""
        return self.name.upper()

    def read(self, text: str) -> Any:
        """Parse a value. Raises: SettingError."""
        try:
            return self.convert(text)
        except (ValueError, KeyError):
            raise SettingError(f"argument --{self.name}: Invalid {self.kind} value: {text}") from None


def _number(text: str, minimum: int = 0, maximum: float = float("inf")) -> int:
    number = int(text)
    if not minimum <= number <= maximum:
        raise ValueError(number)
    return number


def _flag(name: str, default: bool, text: str, *aliases: str) -> Option:
    return Option(name, default, text, "Boolean", lambda text: _BOOLEANS[text.lower()], aliases)


OPTIONS = (
    Option("listen_ip", "127.0.0.1", "address to listen on (127.0.0.1)"),
    Option(
        "listen_port",
        5000,
        "port to listen on (5000); 0: any free port",
        "Port(min=0, max=65535)",
        lambda text: _number(text, maximum=65535),
    ),
    Option("base_path", "", "prefix of all paths, such as /deepaas"),
    Option("model_name", "", "the model to serve (DEEPAAS_V2_MODEL; default: all)"),
    _flag("train_endpoint", True, "serve train/"),
    _flag("predict_endpoint", True, "serve predict/"),
    _flag("doc_endpoint", True, "serve the page /api"),
    _flag("debug_endpoint", False, "show what models print at /v2/debug/"),
    _flag("warm", True, "call a model's `warm` before it is served"),
    Option(
        "workers",
        1,
        "processes per model (1)",
        "Integer(min=1, max=256)",
        lambda text: _number(text, 1, 256),
        ("-p",),
    ),
    Option("client_max_size", 0, "maximum bytes of a request; 0: unlimited (0)", "Integer(min=0)", _number),
    _flag("openwhisk_detect", False, "has no effect: for releases before 2.2", "-w"),
    _flag("debug", False, "log more", "-d"),
    _flag("use_json", False, "log JSON"),
    Option("log_config_append", "", "has no effect", aliases=("--log-config", "--log_config")),
    Option("log_date_format", "", "has no effect"),
    Option("log_file", "", "has no effect: logs go to stderr", aliases=("--logfile",)),
    Option("log_dir", "", "has no effect: logs go to stderr", aliases=("--logdir",)),
    _flag("watch_log_file", False, "has no effect: logs go to stderr"),
    _flag("use_syslog", False, "has no effect: logs go to stderr"),
    _flag("use_journal", False, "has no effect: logs go to stderr"),
    Option("syslog_log_facility", "", "has no effect: logs go to stderr"),
)
BY_NAME = {option.name: option for option in OPTIONS}
