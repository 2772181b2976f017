from __future__ import annotations

from pathlib import Path

import pytest

from penstock.batching.spec import BatchPolicy, InstanceGroup, PaddedAxis
from penstock.server.repository.defaults import Defaults
from penstock.server.repository.scan import ModelEntry, locate, scan
from tests.server.repository.folders import make, native


def entries(root: Path, *more: Path) -> dict[str, ModelEntry]:
    found, _ = scan([root, *more], Defaults())
    return {entry.name: entry for entry in found}


def versions(entry: ModelEntry) -> list[int]:
    return [spec.version for spec in entry.specs]


def mistakes(entry: ModelEntry) -> list[str]:
    return [finding.message for finding in entry.findings if finding.is_mistake]


def warnings(entry: ModelEntry) -> list[str]:
    return [f"{finding.path.name} {finding.message}" for finding in entry.findings if not finding.is_mistake]


class TestVersions:
    files = ("m/1/model.onnx", "m/3/model.onnx", "m/20/model.onnx")

    def test_only_the_latest_version_is_served_by_default(self, tmp_path: Path) -> None:
        entry = entries(make(tmp_path, *self.files))["m"]

        assert versions(entry) == [20]
        assert entry.specs[0].path == tmp_path / "m" / "20" / "model.onnx"

    @pytest.mark.parametrize(
        ("policy", "expected"),
        [
            ("latest { num_versions: 2 }", [3, 20]),
            ("latest { num_versions: 9 }", [1, 3, 20]),
            ("all { }", [1, 3, 20]),
            ("specific { versions: [1, 20] }", [1, 20]),
        ],
    )
    def test_the_version_policy_of_config_pbtxt_selects_the_versions(
        self, tmp_path: Path, policy: str, expected: list[int]
    ) -> None:
        entry = entries(make(tmp_path, *self.files, m=f"version_policy {{ {policy} }}"))["m"]

        assert versions(entry) == expected

    @pytest.mark.parametrize(("policy", "expected"), [('"all"', [1, 3, 20]), ("[1]", [1]), ("{ latest = 2 }", [3, 20])])
    def test_the_versions_key_of_penstock_toml_selects_the_versions(
        self, tmp_path: Path, policy: str, expected: list[int]
    ) -> None:
        make(tmp_path, *self.files)
        native(tmp_path, "m", f"[model]\nversions = {policy}\n")

        assert versions(entries(tmp_path)["m"]) == expected

    @pytest.mark.parametrize(("named", "there", "mistake"), [("1, 2", [1], False), ("2", [], True)])
    def test_a_missing_specific_version_is_a_mistake_only_if_no_version_is_left(
        self, tmp_path: Path, named: str, there: list[int], mistake: bool
    ) -> None:
        text = f"\nversion_policy {{ specific {{ versions: [{named}] }} }}"
        entry = entries(make(tmp_path, *self.files, m=text))["m"]

        assert versions(entry) == there
        assert [(f.version, f.line, f.is_mistake, f.message) for f in entry.findings] == [
            (2, 2, mistake, "version 2 of model 'm' does not exist")
        ]

    @pytest.mark.parametrize(
        ("name", "why"),
        [
            *((name, "contains leading zeros in its directory name") for name in ("01", "0")),
            *((name, "fails to convert to integral number") for name in ("one", "-1", "1.0", "9" * 19, "\u0661")),
        ],
    )
    def test_folders_that_are_not_version_numbers_are_ignored_with_a_warning(
        self, tmp_path: Path, name: str, why: str
    ) -> None:
        entry = entries(make(tmp_path, "m/1/model.onnx", f"m/{name}/model.onnx"))["m"]

        assert versions(entry) == [1]
        assert warnings(entry) == [f"{name} ignore version directory '{name}' which {why}"]

    def test_known_folders_beside_the_versions_are_ignored_without_a_warning(self, tmp_path: Path) -> None:
        entry = entries(make(tmp_path, "m/1/model.onnx", "m/__pycache__/x", "m/.git/x", "m/warmup/x", "m/configs/x"))[
            "m"
        ]

        assert entry.findings == ()

    def test_a_model_without_any_version_is_a_mistake(self, tmp_path: Path) -> None:
        entry = entries(make(tmp_path, m=""))["m"]

        assert mistakes(entry) == ["at least one version must be available under the version policy of model 'm'"]

    def test_a_version_without_its_file_is_left_out(self, tmp_path: Path) -> None:
        entry = entries(make(tmp_path, "m/1/model.onnx", "m/2/other.onnx", m="version_policy { all { } }"))["m"]

        assert versions(entry) == [1]
        assert entry.findings[0].version == 2
        assert mistakes(entry)[0].startswith("there is no model.onnx (found other.onnx)")

    @pytest.mark.parametrize("name", ["model.keras", "model.h5", "weights.hdf5"])
    @pytest.mark.parametrize(
        "config", ["", 'platform: "tensorflow_savedmodel"', 'backend: "onnxruntime" default_model_filename: "model.h5"']
    )
    def test_a_keras_file_is_a_mistake_that_suggests_a_savedmodel(self, tmp_path: Path, name: str, config: str) -> None:
        entry = entries(make(tmp_path, f"m/1/{name}", m=config))["m"]

        assert mistakes(entry) == [
            "is a Keras file; serve the SavedModel that its model.export(FOLDER) writes (docs/tensorflow.md)"
        ]
        assert entry.findings[0].path == tmp_path / "m" / "1" / name


class TestFiles:
    def test_the_model_file_may_have_another_name(self, tmp_path: Path) -> None:
        entry = entries(make(tmp_path, "m/1/net.onnx", m='default_model_filename: "net.onnx"'))["m"]

        assert entry.specs[0].path.name == "net.onnx"

    def test_a_model_file_may_be_a_folder(self, tmp_path: Path) -> None:
        entry = entries(make(tmp_path, "m/1/model.onnx/model.onnx", "m/1/model.onnx/weights.bin"))["m"]

        assert entry.specs[0].path == tmp_path / "m/1/model.onnx/model.onnx"

    def test_links_to_models_are_followed(self, tmp_path: Path) -> None:
        make(tmp_path, "elsewhere/1/model.onnx", "repository/readme")
        (tmp_path / "repository" / "m").symlink_to(tmp_path / "elsewhere")

        assert versions(entries(tmp_path / "repository")["m"]) == [1]

    def test_a_single_file_is_served_as_version_one(self, tmp_path: Path) -> None:
        entry = entries(make(tmp_path, "net.onnx") / "net.onnx")["net"]

        assert versions(entry) == [1]
        assert entry.config.default_model_filename == "net.onnx"

    def test_a_model_file_at_the_top_of_a_repository_is_a_warning(self, tmp_path: Path) -> None:
        _, findings = scan([make(tmp_path, "m/1/model.onnx", "net.onnx")], Defaults())

        assert [(finding.path.name, finding.message) for finding in findings] == [
            (
                "net.onnx",
                "is not served: in a repository a model is <name>/<version>/model.onnx; "  # noqa: ISC004
                "PATH may also be the file itself",
            )
        ]

    @pytest.mark.parametrize("name", ["net.toml", "penstock.toml"])
    def test_the_toml_of_a_single_file_model_is_found_beside_the_file(self, tmp_path: Path, name: str) -> None:
        make(tmp_path, "net.onnx", "hooks.py")
        (tmp_path / name).write_text('[hooks]\nfile = "hooks.py"\n')
        entry = entries(tmp_path / "net.onnx")["net"]

        assert entry.specs[0].hooks is not None
        assert entry.specs[0].hooks.path == (tmp_path / "hooks.py").resolve()

    def test_a_toml_named_after_the_file_takes_precedence_over_penstock_toml(self, tmp_path: Path) -> None:
        make(tmp_path, "net.onnx")
        (tmp_path / "net.toml").write_text("[batching]\nmax_batch_size = 1\n")
        (tmp_path / "penstock.toml").write_text("[batching]\nmax_batch_size = 2\n")

        assert entries(tmp_path / "net.onnx")["net"].specs[0].policy.max_batch_rows == 1

    def test_versions_is_rejected_for_a_single_file_model(self, tmp_path: Path) -> None:
        make(tmp_path, "net.onnx")
        (tmp_path / "net.toml").write_text('[model]\nversions = "all"\n')

        assert mistakes(entries(tmp_path / "net.onnx")["net"]) == [
            "model.versions does not apply to a single .onnx file"
        ]


STATE = """sequence_batching { state { input_name: "x" output_name: "y" data_type: TYPE_FP32 dims: 1
  initial_state { name: "s" data_type: TYPE_FP32 dims: 1 data_file: "NAME" } } }"""
SAMPLE = """model_warmup { name: "w" batch_size: 1 inputs { key: "x" value {
  data_type: TYPE_FP32 dims: 4 input_data_file: "NAME" } } }"""


@pytest.mark.parametrize("name", ["a\\000b", "a" * 300, "a/" * 3000], ids=["NUL", "long", "deep"])
@pytest.mark.parametrize(
    "config",
    [
        'output { name: "y" data_type: TYPE_FP32 dims: 4 label_filename: "NAME" }', STATE, SAMPLE,
        'default_model_filename: "NAME"', 'model_operations { op_library_filename: "NAME" }',
        'backend: "python" parameters { key: "EXECUTION_ENV_PATH" value { string_value: "NAME" } }',
    ],
)  # fmt: skip
def test_an_impossible_file_name_in_config_pbtxt_affects_only_its_model(tmp_path: Path, config: str, name: str) -> None:
    make(tmp_path, "m/1/model.onnx", "other/1/model.onnx", "m/warmup/x", "m/initial_state/x")
    make(tmp_path, m=config.replace("NAME", name))
    found = entries(tmp_path)

    assert versions(found["other"]) == [1]
    assert mistakes(found["m"]) or config == SAMPLE  # a missing sample file is reported when the sample is read


@pytest.mark.parametrize("name", ["a\\u0000b", "a" * 300], ids=["NUL", "long"])
@pytest.mark.parametrize(
    "toml",
    [
        '[hooks]\nfile = "NAME"', '[hooks]\nfile = "h.py"\nworkers = 1\nrequirements = "NAME"',
        '[model]\nbackend = "python"\n[worker]\nrequirements = "NAME"', '[model]\nfile = "NAME"',
        '[runtime]\ncustom_op_libraries = ["NAME"]',
    ],
)  # fmt: skip
def test_an_impossible_file_name_in_penstock_toml_affects_only_its_model(tmp_path: Path, toml: str, name: str) -> None:
    make(tmp_path, "m/1/model.onnx", "other/1/model.onnx", "m/h.py")
    native(tmp_path, "m", toml.replace("NAME", name))
    found = entries(tmp_path)

    assert versions(found["other"]) == [1]
    assert mistakes(found["m"])


class TestFolders:
    def test_entries_that_are_not_models_are_warnings(self, tmp_path: Path) -> None:
        make(tmp_path, "m/1/model.onnx", "notes/readme", "stray.onnx", ".git/config", "README")
        found, findings = scan([tmp_path], Defaults())

        assert [entry.name for entry in found] == ["m"]
        assert [(finding.path.name, finding.is_mistake) for finding in findings] == [
            ("notes", False),
            ("stray.onnx", False),
        ]

    def test_a_broken_link_is_a_warning(self, tmp_path: Path) -> None:
        root = make(tmp_path, "m/1/model.onnx")
        (root / "gone").symlink_to("/unmounted/gone")
        (root / "m" / "2").symlink_to("/unmounted/2")
        found, findings = scan([root], Defaults())

        assert versions(found[0]) == [1]
        assert [(each.path.name, each.message, each.is_mistake) for each in [*findings, *found[0].findings]] == [
            ("gone", "is a broken link to /unmounted/gone", False),
            ("2", "is ignored: a broken link to /unmounted/2", False),
        ]

    def test_a_model_file_that_is_a_broken_link_is_named_as_such_without_its_target(self, tmp_path: Path) -> None:
        root = make(tmp_path, "m/1/labels.txt")
        (root / "m" / "1" / "model.onnx").symlink_to("/unmounted/model.onnx")

        assert mistakes(entries(root)["m"]) == ["model.onnx is a broken link"]

    def test_a_model_with_a_mistake_does_not_affect_other_models(self, tmp_path: Path) -> None:
        found = entries(make(tmp_path, "a/1/model.onnx", "b/1/model.onnx", a="max_batch_sise: 3"))

        assert versions(found["b"]) == [1]
        assert found["a"].specs == ()
        assert found["a"].findings[0].line == 1

    def test_two_models_with_the_same_name_are_a_mistake(self, tmp_path: Path) -> None:
        make(tmp_path, "one/m/1/model.onnx", "two/m/1/model.onnx")
        entry = entries(tmp_path / "one", tmp_path / "two")["m"]

        assert mistakes(entry) == ["model appears in two or more repositories"] * 2
        assert [finding.path for finding in entry.findings] == [tmp_path / "one" / "m", tmp_path / "two" / "m"]
        assert entry.specs == ()

    def test_a_repository_given_twice_is_read_once(self, tmp_path: Path) -> None:
        make(tmp_path, "m/1/model.onnx")

        assert mistakes(entries(tmp_path, tmp_path / "m" / "..")["m"]) == []

    @pytest.mark.parametrize(
        ("path_text", "message"),
        [
            ("gone", "does not exist"),
            ("file.txt", "is neither a folder nor an .onnx file"),
            (
                "iris.keras",
                "is a Keras file; serve the SavedModel that its model.export(FOLDER) writes (docs/tensorflow.md)",
            ),
            ("m", "is the folder of one model; pass the folder that contains it"),
            ("m/1", "is one version of a model; pass the folder that contains the model's folder: "),
            ("saved_model.pb", "is a part of a SavedModel; pass the folder: "),
            (".hidden.onnx", "a model's name must not start with '.'"),
        ],
    )
    def test_a_path_that_is_not_a_repository_is_a_mistake(self, tmp_path: Path, path_text: str, message: str) -> None:
        make(tmp_path, "file.txt", "iris.keras", "m/1/model.onnx", ".hidden.onnx", "saved_model.pb")
        found, findings = scan([tmp_path / path_text], Defaults())

        assert found == []
        assert len(findings) == 1
        assert findings[0].is_mistake
        assert findings[0].message.startswith(message)

    def test_an_empty_repository_is_a_warning(self, tmp_path: Path) -> None:
        _, findings = scan([tmp_path], Defaults())

        assert [(finding.message, finding.is_mistake) for finding in findings] == [("contains no models", False)]

    def test_a_number_is_a_valid_model_name(self, tmp_path: Path) -> None:
        assert versions(entries(make(tmp_path, "7/1/model.onnx"))["7"]) == [1]


class TestBothFiles:
    def test_config_pbtxt_and_penstock_toml_complement_each_other(self, tmp_path: Path) -> None:
        make(tmp_path, "m/1/model.onnx", m="max_batch_size: 8")
        native(tmp_path, "m", "[batching]\nmax_batch_size = 8\ncap = 4\n[runtime]\nmem_arena = false\n")
        spec = entries(tmp_path)["m"].specs[0]

        assert spec.policy == BatchPolicy(max_batch_rows=8, cap_rows=4)
        assert spec.options == {"enable_mem_arena": "0"}
        assert spec.instances == (InstanceGroup(),)

    def test_different_values_in_the_two_files_are_a_mistake(self, tmp_path: Path) -> None:
        make(tmp_path, "m/1/model.onnx", m="\nmax_batch_size: 8")
        native(tmp_path, "m", "[batching]\nmax_batch_size = 4\n")
        finding = entries(tmp_path)["m"].findings[0]

        assert str(finding) == (
            f"{tmp_path}/m/penstock.toml:2: batching.max_batch_size is 4 here and 8 in config.pbtxt:2"
        )

    def test_a_cap_above_the_max_batch_size_is_a_mistake_with_its_line(self, tmp_path: Path) -> None:
        make(tmp_path, "m/1/model.onnx", m="max_batch_size: 8")
        native(tmp_path, "m", "\n[batching]\ncap = 9\n")

        assert [str(finding) for finding in entries(tmp_path)["m"].findings] == [
            f"{tmp_path}/m/penstock.toml:3: batching.cap: 9 exceeds the max batch size of 8"
        ]

    @pytest.mark.parametrize(
        ("batching", "size"),
        [
            ("dynamic_batching { %s }", "dynamic batching preferred size"),
            ("sequence_batching { oldest { %s } }", "sequence batching preferred batch size"),
        ],
    )
    def test_a_preferred_size_above_the_max_batch_size_has_tritons_message(
        self, tmp_path: Path, batching: str, size: str
    ) -> None:
        make(tmp_path, "m/1/model.onnx", m=f"max_batch_size: 4\n{batching % 'preferred_batch_size: [2, 8]'}")

        (finding,) = entries(tmp_path)["m"].findings
        assert str(finding).endswith(f": {size} must be <= max batch size for m")

    def test_an_allowed_size_above_the_max_batch_size_is_a_mistake_with_its_line(self, tmp_path: Path) -> None:
        make(tmp_path, "m/1/model.onnx", m="max_batch_size: 8")
        native(tmp_path, "m", "[batching]\nallowed_sizes = [4, 16]\n")

        assert [str(finding) for finding in entries(tmp_path)["m"].findings] == [
            f"{tmp_path}/m/penstock.toml:2: batching.allowed_sizes: 16 exceeds the max batch size of 8"
        ]

    def test_padding_and_memory_budget_reach_the_spec(self, tmp_path: Path) -> None:
        make(tmp_path, "m/1/model.onnx")
        native(
            tmp_path, "m", '[instances]\ncount = "auto"\nmemory_budget_mb = 2\n[padding.ids]\naxis = 0\nbuckets = [8]\n'
        )

        spec = entries(tmp_path)["m"].specs[0]
        assert (spec.instances, spec.memory_budget_bytes) == ((InstanceGroup(0),), 2 << 20)
        assert spec.padding == (PaddedAxis("ids", 0, (8,)),)

    def test_an_automatic_and_a_fixed_instance_count_contradict_each_other(self, tmp_path: Path) -> None:
        make(tmp_path, "m/1/model.onnx", m="instance_group { count: 2 kind: KIND_CPU }")
        native(tmp_path, "m", '[instances]\ncount = "auto"\n')

        assert [str(finding) for finding in entries(tmp_path)["m"].findings] == [
            f"{tmp_path}/m/penstock.toml:1: instances is [auto on cpu] here and [2 on cpu] in config.pbtxt:1"
        ]

    def test_the_servers_default_max_batch_size_reaches_every_policy(self, tmp_path: Path) -> None:
        found, _ = scan([make(tmp_path, "m/1/model.onnx")], Defaults(max_batch_rows=5))

        assert found[0].specs[0].policy.default_max_batch_rows == 5


def test_locating_a_model_among_many_files_resolves_only_files_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / f"m{number}.onnx" for number in range(20)]
    for file in files:
        file.touch()
    looked: list[Path] = []
    resolve = Path.resolve

    def noted(path: Path, strict: bool = False) -> Path:
        looked.append(path)
        return resolve(path, strict)

    monkeypatch.setattr(Path, "resolve", noted)

    assert locate(files, "m7") == [files[7]]
    assert looked == [files[7]]
    assert locate(files, "m20") == []
