"""The handler that is served by default."""

from seeds import mended as handler  # noqa: F401
