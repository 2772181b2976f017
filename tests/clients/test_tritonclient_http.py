"""NVIDIA's HTTP client, sync, against a live server: its examples, and every encoding of a tensor."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton

from tests.clients.client_errors import refused
from tests.clients.tensors import ONLY_BINARY, VALUES, input_of, output_of, pair, same, texts
from tests.live import Live

pytestmark = pytest.mark.slow

ASCENDING = np.arange(16, dtype=np.int32).reshape(1, 16)
MINUS_ONES = np.full((1, 16), -1, np.int32)
WAYS = [None, "gzip", "deflate"]


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[Any]:
    with triton.InferenceServerClient(live.address, concurrency=4) as new_client:
        yield new_client


class TestHealthAndMetadata:
    def test_the_server_and_its_models_are_ready_whatever_the_query_string(self, client: Any) -> None:
        query = {"test_1": 1, "test_2": [2, 3]}

        assert client.is_server_live(query_params=query)
        assert client.is_server_ready(query_params=query)
        assert client.is_model_ready("simple", query_params=query)
        assert client.is_model_ready("versions", "2")

    def test_an_unknown_model_or_version_is_not_ready(self, client: Any) -> None:
        assert not client.is_model_ready("wrong_model_name")
        assert not client.is_model_ready("simple", "7")

    def test_server_metadata_has_the_name_triton_and_the_supported_extensions(self, client: Any) -> None:
        metadata = client.get_server_metadata()

        assert metadata.keys() == {"name", "version", "extensions"}
        assert metadata["name"] == "triton"
        assert {"binary_tensor_data", "statistics", "model_repository", "model_configuration"} <= {
            *metadata["extensions"]
        }

    def test_model_metadata_has_versions_inputs_and_outputs(self, client: Any) -> None:
        metadata = client.get_model_metadata("simple", query_params={"test_1": 1})

        assert metadata == {
            "name": "simple",
            "versions": ["1"],
            "platform": "onnxruntime_onnx",
            "inputs": [{"name": f"INPUT{i}", "datatype": "INT32", "shape": [-1, 16]} for i in (0, 1)],
            "outputs": [{"name": f"OUTPUT{i}", "datatype": "INT32", "shape": [-1, 16]} for i in (0, 1)],
        }

    def test_metadata_lists_all_versions_or_the_requested_one(self, client: Any) -> None:
        assert client.get_model_metadata("versions")["versions"] == ["1", "2", "10"]
        assert client.get_model_metadata("versions", "2")["versions"] == ["2"]

    @pytest.mark.parametrize("ask", ["get_model_metadata", "get_model_config"])
    def test_an_unknown_model_or_version_is_in_the_error(self, client: Any, ask: str) -> None:
        call = getattr(client, ask)

        assert refused(call, "nope") == ("404", "Request for unknown model: 'nope' is not found")
        assert refused(call, "simple", "7") == ("404", "Request for unknown model: 'simple' version 7 is not found")

    def test_the_configuration_has_the_written_and_the_completed_fields(self, client: Any) -> None:
        written, completed = client.get_model_config("simple"), client.get_model_config("simple_auto")

        assert written["max_batch_size"] == 8
        assert completed["max_batch_size"] > 1
        for config in (written, completed):
            assert config["backend"] == "onnxruntime"
            assert [(each["name"], each["data_type"], each["dims"]) for each in config["input"]] == [
                ("INPUT0", "TYPE_INT32", [16]),
                ("INPUT1", "TYPE_INT32", [16]),
            ]

    def test_the_index_lists_every_version(self, client: Any) -> None:
        index = client.get_model_repository_index()

        assert {"name": "simple", "version": "1", "state": "READY"} in index
        assert [entry["version"] for entry in index if entry["name"] == "versions"] == ["1", "2", "10"]
        assert len(index) == len({(entry["name"], entry["version"]) for entry in index})

    def test_load_and_unload_are_rejected_with_tritons_message(self, client: Any) -> None:
        text = "explicit model load / unload is not allowed if polling is enabled"

        assert refused(client.load_model, "simple") == ("503", text)
        assert refused(client.load_model, "simple", config='{"max_batch_size": 16}') == ("503", text)
        assert refused(client.unload_model, "simple") == ("503", text)

    def test_an_unknown_base_path_is_not_found(self, live: Live) -> None:
        with triton.InferenceServerClient(f"{live.address}/base_path") as client:
            assert refused(client.get_server_metadata) == ("404", "Not Found")
            assert refused(client.infer, "simple", pair(ASCENDING, MINUS_ONES)) == ("404", "Not Found")


class TestNvidiaExamples:
    """The sequences of calls in NVIDIA's examples, and what they assert."""

    @pytest.mark.parametrize(("request_way", "response_way"), [*itertools.product(WAYS, WAYS)])
    @pytest.mark.parametrize("outputs", ["named", "all"])
    def test_simple_adds_and_subtracts(self, client: Any, request_way: Any, response_way: Any, outputs: str) -> None:
        result = client.infer(
            "simple",
            pair(ASCENDING, MINUS_ONES, binary=(False, True)),
            outputs=[output_of("OUTPUT0"), output_of("OUTPUT1", binary=False)] if outputs == "named" else None,
            query_params={"test_1": 1, "test_2": 2},
            headers={"test": "1"},
            request_compression_algorithm=request_way,
            response_compression_algorithm=response_way,
        )

        assert result.get_response()["model_name"] == "simple"
        assert result.get_response()["model_version"] == "1"
        assert np.array_equal(result.as_numpy("OUTPUT0"), ASCENDING + MINUS_ONES)
        assert np.array_equal(result.as_numpy("OUTPUT1"), ASCENDING - MINUS_ONES)
        assert result.as_numpy("OUTPUT2") is None

    def test_the_error_for_an_unknown_model_starts_with_the_text_that_clients_expect(self, client: Any) -> None:
        status, text = refused(client.infer, "wrong_model_name", pair(ASCENDING, MINUS_ONES))

        assert status == "404"
        assert text.startswith("Request for unknown model")

    def test_async_calls_can_run_in_parallel(self, client: Any) -> None:
        rows = [np.full((1, 16), i, np.int32) for i in range(12)]
        calls = [client.async_infer("simple", pair(row, ASCENDING), outputs=[output_of("OUTPUT0")]) for row in rows]

        for row, call in zip(rows, calls, strict=True):
            assert np.array_equal(call.get_result().as_numpy("OUTPUT0"), row + ASCENDING)

    def test_the_error_of_an_async_call_is_raised_with_its_result(self, client: Any) -> None:
        call = client.async_infer("nope", pair(ASCENDING, MINUS_ONES))

        assert refused(call.get_result) == ("404", "Request for unknown model: 'nope' is not found")

    def test_inputs_and_outputs_can_be_reused(self, client: Any) -> None:
        inputs, outputs = (
            pair(ASCENDING, MINUS_ONES),
            [output_of("OUTPUT0"), output_of("OUTPUT1", binary=False)],
        )
        for binary in (True, False, True):
            for i in range(3):
                inputs[1].set_data_from_numpy(MINUS_ONES * i, binary_data=binary)
                result = client.infer("simple", inputs, outputs=outputs)

                assert np.array_equal(result.as_numpy("OUTPUT0"), ASCENDING - i)
                assert np.array_equal(result.as_numpy("OUTPUT1"), ASCENDING + i)

    def test_strings_are_added_and_subtracted(self, client: Any) -> None:
        def words(array: Any) -> Any:
            return np.array([str(each).encode() for each in array.ravel()], np.object_).reshape(array.shape)

        inputs = pair(words(ASCENDING), words(MINUS_ONES), binary=(True, False))
        result = client.infer(
            "simple_string", inputs, outputs=[output_of("OUTPUT0"), output_of("OUTPUT1", binary=False)]
        )

        assert texts(result.as_numpy("OUTPUT0")) == [str(i - 1) for i in range(16)]
        assert texts(result.as_numpy("OUTPUT1")) == [str(i + 1) for i in range(16)]

    @pytest.mark.parametrize("binary", [True, False])
    @pytest.mark.parametrize("word", [b"he\x00llo", b"\x00\x01\x02\x03"])
    def test_strings_with_zero_bytes_are_returned_unchanged(self, client: Any, word: bytes, binary: bool) -> None:
        for array in (np.array([[word] * 16], np.object_), np.array([[word] * 16], np.bytes_)):
            inputs = [input_of("INPUT0", array, binary=binary, datatype="BYTES")]
            result = client.infer("simple_identity", inputs, outputs=[output_of("OUTPUT0", binary=binary)])

            assert texts(result.as_numpy("OUTPUT0")) == [word.decode()] * 16

    def test_statistics_of_one_model_have_one_entry(self, client: Any) -> None:
        client.infer("simple", pair(ASCENDING, MINUS_ONES))

        assert [entry["name"] for entry in client.get_inference_statistics("simple")["model_stats"]] == ["simple"]


class TestDatatypes:
    @pytest.mark.parametrize(
        ("datatype", "binary_in", "binary_out"),
        [
            (datatype, *ways)
            for datatype in VALUES
            for ways in itertools.product([True, False], [True, False, None])
            if datatype not in ONLY_BINARY or False not in ways
        ],
    )
    def test_every_value_is_returned_unchanged(
        self, client: Any, datatype: str, binary_in: bool, binary_out: bool | None
    ) -> None:
        sent = VALUES[datatype]
        outputs = None if binary_out is None else [output_of("y", binary=binary_out)]
        result = client.infer(f"identity_{datatype}", [input_of("x", sent, binary=binary_in)], outputs=outputs)

        assert same(datatype, result.as_numpy("y"), sent)
        assert ("parameters" in result.get_output("y")) is (binary_out is not False)

    @pytest.mark.parametrize("datatype", VALUES)
    @pytest.mark.parametrize("way", ["gzip", "deflate"])
    def test_every_value_is_returned_unchanged_with_compression(self, client: Any, datatype: str, way: str) -> None:
        sent = np.tile(VALUES[datatype], (1, 200))
        result = client.infer(
            f"identity_{datatype}", [input_of("x", sent)],
            request_compression_algorithm=way, response_compression_algorithm=way,
        )  # fmt: skip

        assert same(datatype, result.as_numpy("y"), sent)

    @pytest.mark.parametrize(
        ("datatype", "binary"),
        [(datatype, way) for datatype in VALUES for way in (True, False) if way or datatype not in ONLY_BINARY],
    )
    @pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
    def test_empty_tensors_are_returned_unchanged(
        self, client: Any, datatype: str, shape: tuple[int, int], binary: bool
    ) -> None:
        sent = np.empty(shape, VALUES[datatype].dtype)
        result = client.infer(
            f"identity_{datatype}",
            [input_of("x", sent, binary=binary)],
            outputs=[output_of("y", binary=binary)],
        )

        assert same(datatype, result.as_numpy("y"), sent)

    def test_half_floats_are_rejected_as_json_in_both_directions(self, client: Any) -> None:
        sent = VALUES["FP16"]
        status, text = refused(client.infer, "identity_FP16", [input_of("x", sent, binary=False)])
        assert status == "400"
        assert "receiving FP16 data via JSON is not supported. Please use the binary data format for input" in text

        for datatype in sorted(ONLY_BINARY):
            inputs = [input_of("x", VALUES[datatype])]
            status, text = refused(client.infer, f"identity_{datatype}", inputs, outputs=[output_of("y", binary=False)])
            assert status == "400"
            assert f"sending {datatype} data via JSON is not supported. Please use the binary data format" in text

    @pytest.mark.parametrize("binary", [True, False])
    def test_nan_and_infinity_are_returned_in_both_encodings(self, client: Any, binary: bool) -> None:
        above = np.array([[1, -1, 0, 5]], np.float32)
        below = np.array([[0, 0, 0, 2]], np.float32)
        result = client.infer(
            "quotient",
            [input_of("a", above), input_of("b", below)],
            outputs=[output_of("y", binary=binary)],
        )

        np.testing.assert_array_equal(result.as_numpy("y"), [[np.inf, -np.inf, np.nan, 2.5]])

    @pytest.mark.parametrize("count", [5, 500])
    @pytest.mark.parametrize("datatype", ["FP32", "FP64"])
    def test_nan_and_infinity_may_be_sent_as_json(self, client: Any, datatype: str, count: int) -> None:
        sent = np.array([[np.nan, np.inf, -np.inf, 0.1, 1e-45] * (count // 5)], VALUES[datatype].dtype)
        inputs = [input_of("x", sent, binary=False)]
        result = client.infer(f"identity_{datatype}", inputs, outputs=[output_of("y", binary=False)])

        np.testing.assert_array_equal(result.as_numpy("y"), sent)

    def test_strings_that_are_not_utf8_are_a_bad_request(self, client: Any) -> None:
        inputs = [input_of("x", np.array([[b"\xff\xfe"]], np.object_))]

        assert refused(client.infer, "identity_BYTES", inputs)[0] == "400"


class TestShapes:
    @pytest.mark.parametrize(
        ("model", "shape"),
        [("whole", (2, 3)), ("scalar", (1,)), ("fixed", (4, 2)), ("free", (1, 5, 2)), ("free", (3, 1, 7))],
    )
    @pytest.mark.parametrize("binary", [True, False])
    def test_a_shape_that_fits_the_model_is_accepted(
        self, client: Any, model: str, shape: tuple[int, ...], binary: bool
    ) -> None:
        sent = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        result = client.infer(model, [input_of("x", sent, binary=binary)], outputs=[output_of("y", binary=binary)])

        np.testing.assert_array_equal(result.as_numpy("y"), -sent)

    def test_the_rows_of_a_client_batch_keep_their_order(self, client: Any) -> None:
        for rows in (1, 2, 7, 8):
            sent = np.arange(rows * 16, dtype=np.int32).reshape(rows, 16)
            result = client.infer("simple", pair(sent, sent[::-1].copy()))

            np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), sent - sent[::-1])

    def test_more_rows_than_the_models_batch_size_are_rejected(self, client: Any) -> None:
        sent = np.zeros((9, 16), np.int32)

        assert refused(client.infer, "simple", pair(sent, sent)) == (
            "400",
            "[request id: <id_unknown>] inference request batch-size must be <= 8 for 'simple'",
        )

    @pytest.mark.parametrize("binary", list(itertools.product([True, False], repeat=3)))
    def test_several_tensors_are_returned_in_any_mixture_of_encodings(
        self, client: Any, binary: tuple[bool, bool, bool]
    ) -> None:
        a = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
        words = np.array([["é", ""], ["x", "yz"]], np.object_)
        n = np.array([[1, 2], [3, 2**40]], np.int64)
        ways = dict(zip(("a", "words", "n"), binary, strict=True))
        sent = [input_of(name, each, binary=ways[name]) for name, each in (("a", a), ("words", words), ("n", n))]
        requested = [output_of(name, binary=way) for name, way in zip(("total", "same", "twice"), binary, strict=True)]
        for inputs, outputs in ((sent, requested), (sent[::-1], requested[1:]), (sent, None)):
            result = client.infer("mixed", inputs, outputs=outputs)
            names = [each["name"] for each in result.get_response()["outputs"]]

            assert names == ([each.name() for each in outputs] if outputs else ["twice", "same", "total"])
            assert texts(result.as_numpy("same")) == texts(words)
            np.testing.assert_array_equal(result.as_numpy("twice"), a * 2)
            if "total" in names:
                np.testing.assert_array_equal(result.as_numpy("total"), [3, 2**40 + 3])

    @pytest.mark.parametrize("way", WAYS)
    def test_large_tensors_are_returned_unchanged(self, client: Any, way: str | None) -> None:
        megabytes = 20 if way is None else 4
        sent = np.arange(megabytes << 18, dtype=np.float32).reshape(1, -1) % 1000
        result = client.infer(
            "identity_FP32", [input_of("x", sent)],
            request_compression_algorithm=way, response_compression_algorithm=way,
        )  # fmt: skip

        assert np.array_equal(result.as_numpy("y"), sent)

    def test_large_json_tensors_are_returned_unchanged(self, client: Any) -> None:
        sent = np.random.default_rng(1).standard_normal((1, 150_000)).astype(np.float32)
        inputs = [input_of("x", sent, binary=False)]
        result = client.infer("identity_FP32", inputs, outputs=[output_of("y", binary=False)])

        assert np.array_equal(result.as_numpy("y"), sent)


class TestRequests:
    def test_the_id_is_returned_and_an_answer_without_one_has_none(self, client: Any) -> None:
        for request_id in ("42", 'q"uo\\té', "x" * 1000):
            for outputs in (None, [output_of("OUTPUT0", binary=False)]):
                result = client.infer("simple", pair(ASCENDING, ASCENDING), request_id=request_id, outputs=outputs)
                assert result.get_response()["id"] == request_id

        assert "id" not in client.infer("simple", pair(ASCENDING, ASCENDING)).get_response()

    def test_an_error_has_the_request_id(self, client: Any) -> None:
        status, text = refused(client.infer, "simple", pair(ASCENDING, ASCENDING)[:1], request_id="42")

        assert status == "400"
        assert text.startswith("[request id: 42] expected 2 inputs but got 1 inputs for model 'simple'. Got input(s)")

    def test_custom_parameters_are_accepted(self, client: Any) -> None:
        parameters = {"name": "value", "count": 3, "ratio": 0.5, "flag": True}

        result = client.infer("simple", pair(ASCENDING, ASCENDING), parameters=parameters, priority=1)

        assert np.array_equal(result.as_numpy("OUTPUT0"), 2 * ASCENDING)

    def test_a_model_without_sequences_ignores_sequence_parameters(self, client: Any) -> None:
        for sequence in (7, "seven"):
            result = client.infer("simple", pair(ASCENDING, ASCENDING), sequence_id=sequence, sequence_start=True)

            assert np.array_equal(result.as_numpy("OUTPUT0"), 2 * ASCENDING)

    def test_a_sufficient_timeout_has_no_effect(self, client: Any) -> None:
        result = client.infer("simple", pair(ASCENDING, ASCENDING), timeout=10_000_000)

        assert np.array_equal(result.as_numpy("OUTPUT0"), 2 * ASCENDING)

    def test_the_highest_version_answers_unless_another_is_requested(self, client: Any) -> None:
        sent = [input_of("x", np.array([[1]], np.float32))]
        for version, value, name in (("", 11, "10"), ("1", 1, "1"), ("2", 3, "2"), ("10", 11, "10")):
            result = client.infer("versions", sent, model_version=version)

            assert (result.as_numpy("y").item(), result.get_response()["model_version"]) == (value, name)
        assert refused(client.infer, "versions", sent, model_version="3") == (
            "404",
            "Request for unknown model: 'versions' version 3 is not found",
        )


class TestInvalidRequests:
    """Each is rejected with Triton's message, and the connection stays open."""

    def test_a_wrong_shape_is_rejected(self, client: Any) -> None:
        sent = np.zeros((1, 15), np.int32)
        status, text = refused(client.infer, "simple", pair(sent, sent))

        assert status == "400"
        assert "unexpected shape for input 'INPUT0' for model 'simple'. Expected [-1,16], got [1,15]. NOTE:" in text

    def test_a_wrong_shape_for_a_model_without_a_batch_axis_is_rejected(self, client: Any) -> None:
        status, text = refused(client.infer, "fixed", [input_of("x", np.zeros((3, 2), np.float32))])

        assert status == "400"
        assert "unexpected shape for input 'x' for model 'fixed'. Expected [4,2], got [3,2]." in text

    def test_inputs_with_different_batch_sizes_are_rejected(self, client: Any) -> None:
        sent = [np.zeros((rows, 16), np.int32) for rows in (1, 2)]

        assert refused(client.infer, "simple", pair(*sent))[1].endswith(
            "input 'INPUT1' batch size does not match other inputs for 'simple'"
        )

    def test_a_wrong_datatype_is_rejected(self, client: Any) -> None:
        sent = ASCENDING.astype(np.float32)

        assert refused(client.infer, "simple", [input_of("INPUT0", sent), input_of("INPUT1", sent)])[1].endswith(
            "inference input 'INPUT0' data-type is 'FP32', but model 'simple' expects 'INT32'"
        )

    def test_an_unknown_input_or_output_is_rejected(self, client: Any) -> None:
        inputs = pair(ASCENDING, ASCENDING)

        assert refused(client.infer, "simple", [inputs[0], input_of("INPUT2", ASCENDING)])[1].endswith(
            "unexpected inference input 'INPUT2' for model 'simple'"
        )
        assert refused(client.infer, "simple", inputs, outputs=[output_of("OUTPUT2")])[1].endswith(
            "unexpected inference output 'OUTPUT2' for model 'simple'"
        )

    def test_a_byte_size_that_does_not_match_the_shape_is_rejected(self, client: Any) -> None:
        inputs = pair(ASCENDING, ASCENDING)
        inputs[0].set_shape([1, 15])

        assert refused(client.infer, "simple", inputs)[1].endswith(
            "input byte size mismatch for input 'INPUT0' for model 'simple'. Expected 60, got 64"
        )

    def test_a_duplicate_output_is_rejected(self, client: Any) -> None:
        outputs = [output_of("OUTPUT0"), output_of("OUTPUT0")]

        assert refused(client.infer, "simple", pair(ASCENDING, ASCENDING), outputs=outputs)[1].endswith(
            "Duplicate output name 'OUTPUT0' is not allowed in a request"
        )

    def test_shared_memory_is_rejected_as_unsupported(self, client: Any) -> None:
        inputs = pair(ASCENDING, ASCENDING)
        inputs[0].set_shared_memory("region", 64)

        assert refused(client.infer, "simple", inputs)[0] == "501"

    def test_the_connection_stays_usable_after_an_error(self, client: Any) -> None:
        refused(client.infer, "simple", pair(ASCENDING, ASCENDING)[:1])

        assert np.array_equal(client.infer("simple", pair(ASCENDING, ASCENDING)).as_numpy("OUTPUT0"), 2 * ASCENDING)
