"""Handlers that show the process that they run in."""

import os
import sys

IMPORTED_IN = os.getcwd()
NAMES = [
    "ABEJA_ORGANIZATION_ID", "ABEJA_MODEL_ID", "ABEJA_MODEL_VERSION_ID", "ABEJA_MODEL_VERSION", "ABEJA_DEPLOYMENT_ID",
    "ABEJA_SERVICE_ID", "HANDLER", "TRAINING_JOB_DEFINITION_NAME", "TRAINING_JOB_ID", "ABEJA_TRAINING_RESULT_DIR",
    "MINE",
]  # fmt: skip


def handler(request, context):
    return {
        "content": {
            "environment": {name: os.environ.get(name) for name in NAMES},
            "context": context,
            "folder": os.path.basename(os.getcwd()),
            "imported-in": os.path.basename(IMPORTED_IN),
            "first-in-path": sys.path[0] in ("", os.getcwd()),
            "module": __name__,
            "main": sys.modules["__main__"].__name__,
        }
    }


def exits(request, context):
    """Ends its process, unless the query is empty."""
    command = request.read().decode()
    if command == "system-exit":
        sys.exit(3)
    if command == "keyboard-interrupt":
        raise KeyboardInterrupt
    if command == "generator-exit":
        raise GeneratorExit
    if command == "exit":
        os._exit(4)
    return {"content": "alive"}


def prints(request, context):
    print("to stdout")
    print("to stderr", file=sys.stderr)
    return {"content": "printed"}
