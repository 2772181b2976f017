"""What Cortex could do, capability by capability and case by case, and the tests that show each.

The numbers are those of docs/compatibility-cortex.md and of the specification behind it. A test is `module::test` or
`module::Class`, modules counted from tests/. NOT_THERE are the capabilities that Penstock does not have, and says so.
"""

from __future__ import annotations

_ONNX = "cortex/test_onnx"
_TF = "cortex/test_tensorflow"
_PROMISE = "cortex/test_promise"
_PROJECT = "cortex/test_project"
_SERVICE = "server/cortex/test_service"
_READ = "server/cortex/test_project"
_VALUES = "server/cortex/test_conversions_onnx"
_TENSORS = "server/cortex/test_conversions_tensorflow"

CAPABILITIES: dict[str, tuple[str, ...]] = {
    "F1": (f"{_ONNX}::TestConversion", f"{_TF}::TestAnswers::test_c26_a_handler_reads_the_class_from_its_text"),
    "F2": (f"{_PROJECT}::TestStart::test_c30_both_generations_are_taken", f"{_ONNX}::TestTheSeedOfNine"),
    "F3": (f"{_ONNX}::TestHooks::test_each_hook_is_of_the_generation_of_its_arguments", f"{_ONNX}::TestTheSeedOfTen"),
    "F4": (f"{_ONNX}::TestHooks::test_they_see_the_runtime_s_own_descriptions", "server/cortex/test_bodies"),
    "F5": (f"{_ONNX}::TestHooks::test_they_see_the_runtime_s_own_descriptions",),
    "F6": (f"{_TF}::TestAnswers::test_the_signature_is_a_dictionary_with_all_keys",),
    "F7": (f"{_ONNX}::TestHooks::test_metadata_is_the_project_s_and_stays",),
    "F8": (f"{_ONNX}::TestConversion::test_c12_what_pre_inference_returns_may_have_many_forms",),
    "F9": (f"{_ONNX}::TestAnswers::test_c23_a_hook_may_return_what_json_can_say",),
    "F10": (f"{_PROMISE}::TestPromise",),
    "F11": (f"{_PROJECT}::TestFiles::test_the_module_is_loaded_before_the_first_request",),
    "F12": (f"{_ONNX}::TestConversion::test_c9_a_missing_key_is_named", f"{_VALUES}::TestOneInput"),
    "F13": (f"{_ONNX}::TestConversion::test_c17_several_inputs_want_a_dictionary", f"{_VALUES}::TestSeveralInputs"),
    "F14": (
        f"{_ONNX}::TestConversion::test_c8_c10_another_number_of_values_is_refused",
        f"{_ONNX}::TestConversion::test_relaxed_shapes_take_several_rows",
        f"{_VALUES}::test_f14_whatever_comes_has_the_target_shape_or_is_refused_for_its_size",
    ),
    "F15": (
        f"{_ONNX}::TestConversion::test_several_inputs_are_cast_and_named_where_they_fail",
        "server/cortex/test_conversions_original",
    ),
    "F16": (f"{_ONNX}::TestConversion::test_c13_arrays_of_other_kinds_are_refused",),
    "F17": (f"{_VALUES}::TestOneInput::test_f17_every_other_type_has_its_array",),
    "F18": (
        f"{_ONNX}::TestConversion::test_one_input_that_is_named_fails_without_its_name",
        f"{_VALUES}::TestOneInput::test_f18_numpys_words_are_those_of_the_time",
    ),
    "F19": (f"{_ONNX}::TestConversion::test_c7_lists_are_what_the_model_takes", f"{_VALUES}::TestPrediction"),
    "F20": (f"{_TF}::TestFailures::test_a_key_too_many_is_told_bare", f"{_TENSORS}::TestInputs"),
    "F21": (
        f"{_TF}::TestFailures::test_a_value_of_another_type_is_told_with_the_shape",
        f"{_TENSORS}::TestInputs::test_c25_f21_scalars_are_one_row",
    ),
    "F22": (
        f"{_TF}::TestAnswers::test_c25_outputs_are_flat_and_their_numbers_as_protobuf_writes_them",
        f"{_TENSORS}::TestPrediction",
    ),
    "F23": (
        f"{_TF}::TestAnswers::test_the_key_that_is_configured_is_used",
        f"{_TF}::TestStart::test_what_cannot_be_served_says_why_and_the_others_are",
    ),
    "F24": (f"{_TF}::TestFolders",),
    "F25": (f"{_ONNX}::TestPaths", "server/cortex/test_paths"),
    "F26": (f"{_ONNX}::TestAnswers::test_c23_a_hook_may_return_what_json_can_say", f"{_ONNX}::TestConversion"),
    "F27": (f"{_ONNX}::TestAnswers", "server/cortex/test_encode"),
    "F28": (
        f"{_ONNX}::TestTheSeedOfTen::test_c4_what_is_no_json_is_malformed",
        f"{_TF}::TestFailures::test_c29_what_is_no_json_is_malformed",
        "server/cortex/test_bodies",
    ),
    "F29": (f"{_ONNX}::TestHooks::test_what_either_raises_names_it", f"{_SERVICE}::TestPredictions"),
    "F30": (
        f"{_ONNX}::TestPaths::test_what_is_not_there_and_what_is_not_allowed_are_errors_of_the_server",
        f"{_SERVICE}::TestOtherPaths",
    ),
    "F31": (f"{_SERVICE}::TestOtherPaths::test_options_are_told", f"{_ONNX}::TestPaths"),
    "F32": (
        f"{_SERVICE}::TestOtherPaths::test_the_probe_tells_whether_it_is_ready",
        f"{_ONNX}::TestPaths::test_an_only_api_is_under_predict_too",
        f"{_PROJECT}::TestStart::test_a_model_that_is_none_keeps_its_api_from_being_served_and_no_other",
    ),
    "F33": (f"{_ONNX}::TestSignatures", f"{_TF}::TestPages", "server/cortex/test_pages"),
    "F34": (f"{_PROJECT}::TestDebug", f"{_SERVICE}::TestDebug"),
    "F35": (
        f"{_PROJECT}::TestStart::test_what_cannot_be_deployed_is_told_before_anything_is_served",
        f"{_READ}::TestMistakes",
    ),
    "F36": (f"{_READ}::TestWhatIsRead", f"{_ONNX}::TestTheSeedOfNine"),
    "F37": (f"{_READ}::TestWhatIsRead::test_an_api_of_0_10_with_everything", f"{_READ}::TestMistakes"),
    "F38": (
        f"{_READ}::TestWhatIsRead::test_an_api_of_0_10_with_everything",
        "server/cortex/test_project_yaml::TestQuantities",
    ),
    "F39": (f"{_PROMISE}::TestTracker", "server/cortex/test_prediction_metrics"),
    "F40": (f"{_PROJECT}::TestRequirements",),
    "F41": (
        f"{_PROJECT}::TestFiles::test_they_are_at_mnt_project_and_beside_each_other",
        "server/hooks/test_mounts",
    ),
    "F42": (
        f"{_PROJECT}::TestFiles::test_they_are_at_mnt_project_and_beside_each_other",
        f"{_PROJECT}::TestFiles::test_functions_may_be_pickled",
        f"{_PROJECT}::TestStart::test_a_handler_that_is_not_there_is_told",
    ),
    "F44": (
        f"{_PROJECT}::TestStart::test_c30_arguments_of_other_names_are_refused",
        f"{_PROJECT}::TestStart::test_a_handler_that_cannot_be_loaded_keeps_its_api_from_being_served",
    ),
    "F45": (f"{_PROJECT}::TestLog",),
}
NOT_THERE = frozenset(("F43",))

CASES: dict[str, str] = {
    "C1": f"{_ONNX}::TestTheSeedOfTen::test_c1_a_flower_is_answered_with_its_name",
    "C2": f"{_ONNX}::TestTheSeedOfNine::test_c2_a_flower_is_answered_with_its_class",
    "C3": f"{_ONNX}::TestTheSeedOfTen::test_c3_without_a_json_content_type_the_sample_is_none",
    "C4": f"{_ONNX}::TestTheSeedOfTen::test_c4_what_is_no_json_is_malformed",
    "C5": f"{_ONNX}::TestTheSeedOfTen::test_c5_what_a_hook_raises_is_told",
    "C7": f"{_ONNX}::TestConversion::test_c7_lists_are_what_the_model_takes",
    "C8": f"{_ONNX}::TestConversion::test_c8_c10_another_number_of_values_is_refused",
    "C9": f"{_ONNX}::TestConversion::test_c9_a_missing_key_is_named",
    "C10": f"{_ONNX}::TestConversion::test_c8_c10_another_number_of_values_is_refused",
    "C12": f"{_ONNX}::TestConversion::test_c12_what_pre_inference_returns_may_have_many_forms",
    "C13": f"{_ONNX}::TestConversion::test_c13_arrays_of_other_kinds_are_refused",
    "C14": f"{_ONNX}::TestSignatures::test_c14_the_signature_has_its_page",
    "C15": f"{_ONNX}::TestSignatures::test_c15_the_endpoint_says_what_to_do",
    "C17": f"{_ONNX}::TestConversion::test_c17_several_inputs_want_a_dictionary",
    "C19": f"{_ONNX}::TestConversion::test_c19_texts_are_texts",
    "C20": f"{_ONNX}::TestConversion::test_c20_numbers_are_read_as_booleans",
    "C21": f"{_ONNX}::TestConversion::test_c21_maps_have_their_keys_as_text",
    "C23": f"{_ONNX}::TestAnswers::test_c23_a_hook_may_return_what_json_can_say",
    "C24": f"{_ONNX}::TestAnswers::test_c24_what_json_cannot_say_is_an_error_that_names_the_type",
    "C25": f"{_TF}::TestAnswers::test_c25_outputs_are_flat_and_their_numbers_as_protobuf_writes_them",
    "C26": f"{_TF}::TestAnswers::test_c26_a_handler_reads_the_class_from_its_text",
    "C28": f"{_TF}::TestFailures::test_c28_a_missing_key_is_named",
    "C29": f"{_TF}::TestFailures::test_c29_what_is_no_json_is_malformed",
    "C30": f"{_PROJECT}::TestStart::test_c30_arguments_of_other_names_are_refused",
    "C31": f"{_PROMISE}::TestTracker::test_c31_a_class_a_status_and_a_time_are_counted",
    "C32": f"{_PROMISE}::TestPromise::"
    "test_c32_a_global_is_the_request_s_own_at_64_connections_while_batches_are_shared",
}
