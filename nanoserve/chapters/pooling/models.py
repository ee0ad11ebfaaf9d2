"""Which models make hidden states, and where do their weights come from?

    architecture of config.json       what runs
    Qwen3ForCausalLM, Qwen3Model      nanoserve's own Qwen3 without its head (EmbeddingModel)
    GPT2LMHeadModel, GPT2Model        transformers' model on paged attention, as for text
    BertModel, RobertaForMaskedLM     transformers' own model, without a KV cache (EncoderModel)

Embedding checkpoints are often saved without the head, and then without the prefix of its body:
"layers.0.self_attn.q_proj.weight" in place of "model.layers.0. ...". Both are read, and a head that
a file has is left out.

*Encoders.* Each token of an encoder sees all others. So a prompt is computed in one step, whole,
and nothing of it is kept: there is no KV cache, and the scheduler's blocks only count tokens. The
prompts of a step are padded and masked, in batches of similar lengths, so that less than half of a
batch is padding. In a few families the padding shows in spite of the mask (FNet has none, ConvBERT
has convolutions), so each model is asked once (`sees_padding`): then a batch has one length.

vLLM: vllm/model_executor/models/: adapters.py, bert.py, roberta.py, transformers/pooling.py (V1);
bert.py (V0).
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from nanoserve.attention import KVCache, StepMetadata
from nanoserve.config import EngineConfig
from nanoserve.kernels.kv_cache import KVCacheSpec
from nanoserve.layers import LayerConfig
from nanoserve.model import CausalLM
from nanoserve.models.base import Model
from nanoserve.models.checkpoint import find_quantization, transformers_lock
from nanoserve.models.config import ModelConfig
from nanoserve.models.loader import build_and_fill, load_model
from nanoserve.models.registry import ModelRegistry, build_model
from nanoserve.models.shards import Shard
from nanoserve.models.weight_files import find_files, read_headers

# Their position 0 is pad_token_id + 1, so that the table has fewer positions than rows.
OFFSET_POSITIONS = {
    *("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm", "mpnet"),
    *("xmod", "longformer", "data2vec-text", "ibert", "esm", "luke"),
}


def classes_of(model: ModelConfig) -> tuple[list[str], list[str], list[str]]:
    """What transformers calls the classes of its model type: the body; what writes text; what fills
    gaps in a text, which encoders have."""
    with transformers_lock:  # imported here, because it takes a second
        from transformers.models.auto import modeling_auto as auto

    def look_up(table: Mapping[str, Any]) -> list[str]:
        names = table.get(str(model.hf_config.get("model_type")), ())
        return [names] if isinstance(names, str) else list(names)

    masked = look_up(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    masked += look_up(auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES) if masked else []
    bodies = look_up(auto.MODEL_MAPPING_NAMES)
    return bodies, look_up(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), masked


def as_causal(model: ModelConfig) -> ModelConfig | None:
    """The same model with the architecture of its decoder that writes text: Qwen3Model ->
    Qwen3ForCausalLM. None if it has none, or is an encoder."""
    name = model.architecture
    for other in (name, f"{name.removesuffix('Model')}ForCausalLM"):
        if ModelRegistry.get(other) is not None:
            return replace(model, architecture=other)
    bodies, causal, masked = classes_of(model)
    if name in causal:
        return model
    is_body = name in bodies and causal and not masked
    return replace(model, architecture=causal[0]) if is_body else None


def is_encoder(model: ModelConfig) -> bool:
    """Does each token see all others? Raises ValueError for what makes no vectors here."""
    name = model.architecture
    if as_causal(model) is not None:
        if model.get("is_causal", True):
            return False
        refuse(model, "config.json says is_causal false, and decoders are causal here")
    if name.endswith(("Classification", "RewardModel")):
        refuse(model, "there are no classifiers, cross-encoders and reward models here")
    bodies, _, masked = classes_of(model)
    if not masked or name not in bodies + masked:
        refuse(model, "transformers knows no encoder and no causal language model of that name")
    if model.hf_config.get("is_decoder") or model.hf_config.get("is_encoder_decoder"):
        refuse(model, "it is a decoder beside an encoder")
    return True


def refuse(model: ModelConfig, reason: str) -> NoReturn:
    """Raise a ValueError that gives the reason, and says what can run."""
    raise ValueError(
        f"architecture {model.architecture} cannot make vectors: {reason}. Supported with "
        f"runner='pooling': {', '.join(ModelRegistry.architectures())} and their bodies "
        "(Qwen3Model); through transformers, what writes text there, and encoders such as "
        "BertModel and XLMRobertaModel."
    )


def most_positions(model: ModelConfig) -> int:
    """Tokens that an encoder has positions for."""
    length = model.max_position_embeddings
    if model.hf_config.get("model_type") in OFFSET_POSITIONS:
        length -= 1 + max(0, model.get("pad_token_id", 1))
    return length


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


class EncoderModel(Model):
    """An encoder of transformers, with the interface of Model."""

    library = "transformers"
    supports_cuda_graphs = False

    def __init__(self, body: nn.Module, pad_token_id: int) -> None:
        super().__init__()
        self.body, self.pad_token_id = body, pad_token_id
        self.needs_same_length = self.sees_padding()

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """Blocks count tokens only: one number for each."""
        return [KVCacheSpec(1, 1, 1)]

    @torch.inference_mode()
    def sees_padding(self) -> bool:
        """Do a prompt's hidden states change with the tokens that pad it? To the last bit: behind a
        mask they count exactly 0, in every type of numbers."""
        device = next(self.body.parameters()).device
        mask = torch.tensor([[1] * 4 + [0] * 4], device=device)

        def pad_with(token_id: int) -> Tensor:
            input_ids = torch.tensor([[0] * 4 + [token_id] * 4], device=device)
            return self.body(input_ids=input_ids, attention_mask=mask).last_hidden_state[:, :4]

        return not torch.equal(pad_with(self.pad_token_id), pad_with(int(self.pad_token_id == 0)))

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], metadata: StepMetadata
    ) -> Tensor:
        """Token ids of whole prompts [num_tokens] -> hidden states [num_tokens, hidden]."""
        lengths = metadata.query_start_loc.diff().tolist()
        prompts = input_ids.split(lengths)
        batches: dict[int, list[int]] = defaultdict(list)  # 9 to 16 tokens: one batch
        for i, length in enumerate(lengths):
            batches[length if self.needs_same_length else (length - 1).bit_length()].append(i)
        hidden: list[Any] = [None] * len(prompts)
        for members in batches.values():
            states = self.encode([prompts[i] for i in members])
            for i, state in zip(members, states, strict=True):
                hidden[i] = state[: lengths[i]]
        return torch.cat(hidden)

    def encode(self, prompts: list[Tensor]) -> Tensor:
        """Prompts [n_i] -> hidden states [len(prompts), longest, hidden]."""
        pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
        mask = pad([torch.ones_like(prompt) for prompt in prompts])
        input_ids = pad(prompts, padding_value=self.pad_token_id)
        return self.body(input_ids=input_ids, attention_mask=mask).last_hidden_state

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """There is no head."""
        return hidden


def load_encoder(config: EngineConfig, model: ModelConfig, layer_config: LayerConfig) -> Model:
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
