"""The seed's example of content types, as printed."""

import os
import tempfile

from webargs import fields, validate

_FOLDER = tempfile.mkdtemp()
img_path, zip_path = os.path.join(_FOLDER, "x.png"), os.path.join(_FOLDER, "x.zip")
with open(img_path, "wb") as _stored:
    _stored.write(b"\x89PNG\r\n\x1a\n")
with open(zip_path, "wb") as _stored:
    _stored.write(b"PK\x05\x06" + bytes(18))


def get_predict_args():
    return {
        'accept': fields.Str(description="Media type(s) that is/are acceptable for the response.",
                             missing='application/zip',
                             validate=validate.OneOf(['application/zip', 'image/png', 'application/json']))
    }


def predict(**args):
    # Run your prediction

    # Return file according to user selection
    if args['accept'] == 'image/png':
        return open(img_path, 'rb')

    elif args['accept'] == 'application/json':
        return {'some': 'json'}

    elif args['accept'] == 'application/zip':
        return open(zip_path, 'rb')
