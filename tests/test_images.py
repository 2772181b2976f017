"""The images, as far as they can be checked without building them; `.ci/image show` builds and runs them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from penstock.server.settings import Settings

ROOT = Path(__file__).parents[1]
KINDS = ("cpu", "gpu")
LOCKS = (*KINDS, "build")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
INSTRUCTIONS = {
    "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "RUN", "STOPSIGNAL", "USER",
    "WORKDIR",
}  # fmt: skip


def _dockerfile(kind: str) -> list[tuple[str, str]]:
    """The instructions with their arguments, with continued lines joined."""
    lines = [line for line in (ROOT / f"Dockerfile.{kind}").read_text().splitlines() if not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [
        (word, " ".join(rest.split())) for word, _, rest in (line.partition(" ") for line in text.split("\n")) if word
    ]


def _last_stage(kind: str) -> list[tuple[str, str]]:
    found = _dockerfile(kind)
    return found[max(at for at, (word, _) in enumerate(found) if word == "FROM") :]


def _locked(kind: str) -> list[tuple[Requirement, int]]:
    """The requirements in a lock file, with the number of hashes of each."""
    text = (ROOT / "deploy" / f"requirements-{kind}.txt").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(Requirement(line.partition(" --hash")[0]), line.count("--hash=sha256:")) for line in lines]


def test_the_manifest_grace_period_covers_the_drain_delay_and_the_exit_timeout() -> None:
    manifest = yaml.safe_load((ROOT / "docs" / "images.md").read_text().split("```yaml\n")[1].split("```")[0])
    (container,) = manifest["containers"]
    (delay,) = [each["value"] for each in container["env"] if each["name"] == "PENSTOCK_DRAIN_DELAY_SECS"]

    settings = Settings(drain_delay_secs=float(delay))
    assert settings.drain_delay_secs > 0
    assert manifest["terminationGracePeriodSeconds"] > settings.drain_delay_secs + settings.exit_timeout_secs


@pytest.mark.parametrize("kind", KINDS)
def test_every_dockerfile_line_is_a_known_instruction(kind: str) -> None:
    assert {word for word, _ in _dockerfile(kind)} <= INSTRUCTIONS
    assert (ROOT / f"Dockerfile.{kind}").read_text().startswith("# syntax=docker/dockerfile:1\n")


@pytest.mark.parametrize("kind", KINDS)
def test_every_build_argument_is_declared_before_its_use(kind: str) -> None:
    declared = {"PATH"}
    for word, rest in _dockerfile(kind):
        used = set(re.findall(r"\$\{?(\w+)", rest)) if word != "RUN" else set()
        assert used <= declared, rest
        if word == "ARG":
            declared.add(rest.partition("=")[0])
    assert {"BASE", "VERSION", "REVISION", "CREATED"} <= declared


@pytest.mark.parametrize("kind", KINDS)
def test_the_build_stage_and_the_last_stage_use_the_given_base(kind: str) -> None:
    found = _dockerfile(kind)

    assert [rest for word, rest in found if word == "FROM"] == ["${BASE} AS build", "${BASE}"]
    assert found[0][1].startswith("BASE=docker.io/")


@pytest.mark.parametrize("kind", KINDS)
def test_the_server_runs_without_root_and_without_a_shell(kind: str) -> None:
    last = dict(_last_stage(kind))

    assert last["USER"] == "1000:1000"
    assert json.loads(last["ENTRYPOINT"]) == ["tini", "--", "penstock"]
    assert json.loads(last["CMD"]) == ["serve", "/models"]
    assert json.loads(last["HEALTHCHECK"].partition("CMD ")[2]) == ["penstock", "probe"]
    assert last["EXPOSE"] == "8000 8001 8002"
    assert last["STOPSIGNAL"] == "SIGTERM"


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_stage_contains_no_build_tools(kind: str) -> None:
    last = _last_stage(kind)

    assert {rest for word, rest in last if word == "COPY"} == {
        "--from=build /usr/bin/tini /usr/bin/tini", "--from=build /opt/penstock /opt/penstock",
        "--from=build /opt/tritonserver /opt/tritonserver",
        "--from=build /usr/lib/locale/en_US.utf8 /usr/lib/locale/en_US.utf8",
    }  # fmt: skip
    assert not re.search(
        r"\b(pip|gcc|binutils|build-essential|secret|-m venv)\b", str([rest for word, rest in last if word == "RUN"])
    )


@pytest.mark.parametrize("kind", KINDS)
def test_tritonserver_is_on_the_path_and_at_its_location_in_triton_images(kind: str) -> None:
    (linking,) = [rest for word, rest in _dockerfile(kind) if word == "RUN" and "ln -s" in rest]

    assert "ln -s penstock /opt/penstock/bin/tritonserver" in linking
    assert "ln -s /opt/penstock/bin/penstock /opt/tritonserver/bin/tritonserver" in linking


def test_the_last_stage_contains_no_apt_lists_or_caches() -> None:
    """The lists and caches take 78 MB, unless the base image configures apt to keep neither."""
    (installing,) = [rest for word, rest in _last_stage("gpu") if word == "RUN" and "apt-get" in rest]

    assert "rm -rf /var/lib/apt/lists/* /var/cache/apt/*" in installing


@pytest.mark.parametrize("kind", KINDS)
def test_home_is_a_folder_that_any_user_may_write_to(kind: str) -> None:
    last = _last_stage(kind)

    assert "HOME=/tmp" in dict(last)["ENV"].split()
    assert dict(last)["WORKDIR"] == "/tmp"
    assert [rest for word, rest in last if word == "RUN" and "--no-create-home --home-dir /tmp penstock" in rest]


@pytest.mark.parametrize("kind", KINDS)
def test_no_program_in_the_image_is_setuid_or_setgid(kind: str) -> None:
    last = _last_stage(kind)
    (at,) = [at for at, (_, rest) in enumerate(last) if "find / -xdev -type f -perm /6000 -exec chmod a-s {} +" in rest]

    assert [rest for word, rest in last[at + 1 :] if word == "RUN" and re.search(r"apt-get|useradd", rest)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_modules_do_not_depend_on_timestamps(kind: str) -> None:
    """Layers may truncate times to whole seconds, which would leave half of the compiled files outdated."""
    commands = [command for word, rest in _dockerfile(kind) if word == "RUN" for command in rest.split("&&")]
    installing = [command for command in commands if "--python /opt/penstock/bin/python install" in command]
    (compiling,) = [command for command in commands if "compileall" in command and "/opt/penstock/lib" in command]

    assert len(installing) == 2
    assert all("--no-compile" in command for command in installing)
    assert "--invalidation-mode unchecked-hash" in compiling
    assert commands.index(compiling) > max(commands.index(command) for command in installing)


def test_the_standard_library_of_the_cpu_base_image_is_compiled() -> None:
    """docker.io/library/python has no compiled modules, and the user of the image cannot write any."""
    (compiling,) = [rest for word, rest in _last_stage("cpu") if word == "RUN" and "compileall" in rest]

    assert 'get_path("stdlib")' in compiling


def test_the_gpu_image_installs_venv_for_the_environments_of_workers() -> None:
    assert [rest for word, rest in _last_stage("gpu") if word == "RUN" and " python3-venv " in rest]


def test_the_kubernetes_manifest_matches_the_images() -> None:
    page = (ROOT / "docs" / "images.md").read_text()
    spec = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    (container,) = spec["containers"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}

    assert [str(each["containerPort"]) for each in container["ports"]] == dict(_last_stage("gpu"))["EXPOSE"].split()
    assert set(mounts) == {each["name"] for each in spec["volumes"]}
    assert {"/models", "/tmp", "/dev/shm"} == set(mounts.values())
    assert {container[probe]["httpGet"]["path"] for probe in ("readinessProbe", "livenessProbe")} == {
        "/v2/health/ready", "/v2/health/live",
    }  # fmt: skip
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("kind", KINDS)
def test_the_locale_that_onnx_runtime_needs_to_lowercase_text_is_built(kind: str) -> None:
    (command,) = [rest for word, rest in _dockerfile(kind) if word == "RUN" and "localedef" in rest]

    assert " locales " in command
    assert "localedef -i en_US -f UTF-8 --no-archive /usr/lib/locale/en_US.utf8" in command


@pytest.mark.parametrize("kind", KINDS)
def test_every_downloaded_package_is_checked_by_hash(kind: str) -> None:
    fetching = [
        command
        for word, rest in _dockerfile(kind)
        for command in rest.split("&&")
        if word == "RUN" and "pip" in command and " install " in command and "--no-index" not in command
        and "apt-get" not in command
    ]  # fmt: skip

    assert len(fetching) == 2
    assert all("--require-hashes" in command and "--only-binary :all:" in command for command in fetching)


@pytest.mark.parametrize("kind", LOCKS)
def test_a_lock_pins_every_requirement_with_hashes(kind: str) -> None:
    locked = _locked(kind)

    assert locked
    assert [
        str(each) for each, hashes in locked if not hashes or [it.operator for it in each.specifier] != ["=="]
    ] == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_a_lock_contains_every_dependency_of_the_project(kind: str, python: str) -> None:
    environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    versions = {
        canonicalize_name(each.name): next(iter(each.specifier)).version
        for each, _ in _locked(kind)
        if each.marker is None or each.marker.evaluate(environment)
    }

    for line in PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"][kind]:
        requirement = Requirement(line)
        found = versions.get(canonicalize_name(requirement.name))
        assert found is not None, line
        assert requirement.specifier.contains(found), f"{line}: locked is {found}"


def test_the_build_lock_contains_every_build_requirement() -> None:
    versions = {each.name: next(iter(each.specifier)).version for each, _ in _locked("build")}

    for line in PROJECT["build-system"]["requires"]:
        assert Requirement(line).specifier.contains(versions[Requirement(line).name])
    assert "cyclonedx-bom" in versions


@pytest.mark.parametrize("kind", LOCKS)
def test_a_lock_names_no_index_and_no_file(kind: str) -> None:
    text = (ROOT / "deploy" / f"requirements-{kind}.txt").read_text()

    assert not re.search(r"://|--(extra-)?index|--find-links|file:|/home|/tmp", text)


def test_the_build_context_contains_only_the_files_of_the_images() -> None:
    included = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}

    folders = set(PROJECT["tool"]["setuptools"]["package-dir"].values())
    assert included == folders | {"pyproject.toml", PROJECT["project"]["readme"], "deploy/requirements-*.txt"}
    assert "*" in (ROOT / ".dockerignore").read_text().splitlines()


@pytest.mark.parametrize(
    ("works", "chosen"),
    [({"podman", "buildah"}, "podman"), ({"buildah"}, "buildah"), ({"docker"}, "docker"), (set(), "")],
)
def test_the_image_script_uses_the_first_builder_that_works(works: set[str], chosen: str, tmp_path: Path) -> None:
    for name in ("docker", "podman", "buildah"):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\n[ "$1" != info ] || exit {0 if name in works else 1}\necho {name} "$@"\n')
        program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CERTIFICATES": "/c.pem"}

    ran = subprocess.run(
        [ROOT / ".ci" / "image", "build", "cpu", "--build-arg", "BASE=b"], env=environment, capture_output=True,
        text=True, check=False, timeout=60,
    )  # fmt: skip

    assert ran.returncode == (0 if chosen else 1)
    if chosen:
        assert f"building penstock:cpu with {chosen}\n{chosen} build" in ran.stdout
        assert "--file Dockerfile.cpu --tag penstock:cpu" in ran.stdout
        assert ran.stdout.endswith("--secret id=certificates,src=/c.pem --build-arg BASE=b .\n")
    else:
        assert "none of docker, podman and buildah works here" in ran.stderr
