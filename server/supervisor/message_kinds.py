"""Kinds of message between the supervisor and a process that it has started, over their control Link."""

from __future__ import annotations

START = 16
"""From the supervisor, first, once. Body: JSON, the assignment, which `child.py` reads."""
PREPARE = 24
"""From the supervisor, before START: import what the module of the roles needs, whatever the role. Body: its name."""
ATTACH = 17
"""From the supervisor, with one end of a socket to the engine or to a front end. The number is the pairing's."""
PING = 18
"""From the supervisor: the event loop answers with PONG, of the same number."""
PONG = 19
DRAIN = 20
"""From the supervisor: finish accepted requests, and end. The number is 1 if all processes end, otherwise 0."""
STATE = 21
"""From the process: its state. Body: JSON, {"state", ...}; the states are those of `fleet.py`, and those below."""
SAVE = 22
"""From the engine: a part of its state for the next engine. Body: JSON, [key, value]; null removes the key. Descriptors
may come with it."""
RESTORE = 25
"""From the supervisor, to a new engine before its START: what the last one saved, unchanged."""
BOARD = 26
"""From the supervisor, to a front end before its START: its slot among front ends. Body: JSON, defined in
`neighbors.py`. The shared memory comes with it, its mailbox, and the sockets to the others' mailboxes."""
NEW_NEIGHBOR = 27
"""From the supervisor, to a front end: another one was started. The number is its slot; the socket to it comes with
it."""
COUNTS = 23
"""From the supervisor, to the engine: the number of processes, and the restarts of each role. Body: JSON."""
FLUSH = 28
"""From the supervisor, to the engine: its front ends are about to end, and batches held open must run."""
FAILED = "failed"
"""It cannot start, and why: the operator has to change something."""
SIGNALED = "signaled"
"""A signal, not the supervisor, has asked it to end: it drains. This is not a failure."""
DISCONNECTED = "disconnected"
"""A front end has lost its engine, or the connection to it, which was the one of this `pairing`."""
