"""Trainings: begun, told of, ended."""

from __future__ import annotations

from tests.originals import FORM, URLENCODED, RecordedRequest, get, multipart, post

from .definitions import group, predict

TRAIN = "/v2/models/trains/train/"
DONE = '"status": "(?!running)'
UUID = {"UUID": r'"uuid": "(\w+)"'}
MODEL = {"trains": "trains"}


def complete_training(name: str, query: str, until: str = DONE) -> list[RecordedRequest]:
    """Begin one, wait until it is at an end, and take it away."""
    return [
        post(f"{name}-begun", TRAIN + query, keep=UUID),
        get(f"{name}-ended", TRAIN + "{UUID}", until=until),
        get(f"{name}-listed", TRAIN),
        get(f"{name}-deleted", TRAIN + "{UUID}", "DELETE"),
        get(f"{name}-gone", TRAIN + "{UUID}"),
    ]


KINDS = ["acc", "error", "quiet", "accents", "key", "later", "nothing", "bytes", "nan", "more"]
SIMPLE: list[RecordedRequest] = [
    get("none", TRAIN),
    post("D30", TRAIN),
    post("bad", TRAIN + "?sleep=x&list=y&when=z"),
    post("bad-json", TRAIN, "{bad"),
    get("unknown", TRAIN + "0" * 32),
    get("unknown-deleted", TRAIN + "0" * 32, "DELETE"),
    get("odd", TRAIN + "nonsense"),
    *(request for kind in KINDS for request in complete_training(kind, f"?sleep=0&give={kind}")),
]
RUNNING: list[RecordedRequest] = [
    post("begun", TRAIN + "?sleep=0.5", keep=UUID),
    get("one", TRAIN + "{UUID}"),
    get("listed", TRAIN),
    get("with-a-slash", TRAIN + "{UUID}/"),
    get("posted", TRAIN + "{UUID}", "POST"),
    get("put", TRAIN + "{UUID}", "PUT"),
    get("done", TRAIN + "{UUID}", until=DONE),
    post("second", TRAIN + "?sleep=0", keep={"SECOND": UUID["UUID"]}),
    get("second-done", TRAIN + "{SECOND}", until=DONE),
    get("both", TRAIN),
    get("first-deleted", TRAIN + "{UUID}", "DELETE"),
    get("one-left", TRAIN),
    predict("predicts", "trains"),
]
QUEUED: list[RecordedRequest] = [
    post("first", TRAIN + "?sleep=0.5", keep=UUID),
    post("second", TRAIN + "?sleep=0", keep={"SECOND": UUID["UUID"]}),
    get("second-waits", TRAIN + "{SECOND}"),
    get("both-done", TRAIN, until='^(?!.*"running")'),
]
CANCELLED: list[RecordedRequest] = [
    post("begun", TRAIN + "?sleep=60", keep=UUID),
    get("D33", TRAIN + "{UUID}", "DELETE"),
    get("gone", TRAIN + "{UUID}"),
    get("none", TRAIN),
    predict("predicts-after", "trains"),
    post("next", TRAIN + "?sleep=0", keep=UUID),
    get("next-done", TRAIN + "{UUID}", until=DONE),
]
ENDED: list[RecordedRequest] = [
    post("killed", TRAIN + "?sleep=0&give=_exit", keep=UUID),
    predict("killed-predicts", "trains", silent=True),
    post("exits", TRAIN + "?sleep=0&give=exit", keep=UUID),
    predict("exits-predicts", "trains", silent=True),
]
FILES: list[RecordedRequest] = [
    post("T9", TRAIN, multipart(("sleep", "0"), ("data", "of the file", "f.txt", "text/plain")), FORM, keep=UUID),
    get("T9-ended", TRAIN + "{UUID}", until=DONE),
    post("text", TRAIN, multipart(("sleep", "0"), ("data", "a text")), FORM, keep=UUID),
    post("json", TRAIN, {"sleep": 0, "list": ["1", 2]}, keep=UUID),
    get("json-ended", TRAIN + "{UUID}", until=DONE),
    post("form", TRAIN, "sleep=0&list=1&list=2&give=more", URLENCODED, keep=UUID),
    get("form-ended", TRAIN + "{UUID}", until=DONE),
    post("date", TRAIN, {"sleep": 0, "when": "2020-01-02", "give": "more"}),
    get("date-listed", TRAIN),
    get("swagger", "/swagger.json"),
]
GROUPS = [
    group("trained", SIMPLE, models=MODEL),
    group("training", RUNNING, models=MODEL),
    group("training-queued", QUEUED, models=MODEL),
    group("training-cancelled", CANCELLED, models=MODEL),
    group("training-killed", ENDED, models=MODEL),
    group("trained-with-files", FILES, models=MODEL),
]
