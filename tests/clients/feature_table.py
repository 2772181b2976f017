"""Triton's features of scheduling, models and lifecycle, row by row, and the tests of each.

A row is a line of the tables "Scheduling and batching" and "Models, config, lifecycle" that the project compares itself
with; its entries are the features that the line names, by their exact names. A test is `module::test` or
`module::Class`, modules counted from tests/clients unless they begin with a folder's name.
"""

from __future__ import annotations

Row = dict[str, tuple[str, ...]]

_LIFE = "test_lifecycle"
_REFUSED = f"{_LIFE}::test_an_unsupported_configuration_is_rejected_with_the_name_of_the_field"
_FLAGS = "server/test_triton_flags::test_an_unsupported_triton_flag_is_rejected_with_the_reason"
_DYNAMIC = "test_dynamic_batching"
_FORMS = "test_tensor_forms"
_SEQUENCES = "test_sequences"
_STREAM = "test_decoupled"
_INSTANCES = "test_instances"
_CONTROL = "server/test_model_control"
_BATCHES = "test_sequence_batches"
_TOGETHER = "test_combinations"
_LOADING = "test_loading"
_CALLS = "test_python_calls"

SCHEDULING: dict[str, Row] = {
    "max batch": {
        "max_batch_size": (
            f"{_LIFE}::TestAutoCompletion::test_max_batch_size_limits_the_rows_of_a_request",
            f"{_LIFE}::TestAutoCompletion::test_metadata_has_the_batch_axis_whether_configured_or_completed",
            "test_tritonclient_http::TestShapes::test_more_rows_than_the_models_batch_size_are_rejected",
        ),
        "max_batch_size: 0": (
            f"{_LIFE}::TestAutoCompletion::test_a_model_with_batch_size_0_takes_any_number_of_rows_on_a_free_axis",
        ),
    },
    "dynamic batcher": {
        "preferred_batch_size": (f"{_DYNAMIC}::TestPreferredSizes",),
        "max_queue_delay_microseconds": (
            f"{_DYNAMIC}::TestPreferredSizes::test_a_request_of_another_size_waits_for_the_delay",
        ),
        "preserve_ordering": (f"{_DYNAMIC}::TestPreservedOrder", f"{_TOGETHER}::TestPreservedOrder"),
        "priority_levels": (f"{_DYNAMIC}::TestPriorityLevels", f"{_TOGETHER}::TestPriorityLevels", _REFUSED),
        "default_priority_level": (f"{_DYNAMIC}::TestPriorityLevels",),
        "default_queue_policy": (f"{_DYNAMIC}::TestTimeouts",),
        "priority_queue_policy": (f"{_DYNAMIC}::TestTimeouts::test_each_priority_level_has_its_own_timeout_policy",),
    },
    "queue policy": {
        "timeout_action REJECT": (
            f"{_DYNAMIC}::TestTimeouts::test_a_request_is_rejected_when_it_times_out_while_the_instance_is_busy",
        ),
        "timeout_action DELAY": (
            f"{_DYNAMIC}::TestTimeouts::test_a_delayed_request_runs_after_all_that_have_not_timed_out_and_never_fails",
        ),
        "default_timeout_microseconds": (
            f"{_DYNAMIC}::TestTimeouts::test_a_request_is_rejected_when_it_times_out_while_the_instance_is_busy",
        ),
        "allow_timeout_override": (
            f"{_DYNAMIC}::TestTimeouts::test_a_request_cannot_shorten_its_timeout_without_allow_timeout_override",
        ),
        "max_queue_size": (
            f"{_DYNAMIC}::TestQueueSize",
            "test_triton_qa::test_a_full_queue_is_unavailable_and_the_queued_request_is_served",
        ),
    },
    "custom batching": {"TRITON_BATCH_STRATEGY_PATH": (_REFUSED,)},
    "ragged batching": {
        "input.allow_ragged_batch": (
            f"{_FORMS}::TestRaggedBatching::test_ragged_requests_share_one_batch_and_the_model_receives_derived_inputs_for_each",
        ),
        "BATCH_ELEMENT_COUNT": (
            f"{_FORMS}::TestRaggedBatching",
            f"{_TOGETHER}::TestRaggedBatches::test_strings_of_different_lengths_share_a_batch_and_are_cached_separately",
        ),
        "BATCH_ACCUMULATED_ELEMENT_COUNT": (f"{_FORMS}::TestRaggedBatching",),
        "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": (f"{_FORMS}::TestRaggedBatching",),
        "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": (
            f"{_FORMS}::TestRaggedBatching::test_a_ragged_input_is_flat_and_a_count_may_be_given_as_a_shape",
        ),
        "BATCH_ITEM_SHAPE": (
            f"{_FORMS}::TestRaggedBatching::test_item_shapes_have_one_row_per_row_of_the_batch",
            f"{_TOGETHER}::TestRaggedBatches::test_requests_of_higher_priority_come_first_in_a_ragged_batch",
        ),
        "BATCH_ITEM_SHAPE_FLATTEN": (
            f"{_FORMS}::TestRaggedBatching::test_flattened_item_shapes_cover_all_items_of_the_batch",
        ),
        "BATCH_SCATTER_WITH_INPUT_SHAPE": (
            f"{_FORMS}::TestRaggedBatching::test_a_flat_output_is_split_by_the_shapes_of_the_requests",
        ),
    },
    "shape tensor": {"input.is_shape_tensor": (f"{_FORMS}::TestShapeTensors",)},
    "optional inputs": {"input.optional": (f"{_FORMS}::TestOptionalInputs", f"{_TOGETHER}::TestOptionalInputs")},
    "reshape": {
        "input.reshape.shape": (f"{_FORMS}::TestReshape",),
        "output.reshape.shape": (f"{_FORMS}::TestReshape",),
    },
    "sequence batcher": {
        "direct": (f"{_SEQUENCES}::TestState", f"{_BATCHES}::TestBatches"),
        "direct.minimum_slot_utilization": ("test_features::TestSlotUtilization",),
        "oldest.max_candidate_sequences": (f"{_SEQUENCES}::TestState", f"{_BATCHES}::TestBatches"),
        "control_input START": (f"{_SEQUENCES}::TestState::test_a_model_receives_the_controls_of_its_sequences",),
        "control_input READY": (f"{_SEQUENCES}::TestState::test_padding_rows_are_not_counted_in_the_statistics",),
        "control_input END": (f"{_SEQUENCES}::TestState::test_a_model_receives_the_controls_of_its_sequences",),
        "control_input CORRID": (
            f"{_SEQUENCES}::TestState::test_a_model_may_receive_string_correlation_ids",
            f"{_SEQUENCES}::TestState::test_correlation_ids_may_have_other_integer_types_and_flags_may_be_booleans",
        ),
        "state": (f"{_SEQUENCES}::TestState::test_state_is_kept_from_request_to_request",),
        "max_sequence_idle_microseconds": (
            f"{_SEQUENCES}::TestRejections::test_a_request_of_a_sequence_that_was_idle_for_too_long_is_rejected",
            f"{_BATCHES}::TestShutdown",
        ),
        "iterative_sequence": (_REFUSED, "server/python_models/test_live_iterative::TestAnswers"),
    },
    "decoupled": {
        "model_transaction_policy.decoupled": (
            f"{_STREAM}::test_the_model_configuration_reports_the_decoupled_policy",
        ),
        "ModelStreamInfer": (
            f"{_STREAM}::TestStream",
            f"{_STREAM}::TestErrors::test_unary_calls_to_a_decoupled_model_are_rejected",
        ),
        "triton_final_response": (
            f"{_STREAM}::TestStream::test_each_value_is_an_answer_and_an_empty_final_answer_is_sent_if_requested",
        ),
        "triton_enable_empty_final_response": (
            f"{_STREAM}::TestStream::test_each_value_is_an_answer_and_an_empty_final_answer_is_sent_if_requested",
        ),
    },
    "ensemble": {
        "platform ensemble": ("test_ensembles::TestAnswers", "test_ensembles::TestLoading"),
        "step[]{model_name, input_map, output_map}": ("test_ensembles::TestAnswers::test_two_branches_are_joined",),
        "step[].model_version": ("test_ensembles::TestAnswers::test_a_step_can_pin_a_model_version",),
        "step[].model_namespace": (_REFUSED,),
        "max_inflight_requests": ("test_features::test_an_ensemble_may_limit_the_requests_in_flight_at_a_step",),
    },
    "BLS": {
        "python backend": (_CALLS, "server/python_models/test_live"),
        "pb_utils.InferenceRequest.exec": (_CALLS, "test_python_models::test_a_model_can_call_another_model"),
        "async_exec": ("test_python_models::test_a_coroutine_can_call_three_models_in_parallel",),
    },
    "instance groups": {
        "count": (f"{_INSTANCES}::TestInstanceGroups",),
        "kind": (
            f"{_INSTANCES}::TestInstanceKinds",
            f"{_INSTANCES}::TestInstanceGroups::test_completed_groups_are_reported_in_the_model_configuration",
            "server/repository/test_placing",
        ),
        "gpus": (
            "test_gpu_instances",
            "server/repository/test_model_config::test_kind_auto_uses_the_gpus_of_the_machine",
        ),
        "rate_limiter.resources": (
            f"{_INSTANCES}::TestSeveralInstanceGroups",
            f"{_TOGETHER}::TestPriorityLevels::test_the_rate_limiter_runs_the_highest_priority_request_first",
        ),
        "rate_limiter.priority": (f"{_INSTANCES}::TestCrossModelPriority",),
        "profile": (_REFUSED,),
        "passive": (f"{_INSTANCES}::TestPassiveInstances",),
        "host_policy": ("test_features::test_a_host_policy_pins_its_instances_to_its_cpus",),
        "secondary_devices": (_REFUSED,),
    },
    "rate limiter": {
        "--rate-limit": (
            f"{_INSTANCES}::TestCrossModelPriority",
            f"{_INSTANCES}::TestInsufficientResources::test_excessive_resources_are_accepted_while_the_rate_limiter_is_off",
        ),
        "--rate-limit-resource": (f"{_INSTANCES}::TestInsufficientResources",),
    },
    "request cancellation": {
        "client cancel of gRPC": (
            f"{_LIFE}::TestCancellation::test_requests_canceled_over_grpc_never_run",
            "test_tritonclient_grpc::TestDeadlinesAndCancellation",
            "test_tritonclient_grpc_aio::TestDeadlinesAndCancellation",
        ),
        "HTTP connection close": (
            f"{_LIFE}::TestCancellation::test_requests_of_closed_http_connections_never_run",
            "server/test_disconnect::test_the_queued_request_of_a_disconnected_client_is_removed_and_never_runs",
        ),
        "between ensemble steps": ("test_ensembles::TestCancellation",),
        "not once it runs": (
            f"{_LIFE}::TestCancellation::test_a_running_request_finishes_after_its_cancellation_without_delaying_the_next",
        ),
    },
    "response cache": {
        "--cache-config": ("test_cache::TestCacheConfig", "test_cache::TestHits"),
        "response_cache{enable}": (
            "test_cache::TestModels::test_a_model_without_response_cache_is_not_cached",
            "test_cache::TestModels::test_response_cache_has_no_effect_without_a_server_cache",
        ),
        "key": (
            "test_cache::TestHits::test_an_input_that_differs_in_one_element_is_a_miss",
            "test_cache::TestModels",
            f"{_TOGETHER}::TestOptionalInputs::test_nested_ensembles_cache_requests_with_and_without_an_optional_input_separately",
        ),
    },
    "warmup": {
        "model_warmup[]": ("test_warmup_samples::test_zero_random_and_file_samples_run_before_the_model_is_ready",),
        "zero_data, random_data, input_data_file": (
            "test_warmup_samples::test_zero_random_and_file_samples_run_before_the_model_is_ready",
            "test_warmup_samples::test_string_samples_are_empty_random_or_read_from_a_file",
        ),
        "failure fails the load": (
            "test_warmup_samples::test_a_sample_that_does_not_fit_makes_the_model_unavailable",
            "test_warmup_samples::test_a_sample_that_fails_in_the_model_is_in_the_error",
        ),
    },
    "model priority": {
        "optimization.priority": (
            "test_features::test_models_of_any_priority_are_served_and_report_their_priority",
            "batching/test_device",
        )
    },
}
"""The table "Scheduling and batching"."""

LIFECYCLE: dict[str, Row] = {
    "repository layout": {
        "<repo>/<model>/<int version>/model.onnx": (
            f"{_LIFE}::TestRepositoryLayout::test_the_model_file_may_be_named_and_may_be_a_folder",
        ),
        "config.pbtxt": (f"{_LIFE}::TestAutoCompletion",),
        "labels file": ("test_tritonclient_grpc::TestInfer::test_classification_returns_the_top_classes",),
        "warmup/": ("test_warmup_samples::test_zero_random_and_file_samples_run_before_the_model_is_ready",),
        "configs/<name>.pbtxt, --model-config-name": (
            f"{_CONTROL}::TestModes::test_the_named_configuration_replaces_the_default_where_it_exists",
        ),
        "leading zero, non-integer": (
            f"{_LIFE}::TestRepositoryLayout::test_only_positive_integers_without_leading_zeros_are_versions",
            "server/repository/test_scan::TestVersions::test_folders_that_are_not_version_numbers_are_ignored_with_a_warning",
        ),
        "S3/GCS/Azure": (
            "server/test_remote_repository",
            "server/repository/test_remote",
            "server/repository/test_address::TestTritonUrls",
        ),
    },
    "version policy": {
        "latest{num_versions=1}": (f"{_LIFE}::TestVersionPolicy::test_only_the_versions_of_the_policy_are_served",),
        "all": (
            f"{_LIFE}::TestVersionPolicy::test_only_the_versions_of_the_policy_are_served",
            f"{_LIFE}::test_versions_are_loaded_and_unloaded_as_their_folders_appear_and_disappear",
        ),
        "specific{versions[]}": (
            f"{_LIFE}::TestVersionPolicy::test_a_missing_specific_version_does_not_affect_the_others",
        ),
    },
    "control modes": {
        "none": (f"{_CONTROL}::TestModes::test_models_can_be_loaded_by_name_only_in_explicit_mode",),
        "poll, --repository-poll-secs": (
            f"{_CONTROL}::TestModes::test_polling_detects_added_changed_and_removed_models",
            f"{_CONTROL}::TestModes::test_the_repository_is_polled_periodically_in_poll_mode",
            f"{_LIFE}::test_versions_are_loaded_and_unloaded_as_their_folders_appear_and_disappear",
        ),
        "explicit": (
            f"{_CONTROL}::TestTritonclient",
            f"{_CONTROL}::TestTritonclientGrpc",
            f"{_CONTROL}::TestSwapsUnderLoad",
        ),
        "--load-model": (
            f"{_CONTROL}::TestModes::test_load_model_with_an_asterisk_loads_all_models_at_start",
            "server/repository/test_control::TestStartup",
        ),
        "load returns UNAVAILABLE (503)": (
            f"{_CONTROL}::TestModes::test_models_can_be_loaded_by_name_only_in_explicit_mode",
            f"{_LOADING}::TestLoadThreads::test_load_and_unload_are_rejected_unless_the_control_mode_is_explicit",
        ),
    },
    "load-time override": {
        "config": (
            f"{_CONTROL}::TestTritonclient::test_a_configuration_in_a_load_request_applies_only_to_that_load",
            f"{_LOADING}::TestReconfiguration",
        ),
        "file:<rel path>": (
            f"{_CONTROL}::TestTritonclient::test_files_in_a_load_request_create_a_model",
            f"{_CONTROL}::TestTritonclientGrpc",
        ),
    },
    "parallel load": {
        "--model-load-thread-count": (
            f"{_LOADING}::TestLoadThreads::test_as_many_models_load_in_parallel_as_there_are_load_threads",
            "server/repository/test_repository::TestStates::test_at_most_max_concurrent_loads_models_load_in_parallel",
            "server/repository/test_control::TestParallelLoads",
        ),
        "--model-load-retry-count": (
            f"{_LOADING}::TestLoadThreads::test_a_failed_load_is_retried_the_configured_number_of_times",
            "server/repository/test_control::TestLoading::test_a_version_that_fails_to_load_is_retried",
        ),
        "--model-load-gpu-limit": (
            "test_gpu_instances::TestModelLoadGpuLimit",
            "server/repository/test_gpus::TestSettings",
            "server/repository/test_placing::TestOptions",
        ),
    },
    "auto-complete": {
        "on by default": (f"{_LIFE}::TestAutoCompletion::test_an_empty_configuration_is_completed",),
        "--disable-auto-complete-config": (
            f"{_LIFE}::TestAutoCompletion::test_a_model_must_configure_its_inputs_and_outputs_if_completion_is_disabled",
        ),
        "both inputs and outputs named, first dim -1, max_batch_size, dynamic_batching{}": (
            f"{_LIFE}::TestAutoCompletion::test_the_batch_size_is_completed_from_the_batch_axes_of_the_model",
        ),
        "--backend-config=onnxruntime,default-max-batch-size": (
            f"{_LIFE}::TestAutoCompletion::test_the_default_batch_size_can_be_set_with_backend_config",
            "server/test_backend_config",
        ),
        "scalar": (f"{_LIFE}::TestAutoCompletion::test_a_scalar_is_exposed_as_one_element",),
    },
    "namespacing": {"--model-namespacing": (_FLAGS,)},
    "repo agents": {"model_repository_agents": (_REFUSED,)},
    "metric tags": {"metric_tags{k:v}": (f"{_LIFE}::test_metric_tags_are_labels_of_the_models_metrics",)},
    "TensorFlow": {
        "platform tensorflow_savedmodel": (
            "test_tensorflow::TestTensors",
            "test_tensorflow::TestInference",
            "test_tensorflow::TestLoading",
        ),
        "platform tensorflow_graphdef": (_REFUSED,),
    },
}
"""The table "Models, config, lifecycle"."""
