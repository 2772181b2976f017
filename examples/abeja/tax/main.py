"""Adds the tax: JSON in, JSON out."""

import http
import json

JSON = 'application/json; charset=utf8'


def handler(request, context):
    req_data = json.load(request)
    if 'total_without_tax' not in req_data:
        return {
            'status_code': http.HTTPStatus.BAD_REQUEST,
            'content_type': JSON,
            'content': {'message': 'total_without_tax is needed'},
        }
    total = int(req_data['total_without_tax']) * 1.08
    return {'content_type': JSON, 'content': {'total': total}}
