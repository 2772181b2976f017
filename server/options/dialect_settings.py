"""DialectSettings: the part of the settings that says in which format what is served was written.

Settings has it. Read by the composition root.
"""

from __future__ import annotations

from dataclasses import dataclass

from .setting import setting

DIALECTS = ("triton", "cortex", "seldon", "deepaas", "abeja")


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class DialectSettings:
    """What the paths hold, if no model repositories."""

    dialect: str = setting(
        "triton", "Dialects", "What PATHs hold: triton, model repositories; cortex, project folders with a cortex.yaml "
        "(docs/cortex.md), whose clients are answered as Cortex did; seldon, a component of Seldon Core or a graph of "
        "them (docs/seldon.md); deepaas, models of DEEPaaS, each `name=package.module[:attr]`, or those that are "
        "installed (docs/deepaas.md); abeja, the folder of an ABEJA handler (docs/abeja.md).", choices=DIALECTS,
    )  # fmt: skip
    s3_root: str = setting(
        "", "Dialects", "Folder that stands for S3: `s3://bucket/key` is `bucket/key` in it; empty: models at such "
        "addresses are fetched, where s3fs is installed.", unit="path",
    )  # fmt: skip
    seldon_component: str = setting(
        "", "Dialects", "The Seldon component to serve, `Name` or `package.module.Class`; empty: as the folder says "
        "(docs/seldon.md).", unit="NAME",
    )  # fmt: skip
    seldon_parameters: str = setting(
        "", "Dialects", 'Its parameters, a list of `{"name", "value", "type"}`; empty: as PREDICTIVE_UNIT_PARAMETERS '
        "in the environment says.", unit="JSON",
    )  # fmt: skip
    seldon_strict: bool = setting(
        True, "Dialects", "Answer as seldon-core 1.17.1 did also where it was wrong. Off: docs/seldon.md has the list."
    )
    seldon_batching: bool = setting(
        False, "Dialects", "Let requests to a component's `predict` share a call, where answers stay the same "
        "(docs/seldon.md).",
    )  # fmt: skip
    seldon_workers: int = setting(
        1, "Dialects", "How many processes a component has, each with a copy of it.", unit="processes", bounds=(1, 256)
    )
    seldon_max_requests: int = setting(
        0, "Dialects", "After so many calls a component's process is ended and another takes its place, for those that "
        "leak memory; 0: never.", unit="calls", bounds=(0, 2**31 - 1),
    )  # fmt: skip
    seldon_max_requests_jitter: int = setting(
        0, "Dialects", "At most so many calls more, at random, so that processes do not end together.",
        unit="calls", bounds=(0, 2**31 - 1),
    )  # fmt: skip
    seldon_timeout_secs: float = setting(
        0.0, "Dialects", "How long a component may take for a call before its process is ended; 0: any time.",
        unit="seconds", bounds=(0.0, 86400.0),
    )  # fmt: skip
    seldon_requirements: str = setting(
        "", "Dialects", "What the component's Python holds: a requirements.txt, a Pipfile or a packed environment; "
        "empty: what the server's does.", unit="path",
    )  # fmt: skip
    seldon_interpreter: str = setting(
        "", "Dialects", "The Python that runs the component; empty: the server's.", unit="path"
    )


def lacks(dialect: str, *, fronts: bool) -> str:
    """Say what a dialect does not have; "" if nothing that was asked for. `fronts`: --http-workers was given."""
    if dialect == "cortex" and fronts:
        return "--http-workers cannot be used with --dialect cortex: Cortex projects are served by one process"
    if dialect == "seldon" and fronts:
        return "--http-workers cannot be used with --dialect seldon: use --seldon-workers instead"
    if dialect in ("deepaas", "abeja") and fronts:
        return f"--http-workers cannot be used with --dialect {dialect}: use --{dialect}-workers instead"
    return ""
