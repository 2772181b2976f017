from __future__ import annotations

import sys

import pytest

from penstock.perf import command


def test_the_gate_says_what_it_misses_where_penstock_is_only_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "penstock.perf.gate.command", raising=False)
    monkeypatch.setitem(sys.modules, "penstock.perf.gate.measures", None)

    assert command.main(["gate"]) == command.USAGE_STATUS
    assert "pip install 'penstock[dev]'" in capsys.readouterr().err


def test_an_interrupt_while_a_word_is_being_loaded_has_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str, package: str | None = None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupted)

    assert command.main(["-m", "iris"]) == 130
