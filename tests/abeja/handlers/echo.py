"""Echoes the request as JSON."""

import base64


def text_of(content):
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "base64:" + base64.b64encode(content).decode()


def handler(request, context):
    answer = {
        "http_method": request["http_method"],
        "content_type": request["content_type"],
        "headers": request["headers"],
        "contents": [
            {name: part[name] for name in ("content_type", "form_name", "file_name", "metadata")}
            for part in request["contents"]
        ],
        "context": context,
    }
    if request["contents"]:
        answer["body"] = text_of(request.read())
        answer["bodies"] = [text_of(part.read()) for part in request["contents"][1:]]
    return {"content_type": "application/json", "content": answer}


def size(request, context):
    """Answers with the size of the body, for bodies that are too large for a recorded case."""
    parts = [part.read() for part in request["contents"]]
    return {"content": {"sizes": [len(part) for part in parts], "sums": [sum(part) % 65521 for part in parts]}}
