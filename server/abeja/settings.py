"""AbejaSettings: the settings of ABEJA handlers. Settings inherits them."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.server.options.setting import setting

GROUP = "ABEJA"


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class AbejaSettings:
    """How an ABEJA handler is served."""

    abeja_handler: str = setting(
        "", GROUP, "The handler, as `module:function`. Default: HANDLER from the environment if set, otherwise "
        "main:handler.", unit="MODULE:NAME",
    )  # fmt: skip
    abeja_health_port: int = setting(
        5001, GROUP, "Port that always serves /health_check and Penstock's own endpoints; 0 lets the system choose "
        "one.", bounds=(0, 65535), unit="PORT",
    )  # fmt: skip
    abeja_workers: int = setting(
        1, GROUP, "Number of processes that run the handler, one call at a time each.",
        unit="processes", bounds=(1, 256),
    )  # fmt: skip
    abeja_install: bool = setting(
        True, GROUP, "Before importing the handler, install the packages in its Pipfile or requirements.txt into a "
        "separate environment. Off: the handler runs with the installed packages.",
    )  # fmt: skip
    abeja_interpreter: str = setting(
        "", GROUP, "Python interpreter that runs the handler. Default: the server's.", unit="path"
    )
    abeja_strict: bool = setting(
        False, GROUP, "Reproduce the original's answers even where they were wrong: `bytes` are sent as the decimal "
        "digits of each byte (docs/abeja.md has the list).",
    )  # fmt: skip
    abeja_strip_headers: tuple[str, ...] = setting(
        ("authorization",), GROUP, "A request header to hide from the handler. Repeatable.", unit="NAME"
    )
    abeja_timeout_secs: float = setting(
        0.0, GROUP, "Maximum duration of a handler call; its process is ended after that. 0: unlimited.",
        unit="seconds", bounds=(0.0, 86400.0),
    )  # fmt: skip
