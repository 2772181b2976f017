"""Kinds: what a front end and the engine say to each other over their Link. Numbers are the front end's unless said.

32 to 63 are inference (remote_engine.py, engine_service.py), 64 to 95 everything else (calls.py, shared_state.py).
"""

from __future__ import annotations

SUBMIT = 32
"""Front end: one request."""
CANCEL = 33
"""Front end: nobody waits for this request any more."""
DONE = 34
"""Engine: outputs."""
FAILED = 35
"""Engine: an error."""
ANSWER = 36
"""Engine: one answer of several; DONE or FAILED comes after the last."""
FORM = 37
"""Front end: what requests that name this number have in common."""
MODELS = 38
"""Engine: what has changed of all that is served; ACKNOWLEDGED answers its number, which is the engine's."""
COUNTED = 39
"""Front end: what it has counted of the model of this number: hooks, failures."""
ACKNOWLEDGED = 40
"""Front end: MODELS of this number is in place. Body: JSON, what failed."""
GONE = 41
"""Front end: nobody there needs the model of this number any more."""
CONNECTIONS = 42
"""Front end: how many connections it has, over HTTP and over gRPC, and what its ports have counted. Body: JSON."""

ASK = 64
"""Front end: a call of the control plane. PARTs answer it, and END."""
PART = 65
END = 66
LEAVE = 67
"""Front end: nobody takes the answer of an ASK any more."""
STATE = 68
"""Engine: what is the same in every process (regions, log settings); IN_PLACE answers it."""
TAKEN = 70
"""Front end: a PART of the ASK of this number has gone on to its client."""
IN_PLACE = 71
"""Front end: STATE of this number is in place. Body: what failed, empty for nothing."""
