"""DialectSettings: the format of what is served.

Settings inherits them. Read by the composition root.
"""

from __future__ import annotations

from dataclasses import dataclass

from .setting import setting

DIALECTS = ("triton", "cortex", "seldon", "deepaas", "abeja")


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class DialectSettings:
    """What the PATHs hold if they are not model repositories."""

    dialect: str = setting(
        "triton", "Dialects", "Format of the PATHs. triton: model repositories. cortex: project folders with a "
        "cortex.yaml, served with Cortex's API (docs/cortex.md). seldon: a Seldon Core component, or a graph of them "
        "(docs/seldon.md). deepaas: DEEPaaS models, each `name=package.module[:attr]`, or the installed ones "
        "(docs/deepaas.md). abeja: the folder of an ABEJA handler (docs/abeja.md).", choices=DIALECTS,
    )  # fmt: skip
    s3_root: str = setting(
        "", "Dialects", "Folder that stands in for S3: `s3://bucket/key` is read from `bucket/key` in it. Default: "
        "models at S3 addresses are downloaded, which requires s3fs.", unit="path",
    )  # fmt: skip
    seldon_component: str = setting(
        "", "Dialects", "The Seldon component to serve, `Name` or `package.module.Class`. Default: determined from the "
        "folder (docs/seldon.md).", unit="NAME",
    )  # fmt: skip
    seldon_parameters: str = setting(
        "", "Dialects", 'Constructor parameters of the component, a list of `{"name", "value", "type"}`. Default: '
        "PREDICTIVE_UNIT_PARAMETERS from the environment.", unit="JSON",
    )  # fmt: skip
    seldon_strict: bool = setting(
        True, "Dialects", "Reproduce the answers of seldon-core 1.17.1 even where they were wrong. docs/seldon.md "
        "lists what changes when this is off.",
    )  # fmt: skip
    seldon_batching: bool = setting(
        False, "Dialects", "Let requests to a component's `predict` share a call where that does not change the "
        "answers (docs/seldon.md).",
    )  # fmt: skip
    seldon_workers: int = setting(
        1, "Dialects", "Number of processes per component, each with its own copy of it.",
        unit="processes", bounds=(1, 256),
    )  # fmt: skip
    seldon_max_requests: int = setting(
        0, "Dialects", "Replace a component's process after this many calls, to contain memory leaks; 0: never.",
        unit="calls", bounds=(0, 2**31 - 1),
    )  # fmt: skip
    seldon_max_requests_jitter: int = setting(
        0, "Dialects", "Maximum random number of calls added to --seldon-max-requests, so that processes are not all "
        "replaced at once.", unit="calls", bounds=(0, 2**31 - 1),
    )  # fmt: skip
    seldon_timeout_secs: float = setting(
        0.0, "Dialects", "Maximum duration of a component call; its process is ended after that. 0: unlimited.",
        unit="seconds", bounds=(0.0, 86400.0),
    )  # fmt: skip
    seldon_requirements: str = setting(
        "", "Dialects", "Packages for the component: a requirements.txt, a Pipfile or a packed environment. Default: "
        "the server's own packages.", unit="path",
    )  # fmt: skip
    seldon_interpreter: str = setting(
        "", "Dialects", "Python interpreter that runs the component. Default: the server's.", unit="path"
    )


def dialect_conflict(dialect: str, *, fronts: bool) -> str:
    """Say what a dialect does not support of what was requested, or "". `fronts`: --http-workers was given."""
    if dialect == "cortex" and fronts:
        return "--http-workers cannot be used with --dialect cortex: Cortex projects are served by one process"
    if dialect == "seldon" and fronts:
        return "--http-workers cannot be used with --dialect seldon: use --seldon-workers instead"
    if dialect in ("deepaas", "abeja") and fronts:
        return f"--http-workers cannot be used with --dialect {dialect}: use --{dialect}-workers instead"
    return ""
