"""Kinds of message between a front end and the engine over their Link. Numbers are the front end's unless stated.

32 to 63 are inference (remote_engine.py, engine_service.py); 64 to 95 are everything else (control_calls.py,
shared_state.py).
"""

from __future__ import annotations

SUBMIT = 32
"""From the front end: one request."""
CANCEL = 33
"""From the front end: the request is cancelled."""
DONE = 34
"""From the engine: outputs."""
FAILED = 35
"""From the engine: an error."""
ANSWER = 36
"""From the engine: one answer of several; DONE or FAILED follows the last."""
TEMPLATE = 37
"""From the front end: the properties shared by requests that refer to this number."""
MODELS = 38
"""From the engine: changes in what is served; MODELS_APPLIED answers its number, which is the engine's."""
STATISTICS = 39
"""From the front end: counts for the model of this number: hooks, failures."""
MODELS_APPLIED = 40
"""From the front end: MODELS of this number is in place. Body: JSON, what failed."""
MODEL_RELEASED = 41
"""From the front end: it no longer needs the model of this number."""
CONNECTIONS = 42
"""From the front end: its connections over HTTP and over gRPC, and the counts of its ports. Body: JSON."""

CALL = 64
"""From the front end: a call of the control plane. PARTs and END answer it."""
PART = 65
END = 66
ABANDON = 67
"""From the front end: the answer of a CALL is no longer wanted."""
STATE = 68
"""From the engine: state shared by all processes (regions, log settings); STATE_APPLIED answers it."""
PART_CONFIRMED = 70
"""From the front end: a PART of the CALL of this number has been passed on to its client."""
STATE_APPLIED = 71
"""From the front end: STATE of this number is in place. Body: the failure, empty for none."""
