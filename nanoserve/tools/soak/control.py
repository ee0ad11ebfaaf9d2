"""The control plane with a fake runner: thousands of random requests, and planted faults.

Every token is compared with `reference_output`, which knows no cache, no blocks and no batch. A
guilty request carries its fault in extra_args, as a real one brings what makes a step fail. What is
promised: the guilty request ends with "error", every other one gets exactly its tokens, and at the
end every block of both pools is free.

Left out: text, and everything that a sampler does with logits.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nanoserve.arg_utils import EngineArgs
from nanoserve.engine import LLMEngine, StepReport
from nanoserve.output_processor import RequestOutput
from nanoserve.sampling_params import RequestOutputKind, SamplingParams
from nanoserve.sequence import (
    ModelOutput,
    NewSequence,
    SchedulerOutput,
    SequenceUpdate,
)
from nanoserve.tools.fake_executor import (
    FakeExecutor,
    FakeOutput,
    StepFailed,
    reference_output,
    write_config,
)
from nanoserve.tools.soak.rounds import Round

VOCAB_SIZE = 50
NUM_LAYERS = 2  # of the fake cache: a byte for each slot
EOS = 49
MAX_MODEL_LEN = 96
MAX_IDLE_STEPS = 600  # without a new token: more than the longest prompts take, token by token
TRANSIENT_GAP = 2000  # steps between two passing failures: a search for the guilty is shorter
HAS_TIERS = Path(__file__).parents[2].joinpath("extras", "kv_offload", "connector.py").exists()
# Where a guilty request fails: at the launch of its step, when the step is read, in the sampler
# (its own row only), or in the code that makes its output.
FAULTS = ("launch", "result", "row", "consumer")


@dataclass
class Plan:
    """One request, and what will happen to it."""

    name: str
    prompt: list[int]
    params: SamplingParams
    arrival: int  # step
    priority: int = 0
    salt: str | None = None
    fault: str = ""  # one of FAULTS
    after: int = 0  # output tokens before the fault
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # by index
    ended: dict[int, str | None] = field(default_factory=dict)  # index -> finish reason
    num_finished: int = 0  # outputs that say finished
    is_aborted: bool = False
    aborted: set[int] = field(default_factory=set)  # completions

    def expected(self, branch: int, capacity: int) -> list[int]:
        """The tokens of one completion, by the oracle."""
        params, room = self.params, capacity - len(self.prompt)
        stops = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else (EOS,))}
        max_tokens = min(params.max_tokens or room, room)
        seed = params.seed or 0
        return reference_output(self.prompt, max_tokens, stops, seed, branch, VOCAB_SIZE)

    def take(self, output: RequestOutput) -> None:
        """Note what an output brings."""
        self.num_finished += output.finished
        for completion in output.outputs:
            if self.params.output_kind is not RequestOutputKind.DELTA:
                self.tokens[completion.index].clear()
            self.tokens[completion.index] += completion.token_ids
            self.ended[completion.index] = completion.finish_reason


class FaultyExecutor(FakeExecutor):
    """A FakeExecutor on which requests, and steps of some numbers, fail as planned."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.transients: dict[int, str] = {}  # number of the step -> "launch" or "result"
        self.meanwhile: list[Callable[[], object]] = []  # for another thread, within the next step
        self._guilty: dict[int, tuple[str, int]] = {}  # seq_id -> fault, number of tokens with it
        self._failing: dict[int, list[tuple[str, int]]] = {}  # number of the step -> faults

    def launch(self, scheduler_output: SchedulerOutput) -> FakeOutput:
        for call in self.meanwhile:
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
        self.meanwhile.clear()
        for new in scheduler_output.new_sequences:
            self._note(new)
        faults = self._faults(scheduler_output)
        number = self.num_launched
        transient = self.transients.pop(number, "")
        self.fail_next_step = transient == "launch" or any(kind == "launch" for kind, _ in faults)
        if transient == "result":
            faults.append(("result", -1))
        self._failing[number] = faults
        try:
            return super().launch(scheduler_output)
        finally:
            self.num_launched = number + 1  # also if the launch failed

    def _note(self, new: NewSequence) -> None:
        fault = (new.sampling_params.extra_args or {}).get("fault")
        if fault:
            kind, after = fault
            self._guilty[new.seq_id] = kind, new.num_prompt_tokens + after

    def _faults(self, scheduler_output: SchedulerOutput) -> list[tuple[str, int]]:
        """(fault, seq_id) of the scheduled sequences whose time has come."""
        faults: list[tuple[str, int]] = []
        for item in scheduler_output.scheduled:
            kind, num_tokens = self._guilty.get(item.seq_id, ("", 0))
            if kind and item.num_computed_tokens + item.num_scheduled_tokens >= num_tokens:
                faults.append((kind, item.seq_id))
        return faults

    def read(self, pending: FakeOutput, output: ModelOutput) -> ModelOutput:
        faults = self._failing.pop(pending.number, [])
        self.fail_next_result = any(kind == "result" for kind, _ in faults)
        output = super().read(pending, output)
        guilty = {seq_id for kind, seq_id in faults if kind == "row"}
        return without_rows(output, guilty) if guilty else output


def without_rows(output: ModelOutput, guilty: set[int]) -> ModelOutput:
    """`output` with errors in the place of these sequences' tokens."""
    tables: dict[str, Any] = {}
    for name in ("sampled_token_ids", "logprobs", "forks", "prompt_logprobs"):
        table = getattr(output, name).items()
        tables[name] = {seq_id: each for seq_id, each in table if seq_id not in guilty}
    tables["errors"] = {seq_id: LookupError("planted") for seq_id in guilty}
    return replace(output, **tables)


class ControlPart:
    """Rounds over the fake runner. The classes are those under test: a sabotaged one must be
    found."""

    def __init__(self, executor_cls: type[FaultyExecutor] = FaultyExecutor, **seams: Any) -> None:
        self.seams = {"executor_cls": executor_cls, **seams}
        self._root = TemporaryDirectory(prefix="soak-")
        self.folder = write_config(Path(self._root.name, "fake"), VOCAB_SIZE, (EOS,), MAX_MODEL_LEN)

    def __call__(self, round: Round) -> None:
        options = make_options(round)
        options |= make_tiers(round, options, NUM_LAYERS * options["block_size"])
        engine_args = EngineArgs(model=self.folder, **options)
        engine = LLMEngine.from_engine_args(engine_args, **self.seams)
        capacity = min(
            engine.config.max_model_len or MAX_MODEL_LEN,
            engine.executor.num_kv_blocks * engine.config.block_size,
        )
        plans = make_plans(round, capacity)
        round.num_requests = len(plans)
        if drive(round, engine, plans):
            for plan in plans:
                check_plan(round, plan, capacity, engine)
            check_idle(round, engine)
        engine.close()


def make_options(round: Round) -> dict[str, Any]:
    """Any settings that have room for the longest request."""
    rng = round.rng
    block_size = rng.choice([1, 2, 3, 4, 8, 16, 64])
    max_model_len = rng.choice([24, 48, MAX_MODEL_LEN])
    smallest = -(-max_model_len // block_size)
    max_num_seqs = rng.choice([1, 2, 3, 5, 8, 16])
    is_chunked = round.chance(0.8)
    least = max_num_seqs if is_chunked else max(max_num_seqs, max_model_len)
    options: dict[str, Any] = {
        "block_size": block_size,
        "max_model_len": max_model_len,
        "num_kv_blocks": smallest + rng.choice([0, 1, smallest, 4 * smallest]),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": least + rng.choice([0, 1, 7, 64, 300]),
        "enable_chunked_prefill": is_chunked,
        "enable_prefix_caching": round.chance(0.7),
        "long_prefill_token_threshold": rng.choice([0, 0, 3, 11]),
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
        "preemption_mode": rng.choice(["recompute", "swap"]),
        "async_scheduling": round.chance(0.5),
        "max_logprobs": -1,
        "seed": rng.randrange(100),
    }
    if options["preemption_mode"] == "swap" and round.chance(0.7):
        options["num_cpu_blocks"] = rng.choice([1, smallest, 4 * smallest])
    return options


def make_tiers(
    round: Round, options: dict[str, Any], row_bytes: int, folder: str | None = None
) -> dict[str, Any]:
    """At times, tiers for what the prefix cache forgets; with `folder`, perhaps a disk, too."""
    rng = round.rng
    if not options["enable_prefix_caching"] or not HAS_TIERS or round.chance(0.5):
        return {}
    extra: dict[str, Any] = {
        "cpu_bytes_to_use": row_bytes * rng.choice([1, 2, 5, 20, 200]),
        "eviction_policy": rng.choice(["lru", "arc"]),
    }
    if folder is not None and round.chance(0.7):
        max_bytes = (row_bytes + 200) * rng.choice([1, 5, 1000])
        extra["secondary_tiers"] = [{"type": "fs", "root_dir": folder, "max_bytes": max_bytes}]
    connector = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    return {"kv_transfer_config": {**connector, "kv_connector_extra_config": extra}}


def make_plans(round: Round, capacity: int) -> list[Plan]:
    """Requests of which some begin alike, some are guilty, and some repeat another one."""
    rng = round.rng
    beginning = [rng.randrange(VOCAB_SIZE) for _ in range(capacity)]
    kinds = FAULTS if round.chance(0.4) else ()
    plans: list[Plan] = []
    for i in range(rng.choice([1, 4, 15, 40])):
        num_tokens = rng.randint(1, min(capacity - 1, rng.choice([4, 20, 90])))
        num_common = rng.choice([0, num_tokens // 2, num_tokens])
        prompt = beginning[:num_common]
        prompt += [rng.randrange(VOCAB_SIZE) for _ in range(num_tokens - num_common)]
        fault = rng.choice(kinds) if kinds and round.chance(0.15) else ""
        after = rng.choice([0, 0, 1, 2, 6])
        plans.append(
            Plan(
                name=f"request-{i}",
                prompt=prompt,
                params=make_params(round, {"fault": (fault, after)} if fault else None),
                arrival=rng.choice([0, 0, rng.randint(1, 60)]),
                priority=rng.randint(-2, 2),
                salt=rng.choice([None, None, "a", "b"]),
                fault=fault,
                after=after,
            )
        )
    return plans


def make_params(round: Round, extra_args: dict[str, Any] | None) -> SamplingParams:
    """Whatever the control plane looks at."""
    rng = round.rng
    n = rng.choice([1, 1, 1, 2, 5, 17])
    return SamplingParams(
        n=n,
        temperature=float(n > 1),
        seed=rng.randrange(1000),
        max_tokens=rng.choice([None, 1, 2, 8, 20]),
        ignore_eos=round.chance(0.5),
        stop_token_ids=rng.choice([None, [rng.randrange(VOCAB_SIZE) for _ in range(3)]]),
        logprobs=rng.choice([None, None, 0, 2]),
        prompt_logprobs=rng.choice([None, None, None, 0]),
        output_kind=rng.choice(list(RequestOutputKind)),
        detokenize=round.chance(0.5),
        skip_reading_prefix_cache=rng.choice([None, None, True]),
        presence_penalty=rng.choice([0.0, 0.0, 0.5]),  # such a sequence waits for its tokens
        extra_args=extra_args,
    )


def drive(round: Round, engine: LLMEngine, plans: list[Plan]) -> bool:
    """Add and abort as planned, and step to the end. False if it does not come to an end."""
    events = make_events(round, engine, plans)
    by_name = {plan.name: plan for plan in plans}
    executor = engine.executor
    if not any(plan.fault for plan in plans) and round.chance(0.5):
        first, kind = round.rng.randrange(60), round.rng.choice(["launch", "result"])
        executor.transients = {first + i * TRANSIENT_GAP: kind for i in range(9)}
    news: list[int] = [0]  # step in which something was heard last

    def listen(report: StepReport) -> None:
        if any(update.new_token_ids for update in report.updates):
            news.append(number)

    engine.step_listeners.append(listen)
    if round.chance(0.3):
        engine.step_listeners.append(fail)
    number = 0
    while events or executor.meanwhile or engine.has_unfinished_requests():
        if not engine.has_unfinished_requests():  # the step for which these waited was never made
            late, executor.meanwhile = executor.meanwhile, []
            for event in late:
                event()
        for event in events.pop(number, ()):
            if engine.has_unfinished_requests() and round.chance(0.3):
                executor.meanwhile.append(event)
            else:
                event()
        try:
            for output in engine.step():
                by_name[output.request_id].take(output)
                news.append(number)
        except StepFailed:
            pass
        check_now(engine)
        del news[:-1]
        number += 1
        idle_since = max([*news, *events])
        if number - idle_since > MAX_IDLE_STEPS:
            guilty = [plan for plan in plans if plan.fault]
            return round.expect(False, "no request gets a token any more", engine, guilty)
    return True


def check_now(engine: LLMEngine) -> None:
    """The books of blocks and rows agree, whatever is on its way. Raises AssertionError."""
    engine.block_manager.check()
    if engine.kv_connector is not None:
        engine.kv_connector.check()


def make_events(
    round: Round, engine: LLMEngine, plans: list[Plan]
) -> dict[int, list[Callable[[], object]]]:
    """Number of a step -> what is done before it (or by another thread, within it)."""
    rng = round.rng
    events: dict[int, list[Callable[[], object]]] = defaultdict(list)
    for plan in plans:
        events[plan.arrival].append(partial(add, engine, plan))
        if round.chance(0.15):
            events[plan.arrival + rng.randint(0, 25)].append(partial(abort, engine, plan))
        if plan.params.n > 1 and round.chance(0.3):
            index = rng.randrange(plan.params.n)
            events[plan.arrival + rng.randint(1, 25)].append(partial(abort, engine, plan, index))
    return events


def fail(report: StepReport) -> None:
    raise LookupError("planted")


def add(engine: LLMEngine, plan: Plan) -> None:
    """Queue a request; let its consumer fail if that is its fault."""
    salt = plan.salt
    engine_add = engine.add_request
    if plan.fault != "consumer":
        engine_add(plan.name, plan.prompt, plan.params, priority=plan.priority, cache_salt=salt)
        return
    request = engine.make_request(plan.name, plan.prompt, plan.params, plan.priority, salt)
    works = request._append

    def append(update: SequenceUpdate) -> str | None:
        if update.sequence.num_output_tokens > plan.after:
            raise LookupError("planted")
        return works(update)

    request._append = append  # type: ignore[method-assign]
    engine.add(request)


def abort(engine: LLMEngine, plan: Plan, index: int | None = None) -> None:
    """Abort a request, or one of its completions, if it is there."""
    if engine.abort_request(plan.name, index):
        if index is None:
            plan.is_aborted = True
        else:
            plan.aborted.add(index)


def check_plan(round: Round, plan: Plan, capacity: int, engine: LLMEngine) -> None:
    """The request has ended as it must, with the tokens of the oracle."""
    may_vanish = plan.is_aborted or 0 in plan.aborted
    if plan.num_finished == 0 and may_vanish:
        return
    if not round.expect(plan.num_finished == 1, "finished outputs", plan.num_finished, plan):
        return
    reasons = {plan.ended[index] for index in plan.ended}
    if "error" not in reasons and not plan.is_aborted:
        round.expect(len(plan.ended) == plan.params.n, "completions are missing", plan)
    for index, reason in plan.ended.items():
        expected, tokens = plan.expected(index, capacity), plan.tokens[index]
        if reason in ("abort", "error"):
            is_known = index in plan.aborted or plan.is_aborted if reason == "abort" else plan.fault
            round.expect(is_known, f"ends with {reason} for no reason", index, plan)
            round.expect(tokens == expected[: len(tokens)], "wrong tokens", index, expected, plan)
            continue
        is_stop = expected[-1:] != [] and len(expected) < capacity and reason == "stop"
        round.expect(reason == "length" or is_stop, "finish reason", reason, plan)
        round.expect(tokens == expected, "wrong tokens", index, tokens, expected, plan)
        is_late = plan.fault and len(expected) > plan.after and index not in plan.aborted
        round.expect(not is_late, f"guilty ({plan.fault}), and served", index, plan)


def check_idle(round: Round, engine: LLMEngine) -> None:
    """Nothing is left of any request, and the next one is served."""
    engine.executor.transients.clear()
    plan = Plan("probe", [1, 2, 3], SamplingParams(max_tokens=4, seed=3, ignore_eos=True), 0)
    add(engine, plan)
    for _ in range(20):
        for output in engine.step():
            plan.take(output)
    round.expect(plan.tokens[0] == plan.expected(0, 7), "the probe is wrong", plan)
    round.expect(not engine.has_unfinished_requests(), "requests are left")
    round.expect(not engine.scheduler.sequences, "sequences are left", engine.scheduler)
    manager, executor = engine.block_manager, engine.executor
    round.expect(manager.num_free_blocks == executor.num_kv_blocks, "KV blocks are not free")
    free = manager.cpu_pool.num_free_blocks
    round.expect(free == executor.num_cpu_blocks, "CPU blocks are not free", free)
    round.expect(len(executor.rows) <= 1, "rows are left", executor.rows)
