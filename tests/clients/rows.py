"""Triton's features about scheduling, models and lifecycle, row by row, and the tests that show each.

A row is a line of the tables "Scheduling and batching" and "Models, config, lifecycle" that the project compares itself
with; under it, by their exact names, stand the things that the line names. A test is `module::test` or
`module::Class`, modules counted from tests/clients unless they begin with a folder's name.
"""

from __future__ import annotations

Row = dict[str, tuple[str, ...]]

_LIFE = "test_lifecycle"
_REFUSED = f"{_LIFE}::test_what_cannot_be_served_is_refused_by_name"
_FLAGS = "server/test_triton_flags::test_a_flag_of_triton_s_is_refused_with_its_reason"
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
            f"{_LIFE}::TestCompletion::test_a_batch_size_is_the_most_rows_of_a_request",
            f"{_LIFE}::TestCompletion::test_the_axis_of_rows_is_in_the_metadata_whoever_said_it",
            "test_tritonclient_http::TestShapes::test_more_rows_than_the_model_takes_are_refused",
        ),
        "max_batch_size: 0": (f"{_LIFE}::TestCompletion::test_a_model_with_both_named_takes_any_number_of_rows",),
    },
    "dynamic batcher": {
        "preferred_batch_size": (f"{_DYNAMIC}::TestPreferredSizes",),
        "max_queue_delay_microseconds": (
            f"{_DYNAMIC}::TestPreferredSizes::test_one_request_of_another_size_waits_for_the_delay",
        ),
        "preserve_ordering": (f"{_DYNAMIC}::TestPreservedOrder", f"{_TOGETHER}::TestOrder"),
        "priority_levels": (f"{_DYNAMIC}::TestPriorities", f"{_TOGETHER}::TestLevels", _REFUSED),
        "default_priority_level": (f"{_DYNAMIC}::TestPriorities",),
        "default_queue_policy": (f"{_DYNAMIC}::TestTimeouts",),
        "priority_queue_policy": (f"{_DYNAMIC}::TestTimeouts::test_each_level_has_its_own_policy",),
    },
    "queue policy": {
        "timeout_action REJECT": (
            f"{_DYNAMIC}::TestTimeouts::test_rejected_when_its_time_is_over_while_the_instance_is_busy",
        ),
        "timeout_action DELAY": (
            f"{_DYNAMIC}::TestTimeouts::test_delayed_goes_behind_all_whose_time_is_not_over_and_never_fails",
        ),
        "default_timeout_microseconds": (
            f"{_DYNAMIC}::TestTimeouts::test_rejected_when_its_time_is_over_while_the_instance_is_busy",
        ),
        "allow_timeout_override": (
            f"{_DYNAMIC}::TestTimeouts::test_without_leave_a_request_cannot_shorten_its_timeout",
        ),
        "max_queue_size": (
            f"{_DYNAMIC}::TestQueueSize",
            "test_qa::test_a_full_queue_is_answered_with_unavailable_and_what_waits_is_served",
        ),
    },
    "custom batching": {"TRITON_BATCH_STRATEGY_PATH": (_REFUSED,)},
    "ragged batching": {
        "input.allow_ragged_batch": (
            f"{_FORMS}::TestRagged::test_all_requests_share_one_run_and_the_model_is_told_of_each",
        ),
        "BATCH_ELEMENT_COUNT": (
            f"{_FORMS}::TestRagged",
            f"{_TOGETHER}::TestRagged::test_strings_of_other_lengths_share_a_run_and_are_remembered_apart",
        ),
        "BATCH_ACCUMULATED_ELEMENT_COUNT": (f"{_FORMS}::TestRagged",),
        "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": (f"{_FORMS}::TestRagged",),
        "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": (
            f"{_FORMS}::TestRagged::test_a_ragged_input_is_flat_and_a_count_may_be_a_shape",
        ),
        "BATCH_ITEM_SHAPE": (
            f"{_FORMS}::TestRagged::test_item_shapes_are_told_row_by_row",
            f"{_TOGETHER}::TestRagged::test_those_of_higher_levels_come_first_in_the_run_whatever_their_rows",
        ),
        "BATCH_ITEM_SHAPE_FLATTEN": (f"{_FORMS}::TestRagged::test_flat_item_shapes_are_those_of_all_items",),
        "BATCH_SCATTER_WITH_INPUT_SHAPE": (
            f"{_FORMS}::TestRagged::test_a_flat_output_is_cut_by_the_shapes_that_were_sent",
        ),
    },
    "shape tensor": {"input.is_shape_tensor": (f"{_FORMS}::TestShapeTensors",)},
    "optional inputs": {"input.optional": (f"{_FORMS}::TestOptional", f"{_TOGETHER}::TestOptional")},
    "reshape": {
        "input.reshape.shape": (f"{_FORMS}::TestReshape",),
        "output.reshape.shape": (f"{_FORMS}::TestReshape",),
    },
    "sequence batcher": {
        "direct": (f"{_SEQUENCES}::TestAnswers", f"{_BATCHES}::TestBatches"),
        "direct.minimum_slot_utilization": ("test_features::TestSlots",),
        "oldest.max_candidate_sequences": (f"{_SEQUENCES}::TestAnswers", f"{_BATCHES}::TestBatches"),
        "control_input START": (f"{_SEQUENCES}::TestAnswers::test_a_model_is_told_of_its_sequences",),
        "control_input READY": (f"{_SEQUENCES}::TestAnswers::test_empty_rows_count_for_nothing",),
        "control_input END": (f"{_SEQUENCES}::TestAnswers::test_a_model_is_told_of_its_sequences",),
        "control_input CORRID": (
            f"{_SEQUENCES}::TestAnswers::test_a_model_may_take_ids_that_are_strings",
            f"{_SEQUENCES}::TestAnswers::test_ids_may_be_numbers_of_another_type_and_flags_truths",
        ),
        "state": (f"{_SEQUENCES}::TestAnswers::test_a_state_goes_on_from_request_to_request",),
        "max_sequence_idle_microseconds": (
            f"{_SEQUENCES}::TestRefusals::test_a_sequence_that_was_idle_for_too_long",
            f"{_BATCHES}::TestEnding",
        ),
        "iterative_sequence": (_REFUSED, "server/python_models/test_live_iterative::TestAnswers"),
    },
    "decoupled": {
        "model_transaction_policy.decoupled": (f"{_STREAM}::test_the_configuration_says_so",),
        "ModelStreamInfer": (f"{_STREAM}::TestStream", f"{_STREAM}::TestErrors::test_one_answer_calls_are_refused"),
        "triton_final_response": (f"{_STREAM}::TestStream::test_each_value_is_an_answer_and_the_end_is_told_if_asked",),
        "triton_enable_empty_final_response": (
            f"{_STREAM}::TestStream::test_each_value_is_an_answer_and_the_end_is_told_if_asked",
        ),
    },
    "ensemble": {
        "platform ensemble": ("test_ensembles::TestAnswers", "test_ensembles::TestComingAndGoing"),
        "step[]{model_name, input_map, output_map}": ("test_ensembles::TestAnswers::test_branches_and_a_join",),
        "step[].model_version": ("test_ensembles::TestAnswers::test_a_pinned_version",),
        "step[].model_namespace": (_REFUSED,),
        "max_inflight_requests": ("test_features::test_an_ensemble_may_bound_what_is_under_way_at_a_step",),
    },
    "BLS": {
        "python backend": (_CALLS, "server/python_models/test_live"),
        "pb_utils.InferenceRequest.exec": (_CALLS, "test_python_models::test_a_model_asks_another"),
        "async_exec": ("test_python_models::test_a_coroutine_asks_three_at_once",),
    },
    "instance groups": {
        "count": (f"{_INSTANCES}::TestCounts",),
        "kind": (
            f"{_INSTANCES}::TestKinds",
            f"{_INSTANCES}::TestCounts::test_groups_are_reported_as_they_were_completed",
            "server/repository/test_placing",
        ),
        "gpus": (
            "test_gpu_instances",
            "server/repository/test_model_config::test_kind_auto_takes_the_gpus_that_are_there",
        ),
        "rate_limiter.resources": (
            f"{_INSTANCES}::TestOneModelOfSeveralGroups",
            f"{_TOGETHER}::TestLevels::test_who_runs_when_the_rate_limiter_lets_them_is_the_highest",
        ),
        "rate_limiter.priority": (f"{_INSTANCES}::TestCrossModelPriority",),
        "profile": (_REFUSED,),
        "passive": (f"{_INSTANCES}::TestPassive",),
        "host_policy": ("test_features::test_a_host_policy_keeps_its_instances_on_its_cpus",),
        "secondary_devices": (_REFUSED,),
    },
    "rate limiter": {
        "--rate-limit": (
            f"{_INSTANCES}::TestCrossModelPriority",
            f"{_INSTANCES}::TestWhatCannotBeScheduled::test_with_the_limiter_off_all_of_it_is_accepted_and_idle",
        ),
        "--rate-limit-resource": (f"{_INSTANCES}::TestWhatCannotBeScheduled",),
    },
    "request cancellation": {
        "client cancel of gRPC": (
            f"{_LIFE}::TestGivenUp::test_over_grpc",
            "test_tritonclient_grpc::TestGivingUp",
            "test_tritonclient_grpc_aio::TestGivingUp",
        ),
        "HTTP connection close": (
            f"{_LIFE}::TestGivenUp::test_over_http",
            "server/test_disconnect::test_what_a_gone_client_asked_for_leaves_the_queue_and_never_runs",
        ),
        "between ensemble steps": ("test_ensembles::TestCancellation",),
        "not once it runs": (f"{_LIFE}::TestGivenUp::test_what_runs_is_finished_and_holds_up_nobody",),
    },
    "response cache": {
        "--cache-config": ("test_cache::TestSetting", "test_cache::TestHits"),
        "response_cache{enable}": (
            "test_cache::TestModels::test_a_model_that_does_not_ask_for_it_is_not_cached",
            "test_cache::TestModels::test_without_a_cache_the_configuration_changes_nothing",
        ),
        "key": (
            "test_cache::TestHits::test_one_bit_runs_again",
            "test_cache::TestModels",
            f"{_TOGETHER}::TestOptional::test_ensembles_of_ensembles_remember_what_was_sent_and_what_was_not",
        ),
    },
    "warmup": {
        "model_warmup[]": ("test_warmup_samples::test_zeros_random_values_and_a_file_run_before_it_is_ready",),
        "zero_data, random_data, input_data_file": (
            "test_warmup_samples::test_zeros_random_values_and_a_file_run_before_it_is_ready",
            "test_warmup_samples::test_strings_are_empty_random_or_read",
        ),
        "failure fails the load": (
            "test_warmup_samples::test_a_sample_that_does_not_fit_keeps_the_model_from_being_served",
            "test_warmup_samples::test_a_sample_that_fails_in_the_model_is_named",
        ),
    },
    "model priority": {
        "optimization.priority": (
            "test_features::test_models_of_any_priority_are_served_and_say_it",
            "batching/test_device",
        )
    },
}
"""The table "Scheduling and batching"."""

LIFECYCLE: dict[str, Row] = {
    "repository layout": {
        "<repo>/<model>/<int version>/model.onnx": (
            f"{_LIFE}::TestLayout::test_the_file_may_be_named_and_may_be_a_folder",
        ),
        "config.pbtxt": (f"{_LIFE}::TestCompletion",),
        "labels file": ("test_tritonclient_grpc::TestInfer::test_classification",),
        "warmup/": ("test_warmup_samples::test_zeros_random_values_and_a_file_run_before_it_is_ready",),
        "configs/<name>.pbtxt, --model-config-name": (
            f"{_CONTROL}::TestModes::test_a_configuration_by_name_stands_in",
        ),
        "leading zero, non-integer": (
            f"{_LIFE}::TestLayout::test_only_whole_numbers_above_0_without_zeros_before_them_are_versions",
            "server/repository/test_scan::TestVersions::test_other_folders_are_ignored_with_a_warning",
        ),
        "S3/GCS/Azure": (
            "server/test_remote_repository",
            "server/repository/test_remote",
            "server/repository/test_address::TestTriton",
        ),
    },
    "version policy": {
        "latest{num_versions=1}": (f"{_LIFE}::TestVersionPolicy::test_the_chosen_versions_are_served_and_no_other",),
        "all": (
            f"{_LIFE}::TestVersionPolicy::test_the_chosen_versions_are_served_and_no_other",
            f"{_LIFE}::test_versions_come_and_go_with_their_folders",
        ),
        "specific{versions[]}": (
            f"{_LIFE}::TestVersionPolicy::test_a_version_that_is_named_and_is_not_there_leaves_the_others",
        ),
    },
    "control modes": {
        "none": (f"{_CONTROL}::TestModes::test_only_explicit_lets_models_be_loaded_by_name",),
        "poll, --repository-poll-secs": (
            f"{_CONTROL}::TestModes::test_polling_finds_what_was_added_changed_and_removed",
            f"{_CONTROL}::TestModes::test_polling_happens_by_itself",
            f"{_LIFE}::test_versions_come_and_go_with_their_folders",
        ),
        "explicit": (
            f"{_CONTROL}::TestTritonclient",
            f"{_CONTROL}::TestTritonclientGrpc",
            f"{_CONTROL}::TestUnderLoad",
        ),
        "--load-model": (
            f"{_CONTROL}::TestModes::test_all_models_can_be_loaded_at_start",
            "server/repository/test_control::TestStarting",
        ),
        "load returns UNAVAILABLE (503)": (
            f"{_CONTROL}::TestModes::test_only_explicit_lets_models_be_loaded_by_name",
            f"{_LOADING}::TestSeveral::test_only_mode_explicit_takes_them",
        ),
    },
    "load-time override": {
        "config": (
            f"{_CONTROL}::TestTritonclient::test_a_configuration_is_taken_for_this_load_alone",
            f"{_LOADING}::TestAnotherConfiguration",
        ),
        "file:<rel path>": (
            f"{_CONTROL}::TestTritonclient::test_files_are_a_model_of_their_own",
            f"{_CONTROL}::TestTritonclientGrpc",
        ),
    },
    "parallel load": {
        "--model-load-thread-count": (
            f"{_LOADING}::TestSeveral::test_as_many_models_load_at_once_as_there_are_threads",
            "server/repository/test_repository::TestStates::test_few_models_load_at_the_same_time",
            "server/repository/test_control::TestAtOnce",
        ),
        "--model-load-retry-count": (
            f"{_LOADING}::TestSeveral::test_a_load_that_fails_is_tried_so_often_again",
            "server/repository/test_control::TestLoading::test_a_version_that_does_not_load_is_tried_again",
        ),
        "--model-load-gpu-limit": (
            "test_gpu_instances::TestTheLimitOfLoads",
            "server/repository/test_gpus::TestSettings",
            "server/repository/test_placing::TestOptions",
        ),
    },
    "auto-complete": {
        "on by default": (f"{_LIFE}::TestCompletion::test_a_silent_configuration_is_completed_whole",),
        "--disable-auto-complete-config": (
            f"{_LIFE}::TestCompletion::test_without_completion_a_model_must_declare_what_it_takes_and_gives",
        ),
        "both inputs and outputs named, first dim -1, max_batch_size, dynamic_batching{}": (
            f"{_LIFE}::TestCompletion::test_the_batch_size_follows_the_rules",
        ),
        "--backend-config=onnxruntime,default-max-batch-size": (
            f"{_LIFE}::TestCompletion::test_the_size_may_be_said_in_triton_s_way",
            "server/test_backend_config",
        ),
        "scalar": (f"{_LIFE}::TestCompletion::test_a_scalar_is_one_element",),
    },
    "namespacing": {"--model-namespacing": (_FLAGS,)},
    "repo agents": {"model_repository_agents": (_REFUSED,)},
    "metric tags": {"metric_tags{k:v}": (f"{_LIFE}::test_tags_are_labels_of_the_model_s_metrics",)},
    "TensorFlow": {
        "platform tensorflow_savedmodel": (
            "test_tensorflow::TestTensors",
            "test_tensorflow::TestRunning",
            "test_tensorflow::TestLoading",
        ),
        "platform tensorflow_graphdef": (_REFUSED,),
    },
}
"""The table "Models, config, lifecycle"."""
