"""CloudSettings: the part of the settings that is about the ports of SageMaker and Vertex AI.

Settings has it; the composition root reads it. What a cloud sets in the environment of its containers stands
for the default of the setting. Names are Triton's where it has a flag. Source: Triton server, command_line_parser.cc.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from .dialect_settings import DIALECTS
from .setting import PORTS, setting

GROUP = "Clouds"
_EVERYWHERE = "0.0.0.0"  # noqa: S104 - what a container listens on
_RANGE = re.compile(r"\s*(\d{1,5})\s*-\s*(\d{1,5})\s*", re.ASCII)
_THREADS = "Known for the sake of Triton's command lines, and without effect: the port is served on the event loop."
_VARIABLES: Mapping[str, str] = MappingProxyType({
    "sagemaker_default_model": "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME",
    "sagemaker_ping_mode": "SAGEMAKER_TRITON_PING_MODE",
    "sagemaker_inference_type": "SAGEMAKER_TRITON_INFERENCE_TYPE",
    "vertex_ai_port": "AIP_HTTP_PORT",
    "vertex_ai_health_route": "AIP_HEALTH_ROUTE",
    "vertex_ai_predict_route": "AIP_PREDICT_ROUTE",
    "model_repository": "AIP_STORAGE_URI",
})  # fmt: skip
"""What of a cloud's environment stands for the default of a setting."""


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class CloudSettings:
    """The front ends of two clouds, as Triton has them."""

    allow_sagemaker: bool = setting(
        False, GROUP, "Serve Amazon SageMaker's contract for containers on a port of its own (docs/clouds.md)."
    )
    sagemaker_address: str = setting(
        _EVERYWHERE, GROUP, "Address of that port. All addresses, as in Triton, which has no flag for it: SageMaker "
        "asks from outside the container.", unit="address",
    )  # fmt: skip
    sagemaker_port: int = setting(8080, GROUP, "Port of SageMaker's requests.", unit="TCP port", bounds=PORTS)
    sagemaker_safe_port_range: str = setting(
        "", GROUP, "`FIRST-LAST`: with --allow-sagemaker, the ports that all others of this server must be among.",
        unit="RANGE",
    )  # fmt: skip
    sagemaker_thread_count: int = setting(8, GROUP, _THREADS, unit="threads", bounds=(1, 2**31 - 1))
    sagemaker_default_model: str = setting(
        "", GROUP, "The model that /invocations asks; otherwise as SAGEMAKER_TRITON_DEFAULT_MODEL_NAME says.",
        unit="NAME",
    )  # fmt: skip
    sagemaker_ping_mode: str = setting(
        "ready", GROUP, "What /ping tells; otherwise as SAGEMAKER_TRITON_PING_MODE says.", choices=("ready", "live")
    )
    sagemaker_inference_type: str = setting(
        "infer", GROUP, "What /invocations does; otherwise as SAGEMAKER_TRITON_INFERENCE_TYPE says.",
        choices=("infer", "generate", "generate_stream"),
    )  # fmt: skip
    allow_vertex_ai: bool = setting(
        False, GROUP, "Serve Vertex AI's contract for containers on a port of its own (docs/clouds.md). With "
        "AIP_MODE=PREDICTION in the environment the default is true, and that of --allow-http and --allow-grpc false.",
    )  # fmt: skip
    vertex_ai_address: str = setting(_EVERYWHERE, GROUP, "Address of that port, likewise.", unit="address")
    vertex_ai_port: int = setting(
        8080, GROUP, "Port of Vertex AI's requests; otherwise as AIP_HTTP_PORT says.", unit="TCP port", bounds=PORTS
    )
    vertex_ai_thread_count: int = setting(8, GROUP, _THREADS, unit="threads", bounds=(1, 2**31 - 1))
    vertex_ai_default_model: str = setting(
        "", GROUP, "The model that predictions ask which name none; empty: the only one that there is.", unit="NAME"
    )
    vertex_ai_health_route: str = setting(
        "", GROUP, "Path of the health check; otherwise as AIP_HEALTH_ROUTE says.", unit="path"
    )
    vertex_ai_predict_route: str = setting(
        "", GROUP, "Path of predictions; otherwise as AIP_PREDICT_ROUTE says.", unit="path"
    )

    def clouds_lack(self, dialect: str, *, fronts: bool) -> str:
        """Say what the clouds' ports do not have; "" if nothing that was asked for. `fronts`: --http-workers."""
        if not (self.allow_sagemaker or self.allow_vertex_ai):
            return ""
        flag = "--allow-sagemaker" if self.allow_sagemaker else "--allow-vertex-ai"
        if fronts:
            return f"--http-workers and {flag} are mutually exclusive: remove one of them"
        if dialect != DIALECTS[0]:
            return f"{flag} requires a model repository and cannot be used with --dialect {dialect}"
        return ""


def said_by_clouds(environ: Mapping[str, str], dialect: str) -> dict[str, tuple[str, str]]:
    """Give what a cloud's environment says of settings: by name, the text and where it stands.

    Other dialects serve their own routes in whatever container, and are told nothing.
    """
    if dialect != DIALECTS[0]:
        return {}
    said = {name: (environ[where], where) for name, where in _VARIABLES.items() if environ.get(where)}
    if environ.get("AIP_MODE") == "PREDICTION":
        allowed = {"allow_vertex_ai": "true", "allow_http": "false", "allow_grpc": "false"}
        said |= {name: (text, "AIP_MODE") for name, text in allowed.items()}
    return said


def parse_range(text: str) -> tuple[int, int] | None:
    """Read --sagemaker-safe-port-range. Returns: the first port and the last; None of an empty text.

    Raises: ValueError.
    """
    found = _RANGE.fullmatch(text)
    if found is None and text:
        raise ValueError(f"must be the first and the last port, such as 8081-9000, not {text!r}")
    return (int(found[1]), int(found[2])) if found else None


CLOUD_RULES: Mapping[str, Callable[[Any], object]] = MappingProxyType({"sagemaker_safe_port_range": parse_range})
"""What reads those of them that are rules."""
