"""Examples of Seldon's documentation that cannot be served; the others are in scenarios/seeds.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.server.listening.sockets import StartError
from tests.live import live_server

SEEDS = Path(__file__).parent / "components" / "seeds"


@pytest.mark.slow
def test_the_documented_combiner_with_a_missing_import_is_not_served() -> None:
    with (
        pytest.raises(StartError, match="NameError: name 'logging' is not defined"),
        live_server(SEEDS, dialect="seldon", seldon_component="ImageNetCombiner"),
    ):
        pass
