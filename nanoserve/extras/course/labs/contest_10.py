"""Lab 10, Policy contest: which scheduler keeps most promises?

    policy.py, the student's:   class Policy(Scheduler): ...          at most 60 lines of code
      hidden traces of requests -> the engine's control plane, with a clock that the steps move:

        step time = a + b * tokens + c * KV          15 ms + 0.15 ms * 120 + 0.0005 ms * 3,000

      a request is good if its first token comes within 0.6 s and each later one within 60 ms
      goodput = good requests per second

No step takes real time, so a policy's goodput is the same number on each machine: no noise, no GPU,
no torch. The tokens of each request are taken from the fake model's own output, and compared with
the right ones at the end: a policy that loses a block, or computes less than it must, earns nothing
on that trace. When an output ends is decided by a stop token; max_tokens is alike for all, so that
no policy can read a length that a real one would not know.

    $ nanoserve course grade SUBMISSION --labs 10 --seed 7    beside first come, first served
    $ nanoserve course contest A B C --seed 7 --plot goodput.svg

The seed is the lecturer's: it decides the hidden traces.

vLLM: benchmarks/ (`vllm bench serve --goodput`) measures this in real seconds.
"""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from nanoserve.block_manager import BlockManager
from nanoserve.config import EngineConfig
from nanoserve.extras.course.spec import Behaviour, Exercise, Lab, Setting, Task, Wrong, must
from nanoserve.sampling_params import SamplingParams
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import RequestMetrics, SchedulerOutput, Sequence
from nanoserve.tools.fake_executor import FakeExecutor, reference_output

FILE, CLASS = "policy.py", "Policy"
MOST_LINES, MOST_EMPTY_STEPS = 60, 1000
ENGINE_FILES = ("nanoserve/scheduler.py", "nanoserve/sequence.py")
TTFT_LIMIT, ITL_LIMIT = 0.6, 0.06  # seconds
STEP, PER_TOKEN, PER_KV = 15e-3, 1.5e-4, 5e-7  # seconds: a, b, c
MAX_TOKENS = 48  # of every request; most end before, by their stop token
OPTIONS = {
    "num_gpu_blocks_override": 300,
    "block_size": 16,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 1024,
    "max_model_len": 1024,
}
STARTER = f'''"""My policy: at most {MOST_LINES} lines of code.

A request is good if its first token comes {TTFT_LIMIT:g} s after its arrival at the latest,
and each later token at most {ITL_LIMIT * 1000:g} ms after the one before. More are better.

A step takes {STEP * 1000:g} ms, and {PER_TOKEN * 1000:g} ms for each token that it computes, and
{PER_KV * 1e6:g} us for each token that it reads from the KV cache. self.now is the time when the
step begins, seq.metrics.queued_ts the time when a request arrived, both in seconds. Each method
of nanoserve/scheduler.py can be overridden. How long an output will be, nobody knows.
"""

from nanoserve.scheduler import Scheduler


class Policy(Scheduler):
    now = 0.0

    def urgency(self, seq):
        """Smaller is more urgent. It must not change while a sequence waits or runs."""
        return super().urgency(seq)
'''


class Request(NamedTuple):
    """One request of a trace."""

    arrival: float  # seconds
    prompt: list[int]
    seed: int  # of its random stream, which no policy sees: so none can know its output
    stop: int  # the token that ends it
    output: list[int]  # the right one


class Result(NamedTuple):
    """What a policy made of a trace."""

    num_good: int
    num_requests: int
    seconds: float  # of the simulated clock
    num_late_first: int  # requests whose first token came too late
    num_late_next: int  # requests with a pause that was too long
    num_preemptions: int

    @property
    def goodput(self) -> float:
        """Good requests per second."""
        return self.num_good / self.seconds


class Kind(NamedTuple):
    """What the requests of a trace are like."""

    title: str
    rate: float  # requests per second
    prompts: tuple[tuple[int, int], ...]  # ranges of lengths, each as likely as the others
    burst: int  # requests that arrive together


KINDS = {
    "chat": Kind("short prompts, more than the machine can serve", 45.0, ((10, 120),), 1),
    "mixed": Kind("a few long prompts among short ones", 14.0, ((10, 80),) * 5 + ((500, 900),), 1),
    "bursts": Kind("many requests at once, then a pause", 25.0, ((20, 200),), 30),
}
NUM_REQUESTS = 120
RATES = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)  # of the plot


def make_trace(name: str, seed: int) -> list[Request]:
    """The requests of "chat", or of "chat 1.5": arriving 1.5 times as fast."""
    kind_name, _, factor = name.partition(" ")
    kind, rng = KINDS[kind_name], random.Random(f"trace {seed} {kind_name}")
    rate, now, requests = kind.rate * float(factor or 1), 0.0, []
    for number in range(NUM_REQUESTS):
        if number % kind.burst == 0:
            now += rng.expovariate(rate / kind.burst)
        length = rng.randint(*rng.choice(kind.prompts))
        prompt = [rng.randrange(900) for _ in range(length)]
        own_seed = rng.randrange(2**32)
        output = reference_output(prompt, rng.randint(4, MAX_TOKENS), seed=own_seed)
        stop = output[-1]
        output = output[: output.index(stop) + 1]
        requests.append(Request(now, prompt, own_seed, stop, output))
    return requests


def step_seconds(step: SchedulerOutput) -> float:
    """How long a step takes: a + b * tokens + c * KV."""
    num_read = sum(each.num_computed_tokens + each.num_scheduled_tokens for each in step.scheduled)
    return STEP + PER_TOKEN * step.total_num_scheduled_tokens + PER_KV * num_read


def simulate(trace: list[Request], scheduler_cls: type[Scheduler]) -> Result:
    """Serve a trace. Raises Wrong for a policy that breaks a rule, or loses a token."""
    config = EngineConfig(**OPTIONS)  # type: ignore[arg-type]
    executor = FakeExecutor(config)
    manager = BlockManager(config.num_gpu_blocks_override or 0, config.block_size)
    scheduler: Any = scheduler_cls(config, manager)
    now, num_arrived, num_empty = 0.0, 0, 0
    times: list[list[float]] = [[] for _ in trace]
    outputs: list[list[int]] = [[] for _ in trace]
    seqs = [make_sequence(number, request) for number, request in enumerate(trace)]
    while any(len(out) < len(each.output) for out, each in zip(outputs, trace, strict=True)):
        while num_arrived < len(trace) and trace[num_arrived].arrival <= now:
            scheduler.add(seqs[num_arrived])
            num_arrived += 1
        scheduler.now = now
        step = scheduler.schedule()
        if step.is_empty:
            num_empty += 1
            must(num_empty < MOST_EMPTY_STEPS, "requests wait, and nobody is scheduled any more")
            is_idle = num_arrived < len(trace) and not scheduler.has_unfinished()
            now = trace[num_arrived].arrival if is_idle else now + STEP
            continue
        num_empty = 0
        check_step(step)
        now += step_seconds(step)
        news = [new._replace(seed=trace[new.seq_id].seed) for new in step.new_sequences]
        model_output = executor.execute_model(replace(step, new_sequences=tuple(news)))
        for seq_id, tokens in model_output.sampled_token_ids.items():
            outputs[seq_id] += tokens
            times[seq_id] += [now] * len(tokens)
        scheduler.update_from_output(step, model_output)
    for number, (got, request) in enumerate(zip(outputs, trace, strict=True)):
        must(got == request.output, f"request {number} gave {got}, and not {request.output}")
    free, number = manager.num_free_blocks, manager.num_blocks
    must(free == number, f"all have ended, and {free} of {number} blocks are free")
    return judge(trace, times, sum(seq.metrics.num_preemptions for seq in seqs))


def make_sequence(number: int, request: Request) -> Sequence:
    """All that a policy sees of a request."""
    return Sequence(
        seq_id=number,
        request_id=str(number),
        prompt_token_ids=request.prompt,
        sampling_params=SamplingParams(max_tokens=MAX_TOKENS),
        max_tokens=MAX_TOKENS,
        stop_token_ids=frozenset({request.stop}),
        seed=0,
        metrics=RequestMetrics(request.arrival, request.arrival),
    )


def check_step(step: SchedulerOutput) -> None:
    """The limits that no policy may exceed. The sum is counted again: the time depends on it."""
    total = sum(each.num_scheduled_tokens for each in step.scheduled)
    most, most_seqs = OPTIONS["max_num_batched_tokens"], OPTIONS["max_num_seqs"]
    must(total <= most, f"a step has {total} tokens, the budget is {most}")
    must(total == step.total_num_scheduled_tokens, f"a step of {total} tokens has a wrong sum")
    must(not any(each.draft_token_ids for each in step.scheduled), "a policy may not guess tokens")
    number = len(step.scheduled)
    must(number <= most_seqs, f"a step has {number} sequences, max_num_seqs is {most_seqs}")


def judge(trace: list[Request], times: list[list[float]], num_preemptions: int) -> Result:
    """Count the promises that were kept."""
    firsts = [own[0] - each.arrival for own, each in zip(times, trace, strict=True)]
    late_first = [wait > TTFT_LIMIT for wait in firsts]
    late_next = [any(b - a > ITL_LIMIT for a, b in pairwise(own)) for own in times]
    good = sum(not (a or b) for a, b in zip(late_first, late_next, strict=True))
    end = max(own[-1] for own in times)
    return Result(good, len(trace), end, sum(late_first), sum(late_next), num_preemptions)


class Contest(Exercise):
    """Beside first come, first served."""

    def get_tasks(self, setting: Setting) -> list[Task]:
        valid = Task("10.1", "", "a policy that keeps the rules")
        better = Task("10.2", "", "goodput")
        for name, kind in KINDS.items():
            valid.behaviour(0.5, f"{name}: {kind.title}")(named(name))
        for name in KINDS:
            better.behaviour(0.5, f"{name}: no worse than first come, first served")(named(name))
        better.behaviour(1, "all traces together: a fifth better")(named("1.2"))
        better.behaviour(1, "all traces together: twice as good")(named("2"))
        return [valid, better]

    def get_files(self, setting: Setting) -> dict[str, str]:
        return {FILE: STARTER}

    def grade(self, lab: Lab, folder: Path, setting: Setting) -> list[Any]:
        from nanoserve.extras.course.grader import Outcome, refuse

        valid, better = tasks = self.get_tasks(setting)
        try:
            found = run_policy(lab, read_policy(folder), valid, setting.seed)
        except ValueError as error:
            return refuse(lab, tasks, str(error))
        mine: dict[str, float] = {}
        for each in found:
            result = read_result(each.message) if each.status == "right" else None
            if result is not None:
                mine[each.behaviour.name] = result.goodput
                each.message = describe(result)
        if not mine:
            return found + refuse(lab, [better], "no trace was served by the rules", "wrong")
        base = {name: serve_in_order(name, setting.seed).goodput for name in KINDS}
        for behaviour in better.behaviours:
            if behaviour.name in KINDS:
                reached, wanted = mine.get(behaviour.name, 0.0), base[behaviour.name]
            else:
                wanted = float(behaviour.name) * sum(base.values())
                reached = sum(mine.values()) if len(mine) == len(KINDS) else 0.0
            is_right = reached >= wanted and reached > 0
            message = f"{reached:.2f} good requests per second; {wanted:.2f} are wanted"
            found.append(Outcome(lab, better, behaviour, "right" if is_right else "wrong", message))
        return found

    def prepare(self, job: dict[str, Any]) -> list[Behaviour]:
        from nanoserve.extras.course.child import define

        policy = define(job["source"], FILE).get(CLASS)
        if not (isinstance(policy, type) and issubclass(policy, Scheduler)):
            raise Wrong(f"{FILE} must have a class {CLASS}(Scheduler).")
        return [
            Behaviour(name, name, 0, partial(try_policy, name, job["seed"], policy))
            for name in job["names"]
        ]


def named(name: str) -> Any:
    """For a behaviour of this name."""

    def check() -> None:
        raise Wrong("graded by the exercise")

    check.__name__ = name
    return check


def try_policy(name: str, seed: int, policy: type[Scheduler]) -> str:
    """In the child: the result on a trace, as JSON."""
    return json.dumps(simulate(make_trace(name, seed), policy))


def serve_in_order(name: str, seed: int) -> Result:
    """First come, first served. Raises ValueError if this engine has holes."""
    try:
        return simulate(make_trace(name, seed), Scheduler)
    except NotImplementedError as error:
        raise ValueError(
            f"this engine has holes ({error}); a policy needs a whole one. Fill them first, or use "
            "an installed nanoserve."
        ) from error


def read_result(text: str) -> Result | None:
    """What try_policy said; None for any other text."""
    try:
        result = Result(*json.loads(text))
        is_sound = 0 <= result.num_good <= NUM_REQUESTS and result.seconds > 0
        return result if is_sound and result.num_requests == NUM_REQUESTS else None
    except (ValueError, TypeError):
        return None


def run_policy(lab: Lab, source: str, task: Task, seed: int) -> list[Any]:
    """An Outcome for each behaviour of the task, which is named after a trace."""
    from nanoserve.extras.course.grader import run_behaviours

    return run_behaviours(lab, task, source, seed, {})


def read_policy(folder: Path) -> str:
    """The student's file. Raises ValueError with a sentence."""
    from nanoserve.extras.course.grader import read_own_file

    source = read_own_file(folder, FILE, ENGINE_FILES, private=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nanoserve.tools"):
            raise ValueError(f"{FILE} imports {node.module}: a policy cannot run the model.")
    number = count_lines(source)
    if number > MOST_LINES:
        raise ValueError(f"{FILE} has {number} lines of code; at most {MOST_LINES} are allowed.")
    return source


def count_lines(source: str) -> int:
    """Lines of code, written as `ast.unparse` writes them: a long line does not help. Imports and
    docstrings do not count."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for block in ("body", "orelse", "finalbody"):
            statements = getattr(node, block, None)
            if isinstance(statements, list):
                kept = [each for each in statements if not is_free(each)]
                setattr(node, block, kept or ([ast.Pass()] if statements else []))
    text = ast.unparse(tree)
    return sum(1 + len(line) // 100 for line in text.splitlines() if line.strip())


def is_free(node: ast.AST) -> bool:
    """Imports, and docstrings."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text or isinstance(node, ast.Import | ast.ImportFrom)


def describe(result: Result) -> str:
    """One line."""
    return (
        f"{result.num_good} of {result.num_requests} requests were good in {result.seconds:.1f} s: "
        f"{result.goodput:.2f} per second; {result.num_late_first} first tokens too late, "
        f"{result.num_late_next} requests with a pause, {result.num_preemptions} preemptions"
    )


# -- the leaderboard --


class Row(NamedTuple):
    """One policy: goodput by trace, and by the rate of arrivals."""

    name: str
    goodputs: dict[str, float]
    problem: str = ""

    @property
    def total(self) -> float:
        return sum(self.goodputs.get(name, 0.0) for name in KINDS)


def enter(name: str, folder: Path | None, seed: int, with_rates: bool) -> Row:
    """A row for a folder with policy.py; None: first come, first served."""
    names = [*KINDS, *(f"mixed {rate:g}" for rate in RATES if with_rates)]
    if folder is None:
        results = {each: serve_in_order(each, seed) for each in names}
        return Row(name, {each: result.goodput for each, result in results.items()})
    task = Task("10.1", "", "contest")
    for each in names:
        task.behaviour(0, each)(named(each))
    try:
        outcomes = run_policy(LAB, read_policy(folder), task, seed)
    except ValueError as error:
        return Row(name, {}, str(error))
    found = {}
    for each in outcomes:
        result = read_result(each.message) if each.status == "right" else None
        if result is None:
            return Row(name, {}, each.message.partition("\n")[0])
        found[each.behaviour.name] = result.goodput
    return Row(name, found)


def leaderboard(rows: Iterable[Row]) -> str:
    """A Markdown table, the best policy first."""
    lines = [f"| | policy | {' | '.join(KINDS)} | all |", "|---|---|" + "---|" * (len(KINDS) + 1)]
    ordered = sorted(rows, key=lambda row: (bool(row.problem), -row.total, row.name))
    for place, row in enumerate(ordered, start=1):
        cells = [f"{row.goodputs[name]:.2f}" if not row.problem else "-" for name in KINDS]
        last = row.problem.replace("|", " ") or f"{row.total:.2f}"
        lines.append(f"| {place} | {row.name} | {' | '.join(cells)} | {last} |")
    return "\n".join(lines)


COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c")


def plot(rows: Iterable[Row]) -> str:
    """Goodput against the rate of arrivals, as SVG: one line for each policy."""
    shown = [row for row in rows if not row.problem]
    base = KINDS["mixed"].rate
    highest = max(row.goodputs[f"mixed {rate:g}"] for row in shown for rate in RATES) or 1.0
    left, top, width, height = 60, 20, 460, 260

    def at(rate: float, goodput: float) -> tuple[float, float]:
        return left + width * rate / RATES[-1], top + height * (1 - goodput / highest)

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 340" font-family="sans-serif" '
        'font-size="13"><rect width="720" height="340" fill="white"/>',
        f'<path d="M{left} {top}V{top + height}H{left + width}" stroke="#444" fill="none"/>',
        f'<text x="{left + width / 2}" y="330" text-anchor="middle">requests per second</text>',
        f'<text transform="translate(16 {top + height / 2}) rotate(-90)" text-anchor="middle">'
        "good requests per second</text>",
    ]
    for rate in RATES:
        x, y = at(rate, 0)
        parts.append(f'<text x="{x:g}" y="{y + 18:g}" text-anchor="middle">{rate * base:g}</text>')
    for part in (0, 0.5, 1):
        x, y = at(0, highest * part)
        parts.append(
            f'<text x="{x - 6:g}" y="{y + 4:g}" text-anchor="end">{highest * part:.1f}</text>'
        )
    for number, row in enumerate(shown):
        colour = COLOURS[number % len(COLOURS)]
        points = [at(rate, row.goodputs[f"mixed {rate:g}"]) for rate in RATES]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" stroke="{colour}" fill="none" stroke-width="2"/>')
        y = top + 14 + 20 * number
        name = row.name.replace("&", "&amp;").replace("<", "&lt;")
        parts.append(f'<text x="{left + width + 20}" y="{y}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


LAB = Lab(10, "Policy contest", [], seconds=20.0, exercise=Contest())
