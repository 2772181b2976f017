"""Later formats: recognizes a cortex.yaml of Cortex 0.12 or later, which has another format. Called by project.py.

Source: Cortex v0.12 to v0.42, docs/ (APIs of predictor classes, then of handler classes, then of containers).
"""

from __future__ import annotations

from collections.abc import Iterable

from .yaml_nodes import YamlNode

LATER = (
    "APIs of Cortex 0.12 or later are not supported, only models with the request handlers of 0.9 and 0.10: "
    'docs/cortex.md, "Later versions", describes how to migrate them'
)
_KINDS = ("SyncAPI", "RealtimeAPI", "BatchAPI", "AsyncAPI", "TaskAPI", "APISplitter", "TrafficSplitter")
_WITHOUT_KIND = "predictor"


def later_api(resources: Iterable[YamlNode]) -> YamlNode | None:
    """Return the first resource that only a later version can have. All are known to be maps."""
    return next((node for node in resources if isinstance(node.value, dict) and _is_later(node.value)), None)


def _is_later(keys: dict[str, YamlNode]) -> bool:
    kind, predictor = keys.get("kind"), keys.get(_WITHOUT_KIND)
    if kind is None:
        return predictor is not None  # some of these versions have neither deployments nor kinds
    # the predictor of 0.10 and 0.11 is a module and has no type
    typed = predictor is not None and isinstance(predictor.value, dict) and "type" in predictor.value
    return kind.unwrapped in _KINDS or typed
