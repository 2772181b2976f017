from __future__ import annotations

import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.cortex.api import Api
from penstock.server.cortex.models import ModelFinder
from penstock.server.cortex.saved_models import EXPECTED_STRUCTURE, ModelError, choose_folder, unpack, version_of

SAVED_MODEL = ("saved_model.pb", "variables/variables.index", "variables/variables.data-00000-of-00001")


def api(project: Path, model: str, kind: str = "tensorflow") -> Api:
    return Api(project, "d", "a", "/d/a", kind, model)


def write_saved_model(folder: Path, *, without: str = "") -> Path:
    for name in SAVED_MODEL:
        if name != without:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(name, "utf-8")
    return folder


def write_zip(path: Path, *folders: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for folder in folders:
            for name in SAVED_MODEL:
                archive.writestr(f"{folder}/{name}" if folder else name, name)
    return path


@pytest.fixture
def models() -> Iterator[ModelFinder]:
    finder = ModelFinder()
    yield finder
    finder.close()


class TestModelLocation:
    def test_a_model_is_found_in_the_project_or_by_its_absolute_path(self, models: ModelFinder, tmp_path: Path) -> None:
        (tmp_path / "m.onnx").touch()

        for path in ("m.onnx", str(tmp_path / "m.onnx"), "/mnt/project/m.onnx"):
            found = models.find(api(tmp_path, path, "onnx"))
            assert (found.path, found.version) == (tmp_path / "m.onnx", 1)

    def test_a_model_on_s3_is_found_under_the_s3_root(self, tmp_path: Path) -> None:
        (tmp_path / "s3/bucket/deep").mkdir(parents=True)
        (tmp_path / "s3/bucket/deep/m.onnx").touch()
        models = ModelFinder(str(tmp_path / "s3"))

        assert models.find(api(tmp_path, "s3://bucket/deep/m.onnx", "onnx")).path == tmp_path / "s3/bucket/deep/m.onnx"

    @pytest.mark.parametrize("model", ["s3://bucket/../../secret.onnx", "s3://", "s3:///etc/x.onnx"])
    def test_an_s3_address_that_leaves_the_s3_root_is_rejected(self, model: str, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="is not the URL of an object in a bucket"):
            ModelFinder(str(tmp_path)).find(api(tmp_path, model, "onnx"))

    def test_a_missing_model_is_reported_as_cortex_reported_it(self, models: ModelFinder, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"^m.onnx: not found or insufficient permissions$"):
            models.find(api(tmp_path, "m.onnx", "onnx"))
        with pytest.raises(ModelError, match=r"^s3://b/k: not found or insufficient permissions \(under --s3-root\)$"):
            ModelFinder(str(tmp_path)).find(api(tmp_path, "s3://b/k", "onnx"))

    def test_a_folder_is_rejected_as_an_onnx_model(self, models: ModelFinder, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"for ONNX models, the path should end in \.onnx"):
            models.find(api(tmp_path, ".", "onnx"))


class TestSavedModel:
    def test_a_numbered_folder_is_the_version_itself(self, models: ModelFinder, tmp_path: Path) -> None:
        write_saved_model(tmp_path / "1560263597")

        found = models.find(api(tmp_path, "1560263597/"))

        assert (found.path, found.version) == (tmp_path / "1560263597", 1560263597)

    def test_the_highest_version_inside_a_folder_is_chosen(self, models: ModelFinder, tmp_path: Path) -> None:
        for version in ("9", "10", "2"):
            write_saved_model(tmp_path / "export" / version)

        found = models.find(api(tmp_path, "export"))

        assert (found.path, found.version) == (tmp_path / "export/10", 10)

    def test_an_incomplete_version_is_skipped(self, models: ModelFinder, tmp_path: Path) -> None:
        write_saved_model(tmp_path / "export/9")
        write_saved_model(tmp_path / "export/10", without=SAVED_MODEL[1])

        assert models.find(api(tmp_path, "export")).version == 9

    def test_a_folder_without_a_number_is_version_1(self, models: ModelFinder, tmp_path: Path) -> None:
        write_saved_model(tmp_path / "export")

        assert models.find(api(tmp_path, "export")).version == 1

    @pytest.mark.parametrize("lacking", SAVED_MODEL)
    def test_a_saved_model_that_lacks_a_file_is_rejected_with_the_error_of_cortex(
        self, lacking: str, models: ModelFinder, tmp_path: Path
    ) -> None:
        write_saved_model(tmp_path / "export/1", without=lacking)

        with pytest.raises(ModelError) as caught:
            models.find(api(tmp_path, "export"))

        message = str(caught.value)
        assert message.startswith(EXPECTED_STRUCTURE)
        assert message.splitlines()[0] == "invalid TF export directory."
        more = message.removeprefix(EXPECTED_STRUCTURE).strip()
        named = lacking.replace("00001", "...")
        assert more == ("" if lacking == SAVED_MODEL[0] else f"1/saved_model.pb exists without {named}")

    def test_a_file_is_rejected_as_a_saved_model(self, models: ModelFinder, tmp_path: Path) -> None:
        (tmp_path / "m.pb").touch()

        with pytest.raises(ModelError, match="invalid TF export directory"):
            models.find(api(tmp_path, "m.pb"))


class TestArchive:
    def test_an_unchanged_archive_is_unpacked_once(self, models: ModelFinder, tmp_path: Path) -> None:
        write_zip(tmp_path / "m.zip", "export/3", "export/12")

        found, again = models.find(api(tmp_path, "m.zip")), models.find(api(tmp_path, "m.zip"))

        assert found == again
        assert (found.path.name, found.version) == ("12", 12)
        assert (found.path / SAVED_MODEL[2]).read_text("utf-8") == SAVED_MODEL[2]
        assert not (found.path.parent / "3").exists()

    def test_a_changed_archive_is_unpacked_again(self, models: ModelFinder, tmp_path: Path) -> None:
        write_zip(tmp_path / "m.zip", "1")
        before = models.find(api(tmp_path, "m.zip"))
        (tmp_path / "m.zip").unlink()
        write_zip(tmp_path / "m.zip", "2", "1")

        assert models.find(api(tmp_path, "m.zip")).version == 2
        assert before.path.is_dir()

    def test_an_unpacked_archive_is_deleted_on_close(self, tmp_path: Path) -> None:
        models = ModelFinder()
        found = models.find(api(tmp_path, str(write_zip(tmp_path / "m.zip", ""))))

        models.close()

        assert not found.path.exists()

    @pytest.mark.parametrize("name", ["../saved_model.pb", "/etc/x", "a/../../b", "a\\..\\b"])
    def test_an_archive_with_a_path_outside_itself_is_rejected(self, name: str, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "m.zip", "w") as archive:
            archive.writestr("saved_model.pb", "")
            entry = zipfile.ZipInfo("x")
            entry.filename = name
            archive.writestr(entry, "x")
        (tmp_path / "into").mkdir()

        with pytest.raises(ModelError, match="which is not a path inside it"):
            unpack(tmp_path / "m.zip", tmp_path / "into")
        assert list((tmp_path / "into").iterdir()) == []

    def test_an_archive_with_a_link_is_rejected(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "m.zip", "w") as archive:
            entry = zipfile.ZipInfo("variables")
            entry.external_attr = (stat.S_IFLNK | 0o777) << 16
            archive.writestr(entry, "/etc")

        with pytest.raises(ModelError, match="which is a link"):
            unpack(tmp_path / "m.zip", tmp_path)

    def test_an_archive_that_unpacks_to_too_many_bytes_is_rejected(self, models: ModelFinder, tmp_path: Path) -> None:
        write_zip(tmp_path / "m.zip", "")

        with pytest.raises(ModelError, match="more bytes than a model may have"):
            unpack(tmp_path / "m.zip", tmp_path / "into", max_bytes=20)

    def test_an_archive_that_unpacks_to_exactly_the_limit_is_accepted(self, tmp_path: Path) -> None:
        write_zip(tmp_path / "m.zip", "")
        size = sum(map(len, SAVED_MODEL))

        assert unpack(tmp_path / "m.zip", tmp_path / "into", max_bytes=size) == ""
        with pytest.raises(ModelError, match="more bytes than a model may have"):
            unpack(tmp_path / "m.zip", tmp_path / "again", max_bytes=size - 1)

    def test_an_archive_without_a_saved_model_is_rejected(self, models: ModelFinder, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "m.zip", "w") as archive:
            archive.writestr("x", "")

        with pytest.raises(ModelError, match="invalid TF export directory"):
            models.find(api(tmp_path, "m.zip"))

    @pytest.mark.parametrize(
        ("method", "at"), [(zipfile.ZIP_DEFLATED, 0), (zipfile.ZIP_BZIP2, 0), (zipfile.ZIP_LZMA, 4)]
    )
    def test_an_archive_with_damaged_compressed_bytes_is_reported(
        self, method: int, at: int, models: ModelFinder, tmp_path: Path
    ) -> None:
        with zipfile.ZipFile(write_zip(tmp_path / "m.zip", ""), "a", method) as archive:
            archive.writestr("variables/damaged", " ".join(map(str, range(100))))
            begin = at + archive.getinfo("variables/damaged").header_offset + 30 + len("variables/damaged")
        content = bytearray((tmp_path / "m.zip").read_bytes())
        content[begin : begin + 8] = b"\xff" * 8
        (tmp_path / "m.zip").write_bytes(content)

        with pytest.raises(ModelError, match=r"^m\.zip: cannot be unpacked: "):
            models.find(api(tmp_path, "m.zip"))

    def test_an_archive_entry_without_a_name_is_reported(self, models: ModelFinder, tmp_path: Path) -> None:
        with zipfile.ZipFile(write_zip(tmp_path / "m.zip", ""), "a") as archive:
            archive.writestr("@", "")
        (tmp_path / "m.zip").write_bytes((tmp_path / "m.zip").read_bytes().replace(b"@", b"\0"))  # ends a name

        with pytest.raises(ModelError, match="holds '', which is not a path inside it"):
            models.find(api(tmp_path, "m.zip"))

    @given(text=st.binary(max_size=200), cut=st.integers(0, 400))
    def test_any_corrupt_archive_is_unpacked_or_reported(
        self, text: bytes, cut: int, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        folder = tmp_path_factory.mktemp("zip")
        archive = write_zip(folder / "whole.zip", "1").read_bytes()
        for number, content in enumerate((text, archive[:cut], archive[:cut] + text + archive[cut:])):
            (folder / "m.zip").write_bytes(content)
            try:
                assert unpack(folder / "m.zip", folder / str(number)) == "1"
            except ModelError as error:
                message = str(error)
                assert message


class TestStore:
    @pytest.fixture
    def store(self) -> Iterator[fsspec.AbstractFileSystem]:
        memory_store = fsspec.filesystem("memory")
        yield memory_store
        memory_store.store.clear()
        memory_store.pseudo_dirs[:] = [""]

    def test_an_onnx_file_is_fetched_from_a_store(
        self, store: fsspec.AbstractFileSystem, models: ModelFinder, tmp_path: Path
    ) -> None:
        store.pipe("/bucket/m.onnx", b"graph")

        found = models.find(api(tmp_path, "memory://bucket/m.onnx", "onnx"))

        assert found.path.read_bytes() == b"graph"

    def test_only_the_highest_version_is_fetched_from_a_store(
        self, store: fsspec.AbstractFileSystem, models: ModelFinder, tmp_path: Path
    ) -> None:
        for version in (1, 11):
            for name in SAVED_MODEL:
                store.pipe(f"/bucket/export/{version}/{name}", name.encode())

        found = models.find(api(tmp_path, "memory://bucket/export"))

        assert (found.path.name, found.version) == ("11", 11)
        assert sorted(path.name for path in found.path.parent.iterdir()) == ["11"]

    def test_an_archive_is_fetched_from_a_store(
        self, store: fsspec.AbstractFileSystem, models: ModelFinder, tmp_path: Path
    ) -> None:
        store.pipe("/bucket/m.zip", write_zip(tmp_path / "m.zip", "7").read_bytes())

        assert models.find(api(tmp_path, "memory://bucket/m.zip")).version == 7

    def test_the_stamp_changes_when_the_object_in_the_store_changes(
        self, store: fsspec.AbstractFileSystem, models: ModelFinder, tmp_path: Path
    ) -> None:
        model_api = api(tmp_path, "memory://bucket/m.onnx", "onnx")
        assert models.stamp(model_api) == ""
        store.pipe("/bucket/m.onnx", b"1")
        before = models.stamp(model_api)

        store.pipe("/bucket/m.onnx", b"2")

        assert models.stamp(model_api) != before != ""

    def test_the_stamp_stays_the_same_when_the_store_cannot_be_read(
        self, store: fsspec.AbstractFileSystem, models: ModelFinder, tmp_path: Path
    ) -> None:
        model_api = api(tmp_path, "memory://bucket/m.onnx", "onnx")
        store.pipe("/bucket/m.onnx", b"1")
        before = models.stamp(model_api)

        store.rm("/bucket/m.onnx")

        assert models.stamp(model_api) == before != ""

    def test_a_model_missing_in_a_store_is_reported(
        self, store: fsspec.AbstractFileSystem, models: ModelFinder, tmp_path: Path
    ) -> None:
        with pytest.raises(ModelError, match=r"memory://nothing/m\.onnx: not found or insufficient permissions"):
            models.find(api(tmp_path, "memory://nothing/m.onnx", "onnx"))

    def test_the_error_suggests_s3_root_when_the_s3_client_is_missing(
        self, models: ModelFinder, tmp_path: Path
    ) -> None:
        pytest.importorskip("fsspec")
        with pytest.raises(ModelError, match=r"s3://b/k: .*--s3-root DIR"):
            models.find(api(tmp_path, "s3://b/k", "onnx"))


class TestChooseFolder:
    @given(versions=st.sets(st.integers(0, 10**12), min_size=1), above=st.sampled_from(["", "export", "a/b"]))
    def test_the_folder_with_the_highest_number_is_chosen(self, versions: set[int], above: str) -> None:
        folders = [f"{above}/{version}" if above else str(version) for version in versions]

        assert version_of(choose_folder(f"{folder}/{name}" for folder in folders for name in SAVED_MODEL) or "") == max(
            versions
        )

    @given(names=st.lists(st.text() | st.sampled_from([f"{n}/{name}" for n in (1, 2) for name in SAVED_MODEL])))
    def test_only_a_complete_saved_model_is_chosen(self, names: list[str]) -> None:
        folder = choose_folder(names)

        assert folder is None or {f"{folder}/{name}" for name in SAVED_MODEL[:2]} <= set(names)
