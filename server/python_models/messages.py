"""Messages: what a server and a worker with a Python model say to each other, beside workers/kinds.py.

Bodies are JSON, but for none at all. The tensors of several requests or answers follow one another in one list; each
says the names of its own.

A request is {"id": str, "number": int, "inputs": [name], "outputs": [name] (those requested), "correlation": int |
str, "flags": int (1 sequence start, 2 sequence end), "timeout_us": int, "priority": int, "parameters": {}}. `number`
is the server's, and names it in what is told. Where it is traced it has "context", too: [traceparent, tracestate]. An
answer is {"outputs": [name] or null, "error": null or {"code": a name of Code, "message": str}, "parameters": {},
"final": bool}. One that a model of another gets has "bf16", too: which outputs are.

The service is `penstock.server.python_models.inside.service`. Its settings: {"file": path of model.py, "args": what
Triton gives `initialize`, all strings, "complete": null, or a model's configuration: then only `auto_complete_config`
is called, with it, and the worker serves no requests}. It answers being opened with {"config": the completed one}, or
{"config": null, "asked": whether the model is to be asked if it is ready}. `args["model_config"]` says whether the
model is decoupled, and `args["model_instance_name"]` who it is in errors. EXECUTE is never answered with ERROR for what
user code raises: every request that has no final answer gets that error as its own.
"""

from __future__ import annotations

import re

EXECUTE = 32
"""Call. {"requests": [request]}; answered by {"answers": [answer or null], "again": [number]}: null for one whose
answers are told, and for one of `again`, which is to be executed once more, by the same number, or cancelled. Without
`again` there is none such."""

ANSWER = 64
"""Told by the worker, number: the request's. One answer; `final` says that there are no more, and with `outputs` null
and no `error` nothing but that."""
CANCEL = 65
"""Told by the server, number: the request's. Nobody takes its answers any more."""
CALL = 66
"""Told by the worker, number: its own. {"model", "version": str, "decoupled": bool, "trace": the number of a request
that it is made for, 0: none, "request": request}: infer."""
CALLED = 67
"""Told by the server, number: as CALL. One answer of that model."""
LEAVE = 68
"""Told by the worker, number: as CALL. Nobody takes its answers any more."""
CONTROL = 69
"""Told by the worker, number: its own. {"do": "load" | "unload" | "ready", "model", "version": str, "files": [path],
"config": JSON or "", "dependents": bool (unload too what needs it)}, the tensors the files' bytes as uint8."""
CONTROLLED = 70
"""Told by the server, number: as CONTROL. {"error": as an answer's, "result": bool}."""
METRIC = 71
"""Told by the worker. {"family", "kind": "counter" | "gauge" | "histogram", "help", "labels": {}, "do": "make" |
"increment" | "set" | "observe" | "drop family", "value": float, "buckets": [float]}."""
LOG = 72
"""Told by the worker. {"level": "info" | "warning" | "error" | "verbose", "message", "file", "line"}."""
HOLD = 73
"""Told by the server, number: the request's. Its answers come faster than they are taken: the next is to wait."""
GO_ON = 74
"""Told by the server, number: as HOLD. There is room again."""
ASK_READY = 75
"""Told by the server, where the model has a say in it: is it ready? One question at a time."""
READY = 76
"""Told by the worker. {"ready": bool}."""
TRACEBACK = "\nTraceback (most recent call last):\n"
"""What parts a LOG's message from the traceback after it."""

METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*\Z")
LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*\Z")
