"""The model in training: Qwen3 in plain PyTorch with Hugging Face's parameter names, and Muon.

The model computes what transformers' Qwen3ForCausalLM computes, but faster: q/k/v and gate/up are
one matrix product each; products may run in bfloat16 while weights and the residual stream stay in
float32; and the vocabulary projection is computed only for the positions whose loss weight is not 0
(a third to a half of all positions).

Left out: KV cache, padding, dropout. nanoserve/models/decoder.py is the model that serves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelShape:
    """The defaults give 1.25M parameters, 2.5 MB in bfloat16."""

    vocab_size: int = 2048
    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 5
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    rope_theta: float = 10_000.0  # with 1e6, copying is learnt more slowly
    max_positions: int = 2048


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, 1e-6)


def project(x: Tensor, *layers: nn.Linear, dtype: torch.dtype) -> Tensor:
    """The outputs of linear layers that read the same input, side by side: one matrix product."""
    weights = [layer.weight for layer in layers]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    return F.linear(x.to(dtype), weight.to(dtype))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding in the half-split layout of Llama and Qwen."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, shape: ModelShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.dtype = dtype
        hidden = shape.hidden_size
        self.q_proj = nn.Linear(hidden, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, hidden, bias=False)
        self.q_norm, self.k_norm = RMSNorm(self.dim), RMSNorm(self.dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = x.shape
        qkv = project(x, self.q_proj, self.k_proj, self.v_proj, dtype=self.dtype)
        qkv = qkv.view(rows, length, -1, self.dim).transpose(1, 2)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        q = rotate(self.q_norm(q), cos, sin).to(self.dtype)  # [rows, heads, length, dim]
        k = rotate(self.k_norm(k), cos, sin).to(self.dtype)  # [rows, kv_heads, length, dim]
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = out.transpose(1, 2).reshape(rows, length, -1)
        return project(out, self.o_proj, dtype=self.dtype)


class MLP(nn.Module):
    def __init__(self, shape: ModelShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = project(x, self.gate_proj, self.up_proj, dtype=self.dtype).chunk(2, dim=-1)
        return project(F.silu(gate) * up, self.down_proj, dtype=self.dtype)


class Block(nn.Module):
    def __init__(self, shape: ModelShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size)
        self.self_attn = Attention(shape, dtype)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size)
        self.mlp = MLP(shape, dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, shape: ModelShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape, dtype) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size)


class TrainingQwen3(nn.Module):
    """state_dict() holds exactly the tensors of a Qwen3ForCausalLM checkpoint (tied embeddings)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: ModelShape, dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        self.dtype = dtype
        self.model = Decoder(shape, dtype)
        half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        angles = torch.outer(torch.arange(shape.max_positions).float(), shape.rope_theta**-half)
        angles = torch.cat((angles, angles), dim=-1)  # [max_positions, head_dim]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.init_weights(torch.Generator().manual_seed(seed))

    def init_weights(self, generator: torch.Generator) -> None:
        for name, parameter in self.named_parameters():
            if "embed" in name:
                nn.init.normal_(parameter, std=0.04, generator=generator)
            elif parameter.ndim == 2:
                writes_residual = "o_proj" in name or "down_proj" in name
                std = parameter.shape[1] ** -0.5 * (0.3 if writes_residual else 1.0)
                nn.init.normal_(parameter, std=std, generator=generator)

    def compile_blocks(self) -> None:
        """One compiled graph per row length, shared by all blocks."""
        compiled = torch.compile(Block.forward, dynamic=False)
        for layer in self.model.layers:
            layer.forward = compiled.__get__(layer)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids [rows, length] -> hidden states after the last norm, [rows, length, hidden]."""
        x = self.model.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.model.norm(x)

    def loss(self, ids: Tensor, weights: Tensor) -> Tensor:
        """Weighted mean of the next-token losses; both arguments are [rows, length + 1]."""
        hidden, targets = self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
        target_weights = weights[:, 1:].flatten()
        kept = target_weights.nonzero().squeeze(1)
        embedding = self.model.embed_tokens.weight.to(self.dtype)
        logits = F.linear(hidden[kept].to(self.dtype), embedding).float()  # [kept, vocab_size]
        losses = F.cross_entropy(logits, targets[kept], reduction="none")
        return losses @ target_weights[kept] / target_weights.sum()

    def hidden_matrices(self) -> list[nn.Parameter]:
        """The matrices inside the blocks: Muon's share; embedding and norms are AdamW's."""
        return [p for p in self.model.layers.parameters() if p.ndim == 2]

    def other_parameters(self) -> list[nn.Parameter]:
        matrices = {id(p) for p in self.hidden_matrices()}
        return [p for p in self.parameters() if id(p) not in matrices]


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz: every singular value of each [n, m] matrix goes to about 1 (Jordan, 2024)."""
    x = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if is_tall else x


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised, for 2-D weights (Jordan et al., 2024).

    Matrices of one shape are stacked and orthogonalised together: small ones are slow one by one.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.95):
        by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            by_shape[parameter.shape].append(parameter)
        groups = [{"params": same_shape} for same_shape in by_shape.values()]
        super().__init__(groups, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            updates = []
            for parameter in group["params"]:
                assert parameter.grad is not None, "step() before backward()"
                state = self.state[parameter]
                if not state:
                    state["velocity"] = torch.zeros_like(parameter)
                state["velocity"].lerp_(parameter.grad, 1 - group["momentum"])
                updates.append(parameter.grad.lerp(state["velocity"], group["momentum"]))
            stacked = orthogonalise(torch.stack(updates))
            rows, columns = stacked.shape[-2:]
            scale = max(1.0, rows / columns) ** 0.5
            for parameter, update in zip(group["params"], stacked, strict=True):
                parameter.add_(update, alpha=-group["lr"] * scale)
