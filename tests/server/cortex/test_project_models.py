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
from penstock.server.cortex.archives import ArchiveError, unpack
from penstock.server.cortex.models import ModelError, ModelFinder
from penstock.server.cortex.saved_models import EXPECTED_STRUCTURE, choose_folder, version_of

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
    made = ModelFinder()
    yield made
    made.close()


class TestWhereAModelIs:
    def test_beside_the_project_or_anywhere(self, models: ModelFinder, tmp_path: Path) -> None:
        (tmp_path / "m.onnx").touch()

        for said in ("m.onnx", str(tmp_path / "m.onnx"), "/mnt/project/m.onnx"):
            found = models.find(api(tmp_path, said, "onnx"))
            assert (found.path, found.version) == (tmp_path / "m.onnx", 1)

    def test_in_the_folder_that_stands_for_s3(self, tmp_path: Path) -> None:
        (tmp_path / "s3/bucket/deep").mkdir(parents=True)
        (tmp_path / "s3/bucket/deep/m.onnx").touch()
        models = ModelFinder(str(tmp_path / "s3"))

        assert models.find(api(tmp_path, "s3://bucket/deep/m.onnx", "onnx")).path == tmp_path / "s3/bucket/deep/m.onnx"

    @pytest.mark.parametrize("model", ["s3://bucket/../../secret.onnx", "s3://", "s3:///etc/x.onnx"])
    def test_nowhere_outside_that_folder(self, model: str, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="is not the address of an object in a bucket"):
            ModelFinder(str(tmp_path)).find(api(tmp_path, model, "onnx"))

    def test_one_that_is_not_there(self, models: ModelFinder, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"^m.onnx: not found or insufficient permissions$"):
            models.find(api(tmp_path, "m.onnx", "onnx"))
        with pytest.raises(ModelError, match=r"^s3://b/k: not found or insufficient permissions \(under --s3-root\)$"):
            ModelFinder(str(tmp_path)).find(api(tmp_path, "s3://b/k", "onnx"))

    def test_a_folder_is_no_onnx_model(self, models: ModelFinder, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"for ONNX models, the path should end in \.onnx"):
            models.find(api(tmp_path, ".", "onnx"))


class TestASavedModel:
    def test_is_the_folder_itself(self, models: ModelFinder, tmp_path: Path) -> None:
        write_saved_model(tmp_path / "1560263597")

        found = models.find(api(tmp_path, "1560263597/"))

        assert (found.path, found.version) == (tmp_path / "1560263597", 1560263597)

    def test_is_the_highest_version_inside(self, models: ModelFinder, tmp_path: Path) -> None:
        for version in ("9", "10", "2"):
            write_saved_model(tmp_path / "export" / version)

        found = models.find(api(tmp_path, "export"))

        assert (found.path, found.version) == (tmp_path / "export/10", 10)

    def test_that_is_not_whole_does_not_count(self, models: ModelFinder, tmp_path: Path) -> None:
        write_saved_model(tmp_path / "export/9")
        write_saved_model(tmp_path / "export/10", without=SAVED_MODEL[1])

        assert models.find(api(tmp_path, "export")).version == 9

    def test_without_a_number_is_version_1(self, models: ModelFinder, tmp_path: Path) -> None:
        write_saved_model(tmp_path / "export")

        assert models.find(api(tmp_path, "export")).version == 1

    @pytest.mark.parametrize("lacking", SAVED_MODEL)
    def test_that_lacks_a_file_is_refused_as_cortex_did(
        self, lacking: str, models: ModelFinder, tmp_path: Path
    ) -> None:
        write_saved_model(tmp_path / "export/1", without=lacking)

        with pytest.raises(ModelError) as caught:
            models.find(api(tmp_path, "export"))

        said = str(caught.value)
        assert said.startswith(EXPECTED_STRUCTURE)
        assert said.splitlines()[0] == "invalid TF export directory."
        more = said.removeprefix(EXPECTED_STRUCTURE).strip()
        named = lacking.replace("00001", "...")
        assert more == ("" if lacking == SAVED_MODEL[0] else f"1/saved_model.pb is there without {named}")

    def test_that_is_a_file_is_none(self, models: ModelFinder, tmp_path: Path) -> None:
        (tmp_path / "m.pb").touch()

        with pytest.raises(ModelError, match="invalid TF export directory"):
            models.find(api(tmp_path, "m.pb"))


class TestAnArchive:
    def test_is_unpacked_once(self, models: ModelFinder, tmp_path: Path) -> None:
        write_zip(tmp_path / "m.zip", "export/3", "export/12")

        found, again = models.find(api(tmp_path, "m.zip")), models.find(api(tmp_path, "m.zip"))

        assert found == again
        assert (found.path.name, found.version) == ("12", 12)
        assert (found.path / SAVED_MODEL[2]).read_text("utf-8") == SAVED_MODEL[2]
        assert not (found.path.parent / "3").exists()

    def test_that_is_another_now_is_unpacked_anew(self, models: ModelFinder, tmp_path: Path) -> None:
        write_zip(tmp_path / "m.zip", "1")
        before = models.find(api(tmp_path, "m.zip"))
        (tmp_path / "m.zip").unlink()
        write_zip(tmp_path / "m.zip", "2", "1")

        assert models.find(api(tmp_path, "m.zip")).version == 2
        assert before.path.is_dir()

    def test_leaves_nothing_when_all_ends(self, tmp_path: Path) -> None:
        models = ModelFinder()
        found = models.find(api(tmp_path, str(write_zip(tmp_path / "m.zip", ""))))

        models.close()

        assert not found.path.exists()

    @pytest.mark.parametrize("name", ["../saved_model.pb", "/etc/x", "a/../../b", "a\\..\\b"])
    def test_that_names_places_outside_is_refused(self, name: str, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "m.zip", "w") as archive:
            archive.writestr("saved_model.pb", "")
            entry = zipfile.ZipInfo("x")
            entry.filename = name
            archive.writestr(entry, "x")
        (tmp_path / "into").mkdir()

        with pytest.raises(ArchiveError, match="which is not a path inside it"):
            unpack(tmp_path / "m.zip", tmp_path / "into")
        assert list((tmp_path / "into").iterdir()) == []

    def test_that_holds_a_link_is_refused(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "m.zip", "w") as archive:
            entry = zipfile.ZipInfo("variables")
            entry.external_attr = (stat.S_IFLNK | 0o777) << 16
            archive.writestr(entry, "/etc")

        with pytest.raises(ArchiveError, match="which is a link"):
            unpack(tmp_path / "m.zip", tmp_path)

    def test_that_becomes_too_large_is_refused(self, models: ModelFinder, tmp_path: Path) -> None:
        write_zip(tmp_path / "m.zip", "")

        with pytest.raises(ArchiveError, match="more bytes than a model may have"):
            unpack(tmp_path / "m.zip", tmp_path / "into", max_bytes=20)

    def test_that_becomes_as_large_as_it_may_is_taken(self, tmp_path: Path) -> None:
        write_zip(tmp_path / "m.zip", "")
        size = sum(map(len, SAVED_MODEL))

        assert unpack(tmp_path / "m.zip", tmp_path / "into", max_bytes=size) == ""
        with pytest.raises(ArchiveError, match="more bytes than a model may have"):
            unpack(tmp_path / "m.zip", tmp_path / "again", max_bytes=size - 1)

    def test_without_a_saved_model_is_refused(self, models: ModelFinder, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "m.zip", "w") as archive:
            archive.writestr("x", "")

        with pytest.raises(ModelError, match="invalid TF export directory"):
            models.find(api(tmp_path, "m.zip"))

    @pytest.mark.parametrize(
        ("method", "at"), [(zipfile.ZIP_DEFLATED, 0), (zipfile.ZIP_BZIP2, 0), (zipfile.ZIP_LZMA, 4)]
    )
    def test_whose_compressed_bytes_are_damaged_is_told(
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

    def test_with_an_entry_that_has_no_name_is_told(self, models: ModelFinder, tmp_path: Path) -> None:
        with zipfile.ZipFile(write_zip(tmp_path / "m.zip", ""), "a") as archive:
            archive.writestr("@", "")
        (tmp_path / "m.zip").write_bytes((tmp_path / "m.zip").read_bytes().replace(b"@", b"\0"))  # where a name ends

        with pytest.raises(ModelError, match=r"^m\.zip: cannot be unpacked: "):
            models.find(api(tmp_path, "m.zip"))

    @given(text=st.binary(max_size=200), cut=st.integers(0, 400))
    def test_that_is_none_or_broken_is_told(
        self, text: bytes, cut: int, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        folder = tmp_path_factory.mktemp("zip")
        whole = write_zip(folder / "whole.zip", "1").read_bytes()
        for number, content in enumerate((text, whole[:cut], whole[:cut] + text + whole[cut:])):
            (folder / "m.zip").write_bytes(content)
            try:
                assert unpack(folder / "m.zip", folder / str(number)) == "1"
            except ArchiveError as error:
                told = str(error)
                assert told


class TestAStore:
    @pytest.fixture
    def store(self) -> Iterator[fsspec.AbstractFileSystem]:
        made = fsspec.filesystem("memory")
        yield made
        made.store.clear()
        made.pseudo_dirs[:] = [""]

    def test_gives_a_file(self, store: fsspec.AbstractFileSystem, models: ModelFinder, tmp_path: Path) -> None:
        store.pipe("/bucket/m.onnx", b"graph")

        found = models.find(api(tmp_path, "memory://bucket/m.onnx", "onnx"))

        assert found.path.read_bytes() == b"graph"

    def test_gives_the_highest_version_and_nothing_else(
        self, store: fsspec.AbstractFileSystem, models: ModelFinder, tmp_path: Path
    ) -> None:
        for version in (1, 11):
            for name in SAVED_MODEL:
                store.pipe(f"/bucket/export/{version}/{name}", name.encode())

        found = models.find(api(tmp_path, "memory://bucket/export"))

        assert (found.path.name, found.version) == ("11", 11)
        assert sorted(path.name for path in found.path.parent.iterdir()) == ["11"]

    def test_gives_an_archive(self, store: fsspec.AbstractFileSystem, models: ModelFinder, tmp_path: Path) -> None:
        store.pipe("/bucket/m.zip", write_zip(tmp_path / "m.zip", "7").read_bytes())

        assert models.find(api(tmp_path, "memory://bucket/m.zip")).version == 7

    def test_tells_what_has_changed(
        self, store: fsspec.AbstractFileSystem, models: ModelFinder, tmp_path: Path
    ) -> None:
        said = api(tmp_path, "memory://bucket/m.onnx", "onnx")
        assert models.stamp(said) == ""
        store.pipe("/bucket/m.onnx", b"1")
        before = models.stamp(said)

        store.pipe("/bucket/m.onnx", b"2")

        assert models.stamp(said) != before != ""

    def test_that_cannot_be_asked_changes_nothing(
        self, store: fsspec.AbstractFileSystem, models: ModelFinder, tmp_path: Path
    ) -> None:
        said = api(tmp_path, "memory://bucket/m.onnx", "onnx")
        store.pipe("/bucket/m.onnx", b"1")
        before = models.stamp(said)

        store.rm("/bucket/m.onnx")

        assert models.stamp(said) == before != ""

    def test_without_the_model_is_told(
        self, store: fsspec.AbstractFileSystem, models: ModelFinder, tmp_path: Path
    ) -> None:
        with pytest.raises(ModelError, match=r"memory://nothing/m\.onnx: not found or insufficient permissions"):
            models.find(api(tmp_path, "memory://nothing/m.onnx", "onnx"))

    def test_without_its_client_is_told(self, models: ModelFinder, tmp_path: Path) -> None:
        pytest.importorskip("fsspec")
        with pytest.raises(ModelError, match=r"s3://b/k: .*--s3-root DIR"):
            models.find(api(tmp_path, "s3://b/k", "onnx"))


class TestTheChoice:
    @given(versions=st.sets(st.integers(0, 10**12), min_size=1), above=st.sampled_from(["", "export", "a/b"]))
    def test_is_the_highest_number(self, versions: set[int], above: str) -> None:
        folders = [f"{above}/{version}" if above else str(version) for version in versions]

        assert version_of(choose_folder(f"{folder}/{name}" for folder in folders for name in SAVED_MODEL) or "") == max(
            versions
        )

    @given(names=st.lists(st.text() | st.sampled_from([f"{n}/{name}" for n in (1, 2) for name in SAVED_MODEL])))
    def test_is_whole_or_none(self, names: list[str]) -> None:
        folder = choose_folder(names)

        assert folder is None or {f"{folder}/{name}" for name in SAVED_MODEL[:2]} <= set(names)
