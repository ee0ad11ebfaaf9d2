"""How fast is it, beside transformers, on this machine, now?

    python bench.py                      the demo model, 32 requests of mixed lengths
    python bench.py --model DIR --num-requests 64 --json result.json
    python bench.py --suite parallel     decode steps on one rank and on two, and their bytes

Every engine serves the same requests (same prompts, same output lengths, greedy, same dtype), in
turns, `--repeat` times; the table shows medians, their range over the rounds, and the ratio of
nanoserve to each. Only tokens that were asked for count: what a padded batch computes beyond a
request's length is its own loss. On a busy machine ratios close to 1 say nothing: see the range.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from nanoserve import LLM, SamplingParams
from nanoserve.config import resolve_folder
from nanoserve.parallel_demo import measure as measure_ranks
from nanoserve.parallel_demo import show_measures

Requests = list[tuple[list[int], int]]  # (prompt token ids, number of output tokens)
Engine = Callable[[Requests], list[list[int]]]  # serves requests, returns their output token ids


def make_requests(number: int, vocab_size: int, low: int, high: int, seed: int) -> Requests:
    """Random prompts, input and output lengths uniform in [low, high]."""
    rng = random.Random(seed)
    return [
        ([rng.randrange(vocab_size) for _ in range(rng.randint(low, high))], rng.randint(low, high))
        for _ in range(number)
    ]


def nanoserve_engine(llm: LLM) -> Engine:
    """Continuous batching over a paged KV cache; prompts are random, so nothing is shared."""

    def serve(requests: Requests) -> list[list[int]]:
        llm.reset_prefix_cache()
        params = [
            SamplingParams(temperature=0, max_tokens=number, ignore_eos=True)
            for _, number in requests
        ]
        prompts = [prompt for prompt, _ in requests]
        return [
            output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)
        ]

    return serve


def transformers_engine(model: torch.nn.Module, batch_size: int) -> Engine:
    """transformers.generate on static batches: padded to the longest prompt, run to the longest
    output."""

    def serve_batch(batch: Requests) -> list[list[int]]:
        longest = max(len(prompt) for prompt, _ in batch)
        steps = max(number for _, number in batch)
        pads = [longest - len(prompt) for prompt, _ in batch]
        input_ids = [[0] * pad + prompt for pad, (prompt, _) in zip(pads, batch, strict=True)]
        mask = [[0] * pad + [1] * (longest - pad) for pad in pads]
        output = model.generate(
            torch.tensor(input_ids),
            attention_mask=torch.tensor(mask),
            max_new_tokens=steps,
            do_sample=False,
            pad_token_id=0,
        )
        rows = output[:, longest:].tolist()
        return [row[:number] for row, (_, number) in zip(rows, batch, strict=True)]

    def serve(requests: Requests) -> list[list[int]]:
        starts = range(0, len(requests), batch_size)
        batches = [requests[start : start + batch_size] for start in starts]
        return [tokens for batch in batches for tokens in serve_batch(batch)]

    return serve


def measure(engines: dict[str, Engine], requests: Requests, repeat: int) -> dict[str, dict]:
    """Seconds of each engine for all requests, in turns, after one warm-up request each."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    outputs: dict[str, list[list[int]]] = {}
    for serve in engines.values():
        serve([(requests[0][0], 4)])
    for _ in tqdm(range(repeat), desc="Rounds", unit="round"):
        for name, serve in engines.items():
            start = time.perf_counter()
            outputs[name] = serve(requests)
            seconds[name].append(time.perf_counter() - start)
    num_output = sum(number for _, number in requests)
    reference = next(iter(outputs.values()))
    return {
        name: {
            "seconds": times,
            "output_tokens_per_second": num_output / statistics.median(times),
            "slowest": num_output / max(times),
            "fastest": num_output / min(times),
            "same_tokens": sum(a == b for a, b in zip(outputs[name], reference, strict=True)),
        }
        for name, times in seconds.items()
    }


def print_table(results: dict[str, dict], num_requests: int) -> None:
    best = results["nanoserve"]["output_tokens_per_second"]
    header = (
        f"{'engine':<26}{'output tok/s':>14}{'range':>16}{'nanoserve is':>15}{'same tokens':>14}"
    )
    print(f"\n{header}")
    for name, result in results.items():
        rate = result["output_tokens_per_second"]
        spread = f"{result['slowest']:.0f} - {result['fastest']:.0f}"
        same = f"{result['same_tokens']}/{num_requests}"
        print(f"{name:<26}{rate:>14.0f}{spread:>16}{best / rate:>13.2f} x{same:>14}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--suite", choices=("throughput", "parallel"), default="throughput")
    parser.add_argument("--model", help="folder or Hugging Face id (default: the demo model)")
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--min-len", type=int, default=16, help="of prompts and of outputs, tokens")
    parser.add_argument(
        "--max-len", type=int, default=128, help="of prompts and of outputs, tokens"
    )
    parser.add_argument("--repeat", type=int, default=3, help="rounds; the medians are shown")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--json", type=Path, help="write results, versions and machine to this file"
    )
    args = parser.parse_args()
    if args.suite == "parallel":
        measured = [
            measure_ranks(size, args.model, args.num_requests, args.max_len, seed=args.seed)
            for size in (1, 2)
        ]
        print(show_measures(measured))
        if args.json:
            args.json.write_text(json.dumps(measured, indent=1))
        return

    folder = resolve_folder(args.model)
    llm = LLM(folder, dtype="float32", device="cpu")
    hf_model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    hf_model.generation_config.eos_token_id = None  # run to the length asked for, as nanoserve does
    requests = make_requests(
        args.num_requests,
        llm.engine.model_config.vocab_size,
        args.min_len,
        args.max_len,
        args.seed,
    )
    engines = {
        "nanoserve": nanoserve_engine(llm),
        f"transformers, batch {args.num_requests}": transformers_engine(
            hf_model, args.num_requests
        ),
        "transformers, batch 8": transformers_engine(hf_model, 8),
        "transformers, batch 1": transformers_engine(hf_model, 1),
    }
    results = measure(engines, requests, args.repeat)
    num_parameters = sum(parameter.numel() for parameter in hf_model.parameters())
    lengths = f"{args.min_len} to {args.max_len} tokens in and out"
    environment = {
        "model": f"{folder.name}, {num_parameters / 1e6:.1f} million parameters",
        "requests": f"{args.num_requests} of {lengths}",
        "KV blocks": str(llm.engine.executor.num_kv_blocks),
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, CPU, float32",
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
    }
    print_table(results, args.num_requests)
    for name, value in environment.items():
        print(f"{name}: {value}")
    if args.json:
        args.json.write_text(json.dumps({**environment, "results": results}, indent=1))


if __name__ == "__main__":
    main()
