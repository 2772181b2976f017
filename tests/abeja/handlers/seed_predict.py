"""The page's third example: what a training has left, an image in, JSON out. What it leaves out (...) is filled in."""

import os
import numpy as np
from io import BytesIO
from keras.models import load_model
from PIL import Image

model = load_model(os.path.join(os.environ.get("ABEJA_TRAINING_RESULT_DIR", "."), "model.h5"))


def handler(request, ctx):
    data = request.read()
    imgfile = BytesIO(data)
    img_pil = Image.open(imgfile)
    img_numpy = np.asarray(img_pil)

    img = img_numpy[np.newaxis] / 255.0

    result = model.predict(img)

    result = {
        "result": [
            {"label": label, "probability": "{:.2f}".format(probability)}
            for label, probability in zip(["cat", "dog"], result[0])
        ]
    }

    return {
        "status_code": 200,
        "content_type": "application/json; charset=utf8",
        "content": result,
    }
