"""A data plane of pure Python: scheduling is tested without weights and without torch.

The fake model *reads its answer out of its KV cache*. The next token is a fixed function of the
sequence's tokens (`next_token`). FakeExecutor never applies this function to the tokens that it was
given. Instead it stores the tokens slot by slot, as a real model stores keys and values, reads the
whole context back through the block table, and decides from what was read. So a wrong block, a
stale cache hit, a write into a foreign block or a miscounted token gives a wrong token. A test only
has to compare with `reference_output`, which uses no cache.

The cache has two layers. In a real model, what a layer behind the first one stores at a position
depends on *every* token up to this position. So layer 0 holds a token, and layer 1 holds a digest
of layer 0 up to this position. With block_size 4 and block table [2, 0]:

    slot            8    9   10   11    0    1
    layer 0         a    b    c    d    e    f
    layer 1         #a  #ab #abc  ...            ->  next token = hash of #a #ab ... #abcdef

As in a real layer, a step stores all its values before it reads any. Blocks are swapped and copied
in both layers before the step stores. Branches of a request have the same digests and different
next tokens.

Steps may overlap. The executor does the work of a step when the step is launched, as a GPU does in
its own time: the executor's rows know the sampled tokens at once. The control plane learns the
tokens only from `FakeOutput.result()`. The fake checks that steps are read in their order, once
each, and at most one step late.

An adapter (extras/lora) is a number from which the digests start: that of its scale, which the
executor knows only from the step that has brought the adapter into its slot.

With speculative_config, `propose` is what drafts: any function of a sequence's known tokens. A step
samples behind each draft of a sequence and keeps what a real runner keeps: the drafts that are
right, and one token more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from math import exp, log
from pathlib import Path
from typing import Any

from nanoserve.config import EngineConfig, ModelConfig, load_chapter
from nanoserve.sequence import (
    BlockPair,
    ForkSample,
    ModelOutput,
    NewSequence,
    PromptLogprobs,
    ScheduledSequence,
    SchedulerOutput,
    TokenLogprobs,
)

VOCAB_SIZE = 997


# -- the model --


def prefix_digests(token_ids: Iterable[int], adapter: int = 0) -> list[int]:
    """What layer 1 holds: for each position one number, made of all tokens up to there, and of the
    adapter."""
    digests = accumulate(
        token_ids,
        lambda digest, token: (digest * 31 + token + 1) % (2**31 - 1),
        initial=7 + adapter,
    )
    return list(digests)[1:]


def token_from_digests(digests: Iterable[int], seed: int, branch: int, vocab_size: int) -> int:
    return hash((*digests, seed, branch)) % vocab_size


def next_token(
    token_ids: Iterable[int],
    seed: int = 0,
    branch: int = 0,
    vocab_size: int = VOCAB_SIZE,
    adapter: int = 0,
) -> int:
    """The fake model's token after `token_ids`: a pure function, the oracle."""
    return token_from_digests(prefix_digests(token_ids, adapter), seed, branch, vocab_size)


def logprobs_from_digests(
    digests: Iterable[int], seed: int, branch: int, vocab_size: int
) -> list[float]:
    """A log-probability for each token of the vocabulary; the likeliest is the next token."""
    key = hash((*digests, seed, branch))
    scores = [hash((key, token)) % 1_000_003 / 1e6 for token in range(vocab_size)]
    scores[key % vocab_size] += 1.01
    log_total = log(sum(exp(score) for score in scores))
    return [score - log_total for score in scores]


def next_logprobs(
    token_ids: Iterable[int], seed: int = 0, branch: int = 0, vocab_size: int = VOCAB_SIZE
) -> list[float]:
    """The fake model's log-probabilities after `token_ids`: a pure function too."""
    return logprobs_from_digests(prefix_digests(token_ids), seed, branch, vocab_size)


def reference_output(
    prompt: list[int],
    max_tokens: int,
    stop_token_ids: Collection[int] = (),
    seed: int = 0,
    branch: int = 0,
    vocab_size: int = VOCAB_SIZE,
    adapter: int = 0,
) -> list[int]:
    """The output of a request that runs alone, without cache, blocks or batch."""
    token_ids = list(prompt)
    while len(token_ids) < len(prompt) + max_tokens:
        token_ids.append(next_token(token_ids, seed, branch, vocab_size, adapter))
        if token_ids[-1] in stop_token_ids:
            break
    return token_ids[len(prompt) :]


def adapter_of(model: Mapping[str, Any]) -> int:
    """The number of an adapter: its first scale."""
    return round(next(iter(model.values())).scaling)


class StepFailed(RuntimeError):
    """What a FakeExecutor raises when a test made the step fail."""


class FakeOutput:
    """A launched step. Only `result()` gives its output."""

    def __init__(self, executor: FakeExecutor, number: int, output: ModelOutput) -> None:
        self._executor = executor
        self.number = number
        self._output = output

    def result(self) -> ModelOutput:
        """Raises StepFailed, and clears the whole cache, if `fail_next_result` is set."""
        return self._executor.read(self, self._output)


class Row:
    """What the executor knows of one sequence, as a row of InputBatch: from SchedulerOutputs."""

    def __init__(self, new: NewSequence) -> None:
        self.token_ids = list(new.token_ids)
        self.num_prompt_tokens = new.num_prompt_tokens
        self.block_ids = list(new.block_ids)
        self.params = new.sampling_params
        self.seed = new.seed
        self.branch = new.branch
        self.num_samples = new.num_samples
        self.lora_slot = new.lora_slot
        self.num_unread = 0  # tokens of it that the control plane does not know yet

    @property
    def needs_output_token_ids(self) -> bool:
        """True if a sampler would need the values of the output tokens on the CPU."""
        return bool(self.params.logits_processors)


Layers = list[list[int | None]]  # layers[i][slot]: what the slot holds


class FakeExecutor:
    """The executor's interface over the fake model, in the place of UniprocExecutor.

    Invariant: SchedulerOutputs are the only input. There is one row for each sequence that a
    SchedulerOutput announced and no later one named as finished.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig | None = None,
        attention_backend: Any = "auto",
    ) -> None:
        self.num_kv_blocks = config.num_gpu_blocks_override or 64
        swaps = config.preemption_mode == "swap"
        self.num_cpu_blocks = (config.num_cpu_blocks or self.num_kv_blocks) if swaps else 0
        self.block_size = config.block_size
        self.max_num_seqs = config.max_num_seqs or 256
        self.speculates = config.speculative_config is not None
        self.has_stages = config.pipeline_parallel_size > 1
        self.most_unread = max(2, config.max_concurrent_batches)
        self.vocab_size = model_config.vocab_size if model_config else VOCAB_SIZE
        self.layers = self._make_layers(self.num_kv_blocks)
        self.cpu_layers = self._make_layers(self.num_cpu_blocks)
        self.kv_connector = FakeKVConnector(self, config) if config.has_kv_connector else None
        self.rows: dict[int, Row] = {}
        self.loras: dict[int, int] = {}  # slot -> the adapter that is there
        self.fail_next_step = False
        self.fail_next_result = False
        self.num_failed = 0  # steps that raised StepFailed
        self.calls: list[tuple[str, int]] = []  # ("launch" or "result", number of the step)
        self.num_launched = 0
        self.unread: list[FakeOutput] = []  # oldest first
        self.num_tokens: dict[int, int] = {}  # seq_id -> tokens computed, in all steps
        # (row, the most drafts that are allowed) -> drafts
        self.propose: Callable[[Row, int], Sequence[int]] = lambda row, most: ()

    def _make_layers(self, num_blocks: int) -> Layers:
        return [[None] * (num_blocks * self.block_size) for _ in range(2)]

    def describe(self) -> str:
        return "device=none, dtype=none, attention=fake"

    def close(self) -> None:
        self.rows.clear()

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        """Launch one step and read its output."""
        return self.launch(scheduler_output).result()

    def launch(self, scheduler_output: SchedulerOutput) -> FakeOutput:
        """Start a step; the fake does all its work here. Raises StepFailed, and clears the slots
        that the step writes, if `fail_next_step` is set."""
        if scheduler_output.is_restart:
            self.unread.clear()  # the engine dropped these steps
            if self.kv_connector:
                self.kv_connector.written.clear()
        assert len(self.unread) < self.most_unread, "too many launched steps were not read"
        number, self.num_launched = self.num_launched, self.num_launched + 1
        self.calls.append(("launch", number))
        pending = FakeOutput(self, number, self._run(scheduler_output))
        self.unread.append(pending)
        return pending

    def read(self, pending: FakeOutput, output: ModelOutput) -> ModelOutput:
        """The output of a launched step. Steps are read once each, in the order of launching."""
        assert pending in self.unread, f"step {pending.number} was read or dropped before"
        assert pending is self.unread[0], f"step {pending.number} is read before an earlier one"
        self.unread.remove(pending)
        self.calls.append(("result", pending.number))
        if self.fail_next_result:
            self.fail_next_result = False
            if self.kv_connector:
                self.kv_connector.spoil()
            for layer in (*self.layers, *self.cpu_layers):
                layer[:] = [None] * len(layer)
            self.num_failed += 1
            raise StepFailed
        if self.kv_connector:
            self.kv_connector.written.pop(pending.number, None)
        for seq_id in output.sampled_token_ids:
            if seq_id in self.rows:
                self.rows[seq_id].num_unread = max(0, self.rows[seq_id].num_unread - 1)
        return output

    def _run(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        """Copy blocks, store, read back, and sample for each sequence whose last known token is
        computed."""
        self._copy_blocks(self.layers, self.cpu_layers, scheduler_output.blocks_to_swap_out)
        metadata = scheduler_output.kv_connector_metadata
        if self.kv_connector and metadata is not None:
            self.kv_connector.start_load_kv(metadata)
        self._copy_blocks(self.cpu_layers, self.layers, scheduler_output.blocks_to_swap_in)
        self._copy_blocks(self.layers, self.layers, scheduler_output.blocks_to_copy)
        self._update_rows(scheduler_output)
        scheduled = scheduler_output.scheduled
        for item in scheduled:
            row = self.rows[item.seq_id]
            num_tokens = self.num_tokens.get(item.seq_id, 0) + item.num_scheduled_tokens
            self.num_tokens[item.seq_id] = num_tokens
            token_ids = [*row.token_ids, *item.draft_token_ids]
            for position in self._positions(item):
                token = None if self.fail_next_step else token_ids[position]
                self.layers[0][self._slot(row, position)] = token
        if self.fail_next_step:
            self.fail_next_step = False
            self.num_failed += 1
            raise StepFailed
        for item in scheduled:
            row, positions = self.rows[item.seq_id], self._positions(item)
            adapter = 0 if row.lora_slot < 0 else self.loras[row.lora_slot]
            digests = prefix_digests(self._read(0, row, positions.stop), adapter)
            for position in positions:
                self.layers[1][self._slot(row, position)] = digests[position]
        if self.kv_connector and metadata is not None:
            self.kv_connector.wait_for_save()
        output = ModelOutput({}, {})
        for item in scheduled:
            self._sample(item, output)
        return output

    def _sample(self, item: ScheduledSequence, output: ModelOutput) -> None:
        """Put the result of one sequence into `output`."""
        row, positions = self.rows[item.seq_id], self._positions(item)
        num_known, drafts = len(row.token_ids), item.draft_token_ids
        assert positions.stop <= num_known + len(drafts), f"{item}: computes unknown tokens"
        assert not drafts or positions.stop == num_known + len(drafts), f"{item}: misses tokens"
        digests = self._read(1, row, positions.stop)
        if row.params.prompt_logprobs is not None:
            targets = range(positions.start + 1, min(positions.stop + 1, row.num_prompt_tokens))
            if targets:
                entries = tuple(
                    TokenLogprobs((row.token_ids[i],), (-float(digests[i - 1]),), 1)
                    for i in targets
                )
                output.prompt_logprobs[item.seq_id] = PromptLogprobs(targets.start, entries)
        if positions.stop < num_known:
            return
        if drafts:
            self._verify(row, digests, item, output)
            return
        needs_tokens = self.has_stages or row.needs_output_token_ids
        assert not (row.num_unread and needs_tokens), f"{item}: a token in flight"
        samples = []
        for branch in range(row.branch, row.branch + row.num_samples):
            token = token_from_digests(digests, row.seed, branch, self.vocab_size)
            samples.append(ForkSample(token, self._logprobs(row, digests, branch, token)))
        first, *forks = samples
        output.sampled_token_ids[item.seq_id] = (first.token_id,)
        if first.logprobs:
            output.logprobs[item.seq_id] = first.logprobs
        if forks:
            output.forks[item.seq_id] = tuple(forks)
        row.token_ids.append(first.token_id)
        row.num_unread += 1
        row.num_samples = 1
        self._draft(row, item, output)

    def _verify(
        self, row: Row, digests: list[int], item: ScheduledSequence, output: ModelOutput
    ) -> None:
        """Sample at every position from the last known token on, until a draft is wrong."""
        logprobs: list[TokenLogprobs] = []
        start = len(row.token_ids)
        for draft in (*item.draft_token_ids, None):
            seen = digests[: len(row.token_ids)]
            token = token_from_digests(seen, row.seed, row.branch, self.vocab_size)
            row.token_ids.append(token)
            logprobs += self._logprobs(row, seen, row.branch, token)
            if token != draft:
                break
        output.sampled_token_ids[item.seq_id] = tuple(row.token_ids[start:])
        if logprobs:
            output.logprobs[item.seq_id] = tuple(logprobs)
        row.num_unread += 1
        self._draft(row, item, output)

    def _draft(self, row: Row, item: ScheduledSequence, output: ModelOutput) -> None:
        drafts = tuple(self.propose(row, item.num_spec_tokens))
        if drafts:
            output.draft_token_ids[item.seq_id] = drafts

    def _logprobs(
        self, row: Row, digests: list[int], branch: int, token: int
    ) -> tuple[TokenLogprobs, ...]:
        """Of the sampled token and of the likeliest ones, if the request asked for logprobs."""
        if row.params.logprobs is None:
            return ()
        logprobs = logprobs_from_digests(digests, row.seed, branch, self.vocab_size)
        likeliest = sorted(range(self.vocab_size), key=lambda t: -logprobs[t])
        token_ids = (token, *likeliest[: row.params.logprobs])
        values = tuple(logprobs[t] for t in token_ids)
        return (TokenLogprobs(token_ids, values, likeliest.index(token) + 1),)

    def _copy_blocks(
        self, source: Layers, destination: Layers, pairs: tuple[BlockPair, ...]
    ) -> None:
        """Read all blocks, then write all blocks, as index_select and index_copy_ do."""
        destinations = [block for _, block in pairs]
        assert len(set(destinations)) == len(destinations), f"a block written twice: {pairs}"
        size = self.block_size
        for source_layer, destination_layer in zip(source, destination, strict=True):
            content = [source_layer[a * size : (a + 1) * size] for a, _ in pairs]
            for block, slots in zip(destinations, content, strict=True):
                copied = [None] * size if self.fail_next_step else slots
                destination_layer[block * size : (block + 1) * size] = copied

    def _update_rows(self, scheduler_output: SchedulerOutput) -> None:
        if scheduler_output.is_restart:
            self.rows.clear()
            self.loras.clear()
        self.loras |= {slot: adapter_of(model) for slot, model in scheduler_output.loras_to_load}
        for seq_id in scheduler_output.finished_seq_ids:
            self.rows.pop(seq_id, None)
        for new in scheduler_output.new_sequences:
            assert new.seq_id not in self.rows, f"sequence {new.seq_id} announced twice"
            self.rows[new.seq_id] = Row(new)
        assert len(self.rows) <= self.max_num_seqs, "more rows than max_num_seqs"
        for item in scheduler_output.scheduled:
            block_ids, first = self.rows[item.seq_id].block_ids, item.first_new_block
            assert first <= len(block_ids), f"{item} leaves a hole in {block_ids}"
            block_ids[first : first + len(item.new_block_ids)] = item.new_block_ids
            needed = -(-self._positions(item).stop // self.block_size)
            assert len(block_ids) >= needed, f"{item} has no slots in {block_ids}"
            has_spare = len(block_ids) > needed  # slots of drafts that were rejected, or will come
            assert self.speculates or not has_spare, f"{item} holds too many blocks: {block_ids}"

    @staticmethod
    def _positions(item: ScheduledSequence) -> range:
        start = item.num_computed_tokens
        return range(start, start + item.num_scheduled_tokens)

    def _slot(self, row: Row, position: int) -> int:
        block_id = row.block_ids[position // self.block_size]
        return block_id * self.block_size + position % self.block_size

    def _read(self, layer: int, row: Row, end: int) -> list[int]:
        """The values at positions 0 .. end - 1, found through the row's block table."""
        content = [self.layers[layer][self._slot(row, position)] for position in range(end)]
        assert None not in content, f"layer {layer}: read an empty slot"
        return [value for value in content if value is not None]


class FakeKVConnector:
    """The interface of extras/kv_offload's KVConnectorWorker over the fake cache: a row holds what
    the slots of a block hold, and counts as a byte for each."""

    def __init__(self, executor: FakeExecutor, config: EngineConfig) -> None:
        self.executor, self.size = executor, config.block_size
        chapter = load_chapter("kv_offloading_size", "kv_offload.config")
        num_bytes = chapter.OffloadingConfig.from_config(config).cpu_bytes_to_use
        self.row_bytes = len(executor.layers) * self.size
        self.num_blocks = num_bytes // self.row_bytes
        self.layers = executor._make_layers(self.num_blocks)
        self.metadata: Any = None
        self.written: dict[int, list[int]] = {}  # rows that steps wrote which were not read

    @property
    def rows(self) -> FakeKVConnector:
        """What a tier below reads and writes: rows[i]."""
        return self

    def __getitem__(self, row: int) -> Layers:
        return [layer[row * self.size : (row + 1) * self.size] for layer in self.layers]

    def __setitem__(self, row: int, content: Layers) -> None:
        for layer, part in zip(self.layers, content, strict=True):
            layer[row * self.size : (row + 1) * self.size] = part

    def start_load_kv(self, metadata: Any) -> None:
        self.metadata, executor = metadata, self.executor
        rows = [row for _, row in (*metadata.stores, *metadata.saves)]
        self.written[executor.num_launched - 1] = rows
        executor._copy_blocks(executor.layers, self.layers, metadata.stores)
        executor._copy_blocks(self.layers, executor.layers, metadata.loads)

    def wait_for_save(self) -> None:
        self.executor._copy_blocks(self.executor.layers, self.layers, self.metadata.saves)

    def num_done(self) -> int:
        return int(self.metadata.number)

    def spoil(self) -> None:
        """Steps that were not read are lost: nobody knows what is in the rows that they wrote."""
        for row in (row for rows in self.written.values() for row in rows):
            self[row] = [[None] * self.size for _ in self.layers]
        self.written.clear()


def write_config(
    folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...], max_model_len: int
) -> str:
    """Make `folder` a checkpoint that consists of a config.json, for an LLMEngine over the fake
    model. Returns its path."""
    hf = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": max_model_len,
        "eos_token_id": list(eos_token_ids),
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf))
    return str(folder)
