"""The capabilities and cases of Cortex, and the tests that show each.

The numbers are those of docs/compatibility-cortex.md and of the specification behind it. A test is `module::test` or
`module::Class`, relative to tests/. NOT_THERE are the capabilities that Penstock does not have, as the docs state.
"""

from __future__ import annotations

_ONNX = "cortex/test_onnx"
_TF = "cortex/test_tensorflow"
_PROMISE = "cortex/test_batched_replicas"
_PROJECT = "cortex/test_project"
_SERVICE = "server/cortex/test_service"
_READ = "server/cortex/test_project"
_VALUES = "server/cortex/test_conversions_onnx"
_TENSORS = "server/cortex/test_conversions_tensorflow"

CAPABILITIES: dict[str, tuple[str, ...]] = {
    "F1": (f"{_ONNX}::TestConversion", f"{_TF}::TestAnswers::test_c26_a_handler_reads_the_class_from_its_text"),
    "F2": (
        f"{_PROJECT}::TestStart::test_c30_handlers_of_both_generations_are_accepted",
        f"{_ONNX}::TestSeedOfCortex09",
    ),
    "F3": (
        f"{_ONNX}::TestHooks::test_the_arguments_of_each_hook_decide_its_generation",
        f"{_ONNX}::TestSeedOfCortex010",
    ),
    "F4": (
        f"{_ONNX}::TestHooks::test_hooks_get_the_input_and_output_descriptions_of_the_runtime",
        "server/cortex/test_bodies",
    ),
    "F5": (f"{_ONNX}::TestHooks::test_hooks_get_the_input_and_output_descriptions_of_the_runtime",),
    "F6": (f"{_TF}::TestAnswers::test_hooks_get_a_dictionary_of_all_signatures",),
    "F7": (f"{_ONNX}::TestHooks::test_metadata_comes_from_the_project_and_persists_between_calls",),
    "F8": (f"{_ONNX}::TestConversion::test_c12_the_result_of_pre_inference_can_have_many_forms",),
    "F9": (f"{_ONNX}::TestAnswers::test_c23_a_hook_can_return_any_value_that_json_can_represent",),
    "F10": (f"{_PROMISE}::TestOneRequestPerReplica",),
    "F11": (f"{_PROJECT}::TestFiles::test_the_handler_is_loaded_before_the_first_request",),
    "F12": (f"{_ONNX}::TestConversion::test_c9_a_missing_key_is_in_the_error", f"{_VALUES}::TestOneInput"),
    "F13": (
        f"{_ONNX}::TestConversion::test_c17_a_model_with_several_inputs_requires_a_dictionary",
        f"{_VALUES}::TestSeveralInputs",
    ),
    "F14": (
        f"{_ONNX}::TestConversion::test_c8_c10_a_wrong_number_of_values_is_rejected",
        f"{_ONNX}::TestConversion::test_relaxed_shapes_accept_several_rows",
        f"{_VALUES}::test_f14_any_array_is_reshaped_to_the_target_shape_or_rejected_for_its_size",
    ),
    "F15": (
        f"{_ONNX}::TestConversion::test_several_inputs_are_cast_and_the_failing_one_is_in_the_error",
        "server/cortex/test_conversions_original",
    ),
    "F16": (f"{_ONNX}::TestConversion::test_c13_arrays_of_other_kinds_are_rejected",),
    "F17": (f"{_VALUES}::TestOneInput::test_f17_every_supported_type_is_converted_to_its_numpy_dtype",),
    "F18": (
        f"{_ONNX}::TestConversion::test_the_error_for_a_single_input_given_by_name_does_not_name_it",
        f"{_VALUES}::TestOneInput::test_f18_cast_errors_have_the_wording_of_numpy_1_17",
    ),
    "F19": (
        f"{_ONNX}::TestConversion::test_c7_lists_in_any_form_are_converted_to_the_input",
        f"{_VALUES}::TestPrediction",
    ),
    "F20": (f"{_TF}::TestFailures::test_the_error_for_an_unknown_key_is_the_bare_key", f"{_TENSORS}::TestInputs"),
    "F21": (
        f"{_TF}::TestFailures::test_the_error_for_a_value_of_the_wrong_type_has_the_expected_shape",
        f"{_TENSORS}::TestInputs::test_c25_f21_scalars_are_converted_to_one_row",
    ),
    "F22": (
        f"{_TF}::TestAnswers::test_c25_outputs_are_flat_and_numbers_are_written_as_protobuf_writes_them",
        f"{_TENSORS}::TestPrediction",
    ),
    "F23": (
        f"{_TF}::TestAnswers::test_the_configured_signature_key_is_used",
        f"{_TF}::TestStart::test_models_that_cannot_be_served_are_logged_and_the_others_are_served",
    ),
    "F24": (f"{_TF}::TestFolders",),
    "F25": (f"{_ONNX}::TestPaths", "server/cortex/test_paths"),
    "F26": (
        f"{_ONNX}::TestAnswers::test_c23_a_hook_can_return_any_value_that_json_can_represent",
        f"{_ONNX}::TestConversion",
    ),
    "F27": (f"{_ONNX}::TestAnswers", "server/cortex/test_encode"),
    "F28": (
        f"{_ONNX}::TestSeedOfCortex010::test_c4_a_body_that_is_not_json_is_malformed",
        f"{_TF}::TestFailures::test_c29_a_body_that_is_not_json_is_malformed",
        "server/cortex/test_bodies",
    ),
    "F29": (f"{_ONNX}::TestHooks::test_the_error_of_a_hook_exception_names_the_hook", f"{_SERVICE}::TestPredictions"),
    "F30": (
        f"{_ONNX}::TestPaths::test_unknown_paths_and_methods_are_answered_500",
        f"{_SERVICE}::TestOtherPaths",
    ),
    "F31": (
        f"{_SERVICE}::TestOtherPaths::test_an_options_request_is_answered_with_the_allowed_methods",
        f"{_ONNX}::TestPaths",
    ),
    "F32": (
        f"{_SERVICE}::TestOtherPaths::test_healthz_reports_whether_the_server_is_ready",
        f"{_ONNX}::TestPaths::test_a_single_api_is_also_served_at_predict",
        f"{_PROJECT}::TestStart::test_an_invalid_model_prevents_only_its_own_api_from_being_served",
    ),
    "F33": (f"{_ONNX}::TestSignatures", f"{_TF}::TestPages", "server/cortex/test_pages"),
    "F34": (f"{_PROJECT}::TestDebug", f"{_SERVICE}::TestDebug"),
    "F35": (
        f"{_PROJECT}::TestStart::test_mistakes_in_a_project_fail_the_start",
        f"{_READ}::TestMistakes",
    ),
    "F36": (f"{_READ}::TestSettings", f"{_ONNX}::TestSeedOfCortex09"),
    "F37": (
        f"{_READ}::TestSettings::test_an_api_of_cortex_0_10_is_read_with_all_its_settings",
        f"{_READ}::TestMistakes",
    ),
    "F38": (
        f"{_READ}::TestSettings::test_an_api_of_cortex_0_10_is_read_with_all_its_settings",
        "server/cortex/test_project_yaml::TestQuantities",
    ),
    "F39": (f"{_PROMISE}::TestTracker", "server/cortex/test_prediction_metrics"),
    "F40": (f"{_PROJECT}::TestRequirements",),
    "F41": (
        f"{_PROJECT}::TestFiles::test_project_files_are_found_at_mnt_project_and_by_import",
        "server/hooks/test_mounts",
    ),
    "F42": (
        f"{_PROJECT}::TestFiles::test_project_files_are_found_at_mnt_project_and_by_import",
        f"{_PROJECT}::TestFiles::test_a_handler_can_be_a_pickle_of_functions",
        f"{_PROJECT}::TestStart::test_a_missing_handler_file_is_reported",
    ),
    "F44": (
        f"{_PROJECT}::TestStart::test_c30_handlers_with_unexpected_arguments_are_rejected",
        f"{_PROJECT}::TestStart::test_a_handler_that_cannot_be_loaded_prevents_its_api_from_being_served",
    ),
    "F45": (f"{_PROJECT}::TestLog",),
}
NOT_THERE = frozenset(("F43",))

CASES: dict[str, str] = {
    "C1": f"{_ONNX}::TestSeedOfCortex010::test_c1_a_sample_is_answered_with_its_label",
    "C2": f"{_ONNX}::TestSeedOfCortex09::test_c2_a_sample_is_answered_with_its_class_and_probabilities",
    "C3": f"{_ONNX}::TestSeedOfCortex010::test_c3_without_a_json_content_type_the_sample_is_none",
    "C4": f"{_ONNX}::TestSeedOfCortex010::test_c4_a_body_that_is_not_json_is_malformed",
    "C5": f"{_ONNX}::TestSeedOfCortex010::test_c5_an_exception_of_a_hook_is_in_the_error",
    "C7": f"{_ONNX}::TestConversion::test_c7_lists_in_any_form_are_converted_to_the_input",
    "C8": f"{_ONNX}::TestConversion::test_c8_c10_a_wrong_number_of_values_is_rejected",
    "C9": f"{_ONNX}::TestConversion::test_c9_a_missing_key_is_in_the_error",
    "C10": f"{_ONNX}::TestConversion::test_c8_c10_a_wrong_number_of_values_is_rejected",
    "C12": f"{_ONNX}::TestConversion::test_c12_the_result_of_pre_inference_can_have_many_forms",
    "C13": f"{_ONNX}::TestConversion::test_c13_arrays_of_other_kinds_are_rejected",
    "C14": f"{_ONNX}::TestSignatures::test_c14_the_signature_is_served_on_its_own_page",
    "C15": f"{_ONNX}::TestSignatures::test_c15_a_get_of_the_endpoint_returns_instructions_and_the_signature",
    "C17": f"{_ONNX}::TestConversion::test_c17_a_model_with_several_inputs_requires_a_dictionary",
    "C19": f"{_ONNX}::TestConversion::test_c19_text_inputs_are_answered_as_text",
    "C20": f"{_ONNX}::TestConversion::test_c20_numbers_are_converted_to_booleans",
    "C21": f"{_ONNX}::TestConversion::test_c21_map_outputs_are_answered_with_string_keys",
    "C23": f"{_ONNX}::TestAnswers::test_c23_a_hook_can_return_any_value_that_json_can_represent",
    "C24": f"{_ONNX}::TestAnswers::test_c24_the_type_of_a_result_that_json_cannot_represent_is_in_the_error",
    "C25": f"{_TF}::TestAnswers::test_c25_outputs_are_flat_and_numbers_are_written_as_protobuf_writes_them",
    "C26": f"{_TF}::TestAnswers::test_c26_a_handler_reads_the_class_from_its_text",
    "C28": f"{_TF}::TestFailures::test_c28_a_missing_key_is_in_the_error",
    "C29": f"{_TF}::TestFailures::test_c29_a_body_that_is_not_json_is_malformed",
    "C30": f"{_PROJECT}::TestStart::test_c30_handlers_with_unexpected_arguments_are_rejected",
    "C31": f"{_PROMISE}::TestTracker::test_c31_the_class_status_and_latency_of_a_prediction_are_counted",
    "C32": f"{_PROMISE}::TestOneRequestPerReplica::"
    "test_c32_globals_belong_to_one_request_at_64_connections_while_requests_share_batches",
}
