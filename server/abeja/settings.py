"""AbejaSettings: the part of Settings for ABEJA handlers."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.server.options.setting import setting

GROUP = "ABEJA"


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class AbejaSettings:
    """How a handler is served."""

    abeja_handler: str = setting(
        "", GROUP, "The handler, `module:function`; empty: as HANDLER in the environment says, otherwise main:handler.",
        unit="MODULE:NAME",
    )  # fmt: skip
    abeja_health_port: int = setting(
        5001, GROUP, "Port that answers /health_check, and everything that is Penstock's own, at any time; 0: one that "
        "the system chooses.", bounds=(0, 65535), unit="PORT",
    )  # fmt: skip
    abeja_workers: int = setting(
        1, GROUP, "How many processes run the handler, each one call at a time.", unit="processes", bounds=(1, 256)
    )
    abeja_install: bool = setting(
        True, GROUP, "Install what Pipfile or requirements.txt name before the handler is imported, in an environment "
        "of its own. Off: the handler runs with what there is.",
    )  # fmt: skip
    abeja_interpreter: str = setting("", GROUP, "The Python that runs the handler; empty: the server's.", unit="path")
    abeja_strict: bool = setting(
        False, GROUP, "Answer as the original did also where it was wrong: `bytes` are sent as the decimal digits of "
        "each (docs/abeja.md has the list).",
    )  # fmt: skip
    abeja_strip_headers: tuple[str, ...] = setting(
        ("authorization",), GROUP, "A header of requests that a handler is not shown.", unit="NAME"
    )
    abeja_timeout_secs: float = setting(
        0.0, GROUP, "How long a handler may take for a call before its process is ended; 0: any time.",
        unit="seconds", bounds=(0.0, 86400.0),
    )  # fmt: skip
