"""The server that the client tests use by default."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients import models
from tests.live import Live, live_server


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("repository")
    for write in (models.write_examples, models.write_identities, models.write_shapes):
        write(root)
    with live_server(root) as server:
        yield server
