"""The suite that compares HTTP servers: serve.

    one by one     a few requests, each after the last one's answer: latency without load
    all at once    the throughput suite's requests: what streaming over HTTP costs, beside
                   LLM.generate in the same run
    1.5, 3, 6 ...  requests per second, which arrive at random moments: latency under load

Arrivals are a Poisson process, as those of people who do not know each other. The loop is open:
nobody waits for another's answer, so before a server that is too slow ever more requests wait. All
servers get the same requests at the same moments. From some rate on, throughput grows no further
(saturation), and latencies only say how long the load lasted. So what counts is *goodput*: the
requests per second that are answered within limits.

    TTFT   time to first token            ITL    time from one token to the next
    TPOT   mean ITL of one request        E2EL   time to the last token

By default, the limits are SLO_SCALE times the medians without load, those of the slowest server;
and the rates are shares of the rate at which LLM.generate completes the same requests. So they mean
something on any machine. Percentiles are those of all rounds together; throughput, goodput and
ratios are medians of the rounds. Threads wait as each engine has chosen, because threads that spin
would take the core that answers (the other suites let them spin).

Papers: Orca, Yu et al., OSDI 2022 (the open loop); DistServe, Zhong et al., arXiv 2401.09670
(goodput; limits as multiples of a latency). vLLM: vllm/benchmarks/serve.py.
"""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import Any

from nanoserve.bench import turns
from nanoserve.bench.process import EngineError, EngineProcess
from nanoserve.bench.servers import SERVERS
from nanoserve.bench.suites import percentiles
from nanoserve.bench.turns import EngineSpec, Measured, Settings
from nanoserve.bench.workload import draw_arrivals

Values = dict[str, Any]

OFFLINE = "LLM.generate"  # the label of the engine that is no server
ALONE, AT_ONCE = "one by one", "all at once"  # loads; the other loads are rates
SHARES = (0.25, 0.5, 0.75, 1.0, 1.5)  # rates, of the rate at which OFFLINE completes requests
SLO_SCALE = 5  # limits, of the medians of ALONE
PERCENTS = (50, 90, 99)
MOST_LOADS = 100  # of a round; each load has a draw of its own


def serve_suite(settings: Settings) -> Values:
    """Servers under the same loads, and LLM.generate for the load AT_ONCE."""
    specs = [EngineSpec(OFFLINE, "nanoserve", {"detokenize": True}, wait_policy=None)]
    for spec in turns.engine_specs(settings, ()):
        if spec.name in SERVERS:
            specs.append(spec._replace(is_server=True, wait_policy=None))
    job = ServingJob(settings)
    measured = turns.run_in_turns(settings, specs, job, "serve")
    skipped = {name: "has no server here" for name in settings.compare if name not in SERVERS}
    names = [label for label in measured.results if label != OFFLINE]
    limits = settings.goodput or limits_of([pool(measured, name, ALONE) for name in names])
    rows = [
        measure_load(measured, name, load, limits)
        for name in names
        for load in measured.results[name][0]
    ]
    requests = settings.draw(0)
    return {
        "num_requests": len(requests),
        "lengths": settings.lengths,
        "num_output_tokens": sum(request.num_output for request in requests),
        "rates": job.rates,
        "limits_ms": limits,
        "limits": ", ".join(f"{key.upper()} {limit:g} ms" for key, limit in limits.items()),
        "servers": [
            measure_server(
                measured,
                name,
                [row for row in rows if row["engine"] == name],
                settings.temperature,
            )
            for name in measured.results
        ],
        "rows": rows,
        "skipped": {**skipped, **measured.skipped},
    }


class ServingJob:
    """What every engine does in a round: {load: fields of http_client.Load}. OFFLINE has one load,
    AT_ONCE, and no times. No prompt is in two loads of one engine."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rates = settings.request_rates  # empty until OFFLINE has run

    def __call__(self, engine: EngineProcess, round_: int) -> Values:
        settings = self.settings
        requests = settings.draw(round_ * MOST_LOADS)
        if not isinstance(engine, turns.ServerProcess):
            result = engine.generate(requests)
            rate = len(requests) / result["seconds"]
            self.rates = self.rates or tuple(float(f"{share * rate:.2g}") for share in SHARES)
            streams = [{"times": [], "token_ids": each} for each in result["token_ids"]]
            return {AT_ONCE: {"streams": streams, "seconds": result["seconds"]}}
        if not self.rates:
            raise EngineError(f"no rates: {OFFLINE} has failed. Give --request-rates.")
        alone = settings.draw(round_ * MOST_LOADS + 1)[: settings.latency_requests]
        loads = {
            ALONE: join([engine.replay([request], [0.0]) for request in alone]),
            AT_ONCE: engine.replay(requests, [0.0] * len(requests)),
        }
        arrivals = draw_arrivals(settings.num_requests, settings.seed, round_)
        for number, rate in enumerate(self.rates, start=2):
            requests = settings.draw(round_ * MOST_LOADS + number)
            moments = [arrival / rate for arrival in arrivals]
            loads[f"{rate:g}"] = engine.replay(requests, moments)
        return loads


def join(loads: list[Values]) -> Values:
    """Loads that ran one after the other, as one."""
    return {
        "streams": [stream for load in loads for stream in load["streams"]],
        "seconds": sum(load["seconds"] for load in loads),
        "cpu_seconds": sum(load["cpu_seconds"] for load in loads),
        "largest_delay": max(load["largest_delay"] for load in loads),
    }


# -- what the times say --


def latencies(times: list[float]) -> dict[str, float]:
    """Of one request, in ms, by vLLM's names. times: seconds to each of its tokens."""
    decode = times[-1] - times[0]
    tpot = decode / (len(times) - 1) if len(times) > 1 else 0.0
    return {"ttft": times[0] * 1000, "tpot": tpot * 1000, "e2el": times[-1] * 1000}


def limits_of(alone: list[list[list[float]]]) -> dict[str, float]:
    """The default limits in ms, from the times of each server's requests without load."""
    limits = {"ttft": 0.0, "tpot": 0.0}
    for requests in alone:
        for name, limit in limits.items():
            typical = statistics.median(latencies(times)[name] for times in requests)
            limits[name] = max(limit, float(f"{SLO_SCALE * typical:.2g}"))
    return limits


def times_of(load: Values) -> list[list[float]]:
    return [stream["times"] for stream in load["streams"]]


def pool(measured: Measured, name: str, load: str) -> list[list[float]]:
    """The times of all requests of all rounds."""
    return [times for result in measured.results[name] for times in times_of(result[load])]


def num_good(load: Values, limits: dict[str, float]) -> int:
    """How many requests meet every limit."""
    measured = [latencies(times) for times in times_of(load)]
    return sum(all(each[name] <= limit for name, limit in limits.items()) for each in measured)


def measure_load(measured: Measured, name: str, load: str, limits: dict[str, float]) -> Values:
    """The row of one server under one load. "nanoserve_is" compares the medians of E2EL."""
    rounds = [result[load] for result in measured.results[name]]
    times = pool(measured, name, load)
    its = [latencies(each) for each in times]
    gaps = [(b - a) * 1000 for each in times for a, b in pairwise(each)]

    def speed(result: Values) -> float:
        return 1 / statistics.median(each[-1] for each in times_of(result[load]))

    def median(value: Any) -> float:
        return statistics.median(value(each) for each in rounds)

    return {
        "engine": name,
        "load": load,
        "rate": None if load in (ALONE, AT_ONCE) else float(load),
        "seconds": [each["seconds"] for each in rounds],
        "requests_per_second": median(lambda each: len(each["streams"]) / each["seconds"]),
        "tokens_per_second": median(lambda each: sum(map(len, times_of(each))) / each["seconds"]),
        "ttft_ms": percentiles([each["ttft"] for each in its], PERCENTS),
        "itl_ms": percentiles(gaps or [0.0], PERCENTS),
        "tpot_ms": percentiles([each["tpot"] for each in its], PERCENTS),
        "e2el_ms": percentiles([each["e2el"] for each in its], PERCENTS),
        "goodput": median(lambda each: num_good(each, limits) / each["seconds"]),
        "good_share": sum(num_good(each, limits) for each in rounds) / len(times),
        "client_cpu": median(lambda each: each["cpu_seconds"] / each["seconds"]),
        "largest_delay_ms": max(each["largest_delay"] for each in rounds) * 1000,
        "nanoserve_is": measured.ratio(name, speed),
    }


def measure_server(measured: Measured, name: str, rows: list[Values], temperature: float) -> Values:
    """The row of one engine for all its loads (`rows`; OFFLINE has none). "nanoserve_is" compares
    the seconds of AT_ONCE."""
    results = measured.results[name]
    tokens = [tokens_of(result[AT_ONCE]) for result in results]
    expected = [tokens_of(result[AT_ONCE]) for result in measured.results["nanoserve"]]
    same = [
        ours == theirs
        for pair in zip(expected, tokens, strict=True)
        for ours, theirs in zip(*pair, strict=True)
    ]
    seconds = [result[AT_ONCE]["seconds"] for result in results]
    row = {
        **measured.engines[name],
        "seconds": seconds,
        "tokens_per_second": statistics.median(
            sum(map(len, each)) / taken for each, taken in zip(tokens, seconds, strict=True)
        ),
        "nanoserve_is": measured.ratio(name, lambda result: 1 / result[AT_ONCE]["seconds"]),
        "same_tokens": None if temperature else sum(same) / len(same),
    }
    if rows:
        row["most_tokens_per_second"] = max(each["tokens_per_second"] for each in rows)
        row["most_goodput"] = max(each["goodput"] for each in rows)
    return row


def tokens_of(load: Values) -> list[list[int]]:
    return [stream["token_ids"] for stream in load["streams"]]
