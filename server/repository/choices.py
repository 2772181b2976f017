"""Choices: how models are loaded and unloaded. Made from the settings for ModelControl."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.server.settings import Settings


@dataclass(frozen=True, slots=True)
class Choices:
    """The settings of the same names. `names` are the models to load at start in explicit mode."""

    mode: str = "none"
    names: tuple[str, ...] = ()
    threads: int = 4
    retries: int = 0
    poll_s: float = 15.0

    @classmethod
    def of(cls, settings: Settings) -> Choices:
        """Create it from a server's settings."""
        return cls(
            settings.model_control_mode, settings.load_model, settings.model_load_thread_count,
            settings.model_load_retry_count, settings.repository_poll_secs,
        )  # fmt: skip
