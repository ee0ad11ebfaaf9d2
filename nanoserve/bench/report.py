"""The tables on the terminal, and what every result says about its run: the command, the machine,
the versions.

vLLM: vllm/benchmarks/lib/.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
from datetime import date
from pathlib import Path
from typing import Any

import torch

from nanoserve.bench.peers import versions

# -- about a run --


def describe_run(arguments: list[str], device: str) -> dict[str, Any]:
    """Command, date, machine, versions. Of an absolute path in the command only the last part is
    kept: the folders are private."""
    shown = [re.sub(r"(^|=)/([^=]*/)?", r"\1", argument) for argument in arguments]
    return {
        "command": shlex.join(["python", "bench.py", *shown]),
        "date": date.today().isoformat(),
        "machine": describe_machine(device),
        "versions": versions(("torch", "triton", "transformers")),
    }


def describe_machine(device: str) -> dict[str, Any]:
    """The machine that the figures were measured on."""
    name = cpu_name()
    info: dict[str, Any] = {
        "cpu": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "device_name": f"{name}, {os.cpu_count()} cores",
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
    }
    if device != "cpu":
        properties = torch.cuda.get_device_properties(torch.device(device))
        info["device_name"] = properties.name
        info["device_memory_gib"] = round(properties.total_memory / 2**30, 1)
        info["cuda"] = torch.version.cuda
    return info


def cpu_name() -> str:
    """The processor's name, as far as the system tells it."""
    file = Path("/proc/cpuinfo")
    if file.exists():
        found = re.search(r"model name\s*:\s*(.*)", file.read_text())
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


def format_run(result: dict[str, Any]) -> str:
    """The lines above all tables."""
    machine, limits = result["machine"], result["limits"]
    found = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return (
        f"model: {result['model']}, {result['parameters'] / 1e6:.1f} million parameters, "
        f"{result['dtype']}\n"
        f"machine: {machine['device_name']}, {machine['threads']} threads, load before the run "
        f"{machine['load']}; {limits['bandwidth'] / 1e9:.1f} GB/s, "
        f"{limits['rate'] / 1e9:.1f} GFLOP/s measured\n"
        f"versions: {found}\n"
        f"command: {result['command']}"
    )


# -- the tables --

# title -> (path of the value in a row, format of a number); columns without values are left out
Columns = dict[str, tuple[str, str]]

SPEED: Columns = {"engine": ("engine", ""), "output tok/s": ("tokens_per_second", ".0f")}
AGAINST: Columns = {
    "nanoserve is": ("nanoserve_is", ".2f"),
    "of roofline": ("share_of_roofline", ".1%"),
}
BATCH_SIZES = (1, 2, 4, 8, 16, 32)
STEP_PARTS = ("schedule", "prepare", "model", "launch", "sample", "update", "other")
COLUMNS: dict[str, Columns] = {
    "throughput": {
        **SPEED,
        "slowest": ("slowest", ".0f"),
        "fastest": ("fastest", ".0f"),
        **AGAINST,
        "same tokens": ("same_tokens", ".0%"),
    },
    "batch": {**SPEED, "requests": ("batch", "d"), "of roofline": ("share_of_roofline", ".1%")},
    "latency": {
        **SPEED,
        "TTFT p50 ms": ("ttft_ms.p50", ".1f"),
        "TTFT p99": ("ttft_ms.p99", ".1f"),
        "ITL p50 ms": ("itl_ms.p50", ".2f"),
        "ITL p99": ("itl_ms.p99", ".2f"),
        **AGAINST,
    },
    "batching": {
        "batches": ("batching", ""),
        "output tok/s": ("tokens_per_second", ".0f"),
        "steps": ("num_steps", "d"),
        "requests at once": ("mean_running", ".1f"),
        "continuous is": ("continuous_is", ".2f"),
    },
    "chunked": {
        "prompts in chunks of": ("chunks", ""),
        "TTFT p50 ms": ("ttft_ms.p50", ".1f"),
        "gap p50 ms": ("gap_ms.p50", ".2f"),
        "gap p99 ms": ("gap_ms.p99", ".2f"),
        "largest gap": ("largest_gap_ms", ".2f"),
        "TTFT against off": ("against_off.ttft", ".2f"),
        "gap p99 against off": ("against_off.gap_p99", ".2f"),
    },
    "prefix": {
        "shared tokens not computed again": ("hit_rate", ".1%"),
        "times as fast": ("speed_up", ".2f"),
        "cost if nothing is shared": ("cost_at_no_hits.total", "+.2%"),
        "of this, control plane": ("cost_at_no_hits.control_plane", "+.2%"),
    },
    "spec": {
        "method": ("method", ""),
        "prompts": ("prompts", ""),
        "batch": ("batch", "d"),
        "plain tok/s": ("plain_tokens_per_second", ".0f"),
        "tok/s": ("tokens_per_second", ".0f"),
        "speed-up": ("speed_up", ".2f"),
        "accepted": ("acceptance_rate", ".0%"),
        "mean length": ("mean_length", ".2f"),
        "tokens per step": ("tokens_per_step", ".2f"),
        "same tokens": ("same_tokens", ".0%"),
    },
    "structured": {
        "backend": ("backend", ""),
        "constraint": ("constraint", ""),
        "constrained": ("constrained", ".0%"),
        "tok/s": ("tokens_per_second", ".0f"),
        "of unconstrained": ("of_unconstrained", ".3f"),
    },
    "structured.masks": {
        "backend": ("backend", ""),
        "constraint": ("constraint", ""),
        "build ms": ("build_ms", ".0f"),
        "compile ms": ("compile_ms", ".1f"),
        "mask us, new": ("new_mask_us", ".1f"),
        "slowest": ("slowest_mask_us", ".0f"),
        "known": ("mask_us", ".1f"),
        "token us": ("accept_us", ".1f"),
    },
    "quantization": {
        "weights": ("engine", ""),
        "MiB": ("weight_mib", ".1f"),
        "KV bytes": ("kv_bytes", ".0f"),
        "perplexity": ("perplexity", ".4f"),
        "right answers": ("right_answers", ".1%"),
        "right tokens": ("right_tokens", ".1%"),
        **{f"plain tok/s, {n}": (f"plain_tokens_per_second_{n}", ".1f") for n in BATCH_SIZES},
        **{f"tok/s, {n}": (f"tokens_per_second_{n}", ".1f") for n in BATCH_SIZES},
        **{f"speed-up, {n}": (f"speed_up_{n}", ".2f") for n in BATCH_SIZES},
    },
    "offload": {
        "engine": ("engine", ""),
        "found": ("found", ".1%"),
        "TTFT p50 ms": ("ttft_ms.p50", ".1f"),
        "TTFT p99": ("ttft_ms.p99", ".1f"),
        "without a tier it is": ("none_is", ".2f"),
        "same tokens": ("same_tokens", ""),
    },
    "offload.policies": {
        "policy": ("policy", ""),
        "rows": ("num_rows", "d"),
        "blocks of chats": ("chat_blocks", "d"),
        "of a scan": ("scanned_blocks", "d"),
        "found": ("found", ".1%"),
    },
    "offload.tiers": {
        "tier": ("tier", ""),
        "way": ("way", ""),
        "MB/s": ("mb_per_second", ".0f"),
    },
    "parallel.pipeline": {
        "stages": ("stages", "d"),
        "steps in flight": ("in_flight", "d"),
        "output tok/s": ("tokens_per_second", ".0f"),
        "stage 0 computes": ("stage_0_busy", ".0%"),
    },
    "scheduler": {
        "running": ("num_running", "d"),
        "context": ("context", "d"),
        "waiting": ("num_waiting", "d"),
        "schedule us": ("schedule_us", ".0f"),
        "update us": ("update_us", ".0f"),
        "both us": ("step_us", ".0f"),
        "prepare us": ("prepare_us", ".0f"),
    },
    "memory": {
        "KV slots reserved": ("way", ""),
        "hold tokens": ("used_share", ".1%"),
        "wasted": ("wasted_share", ".1%"),
        "requests at once": ("mean_running", ".1f"),
    },
    "steps": {
        "engine": ("engine", ""),
        "steps": ("num_steps", "d"),
        "step ms": ("step_ms", ".2f"),
        **{part: (f"parts_ms.{part}", ".2f") for part in STEP_PARTS},
        "GPU": ("gpu_ms", ".2f"),
    },
    "scale": {
        "policy": ("policy", ""),
        "replicas": ("replicas", "d"),
        "hit rate": ("hit_rate", ".1%"),
        "output tok/s": ("tokens_per_second", ".0f"),
        "TTFT p50 ms": ("ttft_ms.p50", ".0f"),
        "TTFT p99": ("ttft_ms.p99", ".0f"),
        "TPOT p50 ms": ("tpot_ms.p50", ".1f"),
        "TPOT p99": ("tpot_ms.p99", ".1f"),
        "busy": ("busy", ".1%"),
        "least busy": ("least_busy", ".1%"),
        "imbalance": ("imbalance", ".2f"),
        "at once": ("most_running", "d"),
    },
    "serve": {
        "engine": ("engine", ""),
        "requests/s": ("load", ""),
        "done/s": ("requests_per_second", ".2f"),
        "output tok/s": ("tokens_per_second", ".0f"),
        "TTFT p50 ms": ("ttft_ms.p50", ".0f"),
        "TTFT p90": ("ttft_ms.p90", ".0f"),
        "TTFT p99": ("ttft_ms.p99", ".0f"),
        "ITL p50 ms": ("itl_ms.p50", ".1f"),
        "ITL p90": ("itl_ms.p90", ".1f"),
        "ITL p99": ("itl_ms.p99", ".1f"),
        "E2EL p50 ms": ("e2el_ms.p50", ".0f"),
        "E2EL p99": ("e2el_ms.p99", ".0f"),
        "goodput/s": ("goodput", ".2f"),
        "in the limits": ("good_share", ".0%"),
        "client CPU": ("client_cpu", ".0%"),
        "nanoserve is": ("nanoserve_is", ".2f"),
    },
    "serve.servers": {
        "all at once": ("engine", ""),
        "output tok/s": ("tokens_per_second", ".0f"),
        "nanoserve is": ("nanoserve_is", ".2f"),
        "same tokens": ("same_tokens", ".0%"),
        "saturation tok/s": ("most_tokens_per_second", ".0f"),
        "most goodput/s": ("most_goodput", ".2f"),
    },
    "replicas": {
        "engine": ("engine", ""),
        "hits": ("hits", ".1%"),
        "computed": ("computed", "d"),
        "TTFT p50 ms": ("ttft_ms.p50", ".0f"),
        "TTFT p99": ("ttft_ms.p99", ".0f"),
        "seconds": ("seconds", ".2f"),
        "nanoserve is": ("nanoserve_is", ".2f"),
        "same tokens": ("same_tokens", ""),
    },
    "kernel": {
        "case": ("case", ""),
        "by": ("implementation", ""),
        "timed by": ("timed_by", ""),
        "us": ("us", ".1f"),
        "GB/s": ("gb_per_second", ".1f"),
        "GFLOP/s": ("gflop_per_second", ".1f"),
        "of bandwidth": ("share_of_bandwidth", ".1%"),
        "of rate": ("share_of_rate", ".1%"),
    },
}

COMPARED = (
    "{lengths[0]} to {lengths[1]} tokens in and out, {num_output_tokens} output tokens; roofline: "
    "{roofline_tokens_per_second:.0f} tok/s"
)
WORKLOADS = {
    "throughput": "{num_requests} requests at once, " + COMPARED,
    "batch": "requests of {prompt_len} tokens in, {num_output} out",
    "latency": "{num_requests} requests one by one, " + COMPARED,
    "batching": "{num_requests} requests, at most {batch_size} at once, {lengths[0]} to "
    "{lengths[1]} tokens in and out",
    "chunked": "{num_decoding} requests decode; {num_arrivals} prompts of {prompt_len} tokens "
    "arrive one by one",
    "prefix": "{num_requests} requests; the first {prefix_len} tokens are the same in all",
    "spec": "at most {num_speculative_tokens} drafts; slower than plain decoding: {slower}",
    "structured": "{batch} requests, {num_output} tokens each; vocabulary of {vocab_size} tokens",
    "quantization": "{num_texts} texts; decoding in batches of {batch_sizes}",
    "offload": "{num_chats} chats of {num_turns} turns, at most {longest} tokens each: "
    "{num_blocks} blocks, and {device_blocks} on the device",
    "scheduler": "longest context against shortest, by running sequences: {growth_with_context}; "
    "with the queue against without: {growth_with_queue:.2f} x",
    "memory": "{num_requests} requests; the KV cache holds {num_slots} tokens, a request at most "
    "{max_model_len}",
    "scale": "simulated, not measured: {simulated_model}, one {simulated_device} for each replica; "
    "{said_before:.1%} of the prompts' tokens were said before",
    "serve": "{num_requests} requests in each load, {lengths[0]} to {lengths[1]} tokens in and "
    "out, {num_output_tokens} output tokens; limits of goodput: {limits}",
    "replicas": "{num_replicas} replicas, {blocks_of_each} blocks each; {num_chats} chats of "
    "{num_turns} turns, at most {longest} tokens each, {shared} of them the same in all",
    "kernel": "{dtype} {note}",
}


def format_suite(name: str, suite: dict[str, Any]) -> str:
    """One suite's result as text. A suite without columns of its own shows all plain values."""
    rows = suite.get("rows", [suite])
    said = {key: in_words(each) if isinstance(each, dict) else each for key, each in suite.items()}
    lines = [f"== {name} ==", WORKLOADS.get(name, "").format(**said)]
    lines.append(format_table(rows, COLUMNS.get(name) or columns_of(rows)))
    for key in suite:  # further tables
        if columns := COLUMNS.get(f"{name}.{key}"):
            lines.append("\n" + format_table(suite[key], columns))
    for row in [
        *rows,
        *suite.get("servers", []),
    ]:  # half of the differences between engines are settings
        if "description" in row:
            about = f"{row['description']}; started in {row['start_seconds']:.0f} s"
            lines.append(f"{row['engine']}: {about}")
    lines += [f"left out: {label}: {why}" for label, why in suite.get("skipped", {}).items()]
    return "\n".join(filter(None, lines))


def in_words(ratios: dict[str, Any]) -> str:
    """{"16": 1.07, "64": 1.05} -> "1.07 x at 16, 1.05 x at 64"; other values as they are."""
    return ", ".join(
        f"{value:.2f} x at {key}" if isinstance(value, float) else f"{value} at {key}"
        for key, value in ratios.items()
    )


def columns_of(rows: list[dict[str, Any]]) -> Columns:
    formats = {bool: "", str: "", int: "d", float: ".4g"}
    plain = {name: type(value) for row in rows for name, value in row.items()}
    return {name: (name, formats[kind]) for name, kind in plain.items() if kind in formats}


def format_table(rows: list[dict[str, Any]], columns: Columns) -> str:
    """Text columns to the left, numbers to the right; a value that a row lacks is empty."""
    shown = []
    for title, (path, form) in columns.items():
        values = [value_at(row, path) for row in rows]
        if any(value is not None for value in values):
            cells = [title, *("" if value is None else format(value, form) for value in values)]
            width = max(map(len, cells))
            shown.append([cell.rjust(width) if form else cell.ljust(width) for cell in cells])
    return "\n".join("  ".join(line).rstrip() for line in zip(*shown, strict=True))


def value_at(row: dict[str, Any], path: str) -> Any:
    """value_at({"itl_ms": {"p50": 3.0}}, "itl_ms.p50") -> 3.0; None if there is no such value."""
    value: Any = row
    for key in path.split("."):
        value = (value or {}).get(key)
    return value
