"""What does the runner need of a model?

A forward pass from token ids to hidden states, logits of the rows that are asked for, what each
layer keeps per token (KVCacheSpec), and which checkpoint tensors fill its weights (Shard).

vLLM: vllm/model_executor/models/interfaces_base.py (V0 and V1).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from nanoserve.attention import KVCache, KVCacheSpec, StepMetadata
from nanoserve.layers import Norm, Packable, Shard


class Model(nn.Module):
    """What the model runner and the loader need of a model: the base of CausalLM, and of yours.

    A subclass is built as cls(config, max_model_len, layer_config), with unfilled parameters, and
    has the two methods below. The two after them find what its modules say: `kv_cache_spec` of
    those that attend, `shards` of those that have weights (the layers of layers.py all do).
    """

    library = "nanoserve"  # whose code it is
    supports_cuda_graphs = True  # no number is read on the host, no shape depends on one
    is_tied = False  # the head is the embedding: a checkpoint's lm_head.weight may be ignored

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[KVCache],
        metadata: StepMetadata,
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
        """(checkpoint name, place to fill) for every weight."""
        for name, module in self.named_modules():
            if module is not self and hasattr(module, "shards"):
                yield from module.shards(name)

    def num_bytes(self) -> int:
        """What its weights take, on this rank."""
        packed = [module.packed for module in self.modules() if isinstance(module, Packable)]
        tensors = [*self.parameters(), *(tensor for tensor in packed if tensor is not None)]
        return sum(tensor.nbytes for tensor in tensors)

    def pack(self) -> None:
        """The weights are filled: bring them into the layout that is multiplied fastest."""
        for module in self.modules():
            if isinstance(module, Packable | Norm):
                module.pack()
