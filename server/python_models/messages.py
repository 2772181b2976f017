"""Messages between a server and a worker with a Python model, in addition to workers/kinds.py.

Bodies are JSON, or empty. The tensors of several requests or answers follow one another in one list; each request or
answer lists the names of its own.

A request is {"id": str, "number": int, "inputs": [name], "outputs": [name] (those requested), "correlation": int | str,
"flags": int (1 sequence start, 2 sequence end), "timeout_us": int, "priority": int, "parameters": {}}. `number` is
assigned by the server and identifies the request in later messages. A traced request also has "context": [traceparent,
tracestate]. An answer is {"outputs": [name] or null, "error": null or {"code": a name of Code, "message": str},
"parameters": {}, "final": bool}. An answer to a CALL also has "bf16": the outputs of that datatype.

The service is `penstock.server.python_models.inside.service`. Its settings: {"file": path of model.py, "args": the
arguments that Triton passes to `initialize`, all strings, "complete": null, or a model's configuration: then only
`auto_complete_config` is called, with it, and the worker serves no requests}. It answers OPEN with {"config": the
completed one}, or {"config": null, "has_is_ready": whether the model defines `is_ready`}. `args["model_config"]` states
whether the model is decoupled, and `args["model_instance_name"]` names it in errors. EXECUTE is never answered with
ERROR for an exception in user code: each request without a final answer gets that error as its own.
"""

from __future__ import annotations

import re

EXECUTE = 32
"""Call. {"requests": [request]}; answered by {"answers": [answer or null], "rescheduled": [number]}. The answer is
null if it is sent separately, or if the request is in `rescheduled`: it will be executed once more, by the same number,
or cancelled. `rescheduled` is omitted if empty."""

ANSWER = 64
"""From the worker, number: the request's. One answer. `final` marks the last one; with `outputs` null and no `error`,
the message states only that there are no more."""
CANCEL = 65
"""From the server, number: the request's. Its answers are no longer wanted."""
CALL = 66
"""From the worker, number: its own. Run an inference. {"model", "version": str, "decoupled": bool, "trace": the number
of the request on whose behalf it is made, 0: none, "request": request}."""
CALL_ANSWER = 67
"""From the server, number: as CALL. One answer of that model."""
CANCEL_CALL = 68
"""From the worker, number: as CALL. Its answers are no longer wanted."""
CONTROL = 69
"""From the worker, number: its own. {"do": "load" | "unload" | "ready", "model", "version": str, "files": [path],
"config": JSON or "", "dependents": bool (also unload the models that an ensemble needs)}. The tensors are the files'
bytes as uint8."""
CONTROL_RESULT = 70
"""From the server, number: as CONTROL. {"error": as an answer's, "result": bool}."""
METRIC = 71
"""From the worker. {"family", "kind": "counter" | "gauge" | "histogram", "help", "labels": {}, "do": "make" |
"increment" | "set" | "observe" | "drop family", "value": float, "buckets": [float]}."""
LOG = 72
"""From the worker. {"level": "info" | "warning" | "error" | "verbose", "message", "file", "line"}."""
PAUSE = 73
"""From the server, number: the request's. Its answers arrive faster than they are consumed: hold the next one."""
RESUME = 74
"""From the server, number: as PAUSE. Resume sending."""
CHECK_READY = 75
"""From the server, if the model defines `is_ready`: is it ready? One question at a time."""
READY = 76
"""From the worker. {"ready": bool}."""
TRACEBACK = "\nTraceback (most recent call last):\n"
"""Separates the message of a LOG from the traceback after it."""

METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*\Z")
LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*\Z")
