"""What do vLLM's other methods and options add to the engine?

config            where the model comes from; defaults of requests
engine            reads these, once; the chat template of the option
runner            logprobs of what the filters leave, if asked for
LLM               enqueue, profiles, functions on the model
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm

from nanoserve.config import EngineConfig
from nanoserve.engine import LLMEngine
from nanoserve.llm import LLM
from nanoserve.model_runner import ModelRunner
from nanoserve.models.config import HUB_FILES
from nanoserve.sampler import apply_min_p, apply_top_k_top_p, gather_logprobs
from nanoserve.sampling_params import GREEDY_TEMPERATURE


@dataclass(frozen=True)
class VllmConfig(EngineConfig):
    # Of a model on the Hugging Face hub: its version, where it is kept, and the key to it.
    revision: str | None = None
    download_dir: str | None = None
    hf_token: Any = None
    # Jinja text, or a file of it, in place of the tokenizer's own.
    chat_template: str | None = None
    # auto: the checkpoint's generation_config.json; vllm: neutral defaults of requests.
    generation_config: Literal["auto", "vllm"] = "auto"
    # What comes before it, such as {"temperature": 0.2}.
    override_generation_config: dict | None = None
    # raw_logprobs: what the model says; processed_logprobs: what penalties and filters leave of it.
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    # {"torch_profiler_dir": folder} for the traces of start_profile.
    profiler_config: dict | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.logprobs_mode != "raw_logprobs" and getattr(self, "pipeline_parallel_size", 1) > 1:
            raise ValueError("logprobs_mode: with stages, logprobs are the model's own.")


class VllmEngine(LLMEngine):
    def __init__(self, config: Any) -> None:
        super().__init__(download(config))
        found = {} if config.generation_config == "vllm" else self.model_config.generation_config
        found = {**found, **(config.override_generation_config or {})}
        self.model_config = replace(self.model_config, generation_config=found)
        if template := config.chat_template:
            self.tokenizer = self.input_processor.tokenizer = copy(self.tokenizer)
            self.tokenizer.chat_template = (
                template if "{" in template else Path(template).read_text()
            )

    def get_tokenizer(self) -> Any:
        return self.tokenizer


def download(config: Any) -> Any:
    """The config with the folder of a model for which a version or a place was given."""
    how = {"revision": config.revision, "cache_dir": config.download_dir, "token": config.hf_token}
    if config.model is None or not any(how.values()) or Path(config.model).expanduser().is_dir():
        return config
    from huggingface_hub import snapshot_download

    return replace(config, model=snapshot_download(config.model, allow_patterns=HUB_FILES, **how))


class VllmRunner(ModelRunner):
    def load_model(self) -> Any:
        model, plain = super().load_model(), self.choose
        if self.config.logprobs_mode == "processed_logprobs":

            def choose(logits: Any, batch: Any) -> Any:
                self.chosen_from = (logits, batch)
                return plain(logits, batch)

            self.choose, self.draw = choose, partial(self.draw_processed, self.draw)
        return model

    def draw_processed(self, draw: Any, input_batch: Any, hidden: Any) -> Any:
        sampled = draw(input_batch, hidden)
        if not getattr(sampled, "logprobs", None):
            return sampled
        logits, batch = self.chosen_from
        if not batch.is_greedy:
            is_greedy = batch.temperature < GREEDY_TEMPERATURE
            filtered = logits / batch.temperature.masked_fill(is_greedy, 1.0)[:, None]
            if batch.min_p is not None:
                filtered = apply_min_p(filtered, batch.min_p)
            filtered = apply_top_k_top_p(filtered, batch.top_k, batch.top_p)
            logits = torch.where(is_greedy[:, None], logits, filtered)
        logprobs = gather_logprobs(logits, sampled.token_ids, batch.num_logprobs)
        return sampled._replace(logprobs=logprobs)


class VllmLLM(LLM):
    """The engine is this process's alone: functions on the model run here."""

    enqueued: tuple[Any, ...] = ()

    def enqueue(self, prompts: Any, sampling_params: Any = None, **each: Any) -> list[str]:
        """Check these prompts and keep them for wait_for_completion; their request ids."""
        each.pop("use_tqdm", None)
        requests = self.make_requests(prompts, sampling_params, **each)
        self.enqueued = (*self.enqueued, *requests)
        return [request.request_id for request in requests]

    def wait_for_completion(self, output_type: Any = None, *, use_tqdm: bool = True) -> list[Any]:
        """Complete what was enqueued; the outputs in its order."""
        requests = self.enqueued
        steps = tqdm(self.run_requests(requests), desc="Prompts", disable=not use_tqdm)
        outputs = {output.request_id: output for output in steps}
        self.enqueued = self.enqueued[len(requests) :]
        return [outputs[each.request_id] for each in requests if each.request_id in outputs]

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """[func(model)], of this process. Raises ValueError on several ranks."""
        if self.llm_engine.config.num_ranks > 1:
            raise ValueError("a function reaches the model of one rank only, and there are more.")
        return [func(self.llm_engine.executor.runner.model)]

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Record what runs until stop_profile."""
        self.profile = torch.profiler.profile()
        self.profile.start()

    def stop_profile(self) -> None:
        """Write the trace: open it at ui.perfetto.dev."""
        self.profile.stop()
        folder = Path((self.llm_engine.config.profiler_config or {}).get("torch_profiler_dir", "."))
        folder.mkdir(parents=True, exist_ok=True)
        self.profile.export_chrome_trace(str(folder / "nanoserve_trace.json"))

    def reset_prefix_cache(
        self, *, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        if reset_running_requests:  # their tokens stay, and are computed again
            with self.llm_engine.between_steps():
                self.llm_engine.recover(None)
        return super().reset_prefix_cache()
