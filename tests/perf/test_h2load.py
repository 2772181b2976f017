"""What perf/h2load.py reads of what h2load says."""

from __future__ import annotations

import pytest

from penstock.perf import h2load

H2LOAD_OUTPUT = """finished in 2.00s, 290343 req/s, 24.36MB/s
requests: 290350 total, 290350 started, 290343 done, 290343 succeeded, 4 failed, 2 errored, 1 timeout
status codes: 290343 2xx, 0 3xx, 0 4xx, 0 5xx
traffic: 48.72MB (51086336) total, 1.11MB (1163904) headers (space savings 95.00%), 33.23MB (34841160) data
"""


def test_succeeded_requests_are_counted_separately_from_all_others() -> None:
    assert h2load.parse_counts(H2LOAD_OUTPUT) == (290343, 7, 34841160)


@pytest.mark.parametrize("output", ["could not connect", ""])
def test_output_without_counts_is_an_error(output: str) -> None:
    with pytest.raises(RuntimeError, match="h2load"):
        h2load.parse_counts(output)
