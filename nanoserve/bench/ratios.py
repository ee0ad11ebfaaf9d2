"""Does the cost model say what was measured? Ratios of measured speeds, beside the model's.

A ratio says more than two times: what slows both of its sides alike cancels out. Each compares two
figures of notebooks/results, for which the model computes the same steps, on a device with the
limits that the file itself has measured:

    29M parameters: 32 requests at once, against one by one       measured 6.7 x      model 7.8 x

Not held to the model, because it leaves out what decides there: the demo model (a layer of it takes
less than `layer_seconds`), speculative decoding (the time to draft), several ranks on the same two
cores, HTTP.

vLLM: none.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from nanoserve.bench.cost_model import Device, ModelShape, Step, cpu, decode, prefill, steps_of
from nanoserve.bench.roofline import MachineLimits
from nanoserve.bench.workload import DUMMY_MODELS, Request, draw_requests

TOLERANCE = 0.2  # of a ratio
SMALL, LARGE = "qwen3-29m", "qwen3-0.6b"


class Ratio(NamedTuple):
    """How many times as fast the first is as the second."""

    name: str
    name_zh: str
    measured: float
    model: float

    @property
    def error(self) -> float:
        return self.model / self.measured - 1


class Measured(NamedTuple):
    """A figure of a file, and what the model says of it: tokens (or steps) per second."""

    speed: float
    model: float

    def over(self, other: Measured, name: str, name_zh: str) -> Ratio:
        return Ratio(name, name_zh, self.speed / other.speed, self.model / other.model)


def seconds(model: ModelShape, device: Device, steps: list[Step]) -> float:
    """Of steps on a single device."""
    work = sum(device.seconds(part) for step in steps for part in model.parts(step))
    return work + len(steps) * model.num_layers * device.layer_seconds


def read(folder: Path, name: str, suite: str) -> tuple[dict[str, Any], Device]:
    """A suite of a result, and the machine that it ran on."""
    result = json.loads((folder / f"{name}.json").read_text("utf-8"))
    return result["suites"][suite], cpu(MachineLimits(**result["limits"]))


def measured_ratios(folder: Path) -> list[Ratio]:
    """All ratios, from the results in `folder`."""
    small, large = ModelShape.named(SMALL, 4), ModelShape.named(LARGE, 4)
    at_once = read_throughput(folder, "cpu-qwen3-29m", SMALL, 4)
    float32 = read_throughput(folder, "cpu-qwen3-0.6b-float32", LARGE, 4)
    bfloat16 = read_throughput(folder, "cpu-qwen3-0.6b-bfloat16", LARGE, 2)

    suite, device = read(folder, "cpu-qwen3-29m-latency", "latency")
    row = suite["rows"][0]
    drawn = draw(SMALL, 32, suite["lengths"])[: suite["num_requests"]]
    alone = seconds(small, device, [step for request in drawn for step in steps_of([request])])
    one_by_one = Measured(row["tokens_per_second"], suite["num_output_tokens"] / alone)
    middle = statistics.median_low(len(request.prompt) for request in drawn)
    prompt = Measured(1e3 / row["ttft_ms"]["p50"], 1 / seconds(small, device, [prefill(middle)]))
    context = round(statistics.fmean(len(r.prompt) + r.num_output / 2 for r in drawn))
    token = Measured(1e3 / row["itl_ms"]["p50"], 1 / seconds(small, device, [decode(1, context)]))

    plain, quantized = read_quantization(folder, large)
    return [
        at_once.over(one_by_one, "29M: 32 at once, against one by one", "29M：32 个同时，比逐个"),
        *read_batches(folder, small),
        token.over(prompt, "29M: a decode step, against a prompt", "29M：一步解码，比一次预填充"),
        token.over(plain, "one by one: 29M, against 0.6B", "逐个解码：29M，比 0.6B"),
        at_once.over(float32, "29M at 32, against 0.6B at 8", "29M（32 个），比 0.6B（8 个）"),
        float32.over(plain, "0.6B: 8 at once, against one by one", "0.6B：8 个同时，比逐个"),
        bfloat16.over(float32, "0.6B, 8 at once: bfloat16, against float32",
                      "0.6B，8 个同时：bfloat16，比 float32"),
        *quantized,
    ]  # fmt: skip


def draw(name: str, number: int, lengths: list[int]) -> list[Request]:
    low, high = lengths
    return draw_requests(number, low, high, DUMMY_MODELS[name]["vocab_size"])


def read_throughput(folder: Path, file: str, name: str, itemsize: int) -> Measured:
    suite, device = read(folder, file, "throughput")
    steps = steps_of(draw(name, suite["num_requests"], suite["lengths"]))
    took = seconds(ModelShape.named(name, itemsize), device, steps)
    return Measured(suite["rows"][0]["tokens_per_second"], suite["num_output_tokens"] / took)


def read_batches(folder: Path, model: ModelShape) -> list[Ratio]:
    """Plain decoding of 8 and of 1, beside which the methods of drafting were measured: prompts of
    512 tokens, 128 more of each."""
    suite, device = read(folder, "cpu-qwen3-29m-spec", "spec")
    speeds: dict[int, list[float]] = {}
    for row in suite["rows"]:
        speeds.setdefault(row["batch"], []).append(row["plain_tokens_per_second"])
    found = {
        batch: Measured(
            statistics.median(each), batch / seconds(model, device, [decode(batch, 512 + 64)])
        )
        for batch, each in speeds.items()
    }
    return [found[8].over(found[1], "29M: decoding 8, against 1", "29M：解码 8 个，比 1 个")]


def read_quantization(folder: Path, model: ModelShape) -> tuple[Measured, list[Ratio]]:
    """Plain decoding of one request (64 tokens in, 64 out), and every kind of quantization beside
    it. The bytes of a number are those that the file says the engine held."""
    suite, device = read(folder, "cpu-qwen3-0.6b-quantization", "quantization")
    step, costs = decode(1, 64 + 32), model.costs
    usual = 1 / seconds(model, device, [step])
    ratios = []
    for row in suite["rows"][1:]:
        # The engine also holds the embedding, and the head once more in the layout of its kernel.
        layers = row["weight_mib"] * 2**20 - 2 * model.head_itemsize * costs.head_weights
        its = replace(
            model,
            weight_itemsize=layers / costs.resident_weights,
            kv_itemsize=row["kv_bytes"] / costs.kv_numbers,
        )
        kind = row["engine"]
        measured = Measured(row["speed_up_1"] * usual, 1 / seconds(its, device, [step]))
        ratios.append(
            measured.over(
                Measured(usual, usual),
                f"0.6B, one by one: {kind}, against float32",
                f"0.6B，逐个解码：{kind}，比 float32",
            )
        )
    speed = statistics.median(row["plain_tokens_per_second_1"] for row in suite["rows"][1:])
    return Measured(speed, usual), ratios
