from __future__ import annotations

import sys

import pytest

from penstock.perf import command


def test_the_gate_names_what_an_installed_penstock_lacks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "penstock.perf.gate.command", raising=False)
    monkeypatch.setitem(sys.modules, "penstock.perf.gate.measures", None)

    assert command.main(["gate"]) == command.USAGE_STATUS
    assert "pip install 'penstock[dev]'" in capsys.readouterr().err


def test_an_interrupt_while_a_subcommand_is_imported_has_its_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str, package: str | None = None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupted)

    assert command.main(["-m", "iris"]) == 130
