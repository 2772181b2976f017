"""Kinds: what the supervisor and a process that it has started say to each other over their control Link."""

from __future__ import annotations

START = 16
"""Supervisor, once, first. Body: JSON, what `child.py` calls an Assignment."""
PREPARE = 24
"""Supervisor, before START: import what the module of a role needs, whichever is to be played. Body: its name."""
ATTACH = 17
"""Supervisor: one end of a socket to the engine or to a front end comes with it. The number is the pairing's."""
PING = 18
"""Supervisor: answered by PONG, of the same number, by the event loop."""
PONG = 19
DRAIN = 20
"""Supervisor: finish what was accepted, and end. The number is 0 if others go on or take its place, 1 if all end."""
SAID = 21
"""The process: what it has come to. Body: JSON, {"state", ...}; the states are those of `fleet.py`, and FAILED."""
KEEP = 22
"""The engine: a part of its state that the next engine has to have. Body: JSON, [key, value]; null: nothing.
A descriptor may come with it."""
KEPT = 25
"""Supervisor, to a new engine before its START: what the last one kept, as it came."""
BOARD = 26
"""Supervisor, to a front end before its START: its place among front ends. Body: JSON, what `neighbours.py` says of it.
The memory that they share comes with it, its mailbox, and the ways to the others'."""
NEIGHBOUR = 27
"""Supervisor, to a front end: another one was started. The number is its place; the way to it comes with it."""
COUNTED = 23
"""Supervisor, to the engine: how many processes there are, and how often each role was started again. Body: JSON."""
HURRY = 28
"""Supervisor, to the engine: its front ends are about to end, and what is held open for more requests is to run."""
FAILED = "failed"
"""It cannot start, and why: for the operator, who has to change something."""
ASKED = "asked"
"""A signal has asked it to end, and not the supervisor: it finishes what it has. That is no failure."""
UNLINKED = "unlinked"
"""A front end has lost its engine, or the way to it, which was that of the `pairing`."""
