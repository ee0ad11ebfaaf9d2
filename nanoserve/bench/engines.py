"""One interface for several engines: when did each token of each request arrive?

    engine.run([{"prompt": [5, 6], "num_output": 3, "arrival": 0.0}])
        -> [{"times": [0.021, 0.030, 0.038], "token_ids": [7, 7, 9]}]      seconds after the arrival

nanoserve runs in this process. Every peer runs in a process of its own, and may have a Python of
its own, such as the one of vLLM's venv: this file is the program of that process, so it imports
nothing but the standard library and the engine.

nanoserve and vLLM have the same steps (add_request, step), so one class drives both. nano-vllm and
mini-sglang have `generate`: all tokens count as here at its end. Neither samples greedily, or runs
without a GPU. (How they are called is as their own benchmarks do it.)
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

Requests = Seq[Mapping[str, Any]]  # prompt, num_output, arrival, after: workload.Request
Results = list[dict[str, Any]]  # times, token_ids
COMMON = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
OPTIONS: dict[str, dict[str, Any]] = {"nanoserve": {}, "vllm": {"skip_tokenizer_init": True}}


class StepEngine:
    """An engine with vLLM's add_request and step: nanoserve or vllm."""

    def __init__(self, name: str, folder: str, options: Mapping[str, Any]) -> None:
        """Two options are no options of LLM. sampling: parameters of all requests; in_flight: how
        many steps of a pipeline."""
        given = dict(options)
        self.sampling, in_flight = given.pop("sampling", {}), given.pop("in_flight", None)
        if name == "vllm":  # on a CPU it keeps a core for its scheduler, which few cores can spare
            os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
        module = importlib.import_module(name)
        self.params_cls = module.SamplingParams
        self.llm = module.LLM(folder, **{**OPTIONS[name], **given})
        self.engine = self.llm.llm_engine if name == "vllm" else self.llm.engine
        if in_flight is not None:  # and each has its share of the sequences
            scheduler, self.engine.max_in_flight = self.engine.scheduler, in_flight
            scheduler.config = replace(scheduler.config, pipeline_parallel_size=in_flight)
        self.ids = itertools.count()

    def run(self, requests: Requests) -> Results:
        """Add each request when it is due, and run steps until all have ended."""
        ids = [str(next(self.ids)) for _ in requests]
        found: dict[str, dict[str, Any]] = {each: {"times": [], "token_ids": []} for each in ids}
        due = {each: request["arrival"] for each, request in zip(ids, requests, strict=True)}
        waiting = sorted(zip(ids, requests, strict=True), key=lambda pair: pair[1]["arrival"])
        first, start = found[ids[0]]["times"], time.perf_counter()
        while waiting or self.engine.has_unfinished_requests():
            while waiting and due[waiting[0][0]] <= time.perf_counter() - start:
                if len(first) < waiting[0][1].get("after", 0):
                    break
                self.add(*waiting.pop(0))
            if not self.engine.has_unfinished_requests():
                time.sleep(max(0.0, due[waiting[0][0]] - (time.perf_counter() - start)))
                continue
            for output in self.engine.step():
                result, token_ids = found[output.request_id], output.outputs[0].token_ids
                now = time.perf_counter() - start - due[output.request_id]
                result["times"] += [now] * (len(token_ids) - len(result["times"]))
                result["token_ids"] = list(token_ids)
        return list(found.values())

    def add(self, request_id: str, request: Mapping[str, Any]) -> None:
        params = self.params_cls(**COMMON, **self.sampling, max_tokens=request["num_output"])
        prompt = {"prompt_token_ids": list(request["prompt"])}
        self.engine.add_request(request_id, prompt, params)

    def close(self) -> None:
        if hasattr(self.llm, "close"):
            self.llm.close()


class Transformers:
    """transformers.generate on one batch, padded on the left: every row runs as long as the longest
    output. All requests count as here from the beginning."""

    def __init__(self, name: str, folder: str, options: Mapping[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(folder, **options)  # in eval mode
        self.torch, self.model = torch, model.to("cuda" if torch.cuda.is_available() else "cpu")
        self.model.generation_config.eos_token_id = None  # run to the length asked for

    def run(self, requests: Requests) -> Results:
        longest = max(len(request["prompt"]) for request in requests)
        number = max(request["num_output"] for request in requests)
        pads = [longest - len(request["prompt"]) for request in requests]
        pairs = list(zip(requests, pads, strict=True))
        rows = [[0] * pad + list(request["prompt"]) for request, pad in pairs]
        mask = [[0] * pad + [1] * (longest - pad) for pad in pads]
        times: list[float] = []
        start, device = time.perf_counter(), self.model.device

        class Watch:
            """Called with the prompts, then with the tokens of each step."""

            def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
                times.append(time.perf_counter() - start)
                return input_ids.new_zeros(len(input_ids), dtype=bool)

        tokens = self.torch.tensor(rows, device=device)
        output = self.model.generate(
            tokens,
            attention_mask=self.torch.tensor(mask, device=device),
            stopping_criteria=[Watch()],
            do_sample=False,
            pad_token_id=0,
            min_new_tokens=number,
            max_new_tokens=number,
        )
        ends = [request["num_output"] for request in requests]
        lists = output[:, longest:].tolist()
        return [
            {"times": times[:end], "token_ids": row[:end]}
            for end, row in zip(ends, lists, strict=True)
        ]


class Generate:
    """nano-vllm or mini-sglang."""

    modules = ("nanovllm", "nanovllm"), ("minisgl.llm", "minisgl.core")  # of LLM, SamplingParams

    def __init__(self, name: str, folder: str, options: Mapping[str, Any]) -> None:
        where, params_where = self.modules[name == "mini-sglang"]
        self.llm = importlib.import_module(where).LLM(folder, **options)
        self.params_cls = importlib.import_module(params_where).SamplingParams

    def run(self, requests: Requests) -> Results:
        start = time.perf_counter()
        common = {"temperature": 0.6, "ignore_eos": True}
        params = [self.params_cls(**common, max_tokens=each["num_output"]) for each in requests]
        outputs = self.llm.generate([list(each["prompt"]) for each in requests], params)
        lists, end = [list(each["token_ids"]) for each in outputs], time.perf_counter() - start
        return [{"times": [end] * len(each), "token_ids": each} for each in lists]


ENGINES: dict[str, Any] = {"nanoserve": StepEngine, "vllm": StepEngine}
ENGINES |= {"transformers": Transformers, "nano-vllm": Generate, "mini-sglang": Generate}


class Peer:
    """An engine in a process of its own, which is stopped between its turns: some keep a core busy
    while they wait."""

    def __init__(self, name: str, python: str, folder: str, options: Mapping[str, Any]) -> None:
        self.name, pipe = name, subprocess.PIPE
        command = [python, os.path.abspath(__file__), name, folder, json.dumps(options)]
        log = None if os.environ.get("BENCH_LOG") else subprocess.DEVNULL
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=log, text=True, start_new_session=True
        )

    def run(self, requests: Requests) -> Results:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            os.killpg(self.process.pid, signal.SIGCONT)
            self.process.stdin.write(json.dumps(requests) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
            os.killpg(self.process.pid, signal.SIGSTOP)
        except (BrokenPipeError, ProcessLookupError):
            line = ""
        if not line:
            raise RuntimeError(f"{self.name} has ended; set BENCH_LOG=1 to see why.")
        return json.loads(line)

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)
        self.process.communicate(timeout=60)  # its input ends; it ends the processes of its own


def serve_parent() -> None:
    """Build the engine that the command line names; answer each line of requests with a line."""
    del sys.path[0]  # this folder: its modules could hide those of an engine
    name, folder, options = sys.argv[1:]
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as replies:
        os.dup2(2, 1)  # what the engine prints is no reply
        engine = ENGINES[name](name, folder, json.loads(options))
        for line in sys.stdin:
            print(json.dumps(engine.run(json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    serve_parent()
