from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.server.doctor.elf import needed_libraries
from tests.server.doctor.elf_files import library

NAMES = st.lists(st.text("abc.+-_ü0123456789", min_size=1, max_size=20), max_size=5)


@given(NAMES)
@settings(max_examples=30)
def test_the_libraries_that_an_elf_file_needs_are_read_in_order(names: list[str]) -> None:
    assert needed_libraries(io.BytesIO(library(names))) == tuple(names)


@given(st.data())
@settings(max_examples=100)
def test_a_corrupt_elf_file_is_read_or_rejected_with_value_error(data: st.DataObject) -> None:
    library_bytes = bytearray(library(["libcudart.so.13", "libc.so.6"]))
    for _ in range(data.draw(st.integers(1, 4))):
        library_bytes[data.draw(st.integers(0, len(library_bytes) - 1))] = data.draw(st.integers(0, 255))
    cut = library_bytes[: data.draw(st.integers(0, len(library_bytes)))]

    with contextlib.suppress(ValueError):
        needed_libraries(io.BytesIO(cut))


def test_a_file_that_is_not_elf_is_rejected() -> None:
    with pytest.raises(ValueError, match="is not a 64-bit ELF file"):
        needed_libraries(io.BytesIO(b"#!/bin/sh\n" * 20))


@pytest.mark.skipif(sys.platform != "linux", reason="another kind of file")
def test_a_real_program_needs_its_c_library() -> None:
    with Path(sys.executable).open("rb") as file:
        assert any(name.startswith("libc.") for name in needed_libraries(file))
