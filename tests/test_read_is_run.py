"""What one reads is what runs: a textbook workload on the demo model enters every public function
of the flat modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import nanoserve
from nanoserve import LLM, SamplingParams

HOME = Path(nanoserve.__file__).parent
FEW = {"num_gpu_blocks_override": 14, "block_size": 4, "max_num_seqs": 6, "max_model_len": 48}
NOT_ENTERED = {
    "llm.LLM.from_engine_args": "vLLM's other way to build an LLM",
    "engine.LLMEngine.from_engine_args": "vLLM's other way to build an engine",
    "layers.LinearBase.matrices": "for chapters that change the weights",
}


def functions_of(path: Path) -> Iterator[tuple[str, int]]:
    """(qualified name, first line) of the functions without an underscore."""
    todo: list[Any] = [compile(path.read_text(), str(path), "exec")]
    for code in todo:
        todo += [each for each in code.co_consts if isinstance(each, CodeType)]
        is_function = bool(code.co_flags & 2)  # and no class body (CO_NEWLOCALS)
        if is_function and not code.co_name.startswith(("_", "<")):
            yield (
                code.co_qualname if sys.version_info >= (3, 11) else code.co_name,
                code.co_firstlineno,
            )


def workload() -> None:
    """Everything the documents speak of, once."""

    def fail(output: list[int], logits: Any) -> Any:
        raise RuntimeError("mine")

    greedy = {"temperature": 0, "max_tokens": 10}
    params = [
        SamplingParams(**each)
        for each in (
            {**greedy, "logprobs": 2, "prompt_logprobs": 1},
            {"seed": 1, "top_k": 9, "top_p": 0.9, "min_p": 0.05, "max_tokens": 10},
            {"seed": 2, "n": 3, "max_tokens": 9},
            {**greedy, "repetition_penalty": 1.3, "logit_bias": {425: 1.0}, "min_tokens": 2},
            {**greedy, "stop": ["there"], "bad_words": ["the", "a little"]},
            {**greedy, "allowed_token_ids": list(range(300, 900))},
            {"logits_processors": [lambda output, logits: logits]},
            {"logits_processors": [fail]},
        )
    ]
    prompts = ["Once upon a time", "Once upon a time there was a little girl", "The", [495] * 9] * 2
    for more in ({"preemption_mode": "swap"}, {}, {"async_scheduling": True}):
        policy = {"scheduling_policy": "priority", "long_prefill_token_threshold": 5}
        with LLM(**FEW, **policy, **more) as llm:
            llm.generate(prompts, params, use_tqdm=False, priority=[*range(8)][::-1])
    with LLM() as llm:
        llm.chat([{"role": "user", "content": "Hello"}], use_tqdm=False)
        next(iter(llm.stream("Once", llm.get_default_sampling_params())))
        llm.get_tokenizer()
        llm.add_request("a", "Once upon", SamplingParams(**greedy))
        llm.add_request("b", "Once upon", SamplingParams(**greedy))
        executor, launch = llm.llm_engine.executor, llm.llm_engine.executor.launch
        executor.launch = lambda step: 1 // 0  # a step that fails, and is computed again
        llm.step()
        executor.launch = launch
        llm.abort_request("b")
        while llm.has_unfinished_requests() or llm.llm_engine.get_num_unfinished_requests():
            assert all(output.outputs[0].finished() == output.finished for output in llm.step())
        llm.reset_prefix_cache()


def test_a_breakpoint_in_what_one_reads_is_hit() -> None:
    entered = set[tuple[str, int]]()

    def note(frame: Any, *_: object) -> None:
        entered.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

    before = sys.gettrace()
    sys.settrace(note)
    try:
        workload()
    finally:
        sys.settrace(before)
    missed = {
        f"{path.stem}.{name}"
        for path in HOME.glob("*.py")
        if not path.stem.startswith("__")
        for name, line in functions_of(path)
        if (str(path), line) not in entered
    }
    assert missed - {"sequence.new"} == {*NOT_ENTERED}  # new: only while a module is imported
