"""Which models make hidden states, and where do their weights come from?

    architecture of config.json       what runs
    Qwen3ForCausalLM, Qwen3Model      nanoserve's own Qwen3 without its head
    GPT2LMHeadModel, GPT2Model        transformers' model on paged attention, as for text
    BertModel, RobertaForMaskedLM     transformers' own model, without a KV cache (EncoderModel)

Embedding checkpoints are often saved without the head, and then without the prefix of its body:
"layers.0.self_attn.q_proj.weight" in place of "model.layers.0. ...". Both are read.

vLLM: vllm/model_executor/models/: adapters.py, bert.py, roberta.py, transformers/pooling.py (V1);
bert.py (V0).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from nanoserve.attention import KVCache, StepMetadata
from nanoserve.config import EngineConfig
from nanoserve.kernels.kv_cache import KVCacheSpec
from nanoserve.layers import LayerConfig
from nanoserve.model import CausalLM
from nanoserve.models.base import Model
from nanoserve.models.config import ModelConfig
from nanoserve.models.registry import ModelRegistry

# Their position 0 is pad_token_id + 1, so that the table has fewer positions than rows.
OFFSET_POSITIONS = ("roberta", "camembert", "mpnet", "longformer")


def as_decoder(model: ModelConfig) -> ModelConfig | None:
    """The same model under the name of its class that writes text: Qwen3Model -> Qwen3ForCausalLM.
    None for an encoder. Raises ValueError for what makes no vectors here."""
    name = model.architecture
    causal = f"{name.removesuffix('Model')}ForCausalLM"
    found = next((each for each in (name, causal) if ModelRegistry.get(each)), None)
    if found is None:
        from transformers.models.auto import modeling_auto as auto  # takes a second

        kind = model.get("model_type")
        is_body = name == auto.MODEL_MAPPING_NAMES.get(kind)
        causal = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
        masked = auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.get(kind)
        if masked and (is_body or name == masked) and not model.get("is_encoder_decoder", False):
            return None
        found = causal if name == causal or (is_body and not masked) else None
    if found is None or not model.get("is_causal", True):
        raise ValueError(
            f"{name} makes no vectors here. Supported: causal language models, such as Qwen3Model, "
            "and encoders, such as BertModel and XLMRobertaForMaskedLM; no classifiers."
        )
    hf = {**model.hf_config, "tie_word_embeddings": True}  # so that files may lack a head
    return replace(model, architecture=found, hf_config=hf, tie_word_embeddings=True)


def most_positions(model: ModelConfig) -> int:
    """Tokens that an encoder has positions for."""
    length, kind = model.max_position_embeddings, model.get("model_type", "")
    has_offset = any(each in kind for each in OFFSET_POSITIONS)
    return length - 1 - model.get("pad_token_id", 1) if has_offset else length


def cut_head(model: Model, folder: Path) -> Model:
    """One of nanoserve's own models, which is about to be filled from the files of `folder`."""
    if not isinstance(model, CausalLM):
        return model
    model.model.embed_tokens.is_lm_head = False
    files, shards = folder.glob("*.safetensors"), model.shards
    if any("embed_tokens.weight" in safe_open(file, "pt").keys() for file in files):  # noqa: SIM118
        model.shards = lambda: [(name.removeprefix("model."), each) for name, each in shards()]
    return model


class EncoderModel(Model):
    """An encoder of transformers, with the interface of Model.

    Each token sees all others. So a prompt is computed in one step, whole, and nothing of it is
    kept: there is no KV cache, and the scheduler's blocks only count tokens. Prompts of the same
    length are computed as one batch, without padding, because not every family can mask it.
    """

    library = "transformers"
    supports_cuda_graphs = False

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """Blocks count tokens only: one number for each."""
        return [KVCacheSpec(1, 1, 1)]

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], metadata: StepMetadata
    ) -> Tensor:
        """Token ids of whole prompts [num_tokens] -> hidden states [num_tokens, hidden]."""
        lengths, states = metadata.query_start_loc.diff().tolist(), {}
        prompts = input_ids.split(lengths)
        for length in set(lengths):
            numbers = [number for number, each in enumerate(lengths) if each == length]
            batch = torch.stack([prompts[number] for number in numbers])  # [num_prompts, length]
            hidden = self.body(input_ids=batch).last_hidden_state
            states |= zip(numbers, hidden, strict=True)
        return torch.cat([states[number] for number in range(len(lengths))])

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """There is no head."""
        return hidden


def load_encoder(config: EngineConfig, model: ModelConfig, layer_config: LayerConfig) -> Model:
    """The encoder in `model.path`, built and filled by transformers. Raises ValueError for options
    that it does not have, and for weights that do not match."""
    if config.num_ranks > 1 or config.quantization or config.load_format == "dummy":
        how = "on one rank, not quantized, with its own weights"
        raise ValueError(f"{model.architecture} runs through transformers: {how}.")
    from transformers import AutoModel

    body, report = AutoModel.from_pretrained(
        model.path, dtype=layer_config.dtype, use_safetensors=True, output_loading_info=True
    )
    # The layer behind the first token, which no pooling here uses, may be missing.
    if missing := [name for name in report["missing_keys"] if "pooler" not in name]:
        raise ValueError(f"the weights in {model.path} lack {', '.join(missing[:5])}.")
    return EncoderModel(body.eval().requires_grad_(False).to(layer_config.device))
