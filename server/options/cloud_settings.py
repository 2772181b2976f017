"""CloudSettings: the settings of the SageMaker and Vertex AI ports.

Settings inherits them; the composition root reads them. A variable that a cloud sets in its containers replaces the
default of a setting. Names are Triton's where it has a flag. Source: Triton server, command_line_parser.cc.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .dialect_settings import DIALECTS
from .setting import PORTS, setting

GROUP = "Clouds"
_ALL_ADDRESSES = "0.0.0.0"  # noqa: S104 - what a container listens on
_RANGE = re.compile(r"\s*(\d{1,5})\s*-\s*(\d{1,5})\s*", re.ASCII)
_THREADS = "Accepted for compatibility with Triton; has no effect, because the port is served on the event loop."
_VARIABLES: Mapping[str, str] = MappingProxyType({
    "sagemaker_default_model": "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME",
    "sagemaker_ping_mode": "SAGEMAKER_TRITON_PING_MODE",
    "sagemaker_inference_type": "SAGEMAKER_TRITON_INFERENCE_TYPE",
    "vertex_ai_port": "AIP_HTTP_PORT",
    "vertex_ai_health_route": "AIP_HEALTH_ROUTE",
    "vertex_ai_predict_route": "AIP_PREDICT_ROUTE",
    "model_repository": "AIP_STORAGE_URI",
})  # fmt: skip
"""The variable of a cloud's environment that replaces the default of each setting."""


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class CloudSettings:
    """Settings of the two cloud front ends that Triton also has."""

    allow_sagemaker: bool = setting(
        False, GROUP, "Serve Amazon SageMaker's container contract on a separate port (docs/clouds.md)."
    )
    sagemaker_address: str = setting(
        _ALL_ADDRESSES, GROUP, "Address of the SageMaker port. All addresses by default, as in Triton, which has no "
        "flag for it: SageMaker connects from outside the container.", unit="address",
    )  # fmt: skip
    sagemaker_port: int = setting(8080, GROUP, "Port for SageMaker's requests.", unit="TCP port", bounds=PORTS)
    sagemaker_safe_port_range: str = setting(
        "", GROUP, "`FIRST-LAST`: with --allow-sagemaker, every other port of this server must be in this range.",
        unit="RANGE",
    )  # fmt: skip
    sagemaker_thread_count: int = setting(8, GROUP, _THREADS, unit="threads", bounds=(1, 2**31 - 1))
    sagemaker_default_model: str = setting(
        "", GROUP, "Model that serves /invocations. Default: SAGEMAKER_TRITON_DEFAULT_MODEL_NAME from the environment.",
        unit="NAME",
    )  # fmt: skip
    sagemaker_ping_mode: str = setting(
        "ready", GROUP, "Whether /ping reports readiness or liveness. Overrides SAGEMAKER_TRITON_PING_MODE.",
        choices=("ready", "live"),
    )  # fmt: skip
    sagemaker_inference_type: str = setting(
        "infer", GROUP, "Operation that /invocations performs. Overrides SAGEMAKER_TRITON_INFERENCE_TYPE.",
        choices=("infer", "generate", "generate_stream"),
    )  # fmt: skip
    allow_vertex_ai: bool = setting(
        False, GROUP, "Serve Vertex AI's container contract on a separate port (docs/clouds.md). If "
        "AIP_MODE=PREDICTION is in the environment, this defaults to true, and --allow-http and --allow-grpc to false.",
    )  # fmt: skip
    vertex_ai_address: str = setting(
        _ALL_ADDRESSES,
        GROUP,
        "Address of the Vertex AI port. All addresses by default, as for SageMaker.",
        unit="address",
    )
    vertex_ai_port: int = setting(
        8080, GROUP, "Port for Vertex AI's requests. Overrides AIP_HTTP_PORT.", unit="TCP port", bounds=PORTS
    )
    vertex_ai_thread_count: int = setting(8, GROUP, _THREADS, unit="threads", bounds=(1, 2**31 - 1))
    vertex_ai_default_model: str = setting(
        "", GROUP, "Model for predictions that name none. Default: the only model, if there is just one.", unit="NAME"
    )
    vertex_ai_health_route: str = setting(
        "", GROUP, "Path of the health check. Overrides AIP_HEALTH_ROUTE.", unit="path"
    )
    vertex_ai_predict_route: str = setting("", GROUP, "Path of predictions. Overrides AIP_PREDICT_ROUTE.", unit="path")

    def clouds_conflict(self, dialect: str, *, fronts: bool) -> str:
        """Say what the cloud ports do not support of what was requested, or "". `fronts`: --http-workers."""
        if not (self.allow_sagemaker or self.allow_vertex_ai):
            return ""
        flag = "--allow-sagemaker" if self.allow_sagemaker else "--allow-vertex-ai"
        if fronts:
            return f"--http-workers and {flag} are mutually exclusive: remove one of them"
        if dialect != DIALECTS[0]:
            return f"{flag} requires a model repository and cannot be used with --dialect {dialect}"
        return ""


def settings_from_cloud(environ: Mapping[str, str], dialect: str) -> dict[str, tuple[str, str]]:
    """Read settings from a cloud's environment. Returns: by setting, the text and the variable it comes from.

    Empty for dialects other than triton, which serve their own routes in any container.
    """
    if dialect != DIALECTS[0]:
        return {}
    values = {name: (environ[variable], variable) for name, variable in _VARIABLES.items() if environ.get(variable)}
    if environ.get("AIP_MODE") == "PREDICTION":
        allowed = {"allow_vertex_ai": "true", "allow_http": "false", "allow_grpc": "false"}
        values |= {name: (text, "AIP_MODE") for name, text in allowed.items()}
    return values


def parse_range(text: str) -> tuple[int, int] | None:
    """Read --sagemaker-safe-port-range. Returns: the first port and the last; None for an empty text.

    Raises: ValueError.
    """
    match = _RANGE.fullmatch(text)
    if match is None and text:
        raise ValueError(f"must be the first and the last port, such as 8081-9000, not {text!r}")
    return (int(match[1]), int(match[2])) if match else None
