"""GraphRepository: the nodes of a graph as the models of a Repository. Made by components.py."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.server.protobuf import model_config_pb2
from penstock.server.repository.changes import fingerprint_files
from penstock.server.repository.defaults import Defaults
from penstock.server.repository.findings import Finding, log_findings
from penstock.server.repository.repository import Repository
from penstock.server.repository.scan import ModelEntry
from penstock.server.seldon.components import spec_of
from penstock.server.seldon.modules import S2I, image_variables
from penstock.server.settings import Settings

from .graph_file import read
from .nodes import GraphNode


class GraphRepository(Repository):
    """One file, whose nodes with code are models, each with workers of its own.

    Invariant: a file that becomes invalid changes nothing: `deployment` is its last valid content. `served` is the
    deployment that requests use, set by Graph: its nodes remain until Graph switches to the latest.
    Threads: any, for methods that block; `deployment` and `served` are the event loop's.
    """

    def __init__(
        self, settings: Settings, file: Path, defaults: Defaults, environ: Mapping[str, str] = os.environ
    ) -> None:
        super().__init__((file,), defaults)
        self._settings = settings
        self._environ = environ
        self._file = file
        self._last_fingerprint: bytes | None = None
        self._lock = threading.Lock()
        self.deployment = self.served = read(file)

    def scan(self) -> tuple[list[ModelEntry], list[Finding], dict[str, bytes]]:
        """Read the file; blocks."""
        nodes = self._nodes()
        fingerprints = {node.model: self._fingerprint(node) for node in nodes}
        warnings = [finding for finding in self.deployment.findings if not finding.is_mistake]
        return [self._entry(node) for node in nodes], warnings, fingerprints

    def fingerprints(self) -> dict[str, bytes]:
        """Return the fingerprint of each node; blocks."""
        return {node.model: self._fingerprint(node) for node in self._nodes()}

    def fingerprint(self, name: str) -> bytes:
        """Return the fingerprint of one node; blocks."""
        node = self._find(name)
        return b"" if node is None else self._fingerprint(node)

    def read(self, name: str, config: Any = None) -> tuple[ModelEntry | None, bytes]:
        """Read one node; blocks."""
        node = self._find(name)
        if node is None:
            return None, b""
        if config is not None:
            finding = Finding(self._file, "takes no configuration: it is in the graph file", node.line, model=name)
            return ModelEntry(name, self._file, findings=(finding,)), self._fingerprint(node)
        return self._entry(node), self._fingerprint(node)

    def names(self) -> list[str]:
        """List the names of the models; blocks."""
        return sorted(node.model for node in self._nodes())

    def _nodes(self) -> list[GraphNode]:
        """Read the file again if it has changed; if it is now invalid, keep the last valid content."""
        with self._lock:
            latest = fingerprint_files([self._file])
            if latest != self._last_fingerprint:
                self._last_fingerprint = latest
                deployment = read(self._file)
                if not deployment.mistakes:
                    self.deployment = deployment
                else:
                    log_findings(deployment.findings)
            served = {node.model: node for node in self.served.nodes}
            return list((served | {node.model: node for node in self.deployment.nodes}).values())

    def _find(self, name: str) -> GraphNode | None:
        return next((node for node in self._nodes() if node.model == name), None)

    def _fingerprint(self, node: GraphNode) -> bytes:
        """Return a value that changes with the node's modules, its s2i file, or its part of the graph file."""
        if self._settings.model_control_mode == "none" or node.code is None:
            return b"-"
        content = json.dumps([node.code.component, [*node.parameters], {**node.environment}], sort_keys=True)
        paths = [*sorted(node.code.folder.rglob("*.py")), node.code.folder / S2I]
        return fingerprint_files(path for path in paths if path.exists()) + content.encode("utf-8", "surrogateescape")

    def _entry(self, node: GraphNode) -> ModelEntry:
        settings, code = self._settings, node.code
        if code is None:
            raise ValueError(f"node '{node.name}' has no code")
        environment = image_variables(code.folder, self._environ) | {**node.environment}
        spec = spec_of(settings, node.model, code, json.dumps([*node.parameters]), environment)
        return ModelEntry(node.model, self._file, (spec,), model_config_pb2().ModelConfig(name=node.model))
