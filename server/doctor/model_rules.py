"""Rules about models: the devices that the PATHs' models request, against those present. Pure: Facts to Diagnoses."""

from __future__ import annotations

from collections.abc import Iterator

from .facts import Driver, Facts
from .report import ERROR, OK, WARNING, Diagnosis

_CUDA = "cuda:"


def _format_served(versions: int) -> str:
    return "no mistake" if not versions else f"{versions} version{'' if versions == 1 else 's'} would be served"


def judge_models(facts: Facts) -> Iterator[Diagnosis]:
    """Judge the models, if any were given."""
    models = facts.models
    if models is None:
        return
    devices = (facts.driver or Driver()).devices
    for device, names in models.devices.items():
        number = device.removeprefix(_CUDA)
        if device.startswith(_CUDA) and not (number.isascii() and number.isdecimal() and int(number) < len(devices)):
            available = f"the last one here is cuda:{len(devices) - 1}" if devices else "there is none"
            text = f"{', '.join(names)}: requests {device}, but {available}"
            remedy = "see the finding about the driver, or use CPUs: KIND_CPU, or cpu_fallback (docs/gpu.md)"
            yield Diagnosis(ERROR, "models", text, remedy)
        else:
            yield Diagnosis(OK, "models", f"on {device}: {', '.join(names)}")
    for line in models.mistakes:
        yield Diagnosis(ERROR, "models", line, "run `penstock check PATH...` for details")
    for line in models.warnings:
        yield Diagnosis(WARNING, "models", line, "run `penstock check PATH...` for details")
    if not models.mistakes:
        yield Diagnosis(OK, "models", _format_served(models.versions))
