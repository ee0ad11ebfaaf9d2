"""The engines, under one interface; this file runs inside each engine's own process.

    python -m nanoserve.bench.peers hf        a JSON request a line on stdin, an answer on stdout

    {"call": "build", "folder": "...", "dtype": "float32", ...}
    {"call": "generate", "prompts": [[5, 6, 7]], "lengths": [4]}     -> seconds, token ids
    {"call": "stream", "prompt": [5, 6, 7], "length": 4}             -> when each token came

One process per engine, so that none warms the other's caches, patches its libraries or takes its
threads, and so that a peer can live in another Python environment: nothing is imported at the top
but the standard library, and a peer only when it is asked for.

Every engine gets the same checkpoint, prompts, lengths and dtype, and runs each request to the
length asked for. What an engine needs of its own stands at its class, in the open: a comparison is
only worth what its settings are.

Left out: engines behind an HTTP server. All are used as a library, offline.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

Note = Callable[[int], None]  # called with each token id at the moment it is there


class Nanoserve:
    """This package, as `LLM(folder)` builds it, plus the options of a variant."""

    packages = ("torch", "triton", "transformers")

    def __init__(self, options: dict[str, Any]) -> None:
        from nanoserve import LLM

        self.temperature = options["temperature"]
        self.llm = LLM(
            options["folder"],
            dtype=options["dtype"],
            device=options["device"],
            max_model_len=options["max_model_len"],
            **options["llm_options"],
        )

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        params = [self._params(length) for length in lengths]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        self.num_preemptions = sum(output.metrics.num_preemptions for output in outputs)
        return [output.outputs[0].token_ids for output in outputs]

    def stream(self, prompt: list[int], length: int, note: Note) -> None:
        for output in self.llm.stream(prompt, self._params(length)):
            for token_id in output.outputs[0].token_ids:
                note(token_id)

    def _params(self, length: int) -> Any:
        from nanoserve import SamplingParams

        return SamplingParams(
            temperature=self.temperature, max_tokens=length, ignore_eos=True, detokenize=False
        )

    def describe(self) -> str:
        engine = self.llm.engine
        return f"{engine.executor.describe()}, {engine.executor.num_kv_blocks} KV blocks"


class Transformers:
    """transformers.generate on static batches: padded on the left to the longest prompt, run to the
    longest output. `batch_size` requests at a time, in the order given."""

    packages = ("torch", "transformers")

    def __init__(self, options: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        self.device = options["device"]
        self.batch_size = options["batch_size"]
        self.sampling: dict[str, Any] = {"do_sample": False}
        if options["temperature"]:
            self.sampling = {"do_sample": True, "temperature": options["temperature"], "top_k": 0}
        dtype = getattr(torch, options["dtype"])
        model = AutoModelForCausalLM.from_pretrained(options["folder"], dtype=dtype)
        self.model = model.to(self.device).eval()
        self.model.generation_config.eos_token_id = None  # run to the length asked for
        self.model.generation_config.pad_token_id = 0

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        results: list[list[int]] = []
        for start in range(0, len(prompts), self.batch_size):
            part = slice(start, start + self.batch_size)
            rows = self._run(prompts[part], max(lengths[part]))
            results += [
                row[:length] for row, length in zip(rows.tolist(), lengths[part], strict=True)
            ]
        return results

    def stream(self, prompt: list[int], length: int, note: Note) -> None:
        class Streamer:
            """What generate calls: once with the prompt, then with each token."""

            def put(self, token_ids: Any) -> None:
                if token_ids.dim() == 1:
                    note(int(token_ids[0]))

            def end(self) -> None:
                """Nothing is held back."""

        self._run([prompt], length, streamer=Streamer())

    def _run(self, prompts: list[list[int]], num_output: int, **options: Any) -> Any:
        """Output token ids [batch, num_output]."""
        longest = max(map(len, prompts))
        pads = [longest - len(prompt) for prompt in prompts]
        ids = [[0] * pad + prompt for pad, prompt in zip(pads, prompts, strict=True)]
        mask = [[0] * pad + [1] * (longest - pad) for pad in pads]
        output = self.model.generate(
            self.torch.tensor(ids, device=self.device),
            attention_mask=self.torch.tensor(mask, device=self.device),
            max_new_tokens=num_output,
            min_new_tokens=num_output,
            **self.sampling,
            **options,
        )
        return output[:, longest:]

    def describe(self) -> str:
        return f"attention={self.model.config._attn_implementation}"


class TransformersContinuous:
    """transformers' own continuous batching, what `generate_batch` runs on; its manager is kept
    between calls (generate_batch would allocate its cache anew each time).

    Its KV cache would fill 90% of the free memory; on a CPU, where the other engines are up at the
    same time, it gets what the workload can need, so that it never waits for room."""

    packages = ("torch", "transformers")

    def __init__(self, options: dict[str, Any]) -> None:
        self.inner = Transformers(options)
        config = self.inner.model.generation_config
        config.do_sample = bool(options["temperature"])
        config.temperature = options["temperature"] or 1.0
        config.max_new_tokens = options["max_model_len"] or 1024
        config.eos_token_id = -1  # none
        memory: dict[str, Any] = {}
        if options["device"] == "cpu":
            from transformers import ContinuousBatchingConfig

            blocks_each = -(-options["max_model_len"] // 256) + 1
            num_blocks = blocks_each * options["num_requests"]
            memory["continuous_batching_config"] = ContinuousBatchingConfig(num_blocks=num_blocks)
        self.manager = self.inner.model.init_continuous_batching(generation_config=config, **memory)
        self.manager.start()

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        names = [
            self.manager.add_request(prompt, max_new_tokens=length)
            for prompt, length in zip(prompts, lengths, strict=True)
        ]
        return self._collect(names)

    def _collect(self, names: list[str], note: Note | None = None) -> list[list[int]]:
        """Wait for all of them. With `note`, tell of each token as it comes."""
        results: dict[str, list[int]] = {}
        told = 0
        while len(results) < len(names):
            result = self.manager.get_result(timeout=1)
            if result is None:
                if not self.manager.is_running():
                    raise RuntimeError("transformers' generation loop has ended by itself")
                continue
            if result.error is not None:
                raise RuntimeError(result.error)
            if note is not None:
                for token_id in result.generated_tokens[told:]:
                    note(token_id)
                told = len(result.generated_tokens)
            if result.is_finished():
                results[result.request_id] = list(result.generated_tokens)
        return [results[name] for name in names]

    def stream(self, prompt: list[int], length: int, note: Note) -> None:
        name = self.manager.add_request(prompt, max_new_tokens=length, streaming=True)
        self._collect([name], note)

    def describe(self) -> str:
        return self.inner.describe()

    def close(self) -> None:
        self.manager.stop(block=True, timeout=10)


class VLLM:
    """vLLM, as its LLM class builds it. On a CPU its worker is told not to keep a core free for
    its scheduler (VLLM_CPU_NUM_OF_RESERVED_CPU=0), unless the environment says otherwise: on few
    cores that would cost it half its speed."""

    packages = ("vllm", "vllm-cpu", "torch", "transformers")

    def __init__(self, options: dict[str, Any]) -> None:
        os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        from vllm import LLM, SamplingParams

        self.temperature = options["temperature"]
        self.params_class = SamplingParams
        self.llm = LLM(
            options["folder"],
            dtype=options["dtype"],
            skip_tokenizer_init=True,
            max_model_len=options["max_model_len"],
            max_num_seqs=256,
            **options["llm_options"],
        )

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        params = [self._params(length) for length in lengths]
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(given, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def stream(self, prompt: list[int], length: int, note: Note) -> None:
        engine, told = self.llm.llm_engine, 0
        engine.add_request("stream", {"prompt_token_ids": prompt}, self._params(length))
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = output.outputs[0].token_ids
                for token_id in tokens[told:]:
                    note(token_id)
                told = len(tokens)

    def _params(self, length: int) -> Any:
        return self.params_class(
            temperature=self.temperature, max_tokens=length, ignore_eos=True, detokenize=False
        )

    def describe(self) -> str:
        reserved = os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"]
        return f"its own defaults (on a CPU: {reserved} cores kept free)"


class NanoVLLM:
    """nano-vllm, from the environment or from a checkout beside this one (`--nano-vllm FOLDER`).

    It knows no greedy sampling: temperature 0 becomes 0.000001. Where flash-attn is missing, it is
    given torch's varlen_attn (also FlashAttention) under flash-attn's names; a checkpoint without
    a tokenizer gets an empty one. `describe` says which of these were needed.
    """

    packages = ("nano-vllm", "torch", "transformers", "flash-attn")

    def __init__(self, options: dict[str, Any]) -> None:
        from nanoserve.bench import flash_attn_shim

        self.notes: list[str] = []
        if importlib.util.find_spec("flash_attn") is None:
            sys.modules["flash_attn"] = flash_attn_shim.make_module()
            self.notes.append("flash-attn missing, torch's varlen_attn in its place")
        if not (Path(options["folder"]) / "tokenizer_config.json").exists():
            import transformers

            transformers.AutoTokenizer = flash_attn_shim.EmptyTokenizer  # type: ignore[misc, assignment]
        from nanovllm import LLM, SamplingParams

        self.params_class = SamplingParams
        self.temperature = options["temperature"] or 1e-6
        self.llm = LLM(options["folder"], max_model_len=options["max_model_len"] or 4096)

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        params = [self._params(length) for length in lengths]
        outputs: Any = self.llm.generate(prompts, params, use_tqdm=False)
        return [output["token_ids"] for output in outputs]

    def stream(self, prompt: list[int], length: int, note: Note) -> None:
        """It hands out finished requests only; but at batch 1 a step is a token."""
        self.llm.add_request(prompt, self._params(length))
        while not self.llm.is_finished():
            finished, _ = self.llm.step()
            note(finished[0][1][-1] if finished else -1)

    def _params(self, length: int) -> Any:
        return self.params_class(temperature=self.temperature, max_tokens=length, ignore_eos=True)

    def describe(self) -> str:
        return "; ".join(self.notes) or "with flash-attn"


# name -> (the module that must be importable, the class, does it need a GPU)
PEERS: dict[str, tuple[str, Any, bool]] = {
    "nanoserve": ("nanoserve", Nanoserve, False),
    "hf": ("transformers", Transformers, False),
    "hf-continuous": ("transformers", TransformersContinuous, False),
    "vllm": ("vllm", VLLM, False),
    "nano-vllm": ("nanovllm", NanoVLLM, True),
}


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Of Python and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


# -- the loop --


class Server:
    """Answers one request after another, with the engine that the first one builds."""

    def __init__(self, name: str) -> None:
        self.module, self.engine_class, self.needs_gpu = PEERS[name]
        self.engine: Any = None

    def why_not(self, device: str) -> dict[str, Any]:
        """Whether this engine can be used here; if not, a word on why."""
        if importlib.util.find_spec(self.module) is None:
            return {"reason": f"{self.module} is not importable"}
        if self.needs_gpu and not device.startswith("cuda"):
            return {"reason": "it needs a CUDA GPU"}
        return {"reason": None}

    def build(self, **options: Any) -> dict[str, Any]:
        start = time.perf_counter()
        self.engine = self.engine_class(options)
        return {
            "seconds": time.perf_counter() - start,
            "versions": versions(self.engine_class.packages),
            "description": self.engine.describe(),
        }

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> dict[str, Any]:
        start = time.perf_counter()
        token_ids = self.engine.generate(prompts, lengths)
        return {
            "seconds": time.perf_counter() - start,
            "token_ids": token_ids,
            "num_preemptions": getattr(self.engine, "num_preemptions", None),  # ours alone tells
        }

    def stream(self, prompt: list[int], length: int) -> dict[str, Any]:
        """Seconds from the request to each of its tokens."""
        times: list[float] = []
        token_ids: list[int] = []
        start = time.perf_counter()

        def note(token_id: int) -> None:
            times.append(time.perf_counter() - start)
            token_ids.append(token_id)

        self.engine.stream(prompt, length, note)
        return {"times": times, "token_ids": token_ids}

    def set(self, **attributes: Any) -> dict[str, Any]:
        """Change a setting of the engine, such as transformers' batch size."""
        for name, value in attributes.items():
            setattr(self.engine, name, value)
        return {}

    def close(self) -> dict[str, Any]:
        if hasattr(self.engine, "close"):
            self.engine.close()
        return {}


@contextlib.contextmanager
def own_stdout() -> Iterator[Any]:
    """The stream that answers go to; whatever else prints, prints to stderr."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as stream:
        os.dup2(2, 1)
        yield stream


def end_process_group() -> None:
    """End this process and all that the engine has started, without waiting for their manners."""
    if hasattr(os, "killpg") and os.getpgid(0) == os.getpid():  # the group is this engine's own
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)


def main() -> None:
    server = Server(sys.argv[1])
    with own_stdout() as answers:
        for line in sys.stdin:
            request = json.loads(line)
            call = request.pop("call")
            try:
                answer = getattr(server, call)(**request)
            except Exception as error:  # of any kind: the other side decides what it means
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
            if call == "close":
                break
    end_process_group()


if __name__ == "__main__":
    main()
