"""Lab 13, Parts of your own: a model, a scheduling policy and an attention backend.

These are the three exercises that end the source analysis of vLLM. Each is one file, which a
student writes from a skeleton; the engine stays as it is:

    my_model.py        ParallelForCausalLM(Model)     through ModelRegistry.register
    my_scheduler.py    DeadlineScheduler(Scheduler)   through LLM(scheduler_cls=...)
    my_attention.py    AlibiBackend(AttentionBackend) through LLM(attention_backend=...)

The model is held against a dozen lines of plain torch, step by step through the paged cache. The
scheduler runs on the fake model, which reads its tokens back out of the blocks. The backend is held
against a loop over single numbers, and then runs the demo model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanoserve.attention import AttentionBackend, KVCache, StepMetadata
from nanoserve.config import ModelConfig
from nanoserve.extras.course.labs.board import Board
from nanoserve.extras.course.spec import Behaviour, Exercise, Lab, Setting, Task, Wrong, must
from nanoserve.layers import LayerConfig
from nanoserve.models.base import Model
from nanoserve.models.registry import ModelRegistry, build_model
from nanoserve.parallel import ParallelState
from nanoserve.scheduler import Scheduler

ARCHITECTURE = "ParallelForCausalLM"
MY_MODEL = '''"""My model: attention and MLP side by side, both behind one norm.

    x = embed[token] + embed_positions[position]
    in each layer:    y = norm(x)    x = x + out(attention(query(y), key(y), value(y)))
                                           + down(relu(up(y)) ** 2)
    logits = embed . norm(x)          no rotary embedding; the scale is head_dim ** -0.5

Weights of its checkpoint, each without a bias (i: a layer from 0 on):

    embed.weight                [vocab_size, hidden_size]      also the head
    embed_positions.weight      [max_position_embeddings, hidden_size]
    layers.i.norm.weight        [hidden_size]                  RMSNorm, eps of the config
    layers.i.query.weight       [num_heads * head_dim, hidden_size]
    layers.i.key.weight, layers.i.value.weight    [num_kv_heads * head_dim, hidden_size]
    layers.i.out.weight         [hidden_size, num_heads * head_dim]
    layers.i.up.weight          [intermediate_size, hidden_size]
    layers.i.down.weight        [hidden_size, intermediate_size]
    norm.weight                 [hidden_size]

Use the layers of nanoserve/layers.py: they say which weights fill them (`shards`), also on several
ranks. A module that attends has a `kv_cache_spec`. "Add your own model" in nanoserve/GUIDE.md has a
smaller example.
"""

from nanoserve.models.base import Model
from nanoserve.models.registry import ModelRegistry


class ParallelForCausalLM(Model):
    def __init__(self, config, max_model_len, layer_config):
        super().__init__()
        raise NotImplementedError("13.1: ParallelForCausalLM")

    def forward(self, input_ids, positions, kv_caches, metadata):
        """[num_tokens] each -> hidden states [num_tokens, hidden_size]."""
        raise NotImplementedError("13.1: ParallelForCausalLM.forward")

    def compute_logits(self, hidden):
        """[num_rows, hidden_size] -> [num_rows, vocab_size]."""
        raise NotImplementedError("13.1: ParallelForCausalLM.compute_logits")


# Here: let ModelRegistry know it under the name "ParallelForCausalLM".
'''
MY_SCHEDULER = '''"""My policy: the earliest deadline first.

The longer a prompt, the more time its request has:

    deadline = arrival (seq.metrics.queued_ts) + SECONDS_PER_TOKEN * tokens of the prompt

A short prompt overtakes a long one that came a little earlier; but nobody waits for ever, because
a request that comes later than another one's deadline cannot overtake it. Under the "priority"
policy (self.by_priority) the priority comes first, and the deadline decides among equals.

And a prompt shares: in the step that admits a sequence, it gets half of self.token_budget at most
(rounded down, but one token at least). Where chunked prefill is off, a prompt is not divided, so
this rule does not hold there. All other limits stay as they are.
"""

from nanoserve.scheduler import Scheduler

SECONDS_PER_TOKEN = 0.5


class DeadlineScheduler(Scheduler):
    def urgency(self, seq):
        """The sort key, most urgent first. It never changes while a sequence lives, and no two
        sequences have the same one (seq.seq_id)."""
        raise NotImplementedError("13.2: DeadlineScheduler.urgency")

    def _num_tokens_to_admit(self, num_uncomputed, step):
        """How many of its uncomputed tokens a sequence gets in the step that admits it."""
        raise NotImplementedError("13.2: DeadlineScheduler._num_tokens_to_admit")
'''
MY_ATTENTION = '''"""My attention backend: ALiBi (arXiv 2108.12409), in plain torch.

Each key's score gets smaller with its distance from the query, at a slope that differs by head:

    score(query at position i, key at position j) = q . k * scale - slope[head] * (i - j)
    slope[head] = 2 ** (-8 * (head + 1) / num_heads)           head: 0 to num_heads - 1

With logits_soft_cap the product q . k * scale is brought between -cap and cap before that. All else
is as nanoserve/attention.py says; it is the base, so override what changes, and inherit the rest.
"""

from nanoserve.attention import AttentionBackend


class AlibiBackend(AttentionBackend):
    name = "alibi"

    def attend(
        self, query, kv_cache, metadata, *, scale, sliding_window=None, logits_soft_cap=None
    ):
        """[num_tokens, num_heads, key_dim] -> [num_tokens, num_heads, value_dim]."""
        raise NotImplementedError("13.3: AlibiBackend.attend")
'''


class Part(NamedTuple):
    """One of the three files."""

    file: str
    skeleton: str
    name: str  # of the class
    base: type
    engine_files: tuple[str, ...]  # what these assign, the file may assign, too
    task: Task


MODEL = Task("13.1", "", "my_model.py")
POLICY = Task("13.2", "", "my_scheduler.py")
ATTENTION = Task("13.3", "", "my_attention.py")
SCHEDULER_FILES = ("nanoserve/scheduler.py", "nanoserve/sequence.py")
PARTS = {
    part.task.number: part
    for part in (
        Part(MODEL.name, MY_MODEL, ARCHITECTURE, Model, (), MODEL),
        Part(POLICY.name, MY_SCHEDULER, "DeadlineScheduler", Scheduler, SCHEDULER_FILES, POLICY),
        Part(ATTENTION.name, MY_ATTENTION, "AlibiBackend", AttentionBackend, (), ATTENTION),
    )
}


# -- 13.1: a model --

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INNER, LONGEST = 50, 32, 2, 4, 2, 8, 48, 64
HF_CONFIG = {
    "architectures": [ARCHITECTURE],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": INNER,
    "max_position_embeddings": LONGEST,
    "rms_norm_eps": 1e-3,
}
BLOCK_SIZE = 4


@cache
def weights() -> dict[str, Tensor]:
    """A checkpoint of the architecture."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (VOCAB, HIDDEN),
        "embed_positions.weight": (LONGEST, HIDDEN),
        "norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        sizes = {
            "norm": (HIDDEN,),
            "query": (HEADS * HEAD_DIM, HIDDEN),
            "key": (KV_HEADS * HEAD_DIM, HIDDEN),
            "value": (KV_HEADS * HEAD_DIM, HIDDEN),
            "out": (HIDDEN, HEADS * HEAD_DIM),
            "up": (INNER, HIDDEN),
            "down": (HIDDEN, INNER),
        }
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in sizes.items()}
    generator = torch.Generator().manual_seed(3)
    return {name: 0.3 * torch.randn(*s, generator=generator) for name, s in shapes.items()}


def plain_logits(token_ids: list[int]) -> Tensor:
    """The same model in plain torch, without a cache: [num_tokens, VOCAB]."""
    w, number = weights(), len(token_ids)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight

    x = w["embed.weight"][token_ids] + w["embed_positions.weight"][:number]
    hidden = torch.ones(number, number).triu(1).bool()
    for layer in range(LAYERS):
        own = {name: w[f"layers.{layer}.{name}.weight"] for name in ("norm", "query", "key")}
        own |= {name: w[f"layers.{layer}.{name}.weight"] for name in ("value", "out", "up", "down")}
        y = norm(x, own["norm"])
        q = (y @ own["query"].T).unflatten(-1, (HEADS, HEAD_DIM))
        k, v = (
            (y @ own[name].T)
            .unflatten(-1, (KV_HEADS, HEAD_DIM))
            .repeat_interleave(HEADS // KV_HEADS, dim=1)
            for name in ("key", "value")
        )
        score = torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
        mixed = torch.einsum("hqk,khd->qhd", score.masked_fill(hidden, -torch.inf).softmax(-1), v)
        x = x + mixed.flatten(1) @ own["out"].T + (y @ own["up"].T).relu().square() @ own["down"].T
    return norm(x, w["norm.weight"]) @ w["embed.weight"].T


def make_model(parallel: ParallelState | None = None) -> Model:
    """The student's model, as the loader builds it: through the registry."""
    found = ModelRegistry.get(ARCHITECTURE)
    must(found is not None, f"ModelRegistry has no {ARCHITECTURE}: register your class")
    config = ModelConfig.from_folder(Path(), HF_CONFIG)
    layer_config = LayerConfig(parallel=parallel or ParallelState())
    with torch.inference_mode():
        return build_model(config, LONGEST, layer_config)


def fill(model: Model) -> None:
    """Copy the checkpoint's tensors, as the loader does. Raises Wrong for names that differ."""
    wanted, places = weights(), list(model.shards())
    names = {name for name, _ in places}
    missing, unknown = sorted(set(wanted) - names), sorted(names - set(wanted))
    must(not missing, f"nothing in your model is filled by {missing}; `shards` names {unknown}")
    must(not unknown, f"your model asks for {unknown}, which the checkpoint does not have")
    for name, shard in places:
        shape = tuple(wanted[name].shape)
        must(
            tuple(shard.full_shape) == shape,
            f"{name} has the shape {shape}, and your model asks for {tuple(shard.full_shape)}",
        )
        shard.target.copy_(wanted[name][shard.slices])


class Runner:
    """The model beside its paged cache; each sequence has scattered blocks of its own."""

    def __init__(self) -> None:
        self.model = make_model()
        with torch.inference_mode():
            fill(self.model)
            specs = self.model.kv_cache_specs()
            must(
                len(specs) == LAYERS,
                f"the model has {LAYERS} layers, and {len(specs)} modules have a kv_cache_spec",
            )
            cpu = torch.device("cpu")
            self.caches = [spec.allocate(64, BLOCK_SIZE, torch.float32, cpu) for spec in specs]
        blocks = list(range(64))
        random.Random(1).shuffle(blocks)
        self.tables = [blocks[16 * number : 16 * (number + 1)] for number in range(4)]

    @torch.inference_mode()
    def step(self, parts: Mapping[int, tuple[int, list[int]]]) -> list[Tensor]:
        """One step: sequence -> (its tokens that are computed, the next ones). Returns the logits
        of each part."""
        metadata, positions = make_metadata(
            [(self.tables[seq], start, len(ids)) for seq, (start, ids) in parts.items()]
        )
        input_ids = torch.tensor([token for _, ids in parts.values() for token in ids])
        hidden = self.model(input_ids, positions, self.caches, metadata)
        expected = (len(input_ids), HIDDEN)
        must(
            tuple(hidden.shape) == expected,
            f"forward returns a tensor of shape {tuple(hidden.shape)}, and not {expected}",
        )
        logits = self.model.compute_logits(hidden)
        expected = (len(input_ids), VOCAB)
        must(tuple(logits.shape) == expected, f"the logits have the shape {tuple(logits.shape)}")
        return list(logits.split([len(ids) for _, ids in parts.values()]))


def make_metadata(parts: list[tuple[list[int], int, int]]) -> tuple[StepMetadata, Tensor]:
    """(metadata, positions) of a step; parts: (block table, tokens before, tokens now)."""
    positions = [range(start, start + number) for _, start, number in parts]
    slots = [
        table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for (table, _, _), own in zip(parts, positions, strict=True)
        for position in own
    ]
    starts = [0]
    for _, _, number in parts:
        starts.append(starts[-1] + number)
    metadata = StepMetadata(
        torch.tensor(slots),
        torch.tensor([table for table, _, _ in parts], dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor([start + number for _, start, number in parts], dtype=torch.int32),
    )
    return metadata, torch.tensor([position for own in positions for position in own])


def compare(got: Tensor, right: Tensor, what: str) -> None:
    error = float((got - right).abs().max())
    must(
        error < 1e-3 * float(right.std()),
        f"{what}: the logits differ from those of plain torch by up to {error:.3g} (they spread "
        f"by {float(right.std()):.3g})",
    )


def tokens(number: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(number)]


@MODEL.behaviour(0.5, "the registry knows it, and it has the checkpoint's names and shapes")
def filled(cls: type) -> None:
    model = make_model()
    must(
        isinstance(model, cls), f"the registry has {type(model).__name__}, which is not the file's"
    )
    with torch.inference_mode():
        fill(model)


@MODEL.behaviour(1.5, "a prompt in one step")
def whole_prompt(cls: type) -> None:
    prompt = tokens(11)
    [logits] = Runner().step({0: (0, prompt)})
    compare(logits[:1], plain_logits(prompt)[:1], "the first of 11 tokens")
    compare(logits, plain_logits(prompt), "a prompt of 11 tokens")


@MODEL.behaviour(1.5, "chunks, decodes and other sequences in the same step")
def chunks(cls: type) -> None:
    runner, one, two = Runner(), tokens(9, 1), tokens(10, 2)
    runner.step({0: (0, one[:5])})
    first, second = runner.step({0: (5, one[5:8]), 1: (0, two[:7])})
    compare(first, plain_logits(one)[5:8], "tokens 5 to 7 of a sequence, in a second step")
    compare(second, plain_logits(two)[:7], "a prompt beside another sequence's chunk")
    second, first = runner.step({1: (7, two[7:]), 0: (8, one[8:])})
    compare(first, plain_logits(one)[8:], "a decode")
    compare(second, plain_logits(two)[7:], "the last three tokens of the other one")


@MODEL.behaviour(0.5, "each of two ranks holds its part")
def two_ranks(cls: type) -> None:
    model = make_model(ParallelState(1, 2))
    [spec, *_] = model.kv_cache_specs()
    must(spec.num_kv_heads == 1, f"2 KV heads, 2 ranks: one each, and not {spec.num_kv_heads}")
    shapes = {name: tuple(shard.target.shape) for name, shard in model.shards()}
    for name, right in {
        "query": (16, 32),
        "out": (32, 16),
        "up": (24, 32),
        "down": (32, 24),
    }.items():
        got = shapes.get(f"layers.0.{name}.weight")
        must(got == right, f"layers.0.{name}.weight, rank 1 of 2: the part is {right}, not {got}")


@MODEL.behaviour(1, "any steps", is_property=True)
def any_steps(cls: type, seed: int) -> None:
    rng, runner = random.Random(seed), Runner()
    texts = [tokens(rng.randint(1, 40), rng.randrange(99)) for _ in range(4)]
    done = [0] * 4
    while any(number < len(text) for number, text in zip(done, texts, strict=True)):
        unfinished = [seq for seq in range(4) if done[seq] < len(texts[seq])]
        parts = {}
        for seq in rng.sample(unfinished, rng.randint(1, len(unfinished))):
            start, number = done[seq], rng.choice([1, 1, 3, 20])
            parts[seq] = (start, texts[seq][start : start + number])
        for (seq, (start, ids)), logits in zip(parts.items(), runner.step(parts), strict=True):
            done[seq] = start + len(ids)
            what = f"tokens {start} to {done[seq] - 1} of a sequence, in a step of {len(parts)}"
            compare(logits, plain_logits(texts[seq])[start : done[seq]], what)


# -- 13.2: a scheduling policy --

SECONDS_PER_TOKEN = 0.5


class PolicyBoard(Board):
    """A board with the student's scheduler. Requests arrive a second apart."""

    policy: type[Scheduler] = Scheduler

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.scheduler = self.policy(self.config, self.manager)

    def check_step(self, step: Any) -> None:
        """The limits are those of the configuration."""
        total, most = step.total_num_scheduled_tokens, self.config.max_num_batched_tokens
        counted = sum(item.num_scheduled_tokens for item in step.scheduled)
        must(counted == total, f"the step has {counted} tokens, and says {total}" + self.show())
        must(
            total <= (most or 0), f"the step has {total} tokens, the budget is {most}" + self.show()
        )
        number, most = len(self.scheduler.running), self.config.max_num_seqs
        must(number <= (most or 0), f"{number} sequences run, max_num_seqs is {most}" + self.show())

    def deadline(self, number: int) -> float:
        """Of the request that came as this one."""
        seq = self.all[number]
        return seq.metrics.queued_ts + SECONDS_PER_TOKEN * seq.num_prompt_tokens


def board_of(cls: type) -> type[PolicyBoard]:
    return type("OwnBoard", (PolicyBoard,), {"policy": cls})


def order_of(board: Board) -> str:
    """The waiting requests, most urgent first."""
    return "".join(seq.request_id for seq in board.scheduler.waiting)


@POLICY.behaviour(0.5, "a short prompt overtakes a long one that came a little earlier")
def overtakes(cls: type) -> None:
    board = board_of(cls)()
    for length in (20, 4, 12):
        board.add(length, 3)
    got = order_of(board)
    must(
        got == "BCA",
        f"prompts of 20, 4 and 12 tokens came at 0, 1 and 2 s, so the deadlines of A, B and C are "
        f"{[board.deadline(i) for i in range(3)]}: the order is BCA, and not {got}",
    )


@POLICY.behaviour(0.5, "the key of a request never changes, and is nobody else's")
def fixed_key(cls: type) -> None:
    board = board_of(cls)()
    one, other = board.add(8, 9), board.add(8, 9)
    other.metrics.queued_ts = one.metrics.queued_ts
    before, same = board.scheduler.urgency(one), board.scheduler.urgency(other)
    must(before != same, f"A and B came at the same moment, and both have the key {same}")
    board.step(3)
    after = board.scheduler.urgency(one)
    must(before == after, f"waiting, A has the key {before}; after three steps it is {after}")


@POLICY.behaviour(1, "nobody waits for ever")
def no_starvation(cls: type) -> None:
    board = board_of(cls)(max_num_seqs=1)
    first = board.add(40, 2)
    while not first.num_output_tokens:
        late = board.add(2, 1)
        board.step()
        must(
            late.metrics.queued_ts < 25,
            "A has 40 tokens, so its deadline is 20 s; requests that came later than that still "
            "overtake it, one after the other: it never runs",
        )


@POLICY.behaviour(0.5, "under the priority policy the priority comes first")
def priority_first(cls: type) -> None:
    board = board_of(cls)(scheduling_policy="priority")
    other = board_of(cls)()
    for each, right in ((board, "CBA"), (other, "ABC")):
        keys = []
        for number, priority in enumerate((1, 0, -1)):
            seq = each.add(4, 3)
            seq.priority = priority
            keys.append((each.scheduler.urgency(seq), "ABC"[number]))
        got = "".join(name for _, name in sorted(keys))
        policy = each.config.scheduling_policy
        must(
            got == right, f"policy {policy!r}, priorities 1, 0, -1: the order is {right}, not {got}"
        )


@POLICY.behaviour(1, "a prompt gets half of the budget when it is admitted")
def shares(cls: type) -> None:
    board = board_of(cls)(budget=16)
    board.add(20, 3)
    board.add(4, 3)
    got = board.num_scheduled(board.step())
    must(got == {"B": 4, "A": 8}, f"budget 16, A has 20 tokens and B 4: B 4 and A 8, not {got}")
    board = board_of(cls)(budget=16)
    board.add(4, 9)
    board.add(20, 3)
    board.add(14, 3)
    got = board.num_scheduled(board.step())
    must(
        got == {"A": 4, "C": 8, "B": 4},
        f"budget 16, prompts of 4, 20 and 14 tokens: A 4, C 8, and B what is left, 4; not {got}",
    )
    board = board_of(cls)(budget=1, max_num_seqs=1)
    board.add(3, 2)
    got = board.num_scheduled(board.step())
    must(got == {"A": 1}, f"half of a budget of 1 is one token at least: {got}")


@POLICY.behaviour(0.5, "without chunked prefill a prompt is whole")
def whole_without_chunks(cls: type) -> None:
    board = board_of(cls)(budget=64, max_model_len=64, enable_chunked_prefill=False)
    board.add(45, 3)
    board.add(40, 3)
    got = board.num_scheduled(board.step())
    must(got in ({"A": 45}, {"B": 40}), f"one prompt fits whole in 64 tokens: {got}")


@POLICY.behaviour(0.5, "when blocks run out, the latest deadline gives way")
def gives_way(cls: type) -> None:
    board = board_of(cls)(num_blocks=7, block_size=4, max_model_len=28)
    board.add(12, 12)
    board.add(6, 12)
    board.run_until(lambda: any(seq.metrics.num_preemptions for seq in board.all))
    got = "".join(seq.request_id for seq in board.all if seq.metrics.num_preemptions)
    deadlines = [board.deadline(i) for i in range(2)]
    must(got == "A", f"the deadlines of A and B are {deadlines}: A gives way, and not {got}")


@POLICY.behaviour(0.5, "the same tokens as always", is_property=True)
def same_tokens(cls: type, seed: int) -> None:
    own = board_of(cls)
    own.try_random(seed)
    own.try_random(seed, num_blocks=16, block_size=4, preemption_mode="swap")


# -- 13.3: an attention backend --


class Case(NamedTuple):
    """Queries, a cache with NaN in every slot that nobody owns, and where all belongs."""

    query: Tensor
    kv_cache: KVCache
    metadata: StepMetadata
    parts: list[tuple[list[int], int, int]]


def make_case(
    parts: list[tuple[int, int]], heads: int = 4, kv_heads: int = 2, seed: int = 0
) -> Case:
    """parts: (tokens before, queries) of each sequence."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    blocks = list(range(40))
    rng.shuffle(blocks)
    layout = []
    for start, number in parts:
        length = -(-(start + number) // BLOCK_SIZE)
        layout.append((blocks[:length], start, number))
        del blocks[:length]
    widest = max(len(table) for table, _, _ in layout)
    key, value = (torch.full((40, BLOCK_SIZE, kv_heads, dim), torch.nan) for dim in (6, 5))
    for table, start, number in layout:
        for position in range(start + number):
            for cache_ in (key, value):
                row = torch.randn(kv_heads, cache_.shape[-1], generator=generator)
                cache_[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = row
    spare = blocks[0]  # behind its own blocks a table may hold anything
    padded = [([*table, *[spare] * (widest - len(table))], s, n) for table, s, n in layout]
    metadata, _ = make_metadata(padded)
    total = sum(number for _, number in parts)
    query = torch.randn(total, heads, 6, generator=generator)
    return Case(query, (key, value), metadata, padded)


def slow_alibi(
    case: Case, scale: float, sliding_window: int | None, logits_soft_cap: float | None
) -> Tensor:
    """Query by query and head by head, in float64."""
    heads, kv_heads = case.query.shape[1], case.kv_cache[0].shape[2]
    rows, query = [], iter(case.query.double())
    for table, start, number in case.parts:
        for position in range(start, start + number):
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            seen = range(first, position + 1)
            q, outputs = next(query), []
            for head in range(heads):
                kv_head = head * kv_heads // heads
                key, value = (
                    torch.stack(
                        [c[table[j // BLOCK_SIZE], j % BLOCK_SIZE, kv_head].double() for j in seen]
                    )
                    for c in case.kv_cache
                )
                score = key @ q[head] * scale
                if logits_soft_cap is not None:
                    score = logits_soft_cap * torch.tanh(score / logits_soft_cap)
                distance = position - torch.tensor(seen, dtype=torch.float64)
                score = score - 2.0 ** (-8 * (head + 1) / heads) * distance
                outputs.append(score.softmax(0) @ value)
            rows.append(torch.stack(outputs))
    return torch.stack(rows).float()


def check_attention(cls: Callable[[], Any], case: Case, what: str, **options: Any) -> None:
    """The student's output beside the slow one's."""
    options = {"scale": 0.4, "sliding_window": None, "logits_soft_cap": None, **options}
    backend = cls()
    with torch.inference_mode():
        metadata = backend.plan(case.metadata, BLOCK_SIZE, torch.float32)
        got = backend.attend(case.query, case.kv_cache, metadata, **options)
    right = slow_alibi(case, **options)
    must(
        isinstance(got, Tensor) and got.shape == right.shape,
        f"{what}: the output has the shape {getattr(got, 'shape', None)}, not {tuple(right.shape)}",
    )
    must(not got.isnan().any(), f"{what}: NaN, so a slot was read that belongs to nobody")
    rows = ((got - right).abs().flatten(1).amax(1) > 1e-3).nonzero()[:, 0].tolist()
    must(not rows, f"{what}: the outputs of the queries {rows} are wrong")


@ATTENTION.behaviour(1, "one query sees nearer keys more clearly")
def nearer(cls: Any) -> None:
    check_attention(cls, make_case([(7, 1)], 1, 1), "a decode behind 7 tokens, one head")


@ATTENTION.behaviour(1, "each head has its slope, and heads share keys")
def heads_differ(cls: Any) -> None:
    check_attention(cls, make_case([(7, 1)], 4, 4), "4 heads, 4 KV heads")
    check_attention(cls, make_case([(7, 1)], 6, 2), "6 heads, 2 KV heads")


@ATTENTION.behaviour(1, "a prompt, a chunk and decodes of scattered blocks in one step")
def ragged(cls: Any) -> None:
    check_attention(cls, make_case([(0, 6)]), "a prompt of 6 tokens")
    check_attention(cls, make_case([(5, 1), (6, 4), (0, 9), (15, 1)]), "four sequences")


@ATTENTION.behaviour(1, "sliding window and soft cap still count")
def window_and_cap(cls: Any) -> None:
    case = make_case([(6, 4), (9, 1)])
    check_attention(cls, case, "sliding_window 3", sliding_window=3)
    check_attention(cls, case, "logits_soft_cap 0.5", logits_soft_cap=0.5)


@ATTENTION.behaviour(0.5, "the demo model runs with it: a chunked prompt says the same")
def demo_model(cls: Any) -> None:
    from nanoserve import LLM, SamplingParams

    prompt = [7 + number * 13 % 300 for number in range(30)]
    params, outputs = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), []
    for budget in (64, 8):
        options: dict[str, Any] = {"num_kv_blocks": 24, "max_num_seqs": 2, "max_model_len": 64}
        options |= {"max_num_batched_tokens": budget, "attention_backend": cls()}
        with LLM(**options) as llm:
            [result] = llm.generate([prompt], params, use_tqdm=False)
        outputs.append(result.outputs[0].token_ids)
    must(outputs[0] == outputs[1], f"in one step {outputs[0]}, in chunks of 8 {outputs[1]}")


@ATTENTION.behaviour(0.5, "as a loop over single keys does it", is_property=True)
def like_a_loop(cls: Any, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(12):
        kv_heads = rng.choice([1, 2, 3])
        heads = kv_heads * rng.choice([1, 2])
        parts = [(rng.randint(0, 9), rng.randint(1, 6)) for _ in range(rng.randint(1, 4))]
        options = {
            "sliding_window": rng.choice([None, rng.randint(1, 8)]),
            "logits_soft_cap": rng.choice([None, 2.0]),
        }
        case = make_case(parts, heads, kv_heads, rng.randrange(999))
        check_attention(cls, case, f"(before, queries) {parts}, {options}", **options)


# -- the lab --


class OwnParts(Exercise):
    """Three files, each graded alone."""

    def get_tasks(self, setting: Setting) -> list[Task]:
        return [part.task for part in PARTS.values()]

    def get_files(self, setting: Setting) -> dict[str, str]:
        return {part.file: part.skeleton for part in PARTS.values()}

    def grade(self, lab: Lab, folder: Path, setting: Setting) -> list[Any]:
        from nanoserve.extras.course.grader import read_own_file, refuse, run_behaviours

        outcomes = []
        for part in PARTS.values():
            try:
                source = read_own_file(folder, part.file, part.engine_files, private=True)
            except ValueError as error:
                outcomes += refuse(lab, [part.task], str(error))
                continue
            outcomes += run_behaviours(lab, part.task, source, setting.seed, {})
        return outcomes

    def prepare(self, job: dict[str, Any]) -> list[Behaviour]:
        from dataclasses import replace

        from nanoserve.extras.course.child import define

        part = PARTS[job["task"]]
        found = define(job["source"], part.file).get(part.name)
        if not (isinstance(found, type) and issubclass(found, part.base)):
            raise Wrong(f"{part.file} must have a class {part.name}({part.base.__name__}).")
        return [
            replace(each, check=partial(each.check, found))
            for each in part.task.behaviours
            if each.name in job["names"]
        ]


LAB = Lab(
    13,
    "Parts of your own",
    [],
    needs_torch=True,
    memory=6144,
    seconds=20.0,
    exercise=OwnParts(),
)
