from __future__ import annotations

import sys

import pytest

from penstock.server.doctor.probes import ProbeError, ProbeProcess, read_answer


def _shell(script: str, limit_s: float = 20.0) -> ProbeProcess:
    return ProbeProcess(["/bin/sh", "-c", script], limit_s)


def test_the_output_of_a_probe_is_its_answer() -> None:
    assert read_answer(ProbeProcess(["/bin/cat"], 20.0, b'{"a": 1}')) == {"a": 1}


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo broken >&2; exit 3", "ended with status 3: broken"),
        ("kill -SEGV $$", "ended by signal 11"),
        ("echo no; echo object", r"the answer cannot be parsed: 'no\nobject\n'"),
        ("echo 1", r"the answer cannot be parsed: '1\n'"),
    ],
)
def test_a_failed_probe_reports_its_status_and_output(script: str, why: str) -> None:
    with pytest.raises(ProbeError) as failed:
        read_answer(_shell(script))

    assert str(failed.value) == why


def test_a_probe_that_hangs_times_out() -> None:
    with pytest.raises(ProbeError, match=r"no answer within 0\.05 s"):
        _shell("trap '' TERM; exec sleep 60", limit_s=0.05).wait_output()


def test_a_probe_that_hangs_does_not_use_up_the_time_of_other_probes() -> None:
    hangs, answers = _shell("exec sleep 60", limit_s=0.5), _shell("echo '{}'", limit_s=0.5)

    with pytest.raises(ProbeError):
        hangs.wait_output()
    assert read_answer(answers) == {}


def test_a_probe_with_a_missing_program_fails() -> None:
    with pytest.raises(ProbeError, match="No such file"):
        ProbeProcess([f"{sys.executable}-of-nobody"], 1.0).wait_output()
