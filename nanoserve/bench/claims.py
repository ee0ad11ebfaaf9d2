"""What do the documents claim, and what was measured here?

Document 3 of documents.md (section 性能优化技术) has a table of seven techniques, each with its
effect. Each is a Claim here: the suite of bench.py that measures it, and what to read in that
suite's result.

    claim                        measured by                              compared with
    PagedAttention               memory: KV slots that hold tokens        slots reserved by length
    Continuous Batching          batching: the same engine                static batches
    Prefix Caching               prefix: prompts with one beginning       caching off
    Speculative Decoding         spec: the same engine                    no drafts
    Chunked Prefill              chunked: long prompts among decodes      whole prompts
    CUDA Graphs                  batch: the variant "eager"               no graphs
    Tensor Parallelism           parallel: weights on each of two ranks   one rank

The documents do not say on which machine or model their figures were measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Suite = dict[str, Any]  # the result of one suite, as --json writes it


class Claim(NamedTuple):
    """One line of the document's table."""

    technique: str
    effect: str  # as the document claims it
    suite: str  # of bench.py
    measured: Callable[[Suite], str | None]  # None: the result does not hold it


def find(suite: Suite, **values: Any) -> dict[str, Any] | None:
    """The last row that has these values."""
    rows = [row for row in suite.get("rows", ()) if values.items() <= row.items()]
    return rows[-1] if rows else None


def read_memory(suite: Suite) -> str | None:
    paged, reserved = (find(suite, way=way) for way in ("paged", "contiguous, maximum"))
    if not paged or not reserved:
        return None
    return (
        f"{paged['used_share']:.1%} of the reserved slots hold tokens, against "
        f"{reserved['used_share']:.1%}; {paged['mean_running'] / reserved['mean_running']:.1f} x "
        "as many requests at once"
    )


def read_batching(suite: Suite) -> str | None:
    static = find(suite, batching="static")
    return (
        None if static is None else f"{static['continuous_is']:.2f} x the output tokens per second"
    )


def read_prefix(suite: Suite) -> str | None:
    return (
        f"{suite['speed_up']:.2f} x as fast, with {suite['prefix_len']} common tokens before "
        f"{suite['suffix_len']} of its own"
    )


def read_chunked(suite: Suite) -> str | None:
    rows = suite["rows"][1:]
    if not rows:
        return None
    smallest = rows[-1]
    against = smallest["against_off"]
    return (
        f"chunks of {smallest['chunks']}: the long prompt's TTFT is {against['ttft']:.2f} x, the "
        f"p99 gap between the tokens of the others {against['gap_p99']:.2f} x"
    )


def read_spec(suite: Suite) -> str | None:
    size = min((row["batch"] for row in suite["rows"]), default=0)
    rows = [row for row in suite["rows"] if row["batch"] == size]
    if not rows:
        return None
    rows.sort(key=lambda row: row["speed_up"])
    worst, best = (
        f"{row['speed_up']:.2f} x ({row['method']}, {row['prompts']})"
        for row in (rows[0], rows[-1])
    )
    return f"tokens per second at batch {size}: {worst} to {best}"


def read_graphs(suite: Suite) -> str | None:
    size = min((row["batch"] for row in suite["rows"]), default=0)
    ours = find(suite, engine="nanoserve", batch=size)
    eager = find(suite, engine="nanoserve, eager", batch=size)
    if not ours or not eager:
        return None
    ratio = ours["tokens_per_second"] / eager["tokens_per_second"]
    return f"{ratio:.2f} x the output tokens per second at batch {size}"


def read_parallel(suite: Suite) -> str | None:
    one, two = (find(suite, ranks=number) for number in (1, 2))
    if not one or not two:
        return None
    share = two["weight_mib_per_rank"] / one["weight_mib_per_rank"]
    return f"each of 2 ranks holds {share:.0%} of the weights"


CLAIMS = (
    Claim("PagedAttention", "memory efficiency up 20-30%", "memory", read_memory),
    Claim("Continuous Batching", "throughput up 2-3x", "batching", read_batching),
    Claim("Prefix Caching", "requests with the same prefix up 10x+", "prefix", read_prefix),
    Claim("Speculative Decoding", "latency down 1.5-3x", "spec", read_spec),
    Claim("Chunked Prefill", "TTFT down", "chunked", read_chunked),
    Claim("CUDA Graphs", "small batches up 30-50%", "batch", read_graphs),
    Claim("Tensor Parallelism", "large models are supported", "parallel", read_parallel),
)
DOCUMENT = "002, 性能优化技术"
NOT_MEASURED = "not measured"


def measure_claims(suites: dict[str, Suite]) -> list[tuple[str, str, str]]:
    """(technique, the document's effect, measured here) of every claim, from one run's suites."""
    return [(claim.technique, claim.effect, measure(claim, suites)) for claim in CLAIMS]


def measure(claim: Claim, suites: dict[str, Suite]) -> str:
    """What one run's suites say about a claim, or why they say nothing."""
    if claim.suite not in suites:
        return f"not in this run: bench.py {claim.suite}"
    return claim.measured(suites[claim.suite]) or f"{NOT_MEASURED} by this run's {claim.suite}"


def format_claims(suites: dict[str, Suite]) -> str:
    """The table as text; empty if the run measured none of the claims."""
    if not any(claim.suite in suites and claim.measured(suites[claim.suite]) for claim in CLAIMS):
        return ""
    lines = measure_claims(suites)
    titles = ("technique", "the document claims", "measured here")
    widths = [max(len(line[column]) for line in (titles, *lines)) for column in range(2)]
    table = [
        f"{line[0].ljust(widths[0])}  {line[1].ljust(widths[1])}  {line[2]}"
        for line in (titles, *lines)
    ]
    return "\n".join([f"== claims of the document {DOCUMENT} ==", *table])
