"""What an engine has kept, as the supervisor remembers it."""

from __future__ import annotations

import os

import pytest

from penstock.server.supervisor.journal import Journal


def test_the_last_value_of_each_key_is_kept_in_the_order_in_which_they_came() -> None:
    journal = Journal()
    for key, value in (("a", 1), ("b", 2), ("a", 3), ("c", 4)):
        journal.put(key, value)
    journal.put("c", None)

    assert list(journal) == [("b", (2, [])), ("a", (3, []))]


def test_a_descriptor_is_open_for_as_long_as_its_key_is_kept() -> None:
    journal = Journal()
    first, second = os.memfd_create("first"), os.memfd_create("second")
    journal.put("region", "first", [first])
    journal.put("region", "second", [second])

    with pytest.raises(OSError, match="Bad file"):
        os.fstat(first)
    os.fstat(second)
    journal.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(second)
