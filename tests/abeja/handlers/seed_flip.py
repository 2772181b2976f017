"""The page's second example as it is printed: an image in, an image out."""

import cv2
import http
import numpy as np
from io import BytesIO
from PIL import Image


def handler(request, context):
    data = request.read()
    imgfile = BytesIO(data)
    img_pil = Image.open(imgfile)
    img_numpy = np.asarray(img_pil)
    flipped_array = cv2.flip(img_numpy, 1)
    flipped_image = Image.fromarray(flipped_array)
    retBytes = BytesIO()
    flipped_image.save(retBytes, format="JPEG", quality=95)
    retBytes.seek(0)

    return {
        "status_code": http.HTTPStatus.OK,
        "content_type": "image/jpeg",
        "content": retBytes,
    }
