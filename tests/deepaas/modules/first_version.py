"""A module that has the methods of version 1 yet, beside those of version 2, which call them."""

import pathlib


def predict_data(args):
    (file,) = args["files"]
    if args["accept"] == "application/zip":
        pathlib.Path("made.zip").write_bytes(b"PK")
        return open("made.zip", "rb")
    if args["accept"] == "text/plain":
        return None
    return {"file": tuple(file), "content": pathlib.Path(file.filename).read_text(), "accept": args["accept"]}


def predict_url(args):
    return args


def get_predict_args():
    return {}


def predict(**kwargs):
    return {}
