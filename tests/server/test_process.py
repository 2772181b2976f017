"""What the process sets up for itself, seen from a process of its own."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
from penstock.server.process import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
for turn in range(102):
    if turn == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for each in [bytearray(600_000) for _ in range(4)]:
        each[:] = b"x" * len(each)
    del each
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 100)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_memory_that_a_large_request_frees_is_not_paged_in_again_for_the_next() -> None:
    def faults(word: str) -> int:
        words = [sys.executable, "-c", FAULTS, word]
        return int(subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout)

    assert faults("kept") < 50 < faults("as it is")
