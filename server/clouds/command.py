"""The command line of `penstock sagemaker`, and the variables of Triton's `serve`, as settings. Called by cli.py.

Source: Triton server, docker/sagemaker/serve, which SageMaker runs with the argument `serve`: variables and defaults.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from penstock.server.options.backend_config import without_effect
from penstock.server.options.foreign_flags import foreign, renamed, sifted
from penstock.server.options.own_flags import own_flags
from penstock.server.options.setting import PREFIX
from penstock.server.repository.scan import CONFIG_FILE
from penstock.server.settings import SettingError, Settings, resolve

NAME = "penstock sagemaker"
MODELS = Path("/opt/ml/model")
"""Where SageMaker unpacks the archive of an endpoint with one model."""
DEFAULT = "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME"
MORE = "SAGEMAKER_TRITON_ADDITIONAL_ARGS"
USAGE_STATUS = 2
_FIXED = {
    "allow_sagemaker": "true", "allow_http": "false", "allow_grpc": "false", "allow_metrics": "false",
    "model_control_mode": "explicit",
}  # fmt: skip
_VARIABLES = {
    "allow_grpc": "SAGEMAKER_TRITON_ALLOW_GRPC",
    "grpc_port": "SAGEMAKER_TRITON_GRPC_PORT",
    "allow_metrics": "SAGEMAKER_TRITON_ALLOW_METRICS",
    "metrics_port": "SAGEMAKER_TRITON_METRICS_PORT",
    "sagemaker_ping_mode": "SAGEMAKER_TRITON_OVERRIDE_PING_MODE",
    "sagemaker_port": "SAGEMAKER_BIND_TO_PORT",
    "sagemaker_safe_port_range": "SAGEMAKER_SAFE_PORT_RANGE",
    "sagemaker_thread_count": "SAGEMAKER_TRITON_THREAD_COUNT",
    "log_info": "SAGEMAKER_TRITON_LOG_INFO",
    "log_warning": "SAGEMAKER_TRITON_LOG_WARNING",
    "log_error": "SAGEMAKER_TRITON_LOG_ERROR",
}
_VERBOSE = "SAGEMAKER_TRITON_LOG_VERBOSE"
_LEVELS = {"true": "1", "false": "0"}
_ADDED = ("model_repository", "load_model")
"""Settings that flags extend: in Triton's `serve` the script's own value is a flag, and these may be repeated."""
_EVERY = "*"


def _gpus() -> int:
    """Count the GPUs of this machine; 0 if NVML does not answer, as on a machine without a driver."""
    from penstock.server.gpus.nvml import Nvml  # only if a limit is set

    nvml = Nvml()
    try:
        return len(nvml.read())
    except Exception:  # noqa: BLE001 - an NVMLError has a subclass for each reason
        return 0
    finally:
        nvml.close()


def run(argv: Sequence[str], serve: Callable[[Settings], int]) -> int:
    """Run a command line. Returns: the exit status."""
    try:
        settings = ask(argv, os.environ)
    except SettingError as error:
        sys.stderr.write(f"{NAME}: {error}\n")
        return USAGE_STATUS
    return serve(settings)


def ask(
    argv: Sequence[str], environ: Mapping[str, str], models: Path = MODELS, gpus: Callable[[], int] = _gpus
) -> Settings:
    """Parse a command line. Its flags override PENSTOCK_ variables, and those override SageMaker's.

    Raises: SettingError.
    """
    try:
        more = shlex.split(environ.get(MORE, ""))
    except ValueError as error:
        raise SettingError(f"{MORE}: {error}") from None
    words = [*_behind(environ), *more, *(argv[1:] if list(argv[:1]) == ["serve"] else argv)]
    words, ignored = sifted(map(renamed, words))
    flags, others = own_flags(NAME, words, ())
    if others:
        text = f"unknown argument {others[0]}: it takes flags of `penstock serve`, and no PATH"
        raise SettingError(foreign(others[0]) or text)
    below = _said(environ, gpus)
    if environ.get("SAGEMAKER_MULTI_MODEL") != "true":
        name = _model(models, environ.get(DEFAULT, ""))
        below |= {"model_repository": str(models), "load_model": name, "sagemaker_default_model": name}
        flags |= {each: [below[each], *flags[each]] for each in _ADDED if each in flags and _EVERY not in flags[each]}
    stated = {PREFIX + name.upper(): text for name, text in below.items()}
    settings = resolve(flags, {**stated, **environ})
    for text in (*ignored, *without_effect(settings.backend_config)):
        sys.stderr.write(f"{NAME}: warning: {text}\n")
    return settings


def _behind(environ: Mapping[str, str]) -> list[str]:
    """Return the flags after a variable's value, as in `false --load-model=vae`: the script does not quote values."""
    return [word for where in (*_VARIABLES.values(), _VERBOSE) for word in environ.get(where, "").split()[1:]]


def _said(environ: Mapping[str, str], gpus: Callable[[], int]) -> dict[str, str]:
    """Return the settings in the environment, except the models."""
    # a multi-model endpoint survives the failure of one of its models
    ping = "live" if environ.get("SAGEMAKER_MULTI_MODEL") == "true" else "ready"
    below = {**_FIXED, "sagemaker_ping_mode": ping}
    values = {name: environ.get(where, "").split()[:1] for name, where in _VARIABLES.items()}
    below |= {name: value for name, found in values.items() for value in found}
    for verbose in environ.get(_VERBOSE, "").split()[:1]:
        below["log_verbose"] = _LEVELS.get(verbose.lower(), verbose)
    if limit := environ.get("SAGEMAKER_TRITON_MODEL_LOAD_GPU_LIMIT"):
        below["model_load_gpu_limit"] = "\n".join(f"{number}:{limit}" for number in range(gpus()))
    return below


def _model(models: Path, name: str) -> str:
    """Return the name of the model that a single-model endpoint serves. Raises: SettingError."""
    if (models / CONFIG_FILE).exists():
        raise SettingError(f"{models} is the folder of one model: the archive must have the model's folder at its top")
    if name:
        if not (models / name).is_dir():
            raise SettingError(f"{DEFAULT}: there is no folder {models / name}")
        return name
    folders = sorted(each.name for each in models.iterdir() if each.is_dir()) if models.is_dir() else []
    if not folders:
        raise SettingError(f"there is no model in {models}")
    if len(folders) > 1:
        raise SettingError(f"{DEFAULT} must name one of the models in {models}: {', '.join(folders)}")
    return folders[0]
