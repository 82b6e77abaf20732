"""Every argument of SGLang: those that decide the KV of a page, and those that must not change a key.

A test goes through the arguments of the installed SGLang, and fails for one that the table does not have.
`docs/identity.md` is made from this table.
"""

from __future__ import annotations

from flexkv.adapters.common.identity_table import FieldTable, names
from flexkv.adapters.common.loader_settings import EXTRA_RULE, FORMAT_RULE, files_of_format, loader_settings

TOKENS = "decides tokens, which are in each page's hash"
SAMPLING = "the last hidden states alone, not KV"
ROUNDING = "another order of the same sums: rounding, as another batch gives it"
API = "what a server shows, serves and logs"
MEMORY = "memory: how much there is, and where"
SCHEDULING = "which requests a step computes, and when"
REFUSED = (
    "refused, or of what is refused: recurrent states, sliding windows, sparse attention, "
    "drafts with KV of their own"
)
PROCESSES = "processes, ports and places"
INPUTS = "pages of a prompt from its first image or other input on serve one run"
LENGTH = "how long requests may be; factors of LongRoPE go by the positions in a batch"


OTHER_WEIGHTS = ("kt_weight_path", "modelopt_checkpoint_restore_path", "uno_lora_path")
"""Arguments for weights besides the model's. A draft's LoRA counts too: such drafts have no pages of their own."""

LEFT_OUT = {
    TOKENS: """
        tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num detokenizer_worker_num
        skip_tokenizer_init chat_template trust_request_chat_template hf_chat_template_name completion_template
        reasoning_parser default_chat_template_kwargs strip_thinking_cache enable_strict_thinking
        tool_call_parser tool_server sampling_defaults preferred_sampling_params allow_auto_truncate
        tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels
        constrained_json_whitespace_pattern constrained_json_disable_any_whitespace
        constrained_json_max_whitespace_cnt grammar_backend enable_dynamic_batch_tokenizer
        dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode
        disable_tokenizer_batch_decode enable_custom_logit_processor disable_outlines_disk_cache enable_mis
    """,
    SAMPLING: "is_embedding mlx_enable_sampling sampling_mask_max_tokens",
    ROUNDING: """
        enable_fp32_lm_head enable_tf32_matmul attn_dp_size moe_dp_size dwdp_size dcp_comm_backend
        dcp_replicate_q_proj enable_dp_attention enable_dp_lm_head enable_tp_lm_head_all_to_all
        enable_attn_tp_input_scattered enable_shared_experts_attn_tp shared_experts_tp_size enable_layernorm_sp
        disable_attn_tp_gather enable_p2p_check attention_backend decode_attention_backend enable_lean_attention
        prefill_attention_backend sampling_backend bf16_gemm_backend disable_flashinfer_autotune
        flashinfer_autotune_skip_ops cuda_graph_config cuda_graph_backend_decode cuda_graph_backend_prefill
        cuda_graph_max_bs_decode cuda_graph_max_bs_prefill cuda_graph_bs_decode cuda_graph_bs_prefill
        disable_prefill_cuda_graph disable_decode_cuda_graph disable_cuda_graph disable_cuda_graph_padding
        enable_profile_cuda_graph enable_cudagraph_gc enable_symm_mem triton_attention_reduce_in_fp32
        triton_attention_num_kv_splits triton_attention_split_tile_size flashinfer_mla_disable_ragged
        enable_fused_qk_norm_rope enable_fused_moe_sum_all_reduce disable_custom_all_reduce enable_mscclpp
        enable_torch_symm_mem enable_scattered_sconv boundary_reduction enable_flashinfer_allreduce_fusion
        enforce_disable_flashinfer_allreduce_fusion flashinfer_allreduce_fusion_backend
        enable_aiter_allreduce_fusion enable_torch_compile torch_compile_max_bs ep_size moe_a2a_backend
        deepep_v2_mode deepep_mode fuseep_mode ep_num_redundant_experts ep_dispatch_algorithm
        init_expert_location enable_eplb eplb_algorithm eplb_rebalance_num_iterations
        eplb_rebalance_layers_per_chunk eplb_min_rebalancing_utilization_threshold
        expert_distribution_recorder_mode expert_distribution_recorder_buffer_size deepep_config
        moe_dense_tp_size enable_waterfill disable_flashinfer_cutlass_moe_fp4_allgather
        disable_shared_experts_fusion enforce_shared_experts_fusion enable_lora max_lora_rank lora_backend
        max_lora_chunk_size lora_use_virtual_experts lora_strict_loading kt_cpuinfer kt_threadpool_count
        kt_num_gpu_experts kt_max_deferred_experts_per_token flashinfer_a2a_dispatch_type
        cuda_graph_max_seq_len_prefill disable_aiter_allreduce_fusion_in_prefill
        disable_aiter_allreduce_fusion_in_decode enable_amd_monokernel enable_nvidia_megakernel
        enable_megamoe_for_layernorm_sp enable_dense_mlp_attn_tp
    """,
    API: """
        modelopt_export_path host port fastapi_root_path smg_grpc_mode grpc_mode grpc_port grpc_worker_threads
        sidecar sidecar_args skip_server_warmup warmups enable_http2 http2_max_concurrent_streams
        http2_initial_connection_window_size ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password
        enable_ssl_refresh api_key admin_api_key served_model_name weight_version file_storage_path
        enable_cache_report return_input_ids return_output_ids asr_max_buffer_seconds
        asr_max_concurrent_sessions stream_interval stream_response_default_include_usage
        incremental_streaming_output enable_streaming_session log_level log_level_http log_requests
        log_requests_level log_requests_format log_requests_target uvicorn_access_log_exclude_prefixes
        crash_dump_folder show_time_cost enable_metrics smg_http_sidecar_port enable_mfu_metrics
        enable_metrics_for_all_schedulers load_snapshot_publish_interval extra_metric_labels
        bucket_time_to_first_token bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets
        generation_tokens_buckets decode_log_interval enable_request_time_stats_logging kv_events_config
        load_publish_endpoint enable_forward_pass_metrics forward_pass_metrics_worker_id
        forward_pass_metrics_ipc_name enable_trace trace_modules otlp_traces_endpoint export_metrics_to_file
        export_metrics_to_file_dir stat_loggers debug_cuda_graph enable_layerwise_nvtx_marker
        enable_torch_compile_debug_mode expert_balancedness_report_mode
        prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets
        prefill_delayer_wait_seconds_buckets kv_canary kv_canary_real_data kv_canary_sweep_interval
        debug_tensor_dump_output_folder debug_tensor_dump_layers debug_tensor_dump_input_file
        enable_return_hidden_states return_hidden_states_mode enable_return_routed_experts msprobe_dump_config
        otlp_service_name enable_response_store enable_watermark watermark_config watermark_key watermark_key_b
        watermark_context_window watermark_mixing_probability watermark_max_probability
        watermark_default_enabled watermark_enforce_all grpc_response_timeout_secs enable_http_worker_reuseport
        enable_return_aux_hidden_states aux_hidden_state_capture return_aux_hidden_state_layer_ids
        modelopt_checkpoint_save_path
    """,
    MEMORY: """
        mem_fraction_static max_total_tokens retraction_policy radix_eviction_policy
        radix_eviction_policy_config prefill_only_disable_kv_cache disable_radix_cache
        enable_session_radix_cache radix_cache_backend enable_hierarchical_cache hicache_host_memory_mode
        hicache_ratio hicache_size hicache_write_policy hicache_io_backend hicache_mem_layout
        hicache_storage_backend hicache_storage_prefetch_policy hicache_storage_backend_extra_config
        hicache_storage_prefetch_retry_poll_interval hicache_storage_prefetch_retry_max_attempts
        enable_unified_cache_external_linker unified_cache_external_linker_backend max_loaded_loras
        max_loras_per_batch lora_eviction_policy cpu_offload_gb offload_group_size offload_num_in_group
        offload_prefetch_step offload_mode enable_lmcache lmcache_config_file enable_flexkv flexkv_config_file
        disaggregation_decode_enable_radix_cache disaggregation_decode_enable_offload_kvcache
        disaggregation_decode_retraction_backup weight_loader_disable_mmap weight_loader_prefetch_checkpoints
        weight_loader_prefetch_num_threads download_dir delete_ckpt_after_loading enable_memory_saver
        enable_weights_cpu_backup enable_draft_weights_cpu_backup weight_cache_mode weight_cache_socket
        weight_cache_timeout ple_offload_embedding ple_offload_backend ple_offload_dir
        _radix_eviction_policy_explicitly_set hicache_host_memory_fraction enable_linker_mla_dedup
        enable_paged_experts paged_experts_num_resident unified_cache_external_linker_config
        weight_loader_drop_cache_after_load
    """,
    SCHEDULING: """
        max_running_requests max_queued_requests chunked_prefill_size prefill_decode_interval
        enable_dynamic_chunking max_prefill_tokens prefill_max_requests schedule_policy
        enable_priority_scheduling disable_priority_preemption default_priority_value
        abort_on_priority_when_disabled schedule_low_priority_values_first
        priority_scheduling_preemption_threshold schedule_conservativeness disable_chunked_prefix_cache
        disable_overlap_schedule num_continuous_decode_steps scheduler_recv_interval enable_mixed_chunk
        pp_max_micro_batch_size pp_async_batch_depth load_balance_method batch_notify_size
        cuda_graph_prefill_max_context enable_lora_overlap_loading lora_drain_wait_threshold
        enable_two_batch_overlap enable_single_batch_overlap tbo_token_distribution_threshold
        num_reserved_decode_tokens disaggregation_decode_polling_interval optimistic_prefill_attempts
        enable_pdmux pdmux_config_path sm_group_num enable_prefill_delayer prefill_delayer_max_delay_passes
        prefill_delayer_queue_min_ratio prefill_delayer_max_delay_ms min_free_slots_delay
        prefill_decode_interval_min_bs
    """,
    REFUSED: """
        c128_page_size swa_full_tokens_ratio disable_hybrid_swa_memory enable_page_major_kv_layout
        enable_unified_memory attn_cp_size enable_prefill_cp cp_strategy enable_cp_decode_attn_tp
        dsa_prefill_backend dsv4_prefill_backend dsa_decode_backend dsa_paged_mqa_logits_backend
        dsa_topk_backend mamba_backend speculative_draft_model_path speculative_draft_model_revision
        speculative_draft_load_format speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens
        speculative_dflash_block_size speculative_dspark_block_size speculative_dspark_sps_table_path
        speculative_dspark_confidence_sts_path speculative_dspark_align_verify_tokens_to_graph_tier
        speculative_accept_threshold_single speculative_accept_threshold_acc speculative_use_rejection_sampling
        speculative_token_map speculative_attention_mode speculative_draft_attention_backend
        speculative_dsa_topk_backend speculative_draft_kv_cache_dtype speculative_draft_window_size
        speculative_moe_runner_backend speculative_moe_a2a_backend speculative_enable_w4a4_mxfp4_megamoe
        speculative_draft_model_quantization _speculative_draft_quantization_explicitly_set
        enable_multi_layer_eagle speculative_adaptive speculative_adaptive_config decoupled_spec_bind_endpoint
        decoupled_spec_connect_endpoints decoupled_spec_rank decoupled_spec_role spec_trace_dir
        speculative_ngram_min_bfs_breadth speculative_ngram_max_bfs_breadth speculative_ngram_match_type
        speculative_ngram_max_trie_depth speculative_ngram_capacity speculative_ngram_external_corpus_path
        speculative_ngram_external_sam_budget speculative_ngram_external_corpus_max_tokens max_mamba_cache_size
        mamba_ssm_dtype mamba_max_states_per_path enable_mamba_cache_stochastic_rounding
        mamba_cache_philox_rounds mamba_full_memory_ratio mamba_radix_cache_strategy uses_mamba_radix_cache
        mamba_track_interval enable_int8_mamba_checkpoint int8_mamba_ckpt_size linear_attn_backend
        linear_attn_decode_backend linear_attn_prefill_backend linear_attn_verify_backend
        enable_linear_replayssm linear_replayssm_cache_len enable_linear_replayssm_spec enable_hisparse
        hisparse_config decrypted_draft_config_file enable_return_indexer_topk
        speculative_domino_candidate_pool_size dsv4_attn_backend _swa_full_tokens_ratio_explicitly_set
        swa_prefix_tails enable_encoder_swa_bounded_replay enable_decoder_swa_bounded_replay
        speculative_boundary_reduction speculative_use_block_verification speculative_draft_sink_size
        dsa_triton_union enable_dsa_fused_indexer enable_cp_tp_group_sharing
    """,
    PROCESSES: """
        nccl_port dist_timeout dist_init_addr gated_launch_port nnodes node_rank dp_size
        enable_dp_attention_local_control_broadcast device base_gpu_id gpu_id_step watchdog_timeout
        soft_watchdog_timeout sleep_on_idle use_ray custom_sigquit_handler numa_node gc_threshold
        gc_warning_threshold_secs enable_nccl_nvls pre_warm_nccl elastic_ep_backend enable_elastic_expert_backup
        mooncake_ib_device ep_join_mode ep_join_rank_offset elastic_ep_initial_size max_ep_size
        elastic_ep_scale_timeout disaggregation_mode disaggregation_transfer_backend
        disaggregation_bootstrap_port disaggregation_ib_device disaggregation_decode_extra_slots language_only
        startup_weight_load_mode remote_instance_weight_loader_seed_instance_ip
        remote_instance_weight_loader_seed_instance_service_port
        remote_instance_weight_loader_send_weights_group_ports remote_instance_weight_loader_backend
        remote_instance_weight_loader_start_seed_via_transfer_engine engine_info_bootstrap_port
        modelexpress_config model_checksum checkpoint_engine_wait_weights_before_ready
        disaggregation_enable_kv_checksum enable_pd_role_switch disaggregation_decode_host_receive_threshold
        disaggregation_decode_allocation_policy
    """,
    INPUTS: """
        mm_attention_backend enable_precise_embedding_interpolation enable_broadcast_mm_inputs_process
        enable_prefix_mm_cache mm_enable_dp_encoder mm_process_config mm_processor_worker_num mm_io_worker_num
        allowed_media_domains media_url_max_file_size_mb mm_preprocess_cache_size_mb trust_mm_content_hashes
        limit_mm_data_per_request enable_mm_global_cache image_processor_backend mm_global_cache_backend
        disable_fast_image_processor mm_feature_transport encoder_only encoder_transfer_backend encoder_urls
        encoder_bootstrap_port encoder_register_urls enable_adaptive_dispatch_to_encoder
    """,
    LENGTH: "context_length",
}
"""Arguments that must not change a key, by the reason."""

ARGUMENTS = FieldTable(
    "ServerArgs",
    "",
    taken=names(
        """
        model_impl model_config_parser modelopt_quant
        quantize_and_serve rl_quant_profile custom_weight_loader
        kt_method moe_runner_backend fp8_gemm_runner_backend fp4_gemm_runner_backend
        flashinfer_mxfp4_moe_precision enable_w4a4_mxfp4_megamoe deepep_dispatcher_output_dtype
        enable_quant_communications qsa_indexer_dtype enable_deepseek_v4_fp4_indexer
        prefill_kv_cache_dequant_dtype dllm_algorithm dllm_fdfo
        lora_target_modules experts_shared_outer_loras forward_hooks dcp_size enable_kv_cache_sharding
        enable_dsa_cache_layer_split speculative_algorithm
        """
    ),
    read={
        "load_format": (
            f"{FORMAT_RULE}; dummy: the weights are random, and the seed is in the key",
            files_of_format,
        ),
        "model_loader_extra_config": (EXTRA_RULE, loader_settings),
    },
    elsewhere={
        "model_path": "the weights: the hub's commit, samples of the files, or `identity.model`; with "
        "them the files that say how weights are quantised",
        "revision": "with `model_path`",
        "random_seed": "where the weights are random (`load_format` dummy)",
        "dtype": "as SGLang has resolved it",
        "kv_cache_dtype": "as the pool has it",
        "quantization": "as SGLang has resolved it",
        "quantization_param_path": "by the file's content",
        "dllm_algorithm_config": "by the file's content",
        "kt_weight_path": "by the content of the weights there, also with `identity.model`",
        "modelopt_checkpoint_restore_path": "as `kt_weight_path`",
        "uno_lora_path": "as `kt_weight_path`",
        "json_model_override_args": "by the configuration that they make",
        "decrypted_config_file": "by the configuration that is read there",
        "enable_multimodal": "whether the model takes images, and the whole configuration is taken",
        "language_model_only": "as `enable_multimodal`",
        "trust_remote_code": "where it is on, by the content of the Python files in the model's folder",
        "page_size": "as the tokens per page of the pool",
        "tp_size": "a rank's place: other heads",
        "pp_size": "a rank's place: other layers",
        "lora_paths": "the content of the adapters",
        "enable_deterministic_inference": "as a mode whose kernels give other bits",
        "rl_on_policy_target": "as a mode whose kernels give other bits",
    },
    left_out={reason: names(text) for reason, text in LEFT_OUT.items()},
)
