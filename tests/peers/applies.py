"""PyTorch's tests of DDP: which apply to Oarlock's engine, and why the others do not.

Each test that applies stands with the broken adapter (see broken.py) that makes it fail.
"""

from __future__ import annotations

import broken
from adapter import Adapter

APPLIES: dict[str, type[Adapter]] = {
    # gradients are the mean over ranks
    "test_DistributedDataParallelCPU": broken.NoEngine,
    "test_DistributedDataParallelCPU_grad_is_view": broken.Sum,
    "test_ddp_forward_backward_hook": broken.Sum,
    "test_static_graph_multi_forward": broken.Sum,
    # micro-batches before the exchange
    "test_accumulate_gradients_no_sync": broken.LastOnly,
    "test_accumulate_gradients_no_sync_grad_is_view": broken.LastOnly,
    "test_grads_same_across_ranks_with_no_sync": broken.NoEngine,
    # parameters and outputs that are not used
    "test_output_unused_in_loss_dict_module": broken.Zeros,
    "test_output_unused_in_loss_tuple_module": broken.Zeros,
    "test_undefined_grad_parity_unused_parameters": broken.Zeros,
    "test_stateless_api_with_ddp": broken.Zeros,
    "test_ddp_shared_grad_acc_unused_params": broken.NeedsAll,
    "test_ddp_new_tensor_in_fwd": broken.AllOutputs,
    "test_ddp_new_tensor_in_fwd_static_graph": broken.AllOutputs,
    "test_ddp_returns_tensor_with_no_grad": broken.AllOutputs,
    "test_ddp_namedtuple": broken.PlainInputs,
    # ranks that have no more data
    "test_ddp_grad_div_uneven_inputs": broken.Sum,
    "test_ddp_join_model_equivalence": broken.Sum,
    "test_ddp_inference": broken.MeetsInForward,
    # what is built and what is refused
    "test_DistributedDataParallel_requires_grad": broken.NoEngine,
    "test_ddp_model_diff_num_params_across_ranks": broken.NoEngine,
    "test_ddp_init_sync_buffers_with_forward_sync_buffers_false": broken.NoEngine,
    "test_ddp_zero_output_features": broken.NeedsElements,
    # errors in the model
    "test_ddp_remove_autograd_hooks": broken.Swallows,
    "test_ddp_uneven_input_exception": broken.Swallows,
    # BatchNorm over all ranks
    "test_DistributedDataParallel_SyncBatchNorm": broken.LocalNorm,
    "test_DistributedDataParallel_SyncBatchNorm_2D_Input": broken.LocalNorm,
    "test_DistributedDataParallel_SyncBatchNorm_Channels_Last": broken.Contiguous,
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value": broken.LocalNorm,
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient": broken.LocalNorm,
    "test_DistributedDataParallel_SyncBatchNorm_No_Affine": broken.LocalNorm,
    "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process": broken.Sum,
}

# A reason, and the tests that do not apply for it.
DOES_NOT: dict[str, tuple[str, ...]] = {
    "PyTorch itself skips it on Linux, or everywhere.": (
        "test_DistributedDataParallel",
        "test_DistributedDataParallel_non_default_stream",
        "test_ddp_has_finalized",
        "test_ddp_hook_pickling_powerSGD",
        "test_ddp_model_diff_shape_across_ranks",
        "test_ddp_profiling_autograd_profiler",
        "test_ddp_profiling_execution_trace",
        "test_ddp_sync_bn_training_vs_eval",
    ),
    "It registers a communication hook; how gradients travel is the engine's own affair.": (
        "test_accumulate_gradients_no_sync_allreduce_hook",
        "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
        "test_ddp_broadcast_buffer_via_hook",
        "test_ddp_buffer_hook_allreduce",
        "test_ddp_buffer_hook_allreduce_return_future",
        "test_ddp_comm_hook_logging",
        "test_ddp_hook_parity_allreduce",
        "test_ddp_hook_parity_allreduce_process_group",
        "test_ddp_hook_parity_post_localSGD",
        "test_ddp_hook_parity_powerSGD",
        "test_ddp_python_error_logged",
    ),
    "It expects DDP's error about unused parameters or a changed graph; both just work here.": (
        "test_ddp_control_flow_different_across_ranks",
        "test_ddp_control_flow_same_across_ranks",
        "test_ddp_multiple_nested_unused_params_err_ignore_params",
        "test_ddp_multiple_nested_unused_params_error",
        "test_ddp_unused_params_rebuild_buckets_exception",
        "test_invalid_static_graph",
        "test_static_graph_api_cpu",
    ),
    "It looks into DDP's reducer, its log or its trace.": (
        "test_compute_bucket_assignment_by_size_sparse_error_with_logger",
        "test_compute_bucket_assignment_by_size_sparse_error_without_logger",
        "test_ddp_bucket_cap_mb_list",
        "test_ddp_build_debug_param_to_name_mapping",
        "test_ddp_build_debug_param_to_name_mapping_requires_grad",
        "test_ddp_logging_data_cpu",
        "test_ddp_logging_data_gpu",
        "test_ddp_profiling_torch_profiler",
        "test_ddp_sink_noclone",
        "test_detect_ddp_is_actually_static",
        "test_different_graph_across_ranks",
        "test_dump_DDP_relevant_env_vars",
        "test_skip_all_reduce_unused_parameters",
        "test_sync_bn_logged",
    ),
    "It keeps some parameters out of the exchange; here, freezing is how to leave one out.": (
        "test_ddp_apply_optim_in_backward_ignored_params",
        "test_ddp_ignore_params_arg",
        "test_ddp_native_mixed_precision_ignored_params",
        "test_get_data_parallel_params",
    ),
    "The optimizer runs within backward; the engine clips and checks the whole gradient first.": (
        "test_ddp_apply_optim_in_backward",
        "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false",
    ),
    "DDP's own mixed precision, or CUDA's loss scaling; the engine has `precision`.": (
        "test_DistributedDataParallel_with_amp_and_grad_is_view",
        "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none",
        "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none",
        "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none",
        "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none",
    ),
    "Options and inside of DDP's join(); here a rank without data takes part with an empty list.": (
        "test_ddp_join_respects_forward_sync_buffers_false",
        "test_ddp_uneven_input_join_disable",
        "test_ddp_uneven_inputs",
        "test_ddp_uneven_inputs_stop_iteration_sync_bn",
    ),
    "DDP overwrites buffers with rank 0's at each forward; Oarlock merges what forwards did.": (
        "test_ddp_broadcast_buffer",
        "test_ddp_broadcast_buffers_deprecation_warning",
    ),
    "It wraps or compiles DDP, or steers its backward; the engine wraps nothing.": (
        "test_ddp_compile_static_graph",
        "test_ddp_create_graph",
        "test_ddp_static_graph_nested_types",
    ),
    "It asks where on a GPU something is, in a way that the CPU cannot stand in for.": (
        "test_DistributedDataParallel_SyncBatchNorm_half",
        "test_ddp_device",
        "test_ddp_device_mesh_initialization",
    ),
    "It tests something else: a collective, a helper function, averaging of weights.": (
        "test_SyncBatchNorm_process_group",
        "test_all_reduce_sum_async",
        "test_all_reduce_sum_cuda_async",
        "test_coalescing_manager_async",
        "test_ddp_sync_module_states",
        "test_post_localSGD_optimizer_parity",
        "test_post_localSGD_optimizer_parity_grad_is_view",
        "test_post_localSGD_optimizer_parity_with_hierarchical_sgd",
        "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view",
        "test_post_localSGD_optimizer_step_reload",
        "test_verify_model_across_rank_with_logger",
        "test_verify_model_across_rank_without_logger",
    ),
}
