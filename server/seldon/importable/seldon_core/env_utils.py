"""What the orchestrator states about a component in its environment. Source: seldon-core 1.17.1."""

from __future__ import annotations

import json
import os

ENV_MODEL_NAME = "PREDICTIVE_UNIT_ID"
ENV_MODEL_IMAGE = "PREDICTIVE_UNIT_IMAGE"
ENV_SELDON_DEPLOYMENT_NAME = "SELDON_DEPLOYMENT_ID"
ENV_PREDICTOR_NAME = "PREDICTOR_ID"
ENV_PREDICTOR_LABELS = "PREDICTOR_LABELS"
NONIMPLEMENTED_MSG = "NOT_IMPLEMENTED"
NONIMPLEMENTED_IMAGE_MSG = f"{NONIMPLEMENTED_MSG}:{NONIMPLEMENTED_MSG}"


def get_predictor_version(default_val: str = NONIMPLEMENTED_MSG) -> str:
    """Return the predictor's label `version`. Raises: ValueError for labels that are not JSON."""
    version: str = json.loads(os.environ.get(ENV_PREDICTOR_LABELS, "{}")).get("version", default_val)
    return version


def get_predictor_name(default_val: str = NONIMPLEMENTED_MSG) -> str:
    """Return the predictor's name."""
    return os.environ.get(ENV_PREDICTOR_NAME, default_val)


def get_deployment_name(default_val: str = NONIMPLEMENTED_MSG) -> str:
    """Return the name of the deployment."""
    return os.environ.get(ENV_SELDON_DEPLOYMENT_NAME, default_val)


def get_model_name(default_val: str = NONIMPLEMENTED_MSG) -> str:
    """Return the component's name in its graph."""
    return os.environ.get(ENV_MODEL_NAME, default_val)


def get_image_name(default_val: str = NONIMPLEMENTED_IMAGE_MSG) -> str:
    """Return the component's image."""
    return os.environ.get(ENV_MODEL_IMAGE, default_val)
