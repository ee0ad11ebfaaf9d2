"""The CPU tier and what is below it: the same tokens, from rows that hold what they are said to
hold; no row is lost, and nobody waits for ever.

The engine runs over the fake model (engines.py, fakes.py), and at the end over the demo model. The
tier below is StepTier, which ends its transfers when it is asked for the n-th time.
"""

from __future__ import annotations

import gc
import re
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

import pytest
import test_async_scheduling
import test_speculative
from engines import change_text, expect, finish, make_engine, params, step
from fakes import StepFailed
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from nanoserve.tools.why_waiting import why_waiting

base = pytest.importorskip("nanoserve.extras.kv_offload.base")
policies = pytest.importorskip("nanoserve.extras.kv_offload.policies")
tiering = pytest.importorskip("nanoserve.extras.kv_offload.tiering")
manager = pytest.importorskip("nanoserve.extras.kv_offload.manager")
connector_module = pytest.importorskip("nanoserve.extras.kv_offload.connector")

Block, LookupResult = policies.Block, base.LookupResult
CPUOffloadingManager = manager.CPUOffloadingManager


class StepTier(base.SecondaryTierManager):  # type: ignore[name-defined, misc]
    """A tier in a dict, without threads: a job ends when get_finished_jobs is called for the n-th
    time (n from 1 to `delay`, by turns). A row is read or written only then, and until then a row
    that is to be written holds nothing."""

    tier_type = "step"

    def __init__(
        self, primary: Any, store: dict[bytes, Any], delay: int = 1, fails: int = 0
    ) -> None:
        """fails: every so-many-th block cannot be transferred."""
        self.rows, self.store, self.delay, self.fails = primary.rows, store, delay, fails
        self.jobs: list[list[Any]] = []  # [calls left, job, is it a load]
        self.asked: set[bytes] = set()
        self.num_blocks = self.num_jobs = 0
        self.touched: list[list[bytes]] = []

    def lookup(self, key: bytes) -> Any:
        if self.delay > 1 and key not in self.asked:
            self.asked.add(key)
            return LookupResult.RETRY
        return LookupResult.HIT if key in self.store else LookupResult.MISS

    def submit_store(self, job: Any) -> None:
        self._submit(job, False)

    def submit_load(self, job: Any) -> None:
        for row in job.block_ids:
            self.rows[row] = [[None] * len(part) for part in self.rows[row]]
        self._submit(job, True)

    def _submit(self, job: Any, is_load: bool) -> None:
        self.num_jobs += 1
        self.jobs.append([1 + self.num_jobs % self.delay, job, is_load])

    def get_finished_jobs(self) -> Iterable[Any]:
        for each in self.jobs:
            each[0] -= 1
        done = [each for each in self.jobs if each[0] <= 0]
        self.jobs = [each for each in self.jobs if each[0] > 0]
        return [self._transfer(job, is_load) for _, job, is_load in done]

    def _transfer(self, job: Any, is_load: bool) -> Any:
        good = []
        for key, row in zip(job.keys, job.block_ids, strict=True):
            self.num_blocks += 1
            if self.fails and self.num_blocks % self.fails == 0:
                continue
            if is_load:
                self.rows[row] = self.store[key]
            else:
                self.store[key] = self.rows[row]
            good.append(key)
        return base.JobResult(job.job_id, good)

    def touch(self, keys: Iterable[bytes]) -> None:
        self.touched.append(list(keys))

    def drain_jobs(self, timeout: float) -> None:
        for each in self.jobs:
            each[0] = 0

    def shutdown(self) -> None:
        assert all(each[0] <= 0 for each in self.jobs)


def offload(num_rows: int, policy: str = "lru", block_size: int = 4, **tier: Any) -> dict[str, Any]:
    """kv_transfer_config for the fake model: 2 layers, one byte for each slot. `tier`: of a
    StepTier below."""
    extra: dict[str, Any] = {"cpu_bytes_to_use": num_rows * 2 * block_size}
    extra["eviction_policy"] = policy
    if tier:
        extra["secondary_tiers"] = [{"type": "StepTier", "module_path": __name__, **tier}]
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def run(engine: Any, *prompts: list[int], **fields: Any) -> list[int]:
    """Each prompt after the one before has ended: the tokens are right. Their num_cached_tokens."""
    found = []
    for number, prompt in enumerate(prompts):
        engine.add_request(f"{number}", prompt, params(**fields))
        [output] = finish(engine).values()
        whole = expect(prompt, fields.get("max_tokens", 10))
        assert output.outputs[0].token_ids == whole
        found.append(output.num_cached_tokens)
    return found


def prompt(start: int, length: int = 16) -> list[int]:
    """Tokens that no other start has."""
    return [(start * 7 + i * start) % 49 for i in range(1, length + 1)]


# -- policies --


def accesses(policy: Any, keys: Iterable[Any], capacity: int) -> list[bool]:
    """Which of these accesses are hits: of a block that is not here, the row is that of another."""
    rows, hits = list(range(capacity)), []
    for key in keys:
        hits.append(policy.get(key) is not None)
        if hits[-1]:
            policy.touch(key)
            continue
        policy.miss(key)
        row = rows.pop() if rows else policy.evict(key, lambda *_: True).block_id
        policy.insert(key, Block(row, is_ready=True))
    return hits


def test_the_trace_of_the_module() -> None:
    """Of eight accesses, LRU and ARC hit what the table says, and hold what it says."""
    lines = re.findall(r"^    ([a-e])        (.+)$", policies.__doc__, re.MULTILINE)
    assert len(lines) == 8
    lru, arc = policies.LRUPolicy(3), policies.ARCPolicy(3)
    keys = [key for key, _ in lines]
    hits = {"LRU": accesses(lru, keys, 3), "ARC": accesses(arc, keys, 3)}
    assert sum(hits["LRU"]) == 2 and sum(hits["ARC"]) == 3
    for number in range(1, len(keys) + 1):
        lru, arc = policies.LRUPolicy(3), policies.ARCPolicy(3)
        hit = [accesses(policy, keys[:number], 3)[-1] for policy in (lru, arc)]
        columns = re.split(r"  +", lines[number - 1][1])[:4]
        lists = [lru.blocks, arc.t1, arc.t2, arc.b1]
        shown = [" ".join(each) or "-" for each in lists]
        assert shown == [column.replace(" *", "") for column in columns]
        assert hit == ["*" in columns[0], "*" in columns[1] + columns[2]]


KEYS = st.lists(st.integers(0, 12), max_size=80)


@given(keys=KEYS, capacity=st.integers(1, 6))
def test_lru_is_an_ordered_dict(keys: list[int], capacity: int) -> None:
    model: OrderedDict[int, None] = OrderedDict()
    hits = []
    for key in keys:
        hits.append(key in model)
        model[key] = model.pop(key, None)
        if len(model) > capacity:
            model.popitem(last=False)
    assert accesses(policies.LRUPolicy(capacity), keys, capacity) == hits


def arc_of_the_paper(keys: Iterable[int], c: int) -> list[bool]:
    """Figure 4 of Megiddo and Modha, line by line; the ends of the lists are their MRU ends."""
    p: float = 0
    t1, t2, b1, b2 = deque[int](), deque[int](), deque[int](), deque[int]()
    hits = []

    def replace(x: int) -> None:
        if t1 and (len(t1) > p or (x in b2 and len(t1) == p)):
            b1.append(t1.popleft())
        else:
            b2.append(t2.popleft())

    for x in keys:
        hits.append(x in t1 or x in t2)
        if x in t1 or x in t2:
            (t1 if x in t1 else t2).remove(x)
            t2.append(x)
        elif x in b1:
            p = min(p + max(1, len(b2) / len(b1)), c)
            if len(t1) + len(t2) == c:
                replace(x)
            b1.remove(x)
            t2.append(x)
        elif x in b2:
            p = max(p - max(1, len(b1) / len(b2)), 0)
            if len(t1) + len(t2) == c:
                replace(x)
            b2.remove(x)
            t2.append(x)
        else:
            if len(t1) + len(b1) == c:
                if len(t1) < c:
                    b1.popleft()
                    if len(t1) + len(t2) == c:
                        replace(x)
                else:
                    t1.popleft()
            elif len(t1) + len(t2) + len(b1) + len(b2) >= c:
                if len(t1) + len(t2) + len(b1) + len(b2) == 2 * c:
                    b2.popleft()
                if len(t1) + len(t2) == c:
                    replace(x)
            t1.append(x)
    return hits


@settings(max_examples=300)
@given(keys=KEYS, capacity=st.integers(1, 6))
def test_arc_is_that_of_the_paper(keys: list[int], capacity: int) -> None:
    """The same hits; no key is in two lists, and what is remembered is bounded."""
    policy = policies.ARCPolicy(capacity)
    hits = []
    for number in range(len(keys)):
        policy = policies.ARCPolicy(capacity)
        hits = accesses(policy, keys[: number + 1], capacity)
        lists = [policy.t1, policy.t2, policy.b1, policy.b2]
        assert sum(map(len, lists)) == len(set().union(*lists)) <= 2 * capacity
        assert len(policy.t1) + len(policy.b1) <= capacity
        assert 0 <= policy.target_t1_size <= capacity
    assert hits == arc_of_the_paper(keys, capacity)


@given(keys=KEYS, kind=st.sampled_from(["lru", "arc"]), pinned=st.sets(st.integers(0, 12)))
def test_what_may_not_go_stays(keys: list[int], kind: str, pinned: set[int]) -> None:
    policy = policies.POLICIES[kind](4)
    accesses(policy, keys, 4)
    before = dict(policy.items())
    evicted = policy.evict(99, lambda key, block: key not in pinned)
    gone = before.keys() - set(policy)
    assert (evicted is None) == (not gone) == (before.keys() <= pinned)
    assert not gone & pinned and len(gone) <= 1


@pytest.mark.parametrize("kind", ["lru", "arc"])
def test_rows_in_use_are_not_looked_at_for_each_block(kind: str) -> None:
    """A slow disk, or a long prompt, uses thousands of rows for thousands of steps."""
    in_use, manager = range(100), CPUOffloadingManager(200, kind)
    for key in range(200):
        manager.prepare_store(key)
        manager.complete_store([key])
    manager.prepare_load(in_use)
    looked_at = []
    evict = manager.policy.evict
    manager.policy.evict = lambda key, may_go: evict(  # type: ignore[method-assign]
        key, lambda *block: looked_at.append(block) or may_go(*block)
    )
    assert all(manager.prepare_store(key) is not None for key in range(200, 300))
    assert len(looked_at) <= 200
    assert manager.prepare_store(300) is None
    assert len(looked_at) <= 200
    assert set(in_use) <= {key for key, _ in manager.policy.items()}


@pytest.mark.parametrize("kind", ["lru", "arc"])
def test_a_prefix_is_evicted_from_its_end(kind: str) -> None:
    """Its beginning alone is of use, its end alone is not."""
    policy = policies.POLICIES[kind](4)
    accesses(policy, range(4), 4)
    policies.touch_prefix(policy, range(4))
    for last in (3, 2, 1, 0):
        policy.evict(99, lambda *_: True)
        assert set(policy) == set(range(last))


# -- what happens to blocks --


def test_the_example_of_the_connector() -> None:
    """4 KV blocks, 4 rows: what is evicted comes back, and is not computed again."""
    engine = make_engine(num_kv_blocks=4, kv_transfer_config=offload(4))
    a, b = prompt(1, 11), prompt(2, 11)
    assert run(engine, a, b, a, max_tokens=1) == [0, 0, 8]
    assert engine.executor.num_tokens[2] == 3
    metadata: list[Any] = []
    engine.step_listeners.append(
        lambda report: metadata.append(report.scheduler_output.kv_connector_metadata)
    )
    assert run(engine, b, max_tokens=1) == [8]
    assert len(metadata[0].loads) >= 1


def test_blocks_that_are_about_to_be_loaded_keep_their_rows() -> None:
    """Two rows hold a's blocks. KV blocks for them evict some of b, which find no row."""
    engine = make_engine(num_kv_blocks=4, kv_transfer_config=offload(2))
    assert run(engine, prompt(1, 11), prompt(2, 15), prompt(1, 11), max_tokens=1) == [0, 0, 8]


def test_what_skips_the_cache_loads_nothing_after_a_preemption() -> None:
    """The hashes of its blocks are known then."""
    engine = make_engine(num_kv_blocks=8, kv_transfer_config=offload(100))
    run(engine, prompt(1), prompt(2), prompt(3))
    engine.add_request("x", prompt(1), params(prompt_logprobs=1))
    step(engine)
    engine.scheduler.preempt(engine.scheduler.running[0])
    seq = engine.scheduler.waiting[0]
    assert seq.block_hashes and engine.kv_connector.get_num_new_matched_tokens(seq, 0) == 0
    assert finish(engine)["x"].outputs[0].token_ids == expect(prompt(1))


@pytest.mark.parametrize("is_async", [False, True])
def test_without_room_on_the_device_the_rows_keep_everything(is_async: bool) -> None:
    """Twelve prompts of 16 tokens, by turns: with rows for all, the second round computes one block
    of each; without rows, all of it."""
    options = {"num_kv_blocks": 8, "async_scheduling": is_async}
    prompts = [prompt(number) for number in range(1, 13)]
    assert sum(run(make_engine(**options), *prompts, *prompts)) == 0
    engine = make_engine(**options, kv_transfer_config=offload(100))
    assert run(engine, *prompts, *prompts) == [0] * 12 + [12] * 12


def test_a_step_that_fails_is_forgotten() -> None:
    """Rows that the failed step has written are not served; those of earlier steps are."""
    engine = make_engine(num_kv_blocks=8, kv_transfer_config=offload(100))
    run(engine, *[prompt(number) for number in (1, 2, 3)])
    known = set(engine.kv_connector.manager.policy)
    engine.add_request("x", prompt(4), params())
    engine.executor.fail_next_step = True
    step(engine)
    assert set(engine.kv_connector.manager.policy) <= known
    finish(engine)
    assert run(engine, prompt(1)) == [12]


def test_a_step_fails_whose_stores_somebody_waits_to_load() -> None:
    """The waiting sequence has found a block that the step evicts, and there is no room for it."""
    engine = make_engine(num_kv_blocks=4, kv_transfer_config=offload(30))
    run(engine, prompt(1, 11), max_tokens=1)
    engine.add_request("b", prompt(2, 7), params(max_tokens=8))
    engine.add_request("a", prompt(1, 11), params(max_tokens=1))
    launch, failed = engine.executor.launch, []

    def fail_once(scheduler_output: Any) -> Any:
        metadata = scheduler_output.kv_connector_metadata
        if metadata is not None and metadata.stores and not failed:
            failed.append(
                engine.kv_connector._matched.keys() & engine.kv_connector.unread[-1].stores
            )
            raise ZeroDivisionError
        return launch(scheduler_output)

    engine.executor.launch = fail_once
    outputs = finish(engine)
    assert failed and failed[0]
    assert outputs["a"].outputs[0].token_ids == expect(prompt(1, 11), 1)
    assert outputs["b"].outputs[0].token_ids == expect(prompt(2, 7), 8)
    engine.kv_connector.check()


def test_the_answers_of_requests_that_skip_the_cache() -> None:
    """prompt_logprobs need every prompt token computed."""
    engine = make_engine(num_kv_blocks=8, kv_transfer_config=offload(100))
    run(engine, prompt(1), prompt(2), prompt(1))
    assert run(engine, prompt(1), prompt_logprobs=1) == [0]


def test_salts_keep_blocks_apart() -> None:
    engine = make_engine(num_kv_blocks=8, kv_transfer_config=offload(100))
    for salt, found in ((None, 0), ("a", 0), ("b", 0), ("a", 12), (None, 12)):
        engine.add_request("x", prompt(1), params(), cache_salt=salt)
        assert finish(engine)["x"].num_cached_tokens == found
        run(engine, prompt(2))


def test_the_caches_can_be_emptied() -> None:
    engine = make_engine(num_kv_blocks=8, kv_transfer_config=offload(100))
    run(engine, prompt(1), prompt(2), prompt(3))
    assert engine.reset_prefix_cache()
    assert run(engine, prompt(1)) == [12]  # as in vLLM, the connector's own stays
    assert engine.reset_prefix_cache(reset_connector=True)
    assert run(engine, prompt(1), prompt(2)) == [0, 0]


# -- tiers below --


def test_a_tier_below_outlives_the_engine() -> None:
    """What one engine has computed, another one with the same tier computes not again."""
    store: dict[bytes, Any] = {}
    for round_ in range(2):
        engine = make_engine(kv_transfer_config=offload(30, store=store))
        assert run(engine, prompt(1), prompt(2, 30)) == ([12, 28] if round_ else [0, 0])
        engine.close()
    salted = make_engine(kv_transfer_config=offload(30, store=store))
    salted.add_request("x", prompt(1), params(), cache_salt="another")
    assert finish(salted)["x"].num_cached_tokens == 0


def test_a_sequence_waits_for_its_blocks_without_holding_any() -> None:
    """The others run meanwhile; why_waiting says what it waits for."""
    store: dict[bytes, Any] = {}
    run(make_engine(kv_transfer_config=offload(30, store=store)), prompt(1))
    engine = make_engine(kv_transfer_config=offload(30, store=store, delay=5))
    engine.add_request("waits", prompt(1), params(max_tokens=2))
    engine.add_request("runs", prompt(2), params(max_tokens=1))
    reasons, outlived = set(), False
    while engine.has_unfinished_requests():
        step(engine)
        waiting = engine.scheduler.waiting
        for seq in [seq for seq in waiting if seq.request_id == "waits"]:
            assert seq.seq_id not in engine.block_manager.block_tables
            reasons.add(why_waiting(engine.scheduler, seq.seq_id))
            outlived |= "runs" not in engine.output_processor.requests
    assert "its keys and values are on their way from another tier" in reasons and outlived


def test_what_does_not_come_in_time_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    store: dict[bytes, Any] = {}
    run(make_engine(kv_transfer_config=offload(30, store=store)), prompt(1))
    monkeypatch.setattr(tiering, "LOAD_TIMEOUT", 0.0)
    engine = make_engine(kv_transfer_config=offload(30, store=store, delay=10**6))
    engine.add_request("0", prompt(1), params())
    outputs: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in step(engine)}
    assert outputs["0"].outputs[0].token_ids == expect(prompt(1))
    assert outputs["0"].num_cached_tokens == 0
    engine.kv_connector.tiers.tiers[0].drain_jobs(0)
    engine.kv_connector.poll()
    engine.kv_connector.check()


def test_what_comes_late_is_held_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence was admitted without its blocks, preempted, and waits for them again."""
    store: dict[bytes, Any] = {}
    run(make_engine(kv_transfer_config=offload(30, store=store)), prompt(1))
    engine = make_engine(kv_transfer_config=offload(30, store=store, delay=10**6))
    engine.add_request("x", prompt(1), params())
    with monkeypatch.context() as patch:
        patch.setattr(tiering, "LOAD_TIMEOUT", 0.0)
        while not engine.scheduler.running:
            step(engine)
    [seq] = engine.scheduler.running
    engine.scheduler.preempt(seq)
    engine.block_manager.reset_prefix_cache()
    connector = engine.kv_connector
    [tier] = connector.tiers.tiers
    tier.jobs[0][0] = 10**6
    step(engine)
    assert connector.is_loading(seq)
    tier.drain_jobs(0)
    step(engine)
    connector.check()
    assert finish(engine)["x"].outputs[0].token_ids == expect(prompt(1))
    connector.check()


def test_an_answer_is_kept_no_longer_than_its_sequence() -> None:
    """The rows of a sequence that was not admitted can be evicted when it is gone."""
    engine = make_engine(num_kv_blocks=8, kv_transfer_config=offload(100))
    run(engine, prompt(1), prompt(2), prompt(3))
    engine.add_request("x", prompt(1), params())
    connector, [seq] = engine.kv_connector, engine.scheduler.waiting
    engine.block_manager.get_cached_blocks(seq)
    assert connector.get_num_new_matched_tokens(seq, 0) > 0
    connector.check()
    assert connector.manager.num_idle < len(list(connector.manager.policy))
    engine.abort_request("x")
    connector.check()
    assert connector.manager.num_idle == len(list(connector.manager.policy))


def test_what_other_ranks_have_not_copied_does_not_go_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connector_module, "time", None)  # nor does a step wait for them
    store: dict[bytes, Any] = {}
    engine = make_engine(kv_transfer_config=offload(30, store=store))
    worker = engine.kv_connector.worker
    num_done, worker.num_done = worker.num_done, lambda: 0
    engine.add_request("x", prompt(1), params())
    while engine.has_unfinished_requests():
        step(engine)
    engine.kv_connector.check()
    assert engine.kv_connector.unread and not store
    worker.num_done = num_done
    engine.kv_connector.poll()
    assert not engine.kv_connector.unread
    engine.kv_connector.poll()
    assert len(store) >= 4


def test_the_rows_of_a_failed_transfer_are_free_when_nobody_writes_them() -> None:
    """A step that failed may still run on a GPU, until a later one has been read."""
    manager = CPUOffloadingManager(1)
    assert manager.prepare_store(1) == 0
    manager.complete_store([1], success=False)
    assert manager.prepare_store(2) is None
    manager.end_quarantine()
    assert manager.prepare_store(2) == 0


def test_a_closed_engine_keeps_no_memory() -> None:
    engine = make_engine(kv_transfer_config=offload(30, store={}))
    run(engine, prompt(1))
    worker = weakref.ref(engine.executor.kv_connector)
    engine.close()
    engine.executor.kv_connector = None
    gc.collect()
    assert worker() is None


def test_the_search_for_a_guilty_request_waits_for_no_tier() -> None:
    """A suspect whose blocks are on their way would be skipped, and never be found."""
    store: dict[bytes, Any] = {}
    run(make_engine(kv_transfer_config=offload(30, store=store)), prompt(1), prompt(2))
    engine = make_engine(kv_transfer_config=offload(30, store=store, delay=4))
    for name in ("x", "y"):
        engine.add_request(name, prompt(1 + (name == "y")), params())
    launch = engine.executor.launch

    def fail_with_x(scheduler_output: Any) -> Any:
        sequences = engine.scheduler.sequences
        if any(sequences[item.seq_id].request_id == "x" for item in scheduler_output.scheduled):
            raise ZeroDivisionError
        return launch(scheduler_output)

    reset = engine.kv_connector.reset

    def reset_and_empty() -> None:
        """From now on, nothing is in a row, and nobody knows what is below."""
        reset()
        engine.kv_connector.manager.reset_cache()
        engine.kv_connector.tiers.tiers[0].lookup = lambda key: LookupResult.RETRY

    engine.kv_connector.reset = reset_and_empty
    engine.executor.launch = fail_with_x
    outputs = finish(engine)
    assert outputs["x"].outputs[0].finish_reason == "error"
    assert outputs["y"].outputs[0].token_ids == expect(prompt(2))


@pytest.mark.parametrize("fails", [1, 2, 3])
def test_what_cannot_be_read_is_computed(fails: int) -> None:
    """Every block, every second, every third one; and all behind it."""
    store: dict[bytes, Any] = {}
    run(make_engine(kv_transfer_config=offload(30, store=store)), prompt(1, 30))
    engine = make_engine(kv_transfer_config=offload(30, store=store, fails=fails))
    engine.add_request("x", prompt(1, 30), params())
    [output] = finish(engine).values()
    assert output.outputs[0].token_ids == expect(prompt(1, 30))
    assert output.num_cached_tokens == 4 * (fails - 1)


def test_an_aborted_request_gives_its_rows_back() -> None:
    store: dict[bytes, Any] = {}
    run(make_engine(kv_transfer_config=offload(30, store=store)), prompt(1), prompt(2))
    for num_steps in range(4):
        engine = make_engine(kv_transfer_config=offload(30, store=store, delay=3))
        for name in ("x", "y"):
            engine.add_request(name, prompt(1), params())
        for _ in range(num_steps):
            step(engine)
        engine.abort_request("x")
        assert finish(engine)["y"].outputs[0].token_ids == expect(prompt(1))


# -- how much went where --


def test_metrics_tell_where_prompt_tokens_came_from() -> None:
    """A prompt from the disk, one from a row, one from the device; bytes of each way."""
    metrics = pytest.importorskip("nanoserve.extras.metrics")
    store: dict[bytes, Any] = {}
    run(make_engine(kv_transfer_config=offload(30, store=store)), prompt(1))
    engine = make_engine(num_kv_blocks=8, kv_transfer_config=offload(30, store=store))
    counting = metrics.CountingStatLogger(engine)
    metrics.collect_metrics(engine, counting)
    assert run(engine, prompt(1), prompt(2), prompt(1), prompt(1)) == [12, 0, 12, 12]
    found = {
        (metric.name.removeprefix("vllm:"), *list(metric.labels.values())[2:]): metric.value
        for metric in counting.get_metrics()
        if hasattr(metric, "value")
    }
    by_source = {key[1]: number for key, number in found.items() if key[0].endswith("d_by_source")}
    assert by_source["disk"] == 12
    assert by_source["host"] + by_source["device"] == 24 and by_source["host"] >= 4
    external = by_source["disk"] + by_source["host"]
    assert found[("external_prefix_cache_hits",)] == external
    assert found[("prefix_cache_hits",)] == by_source["device"]
    assert found[("prompt_tokens_by_source", "external_kv_transfer")] == external
    assert found[("prompt_tokens_by_source", "local_cache_hit")] == by_source["device"]
    assert found[("prompt_tokens_by_source", "local_compute")] == 4 * 16 - 36
    assert found[("kv_offload_load_bytes",)] == external // 4 * 8
    assert found[("kv_offload_tiering_chunk_hits", "step")] == 3
    assert found[("kv_offload_tiering_promotion_job_failures", "step")] == 0


# -- whatever comes, whenever --


@st.composite
def offloading_options(draw: st.DrawFn) -> dict[str, Any]:
    """Engines of test_async_scheduling with a CPU tier of 1 to 200 rows, and perhaps one below."""
    options = draw(test_async_scheduling.engine_options())
    tier: dict[str, Any] = {}
    if draw(st.booleans()):
        tier = {"store": {}, "delay": draw(st.integers(1, 4)), "fails": draw(st.integers(0, 3))}
    num_rows = draw(st.sampled_from([1, 2, 3, 5, 11, 200]))
    policy = draw(st.sampled_from(["lru", "arc"]))
    config = offload(num_rows, policy, options["block_size"], **tier)
    speculation = draw(st.sampled_from([None, None, test_speculative.NGRAM]))
    return {
        **options,
        "enable_prefix_caching": True,
        "num_kv_blocks": draw(st.sampled_from([5, 6, 8, 11])),
        "speculative_config": speculation,
        "kv_transfer_config": config,
    }


HISTORIES = given(
    options=offloading_options(),
    adversary=st.sampled_from(test_speculative.ADVERSARIES),
    arrivals=st.lists(test_async_scheduling.ARRIVALS, min_size=1, max_size=12),
    troubles=st.lists(test_async_scheduling.TROUBLE, max_size=6),
)
WHATEVER = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


class Workload(test_async_scheduling.Workload):
    """As there. But a step in flight may fail whose requests were all aborted, while the others
    wait at their gates: then it is nobody's fault, and step() raises."""

    def step(self) -> None:
        try:
            super().step()
        except StepFailed:
            reported = set(map(id, self.reported))
            self.launched = [output for output in self.launched if id(output) in reported]


def play(options: dict[str, Any], adversary: Any, arrivals: Any, troubles: Any) -> None:
    engine = make_engine(**options)
    test_speculative.draft_with(adversary, engine.executor)
    workload = Workload(engine)
    loads: list[Any] = []

    def note(report: Any) -> None:
        loads.extend(getattr(report.scheduler_output.kv_connector_metadata, "loads", ()))

    engine.step_listeners.append(note)
    with pytest.MonkeyPatch.context() as monkeypatch:
        change_text(monkeypatch, workload.find_stop)
        workload.play(arrivals, {step: (what, number) for step, what, number in troubles})
    workload.check_results()
    event(f"loaded: {bool(loads)}")
    engine.close()


@WHATEVER
@HISTORIES
def test_same_tokens_no_row_lost_and_everything_ends(**drawn: Any) -> None:
    """Chunks, both preemptions, forks, beams, salts, priorities, drafts, aborts, failing steps and
    requests; after each step every row and every cached block holds what it is found by."""
    play(**drawn)


@pytest.mark.slow
@settings(WHATEVER, max_examples=750)
@HISTORIES
def test_the_same_in_many_more_histories(**drawn: Any) -> None:
    play(**drawn)
