from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.server.repository.states import UNLOADED, ModelRecord, ModelState


def states(record: ModelRecord) -> dict[int, tuple[str, str]]:
    return {held.version: (held.state.value, held.reason) for held in record.statuses()}


class TestRecord:
    def test_a_version_is_loading_then_ready(self) -> None:
        record = ModelRecord("m")
        record.begin_load([2])
        assert states(record) == {2: ("LOADING", "")}
        assert record.serve([2]) == []
        assert states(record) == {2: ("READY", "")}

    def test_a_failed_version_has_its_reason_until_the_next_load(self) -> None:
        record = ModelRecord("m")
        record.begin_load([1])
        record.record_failure(1, "no good")
        assert states(record) == {1: ("UNAVAILABLE", "no good")}
        record.begin_load([2])
        assert states(record) == {2: ("LOADING", "")}

    def test_a_served_version_stays_ready_when_its_reload_fails(self) -> None:
        record = ModelRecord("m")
        record.begin_load([1])
        record.serve([1])
        record.begin_load([1, 2])
        record.record_failure(1, "no good")
        assert states(record) == {1: ("READY", "no good"), 2: ("LOADING", "")}
        record.record_failure(0, "nothing is any good")
        record.abort_load()

        assert states(record) == {1: ("READY", "nothing is any good"), 2: ("UNAVAILABLE", UNLOADED)}
        assert record.all_ready
        record.begin_load([1])
        assert states(record)[1] == ("READY", "")

    def test_a_replaced_version_is_unloading_then_unloaded(self) -> None:
        record = ModelRecord("m")
        record.serve([1])
        leaving = record.serve([2])
        assert states(record) == {1: ("UNLOADING", ""), 2: ("READY", "")}
        record.mark_unloaded(leaving)
        assert states(record) == {1: ("UNAVAILABLE", UNLOADED), 2: ("READY", "")}

    def test_the_end_of_an_old_unload_does_not_change_a_newer_load(self) -> None:
        record = ModelRecord("m")
        record.serve([1])
        leaving = record.unload()
        record.begin_load([1])
        record.serve([1])
        record.mark_unloaded(leaving)

        assert states(record) == {1: ("READY", "")}

    def test_unloading_clears_failures(self) -> None:
        record = ModelRecord("m")
        record.record_failure(0, "no good")
        assert record.unload() == []
        assert states(record) == {}
        record.record_failure(3, "no good")
        assert record.unload() == []
        assert states(record) == {3: ("UNAVAILABLE", UNLOADED)}
        assert not any(held.should_serve for held in record.statuses())

    @given(
        st.lists(
            st.tuples(
                st.sampled_from(["begin", "fail", "serve", "give_up", "unload", "gone"]), st.sets(st.integers(0, 3))
            ),
            max_size=30,
        )
    )
    def test_the_ready_versions_are_the_versions_served_last_after_any_steps(
        self, steps: list[tuple[str, set[int]]]
    ) -> None:
        record, serving, leaving = ModelRecord("m"), set[int](), []
        for step, versions in steps:
            chosen = versions - {0}
            if step == "begin":
                record.begin_load(chosen)
            elif step == "fail":
                for version in versions:
                    record.record_failure(version, "no good")
            elif step == "serve":
                leaving += record.serve(chosen)
                serving = chosen
            elif step == "unload":
                leaving += record.unload()
                serving = set()
            elif step == "gone":
                record.mark_unloaded(leaving)
                leaving = []
            else:
                record.abort_load()

            assert set(record.ready_versions) == serving
            assert not (serving and 0 in record.versions and record.versions[0].state is ModelState.READY)
        record.abort_load()
        record.mark_unloaded(leaving)
        assert {held.state for held in record.statuses()} <= {ModelState.READY, ModelState.UNAVAILABLE}
