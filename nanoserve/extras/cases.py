"""Which answers does the engine itself give? The oracles of notebooks 06, 09, 13, 15, 16.

An exercise ends with a check of the reader's answers against those of the real engine. Where that
takes more than a line, a function here has the inputs and the engine's answers:

    configs, oracle = packing()
    lesson.check("6.4", [my_rows(config) for config in configs], oracle)

No function here holds an answer: each builds a model, or runs one.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanoserve import SamplingParams
from nanoserve.attention import AttentionBackend, StepMetadata
from nanoserve.config import ModelConfig
from nanoserve.demo import MODEL_DIR
from nanoserve.extras import lesson, trace
from nanoserve.extras.speculative.proposer import TokenProposer
from nanoserve.extras.trace.model import placements
from nanoserve.layers import LayerConfig, RMSNorm, VocabParallelEmbedding
from nanoserve.models.base import Model
from nanoserve.models.registry import build_model
from nanoserve.parallel import ParallelState


class Cases(NamedTuple):
    """Inputs of a function, each a tuple of its arguments or one value, and the right answers."""

    inputs: list[Any]
    oracle: list[Any]


def meta_model(config: ModelConfig, rank: int = 0, tp_size: int = 1) -> Model:
    """The share of one rank in a model with shapes and no memory."""
    parallel = ParallelState(rank, tp_size)
    return build_model(config, 64, LayerConfig(device=torch.device("meta"), parallel=parallel))


def packing() -> Cases:
    """Three configurations; which rows of the packed matrices each name of a layer fills."""
    names = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    inputs, oracle = [], []
    for num_heads, num_kv_heads, head_dim, size in ((4, 2, 32, 384), (8, 8, 16, 64), (6, 1, 8, 40)):
        config = _config(
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=size,
        )
        rows = {place.name.split(".")[-2]: place.rows for place in placements(meta_model(config))}
        inputs.append(config)
        oracle.append({name: rows[name] for name in names})
    return Cases(inputs, oracle)


def _config(**values: Any) -> ModelConfig:
    """A Llama of one layer."""
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 32, "hidden_size": 48}
    config |= {"num_hidden_layers": 1, "max_position_embeddings": 64, **values}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        return ModelConfig.from_folder(Path(folder))


def norms() -> Cases:
    """(x, weight, eps) and what the layer RMSNorm makes of it; one x is all zeros."""
    generator = torch.Generator().manual_seed(0)
    inputs, oracle = [], []
    for eps, size in ((1e-6, 8), (0.5, 8), (1e-6, 0)):
        norm = RMSNorm(8, eps, LayerConfig())
        norm.weight.copy_(torch.randn(8, generator=generator))
        x = torch.randn(3, 8, generator=generator) * size
        inputs.append((x, norm.weight.detach(), eps))
        oracle.append(norm(x.clone()))
    return Cases(inputs, oracle)


def key_heads() -> Cases:
    """(head, num_heads, num_kv_heads) and the key head that this query head reads: the only one
    whose values change its output."""
    inputs, oracle = [], []
    for num_heads, num_kv_heads in ((4, 2), (6, 2), (3, 3), (8, 1)):
        for head in range(0, num_heads, 2):
            inputs.append((head, num_heads, num_kv_heads))
            oracle.append(_read_head(*inputs[-1]))
    return Cases(inputs, oracle)


def _read_head(head: int, num_heads: int, num_kv_heads: int) -> int:
    step = StepMetadata(*(torch.tensor(part) for part in ([0], [[0]], [0, 1], [1])))
    keys = torch.zeros(1, 1, num_kv_heads, 2)
    values = torch.arange(num_kv_heads)[:, None].expand_as(keys).float().contiguous()
    query = torch.ones(1, num_heads, 2)
    return int(AttentionBackend().attend(query, (keys, values), step, scale=1.0)[0, head, 0])


def copy_checkpoint(folder: Path, architecture: str) -> Path:
    """A copy of a checkpoint in which config.json names another architecture. It is deleted when
    Python ends."""
    home = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    copy = Path(shutil.copytree(folder, home / "copy", copy_function=shutil.copyfile))
    config = json.loads((copy / "config.json").read_text()) | {"architectures": [architecture]}
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def depths(
    model_cls: Any, folder: Path, most: tuple[int, ...] = (2, 4, 5)
) -> tuple[Any, Any, dict[Any, str]]:
    """The tokens of A with so many layers: by `model_cls`, whose attribute `depth` says how many,
    and by transformers; and a hint for a class that does not use `depth`. Shows what `model_cls`
    said."""
    from transformers import AutoModelForCausalLM

    mine, oracle = [], []
    for depth in most:
        model_cls.depth = depth
        with lesson.small_llm(model=folder) as llm:
            prompt = lesson.prompt(llm, "A")
            params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
            mine.append(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)
            print(f"{depth} layers: {llm.get_tokenizer().decode(mine[-1])!r}")
        with lesson.quietly():
            plain = AutoModelForCausalLM.from_pretrained(
                MODEL_DIR, dtype="float32", num_hidden_layers=depth, local_files_only=True
            )
        ids = torch.tensor([prompt])
        for _ in range(10):
            with torch.inference_mode():
                token = plain(ids).logits[0, -1].argmax()
            ids = torch.cat((ids, token[None, None]), dim=1)
        oracle.append(ids[0, len(prompt) :].tolist())
    same = "the depth changes nothing: does your loop run, and does it stop after `depth` layers?"
    return mine, oracle, {(tuple(mine[0]),) * len(mine): same}


# -- adapters --


def adapter_copy(**values: Any) -> Path:
    """A copy of the demo model's adapter in which adapter_config.json has these values. It is
    deleted when Python ends."""
    home = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    copy = Path(shutil.copytree(MODEL_DIR / "lora", home / "copy", copy_function=shutil.copyfile))
    file = copy / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return copy


def adapter_reads(order: str, room: int) -> int:
    """How many times an engine with one slot, and memory for `room` adapters, reads one from disk,
    if requests come one after the other and want these: "pqp"."""
    from nanoserve.extras.lora import manager, request

    reads, right = [], manager.Adapter.load

    def load(adapter: manager.Adapter) -> Any:
        reads.append(adapter)
        return right(adapter)

    options = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": room, "max_lora_rank": 8}
    params = SamplingParams(max_tokens=1)
    setattr(manager.Adapter, "load", load)  # noqa: B010 (mypy)
    try:
        with lesson.small_llm(**options) as llm:
            for name in order:
                wish = request.LoRARequest(name, ord(name), str(MODEL_DIR / "lora"))
                llm.generate([[5, 6]], params, lora_request=wish, use_tqdm=False)
    finally:
        setattr(manager.Adapter, "load", right)  # noqa: B010
    return len(reads)


# -- quantization --


def rounded(weight: Tensor, bits: int, group_size: int | None = None) -> Tensor:
    """[out, in] with each group of neighbours in a row (None: the row) rounded to codes of so many
    bits, without zeros: the largest size becomes the largest code."""
    groups = weight.unflatten(1, (-1, group_size or weight.shape[1]))
    scales = groups.abs().amax(dim=2, keepdim=True) / (2 ** (bits - 1) - 1)
    return (groups / scales).round().mul(scales).flatten(1)


def rounded_checkpoint(bits: int, group_size: int | None = None) -> Path:
    """A copy of the demo model, in float32, whose linear layers are rounded. It is deleted when
    Python ends."""
    copy = copy_checkpoint(MODEL_DIR, "Qwen3ForCausalLM")
    tensors = {name: t.float() for name, t in load_file(copy / "model.safetensors").items()}
    for name in tensors:
        if name.endswith("_proj.weight"):
            tensors[name] = rounded(tensors[name], bits, group_size)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def product_times(
    products: dict[str, Callable[[Tensor], Tensor]], num_inputs: int, sizes: tuple[int, ...]
) -> dict[tuple[str, int], float]:
    """(name, number of tokens) -> seconds of the fastest product of some, made in turns."""
    seconds: dict[tuple[str, int], float] = {}
    for size in sizes:
        x = torch.randn(size, num_inputs)
        for _ in range(4 + 20 // size):
            for name, product in products.items():
                started = perf_counter()
                product(x)
                taken = perf_counter() - started
                seconds[name, size] = min(taken, seconds.get((name, size), taken))
    return seconds


# -- several ranks --


def steps(llm: Any) -> Cases:
    """(tokens, sampled rows) of the steps that answer A, and then B and C; and what each sent: rank
    0's bytes by the name of the operation, without the control messages."""
    engine, sent = llm.engine, llm.engine.executor.runner.parallel.comm_stats.num_bytes
    params = SamplingParams(temperature=0, max_tokens=3)
    inputs: list[Any] = []
    oracle: list[Any] = []
    before = sent.copy()

    def note(report: Any) -> None:
        nonlocal before
        num_tokens = report.scheduler_output.total_num_scheduled_tokens
        inputs.append((num_tokens, sum(len(update.new_token_ids) for update in report.updates)))
        difference = sent - before
        oracle.append({n: difference[n] for n in ("all_reduce", "gather", "broadcast")})
        before = sent.copy()

    engine.step_listeners.append(note)
    try:
        for names in ("A", "BC"):
            llm.generate([lesson.prompt(llm, name) for name in names], params, use_tqdm=False)
    finally:
        engine.step_listeners.remove(note)
    return Cases(inputs, oracle)


def steps_in_flight(llm: Any, number: int) -> Any:
    """The scheduler's calls (trace.calls) while A, B, C and D decode with so many steps in flight
    at most."""
    engine = llm.engine
    before = engine.batch_queue_size
    engine.batch_queue_size = engine.scheduler.max_concurrent_batches = number
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    for name in "ABCD":
        llm.add_request(name, lesson.prompt(llm, name), params)
    while not all(seq.num_output_tokens for seq in engine.scheduler.sequences.values()):
        llm.step()
    with trace.calls(llm) as events:
        while llm.has_unfinished_requests():
            llm.step()
    engine.batch_queue_size = engine.scheduler.max_concurrent_batches = before
    return events


def embedding_parts() -> Cases:
    """(token ids, the rows of the embedding on this rank, its first token id) of three ranks, and
    what each rank gives to the sum."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(10, 4, generator=generator)
    ids = torch.tensor([0, 9, 3, 4, 7, 3])
    inputs, oracle = [], []
    for rank in range(3):  # no process groups: all_reduce gives back this rank's own part
        layer = VocabParallelEmbedding(10, 4, LayerConfig(parallel=ParallelState(rank, 3)))
        [(_, shard)] = layer.shards("embed_tokens")
        shard.target.copy_(whole[shard.slices])
        inputs.append((ids, layer.weight[: layer.num_tokens].detach(), layer.start))
        oracle.append(layer(ids))
    return Cases(inputs, oracle)


def key_head_shares() -> Cases:
    """(rank, number of ranks, number of key heads) and the key heads that this rank holds."""
    inputs, oracle = [], []
    for tp_size, num_kv_heads in ((2, 2), (2, 8), (4, 2), (8, 4)):
        for rank in range(tp_size):
            inputs.append((rank, tp_size, num_kv_heads))
            start, size = ParallelState(rank, tp_size).shard_range(num_kv_heads, "heads", 1)
            oracle.append(list(range(start, start + size)))
    return Cases(inputs, oracle)


# -- speculative decoding --


class Oracle(TokenProposer):
    """Knows what comes, and says `num_right` true drafts and then wrong ones."""

    text: ClassVar[tuple[int, ...]] = ()  # prompt and answer
    num_right: ClassVar[int] = 0

    def propose_one(self, seq_id: int, token_ids: Any, most: int) -> list[int]:
        drafts = Oracle.text[len(token_ids) :][:most]
        return [t if i < Oracle.num_right else t + 1 for i, t in enumerate(drafts)]


def verify_times(
    prompt: list[int], batches: tuple[int, ...], drafts: tuple[int, ...], rounds: int = 5
) -> dict[tuple[int, int], float]:
    """(sequences, drafts of each) -> seconds of the fastest step that computed so many. The
    sequences are copies of the one that Oracle knows."""
    times: dict[tuple[int, int], float] = {}
    Oracle.num_right = max(drafts)
    for k in drafts:
        config = {"method": "custom_class", "model": f"{__name__}.Oracle"}
        options: dict[str, Any] = {
            "max_num_seqs": max(batches),
            "enable_prefix_caching": False,
            "speculative_config": {**config, "num_speculative_tokens": k} if k else None,
        }
        with lesson.small_llm(16 * max(batches), **options) as llm:

            def note(report: Any, k: int = k) -> None:
                batch = len(report.scheduler_output.scheduled)
                num_tokens = report.scheduler_output.total_num_scheduled_tokens
                if num_tokens == batch * (1 + k):  # not the prompts, not the end
                    seconds = report.schedule_time + report.execute_time + report.update_time
                    times[batch, k] = min(seconds, times.get((batch, k), seconds))

            llm.engine.step_listeners.append(note)
            params = SamplingParams(
                temperature=0, max_tokens=len(Oracle.text) - len(prompt), ignore_eos=True
            )
            for batch in batches * rounds:
                llm.generate([prompt] * batch, params, use_tqdm=False)
    return times
