"""What is served where nobody says which."""

from seeds import mended as handler  # noqa: F401
