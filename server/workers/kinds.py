"""Kinds: what the messages between a server and its workers are.

A call is answered by REPLY or ERROR with its number, and calls run one at a time, in order. What is told runs at once,
beside a call, and is not answered; numbers mean there what the service says.
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
"""Body: an InferError (ipc/refusals.py)."""
FIRST_CALL = 32
"""The services' own calls: up to FIRST_TOLD."""
FIRST_TOLD = 64
"""What is told, in either direction."""
