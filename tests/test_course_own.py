"""Lab 13 of the course kit: a right file of each kind earns all, mistakes lose points, skeletons
earn nothing. The files are the answer of a lecturer; no student's tree has them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("nanoserve.extras.course.labs.own_13")

from course_sample import sample

from nanoserve.extras.course.grader import Outcome
from nanoserve.extras.course.labs.own_13 import LAB, PARTS
from nanoserve.extras.course.spec import Setting

MY_MODEL = """
from torch import nn

from nanoserve.kv_cache import KVCacheSpec
from nanoserve.layers import ColumnParallelLinear, RMSNorm, RowParallelLinear
from nanoserve.layers import VocabParallelEmbedding
from nanoserve.models.base import Model
from nanoserve.models.registry import ModelRegistry


class Block(nn.Module):
    def __init__(self, config, layer_config):
        super().__init__()
        hidden, dim, inner = config.hidden_size, config.head_dim, config.intermediate_size
        shard_range = layer_config.parallel.shard_range
        _, num_kv_heads = shard_range(config.num_kv_heads, "key and value heads", 1)
        self.kv_cache_spec = KVCacheSpec(num_kv_heads, dim, dim)
        self.backend, self.head_dim = layer_config.attention, dim
        query, kv = config.num_heads * dim, config.num_kv_heads * dim
        outputs = {"query": query, "key": kv, "value": kv}
        self.norm = RMSNorm(hidden, config.rms_norm_eps, layer_config)
        self.qkv = ColumnParallelLinear(
            hidden, outputs, bias=False, layer_config=layer_config, unit=dim
        )
        self.out = RowParallelLinear(query, hidden, bias=False, layer_config=layer_config)
        self.up = ColumnParallelLinear(
            hidden, {"up": inner}, bias=False, layer_config=layer_config
        )
        self.down = RowParallelLinear(inner, hidden, bias=False, layer_config=layer_config)

    def forward(self, x, kv_cache, metadata):
        y = self.norm(x)
        parts = self.qkv(y, metadata).split(self.qkv.sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        self.backend.store(k, v, kv_cache, metadata)
        z = self.backend.attend(q, kv_cache, metadata, scale=self.head_dim**-0.5)
        mixed = self.out(z.flatten(1), metadata)
        return x + mixed + self.down(self.up(y, metadata).relu().square(), metadata)


class ParallelForCausalLM(Model):
    def __init__(self, config, max_model_len, layer_config):
        super().__init__()
        hidden, longest = config.hidden_size, config.max_position_embeddings
        self.embed = VocabParallelEmbedding(config.vocab_size, hidden, layer_config)
        self.embed_positions = VocabParallelEmbedding(longest, hidden, layer_config)
        self.layers = nn.ModuleList(Block(config, layer_config) for _ in range(config.num_layers))
        self.norm = RMSNorm(hidden, config.rms_norm_eps, layer_config)

    def forward(self, input_ids, positions, kv_caches, metadata):
        x = self.embed(input_ids) + self.embed_positions(positions)
        for layer, kv_cache in zip(self.layers, kv_caches):
            x = layer(x, kv_cache, metadata)
        return self.norm(x)

    def compute_logits(self, hidden):
        return self.embed.compute_logits(hidden)


ModelRegistry.register("ParallelForCausalLM", ParallelForCausalLM)
"""
MY_SCHEDULER = """
from nanoserve.scheduler import Scheduler


class DeadlineScheduler(Scheduler):
    def urgency(self, seq):
        priority = seq.priority if self.by_priority else 0
        deadline = seq.metrics.queued_ts + 0.5 * seq.num_prompt_tokens
        return (priority, deadline, seq.seq_id)

    def _num_tokens_to_admit(self, num_uncomputed, step):
        number = super()._num_tokens_to_admit(num_uncomputed, step)
        half = max(1, self.token_budget // 2)
        return min(number, half) if self.enable_chunked_prefill else number
"""
MY_ATTENTION = """
import torch

from nanoserve.attention import AttentionBackend


class AlibiBackend(AttentionBackend):
    name = "alibi"

    def attend(
        self, query, kv_cache, metadata, *, scale, sliding_window=None, logits_soft_cap=None
    ):
        block_size, kv_heads = kv_cache[0].shape[1:3]
        num_heads = query.shape[1]
        output = query.new_empty(*query.shape[:2], kv_cache[1].shape[-1])
        slope = 2.0 ** (-8.0 * torch.arange(1, num_heads + 1) / num_heads)
        for i, length in enumerate(metadata.seq_lens.tolist()):
            start, end = metadata.query_start_loc[i : i + 2].tolist()
            position = torch.arange(length)
            block = metadata.block_table[i, position // block_size].long()
            key, value = (cache[block, position % block_size] for cache in kv_cache)
            key = key.repeat_interleave(num_heads // kv_heads, dim=1)
            value = value.repeat_interleave(num_heads // kv_heads, dim=1)
            score = torch.einsum("qhd,khd->hqk", query[start:end], key) * scale
            if logits_soft_cap is not None:
                score = logits_soft_cap * torch.tanh(score / logits_soft_cap)
            distance = position[length - (end - start) :, None] - position
            score = score - slope[:, None, None] * distance
            hidden = distance < 0
            if sliding_window is not None:
                hidden |= distance >= sliding_window
            weight = score.masked_fill(hidden, -torch.inf).softmax(dim=-1)
            output[start:end] = torch.einsum("hqk,khd->qhd", weight, value)
        return output
"""
FILES = {"13.1": MY_MODEL, "13.2": MY_SCHEDULER, "13.3": MY_ATTENTION}
# (task, mistake, a piece of the file, what stands there instead)
MISTAKES = [
    (
        "13.1",
        "the MLP reads what attention has added",
        "self.up(y,",
        "self.up(self.norm(x + mixed),",
    ),
    ("13.1", "ReLU is not squared", ".relu().square()", ".relu()"),
    ("13.1", "the residual is left out", "return x + mixed", "return mixed"),
    ("13.1", "keys and values are not stored", "self.backend.store(k, v, kv_cache, metadata)", ""),
    (
        "13.1",
        "key and value are exchanged",
        'kv, "value": kv}',
        'kv, "value": kv}\n        outputs = {"query": query, "value": kv, "key": kv}',
    ),
    ("13.1", "no last norm", "return self.norm(x)", "return x"),
    (
        "13.1",
        "the position is the place in the step",
        "self.embed_positions(positions)",
        "self.embed_positions(input_ids.new_ones(len(input_ids)).cumsum(0) - 1)",
    ),
    ("13.1", "never registered", 'ModelRegistry.register("Parallel', 'ModelRegistry.register("My'),
    ("13.1", "a name that the checkpoint does not have", '{"up": inner}', '{"up_proj": inner}'),
    (
        "13.1",
        "all KV heads on each rank",
        "KVCacheSpec(num_kv_heads",
        "KVCacheSpec(config.num_kv_heads",
    ),
    ("13.2", "shortest first: starvation", "seq.metrics.queued_ts + 0.5 *", "0.5 *"),
    ("13.2", "the longest first", "+ 0.5 * seq", "- 0.5 * seq"),
    ("13.2", "first come, first served", " + 0.5 * seq.num_prompt_tokens", ""),
    ("13.2", "all tokens count, so the key changes", "seq.num_prompt_tokens", "seq.num_tokens"),
    (
        "13.2",
        "the priority always counts",
        "seq.priority if self.by_priority else 0",
        "seq.priority",
    ),
    ("13.2", "half of what is left", "self.token_budget // 2", "step.budget // 2"),
    ("13.2", "not even one token", "max(1, self.token_budget // 2)", "self.token_budget // 2"),
    ("13.2", "divided although chunks are off", " if self.enable_chunked_prefill else number", ""),
    ("13.3", "one slope for all heads", "slope[:, None, None]", "slope[0]"),
    ("13.3", "heads count from 0", "torch.arange(1, num_heads + 1)", "torch.arange(num_heads)"),
    ("13.3", "farther keys weigh more", "score - slope", "score + slope"),
    (
        "13.3",
        "the bias is capped, too",
        "score = logits_soft_cap",
        "score = score - slope[:, None, None] * (length - 1 - position)\n"
        "                score = logits_soft_cap",
    ),
    (
        "13.3",
        "KV heads are repeated in the wrong order",
        "key = key.repeat_interleave(num_heads // kv_heads, dim=1)",
        "key = key.repeat(1, num_heads // kv_heads, 1)",
    ),
    (
        "13.3",
        "a chunk stands at the beginning",
        "position[length - (end - start) :, None]",
        "position[: end - start, None]",
    ),
    (
        "13.3",
        "the slot is taken for the position",
        "metadata.block_table[i, position // block_size]",
        "(position // block_size)",
    ),
    (
        "13.3",
        "the window is one too wide",
        "distance >= sliding_window",
        "distance > sliding_window",
    ),
]


def grade(folder: Path, files: dict[str, str]) -> list[Outcome]:
    for number, source in files.items():
        (folder / PARTS[number].file).write_text(source, encoding="utf-8")
    outcomes: list[Outcome] = LAB.exercise.grade(LAB, folder, Setting(seed=3))  # type: ignore[union-attr]
    return outcomes


def show(outcomes: list[Outcome]) -> str:
    return "\n".join(f"{each.behaviour.name}: {each.message}" for each in outcomes)


@pytest.mark.slow
def test_a_right_policy_earns_its_points_and_a_missing_file_costs_its_own(tmp_path: Path) -> None:
    outcomes = grade(tmp_path, {"13.2": MY_SCHEDULER})
    for each in outcomes:
        if each.task.number == "13.2":
            assert each.status == "right", show(outcomes)
        else:
            assert each.message == f"your submission has no file {each.task.name}."


@pytest.mark.slow
def test_right_files_earn_all_points(tmp_path: Path) -> None:
    outcomes = grade(tmp_path, FILES)
    assert sum(each.score for each in outcomes) == 15, show(outcomes)


@pytest.mark.slow
def test_skeletons_earn_nothing(tmp_path: Path) -> None:
    skeletons = {number: part.skeleton for number, part in PARTS.items()}
    outcomes = grade(tmp_path, skeletons)
    assert not any(each.score for each in outcomes), show(outcomes)
    assert {each.status for each in outcomes if each.task.number != "13.1"} == {"missing"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "mistake", "right", "wrong"), sample(MISTAKES, lambda each: each[0])
)
def test_each_mistake_costs_points(
    number: str, mistake: str, right: str, wrong: str, tmp_path: Path
) -> None:
    source = FILES[number]
    assert source.count(right) == 1, mistake
    outcomes = grade(tmp_path, {number: source.replace(right, wrong)})
    lost = [each for each in outcomes if each.task.number == number and each.status != "right"]
    assert lost, "nobody saw it"
    assert all(each.message for each in lost)
