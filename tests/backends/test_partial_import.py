from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.backends.partial_import import import_parts

PACKAGE = "partial_stock"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package whose imported modules can be listed."""
    folder = tmp_path / PACKAGE
    (folder / "inner").mkdir(parents=True)
    (folder / "__init__.py").write_text("from partial_stock.inner import part\nfrom . import heavy\nwhole = True\n")
    (folder / "heavy.py").write_text("")
    (folder / "inner" / "__init__.py").write_text("")
    (folder / "inner" / "part.py").write_text("from partial_stock.inner import other\nvalue = 3\n")
    (folder / "inner" / "other.py").write_text("")
    (folder / "inner" / "late.py").write_text("import partial_stock\nseen = partial_stock.whole\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


def imported() -> set[str]:
    return {name.partition(".")[2] for name in sys.modules if name.startswith(f"{PACKAGE}.")}


def test_parts_are_imported_without_the_rest_of_the_package() -> None:
    import_parts(PACKAGE, ["inner.part"])

    assert imported() == {"inner", "inner.part", "inner.other"}


def test_the_garbage_collector_is_paused_while_parts_are_imported(place: Path) -> None:
    (place / "inner" / "part.py").write_text("import gc\ncollects = gc.isenabled()\n")

    import_parts(PACKAGE, ["inner.part"])

    assert not sys.modules[f"{PACKAGE}.inner.part"].collects
    assert gc.isenabled()


def test_using_another_name_imports_the_whole_package() -> None:
    import_parts(PACKAGE, ["inner.part"])
    part = sys.modules[f"{PACKAGE}.inner.part"]
    import_parts(PACKAGE, ["inner.late"])  # does nothing, since the package is already imported
    late = __import__(f"{PACKAGE}.inner.late", fromlist=["seen"])

    assert late.seen is True
    assert "heavy" in imported()
    assert sys.modules[f"{PACKAGE}.inner.part"] is part


def test_the_whole_package_is_imported_when_a_part_fails() -> None:
    import_parts(PACKAGE, ["inner.part", "inner.gone"])

    assert sys.modules[PACKAGE].whole is True
    assert "heavy" in imported()


def test_an_imported_package_is_kept_and_a_missing_one_is_ignored() -> None:
    package = __import__(PACKAGE)
    import_parts(PACKAGE, ["inner.part"])
    import_parts("partial_stock_that_nobody_has", ["part"])

    assert sys.modules[PACKAGE] is package
