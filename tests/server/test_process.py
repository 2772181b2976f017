"""What the server sets up in its process, tested in separate processes."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from penstock.server.process import run
from penstock.server.settings import Settings

FAULTS = """
import resource, sys
from penstock.server.process import retain_freed_memory
if sys.argv[1] == "kept":
    retain_freed_memory()
for turn in range(102):
    if turn == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for each in [bytearray(600_000) for _ in range(4)]:
        each[:] = b"x" * len(each)
    del each
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 100)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_memory_freed_by_a_large_request_is_reused_without_page_faults() -> None:
    def faults(word: str) -> int:
        words = [sys.executable, "-c", FAULTS, word]
        return int(subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout)

    assert faults("kept") < 50 < faults("as it is")


STREAMS = """
import os, sys
from penstock.server.cli import main
assert sys.stdin is sys.stdout is sys.stderr is None
main(["version"])
sys.stderr.write("nobody reads this")
os.write(int(sys.argv[1]), str([os.readlink(f"/proc/self/fd/{number}") for number in range(3)]).encode())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_closed_standard_streams_are_replaced_by_dev_null() -> None:
    reader, writer = os.pipe()
    closed = f'exec "$0" -c "$1" {writer} <&- >&- 2>&-'
    subprocess.run(["sh", "-c", closed, sys.executable, STREAMS], pass_fds=[writer], check=True, timeout=60)
    os.close(writer)
    with os.fdopen(reader) as output:
        assert output.read() == str(["/dev/null"] * 3)


LIMITS = """
import resource
from penstock.server.process import raise_open_file_limit
raise_open_file_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("soft", "hard", "then"), [(64, 128, "128 128"), (128, 128, "128 128")])
def test_a_server_may_open_as_many_files_as_the_hard_limit_allows(soft: int, hard: int, then: str) -> None:
    limited = f'ulimit -n {hard} && ulimit -S -n {soft} && exec "$0" -c "$1"'
    words = ["sh", "-c", limited, sys.executable, LIMITS]
    assert subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout.strip() == then


CHILDREN = """
import subprocess, sys
from penstock.server.process import prepare
prepare()
print(subprocess.run([sys.executable, "-c", "raise SystemExit(3)"]).returncode)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a shell that has the system reap children")
def test_child_exit_statuses_are_seen_when_the_parent_shell_ignores_sigchld() -> None:
    words = ["sh", "-c", 'trap "" CHLD && exec "$0" -c "$1"', sys.executable, CHILDREN]
    assert subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout.strip() == "3"


def test_a_log_file_that_cannot_be_opened_ends_the_server_with_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Settings(log_file="/no/such/penstock.log")) == 1
    assert capsys.readouterr().err == (
        "penstock: --log-file /no/such/penstock.log: failed to open log file: No such file or directory\n"
    )
