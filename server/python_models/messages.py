"""Messages: what a server and a worker with a Python model say to each other, beside workers/kinds.py.

Bodies are JSON, but for none at all. The tensors of several requests or answers follow one another in one list; each
says the names of its own.

A request is {"id": str, "number": int, "inputs": [name], "outputs": [name] (those requested), "correlation": int | str,
"flags": int (1 sequence start, 2 sequence end), "timeout_us": int, "priority": int, "parameters": {}}. `number` is the
server's, and names it in what is told. An answer is {"outputs": [name], "error": null or {"code": a name of Code,
"message": str}, "parameters": {}, "final": bool}.
"""

from __future__ import annotations

EXECUTE = 32
"""Call. {"requests": [request]}; answered by {"answers": [answer or null]}, null for one whose answers are told."""

ANSWER = 64
"""Told by the worker, number: the request's. One answer; `final` says that there are no more, and without `outputs` and
`error` nothing but that."""
CANCEL = 65
"""Told by the server, number: the request's. Nobody takes its answers any more."""
CALL = 66
"""Told by the worker, number: its own for it. {"model", "version", "decoupled": bool, "request": request}: infer."""
CALLED = 67
"""Told by the server, number: as CALL. One answer of that model."""
LEAVE = 68
"""Told by the worker, number: as CALL. Nobody takes its answers any more."""
CONTROL = 69
"""Told by the worker, number: its own. {"do": "load" | "unload" | "ready", "model", "version", "files": [path]}, the
tensors the files' bytes as uint8."""
CONTROLLED = 70
"""Told by the server, number: as CONTROL. {"error": as an answer's, "result": bool}."""
METRIC = 71
"""Told by the worker. {"family", "kind": "counter" | "gauge" | "histogram", "help", "labels": {}, "do": "make" |
"increment" | "set" | "observe" | "drop" | "drop family", "value": float, "buckets": [float]}."""
LOG = 72
"""Told by the worker. {"level": "info" | "warning" | "error" | "verbose", "message", "file", "line"}."""
