"""Kinds of message between a server and its workers.

A call is answered by REPLY or ERROR with its number; calls run one at a time, in order. Messages from FIRST_MESSAGE up
are handled immediately, even while a call runs, and are not answered; the service defines what their numbers mean.
"""

from __future__ import annotations

OPEN = 16
"""The first call: import the service and open it. Body: JSON, {"service", "settings", "path"}."""
CLOSE = 17
"""The last call: close the service and end."""
PING = 18
"""A call that does nothing."""
REPLY = 19
ERROR = 20
"""Body: an InferError (ipc/errors.py)."""
FIRST_CALL = 32
"""The services' own calls, below FIRST_MESSAGE."""
FIRST_MESSAGE = 64
"""Messages without an answer, in either direction."""
