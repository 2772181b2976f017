from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.errors import RETRY_AFTER_NS, Code, DeviceLost, InferError, OutOfMemory
from penstock.backends.tensorflow_failures import MAX_TEXT_CHARS, error_text, load_error, run_error

MODEL = Path("/models/iris/1/model.savedmodel")


class OpError(Exception):
    """The attributes of tf.errors.OpError."""

    def __init__(self, message: str, error_code: int) -> None:
        super().__init__(message)
        self.message = message
        self.error_code = error_code


# Recorded from TensorFlow 2.21, except the last three, which are known from older versions.
@pytest.mark.parametrize(
    ("text", "is_message"),
    [
        ("Matrix size-incompatible: In[0]: [2,3], In[1]: [4,4]\n\t [[{{node MatMul}}]]", None),
        (
            (
                "assertion failed: [x is negative] [[1 -2]]\n"
                "\t [[{{function_node Assert_AssertGuard_false_641}}{{node Assert}}]]"
            ),
            "assertion failed: [x is negative] [[1 -2]]",
        ),
        ("Loop execution was cancelled.\n\t [[{{node while/LoopCond/_12}}]]", "Loop execution was cancelled."),
        (
            (
                "Graph execution error:\n\nDetected at node 'save/RestoreV2' defined at (most recent call last):\n"
                "Node: 'save/RestoreV2'\nRead less bytes than requested\n\t [[{{node save/RestoreV2}}]]"
            ),
            "Read less bytes than requested",
        ),
        (
            (
                "Restoring from checkpoint failed. This is most likely due to a Variable name or other graph key that "
                "is missing from the checkpoint. Please ensure that you have not altered the graph expected based on "
                "the checkpoint. Original error:\n\nGraph execution error:\n\n"
                "Detected at node 'save/RestoreV2' defined at (most recent call last):\nNode: 'save/RestoreV2'\n"
                "Key weights_0 not found in checkpoint\n\t [[{{node save/RestoreV2}}]]"
            ),
            "Key weights_0 not found in checkpoint",
        ),
        (
            (
                "Cannot parse file b'/models/iris/1/model.savedmodel/saved_model.pb': Error parsing message with type "
                "'tensorflow.SavedModel'."
            ),
            "Cannot parse file 'saved_model.pb': Error parsing message with type 'tensorflow.SavedModel'.",
        ),
        (
            (
                "OOM when allocating tensor with shape[70] and type float on "
                "/job:localhost/replica:0/task:0/device:CPU:0 by allocator mklcpu\n"
                "\t [[{{node random_uniform/RandomUniform}}]]\n"
                "Hint: If you want to see a list of allocated tensors when OOM happens, add report_tensor_allocations"
                "_upon_oom to RunOptions for current allocation info. This isn't available when running in Eager "
                "mode.\n"
            ),
            "OOM when allocating tensor with shape[70] and type float on CPU:0 by allocator mklcpu",
        ),
        (
            (
                "ValueError: Could not find callback with key=pyfunc_0 in the registry.\n"
                'Traceback (most recent call last):\n\n  File "/home/ann/script_ops.py", line 257, in __call__\n'
                "    raise ValueError(token)\n\nValueError: Could not find callback with key=pyfunc_0 in the registry."
            ),
            "ValueError: Could not find callback with key=pyfunc_0 in the registry.",
        ),
        (
            (
                "2 root error(s) found.\n"
                "  (0) INVALID_ARGUMENT: Incompatible shapes: [1,3] vs. [2]\n\t [[{{node mul}}]]\n"
                "\t [[mul/_5]]\n  (1) INVALID_ARGUMENT: Incompatible shapes: [1,3] vs. [2]\n\t [[{{node mul}}]]\n"
                "0 successful operations.\n0 derived errors ignored."
            ),
            "Incompatible shapes: [1,3] vs. [2]",
        ),
        (
            (
                "Graph execution error:\n\nDetected at node 'model/dense' defined at (most recent call last):\n"
                "    File \"/home/ann/train.py\", line 3, in <module>\n      model.fit()\nNode: 'model/dense'\n"
                "Matrix size-incompatible: In[0]: [1,3]\n\t [[{{node model/dense}}]] [Op:__inference_signature_1]"
            ),
            "Matrix size-incompatible: In[0]: [1,3]",
        ),
        (
            "No space left\n\nOriginal stack trace for 'save':\n  File \"/home/ann/train.py\", line 3, in <module>",
            "No space left",
        ),
    ],
)
def test_error_text_is_the_message_of_the_operation_only(text: str, is_message: str | None) -> None:
    assert error_text(OpError(text, 3), MODEL) == (text.partition("\n")[0] if is_message is None else is_message)


@given(st.text(max_size=300))
def test_error_text_never_reveals_the_models_folder(text: str) -> None:
    assert str(MODEL) not in error_text(ValueError(f"{text} {MODEL}/variables {MODEL} {text}"), MODEL)


@given(st.text(alphabet="abc [](){}:\n\t", max_size=200), st.integers(0, 20))
def test_any_message_becomes_an_infer_error(text: str, code: int) -> None:
    assert isinstance(run_error(OpError(text, code)), InferError)


def test_a_message_that_is_not_utf8_is_escaped_and_an_invalid_request() -> None:
    message = b"Could not parse example input, value: '\xff\xfegarbage'\n\t [[{{node ParseExample/ParseExampleV2}}]]"
    with pytest.raises(UnicodeDecodeError) as caught:
        message.decode()

    refusal = run_error(caught.value)
    assert refusal.code is Code.INVALID
    assert refusal.message == "Could not parse example input, value: '\\xff\\xfegarbage'"


def test_a_missing_python_function_is_an_error_that_names_numpy_function() -> None:
    refusal = run_error(OpError("Missing py trampoline. Most likely, it is a link error.\n\t [[{{node PyFunc}}]]", 3))

    assert refusal.code is Code.INTERNAL
    assert "tf.numpy_function" in refusal.message


def test_error_text_is_cut_at_a_maximum_length() -> None:
    assert len(error_text(ValueError("9" * 100_000))) == MAX_TEXT_CHARS + 3


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (3, Code.INVALID),
        (11, Code.INVALID),
        (1, Code.INTERNAL),
        (5, Code.INTERNAL),
        (9, Code.INTERNAL),
        (12, Code.INTERNAL),
        (13, Code.INTERNAL),
    ],
)
def test_only_errors_of_the_input_are_invalid_requests(code: int, expected: Code) -> None:
    error = run_error(OpError("no", code))

    assert type(error) is InferError
    assert (error.code, error.message) == (expected, "no")


@pytest.mark.parametrize(
    "error",
    [OpError("OOM when allocating tensor", 8), OpError("failed: CUDA_ERROR_OUT_OF_MEMORY: out", 13), MemoryError()],
)
def test_out_of_memory_errors_are_recognized(error: Exception) -> None:
    infer_error = run_error(error)

    assert type(infer_error) is OutOfMemory
    assert (infer_error.code, infer_error.retry_after_ns) == (Code.OVERLOADED, RETRY_AFTER_NS)
    assert infer_error.message
    assert load_error(MemoryError(), MODEL).code is Code.OVERLOADED


def test_a_lost_device_is_recognized_only_on_a_gpu() -> None:
    error = OpError("Failed to launch: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered", 13)

    assert type(run_error(error, on_gpu=True)) is DeviceLost
    assert type(run_error(error)) is InferError


def test_a_failed_load_is_invalid_and_does_not_reveal_the_folder() -> None:
    assert load_error(OSError(f"Cannot read {MODEL}"), MODEL).message == "Cannot read the model's folder"
    assert load_error(OSError("no"), MODEL).code is Code.INVALID


def test_an_unknown_operation_is_reported_with_the_key_for_its_library() -> None:
    text = "Op type not registered 'WordpieceTokenize' in binary running on host. Make sure the Op and Kernel are ..."

    assert load_error(OpError(text, 5), MODEL).message == (
        "Op type not registered 'WordpieceTokenize'; if it is a custom operator, "
        "set runtime.custom_op_libraries in penstock.toml to the library that defines it"
    )
