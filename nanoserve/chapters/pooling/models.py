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
<<<<<<< HEAD
from nanoserve.models.loader import build_and_fill, load_model
from nanoserve.models.registry import ModelRegistry, build_model
from nanoserve.models.shards import Shard
from nanoserve.models.weight_files import find_files, read_headers
=======
from nanoserve.models.registry import ModelRegistry
>>>>>>> 1a718dbbfbc1f55e4e1fb913b0e9edaf92fff720

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
            f"{model.path.name} ({name}) makes no vectors here. Supported with runner='pooling': "
            "causal language models, such as Qwen3Model, and encoders, such as BertModel and "
            "XLMRobertaForMaskedLM; no classifiers, rewards or encoder-decoder models."
        )
    hf = {**model.hf_config, "tie_word_embeddings": True}  # so that files may lack a head
    return replace(model, architecture=found, hf_config=hf, tie_word_embeddings=True)


def most_positions(model: ModelConfig) -> int:
    """Tokens that an encoder has positions for."""
    length, kind = model.max_position_embeddings, model.get("model_type", "")
    has_offset = any(each in kind for each in OFFSET_POSITIONS)
    return length - 1 - model.get("pad_token_id", 1) if has_offset else length


<<<<<<< HEAD
def load_pooling_model(
    config: EngineConfig, model: ModelConfig, layer_config: LayerConfig
) -> Model:
    """The model in `model.path`, its weights filled, without a head if it is one of nanoserve's
    own. Raises ValueError as load_model does."""
    if is_encoder(model):
        return load_encoder(config, model, layer_config)
    model = as_causal(model) or model  # a rank has read config.json itself
    cls = ModelRegistry.get(model.architecture)
    if config.model_impl == "transformers" or cls is None or not issubclass(cls, CausalLM):
        tied = {**model.hf_config, "tie_word_embeddings": True}  # so that files may lack a head
        return load_model(config, replace(model, hf_config=tied), layer_config)
    is_dummy = config.load_format == "dummy"
    tensors = {} if is_dummy else read_headers(find_files(model.path))
    prefix = "" if "embed_tokens.weight" in tensors else "model"
    build = partial(EmbeddingModel, model, prefix)
    return build_and_fill(build, config, model.path, tensors, layer_config)


class EmbeddingModel(Model):
    """One of nanoserve's own models without its head."""

    is_tied = True  # a head in the files may be ignored

    def __init__(
        self, config: ModelConfig, prefix: str, max_model_len: int, layer_config: LayerConfig
    ) -> None:
        """prefix: of the names in the checkpoint, "model" or ""."""
        super().__init__()
        whole = build_model(replace(config, tie_word_embeddings=True), max_model_len, layer_config)
        assert isinstance(whole, CausalLM), "load_pooling_model has looked"
        self.prefix, self.model = prefix, whole.model
        self.model.embed_tokens.is_lm_head = False

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], metadata: StepMetadata
    ) -> Tensor:
        """Token ids and positions [num_tokens] -> hidden states [num_tokens, hidden]."""
        return self.model(input_ids, positions, kv_caches, metadata)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """The hidden states themselves: a profile of the memory samples from them."""
        return hidden

    def shards(self) -> Iterator[tuple[str, Shard]]:
        """As the base does, with the checkpoint's prefix."""
        for name, module in self.model.named_modules(prefix=self.prefix):
            if module is not self.model and hasattr(module, "shards"):
                yield from module.shards(name)
=======
def cut_head(model: Model, folder: Path) -> Model:
    """One of nanoserve's own models, which is about to be filled from the files of `folder`."""
    if not isinstance(model, CausalLM):
        return model
    model.model.embed_tokens.is_lm_head = False
    files, shards = folder.glob("*.safetensors"), model.shards
    if any("embed_tokens.weight" in safe_open(file, "pt").keys() for file in files):  # noqa: SIM118
        model.shards = lambda: [(name.removeprefix("model."), each) for name, each in shards()]
    return model
>>>>>>> 1a718dbbfbc1f55e4e1fb913b0e9edaf92fff720


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
<<<<<<< HEAD
    """The encoder in `model.path`, built and filled (or dummy) by transformers. Raises ValueError
    as load_with_transformers does."""
    if layer_config.parallel.tp_size > 1:
        refuse(model, "through transformers it can't be cut among ranks")
    if config.model_impl == "nanoserve":
        refuse(model, "nanoserve has no encoders of its own, and model_impl is 'nanoserve'")
    if config.quantization or find_quantization(model.hf_config):
        refuse(model, "the weights of encoders cannot be quantized here")
    [name, *_], _, _ = classes_of(model)
    with transformers_lock:
        import transformers

        from nanoserve.models import transformers_fallback as fallback

        model_cls = getattr(transformers, name)
        try:
            body = make_encoder(config, model, layer_config, model_cls)
        except fallback.Unsupported as error:
            refuse(model, f"it {error}")
    return EncoderModel(body, max(0, model.get("pad_token_id", 0)))


def make_encoder(
    config: EngineConfig,
    model: ModelConfig,
    layer_config: LayerConfig,
    model_cls: Any,
) -> nn.Module:
    """The body as `model_cls` of transformers, without the layer that it may have behind the first
    token. Raises Unsupported and ValueError as fallback.make_model does."""
    from nanoserve.models import transformers_fallback as fallback

    has_layer = "add_pooling_layer" in inspect.signature(model_cls.__init__).parameters
    options = {"add_pooling_layer": False} if has_layer else {}
    with torch.device("meta"):
        hf_config = model_cls.config_class.from_dict(dict(model.hf_config))
        parts = {name for name, _ in model_cls._from_config(hf_config, **options).named_children()}

    def is_head(name: str) -> bool:
        """Is it no part of the body? (Old checkpoints have numbers of positions, too.)"""
        part = name.removeprefix(f"{model_cls.base_model_prefix}.").partition(".")[0]
        return part not in parts or name.endswith("position_ids")

    return fallback.make_model(model_cls, config, model, layer_config, is_head, **options)
=======
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
>>>>>>> 1a718dbbfbc1f55e4e1fb913b0e9edaf92fff720
