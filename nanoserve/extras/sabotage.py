"""What does an engine with one mistake do? Twenty-seven sabotages, for notebooks and tests.

    with lesson.broken("uncache"):                    # the engine with one mistake in it
        ...                                           # and a right one again

Each replaces one method of the engine by a wrong one, for the time of a `with` block. None of them
raises an error: the engine goes on and gives fluent, wrong answers. This is how mistakes in a KV
cache show in practice, and why the tests compare tokens. A new sabotage is a function with the
decorator `_sabotage`; its first argument is the right method.

Five of them are the cases of notebook 11. CASES has their names, which it does not tell at first;
`suspect_hints` has a remark on each method that is not the culprit.

vLLM: none.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from nanoserve.engine import LLMEngine
from nanoserve.kernels.threads import load_torch

load_torch()  # before anyone imports it: waiting threads sleep (nanoserve/kernels/threads.py)

from nanoserve.model_runner import NO_DRAFT, ModelRunner  # noqa: E402
from nanoserve.parallel import ParallelState  # noqa: E402

NUM_BEFORE_MOVE = 9  # steps, those that record graphs included, before "moving_inputs" moves them

SABOTAGES: dict[str, str] = {}  # name -> what is wrong, in one sentence
REPLACEMENTS: dict[str, tuple[str, Callable[..., Any]]] = {}  # name -> (method, its replacement)
CASES: dict[str, str] = {}  # "case 1" -> the name: notebook 11 does not tell it at first


def _sabotage(name: str, method: str, sentence: str, case: str = "") -> Callable[..., Any]:
    """Enter a sabotage: "module.Class.method" is replaced by the decorated function, which gets the
    right method as its first argument."""

    def enter(replacement: Callable[..., Any]) -> Callable[..., Any]:
        SABOTAGES[name], REPLACEMENTS[name] = sentence, (method, replacement)
        CASES.update({case: name} if case else {})
        return replacement

    return enter


def replaced_method(name: str) -> str:
    """Which method `broken(name)` replaces: "BlockPool.allocate"."""
    method, _ = REPLACEMENTS[_find(name)]
    return ".".join(method.split(".")[-2:])


# Of notebook 11: method -> why it is not this one, in each case that has another cause.
SUSPECTS = {
    "BlockPool.allocate": "each engine here has blocks enough: none was used twice.",
    "BlockHashTable.get": "would a hash explain it? Nobody finds a block of another text.",
    "BlockManager.copy_on_write": "it matters when branches share a block. There are none here.",
    "BlockManager.num_blocks_for": "it only counts: every block table has the right length.",
    "Scheduler._schedule_tokens": "each prompt fits into one step: no chunk is counted wrongly.",
    "Scheduler.preempt": "nobody was preempted: there are blocks enough for all.",
    "ModelRunner.gather_arrays": "it lays out each step, and short questions are answered right.",
    "Attention.forward": "it uses what it is given. Who says which keys, at which positions?",
    "InputBatch.remove": "a row has settings, no keys. Would old settings explain it?",
}


def suspect_hints(case: str) -> dict[str, str]:
    """For a `check` of who is broken in a case of notebook 11: a remark on each other suspect."""
    culprit = replaced_method(case)
    return {method: why for method, why in SUSPECTS.items() if method != culprit}


@contextlib.contextmanager
def broken(name: str) -> Iterator[None]:
    """The engine with one mistake in it (see SABOTAGES), until the `with` block ends.

    Then the right method is back, however the block ended. All engines forget their KV blocks and
    prefix caches, in which wrong content may be; requests that are not finished are computed again.
    An engine that was built inside is to be closed inside: a mistake in its making stays in it.
    An engine that cannot forget keeps no other one from it; its error is raised at the end, unless
    the block ended with an error of its own.
    Raises ValueError for a name that is not known.
    """
    method, replacement = REPLACEMENTS[_find(name)]
    *module, class_name, attribute = method.split(".")
    owner = getattr(importlib.import_module(".".join(["nanoserve", *module])), class_name)
    right = vars(owner)[attribute]

    @functools.wraps(right)
    def wrong(*args: Any, **kwargs: Any) -> Any:
        return replacement(right, *args, **kwargs)

    failures: list[Exception] = []
    setattr(owner, attribute, wrong)
    try:
        yield
    finally:
        setattr(owner, attribute, right)
        for engine in gc.get_objects():
            if type(engine) is LLMEngine and vars(engine).get("_is_closed") is False:
                try:
                    _forget(engine)
                except Exception as failure:
                    failures.append(failure)
    if failures:  # and the block itself raised nothing
        raise failures[0]


def _find(name: str) -> str:
    name = CASES.get(name, name)
    if name not in SABOTAGES:
        known = ", ".join([*SABOTAGES, *CASES])
        raise ValueError(f"there is no sabotage {name!r}; there are: {known}.")
    return name


def _forget(engine: LLMEngine) -> None:
    """Trust nothing that this engine computed but the tokens of its unfinished requests."""
    engine.recover()
    runner: Any = getattr(engine.executor, "runner", None)
    if runner is not None:
        for row in runner.batch.free_rows:
            runner.batch.logit_states.pop(row, None)


@_sabotage(
    "uncache",
    "block_manager.BlockPool.allocate",
    "a block that is used again can still be found under the hash of its old content",
)
def _allocate_without_uncache(right: Any, pool: Any) -> int:
    block_id, _ = pool.free_queue.popitem(last=False)
    pool.ref_counts[block_id] = 1
    return block_id


@_sabotage(
    "copy_on_write",
    "block_manager.BlockManager.copy_on_write",
    "a branch writes into a partly filled block that other branches share",
)
def _no_copy_on_write(right: Any, manager: Any, seq: Any) -> bool:
    return False


@_sabotage(
    "swap_in",
    "block_manager.BlockManager.take_copies",
    "the blocks of a sequence that comes back from CPU memory are not copied",
)
def _take_copies_without_swap_in(right: Any, manager: Any) -> Any:
    return right(manager)._replace(swap_in=())


@_sabotage(
    "starve",
    "scheduler.Scheduler._schedule_waiting",
    "a waiting request that does not fit is passed over, so that smaller ones take its place",
)
def _admit_whoever_fits(right: Any, scheduler: Any, step: Any) -> None:
    for seq in list(scheduler.waiting):
        if step.budget > 0 and seq.is_ready():
            scheduler._admit(seq, step)
    right(scheduler, step)


@_sabotage(
    "rope_neighbours",
    "models.decoder.Attention.__init__",
    "RoPE takes neighbours as pairs; the weights were trained with halves",
)
def _pair_neighbours(right: Any, attention: Any, *config: Any) -> None:
    right(attention, *config)
    attention.rope_and_store = _rope_of_neighbours


def _rope_of_neighbours(
    qkv: Any, qk_norm: Any, rope: Any, backend: Any, kv_cache: Any, metadata: Any
) -> Any:
    """layers.rope_and_store, but number 2 i of a head is paired with number 2 i + 1."""
    num_kv_heads, head_dim = kv_cache[0].shape[2:]
    heads, half = qkv.view(len(qkv), -1, head_dim), head_dim // 2
    qk, v = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
    qk = qk_norm(qk) if qk_norm is not None else qk
    first, second = qk.unflatten(-1, (half, 2)).unbind(-1)
    cos, sin = rope[0][..., :half], rope[1][..., half:]
    turned = (first * cos - second * sin, second * cos + first * sin)
    qk = qk.clone()
    qk[..., 0::2], qk[..., 1::2] = turned
    backend.store(qk[:, -num_kv_heads:].contiguous(), v.contiguous(), kv_cache, metadata)
    return qk[:, :-num_kv_heads].contiguous()


@_sabotage(
    "packed_order",
    "layers.ColumnParallelLinear.matrices",
    "the loader puts v_proj where the model expects k_proj, and k_proj where it expects v_proj",
)
def _exchange_k_and_v(right: Any, layer: Any, name: str) -> Iterator[Any]:
    other = {"k_proj": "v_proj", "v_proj": "k_proj"}
    for matrix in right(layer, name):
        parts = [other.get(part, part) for part in matrix.name.split(".")]
        yield matrix._replace(name=".".join(parts))


class WithoutOneSum(ModelRunner):
    """A runner whose layer 3 never adds up the ranks' parts of its attention."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        alone = ParallelState(self.parallel.tp_rank, self.parallel.tp_size)  # and no groups
        self.model.model.layers[3].self_attn.o_proj.parallel = alone  # type: ignore


@_sabotage(
    "one_sum_less",
    "distributed.multiproc.MultiprocExecutor.__init__",
    "with several ranks, one layer leaves out the sum over the ranks behind its attention",
)
def _leave_out_one_sum(right: Any, executor: Any, *config: Any, **options: Any) -> None:
    right(executor, *config, **{**options, "runner_cls": WithoutOneSum})


@_sabotage(
    "short_hash",
    "block_manager.BlockHashTable.get",
    "the hash of a block leaves out the block's last token",
    case="case 1",
)
def _hash_without_last_token(right: Any, table: Any, parent: Any, token_ids: Any) -> Any:
    return right(table, parent, token_ids if parent is None else token_ids[:-1])


@_sabotage(
    "skipped_token",
    "scheduler.Scheduler._schedule_tokens",
    "the last token of each chunk of a prompt counts as computed, but no step computes it",
    case="case 2",
)
def _leave_out_the_last(
    right: Any, scheduler: Any, seq: Any, num_tokens: int, step: Any, *drafts: Any
) -> None:
    right(scheduler, seq, num_tokens, step, *drafts)
    if num_tokens > 1 and seq.num_computed_tokens < seq.num_tokens:  # a chunk with more behind it
        item = step.scheduled[-1]
        step.scheduled[-1] = item._replace(num_scheduled_tokens=num_tokens - 1)


@_sabotage(
    "late_position",
    "model_runner.ModelRunner.gather_arrays",
    "a generated token gets the position of the token before it",
    case="case 3",
)
def _positions_one_too_small(right: Any, runner: Any, scheduled: Any, rows: Any) -> Any:
    arrays = right(runner, scheduled, rows)
    is_output = arrays.positions >= runner.batch.num_prompt_tokens[arrays.token_rows]
    return replace(arrays, positions=arrays.positions - is_output)


@_sabotage(
    "short_memory",
    "models.decoder.Attention.forward",
    "a query sees the last 28 keys only",
    case="case 4",
)
def _see_last_keys_only(right: Any, attention: Any, *inputs: Any) -> Any:
    spec = attention.kv_cache_spec
    try:
        attention.kv_cache_spec = replace(spec, sliding_window=28)
        return right(attention, *inputs)
    finally:
        attention.kv_cache_spec = spec


@_sabotage(
    "stale_row",
    "input_batch.InputBatch.remove",
    "a request inherits the banned words of a request that had its row before",
    case="case 5",
)
def _remove_but_keep_edits(right: Any, batch: Any, seq_id: int) -> None:
    row = batch.row_of.get(seq_id)
    state = batch.logit_states.get(row)
    right(batch, seq_id)
    if state is not None:
        batch.logit_states[row] = state


@_sabotage(
    "position_as_slot",
    "model_runner.ModelRunner.gather_arrays",
    "a token is stored in the slot that has the number of the token's position",
)
def _slots_from_positions(right: Any, runner: Any, scheduled: Any, rows: Any) -> Any:
    arrays = right(runner, scheduled, rows)
    return replace(arrays, slot_mapping=arrays.positions)


@_sabotage(
    "forgotten_token",
    "model_runner.ModelRunner.gather_arrays",
    "the keys and values of generated tokens are not stored",
)
def _store_prompts_only(right: Any, runner: Any, scheduled: Any, rows: Any) -> Any:
    arrays = right(runner, scheduled, rows)
    slots = arrays.slot_mapping.copy()
    slots[arrays.positions >= runner.batch.num_prompt_tokens[arrays.token_rows]] = -1
    return replace(arrays, slot_mapping=slots)


@_sabotage(
    "shifted_table",
    "model_runner.ModelRunner.gather_arrays",
    "attention reads every block table one entry too far",
)
def _read_one_entry_too_far(right: Any, runner: Any, scheduled: Any, rows: Any) -> Any:
    arrays = right(runner, scheduled, rows)
    end = arrays.block_table.shape[1] + 1
    return replace(arrays, block_table=runner.batch.block_tables[rows, 1:end])


@_sabotage(
    "late_chunk",
    "model_runner.ModelRunner.gather_arrays",
    "the queries of a chunk count as if they stood one position later than they do",
)
def _shift_causal_mask(right: Any, runner: Any, scheduled: Any, rows: Any) -> Any:
    arrays = right(runner, scheduled, rows)
    is_chunk = [item.num_scheduled_tokens > 1 for item in scheduled]
    end = -(-int(arrays.seq_lens.max(initial=0) + 1) // runner.block_size)
    table = runner.batch.block_tables[rows, :end]
    return replace(arrays, seq_lens=arrays.seq_lens + is_chunk, block_table=table)


@_sabotage(
    "wrong_tokens",
    "input_batch.InputBatch._make_penalties",
    "presence and frequency penalties count the tokens of the prompt, not those of the output",
)
def _count_the_prompt(right: Any, batch: Any, rows_with_state: Any) -> Any:
    penalties = right(batch, rows_with_state)
    if penalties is None:
        return None
    return penalties._replace(output_counts=(penalties.output_counts == 0).int())


@_sabotage(
    "noise_with_state",
    "input_batch.InputBatch._make_filters",
    "the random numbers come from one generator, which all requests share",
)
def _draw_from_one_generator(right: Any, batch: Any, rows: Any, *inputs: Any) -> Any:
    filters = right(batch, rows, *inputs)
    generator = vars(batch).setdefault("generator", random.Random(0))
    numbers = [generator.random() for _ in rows]
    return {**filters, "uniform": filters["uniform"].new_tensor(numbers)}


@_sabotage(
    "one_by_one",
    "scheduler.Scheduler.has_seq_slot",
    "a sequence is admitted only when no other one runs: the same tokens, in many more steps",
)
def _one_sequence_at_a_time(right: Any, scheduler: Any, *arguments: Any) -> bool:
    return right(scheduler, *arguments) and not scheduler.running


@_sabotage(
    "moving_inputs",
    "staging.StagingBuffer.begin_step",
    "in the middle of a run the inputs move to another address, which a recorded graph never reads",
)
def _move_once(right: Any, buffer: Any) -> None:
    buffer.num_begun = getattr(buffer, "num_begun", 0) + 1
    if buffer.num_begun == NUM_BEFORE_MOVE:
        buffer._on_device = buffer._on_device.clone()
        buffer._hosts = [buffer._on_device]  # of a CPU
        buffer._host_arrays = [buffer._on_device.numpy()]
    right(buffer)


@_sabotage(
    "short_answers",
    "input_processor.InputProcessor.process",
    "a request gets half of the tokens that it asked for at most",
)
def _halve_max_tokens(right: Any, processor: Any, *arguments: Any) -> Any:
    seq = right(processor, *arguments)
    seq.max_tokens = -(-seq.max_tokens // 2)
    return seq


@_sabotage(
    "deaf",
    "extras.server.streaming.EngineRequests.abort",
    "a request whose client has gone away is computed to its end, for nobody",
)
async def _abort_nothing(right: Any, requests: Any) -> None:
    pass


@_sabotage(
    "credulous",
    "model_runner.PendingOutput.result",
    "the first wrong draft of a step is accepted, too",
)
def _accept_one_too_many(right: Any, pending: Any) -> Any:
    if pending._sampled is None:
        return right(pending)
    token_ids, wrong = pending._sampled.token_ids.clone(), set()
    for row, (seq_id, _, draft) in enumerate(pending._samples):
        if draft != NO_DRAFT and seq_id not in wrong and token_ids[row - 1] != draft:
            token_ids[row - 1] = draft
            wrong.add(seq_id)
    pending._sampled = pending._sampled._replace(token_ids=token_ids)
    return right(pending)


@_sabotage(
    "one_root",
    "block_manager.BlockHashTable.get",
    "the root of a block's hash leaves out the adapter, whose keys and values are other ones",
)
def _root_without_adapter(right: Any, table: Any, parent: Any, content: Any) -> Any:
    is_adapted_root = parent is None and isinstance(content, tuple)
    return right(table, parent, content[0] if is_adapted_root else content)


@_sabotage(
    "other_scales",
    "kernels.quantized.QuantizedWeight.prepare",
    "each group of a quantized weight is multiplied by the scale of its neighbour",
)
def _exchange_scales(right: Any, weight: Any) -> None:
    weight.scales = weight.scales.roll(1, dims=1)
    right(weight)


@_sabotage(
    "next_row",
    "extras.kv_offload.worker.OffloadingWorker.start_load_kv",
    "what comes back from main memory is the row behind the right one",
)
def _load_the_next_row(right: Any, worker: Any, metadata: Any) -> None:
    loads = tuple(((row + 1) % worker.num_blocks, block) for row, block in metadata.loads)
    right(worker, metadata._replace(loads=loads))


@_sabotage(
    "forgetful",
    "extras.structured_output.manager.StructuredOutputRequest.accept_tokens",
    "a grammar is not told which tokens came, so every mask is that of the beginning",
)
def _accept_nothing(right: Any, request: Any, tokens: Any) -> None:
    return None


@_sabotage(
    "forgotten_sum",
    "extras.pooling.runner.PoolingModelRunner.pool",
    "a mean of hidden states begins anew with each chunk of a prompt",
)
def _sum_one_chunk(right: Any, runner: Any, inputs: Any, hidden: Any) -> Any:
    runner.sums = None
    return right(runner, inputs, hidden)
