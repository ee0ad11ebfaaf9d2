"""nanoserve bench: is it counted right? Nothing here asks whether anything is fast."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from nanoserve.bench.cli import main
from nanoserve.bench.engines import Peer
from nanoserve.bench.suites import (
    Settings,
    Variant,
    compare,
    compute_figures,
    draw,
    parse_peer,
    parse_variant,
    run_round,
)
from nanoserve.bench.workload import Request, write_dummy

SIZES = {"num_requests": 3, "min_len": 4, "max_len": 8, "prefix_len": 32, "repeat": 2}
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]


def test_each_suite_runs(tmp_path: Path) -> None:
    folder, file = write_dummy("qwen3-tiny", folder=tmp_path), tmp_path / "result.json"
    arguments = ["--quick", "--rate", "100", "--model", str(folder), *FLAGS]
    assert main([*arguments, "--json", str(file)]) == 0
    results = json.loads(file.read_text())["results"]
    assert {*results} >= {"throughput", "latency", "prefix", "serve", "kernel decode"}
    for suite, result in results.items():
        assert len(result) >= 1 + (suite not in ("throughput", "latency", "serve")), suite
        for figures in result.values():
            assert figures.get("same_tokens", 1) == 1
            assert figures.get("largest_difference", 0) < 1e-5


def test_engines_give_the_same_tokens(tmp_path: Path) -> None:
    folder = write_dummy("qwen3-tiny", folder=tmp_path)
    small = parse_variant("small:block_size=4;max_num_seqs=2;enable_prefix_caching=False")
    variants = (Variant("nanoserve"), small, parse_peer("transformers"))
    settings = Settings(folder, variants, **{**SIZES, "repeat": 1}, use_tqdm=False)
    result = compare("throughput", settings, tell=lambda text: None)
    assert [figures["same_tokens"] for figures in result.values()] == [1, 1, 1]


def test_figures_of_known_times() -> None:
    requests = [Request([1, 2, 3], 3), Request([4, 5], 2)]
    times = [[1.0, 2.0, 4.0], [3.0, 4.0]]
    assert compute_figures("throughput", requests, times, 2.0) == {"tokens_per_s": 2.5}
    assert compute_figures("prefix", requests, times, 2.0) == {"prompt_tokens_per_s": 2.5}
    assert compute_figures("latency", requests, times, 9.0) == {"itl_ms": 1000, "ttft_ms": 2000}
    assert compute_figures("serve", requests, times, 1.0)["itl_ms_p99"] == 1000


def test_rounds_have_equal_lengths_and_other_tokens(tmp_path: Path) -> None:
    small = Settings(write_dummy("qwen3-tiny", folder=tmp_path), **SIZES)
    one, two = draw("prefix", small, 0), draw("prefix", small, 1)
    assert [len(each.prompt) for each in one] == [len(each.prompt) for each in two]
    assert one[0].prompt[:32] == one[1].prompt[:32] != two[0].prompt[:32]


def test_arguments_are_read_or_refused() -> None:
    assert parse_variant("a:block_size=4;dtype=float16").options["dtype"] == "float16"
    with pytest.raises(ValueError, match="LABEL"):
        parse_variant("a:block_size")
    with pytest.raises(SystemExit):
        main(["fast"])
    dead = Peer("vllm", sys.executable, "/nowhere", {})
    with pytest.raises(RuntimeError):
        run_round(dead, "throughput", [Request([1], 1)])
    dead.close()
