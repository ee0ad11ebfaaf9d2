"""The player: any options, requests and troubles on one engine; the rules of the control plane.

After each schedule() and each step() the rules are checked. At the end every request has ended, all
blocks are free, and every token is what the same request gets alone, without a cache.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from itertools import count
from typing import Any

import pytest
from fakes import TOKENS, FakeRunner, Planted, digests_of, reference
from hypothesis import strategies as st

from nanoserve import LLM, LLMEngine, RequestOutput, RequestOutputKind, SamplingParams
from nanoserve import engine as engine_module
from nanoserve.output_processor import Request
from nanoserve.scheduler import Scheduler, StepPlan
from nanoserve.sequence import ModelOutput, SchedulerOutput, Sequence, SequenceStatus
from nanoserve.tools.check_blocks import check_blocks

MAX_LEN = 40
Each = Mapping[str, Any]


def draw(**each: Any) -> st.SearchStrategy[dict[str, Any]]:
    """One value each; of a list, any of its items."""
    strategies = {k: st.sampled_from(v) if isinstance(v, list) else v for k, v in each.items()}
    return st.fixed_dictionaries(strategies)


# fmt: off
OPTIONS = draw(
    async_scheduling=[False, True], preemption_mode=["recompute", "swap"],
    num_cpu_blocks=[None, None, 1, 4], block_size=[1, 2, 4, 4],
    num_gpu_blocks_override=[3, 5, 8, 12, 20, 30, 150], max_num_seqs=st.integers(2, 6),
    max_num_batched_tokens=[4, 6, 6, 12, 40], long_prefill_token_threshold=[0, 0, 0, 1, 3],
    scheduling_policy=["fcfs", "priority", "priority"],
    enable_prefix_caching=[True, True, False], enable_chunked_prefill=[True, True, True, False],
)
REQUEST = draw(
    gap=[0, 0, 1, 2, 4],  # steps after the last one
    shared=st.integers(0, 13), own=[0, 1, 3, 6, 12, 25],  # prompt tokens that others have, or not
    max_tokens=[None, 1, 2, 3, 6, 9, 14], min_tokens=[0, 0, 1, 3], n=[1, 1, 1, 2, 3, 7],
    seed=[None, 0, 1, 2], salt=[None, None, "a", "b"], priority=st.integers(0, 2),
    stop_tokens=[(), (), (3,), (5, 6)], stop_string=[None, None, None, 9],
    include_stop=[False, True], bad_word=[None, None, None, 11],
    processor=[None, None, None, "reads", "fails 0", "fails 1", "fails 3"],
    poison=[None] * 7 + [4, 11],  # a step that computes so many of its tokens fails, always
    prompt_logprobs=[None, None, 0], kind=[*RequestOutputKind],
)
TROUBLES = (
    "abort", "abort within", "abort within", "abort in a thread", "abort at a line", "reset",
    "reset", "abort while it is added", "add within", "again", "step within", "fail schedule",
    "fail launch", "fail result", "fail update", "fail detokenize", "fail launch twice",
    "Ctrl-C", "Ctrl-C", "Ctrl-C", "Ctrl-C thrice",
)
# fmt: on
TROUBLE = st.tuples(st.integers(0, 20), st.sampled_from(TROUBLES), st.integers(0, 400))
HISTORY = {
    "options": OPTIONS,
    "requests": st.lists(REQUEST, min_size=2, max_size=9),
    "troubles": st.lists(TROUBLE, max_size=5),
}


class CheckedScheduler(Scheduler):
    """The scheduler, with its rules."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.faults: list[str] = []  # where to fail next
        self.launched: list[SchedulerOutput] = []  # and not read

    def rank(self, seq: Sequence) -> tuple[float, ...]:
        """Who comes first, said once more."""
        is_first = self.config.scheduling_policy == "priority"
        return (seq.priority * is_first, seq.metrics.queued_ts, seq.seq_id)

    def fail(self, place: str) -> None:
        if place in self.faults:
            self.faults.remove(place)
            raise Planted(place)

    def make_output(self, step: StepPlan) -> SchedulerOutput:
        self.fail("schedule")
        return super().make_output(step)

    def append_tokens(self, seq: Sequence, token_ids: list[int]) -> int:
        self.fail("update")
        return super().append_tokens(seq, token_ids)

    def schedule(self) -> SchedulerOutput:
        before, swapped = self.running[:], {s: s.num_computed_tokens for s in self.swapped}
        ready = [s for s in self.waiting + self.swapped if s.num_output_placeholders == 0]
        num_to_come = {s: s.num_output_tokens + s.num_output_placeholders for s in before}
        free = [s for s in before if num_to_come[s] < s.max_tokens or not s.num_output_placeholders]
        step = super().schedule()
        self.check()
        num = {item.seq_id: item.num_scheduled_tokens for item in step.scheduled}
        admitted = [s for s in self.running if s not in before]
        preempted = [s for s in before if s not in self.running]
        assert sum(num.values()) <= self.config.max_num_batched_tokens
        for item in step.scheduled:
            seq, start = self.sequences[item.seq_id], item.num_computed_tokens
            assert 1 <= item.num_scheduled_tokens == seq.num_computed_tokens - start
            assert item.num_scheduled_tokens <= self.max_chunk
            assert seq.num_output_tokens + seq.num_output_placeholders <= seq.max_tokens, seq
            if not self.config.enable_chunked_prefill:
                assert seq.num_computed_tokens >= seq.num_tokens, "a prompt was split"
            assert start == swapped.get(seq, start), "computed again"
        assert all(s.seq_id in num for s in self.running if s in free), "one does not advance"
        assert not (preempted and admitted), "a step preempted one and admitted another"
        if preempted:
            least = min(map(self.rank, preempted))
            assert max(map(self.rank, self.running), default=least) <= least, "wrong victim"
        left = [s for s in ready if s not in admitted]
        if admitted and left:
            assert max(map(self.rank, admitted)) < min(map(self.rank, left)), "overtaken"
        if not num and not any(s.num_output_placeholders for s in self.sequences.values()):
            assert not (self.running or left), "there is work, and the step is empty"
        self.launched += [step] if num else []
        return step

    def check(self) -> None:
        manager, ids = self.block_manager, []
        for status in (SequenceStatus.WAITING, SequenceStatus.SWAPPED, SequenceStatus.RUNNING):
            seqs = getattr(self, status.value)
            assert [*map(self.rank, seqs)] == sorted({*map(self.rank, seqs)}), "not sorted"
            assert all(seq.status is status for seq in seqs)
            ids += [seq.seq_id for seq in seqs]
        assert sorted(ids) == sorted(self.sequences)
        assert {s.seq_id for s in self.running} == set(manager.block_tables), "who holds blocks"
        assert {s.seq_id for s in self.swapped} == set(manager.swapped_tables)
        assert all(seq.num_computed_tokens == 0 for seq in self.waiting)
        assert sum(1 + seq.num_pending_forks for seq in self.running) <= self.config.max_num_seqs
        for seq in self.sequences.values():
            most = seq.num_tokens + seq.num_output_placeholders
            assert 0 <= seq.num_computed_tokens <= most
            assert seq.num_output_placeholders >= 0
        check_blocks(manager)


class CheckedRequest(Request):
    def process(self, *args: Any) -> list[RequestOutput]:
        extra = self.root.sampling_params.extra_args
        if extra.pop("detokenize", False):
            extra["may fail"] = True
            raise Planted("detokenize")
        return super().process(*args)


class CheckedEngine(LLMEngine):
    """The engine, with a book of who may end with an error."""

    request_cls = CheckedRequest
    scheduler_cls = CheckedScheduler
    runner_cls = FakeRunner

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.num_failed: Counter[int] = Counter()  # by seq_id: since its last token
        self.being_read: set[str] = set()
        self.may_fail: set[str] = set()
        self.launched = self.scheduler.launched
        self.executor.runner.faults = self.scheduler.faults

    def update(self, step: SchedulerOutput, model_output: ModelOutput) -> None:
        known = self.scheduler.sequences
        self.being_read = {known[i].request_id for i, *_ in step.scheduled if i in known}
        for seq_id in model_output.sampled:
            self.num_failed.pop(seq_id, None)
        super().update(step, model_output)
        self.being_read = set()
        self.launched.remove(step)

    def recover(self, error: Exception | None) -> None:
        if not isinstance(error, Planted | None):
            raise error  # a rule is broken
        self.may_fail |= self.being_read
        names_no_sequence, known = error and not self.launched, self.scheduler.sequences
        scheduled = {item.seq_id for step in self.launched for item in step.scheduled}
        for seq_id in scheduled & known.keys() if error else ():
            self.num_failed[seq_id] += 1
            if self.num_failed[seq_id] >= 2:
                self.may_fail.add(known[seq_id].request_id)
        try:
            super().recover(error)
            assert not names_no_sequence, "it should have raised"
            for seq in known.values() if error else ():
                assert seq.num_failures < 2 or seq.request_id not in self.requests, "goes on"
        finally:
            self.launched.clear()
            self.being_read = set()


CORE = tuple(
    f"nanoserve/{name}.py" for name in ("engine", "scheduler", "block_manager", "output_processor")
)


@contextmanager
def at_line(number: int, do: Callable[[], object]) -> Iterator[list[int]]:
    """Calls `do` at the n-th line that the control plane runs (but for the lines with which step()
    hands out). What it yields holds how many lines are left until then."""
    left = [number]

    def trace(frame: Any, event: str, _: object) -> Any:
        code = frame.f_code
        if not code.co_filename.endswith(CORE) or code.co_name in ("step", "between_steps"):
            return None
        if event == "line":
            left[0] -= 1
            if left[0] < 0:
                sys.settrace(None)
                do()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield left
    finally:
        sys.settrace(before)


def interrupt() -> None:
    raise KeyboardInterrupt


def in_a_thread(do: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(do).result()


# Reading it takes longer than a history.
engine_module.load_tokenizer = cache(engine_module.load_tokenizer)


def tokenizer() -> Any:
    return engine_module.load_tokenizer(engine_module.resolve_folder(None))


class Player:
    """Plays one history on one engine. Chapters may be switched on by more options."""

    def __init__(self, options: Each, **more: Any) -> None:
        options = {"max_model_len": MAX_LEN, **options, **more}
        options["max_num_seqs"] = min(options["max_num_seqs"], options["max_num_batched_tokens"])
        if not options["enable_chunked_prefill"]:
            options["max_num_batched_tokens"] = max(MAX_LEN, options["max_num_batched_tokens"])
        self.llm = LLM(engine_cls=CheckedEngine, **options)
        self.engine = self.llm.llm_engine
        self.runner = self.engine.executor.runner
        self.names = map("request {}".format, count())
        self.roots: dict[str, Sequence] = {}
        self.asked: dict[str, Each] = {}
        self.tokens: dict[str, dict[int, list[int]]] = {}  # request -> index -> what was handed out
        self.texts: dict[str, dict[int, str]] = {}
        self.last: dict[str, RequestOutput] = {}
        self.aborted: set[str] = set()
        self.is_disturbed = False
        self.looks_wrong: list[tuple[str, list[int]]] = []

    # -- what happens --

    def play(self, requests: list[Each], troubles: list[tuple[int, str, int]]) -> None:
        due, number, at = list(requests), 0, 0
        while due or self.llm.has_unfinished_requests():
            while due and at + due[0]["gap"] <= number:
                at, request = number, due.pop(0)
                self.arrive(next(self.names), request)
            todo = [(what, which) for when, what, which in troubles if when == number]
            todo += [
                ("Ctrl-C", which)
                for when, what, which in troubles
                if what == "Ctrl-C thrice" and when <= number < when + 3
            ]
            for what, which in todo:
                self.disturb(what, which)
            self.step([each for each in todo if each[0] in ("Ctrl-C", "abort at a line")])
            number += 1
            assert number < 2000, "no end"
        self.check_end()

    def arrive(self, name: str, asked: Each, trouble: Any = None) -> None:
        first = 600 + len(self.roots)
        prompt = [*range(500, 500 + asked["shared"]), *range(first, first + asked["own"])]
        prompt = (prompt or [500])[: self.engine.input_processor.capacity - 1]
        params = self.make_params(name, asked)
        kind = params.output_kind
        given = {"prompt_token_ids": prompt, "cache_salt": asked["salt"]}
        request = self.engine.make_request(name, given, params, asked["priority"])
        params.max_tokens = 1  # the caller's later edits reach no request
        assert request.root.sampling_params.output_kind is kind
        self.roots[name], self.asked[name] = request.root, asked
        for record in (self.tokens, self.texts, self.last):
            record.pop(name, None)
        with trouble or nullcontext():
            self.engine.add(request)

    def make_params(self, name: str, asked: Each) -> SamplingParams:
        def read(output: list[int], logits: Any) -> Any:
            wanted = reference(self.roots[name], 0, tokenizer())[0]
            if asked["n"] == 1 and list(output) != wanted[: len(output)]:
                self.looks_wrong.append((name, output))
            if asked["processor"] == f"fails {len(output)}":
                raise Planted("a processor")
            return logits

        def word(key: str) -> list[str]:
            return [tokenizer().decode([TOKENS[asked[key]]])] if asked[key] else []

        # fmt: off
        return SamplingParams(
            n=asked["n"], seed=asked["seed"], stop=word("stop_string"),
            max_tokens=asked["max_tokens"],
            min_tokens=min(asked["min_tokens"], asked["max_tokens"] or MAX_LEN),
            stop_token_ids=[TOKENS[i] for i in asked["stop_tokens"]], bad_words=word("bad_word"),
            include_stop_str_in_output=asked["include_stop"], output_kind=asked["kind"],
            logits_processors=[read] if asked["processor"] else None,
            prompt_logprobs=asked["prompt_logprobs"],
            extra_args={"poison": asked["poison"]} if asked["poison"] else {},
        )
        # fmt: on

    def disturb(self, what: str, which: int) -> None:
        engine, names = self.engine, list(self.roots)
        name = names[which % len(names)] if names else ""
        hook = self.runner.hooks.append
        if what == "reset":
            holds = bool(engine.block_manager.block_tables)
            assert self.llm.reset_prefix_cache() is not holds
        elif what == "fail detokenize":
            if name in engine.requests:
                self.roots[name].sampling_params.extra_args["detokenize"] = True
        elif what.startswith("fail"):
            self.runner.faults += [what.split()[1]] * (1 + what.endswith("twice"))
        elif not names:
            return
        elif what == "abort":
            self.abort(name)
        elif what == "abort within":
            hook(lambda: self.abort(name))
        elif what == "abort in a thread":
            hook(lambda: in_a_thread(lambda: self.abort(name)))
        elif what == "step within":
            hook(self.step_within)
        elif what == "add within":
            add = partial(self.arrive, next(self.names), self.asked[name])
            hook(lambda: in_a_thread(add))
        elif what == "abort while it is added":
            new = next(self.names)
            abort = partial(in_a_thread, partial(self.abort, new))
            self.arrive(new, self.asked[name], at_line(which % 7, abort))
        elif what == "again" and name not in engine.may_fail:
            self.abort(name)
            self.aborted.discard(name)
            self.arrive(name, self.asked[name])
        self.is_disturbed = True

    def step_within(self) -> None:
        for call in (self.llm.step, self.llm.reset_prefix_cache):
            with pytest.raises(RuntimeError):
                call()

    def abort(self, name: str) -> None:
        is_coming = any(each.request_id == name for each in self.engine._outputs)
        before = name in self.engine.requests or is_coming
        assert self.engine.abort_request(name) is before
        if before:
            self.aborted.add(name)

    def step(self, troubles: list[tuple[str, int]]) -> None:
        outputs, was_planted = [], "schedule" in self.runner.faults
        if not troubles:
            with suppress(Planted) if was_planted else nullcontext():
                outputs = self.llm.step()
            self.engine.scheduler.check()
            known = {seq.request_id for seq in self.engine.scheduler.sequences.values()}
            assert known <= self.engine.requests.keys(), "a sequence without a request"
        else:
            [(what, which), *_] = troubles
            name = [*self.roots, ""][which % (1 + len(self.roots))]
            abort = partial(in_a_thread, partial(self.abort, name))
            trouble = interrupt if what == "Ctrl-C" else abort
            with suppress(KeyboardInterrupt, Planted), at_line(which, trouble):
                outputs = self.llm.step()
            if what != "Ctrl-C":  # its output may have been on its way
                outputs = [output for output in outputs if output.request_id != name]
        for output in outputs:
            self.take(output)

    def take(self, output: RequestOutput) -> None:
        name, kind = output.request_id, self.asked[output.request_id]["kind"]
        assert name not in self.aborted, "an output after the abort"
        assert name not in self.last or not self.last[name].finished, "an output after the last"
        assert kind is not RequestOutputKind.FINAL_ONLY or output.finished
        assert not (output.finished and name in self.engine.requests), "ended, and goes on"
        self.last[name] = output
        tokens, texts = self.tokens.setdefault(name, {}), self.texts.setdefault(name, {})
        for each in output.outputs:
            had, text = tokens.get(each.index, []), texts.get(each.index, "")
            if kind is not RequestOutputKind.DELTA:
                assert each.token_ids[: len(had)] == had
                had, text = [], ""
            tokens[each.index], texts[each.index] = had + each.token_ids, text + each.text

    # -- what comes of it --

    def check_end(self) -> None:
        engine, scheduler, manager = self.engine, self.engine.scheduler, self.engine.block_manager
        assert not engine.requests and not scheduler.sequences
        assert not self.looks_wrong, self.looks_wrong
        assert not any(manager.pool.ref_counts) and not any(manager.cpu_pool.ref_counts)
        is_known = set(self.runner.rows) <= set(scheduler.dropped_seq_ids)
        assert scheduler.is_restart or is_known, "the runner keeps rows"
        for name, root in self.roots.items():
            if name not in self.aborted:
                self.check_request(name, root)
        if not self.is_disturbed and not engine.may_fail:
            self.check_cache()

    def check_request(self, name: str, root: Sequence) -> None:
        assert name in self.last and self.last[name].finished, f"{name} never ended"
        last, asked, params = self.last[name], self.asked[name], root.sampling_params
        ends = {each.index: each for each in last.outputs}
        if params.output_kind is not RequestOutputKind.DELTA:
            assert [*ends] == [*range(asked["n"])]
        assert set(self.tokens[name]) == set(range(asked["n"]))
        has_failed = "error" in [each.finish_reason for each in last.outputs]
        fails = (asked["processor"] or "").startswith("fails") or params.extra_args.get("may fail")
        may_fail = fails or name in self.engine.may_fail
        assert may_fail or not has_failed, f"{name} has an error that nobody planted"
        for branch, tokens in self.tokens[name].items():
            wanted, text, reason = reference(root, branch, tokenizer())
            end = ends.get(branch)
            if not has_failed:
                assert (tokens, self.texts[name][branch]) == (wanted, text), (name, branch)
                assert end is None or end.finish_reason == reason
            elif name not in self.engine.may_fail or params.output_kind.name != "DELTA":
                assert tokens == wanted[: len(tokens)]
            if end is not None and end.finish_reason == "stop":
                allowed = [None] if tokens[-1] == TOKENS[0] else [tokens[-1], *params.stop]
                assert end.stop_reason in allowed
        if asked["prompt_logprobs"] is not None and not has_failed:
            digests = digests_of(root.prompt_token_ids)[:-1]
            first, *found = last.prompt_logprobs
            assert first is None
            named = [next(iter(entry.values())).logprob for entry in found]
            assert named == [-float(digest % 999) for digest in digests]
        assert 0 <= last.num_cached_tokens < root.num_prompt_tokens

    def check_cache(self) -> None:
        """What can be found are exactly the whole blocks of all texts, if none had to go."""
        manager, size = self.engine.block_manager, self.engine.config.block_size
        found, wanted, allowed = set(), set(), set()
        for block in manager.pool.cached_blocks:
            tokens: tuple[int, ...] = ()
            while block.parent is not None:
                tokens, block = block.token_ids + tokens, block.parent
            found.add((block.token_ids, tokens))
        for name, root in self.roots.items():
            for output in self.tokens[name].values():
                tokens = (*root.prompt_token_ids, *output)
                wholes = [tokens[:end] for end in range(size, len(tokens) + 1, size)]
                allowed |= {(root.extra_keys, whole) for whole in wholes}
                most = len(tokens) - 1 - self.engine.config.async_scheduling
                wanted |= {(root.extra_keys, whole) for whole in wholes if len(whole) <= most}
        if not manager.enable_prefix_caching:
            assert not found
        elif len(self.roots) * 60 <= manager.num_blocks * size:
            assert wanted <= found <= allowed
