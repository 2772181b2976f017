"""Flips a picture, left to right."""

import http
from io import BytesIO

import cv2
import numpy as np
from PIL import Image


def handler(request, context):
    picture = Image.open(BytesIO(request.read()))
    flipped = Image.fromarray(cv2.flip(np.asarray(picture), 1))
    written = BytesIO()
    flipped.save(written, format='JPEG', quality=95)
    written.seek(0)
    return {
        'status_code': http.HTTPStatus.OK,
        'content_type': 'image/jpeg',
        'content': written,
    }
