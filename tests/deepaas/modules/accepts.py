"""The seed's example of content types, and variants of it."""

import io
import os
import tempfile

from webargs import fields, validate

FOLDER = os.path.join(tempfile.gettempdir(), "asked-of-deepaas-%d" % os.getuid())
PNG = bytes([137, 80, 78, 71, 13, 10, 26, 10, 0, 1, 2, 255])
ZIP = b"PK\x05\x06" + bytes(18)


def _stored(name, content):
    os.makedirs(FOLDER, exist_ok=True)
    path = os.path.join(FOLDER, name)
    temporary = "%s.%d" % (path, os.getpid())
    with open(temporary, "wb") as stored:
        stored.write(content)
    os.replace(temporary, path)
    return path


def get_predict_args():
    return {
        "accept": fields.Str(
            description="Media type(s) that is/are acceptable for the response.",
            missing="application/zip",
            validate=validate.OneOf(["application/zip", "image/png", "application/json"]),
        ),
        "form": fields.Str(missing="file"),
    }


def predict(**args):
    if args["form"] == "bytes":
        return PNG
    if args["form"] == "bytearray":
        return bytearray(PNG)
    if args["form"] == "text":
        return "h\u00e9llo"
    if args["form"] == "dict":
        return {"some": "json"}
    if args["form"] == "none":
        return None
    if args["form"] == "number":
        return 7
    if args["form"] == "list":
        return [1]
    if args["form"] == "bytesio":
        return io.BytesIO(PNG)
    if args["form"] == "stringio":
        return io.StringIO("text")
    if args["form"] == "text-file":
        return open(_stored("x.txt", b"text"))
    if args["form"] == "unbuffered":
        return open(_stored("x.png", PNG), "rb", buffering=0)
    if args["form"] == "updated":
        return open(_stored("x.png", PNG), "r+b")
    if args["form"] == "odd-name":
        return open(_stored("\u00e9 \"q\" a.png", PNG), "rb")
    if args["form"] == "no-extension":
        return open(_stored("plain", PNG), "rb")
    if args["form"] == "empty":
        return open(_stored("empty.png", b""), "rb")
    if args["form"] == "read":
        stored = open(_stored("x.png", PNG), "rb")
        stored.read(3)
        return stored
    if args["form"] == "closed":
        stored = open(_stored("x.png", PNG), "rb")
        stored.close()
        return stored
    if args["form"] == "large":
        return open(_stored("large.bin", bytes(range(256)) * 16), "rb")
    if args["form"] == "gone":
        path = _stored("gone.png", PNG)
        stored = open(path, "rb")
        os.remove(path)
        return stored
    if args["accept"] == "image/png":
        return open(_stored("x.png", PNG), "rb")
    elif args["accept"] in ("application/json", "*/*"):
        return {"some": "json", "accept": args["accept"]}
    elif args["accept"] == "application/zip":
        return open(_stored("x.zip", ZIP), "rb")
    return "of another type: " + args["accept"]


class InHeaders:
    """The same, taken from the header Accept."""

    @staticmethod
    def get_predict_args():
        return {
            "accept": fields.Str(
                location="headers", validate=validate.OneOf(["image/png", "application/json", "text/plain"])
            ),
            "form": fields.Str(missing="file"),
        }

    predict = staticmethod(predict)


class JsonFirst:
    """JSON if nothing is said, and a schema for it."""

    schema = {"some": fields.Str(required=True), "accept": fields.Str()}

    @staticmethod
    def get_predict_args():
        return {
            "accept": fields.Str(missing="application/json", validate=validate.OneOf(["application/json", "image/png"])),
            "form": fields.Str(missing="file"),
        }

    predict = staticmethod(predict)


class DefaultIsNotFirst:
    """The user's default is the second of the choices."""

    @staticmethod
    def get_predict_args():
        return {
            "accept": fields.Str(missing="image/png", validate=validate.OneOf(["application/json", "image/png"])),
            "form": fields.Str(missing="file"),
        }

    predict = staticmethod(predict)


class Required:
    """It must be said."""

    @staticmethod
    def get_predict_args():
        return {
            "accept": fields.Str(required=True, validate=validate.OneOf(["text/plain", "application/json"])),
            "form": fields.Str(missing="text"),
        }

    predict = staticmethod(predict)


class Unchecked:
    """No list of choices: the original does not start."""

    @staticmethod
    def get_predict_args():
        return {"accept": fields.Str(missing="application/json")}

    predict = staticmethod(predict)


class Parameters:
    """Content types with parameters, and one that is none."""

    @staticmethod
    def get_predict_args():
        choices = ["text/plain; charset=latin-1", "text/csv", "nonsense", "application/problem+json", "text/html"]
        return {
            "accept": fields.Str(missing="text/csv", validate=validate.OneOf(choices)),
            "form": fields.Str(missing="text"),
        }

    predict = staticmethod(predict)
