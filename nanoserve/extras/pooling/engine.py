"""What does an engine for vectors have in place of its usual parts?

    LLMEngine(EngineConfig(model, runner="pooling"))
        configure(config, model)    options that such a model has no use for, or no right to
        PoolingScheduler, PoolingModelRunner, or the user's own scheduler_cls and runner_cls
        install(engine)             PoolingInputProcessor, PoolingOutputProcessor

config.find_pooling decides whether an engine is one. A scheduler or runner of your own derives from
these classes.

vLLM: ModelConfig.is_chunked_prefill_supported, is_prefix_caching_supported in vllm/config/model.py,
_get_and_verify_max_len (V1).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.exceptions import brief
from nanoserve.extras.pooling.config import PoolerConfig, read_max_seq_length, warn_of_prompt
from nanoserve.extras.pooling.models import as_causal, is_encoder, most_positions
from nanoserve.extras.pooling.params import PoolingParams
from nanoserve.extras.pooling.processor import (
    PoolingInputProcessor,
    PoolingOutputProcessor,
    PoolingScheduler,
)
from nanoserve.extras.pooling.runner import PoolingModelRunner
from nanoserve.logger import init_logger
from nanoserve.models.registry import ModelRegistry

if TYPE_CHECKING:
    from nanoserve.engine import LLMEngine

__all__ = ["PoolingModelRunner", "PoolingScheduler", "configure", "install", "is_registered"]
logger = init_logger(__name__)
MOST_SEQS = 256  # the default of max_num_seqs


def is_registered(model: ModelConfig) -> bool:
    """Has ModelRegistry a class of just this name, which writes text?"""
    return ModelRegistry.get(model.architecture) is not None


def configure(config: EngineConfig, model: ModelConfig) -> tuple[EngineConfig, ModelConfig]:
    """The configs of a pooling engine: runner is "pooling", pooler_config says what the checkpoint
    says, and what would give wrong vectors is switched off (see __init__.py); Qwen3Model is run by
    Qwen3ForCausalLM. Raises ValueError for a model that makes no vectors here, and for options that
    contradict that."""
    if config.speculative_config is not None:
        raise ValueError("speculative_config guesses tokens, and a pooling model writes none.")
    is_bidirectional = is_encoder(model)
    model = model if is_bidirectional else as_causal(model) or model
    default = "CLS" if is_bidirectional else "LAST"
    pooler = (config.pooler_config or PoolerConfig()).resolve(model.path, default)
    kind = pooler.seq_pooling_type
    if kind == "CLS" and not is_bidirectional:
        raise ValueError(
            f"seq_pooling_type is CLS, and {model.path.name} ({model.architecture}) is a decoder: "
            "its first token sees no other one. Use LAST or MEAN."
        )
    config = replace(config, runner="pooling", pooler_config=pooler, enforce_eager=True)
    length = min(read_max_seq_length(model.path) or model.max_model_len, model.max_model_len)
    if is_bidirectional:
        length = min(length, most_positions(model))
        if (config.max_model_len or 0) > length:
            raise ValueError(
                f"max_model_len is {config.max_model_len}, but {model.path.name} was made for at "
                f"most {length} tokens. Ask for that or less."
            )
    config = replace(config, max_model_len=config.max_model_len or length)
    if is_bidirectional or kind != "LAST":
        # Sums of hidden states are in no block that could be shared, kept or swapped out.
        if config.has_kv_connector:
            what = "an encoder" if is_bidirectional else f"pooling {kind}"
            raise ValueError(
                f"kv_offloading_size and kv_transfer_config keep cached prefixes, and {what} uses "
                "none. Leave them out."
            )
        config = replace(config, enable_prefix_caching=False, preemption_mode="recompute")
        config = replace(config, num_cpu_blocks=None, swap_space=None)
    if is_bidirectional:
        # Blocks count tokens only: enough of them for all sequences that may run.
        assert config.max_model_len
        if config.max_num_batched_tokens and config.max_num_batched_tokens < config.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens is {config.max_num_batched_tokens}, but an encoder "
                f"computes a prompt of up to max_model_len ({config.max_model_len}) tokens in one "
                "step. Raise the first or lower the second."
            )
        per_sequence = -(-config.max_model_len // config.block_size)
        num_blocks = per_sequence * (config.max_num_seqs or MOST_SEQS)
        config = replace(config, enable_chunked_prefill=False, num_gpu_blocks_override=num_blocks)
    params = PoolingParams().verify(model, config)  # raises for dimensions that no request may have
    what = "normalised vectors" if pooler.use_activation else "vectors"
    size = params.dimensions or model.hidden_size
    logger.info("pooling    %s, %s of %d numbers", kind, what, size)
    warn_of_prompt(model.path)
    return config, model


def install(engine: LLMEngine) -> None:
    """Let `engine`, just built, take PoolingParams and hand out vectors. Raises TypeError for a
    scheduler that waits for tokens."""
    if not isinstance(engine.scheduler, PoolingScheduler):
        raise TypeError(
            f"scheduler_cls made {brief(engine.scheduler)}, and a pooling engine needs a subclass "
            "of PoolingScheduler (nanoserve.extras.pooling.processor)."
        )
    engine.input_processor = PoolingInputProcessor(
        engine.config, engine.model_config, engine.tokenizer, engine.executor.num_kv_blocks
    )
    engine.output_processor = PoolingOutputProcessor(None, engine.scheduler.finish)
