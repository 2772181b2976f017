"""ControlOptions: how models are loaded and unloaded. Made from the settings for ModelControl."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.server.settings import Settings


@dataclass(frozen=True, slots=True)
class ControlOptions:
    """The settings. `startup_models` are the models to load at start in explicit mode."""

    mode: str = "none"
    startup_models: tuple[str, ...] = ()
    max_concurrent_loads: int = 4
    max_retries: int = 0
    poll_interval_s: float = 15.0

    @classmethod
    def from_settings(cls, settings: Settings) -> ControlOptions:
        """Create it from a server's settings."""
        return cls(
            settings.model_control_mode, settings.load_model, settings.model_load_thread_count,
            settings.model_load_retry_count, settings.repository_poll_secs,
        )  # fmt: skip
