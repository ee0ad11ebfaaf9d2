"""What does the runner need of a model?

A forward pass from token ids to hidden states, logits of chosen hidden states, what each layer
keeps per token (KVCacheSpec), and which checkpoint tensors fill its weights (Shard).

vLLM: vllm/model_executor/models/interfaces_base.py (V0 and V1).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from nanoserve.attention import KVCache, StepMetadata
from nanoserve.kernels.kv_cache import KVCacheSpec
from nanoserve.layers import LinearBase
from nanoserve.models.shards import Shard


class Model(nn.Module):
    """What the model runner and the loader need of a model: the base of CausalLM, and of yours.

    A subclass is built as cls(config, max_model_len, layer_config), with unfilled parameters, and
    has the first two methods below. The next two collect what its modules say: `kv_cache_spec` of
    modules that attend, `shards` of modules that have weights (all layers of layers.py have it).
    """

    library = "nanoserve"  # the library that has the model's code
    supports_cuda_graphs = True  # the forward pass reads no tensor's contents on the CPU
    supports_pp = False  # can be divided into stages: does what CausalLM does, and has two sizes
    hidden_size = vocab_size = 0
    foreign_names: frozenset[str] = frozenset()  # tensors of the checkpoint that other ranks hold
    is_tied = False  # the head is the embedding: a checkpoint's lm_head.weight may be ignored

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], metadata: StepMetadata
    ) -> Tensor:
        """Token ids and positions [num_tokens] -> hidden states [num_tokens, hidden]."""
        raise NotImplementedError

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [num_rows, hidden] -> logits [num_rows, vocab_size]."""
        raise NotImplementedError

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """One per layer, in the order in which forward expects kv_caches."""
        specs = [getattr(module, "kv_cache_spec", None) for module in self.modules()]
        return [spec for spec in specs if spec is not None]

    def shards(self) -> Iterator[tuple[str, Shard]]:
        """(checkpoint name, place to fill) for every weight; one name may fill several places."""
        for name, module in self.named_modules():
            if module is not self and hasattr(module, "shards"):
                yield from module.shards(name)

    def num_bytes(self) -> int:
        """Bytes of the weights on this rank."""
        return sum(tensor.nbytes for tensor in [*self.parameters(), *self.buffers()])

    def process_weights_after_loading(self) -> None:
        """To be called once, when all weights are filled: each linear method may pack its own."""
        for module in self.modules():
            if isinstance(module, LinearBase):
                module.linear_method.process_weights_after_loading(module)
