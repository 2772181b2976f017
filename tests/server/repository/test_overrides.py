from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.errors import Code, InferError
from penstock.server.repository import overrides


def refusal(call: object, *args: object) -> tuple[Code, str]:
    with pytest.raises(InferError) as caught:
        call(*args)  # type: ignore[operator]
    return caught.value.code, caught.value.message


class TestNames:
    @pytest.mark.parametrize("name", ["m", "model_1", "a.b", "ünïcode", "with space", "x" * 255])
    def test_a_name_that_can_be_a_folder_is_accepted(self, name: str) -> None:
        overrides.check_name(name)

    @pytest.mark.parametrize(
        "name", ["", " ", ".", "..", ".hidden", "a/b", "/etc", "a\\b", "a\0", "a\n", "x" * 256, "ü" * 128, "\ud800"]
    )
    def test_a_model_name_that_cannot_be_a_folder_is_rejected(self, name: str) -> None:
        code, text = refusal(overrides.check_name, name)

        assert code is Code.INVALID
        assert text.startswith("invalid model name")
        assert text.isascii()


class TestFiles:
    @pytest.mark.parametrize("name", ["1/model.onnx", "labels.txt", "1/weights/part.bin", "config.pbtxt.bak"])
    def test_a_path_inside_the_models_folder_is_accepted(self, name: str) -> None:
        overrides.check_files("m", {name: b""})

    @pytest.mark.parametrize(
        "name",
        [
            "", "/", "/etc/passwd", "../x", "1/../../x", "1/./x", "1//x", "1/", "a\\..\\b", "1/a\0b", "1/.hidden",
            ".hidden/x", "x" * 256, "1/" + "x" * 256, "/".join("123456789"), "1/\ud800", "~/x\n",
        ],
    )  # fmt: skip
    def test_a_path_outside_the_models_folder_is_rejected(self, name: str) -> None:
        code, text = refusal(overrides.check_files, "m", {name: b""})

        assert code is Code.INVALID
        assert text.startswith("failed to load 'm': load parameter 'file:")
        assert "must be a path inside the model's folder" in text

    def test_a_file_with_the_name_of_a_folder_is_rejected(self) -> None:
        assert "is also the name of a folder" in refusal(overrides.check_files, "m", {"1": b"", "1/model.onnx": b""})[1]

    @pytest.mark.parametrize("name", ["config.pbtxt", "configs/a.pbtxt"])
    def test_a_configuration_file_among_the_files_is_rejected(self, name: str) -> None:
        assert "must be passed as the parameter 'config'" in refusal(overrides.check_files, "m", {name: b""})[1]

    def test_penstock_toml_in_a_request_is_rejected(self) -> None:
        assert "cannot be given with a request" in refusal(overrides.check_files, "m", {"penstock.toml": b""})[1]

    @given(st.lists(st.sampled_from(["..", ".", "", "a", "/", "\\", "\0", "b.onnx", "~", "C:", " "]), max_size=6))
    def test_accepted_files_are_written_only_inside_the_models_folder(self, parts: list[str]) -> None:
        name = "/".join(parts)
        try:
            overrides.check_files("m", {name: b"x"})
        except InferError:
            return
        folder = overrides.write_files("m", {name: b"x"})
        try:
            written = [path for path in folder.parent.rglob("*") if path.is_file()]
            assert written == [folder / name]
            assert written[0].resolve().is_relative_to(folder.resolve())
        finally:
            overrides.remove_folder(folder)
        assert not folder.parent.exists()

    def test_files_of_a_request_are_readable_only_by_the_server(self) -> None:
        folder = overrides.write_files("m", {"1/model.onnx": b"x"})
        try:
            assert folder.name == "m"
            assert folder.parent.stat().st_mode & 0o077 == 0
        finally:
            overrides.remove_folder(folder)

    def test_files_are_removed_when_writing_fails(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        with pytest.raises(TypeError):
            overrides.write_files("m", {"1/a": b"", "1/b": "no bytes"})  # type: ignore[dict-item]

        assert list(tmp_path.iterdir()) == []


class TestConfig:
    def test_both_spellings_of_a_field_are_accepted(self) -> None:
        assert overrides.read_config("m", '{"max_batch_size": 3}') == overrides.read_config("m", '{"maxBatchSize": 3}')

    def test_a_single_value_for_a_repeated_field_is_a_list_of_one(self) -> None:
        alone = """{"instanceGroup": {"count": 2}, "input": {"name": "x", "dims": 4}, "output": null,
                   "dynamic_batching": {"preferred_batch_size": 8}, "parameters": {"a": {"string_value": "1"}}}"""
        listed = """{"instance_group": [{"count": 2}], "input": [{"name": "x", "dims": [4]}],
                    "dynamic_batching": {"preferred_batch_size": [8]}, "parameters": {"a": {"string_value": "1"}}}"""
        assert overrides.read_config("m", alone) == overrides.read_config("m", listed)

    def test_unquoted_names_and_single_quotes_are_accepted_as_in_triton(self) -> None:
        loose = r"""{backend: 'python', "sequence_batching" : { "iterative_sequence" : true, direct: {} },
                   'parameters': {'a "b"': {string_value: 'it\'s: "x"'}, "null:": {"string_value": "a: 'b'"}}}"""
        strict = r"""{"backend": "python", "sequence_batching": {"iterative_sequence": true, "direct": {}},
                    "parameters": {"a \"b\"": {"string_value": "it's: \"x\""}, "null:": {"string_value": "a: 'b'"}}}"""
        assert overrides.read_config("m", loose) == overrides.read_config("m", strict)

    @pytest.mark.parametrize(
        "text",
        ["", "nonsense", "{'a", '{a: "', "{max_batch_size: 1,}", "[]", "1", "null", '{"nonsense": 1}',
         '{"max_batch_size": "x"}', '{"input": 1}', "[" * 9000, '{"max_batch_size": 99999999999}',
         '{"input": [{"data_type": "TYPE_NONE"}]}',
         '{"a":' * 9000],
    )  # fmt: skip
    def test_an_invalid_configuration_is_rejected_with_a_short_message(self, text: str) -> None:
        code, message = refusal(overrides.read_config, "m", text)

        assert code is Code.INVALID
        assert message.startswith("failed to load 'm': load parameter 'config' is not a ModelConfig in JSON: ")
        assert len(message) < 600
        assert "versionPolicy" not in message


def test_a_configuration_with_too_many_values_is_rejected() -> None:
    with pytest.raises(InferError, match="more than 4194304 values"):
        overrides.read_config("m", '{"input": [' + "{}," * (1 << 21) + "{}]}")
