"""DEEPaaS: a module on Penstock and on the original, side by side. `python -m penstock.perf.deepaas`.

Both are started by the original's command, with one worker, and driven in turns by the same load: 32 persistent
connections. The module is installed for both, as users' modules are, and does next to nothing. CPU is that of all
processes of a side. The original is an environment with deepaas 2.6.0: `--original PYTHON`, or DEEPAAS_ORIGINAL.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from . import side_by_side
from .calls import Call
from .server_process import Process, free_port
from .wrk import Load, drive

CONNECTIONS = 32
TIMES = 5
"""The target of issue 9: at least this many times the original's requests/s."""
UPLOAD_BYTES = 100_000
EDGE = "an edge that is in no file"

MODULE = """
from webargs import fields, validate


def get_metadata():
    return {"name": "flowers", "version": "1.0"}


def get_predict_args():
    return {
        "values": fields.List(fields.Float(), required=True),
        "scale": fields.Float(missing=1.0, validate=validate.Range(min=0)),
        "unit": fields.Str(missing="cm", enum=["cm", "inch"]),
    }


def predict(**kwargs):
    return {"sum": sum(kwargs["values"]) * kwargs["scale"], "unit": kwargs["unit"]}
"""
UPLOADS = """
from webargs import fields


def get_metadata():
    return {"name": "uploads", "version": "1.0"}


def get_predict_args():
    return {"data": fields.Field(required=True, type="file", location="form")}


def predict(data):
    with open(data.filename, "rb") as file:
        return {"name": data.original_filename, "bytes": len(file.read())}
"""
MODULES = {"flowers": MODULE, "uploads": UPLOADS}


def arguments() -> Call:
    """Make a call with arguments in its path and in a JSON body."""
    body = json.dumps({"values": [5.1, 3.5, 1.4, 0.2], "unit": "inch"}).encode()
    return Call("/v2/models/flowers/predict/?scale=2", (body,), {"Content-Type": "application/json"})


def upload() -> Call:
    """Make a call with a file in a form."""
    head = f'--{EDGE}\r\nContent-Disposition: form-data; name="data"; filename="a.bin"\r\n'
    content = bytes(range(250)) * (UPLOAD_BYTES // 250)
    body = f"{head}Content-Type: application/octet-stream\r\n\r\n".encode() + content + f"\r\n--{EDGE}--\r\n".encode()
    return Call("/v2/models/uploads/predict/", (body,), {"Content-Type": f'multipart/form-data; boundary="{EDGE}"'})


CALLS: Mapping[str, tuple[Call, object]] = {
    "arguments": (arguments(), {"sum": 20.4, "unit": "inch"}),
    "upload": (upload(), {"name": "a.bin", "bytes": UPLOAD_BYTES}),
}
"""By case: the call, and the prediction expected."""


def install(folder: Path) -> None:
    """Write the modules and what installing them leaves: a distribution with entry points."""
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(text)
    dist_info = folder / "perf-1.0.dist-info"
    dist_info.mkdir()
    (dist_info / "METADATA").write_text("Metadata-Version: 2.1\nName: perf\nVersion: 1.0\n")
    points = "".join(f"{name} = {name}\n" for name in MODULES)
    (dist_info / "entry_points.txt").write_text(f"[deepaas.v2.model]\n{points}")


def ask(server: Process) -> None:
    """Send every call. Raises: RuntimeError if a prediction is not as expected."""
    for call, expected in CALLS.values():
        answer = json.loads(server.request("POST", call.path, call.bodies[0], call.headers))
        if answer != {"status": "OK", "predictions": expected}:
            raise RuntimeError(f"{call.path}: {answer}")


def load_of(call: Call) -> Callable[[side_by_side.ProcessTree, int], Load]:
    """Return a function that keeps 32 connections busy with a call."""
    return lambda family, seconds: drive(family, call, CONNECTIONS, seconds)


def served(
    command: Sequence[str], folder: Path, home: Path
) -> contextlib.AbstractContextManager[side_by_side.ProcessTree]:
    """Serve what is installed in a folder. `home` is where a side leaves files: the original leaves every upload."""
    home.mkdir()
    environ = {"PYTHONPATH": str(folder)} | dict.fromkeys(("HOME", "XDG_STATE_HOME", "TMPDIR"), str(home))
    port = free_port()
    return side_by_side.served([*command, "--listen-port", str(port)], folder, port, ask, environ)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m penstock.perf.deepaas", description=__doc__)
    parser.add_argument("--original", default=os.environ.get("DEEPAAS_ORIGINAL", ""), metavar="PYTHON")
    args = side_by_side.arguments(parser)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "installed")
        folder.mkdir()
        install(folder)
        penstock_command = [sys.executable, "-m", "penstock.server.cli", "deepaas-run"]
        sides = {"penstock": served(penstock_command, folder, Path(name, "ours"))}
        if args.original:
            command = [str(Path(args.original).with_name("deepaas-run"))]
            sides["DEEPaaS 2.6.0"] = served(command, folder, Path(name, "theirs"))
        else:
            print("the original is left out: no --original PYTHON, and no DEEPAAS_ORIGINAL")
        print(
            f"{os.cpu_count()} CPUs, {CONNECTIONS} connections, an upload of {UPLOAD_BYTES / 1e3:g} kB, one worker each"
        )
        loads = {case: load_of(call) for case, (call, _) in CALLS.items()}
        side_by_side.show(sides, loads, dict.fromkeys(loads, TIMES), args)


if __name__ == "__main__":
    main()
