"""The raw binary request: a body that holds only the bytes of the input, as curl sends a file."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.server.v2.decode import decode_raw
from tests.clients import models
from tests.fakes import NoSink, fake_model
from tests.live import Live, live_server

SINK = NoSink()


def one(datatype: str, *dims: int, batched: bool = True) -> Signature:
    shape = (-1, *dims) if batched else dims
    return Signature((TensorSpec("x", datatype, shape),), (TensorSpec("y", "FP32", (-1, 4)),), batched=batched)


def refused(signature: Signature, body: bytes) -> str:
    with pytest.raises(InferError) as caught:
        decode_raw(fake_model(signature=signature), body, SINK)
    assert caught.value.code is Code.INVALID
    return caught.value.message


class TestInputShape:
    @pytest.mark.parametrize(
        ("signature", "shape"),
        [
            (one("FP32", 6), (1, 6)),
            (one("FP32", 2, 3), (1, 2, 3)),
            (one("FP32", -1), (1, 6)),
            (one("FP32", 2, -1), (1, 2, 3)),
            (one("FP32", 2, 3, batched=False), (2, 3)),
            (one("UINT8", -1, 12), (1, 2, 12)),
        ],
    )
    def test_a_raw_input_gets_one_row_and_its_free_dim_is_deduced_from_the_size(
        self, signature: Signature, shape: tuple[int, ...]
    ) -> None:
        body = np.arange(6, dtype=np.float32).tobytes()
        request, options = decode_raw(fake_model(signature=signature), body, SINK)

        [array] = request.inputs
        assert array is not None
        assert array.shape == shape
        assert array.tobytes() == body
        assert options.plan == (True,)
        assert (request.rows, request.nbytes) == (1, 24)

    def test_an_empty_body_makes_an_empty_tensor_if_a_dim_is_free(self) -> None:
        request, _ = decode_raw(fake_model(signature=one("FP32", -1)), b"", SINK)

        assert request.inputs[0] is not None
        assert request.inputs[0].shape == (1, 0)

    def test_a_body_whose_shape_cannot_be_deduced_is_rejected(self) -> None:
        text = (
            "The shape of the raw input 'x' can not be deduced because there are more than one variable-sized dimension"
        )

        assert refused(one("FP32", -1, -1), b"") == text
        assert refused(one("FP32", 4), bytes(15)).endswith("Expected 16, got 15")
        assert refused(one("FP32", 2, -1), bytes(12)).endswith("Expected 8, got 12")
        both = Signature((TensorSpec("a", "FP32", (1,)), TensorSpec("b", "FP32", (1,))), (), batched=False)
        assert refused(both, b"") == (
            "Raw request must only have 1 input (found 1) to be deduced but got 2 inputs in 'm' model configuration"
        )

    def test_a_raw_string_input_is_a_single_string(self) -> None:
        request, _ = decode_raw(fake_model(signature=one("BYTES", 1)), b"a text", SINK)

        assert request.inputs[0] is not None
        assert request.inputs[0].tolist() == [[b"a text"]]
        assert refused(one("BYTES", 2), b"") == "For BYTE datatype raw input 'x', the model must have input shape [1]"
        assert refused(one("BYTES", -1), b"").startswith("For BYTE datatype")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root: Path = tmp_path_factory.mktemp("repository")
    models.write_identity(root, "rows", "")
    models.write_examples(root)
    with live_server(root) as server:
        yield server


def posted(live: Live, model: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(live.address, timeout=10)
    connection.request("POST", f"/v2/models/{model}/infer", body, {"Inference-Header-Content-Length": "0"})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, dict(answer.getheaders()), content


@pytest.mark.parametrize("count", [3, 200_000])
def test_a_raw_request_returns_binary_outputs(live: Live, count: int) -> None:
    values = np.arange(count, dtype=np.float32)
    status, headers, content = posted(live, "rows", values.tobytes())
    length = int(headers["inference-header-content-length"])

    assert status == 200
    assert json.loads(content[:length]) == {
        "model_name": "rows", "model_version": "1",
        "outputs": [
            {"name": "y", "datatype": "FP32", "shape": [1, count], "parameters": {"binary_data_size": 4 * count}}
        ],
    }  # fmt: skip
    assert content[length:] == values.tobytes()


def test_a_raw_request_to_a_model_with_two_inputs_is_a_bad_request(live: Live) -> None:
    status, _, content = posted(live, "simple", bytes(64))

    assert status == 400
    assert json.loads(content)["error"].startswith("Raw request must only have 1 input")
