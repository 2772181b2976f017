from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.server.isolated.backend import IsolatedBackend
from tests.backends.contract import BackendContract
from tests.backends.onnx_models import contract_model
from tests.server.isolated.stage import onnx_loader

pytestmark = pytest.mark.slow


class Stock:
    """The Backends of all cases by model, kept because each is a process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loader = onnx_loader()
        self.loaded: dict[str, IsolatedBackend] = {}

    def get(self, name: str) -> IsolatedBackend:
        if name not in self.loaded:
            self.loaded[name] = self.loader(contract_model(name, self.folder / f"{name}.onnx"), "cpu", {})
        return self.loaded[name]


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stock]:
    new_stock = Stock(tmp_path_factory.mktemp("models"))
    yield new_stock
    for backend in new_stock.loaded.values():
        backend.close()


class TestIsolatedBackend(BackendContract):
    """ONNX Runtime in a worker meets the same contract as in this process."""

    @pytest.fixture(autouse=True)
    def _take(self, stock: Stock) -> None:
        self.stock = stock

    def make(self, name: str) -> IsolatedBackend:
        return self.stock.get(name)

    def test_a_backend_can_be_closed(self) -> None:
        super().test_a_backend_can_be_closed()

        del self.stock.loaded["rows"]
