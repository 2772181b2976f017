"""The Journal keeps for the supervisor what an engine has saved."""

from __future__ import annotations

import os

import pytest

from penstock.server.supervisor.journal import Journal


def test_the_journal_keeps_the_last_value_of_each_key_in_order_of_arrival() -> None:
    journal = Journal()
    for key, value in (("a", 1), ("b", 2), ("a", 3), ("c", 4)):
        journal.put(key, value)
    journal.put("c", None)

    assert list(journal) == [("b", (2, [])), ("a", (3, []))]


def test_a_descriptor_is_closed_when_its_key_is_replaced_or_the_journal_closes() -> None:
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
