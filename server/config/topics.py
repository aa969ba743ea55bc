"""The settings by topic, in the order of `--help`. Each topic starts with the settings that most people need."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Topic:
    """The names of a topic's settings.

    first: the settings that `--help` and `--help-all` show. rest: the settings that only `--help-all` shows.
    """

    title: str
    first: tuple[str, ...]
    rest: tuple[str, ...] = ()


def _topic(title: str, first: str, rest: str = "") -> Topic:
    return Topic(title, tuple(first.split()), tuple(rest.split()))


TOPICS = (
    _topic(
        "model",
        "model models_dir hf_repo alias",
        """hf_file offline models_loaded model_turn any_model tags chat_template chat_template_file chat_template_kwargs
        lora lora_scaled lora_init_without_apply override_kv rope_scaling rope_scale rope_freq_base rope_freq_scale
        yarn_orig_ctx yarn_ext_factor yarn_attn_factor yarn_beta_slow yarn_beta_fast spm_infill""",
    ),
    _topic(
        "folder of documents",
        "docs docs_top_k embedding_model",
        """docs_watch docs_db docs_scope chunk_tokens read_ahead retrieval_prompt embedding_query_prefix
        embedding_document_prefix rerank_model document_order best best_price_ms documents_attention dedup tool_documents
        documents_in_text order_hint""",
    ),
    _topic(
        "cache",
        "cache_prompt cache_ram cache_dir cache_disk",
        """idle_prefill idle_sets idle_cells eviction slot_prompt_similarity volatile conversations conversation_ram
        conversation_ttl slot_save_path check""",
    ),
    _topic(
        "memory and device",
        "ctx_size parallel gpu_layers flash_attn cache_type_k cache_type_v threads sleep_idle_seconds",
        """kv_unified fit fit_target fit_ctx device_memory cpu_moe n_cpu_moe override_tensor device split_mode tensor_split
        main_gpu batch_size ubatch_size repack""",
    ),
    _topic(
        "network",
        "host port api_key opens_page",
        """ssl_key_file ssl_cert_file api_key_file allowed_hosts cors_origins max_body max_queue window prefill_budget
        max_stall hang_after sse_ping_interval strict ui metrics slots props""",
    ),
    _topic(
        "answers",
        "predict temperature top_p reasoning",
        """top_k min_p typical_p top_n_sigma xtc_probability xtc_threshold dynatemp_range dynatemp_exponent repeat_penalty
        repeat_last_n presence_penalty frequency_penalty dry_multiplier dry_base dry_allowed_length dry_penalty_last_n
        dry_sequence_breaker mirostat mirostat_tau mirostat_eta adaptive_target adaptive_decay seed samplers sampling_seq
        min_keep ignore_eos logit_bias prefill_assistant reasoning_format reasoning_budget reasoning_budget_message
        reasoning_effort reasoning_preserve""",
    ),
    _topic("models that draft", "draft_model draft", "spec_type"),
    _topic("vectors of the model itself", "embeddings", "reranking pooling embd_normalize"),
    _topic("log", "verbose", "log_format log_file"),
)
