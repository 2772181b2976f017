from __future__ import annotations

import os
from pathlib import Path

from penstock.server.repository.changes import fingerprint_files
from penstock.server.repository.repository import Repository
from tests.server.repository.folders import make


def print_of(root: Path) -> bytes:
    return fingerprint_files([root])


class TestFingerprint:
    def test_a_fingerprint_is_stable_while_nothing_changes(self, tmp_path: Path) -> None:
        make(tmp_path, "1/model.onnx", "config.pbtxt", "labels.txt")

        assert print_of(tmp_path) == print_of(tmp_path) != b""

    def test_a_fingerprint_changes_with_content_time_path_and_files(self, tmp_path: Path) -> None:
        make(tmp_path, "1/model.onnx", "hooks.py")
        fingerprints = [print_of(tmp_path)]
        (tmp_path / "hooks.py").write_text("x = 1")
        fingerprints.append(print_of(tmp_path))
        os.utime(tmp_path / "1" / "model.onnx", ns=(1, 1))
        fingerprints.append(print_of(tmp_path))
        make(tmp_path, "2/model.onnx")
        fingerprints.append(print_of(tmp_path))
        (tmp_path / "1").rename(tmp_path / "3")
        fingerprints.append(print_of(tmp_path))
        # the same size and time, but another file
        replaced = tmp_path / "new"
        replaced.touch()
        os.utime(replaced, ns=(1, 1))
        fingerprints.append(print_of(tmp_path))
        (tmp_path / "3" / "model.onnx").unlink()
        fingerprints.append(print_of(tmp_path))

        assert len(set(fingerprints)) == len(fingerprints)

    def test_hidden_files_and_caches_do_not_change_a_fingerprint(self, tmp_path: Path) -> None:
        make(tmp_path, "1/model.onnx")
        before = print_of(tmp_path)
        make(tmp_path, ".git/x", "__pycache__/hooks.pyc", ".2-being-written/model.onnx")

        assert print_of(tmp_path) == before

    def test_a_folder_with_a_link_to_itself_has_a_fingerprint(self, tmp_path: Path) -> None:
        make(tmp_path, "1/model.onnx")
        (tmp_path / "loop").symlink_to(tmp_path)

        assert print_of(tmp_path)

    def test_a_fingerprint_changes_when_a_link_gets_another_target(self, tmp_path: Path) -> None:
        make(tmp_path, "stored/one/model.onnx", "stored/two/model.onnx", "m/config.pbtxt")
        os.utime(tmp_path / "stored/two/model.onnx", ns=(1, 1))
        link = tmp_path / "m" / "1"
        link.symlink_to(tmp_path / "stored" / "one")
        before = print_of(tmp_path / "m")
        link.unlink()
        link.symlink_to(tmp_path / "stored" / "two")

        assert print_of(tmp_path / "m") != before

    def test_the_fingerprint_of_no_files_is_empty(self, tmp_path: Path) -> None:
        assert fingerprint_files([]) == b""


class TestModelFingerprints:
    def test_every_model_has_a_fingerprint(self, tmp_path: Path) -> None:
        make(tmp_path, "root/a/1/model.onnx", "root/b/config.pbtxt", "root/no/x", "root/.hidden/1/x", "alone.onnx")
        repository = Repository([tmp_path / "root", tmp_path / "alone.onnx"])

        assert sorted(repository.fingerprints()) == ["a", "alone", "b"]

    def test_the_fingerprint_of_a_single_file_model_includes_the_files_beside_it(self, tmp_path: Path) -> None:
        repository = Repository([make(tmp_path, "alone.onnx") / "alone.onnx"])
        fingerprints = [repository.fingerprints()["alone"]]
        for name in ("penstock.toml", "alone.toml", "hooks.py"):
            (tmp_path / name).touch()
            fingerprints.append(repository.fingerprints()["alone"])

        assert len(set(fingerprints)) == 4
