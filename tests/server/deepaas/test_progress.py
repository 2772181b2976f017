"""The progress parsed from a training's output, and the log kept of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.deepaas.progress import LOG_BYTES, Log, Meter


def read(*lines: str) -> tuple[float | None, int | None, int | None, float | None]:
    meter = Meter()
    for line in lines:
        meter.read(line)
    return meter.done, meter.epoch, meter.epochs, meter.epoch_done


def test_progress_is_unknown_if_the_output_mentions_none() -> None:
    assert read("loading the pictures", "100 pictures/s") == (None, None, None, None)


def test_a_tqdm_bar_is_parsed() -> None:
    assert read(" 42%|####2     | 42/100 [00:10<00:14,  4.13it/s]") == (0.42, None, None, None)


def test_a_tqdm_bar_over_epochs_is_the_total_progress() -> None:
    assert read("Epochs:  30%|###       | 3/10 [00:03<00:07]") == (0.3, None, None, None)


@pytest.mark.parametrize(
    "bar", ["12/100 [==>...........] - ETA: 5s - loss: 0.3", "12/100 ━━━━━━━━ 2s 24ms/step - loss: 0.3"], ids=["2", "3"]
)
def test_a_keras_bar_is_the_progress_of_its_epoch(bar: str) -> None:
    assert read("Epoch 3/10", bar) == (0.212, 3, 10, 0.12)


def test_a_new_epoch_has_no_progress_of_its_own() -> None:
    assert read("Epoch 1/4", "8/8 [====] - 1s", "Epoch 2/4") == (0.25, 2, 4, None)


def test_the_end_of_the_last_epoch_is_full_progress() -> None:
    assert read("Epoch 4/4", "8/8 [====] - 1s")[0] == 1.0


def test_a_lightning_bar_is_the_progress_of_its_epoch() -> None:
    assert read("Epoch 3:  42%|####2     | 42/100 [00:10<00:14]") == (None, 3, None, 0.42)


def test_epochs_counted_from_0_are_recognized() -> None:
    assert read("Epoch 0/4: 100%|####| 5/5", "Epoch 1/4:  50%|##  | 3/5") == (0.375, 1, 4, 0.5)


def test_the_output_of_pytorchs_examples_is_parsed() -> None:
    assert read("Train Epoch: 2 [640/60000 (1%)]\tLoss: 2.1") == (None, 2, None, 0.01)


def test_other_epoch_formats_are_parsed() -> None:
    assert read("[epoch 2 of 8] loss 0.2")[:3] == (0.125, 2, 8)


@pytest.mark.parametrize("line", ["Epoch 1/0", "0/0 [", "999%|", "Epoch 9/3", "5/3 [==="])
def test_progress_is_between_0_and_1_for_inconsistent_output(line: str) -> None:
    done, _, _, epoch_done = read(line)

    assert all(share is None or 0.0 <= share <= 1.0 for share in (done, epoch_done))


@given(st.lists(st.text("Eepoch 0123456789/%|[]()=━:of", max_size=40), max_size=6))
def test_progress_is_between_0_and_1_for_any_output(lines: list[str]) -> None:
    done, _, _, epoch_done = read(*lines)

    assert all(share is None or 0.0 <= share <= 1.0 for share in (done, epoch_done))


def test_a_log_keeps_the_last_lines_and_the_number_of_dropped_ones() -> None:
    log = Log()
    for at in range(3000):
        log.add(f"{at} " + "x" * 200)

    text = log.text()
    head, *lines = text.splitlines()

    assert lines[-1].startswith("2999 ")
    assert len(text) <= LOG_BYTES + 100
    assert head == f"({3000 - len(lines)} earlier lines are omitted)"


def test_a_log_escapes_invalid_unicode() -> None:
    log = Log()
    log.add("a\udc80b")

    assert log.text() == "a\\udc80b\n"
