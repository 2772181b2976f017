"""Run sizes: the few numbers of rows with which a model runs on a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.loading.opening import close_model, open_model
from penstock.batching.loading.run_sizes import SIZES_OPTION, run_sizes, with_run_sizes
from penstock.batching.spec import BatchPolicy, InstanceGroup, ModelSpec, SequenceSpec
from tests.fakes import FakeBackend, fake_loader

ON_GPU, ON_CPU = InstanceGroup(devices=("cuda:0",)), InstanceGroup(devices=("cpu",))
SIGNATURE = Signature((TensorSpec("x", "FP32", (-1, 4)),), (TensorSpec("y", "FP32", (-1, 4)),))
SPEC = ModelSpec("m", 1, Path("m.onnx"), signature=SIGNATURE, instances=(ON_GPU,))


def sizes_of(policy: BatchPolicy, **changed: Any) -> tuple[int, ...]:
    return with_run_sizes(replace(SPEC, policy=policy, **changed)).policy.allowed_rows


def test_there_are_two_run_sizes_to_a_doubling() -> None:
    assert run_sizes(32) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    assert run_sizes(100)[-3:] == (64, 96, 100)
    assert run_sizes(1) == (1,)


def test_the_largest_possible_batch_size_has_few_run_sizes() -> None:
    most = 2**31 - 1

    assert run_sizes(most)[-3:] == (1 << 30, 3 << 29, most)
    assert sizes_of(BatchPolicy(max_batch_rows=most)) == run_sizes(most)


@given(st.integers(1, 5000))
def test_at_most_a_third_of_a_batch_is_padding(most: int) -> None:
    sizes = run_sizes(most)

    assert sizes[0] == 1
    assert sizes[-1] == most
    assert all(less < more <= max(less + 1, 1.5 * less) for less, more in pairwise(sizes))


class TestSizesOfModel:
    def test_a_model_on_a_gpu_has_run_sizes(self) -> None:
        assert sizes_of(BatchPolicy(max_batch_rows=8)) == run_sizes(8)
        assert sizes_of(BatchPolicy(max_batch_rows=8), instances=(ON_CPU, ON_GPU)) == run_sizes(8)

    def test_a_model_only_on_the_cpu_has_no_run_sizes(self) -> None:
        assert sizes_of(BatchPolicy(max_batch_rows=8), instances=(ON_CPU,)) == ()

    def test_a_model_that_is_compiled_for_each_size_has_run_sizes_on_the_cpu(self) -> None:
        backend = FakeBackend(SIGNATURE, list, compiles_each_size=True)
        model = open_model(
            ModelSpec("m", 1, Path("m"), backend="fake"), {"fake": fake_loader(backend)}, lambda *_: None
        )
        close_model(model)

        assert model.spec.policy.allowed_rows == run_sizes(64)
        assert {run.rows for run in backend.runs} <= set(run_sizes(64))

    def test_configured_sizes_override_the_run_sizes(self) -> None:
        assert sizes_of(BatchPolicy(max_batch_rows=8, allowed_rows=(5, 8))) == (5, 8)
        assert sizes_of(BatchPolicy(max_batch_rows=8), options={SIZES_OPTION: "2,5,64"}) == (2, 5, 8)

    def test_run_sizes_include_preferred_sizes_and_the_cap(self) -> None:
        assert sizes_of(BatchPolicy(max_batch_rows=8, preferred_rows=(5,), cap_rows=7)) == (1, 2, 3, 4, 5, 6, 7, 8)

    @pytest.mark.parametrize("rows", [0, 1])
    def test_a_model_without_batches_has_no_run_sizes(self, rows: int) -> None:
        assert sizes_of(BatchPolicy(max_batch_rows=rows)) == ()

    def test_a_model_with_ragged_inputs_or_sequences_has_no_run_sizes(self) -> None:
        ragged = Signature((TensorSpec("x", "FP32", (-1, 4), ragged=True),), SIGNATURE.outputs)
        policy = BatchPolicy(max_batch_rows=8)

        assert sizes_of(policy, signature=ragged) == ()
        assert sizes_of(policy, sequence=SequenceSpec()) == ()

    def test_a_model_with_invariance_has_no_run_sizes(self) -> None:
        assert sizes_of(BatchPolicy(max_batch_rows=8, invariant=True)) == ()
