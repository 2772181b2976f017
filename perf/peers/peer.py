"""A peer: everything needed to install one server, serve a model with it, and call it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .wires import Wire


@dataclass(frozen=True, slots=True)
class Peer:
    """A server. `package`: the one whose version is the server's. `configuration`: its setup, as printed in the report.

    `requirements`: pinned, for its own environment; if empty, it runs in ours. `files`: written, by name, into the
    folder that it is started in. `command`: words in which `{python}` is its environment's interpreter, `{bin}` the
    folder of its scripts, `{http}`, `{grpc}` and `{metrics}` are ports, `{model}` is the model's name, and
    `{repository}` a model repository with only that model. `environ`: with the same placeholders. Its files read the
    variables of `variables`.
    `ready`: the path that returns 200 once the model is served. `fresh`: it is restarted for each turn, because what it
    learns under one load would distort the next.
    """

    name: str
    package: str
    requirements: tuple[str, ...]
    command: tuple[str, ...]
    ready: str
    wires: tuple[Wire, ...]
    configuration: str
    files: Mapping[str, str] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    fresh: bool = False


def variables(model_file: str, places: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that a peer's files read. `places`: the values of the placeholders."""
    return {
        "MODEL_FILE": model_file,
        "MODEL_NAME": places["model"],
        "HTTP_PORT": places["http"],
        "GRPC_PORT": places["grpc"],
        "METRICS_PORT": places["metrics"],
        "CUDA_VISIBLE_DEVICES": "",  # a GPU would serve only some of the peers
    }
