"""All requests, by group."""

from __future__ import annotations

from . import requests, returned, served

GROUPS = [*returned.GROUPS, *requests.GROUPS, *served.GROUPS]
