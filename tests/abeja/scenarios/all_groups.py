"""All requests, by group."""

from __future__ import annotations

from . import handlers_and_health, requests, responses

GROUPS = [*responses.GROUPS, *requests.GROUPS, *handlers_and_health.GROUPS]
