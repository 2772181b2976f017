"""What other programs import from the original's command: its parameters, annotations, and names.

The command itself is `seldon-core-microservice`, which penstock also provides. Source: seldon-core 1.17.1.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from .flask_utils import (
    ANNOTATION_REST_TIMEOUT,
    ANNOTATIONS_FILE,
    DEFAULT_ANNOTATION_REST_TIMEOUT,
    SeldonMicroserviceException,
)
from .lacking import lacking
from .utils import getenv_as_bool
from .version import __version__

__all__ = [
    "ANNOTATIONS_FILE",
    "ANNOTATION_REST_TIMEOUT",
    "DEFAULT_ANNOTATION_REST_TIMEOUT",
    "SeldonMicroserviceException",
    "__version__",
    "getenv_as_bool",
    "load_annotations",
    "parse_parameters",
]
__getattr__ = lacking(__name__, "main", "parse_args", "setup_logger", "start_servers")

logger = logging.getLogger(__name__)

PARAMETERS_ENV_NAME = "PREDICTIVE_UNIT_PARAMETERS"
HTTP_SERVICE_PORT_ENV_NAME = "PREDICTIVE_UNIT_HTTP_SERVICE_PORT"
GRPC_SERVICE_PORT_ENV_NAME = "PREDICTIVE_UNIT_GRPC_SERVICE_PORT"
METRICS_SERVICE_PORT_ENV_NAME = "PREDICTIVE_UNIT_METRICS_SERVICE_PORT"
FILTER_METRICS_ACCESS_LOGS_ENV_NAME = "FILTER_METRICS_ACCESS_LOGS"
LOG_LEVEL_ENV = "SELDON_LOG_LEVEL"
DEFAULT_LOG_LEVEL = "INFO"
DEFAULT_GRPC_PORT, DEFAULT_HTTP_PORT, DEFAULT_METRICS_PORT = 5000, 9000, 6000
DEBUG_ENV = "SELDON_DEBUG"
GUNICORN_ACCESS_LOG_ENV = "GUNICORN_ACCESS_LOG"


def parse_parameters(parameters: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the keyword arguments given by {"name", "value", "type"} each. Raises: SeldonMicroserviceException."""
    from penstock.server.seldon.parameters import BadParameterError, read

    try:
        return read(json.dumps(parameters))
    except BadParameterError as error:
        raise SeldonMicroserviceException(str(error), reason="MICROSERVICE_BAD_PARAMETER") from None


def load_annotations() -> dict[str, str]:
    """Return the annotations of the pod, by name; {} if there are none."""
    try:
        lines = Path(ANNOTATIONS_FILE).read_text("utf-8").splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        logger.error("Failed to open annotations file %s", ANNOTATIONS_FILE)  # noqa: TRY400 - as the original's
        return {}
    pairs = [line.split("=", 1) for line in lines if "=" in line]
    # values are in quotes
    return {name.strip(): value.strip()[1:-1] for name, value in pairs}
