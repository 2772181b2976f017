"""Which model a configuration is for, what runs it, and which of its versions are served."""

from __future__ import annotations

import re
from itertools import pairwise
from math import isfinite
from typing import Any

from penstock.server.repository.key_checks import is_file_name

from .ensembles import PLATFORM as ENSEMBLE
from .parse_context import ParseContext

HONOURED = (
    "name", "platform", "backend", "version_policy", "default_model_filename", "metric_tags",
    "model_metrics.metric_control",
)  # fmt: skip
REFUSED = ("runtime", "cc_model_filenames", "model_repository_agents")

PLATFORM, BACKEND, PYTHON = "onnxruntime_onnx", "onnxruntime", "python"
SAVED_MODEL, GRAPHDEF, TENSORFLOW = "tensorflow_savedmodel", "tensorflow_graphdef", "tensorflow"

_BACKENDS = {PLATFORM: BACKEND, SAVED_MODEL: TENSORFLOW, GRAPHDEF: TENSORFLOW}
"""The backend of each known platform."""
FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"
_AS_SAVED_MODEL = "save the graph as a SavedModel and set tensorflow_savedmodel (docs/tensorflow.md, GraphDefs)"


def read(context: ParseContext) -> None:
    """Read the fields of this module."""
    config, name = context.config, context.name
    if config.name not in {"", name}:
        text = f"unexpected directory name '{name}' for model '{config.name}', directory name must equal model name"
        context.add_mistake("name", text)
    _read_backend(context)
    if config.default_model_filename:
        if not is_file_name(config.default_model_filename):
            text = f"'{config.default_model_filename}' is not the name of a file in the version's folder"
            context.add_mistake("default_model_filename", text)
        context.set_value("model.file", config.default_model_filename, "default_model_filename")
    _read_versions(context)
    _read_tags(context)
    _read_metrics(context)


def is_platform_handler(config: Any) -> bool:
    """Return whether the configuration names the Python backend's handler of SavedModels, which means TensorFlow.

    Source: the README of python_backend's platform_handlers/tensorflow_savedmodel.
    """
    return bool(config.backend == PYTHON and config.platform == SAVED_MODEL)


def _read_backend(context: ParseContext) -> None:
    """Read what runs the model. Source of the text about a pair: Triton's core, ValidateModelConfig."""
    platform, backend = context.config.platform, context.config.backend
    if platform == GRAPHDEF:
        context.add_mistake("platform", f"platform '{GRAPHDEF}' is not supported: {_AS_SAVED_MODEL}")
    elif platform not in {"", PLATFORM, SAVED_MODEL, ENSEMBLE}:
        known = f"{PLATFORM}, {SAVED_MODEL}, {ENSEMBLE}"
        context.add_mistake("platform", f"platform '{platform}' is not supported, known: {known}")
    if backend not in {"", BACKEND, TENSORFLOW, PYTHON}:
        known = f"{BACKEND}, {TENSORFLOW}, {PYTHON}"
        context.add_mistake("backend", f"unable to find backend library for backend '{backend}', known: {known}")
    elif is_platform_handler(context.config):
        backend = TENSORFLOW
    elif backend == PYTHON and platform:
        context.add_mistake("platform", f"platform '{platform}' requires a backend other than '{PYTHON}'")
    elif backend and platform in _BACKENDS and _BACKENDS[platform] != backend:
        context.add_mistake("platform", f"unexpected 'platform' and 'backend' pair, got:{platform}, {backend}")
    if backend or platform not in {"", ENSEMBLE}:
        runs_on = backend if backend in {PYTHON, TENSORFLOW} else _BACKENDS.get(platform, BACKEND)
        context.set_value("model.backend", runs_on, "backend" if context.config.backend else "platform")


def _read_versions(context: ParseContext) -> None:
    policy = context.config.version_policy
    chosen = policy.WhichOneof("policy_choice")
    field = f"version_policy.{chosen}"
    if chosen == "all":
        context.set_value("model.versions", ("all", ()), field)
    elif chosen == "latest":
        if not policy.latest.num_versions:
            context.add_mistake(field, "version_policy.latest.num_versions must be 1 or more")
        context.set_value("model.versions", ("latest", policy.latest.num_versions), field)
    elif chosen == "specific":
        versions = tuple(sorted(set(policy.specific.versions)))
        if not versions or versions[0] < 1:
            context.add_mistake(field, "version_policy.specific.versions must be integers above 0")
        context.set_value("model.versions", ("specific", versions), field)


def _read_tags(context: ParseContext) -> None:
    tags = tuple(sorted(context.config.metric_tags.items()))
    for name, _ in tags:
        if not re.fullmatch("[a-zA-Z0-9_]+", name):
            context.add_mistake("metric_tags", f"metric tag '{name}' cannot be a label: letters, digits and _ only")
    if tags:
        context.set_value("metrics.tags", tags, "metric_tags")


def _read_metrics(context: ParseContext) -> None:
    """Read the bounds of histograms; the last for a family applies. Source: Triton core, metric_model_reporter.cc."""
    for control in context.config.model_metrics.metric_control:
        family, bounds = control.metric_identifier.family, tuple(control.histogram_options.buckets)
        if problem := _missing_field(control):
            context.add_mistake("model_metrics.metric_control", problem)
        elif family != FIRST_RESPONSE:
            text = f"Metric family '{family}' in 'metric_identifier' is not a customizable metric in Triton core."
            context.add_warning("model_metrics.metric_control.metric_identifier.family", f"{text} {FIRST_RESPONSE} is")
        elif not all(map(isfinite, bounds)) or any(low >= high for low, high in pairwise(bounds)):
            field = "model_metrics.metric_control.histogram_options.buckets"
            context.add_mistake(field, f"'buckets' of '{family}' must be finite, each above the one before it")
        else:
            context.set_value("metrics.first_response_ms", bounds, "model_metrics")


def _missing_field(control: Any) -> str:
    """Describe what a metric control omits, in the words of Triton's core, model_config_utils.cc."""
    if not control.HasField("metric_identifier"):
        return "metric control must specify 'metric_identifier'"
    if not control.metric_identifier.family:
        return "metric identifier must specify non-empty 'family'"
    if not control.HasField("histogram_options"):
        return "metric control must specify 'histogram_options'"
    return "" if control.histogram_options.buckets else "histogram options must specify non-empty 'buckets'"
