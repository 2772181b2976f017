"""`penstock probe` of a server whose only port is a cloud's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.server.probe import probe
from penstock.server.settings import Settings
from tests.server.clouds.cloud_servers import sagemaker, vertex_ai, write_simple


def test_a_probe_uses_the_cloud_port_when_there_is_no_other(tmp_path: Path) -> None:
    repository = write_simple(tmp_path)
    for serving, port in ((sagemaker, "sagemaker_port"), (vertex_ai, "vertex_ai_port")):
        with serving(repository, allow_http=False) as (live, client):
            allowed: dict[str, Any] = {f"allow_{serving.__name__}": True, port: client.base_url.port}
            settings = Settings(allow_http=False, vertex_ai_health_route="/health", **allowed)
            assert probe(settings) == (0, "ready")
            assert live.server.http_port == 0
