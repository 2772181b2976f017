"""Shared memory regions: which files may be registered, and how leases behave whatever the client does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.errors import Code, InferError
from penstock.server.v2 import system_regions
from penstock.server.v2.regions import DISABLED_TEXT, MAX_REGIONS, SYSTEM, InlineRegions, Regions
from penstock.server.v2.system_regions import SystemRegions
from tests.processes import descriptors

SIZE = 64
BYTES = bytes(range(SIZE))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "key").write_bytes(BYTES)
    return tmp_path


def make_regions(folder: Path) -> tuple[Regions, SystemRegions]:
    regions = Regions(allowed=True)
    return regions, SystemRegions(regions, folder)


def refused(call: Any, *args: Any) -> tuple[Code, str]:
    with pytest.raises(InferError) as caught:
        call(*args)
    return caught.value.code, caught.value.message


class TestRegistration:
    def test_a_registered_region_is_listed_and_can_be_leased(self, folder: Path) -> None:
        regions, system = make_regions(folder)
        system.register("r", "/key", 8, 16)

        assert system.status() == [{"name": "r", "key": "/key", "offset": 8, "byte_size": 16}] == system.status("r")
        assert bytes(system.regions.lease("r", 4, 8).read()) == BYTES[12:20]
        assert len(regions) == 1

    @pytest.mark.parametrize("key", ["key", "/key", "//key"])
    def test_leading_slashes_of_a_key_are_ignored_as_by_shm_open(self, folder: Path, key: str) -> None:
        _, system = make_regions(folder)
        system.register("r", key, 0, SIZE)

        assert bytes(system.regions.lease("r", 0, SIZE).read()) == BYTES

    @pytest.mark.parametrize(
        "key",
        ["", "/", ".", "..", "/..", "../key", "sub/key", "/sub/key", "a\0b", "nothing", "x" * 256, "\ud800", "é" * 200],
    )
    def test_a_key_outside_the_shared_memory_folder_is_not_opened(self, folder: Path, key: str) -> None:
        (folder / "sub").mkdir()
        (folder / "sub" / "key").write_bytes(BYTES)
        _, system = make_regions(folder)

        assert refused(system.register, "r", key, 0, 4) == (
            Code.INVALID, f"Unable to open shared memory region: '{key}'"
        )  # fmt: skip

    def test_a_key_that_is_a_link_folder_or_fifo_is_not_opened(self, folder: Path) -> None:
        (folder / "link").symlink_to(folder / "key")
        (folder / "folder").mkdir()
        os.mkfifo(folder / "fifo")
        _, system = make_regions(folder)

        for key in ("link", "folder", "fifo"):
            assert refused(system.register, "r", key, 0, 4)[1] == f"Unable to open shared memory region: '{key}'"

    @pytest.mark.parametrize("prefix", ["triton_python_backend_shm_region_", "penstock_", "sem."])
    def test_names_and_keys_with_a_reserved_prefix_are_rejected(self, folder: Path, prefix: str) -> None:
        (folder / f"{prefix}1").write_bytes(BYTES)
        _, system = make_regions(folder)

        why = f"as the key contains the reserved prefix '{prefix}'"
        message = refused(system.register, "r", f"/{prefix}1", 0, 4)[1]
        assert message == f"cannot register shared memory region 'r' with key '/{prefix}1' {why}"
        assert "reserved" in refused(system.register, f"{prefix}1", "/key", 0, 4)[1]

    @pytest.mark.parametrize("name", ["", "x" * 256, "a\0b"])
    def test_an_invalid_region_name_is_rejected(self, folder: Path, name: str) -> None:
        _, system = make_regions(folder)

        assert refused(system.register, name, "key", 0, 4)[0] is Code.INVALID

    def test_an_invalid_key_is_reported_before_an_invalid_name(self, folder: Path) -> None:
        _, system = make_regions(folder)

        assert refused(system.register, "", "", 0, 0)[1] == "Unable to open shared memory region: ''"

    @pytest.mark.parametrize(
        ("offset", "byte_size"), [(0, 65), (1, 64), (64, 1), (0, 0), (-1, 4), (0, -1), (2**64 - 1, 2**64 - 1)]
    )
    def test_a_range_beyond_the_file_is_rejected(self, folder: Path, offset: int, byte_size: int) -> None:
        _, system = make_regions(folder)

        assert refused(system.register, "dummy_data", "key", offset, byte_size) == (
            Code.INVALID, "failed to register shared memory region 'dummy_data': invalid args"
        )  # fmt: skip

    def test_a_name_that_is_already_registered_is_rejected(self, folder: Path) -> None:
        _, system = make_regions(folder)
        system.register("r", "key", 0, 4)

        assert refused(system.register, "r", "key", 0, 8) == (
            Code.ALREADY_EXISTS, "shared memory region 'r' already in manager"
        )  # fmt: skip

    def test_the_number_of_regions_is_limited(self, folder: Path) -> None:
        _, system = make_regions(folder)
        limit = os.sysconf("SC_OPEN_MAX")
        for number in range(min(MAX_REGIONS, limit // 2)):
            system.register(f"r{number}", "key", 0, 4)
        if limit // 2 > MAX_REGIONS:
            assert refused(system.register, "more", "key", 0, 4)[0] is Code.OVERLOADED
        system.unregister()

        assert system.status() == []

    def test_every_operation_is_unsupported_unless_shared_memory_is_allowed(self, folder: Path) -> None:
        system = SystemRegions(Regions(), folder)

        for call in (
            (system.register, "r", "key", 0, 4),
            (system.unregister,),
            (system.status,),
            (system.regions.lease, "r", 0, 1),
        ):
            assert refused(*call) == (Code.UNSUPPORTED, DISABLED_TEXT)


def mapped(path: Path) -> int:
    """Count the bytes of a file that are mapped here."""
    ends = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    return sum(int(last, 16) - int(first, 16) for first, last in (each.split("-") for each in ends))


class TestMappings:
    def test_a_region_stays_mapped_until_its_last_lease_is_released(self, folder: Path) -> None:
        (folder / "key").write_bytes(bytes(10000))
        regions, system = make_regions(folder)
        system.register("r", "key", 5000, 4000)
        lease = system.regions.lease("r", 0, 1)
        region = regions.find("r", 0, 1)
        assert region.pointer % 4096 == 5000 % 4096
        assert mapped(folder / "key") == 8192

        system.unregister("r")
        del region
        assert mapped(folder / "key") == 8192
        lease.release()
        assert mapped(folder / "key") == 0

    def test_a_region_that_cannot_be_mapped_is_read_and_written_through_its_file(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        full = SimpleNamespace(mmap=lambda *_: system_regions._MAP_FAILED)
        monkeypatch.setattr(system_regions, "_libc", lambda: full)
        regions, system = make_regions(folder)
        system.register("r", "key", 0, SIZE)

        assert regions.find("r", 0, 1).pointer == 0
        assert bytes(system.regions.lease("r", 0, SIZE).read()) == BYTES


class TestUnregistration:
    def test_unregister_removes_one_region_or_all_and_ignores_an_unknown_name(self, folder: Path) -> None:
        _, system = make_regions(folder)
        for name in "abc":
            system.register(name, "key", 0, 4)
        system.unregister("b")
        system.unregister("b")

        assert [region["name"] for region in system.status()] == ["a", "c"]
        assert refused(system.status, "b") == (Code.NOT_FOUND, "Unable to find system shared memory region: 'b'")
        assert refused(system.regions.lease, "b", 0, 1) == (Code.NOT_FOUND, "Unable to find shared memory region: 'b'")
        system.unregister()
        assert system.status() == []

    def test_the_file_is_closed_when_the_last_lease_is_released(self, folder: Path) -> None:
        _, system = make_regions(folder)
        before = descriptors()
        system.register("r", "key", 0, SIZE)
        first, second = system.regions.lease("r", 0, 4), system.regions.lease("r", 4, 4)
        system.unregister("r")
        first.release()

        assert bytes(second.read()) == BYTES[4:8]
        assert descriptors() == before + 1
        del second
        assert descriptors() == before
        assert refused(first.read)[0] is Code.INTERNAL

    def test_an_unregistered_region_stays_listed_until_its_last_lease_is_released(self, folder: Path) -> None:
        regions, system = make_regions(folder)
        system.register("r", "key", 0, SIZE)
        first = system.regions.lease("r", 0, SIZE)
        system.unregister()
        inline = InlineRegions(regions)
        second = inline.lease("r", 4, 4)
        first.release()

        assert inline.describe(SYSTEM, "r") == system.status() != []
        assert bytes(second.read()) == BYTES[4:8]
        second.release()
        assert system.status() == []
        assert refused(inline.lease, "r", 0, 1)[0] is Code.NOT_FOUND

    def test_an_unregistered_name_can_be_registered_again_immediately(self, folder: Path) -> None:
        _, system = make_regions(folder)
        (folder / "other").write_bytes(bytes(SIZE))
        system.register("r", "key", 0, SIZE)
        lease = system.regions.lease("r", 0, SIZE)
        system.unregister("r")
        system.register("r", "other", 0, SIZE)

        assert bytes(lease.read()) == BYTES
        assert bytes(system.regions.lease("r", 0, SIZE).read()) == bytes(SIZE)


@pytest.fixture(scope="module")
def shared() -> Iterator[SystemRegions]:
    memory = SharedMemory(create=True, size=SIZE)
    Path("/dev/shm", memory.name).write_bytes(BYTES)
    system = SystemRegions(Regions(allowed=True))
    system.register("r", memory.name, 8, 40)
    yield system
    memory.close()
    memory.unlink()


anywhere = st.one_of(st.integers(-4, 60), st.integers(-(2**65), 2**65))


class TestLeases:
    @given(offset=anywhere, byte_size=anywhere)
    def test_a_lease_outside_its_region_is_rejected(self, shared: SystemRegions, offset: int, byte_size: int) -> None:
        if 0 <= offset < 40 and 0 <= byte_size <= 40 - offset:
            found = bytes(shared.regions.lease("r", offset, byte_size).read())
            assert found == BYTES[8 + offset : 8 + offset + byte_size]
        else:
            code, text = refused(shared.regions.lease, "r", offset, byte_size)
            assert code is Code.INVALID
            assert "'r'" in text

    def test_an_invalid_range_is_rejected_with_tritons_message(self, shared: SystemRegions) -> None:
        assert refused(shared.regions.lease, "r", 40, 1)[1] == "Invalid offset for shared memory region: 'r'"
        assert (
            refused(shared.regions.lease, "r", 8, 33)[1] == "Invalid offset + byte size for shared memory region: 'r'"
        )
        assert refused(shared.regions.lease, "r", 8, 2**64 - 1)[1].startswith("Integer overflow detected: byte_size (")

    def test_a_write_stays_within_its_lease(self, folder: Path) -> None:
        _, system = make_regions(folder)
        system.register("r", "key", 8, 16)
        lease = system.regions.lease("r", 4, 4)
        lease.write(b"abc")

        assert (folder / "key").read_bytes() == BYTES[:12] + b"abc" + BYTES[15:]
        assert refused(lease.write, b"abcde")[0] is Code.INTERNAL

    def test_a_lease_of_a_truncated_file_is_rejected_without_crashing_the_server(self, folder: Path) -> None:
        _, system = make_regions(folder)
        system.register("r", "key", 8, 40)
        lease = system.regions.lease("r", 0, 40)
        os.truncate(folder / "key", 20)

        text = "Invalid shared memory region: 'r', its file is smaller than when it was registered"
        assert refused(lease.read) == (Code.INVALID, text)
        assert refused(lease.write, bytes(40)) == (Code.INVALID, text)
        assert (folder / "key").stat().st_size == 20
        assert bytes(system.regions.lease("r", 0, 12).read()) == BYTES[8:20]

    def test_a_region_outlives_the_name_of_its_file(self, folder: Path) -> None:
        _, system = make_regions(folder)
        system.register("r", "key", 0, SIZE)
        (folder / "key").unlink()

        assert bytes(system.regions.lease("r", 0, SIZE).read()) == BYTES

    def test_a_lease_of_zero_bytes_is_empty(self, shared: SystemRegions) -> None:
        assert bytes(shared.regions.lease("r", 0, 0).read()) == b""

    def test_a_lease_larger_than_the_event_loops_copy_limit_can_be_written(self, folder: Path) -> None:
        regions, system = make_regions(folder)
        inline = InlineRegions(regions, 16)
        system.register("r", "key", 0, SIZE)
        inline.lease("r", 0, 17).write(b"a")

        assert inline.max_copy_bytes == 16
        assert (folder / "key").read_bytes()[:2] == b"a" + BYTES[1:2]
