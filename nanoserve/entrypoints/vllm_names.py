"""Which other names does a program import from vLLM?

Configurations that are dicts here, and helpers that have little to do in one process:

    KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")   a dict of these
    cleanup_dist_env_and_memory()                                          collects garbage

vLLM: vllm/config/, vllm/utils/, vllm/distributed/parallel_state.py (0.32).
"""

from __future__ import annotations

import gc
import uuid
from typing import Any

from nanoserve.models.config import resolve_folder
from nanoserve.models.tokenizer import load_tokenizer

AttentionConfig = CompilationConfig = KVTransferConfig = ProfilerConfig = SpeculativeConfig = dict
PoolerConfig = StructuredOutputsConfig = dict


def get_tokenizer(name: Any, **options: Any) -> Any:
    """The tokenizer of a folder or an id."""
    return load_tokenizer(resolve_folder(name))


def random_uuid() -> str:
    """32 hexadecimal digits: an id for a request."""
    return uuid.uuid4().hex


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Collect what is no longer used: an LLM frees its memory when it is."""
    gc.collect()


destroy_model_parallel = destroy_distributed_environment = cleanup_dist_env_and_memory
