"""The metadata of a graph: that of its nodes, and its inputs and outputs. Pure.

Source: Seldon Core 1.17.1, the executor. It failed for built-in nodes, whose metadata is empty here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.server.seldon.pages import encode_json

from .nodes import BUILT_IN, GraphNode, Predictor

if TYPE_CHECKING:
    from penstock.server.seldon.messages import ComponentDescription

_KEYS = ("name", "platform", "versions", "inputs", "outputs", "custom")
Dict = dict[str, Any]


class NoMetadataError(Exception):
    """A node has no valid metadata."""

    def __init__(self, node: str) -> None:
        super().__init__(f"node '{node}' has no valid metadata")


def metadata_of(node: GraphNode, descriptions: Mapping[str, ComponentDescription]) -> Dict:
    """Return the metadata of one node. Raises: NoMetadataError."""
    if node.implementation in BUILT_IN:
        return {"name": node.name, "platform": "", "versions": [], "inputs": [], "outputs": []}
    found = descriptions.get(node.model)
    if found is None or found.metadata is None:
        raise NoMetadataError(node.name)
    return found.metadata


def page_of(node: GraphNode, descriptions: Mapping[str, ComponentDescription]) -> bytes:
    """Return the same, encoded. Raises: NoMetadataError."""
    metadata, found = metadata_of(node, descriptions), descriptions.get(node.model)
    return found.page.encode() if found is not None and found.page else encode_json(metadata)


def graph_metadata(predictor: Predictor, descriptions: Mapping[str, ComponentDescription]) -> Dict:
    """Return the metadata of a graph. Raises: NoMetadataError."""
    models = {node.name: metadata_of(node, descriptions) for node in predictor.graph.all() if node.code is not None}
    described_models = {
        name: {key: models[name][key] for key in _KEYS if _is_written(models[name].get(key))} for name in sorted(models)
    }
    first, last = _end_nodes(predictor.graph)
    return {
        "name": predictor.name,
        "models": described_models,
        "graphinputs": models[first.name].get("inputs") if first.name in models else None,
        "graphoutputs": models[last.name].get("outputs") if last.name in models else None,
    }


def _end_nodes(node: GraphNode) -> tuple[GraphNode, GraphNode]:
    """Return the nodes that receive a request and that produce the answer: of several children, the first counts."""
    if not node.children:
        return node, node
    first, last = _end_nodes(node.children[0])
    if node.type in {"MODEL", "TRANSFORMER"}:
        return node, last
    if node.type in {"OUTPUT_TRANSFORMER", "COMBINER"}:
        return first, node
    return first, last


def _is_written(value: Any) -> bool:
    """Return whether a value is written: empty texts and maps are not; empty lists are."""
    return value is not None and value not in ("", {})
