"""Groups of layers over one pool: the same tokens, and no block behind a window."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import FakeRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from test_blocks import sequence
from test_models import check_like_transformers
from test_same_tokens import CHAPTERS, FEW, PARAMS, PROMPTS, differing, play, show
from workload import HISTORY, Player

from nanoserve import LLM, SamplingParams
from nanoserve.chapters import REFUSED
from nanoserve.chapters.hybrid_kv.groups import KVCacheGroup, make_groups
from nanoserve.chapters.hybrid_kv.managers import HOLE, HybridBlockManager
from nanoserve.chapters.hybrid_kv.parts import HybridNote, HybridRunner
from nanoserve.kernels.kv_cache import KVCacheSpec
from nanoserve.models.config import DEMO_MODEL
from nanoserve.sequence import SchedulerOutput, Sequence
from nanoserve.tools.check_blocks import check_blocks

ON = {"disable_hybrid_kv_cache_manager": False}
KINDS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
KINDS += ["sliding_attention"]
# The demo model (5 layers) with windows: it was not trained so, and talks worse.
WINDOWS = {"use_sliding_window": True, "sliding_window": 7, "layer_types": KINDS}


# -- groups --


def groups_of(windows: list[int | None]) -> list[tuple[int | None, tuple[int, ...]]]:
    specs = [KVCacheSpec(2, 8, 8, window) for window in windows]
    return [(group.window, group.layers) for group in make_groups(specs, 16, 64)]


def test_layers_with_one_kind_of_attention_form_groups_of_one_size() -> None:
    assert groups_of([4, 4, 4, None] * 2) == [
        (None, (3, 7)),
        (4, (0, 1)),
        (4, (2, 4)),
        (4, (5, 6)),
    ]
    assert groups_of([None] * 3) == [(None, (0, 1, 2))]
    assert groups_of([9] * 3) == [(9, (0, 1, 2))]
    assert groups_of([4, None, 4, None, 4]) == [(None, (1, 3)), (4, (0, 2)), (4, (4,))]
    most = [4, *[None, 4] * 5]  # 6 and 5: no three groups because of one layer
    assert [len(layers) for _, layers in groups_of(most)] == [5, 6]
    assert [window for window, _ in groups_of([8, 4, None, 4, 8])] == [None, 4, 4, 8, 8]


def test_layers_of_several_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="several sizes"):
        make_groups([KVCacheSpec(2, 8, 8), KVCacheSpec(2, 16, 16, 4)], 16, 64)


def is_seen(position: int, num_computed: int, window: int | None) -> bool:
    """By the token behind the computed ones; and the last computed one always stays."""
    distance = num_computed - position
    return distance > 0 and (window is None or distance < window or distance == 1)


def seen_blocks(num_computed: int, window: int | None, size: int) -> list[int]:
    return sorted({p // size for p in range(num_computed) if is_seen(p, num_computed, window)})


@given(st.integers(0, 60), st.integers(1, 20), st.integers(1, 5), st.integers(1, 9))
def test_how_many_blocks_a_window_needs(num: int, window: int, size: int, chunk: int) -> None:
    group = KVCacheGroup((0,), window, size, chunk)
    seen = seen_blocks(num, window, size)
    assert group.num_skipped_blocks(num) == min(seen, default=0)
    spans = [
        range(group.num_skipped_blocks(start), -(-min(num, start + chunk) // size))
        for start in range(num)
    ]
    assert max(map(len, spans), default=0) <= group.most_blocks(num)
    full = KVCacheGroup((0,), None, size, chunk)
    assert full.num_skipped_blocks(num) == 0
    assert full.most_blocks(num) == -(-num // size) >= group.most_blocks(num)


# -- the block manager --


def make_manager(
    windows: tuple[int | None, ...], num_blocks: int, size: int, chunk: int = 4, num_cpu: int = 0
) -> HybridBlockManager:
    manager = HybridBlockManager(num_blocks + 1, size, True, num_cpu)
    manager.set_groups([KVCacheGroup((i,), w, size, chunk) for i, w in enumerate(windows)])
    return manager


def compute(manager: HybridBlockManager, seq: Sequence, end: int | None = None) -> None:
    """Compute the known tokens of an admitted sequence, in chunks, as the scheduler does."""
    chunk, end = manager.kv_cache_groups[0].max_chunk, end or seq.num_tokens
    while (num_tokens := min(chunk, end - seq.num_computed_tokens)) > 0:
        manager.free_skipped_blocks(seq)
        assert manager.can_append_slots(seq, num_tokens), "it was admitted, and does not fit"
        manager.append_slots(seq, num_tokens)
        seq.num_computed_tokens += num_tokens


def start(manager: HybridBlockManager, seq: Sequence) -> int | None:
    cached = manager.get_computed_blocks(seq)
    if not manager.can_allocate(seq, cached):
        return None
    manager.allocate(seq, cached)
    found = seq.num_computed_tokens
    compute(manager, seq)
    manager.free_skipped_blocks(seq)
    return found


def tables_of(manager: HybridBlockManager, seq_id: int) -> list[list[int]]:
    return [group.block_tables[seq_id] for group in manager.groups]


def test_a_window_holds_its_last_blocks() -> None:
    """10 tokens, block_size 4: token 10 sees 5 .. 10 through a window of 6."""
    manager, seq = make_manager((None, 6), 12, 4), sequence(0, range(10))
    start(manager, seq)
    full, window = tables_of(manager, 0)
    assert len(full) == len(window) == 3
    assert [block == HOLE for block in window] == [True, False, False]
    assert len(manager.pool.free_queue) == 12 - 3 - 2
    check_blocks(manager)


def test_a_hit_is_the_longest_prefix_that_all_groups_have() -> None:
    """The example of managers.py, and what of it is left when blocks are taken."""
    manager, old = make_manager((None, 6), 12, 4), sequence(0, range(20))
    start(manager, old)
    manager.free(old)
    again = sequence(1, range(21))
    hit = manager.get_computed_blocks(again)
    assert [column[1] == HOLE for column in hit] == [True, True, True, False, False]
    assert HOLE not in [column[0] for column in hit]
    taken = manager.groups[1].pool.find(again.block_hashes[4])
    manager.pool.uncache(taken)  # the last block of the window
    assert len(manager.get_computed_blocks(again)) == 4
    manager.pool.uncache(manager.groups[1].pool.find(again.block_hashes[2]))
    assert len(manager.get_computed_blocks(again)) == 2  # a, b: token 8 sees 3 .. 8
    manager.pool.uncache(manager.groups[0].pool.find(again.block_hashes[0]))
    assert manager.get_computed_blocks(again) == []


def test_one_group_without_windows_is_the_core() -> None:
    manager = make_manager((None,), 8, 4)
    assert start(manager, sequence(0, range(10))) == 0
    assert start(manager, sequence(1, range(10))) == 8
    assert manager.pool.ref_counts.count(2) == 2
    check_blocks(manager)


@given(
    st.lists(st.none() | st.integers(1, 12), min_size=1, max_size=4),
    st.tuples(st.integers(1, 40), st.integers(1, 4), st.integers(1, 6)),
)
def test_a_request_of_full_length_fits_when_it_is_alone(windows: Any, sizes: Any) -> None:
    """most_blocks decides how long a request may be."""
    num_blocks, size, chunk = sizes
    manager = make_manager(tuple(windows), num_blocks, size, chunk)
    longest = max(n for n in range(99) if manager.most_blocks(n) <= num_blocks)
    if longest:
        assert start(manager, sequence(0, range(longest))) == 0
        check_blocks(manager)


CALLS = ("start", "start", "start", "append", "append", "fork", "swap out", "swap in", "free")
CALLS += ("reset",)


class Simulated:
    """A manager, what is in its blocks, and a naive model of which blocks a group may hold."""

    def __init__(self, windows: Any, num_blocks: int, size: int, num_cpu: int) -> None:
        self.manager = make_manager(tuple(windows), num_blocks, size, 3, num_cpu)
        self.windows, self.size = windows, size
        self.live, self.next_id = dict[int, Sequence](), 0
        self.kv, self.cpu = dict[int, Any](), dict[int, Any]()  # block -> {offset: (group, token)}

    def carry_out(self) -> None:
        copies = SimpleNamespace(**self.manager.take_copies())
        for source, to, pairs in (
            (self.kv, self.cpu, copies.blocks_to_swap_out),
            (self.cpu, self.kv, copies.blocks_to_swap_in),
            (self.kv, self.kv, copies.blocks_to_copy),
        ):
            assert len({to for _, to in pairs}) == len(pairs), "a block is written twice"
            for one, other in pairs:
                to[other] = dict(source.get(one, {}))

    def grow(self, seq: Sequence) -> None:
        """Compute what is known, a chunk after the other, and store it in each group's slots."""
        while (at := seq.num_computed_tokens) < seq.num_tokens:
            compute(self.manager, seq, min(at + 3, seq.num_tokens))
            self.carry_out()
            for group, table in enumerate(tables_of(self.manager, seq.seq_id)):
                for position in range(at, seq.num_computed_tokens):
                    block, offset = table[position // self.size], position % self.size
                    if is_seen(position, seq.num_computed_tokens, self.windows[group]):
                        token = (group, seq.token_ids[position])
                        self.kv.setdefault(block, {})[offset] = token

    def longest_hit(self, seq: Sequence) -> int:
        """In blocks, by brute force."""
        findable = set()
        for group, block in self.manager.pool.cached_blocks:
            tokens: tuple[int, ...] = ()
            while block.parent is not None:
                tokens, block = block.token_ids + tokens, block.parent
            findable.add((group, block.token_ids, tokens))
        for length in range((seq.num_tokens - 1) // self.size, 0, -1):
            needed = {
                (group, seq.extra_keys, tuple(seq.token_ids[: (block + 1) * self.size]))
                for group, window in enumerate(self.windows)
                for block in seen_blocks(length * self.size, window, self.size)
            }
            if needed <= findable:
                return length
        return 0

    def do(self, call: str, which: int, number: int) -> None:
        manager = self.manager
        running = [self.live[i] for i in manager.block_tables]
        swapped = [self.live[i] for i in manager.swapped_tables]
        seq = running[which % len(running)] if running else None
        if call == "start":
            new = [*range(3 * number), *range(50, 50 + which % 4)]
            seq = sequence(self.next_id, new, which % 2)
            cached = manager.get_computed_blocks(seq)
            assert len(cached) == self.longest_hit(seq)
            if manager.can_allocate(seq, cached):
                manager.allocate(seq, cached)
                self.live[self.next_id], self.next_id = seq, self.next_id + 1
                self.grow(seq)
        elif call == "reset":
            assert manager.reset_prefix_cache() is not bool(running)
        elif call == "swap in" and swapped and manager.can_swap_in(swapped[0]):
            manager.swap_in(swapped[0])
        elif seq is None:
            return
        elif call == "append":
            self.append(seq, min(number, 3))
        elif call == "fork":
            child = sequence(self.next_id, seq.token_ids, seq.extra_keys)
            manager.fork(seq, child)
            self.live[self.next_id], self.next_id = child, self.next_id + 1
        elif call == "swap out":
            self.append(seq, 3)
            if manager.can_swap_out(seq):
                manager.swap_out(seq)
        elif call == "free":
            manager.free(seq)

    def append(self, seq: Sequence, number: int) -> None:
        if self.fits(seq, number):
            seq.token_ids += range(100 * self.next_id, 100 * self.next_id + number)
            self.next_id += 1
            self.grow(seq)

    def fits(self, seq: Sequence, number: int) -> bool:
        """can_append_slots, which must be right: no block more or less is needed."""
        manager, at = self.manager, seq.num_computed_tokens
        needed = len(self.windows) * (-(-(at + number) // self.size) - -(-at // self.size))
        for table in tables_of(manager, seq.seq_id):
            needed += at % self.size > 0 and manager.pool.ref_counts[table[-1]] > 1
        fits = needed <= len(manager.pool.free_queue)
        assert manager.can_append_slots(seq, number) is fits
        return fits

    def check(self, call: str) -> None:
        check_blocks(self.manager)
        if call in ("swap out", "free"):
            return  # the copies of several may be pending
        self.carry_out()
        for seq_id in self.manager.block_tables:
            seq = self.live[seq_id]
            self.manager.free_skipped_blocks(seq)
            for group, table in enumerate(tables_of(self.manager, seq_id)):
                window, num = self.windows[group], seq.num_computed_tokens
                held = [index for index, block in enumerate(table) if block != HOLE]
                assert held == seen_blocks(num, window, self.size), "holds other blocks"
                for position in range(num):
                    if is_seen(position, num, window):
                        found = self.kv[table[position // self.size]][position % self.size]
                        assert found == (group, seq.token_ids[position])


@settings(max_examples=600)
@given(
    st.lists(st.none() | st.integers(1, 9), min_size=1, max_size=3),
    st.tuples(st.integers(3, 40), st.integers(1, 4), st.integers(0, 40)),
    st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, 99), st.integers(1, 9)), max_size=40),
)
def test_any_calls(windows: Any, sizes: Any, calls: list[Any]) -> None:
    """Each group holds what its window shows, with the right content, and no more. A hit is the
    longest there is. At the end nothing is held."""
    simulated = Simulated(windows, *sizes)
    for call in calls:
        simulated.do(*call)
        simulated.check(call[0])
    manager = simulated.manager
    for seq in simulated.live.values():
        manager.free(seq)
    assert not any(manager.pool.ref_counts) and not any(manager.cpu_pool.ref_counts)
    assert manager.reset_prefix_cache() and not manager.pool.cached_blocks


# -- the player --


class FakeGroups(HybridRunner, FakeRunner):
    """The fake one reads its tokens out of group 0. The further groups store tokens in the same
    memory, and each query looks at all that its window shows."""

    windows = (None, 3, 6)

    def __init__(self, config: Any, model_config: Any) -> None:
        FakeRunner.__init__(self, config, model_config)
        sizes = (config.block_size, config.max_chunk)
        self.kv_cache_groups = [KVCacheGroup((i,), w, *sizes) for i, w in enumerate(self.windows)]
        self.num_kv_blocks *= len(self.windows)
        self.num_cpu_blocks *= len(self.windows)
        self.further: dict[int, list[list[int]]] = {}

    def update_batch(self, step: SchedulerOutput) -> None:  # type: ignore[override]
        for seq_id in [*self.further] if step.is_restart else step.dropped_seq_ids:
            self.further.pop(seq_id, None)
        known = {seq_id: row.tokens for seq_id, row in self.rows.items()}
        known |= {new.seq_id: new.token_ids for new in step.new_sequences}
        queries = []
        for seq_id, begin, number, *_ in step.scheduled:
            tables = self.further.setdefault(seq_id, [[] for _ in self.windows[1:]])
            new_blocks = step.notes[HybridNote][seq_id]
            for group, (table, new) in enumerate(zip(tables, new_blocks, strict=True), start=1):
                assert new[0] <= len(table), "a hole in the block table"
                table[new[0] :] = new[1]
                assert len(table) == -(-(begin + number) // self.size)
                query = range(begin, begin + number), group, table, known[seq_id]
                queries.append(query)
                for position in query[0]:
                    self.kv[0][self.at(table, position)] = (group, known[seq_id][position])
        for positions, group, table, tokens in queries:
            for key in range(max(0, positions[0] - self.windows[group] + 1), positions[-1] + 1):
                assert self.kv[0][self.at(table, key)] == (group, tokens[key]), "a wrong key"

    def at(self, table: list[int], position: int) -> int:
        block = table[position // self.size]
        assert block != HOLE, "the window shows a hole"
        return block * self.size + position % self.size


class GroupsPlayer(Player):
    def check_cache(self) -> None:
        """Of the full layers, by the base; the other groups can find the same content."""
        pool, manager = self.engine.block_manager.pool, self.engine.block_manager
        by_group = [{h for g, h in pool.cached_blocks if g == i} for i in range(3)]
        manager.num_blocks //= 3
        if len(self.roots) * 60 <= manager.num_blocks * manager.block_size:
            assert by_group[0] == by_group[1] == by_group[2]
        pool.cached_blocks = dict.fromkeys(by_group[0], 0)
        super().check_cache()


@pytest.fixture
def no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of thousands of planted failures."""
    monkeypatch.setattr(logging.getLogger("nanoserve"), "disabled", True)


def play_history(options: Mapping[str, Any], requests: list[Any], troubles: list[Any]) -> None:
    GroupsPlayer(options, runner_cls=FakeGroups, **ON).play(requests, troubles)


@pytest.mark.usefixtures("no_log")
@settings(max_examples=150)
@given(**HISTORY)
def test_any_history(options: Any, requests: list[Any], troubles: list[Any]) -> None:
    play_history(options, requests, troubles)


@pytest.mark.slow
@pytest.mark.usefixtures("no_log")
@settings(max_examples=1500)
@given(**HISTORY)
def test_many_histories(options: Any, requests: list[Any], troubles: list[Any]) -> None:
    play_history(options, requests, troubles)


# -- whole engines --

MIXED = ["full_attention", "sliding_attention", "sliding_attention"]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": 11}),  # one group
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "num_hidden_layers": 6,
            "layer_types": MIXED * 2,
            "head_dim": 16,
        },
    ),
    "gemma2": ("gemma2", {"head_dim": 24, "sliding_window": 11, "num_hidden_layers": 4}),
    "gemma3": ("gemma3_text", {"head_dim": 24, "sliding_window": 5, "num_hidden_layers": 7}),
    "llama": ("llama", {}),  # no window at all
}


@pytest.mark.parametrize("name", FAMILIES)
def test_like_transformers(name: str, make_checkpoint: Callable[..., Path]) -> None:
    family, more = FAMILIES[name]
    check_like_transformers(make_checkpoint(family, **more), **ON)


@cache
def plainly(**adapters: Any) -> list[Any]:
    kernels = {"attention_backend": "reference", "kernels": "plain"}
    return play(hf_overrides=WINDOWS, **kernels, **adapters)


SETTINGS: list[dict[str, Any]] = [
    {},
    {**FEW, "max_num_batched_tokens": 12},
    {**FEW, "max_num_batched_tokens": 12, "preemption_mode": "swap", "async_scheduling": True},
    {**FEW, "long_prefill_token_threshold": 3, "async_scheduling": True},
    {"attention_backend": "torch", "enable_prefix_caching": False},
]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_settings(options: dict[str, Any]) -> None:
    """Cold, and with a warm prefix cache."""
    assert differing(play(hf_overrides=WINDOWS, **ON, **options), plainly()) == []


def test_fast_kernels() -> None:
    """The same tokens; a logprob may differ by a rounding, as hits begin elsewhere."""
    found = play(hf_overrides=WINDOWS, kernels="fast", **ON)
    assert [each[:-1] for each in found] == [each[:-1] for each in plainly()]


@pytest.mark.parametrize("other", [name for name in CHAPTERS if (name, "hybrid_kv") not in REFUSED])
def test_with_another_chapter(other: str) -> None:
    adapters = CHAPTERS["lora"] if other == "lora" else {}
    options = {**SETTINGS[1 + len(other) % 3], **CHAPTERS[other]}
    found = play(hf_overrides=WINDOWS, **ON, **options)
    assert differing(found, plainly(**adapters)) == []


def test_a_drafter_with_layers_of_its_own_is_refused() -> None:
    config = {"method": "eagle", "num_speculative_tokens": 2, "model": DEMO_MODEL / "eagle"}
    with pytest.raises(ValueError, match="drafter"):
        LLM(speculative_config=config, **ON)


def test_a_long_chat_holds_few_blocks() -> None:
    """128 tokens, one of five layers sees all: 32 blocks, and 2 in each of four groups."""
    held = {}
    for options in ({}, ON):
        params = SamplingParams(temperature=0, max_tokens=124, ignore_eos=True)
        with LLM(block_size=4, max_model_len=128, hf_overrides=WINDOWS, **options) as llm:
            llm.add_request("chat", {"prompt_token_ids": [5, 6, 7, 8]}, params)
            most, pool = 0, llm.llm_engine.block_manager.pool
            while llm.has_unfinished_requests():
                llm.step()
                most = max(most, sum(count > 0 for count in pool.ref_counts))
                check_blocks(llm.llm_engine.block_manager)
            held[len(options)] = most
            runner = llm.llm_engine.executor.runner
            null_block = [bool(part[-1].any()) for each in runner.kv_caches for part in each]
    assert not any(null_block), "the null block was written"
    assert held[0] == 32  # of all five layers
    assert 32 + 4 * 2 <= held[1] <= 32 + 4 * 3  # of one layer each


def test_the_cache_is_as_large_as_without_groups() -> None:
    """The same memory holds as many blocks for all layers, each in five parts; and a window makes
    longer requests possible."""
    options = {"num_gpu_blocks_override": 12, "block_size": 4, "max_num_batched_tokens": 8}
    sizes, lengths = [], []
    for more in ({}, ON):
        with LLM(hf_overrides=WINDOWS, max_num_seqs=2, **options, **more) as llm:
            runner = llm.llm_engine.executor.runner
            sizes.append(sum(tensor.nbytes for each in runner.kv_caches for tensor in each))
            lengths.append(llm.llm_engine.input_processor.capacity)
            assert llm.llm_engine.block_manager.pool.num_blocks == (59 if more else 12)
    assert sizes[0] == sizes[1]
    assert lengths == [48, 4 * (59 - 4 * 5)]  # a window needs 14 tokens: 5 blocks at most
    options.update(num_gpu_blocks_override=None, kv_cache_memory_bytes=sizes[0])
    with LLM(hf_overrides=WINDOWS, max_model_len=150, max_num_seqs=2, **options, **ON) as llm:
        assert llm.llm_engine.input_processor.capacity == 150
    with pytest.raises(ValueError, match="max_model_len"):
        LLM(hf_overrides=WINDOWS, max_model_len=150, max_num_seqs=2, **options)


def test_ranks() -> None:
    some = [0, 2, 8, 9]
    prompts, params = ([each[i] for i in some] for each in (PROMPTS, PARAMS))
    options = {**FEW, "max_num_batched_tokens": 12, "hf_overrides": WINDOWS, **ON}
    with LLM(tensor_parallel_size=2, **options) as llm:
        found = [show(each) for each in llm.generate(prompts, params, use_tqdm=False)]
    assert differing(found, [plainly()[i] for i in some]) == []


@pytest.mark.parametrize(
    "options",
    [{}, {**FEW, "preemption_mode": "swap", "swap_space": 0.01, "max_num_batched_tokens": 16}],
    ids=["default", "swap"],
)
def test_on_a_simulated_gpu(options: dict[str, Any]) -> None:
    """In graphs, with overlapped steps; one wait a step, as without groups."""
    pytest.importorskip("triton")
    from simulated_cuda import simulated_cuda
    from test_simulated_cuda import GPU, READ

    some = [1, 3, 4, 7, 8]
    prompts, params = ([each[i] for i in some] for each in (PROMPTS, PARAMS))
    engine = partial(LLM, hf_overrides=WINDOWS, **{**GPU, **options, **ON})
    with simulated_cuda() as device, engine(attention_backend=device.backend) as llm:
        found = [show(each) for each in llm.generate(prompts, params, use_tqdm=False)]
    assert len(device.graphs) == 4
    assert {*device.waits} == {READ}
    assert differing(found, [plainly()[i] for i in some]) == []


@pytest.mark.slow
def test_the_kernels_themselves(make_checkpoint: Callable[..., Path]) -> None:
    """Triton's, run by its interpreter, in graphs: tables that are parts of one tensor."""
    pytest.importorskip("triton")
    from simulated_cuda import simulated_cuda
    from test_simulated_cuda import GPU

    sizes = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 32}
    windows = {"use_sliding_window": True, "sliding_window": 6, "layer_types": MIXED}
    folder = make_checkpoint("qwen3", **sizes, **windows, head_dim=16)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    answers, prompts = [], [[5, 6, 7], [8] * 17, [9]]
    options = {**GPU, "max_num_seqs": 2, "max_model_len": 32, "block_size": 4}
    with simulated_cuda():
        for changes in (ON, {"device": "cpu", "kernels": "plain"}):
            with LLM(folder, **{**options, **changes}) as llm:
                outputs = llm.generate(prompts, params, use_tqdm=False)
                answers.append([each.outputs[0].token_ids for each in outputs])
    assert answers[0] == answers[1]
