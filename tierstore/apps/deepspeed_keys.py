"""Keys of a DeepSpeed configuration that need no counterpart in tierstore, and why.

Scope: a table from keys, by dotted path, to reasons. Not here: keys that are translated (`apps/deepspeed.py`).

Source of the keys: DeepSpeed's configuration reference (deepspeed.ai/docs/config-json), versions up to 0.18.
"""

from __future__ import annotations

from collections.abc import Mapping

_BUFFERS = "tierstore sizes its buffers itself"
_BUDGETS = "what stays where follows from gpu_memory and cpu_memory"
_OVERLAP = "reads, writes, copies and the update always overlap"
_PRECISE = "the optimizer always keeps fp32 accuracy"
_DTYPE = "give the model in bf16 or fp16"


def _each(section: str, names: str, reason: str) -> dict[str, str]:
    return {f"{section}{name}": reason for name in names.split()}


def _offload(section: str) -> dict[str, str]:
    return (
        _each(section, "pin_memory", "CPU memory is always pinned, as large as cpu_memory")
        | _each(section, "buffer_count buffer_size", _BUFFERS)
        | _each(section, "max_in_cpu ratio", _BUDGETS)
        | _each(section, "pipeline pipeline_read pipeline_write", _OVERLAP)
        | _each(section, "fast_init", "a new store is filled group by group, as fast as the disk")
    )


_ZERO = (
    _offload("zero_optimization.offload_param.")
    | _offload("zero_optimization.offload_optimizer.")
    | _each(
        "zero_optimization.",
        "allgather_partitions allgather_bucket_size overlap_comm reduce_scatter reduce_bucket_size sub_group_size "
        "contiguous_gradients round_robin_gradients use_multi_rank_bucket_allreduce "
        "stage3_module_granularity_threshold module_granularity_threshold "
        "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential log_trace_cache_warnings leaf_module",
        "buckets of gradients and gathers of weights are sized and ordered by tierstore",
    )
    | _each(
        "zero_optimization.",
        "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients",
        "no counterpart: nothing is quantized, so that results stay exact",
    )
    | _each(
        "zero_optimization.",
        "zero_hpz_partition_size mics_shard_size mics_hierarchical_params_gather",
        "no counterpart: in a loop of your own device_mesh= repeats the whole state on each machine",
    )
    | _each(
        "zero_optimization.",
        "stage3_prefetch_bucket_size prefetch_bucket_size stage3_param_persistence_threshold "
        "param_persistence_threshold stage3_model_persistence_threshold model_persistence_threshold "
        "stage3_max_live_parameters max_live_parameters stage3_max_reuse_distance max_reuse_distance",
        "how far ahead weights come follows from measured rates, and what stays from gpu_memory",
    )
    | _each(
        "zero_optimization.",
        "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
        "gather_16bit_weights_on_model_save elastic_checkpoint load_from_fp32_weights",
        "engine.export() and state_dict() always give whole weights",
    )
    | _each("zero_optimization.", "memory_efficient_linear override_module_apply", "no module is replaced")
    | _each("zero_optimization.", "ignore_unused_parameters", "parameters that a step does not use are left alone")
    | _each("zero_optimization.", "cpu_offload cpu_offload_params cpu_offload_use_pin_memory", _BUDGETS)
    | _each("zero_optimization.", "legacy_stage1", "there is one way of stage 1")
    | _each("zero_optimization.", "grad_hooks", "gradients are always taken as they come")
)
_SECTIONS = (
    _each(
        "aio.",
        "block_size queue_depth thread_count intra_op_parallelism single_submit overlap_events use_gds",
        "depth follows from measured rates, chunks from the budgets; threads are io_threads",
    )
    | _each(
        "fp16.",
        "loss_scale_window initial_scale_power hysteresis consecutive_hysteresis min_loss_scale",
        "the scale starts at 65536, doubles after 2000 good steps and is halved by a bad one",
    )
    | _each("fp16.", "fp16_master_weights_and_grads", _PRECISE)
    | _each("fp16.", "auto_cast", "inputs are given in the model's dtype")
    | _each("bf16.", "bf16_master_weights_and_grads bf16_optimizer_states", _PRECISE)
    | _each("bf16.", "immediate_grad_update", "gradients are always taken as they come")
    | _each("bf16.", "check_grad_overflow", "a step with gradients that are not finite is reported")
    | _each("scheduler.params.", "warmup_min_lr warmup_min_ratio warmup_type", "train warms up linearly, from 0")
    | _each("scheduler.params.", "total_num_steps cos_min_ratio", "train keeps the rate after its warm-up")
    | _each("scheduler.params.", "last_batch_iteration", "the store knows at which step it is")
    | _each(
        "activation_checkpointing.",
        "partition_activations cpu_checkpointing contiguous_memory_optimization number_checkpoints "
        "synchronize_checkpoint_boundary profile",
        "it is the model that recomputes: train --checkpointing, or gradient_checkpointing_enable()",
    )
)
NEEDLESS: Mapping[str, str] = (
    _ZERO
    | _SECTIONS
    | _each(
        "",
        "steps_per_print wall_clock_breakdown dump_state memory_breakdown tensorboard wandb comet csv_monitor "
        "flops_profiler comms_logger timers",
        "what a step did is in its report, --json and --trace",
    )
    | _each(
        "",
        "prescale_gradients gradient_predivide_factor communication_data_type sparse_gradients data_types "
        "seq_parallel_communication_data_type gradient_accumulation_dtype fp32_allreduce disable_allgather",
        "gradients are the mean over ranks, in the weights' dtype",
    )
    | _each(
        "",
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
        "the optimizer is tierstore's own Adam",
    )
    | _each("optimizer.", "legacy_fusion params.torch_adam", "the optimizer is tierstore's own Adam")
    | _each("", "checkpoint nebula load_universal_checkpoint elasticity", "the store is the checkpoint, of any ranks")
    | _each("", "use_node_local_storage", "every node has directories of its own")
    | _each("", "amp torch_autocast", _DTYPE)
    | _each("", "compile", "torch.compile one block at a time; of a whole model it is refused")
    | _each("", "autotuning", "see tierstore tune")
    | _each("", "dataloader_drop_last data_efficiency curriculum_learning", "batches are those of your loop")
    | _each(
        "",
        "hybrid_engine sparse_attention compression_training quantize_training tensor_parallel "
        "sequence_parallel_size progressive_layer_drop eigenvalue",
        "tierstore does not do this",
    )
    | _each("", "seed", "train --seed")
)
