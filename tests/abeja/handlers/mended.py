"""Handlers that show faults of the original."""

import os
import pathlib
import threading
import time

import numpy as np

BUSY = threading.Lock()


def serial(request, context):
    """Answers 500 if another call is running in this process."""
    if not BUSY.acquire(blocking=False):
        raise RuntimeError("two at once")
    time.sleep(0.01)
    BUSY.release()
    return {"content": str(os.getpid())}


def meeting(request, context):
    """Waits until as many calls run in parallel as the query states; each leaves a file in the folder it names."""
    count, folder = request.read().decode().split(",")
    (pathlib.Path(folder) / str(os.getpid())).touch()
    while len(os.listdir(folder)) < int(count):
        time.sleep(0.005)
    return {"content": "met"}


def waiting(request, context):
    """Answers when the file that the query names exists; creates another file when the call has begun."""
    path = request.read().decode()
    if path:
        pathlib.Path(path + ".begun").touch()
        while not os.path.exists(path):
            time.sleep(0.005)
    return {"content": "done"}


def leaving(request, context):
    how = request.read().decode()
    if how == "exit":
        os._exit(1)
    if how == "raise":
        raise SystemExit(0)
    return {"content": "here"}


def poison(request, context):
    if request.read() == b"status":
        return {"status_code": np.int64(200), "content": "x"}
    return {"metadata": {"x-one": b"1"}, "content": "x"}


def seen(request, context):
    return {"content": " ".join(each["key"] for each in request["headers"])}
