"""Paths: the purpose of each URL of a server of DEEPaaS models. Called by `service.py`, once for each head. Pure.

The paths of the original and Penstock's own. If both have a path, it is the original's:

    the original's, under the base path     Penstock's own, at the root
    /  /v2/  /v2/models/  /v2/debug/        /v2 of a server with a base path
    /v2/models/NAME/                        /v2/models/NAME/{ready,stats,config,infer,generate,...}
    /v2/models/NAME/predict/                /v2/models/NAME/versions/...
    /v2/models/NAME/train/                  /v2/models/stats, if no model has that name
    /v2/models/NAME/train/UUID              /v2/health/...  /v2/repository/...  /v2/logging  /v2/trace/...
    /api  /ui  /swagger.json                /v2/systemsharedmemory/...  /v2/cudasharedmemory/...
                                            /metrics  /docs  /openapi.json

Penstock's own paths that take tensors are rejected. Penstock adds to the original's, under the base path:
train/UUID/log, train/UUID/progress, train/UUID/page, and /openapi3.json.
Source: deepaas 2.6.0 on aiohttp 3, by observed behavior.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Container
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import unquote

from penstock.server.http.target import path_in


class Purpose(enum.Enum):
    """The purpose of a request."""

    VERSIONS = enum.auto()
    VERSION = enum.auto()
    MODELS = enum.auto()
    METADATA = enum.auto()
    PREDICT = enum.auto()
    TRAIN = enum.auto()
    TRAININGS = enum.auto()
    TRAINING = enum.auto()
    END_TRAINING = enum.auto()
    LOG = enum.auto()
    PROGRESS = enum.auto()
    PAGE = enum.auto()
    DEBUG = enum.auto()
    API = enum.auto()
    UI = enum.auto()
    SWAGGER = enum.auto()
    OPENAPI = enum.auto()
    REDIRECT = enum.auto()
    DISABLED = enum.auto()
    NOT_ALLOWED = enum.auto()
    NOT_FOUND = enum.auto()
    TENSORS = enum.auto()
    PENSTOCK = enum.auto()


class DeepaasRoute(NamedTuple):
    """The purpose of a request, and the names in its path.

    `name` is that of the model, `uuid` that of the training. `location` is the target of a redirect, or the value of
    Allow if the method is not allowed.
    """

    purpose: Purpose
    name: str = ""
    uuid: str = ""
    location: str = ""


Methods = dict[str, Purpose]
"""The purposes of a path, by method. In the order in which Allow lists them."""

_SERVER_PATHS: dict[tuple[str, ...], Methods] = {
    ("v2", ""): {"GET": Purpose.VERSION},
    ("v2", "debug", ""): {"GET": Purpose.DEBUG},
    ("v2", "models", ""): {"GET": Purpose.MODELS},
    ("swagger.json",): {"GET": Purpose.SWAGGER},
    ("openapi3.json",): {"GET": Purpose.OPENAPI},
}
_DOCUMENT_PATHS: dict[tuple[str, ...], Methods] = {
    ("api",): {"GET": Purpose.API},
    ("ui",): {"GET": Purpose.UI, "HEAD": Purpose.UI},
}
_VERSIONS: Methods = {"GET": Purpose.VERSIONS}
_MODEL_PATHS: dict[tuple[str, ...], Methods] = {
    ("",): {"GET": Purpose.METADATA},
    ("predict", ""): {"POST": Purpose.PREDICT},
    ("train", ""): {"GET": Purpose.TRAININGS, "POST": Purpose.TRAIN},
}
_TRAINING_PATHS: dict[tuple[str, ...], Methods] = {
    (): {"DELETE": Purpose.END_TRAINING, "GET": Purpose.TRAINING},
    ("log",): {"GET": Purpose.LOG},
    ("progress",): {"GET": Purpose.PROGRESS},
    ("page",): {"GET": Purpose.PAGE},
}
PREDICTIONS = frozenset((Purpose.PREDICT,))
TRAININGS = frozenset((
    Purpose.TRAIN, Purpose.TRAININGS, Purpose.TRAINING, Purpose.END_TRAINING, Purpose.LOG, Purpose.PROGRESS,
    Purpose.PAGE,
))  # fmt: skip
_MODEL = "/v2/models/[^/]+"
_PENSTOCK_PATHS = re.compile(
    rf"/v2/(health|repository|trace|systemsharedmemory|cudasharedmemory)/.+|/v2/logging|/v2/models/stats|"
    rf"{_MODEL}/(ready|stats|config|infer|generate|generate_stream|trace/setting|versions/.+)|{_MODEL}/versions/.+|"
    rf"/metrics|/docs|/openapi\.json"
)

_TENSOR_PATHS = re.compile("/v2/models/([^/]+)(?:/versions/[^/]+)?/(?:infer|predict|generate|generate_stream)")
"""Paths that take tensors, or run hooks: DEEPaaS models support neither."""


@dataclass(frozen=True, slots=True)
class DeepaasPaths:
    """The paths of one server. `base` is the prefix of the original's paths, without a final slash.

    `names` are the models'. `documents`: there is a page of the API. `disabled`: the purposes answered with 402.
    """

    names: Container[str]
    base: str = ""
    documents: bool = True
    disabled: frozenset[Purpose] = frozenset()

    def find(self, method: bytes, target: bytes, query: bytes = b"") -> DeepaasRoute:
        """Return the purpose of a request. `target` and `query` are as they were sent."""
        path, verb = path_in(target.partition(b"#")[0]).decode("latin-1"), method.decode("latin-1")
        found = self._methods_of(path)
        if found is not None:
            return self._route(verb, *found)
        for other in (_merge_slashes(path), path + "/", _merge_slashes(path + "/")):
            found = self._methods_of(other)
            if found is not None and (verb in found[0] or found[0] is _VERSIONS):
                return DeepaasRoute(Purpose.REDIRECT, location=other + ("?" + query.decode("latin-1") if query else ""))
        match = _TENSOR_PATHS.fullmatch(path) if verb == "POST" else None
        if match and unquote(match[1]) in self.names:
            return DeepaasRoute(Purpose.TENSORS, unquote(match[1]))
        is_ours = _PENSTOCK_PATHS.fullmatch(path) or (path == "/v2" and self.base)
        return DeepaasRoute(Purpose.PENSTOCK if is_ours else Purpose.NOT_FOUND)

    def _route(self, method: str, methods: Methods, name: str, uuid: str) -> DeepaasRoute:
        purpose = methods.get(method)
        if purpose is None:
            return DeepaasRoute(Purpose.NOT_ALLOWED, location=",".join(methods))
        return DeepaasRoute(Purpose.DISABLED if purpose in self.disabled else purpose, name, uuid)

    def _methods_of(self, path: str) -> tuple[Methods, str, str] | None:
        """Return the purposes of a path, by method, and the names of the model and the training in it."""
        if not path.startswith(self.base):
            return None
        rest = path[len(self.base) :]
        if rest == ("" if self.base else "/"):
            return _VERSIONS, "", ""
        first, *raw = rest.split("/")
        parts = tuple(unquote(part) for part in raw)
        if first or not parts:
            return None
        methods = _SERVER_PATHS.get(parts) or (_DOCUMENT_PATHS.get(parts) if self.documents else None)
        if methods is not None:
            return methods, "", ""
        if len(parts) < 4 or parts[:2] != ("v2", "models") or parts[2] not in self.names:
            return None
        name, rest_of = parts[2], parts[3:]
        if rest_of in _MODEL_PATHS:
            return _MODEL_PATHS[rest_of], name, ""
        if len(rest_of) > 1 and rest_of[0] == "train" and rest_of[1] and rest_of[2:] in _TRAINING_PATHS:
            return _TRAINING_PATHS[rest_of[2:]], name, rest_of[1]
        return None


def _merge_slashes(path: str) -> str:
    return re.sub("//+", "/", path)
