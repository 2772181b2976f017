"""Repositories on disk for the tests of this folder. The model files are empty: loaders are fakes."""

from __future__ import annotations

from pathlib import Path


def make(root: Path, *files: str, **texts: str) -> Path:
    """Create empty files; `texts` are written to `<model>/config.pbtxt`."""
    for file in files:
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for model, text in texts.items():
        (root / model).mkdir(parents=True, exist_ok=True)
        (root / model / "config.pbtxt").write_text(text, encoding="utf-8")
    return root


def native(root: Path, model: str, text: str) -> None:
    """Write `<model>/penstock.toml`."""
    (root / model / "penstock.toml").write_text(text, encoding="utf-8")
