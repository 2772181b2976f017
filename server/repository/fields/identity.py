"""Whose configuration it is, what runs it, and which of its versions are served."""

from __future__ import annotations

import re

from penstock.server.repository.takes import is_file_name

from .ensembles import PLATFORM as ENSEMBLE
from .notes import Notes

HONOURED = ("name", "platform", "backend", "version_policy", "default_model_filename", "metric_tags")
REFUSED = ("runtime", "cc_model_filenames", "model_operations", "model_repository_agents", "model_metrics")

PLATFORM, BACKEND, PYTHON = "onnxruntime_onnx", "onnxruntime", "python"


def read(notes: Notes) -> None:
    """Read them."""
    config, name = notes.config, notes.name
    if config.name not in {"", name}:
        text = f"unexpected directory name '{name}' for model '{config.name}', directory name must equal model name"
        notes.mistake("name", text)
    if config.platform not in {"", PLATFORM, ENSEMBLE}:
        notes.mistake("platform", f"platform '{config.platform}' is not supported, known: {PLATFORM}, {ENSEMBLE}")
    if config.backend not in {"", BACKEND, PYTHON}:
        notes.mistake("backend", f"backend '{config.backend}' is not supported, known: {BACKEND}, {PYTHON}")
    if config.backend == PYTHON and config.platform:
        notes.mistake("platform", f"platform '{config.platform}' has another backend than '{PYTHON}'")
    if config.backend or config.platform not in {"", ENSEMBLE}:
        backend = PYTHON if config.backend == PYTHON else BACKEND
        notes.say("model.backend", backend, "backend" if config.backend else "platform")
    if config.default_model_filename:
        if not is_file_name(config.default_model_filename):
            text = f"'{config.default_model_filename}' is not the name of a file in the version's folder"
            notes.mistake("default_model_filename", text)
        notes.say("model.file", config.default_model_filename, "default_model_filename")
    _versions(notes)
    _tags(notes)


def _versions(notes: Notes) -> None:
    policy = notes.config.version_policy
    chosen = policy.WhichOneof("policy_choice")
    field = f"version_policy.{chosen}"
    if chosen == "all":
        notes.say("model.versions", ("all", ()), field)
    elif chosen == "latest":
        if not policy.latest.num_versions:
            notes.mistake(field, "version_policy.latest.num_versions must be 1 or more")
        notes.say("model.versions", ("latest", policy.latest.num_versions), field)
    elif chosen == "specific":
        versions = tuple(sorted(set(policy.specific.versions)))
        if not versions or versions[0] < 1:
            notes.mistake(field, "version_policy.specific.versions must be integers above 0")
        notes.say("model.versions", ("specific", versions), field)


def _tags(notes: Notes) -> None:
    tags = tuple(sorted(notes.config.metric_tags.items()))
    for name, _ in tags:
        if not re.fullmatch("[a-zA-Z0-9_]+", name):
            notes.mistake("metric_tags", f"metric tag '{name}' cannot be a label: letters, digits and _ only")
    if tags:
        notes.say("metrics.tags", tags, "metric_tags")
