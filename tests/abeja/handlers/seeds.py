"""The examples of the platform's page on model handler functions, but for those that need an image library."""

import http
import json


def json_in_json_out(request, context):
    req_data = json.load(request)
    total_without_tax = req_data["total_without_tax"]
    total_without_tax = int(total_without_tax)
    total = total_without_tax * 1.08

    return {
        "status_code": http.HTTPStatus.OK,
        "content_type": "application/json; charset=utf8",
        "content": {"total": total},
    }


def mended(request, context):
    req_data = json.load(request)
    if "total_without_tax" not in req_data:
        return {
            "status_code": http.HTTPStatus.BAD_REQUEST,
            "content_type": "application/json; charset=utf8",
            "content": {"message": "total_without_tax is need"},
        }
    return {
        "status_code": http.HTTPStatus.OK,
        "content_type": "application/json; charset=utf8",
        "content": {"total": int(req_data["total_without_tax"]) * 1.08},
    }


def as_printed(request, context):
    req_data = json.load(request)
    if "total_without_tax" not in req_data:
        return {
            "status_code": http.HTTPStaus.BAD_REQUEST,
            "content_type": "application/json; charset=utf8",
            "content": {"message": "total_without_tax is need"},
        }
    return {"content": {"total": int(req_data["total_without_tax"]) * 1.08}}


def predictions(request, context):
    content = {
        "transaction_id": 1234567890,
        "category_id": 10,
        "predictions": [0.25, 0.75],
    }
    return {
        "status_code": http.HTTPStatus.OK,
        "content_type": "application/json; charset=utf8",
        "content": content,
    }
