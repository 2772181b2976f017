"""A peer: all there is to know of one server, to install it, to serve a model with it and to ask it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .wires import Wire


@dataclass(frozen=True, slots=True)
class Peer:
    """A server. `package`: whose version is its own; `configuration`: how it was set up, as the report says it.

    `requirements`: pinned, for an environment of its own; none: it runs in ours. `files`: what is written, by name,
    into the folder it is started in. `command`: words in which `{python}` is its environment's interpreter, `{bin}`
    the folder of its scripts, `{http}` and `{grpc}` are ports, `{metrics}` another, `{model}` is the model's name and
    `{repository}` a model repository with that model alone. `environ`: likewise. Its files read the variables of
    `variables`. `ready`: the path that is answered with 200 once the model is served. `fresh`: it is started anew for
    each turn, because what it has learned under one load would spoil its next.
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
    """Give the environment variables that a peer's files read; `places`: what `{...}` stands for."""
    return {
        "MODEL_FILE": model_file,
        "MODEL_NAME": places["model"],
        "HTTP_PORT": places["http"],
        "GRPC_PORT": places["grpc"],
        "METRICS_PORT": places["metrics"],
        "CUDA_VISIBLE_DEVICES": "",  # a machine's GPU would serve some of the peers only
    }
