"""hero.svg: four requests share one KV cache, step by step. Made from a real run.

A small engine (blocks of 4 tokens, 16 tokens a step) answers four questions with the demo model.
Each step becomes a frame: the step's token budget, the requests and what the step did to them, and
every block of the KV cache with its owners. `record_story` runs the engine, and insists that the
run shows what the picture is for: a hit in the prefix cache, chunked prefill beside decodes, a
preemption, and the return through the prefix cache.

nanoserve/extras/trace draws it. `python notebooks/pictures/make.py` writes this picture and the
others.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from nanoserve import LLM, SamplingParams
from nanoserve.extras import trace
from nanoserve.extras.trace.frames import Frame, chunks_of
from nanoserve.extras.trace.movie import scenes_of, to_svg

BLOCK_SIZE = 4
# The first combination with the whole story is drawn. There are others for the day when the demo
# model is trained again: with another tokenizer, prompts have other lengths.
BUDGETS = (16, 15, 14, 13, 12)  # tokens in one step
NUM_BLOCKS = (25, 24, 23, 22, 21, 20)
ARRIVALS = (
    (0, 1, 3, 4),
    (0, 2, 3, 4),
    (0, 1, 2, 3),
    (0, 2, 4, 6),
)  # the step before which each comes


class Ask(NamedTuple):
    name: str
    question: str
    answer: str  # must be in the text


ASKS = (
    Ask("A", "What is 17 + 25?", "42"),
    Ask("B", "What is 17 + 26?", "43"),
    Ask("C", "What is the capital of France?", "Paris"),
    Ask("D", "Remember: The red box holds 7341. What does the red box hold?", "7341"),
)
QUESTIONS = {ask.name: ask.question for ask in ASKS}


def record_run(budget: int, num_blocks: int, arrivals: tuple[int, ...]) -> list[Frame]:
    """Run the four requests on an engine of this size; they arrive before the given steps."""
    params = SamplingParams(temperature=0, max_tokens=24)
    with LLM(
        num_kv_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=budget,
        max_num_seqs=len(ASKS),
        device="cpu",
    ) as llm:
        tokenizer, recorder, step = llm.get_tokenizer(), trace.Recorder(llm), 0
        while step <= max(arrivals) or llm.has_unfinished_requests():
            for ask, arrival in zip(ASKS, arrivals, strict=True):
                if arrival == step:
                    message = [{"role": "user", "content": ask.question}]
                    prompt = tokenizer.apply_chat_template(
                        message, add_generation_prompt=True, return_dict=False
                    )
                    llm.add_request(ask.name, prompt, params)
            llm.step()
            step += 1
        return recorder.steps


def missing_in(frames: list[Frame]) -> list[str]:
    """What the picture should show and this run does not. Empty: a good run."""
    events = [event for frame in frames for event in frame.events]
    kinds = [event.kind for event in events]
    hits = [event.count for event in events if event.kind == "hit"]
    returns = [event.count for event in events if event.kind == "back"]
    num_running = {frame.number: len(frame.scheduled) for frame in frames}
    chunks = {step: total for (step, _), (_, total) in chunks_of(frames).items()}
    final = {r.name: r.text for r in scenes_of(frames)[-1].requests if r.state == "finished"}
    checks = {
        "prefix hit of two blocks": max(hits, default=0) >= 2 * BLOCK_SIZE,
        "block that two requests share": any(
            len(block.owners) > 1 for frame in frames for block in frame.blocks.values()
        ),
        "prompt in three chunks beside two decodes": any(
            total >= 3 and num_running[step] >= 3 for step, total in chunks.items()
        ),
        "single preemption": kinds.count("preempted") == 1,
        "return through the prefix cache": max(returns, default=0) >= BLOCK_SIZE,
        "right answer everywhere": all(ask.answer in final.get(ask.name, "") for ask in ASKS),
    }
    return [name for name, is_there in checks.items() if not is_there]


def record_story() -> list[Frame]:
    """The frames of the first run that has it all. Raises ValueError if there is none."""
    found = []
    for budget, num_blocks, arrivals in product(BUDGETS, NUM_BLOCKS, ARRIVALS):
        frames = record_run(budget, num_blocks, arrivals)
        missing = missing_in(frames)
        if not missing:
            return frames
        found.append(
            f"{budget} tokens, {num_blocks} blocks, {arrivals}: no {', no '.join(missing)}"
        )
    raise ValueError("no run shows the whole story. Change ASKS:\n" + "\n".join(found))


WORDS = {
    "en": {
        "title": "nanoserve: four requests share one KV cache, step by step",
        "description": "A real run of the demo model. Requests share a prefix, a long prompt is "
        "computed in chunks beside the decodes of others, one request is preempted when no block "
        "is free, and returns through the prefix cache.",
    },
    "zh-CN": {
        "title": "nanoserve：四个请求逐步共享同一个 KV cache",
        "description": "演示模型的一次真实运行：请求共享前缀，长 prompt 分块与其他请求的 "
        "decode 在同一 step 中计算；没有空闲 block 时一个请求被抢占，随后借助前缀缓存恢复。",
    },
}


def draw(frames: list[Frame], language: str = "en") -> str:
    """The whole SVG file."""
    words = WORDS[language]
    return to_svg(frames, words["title"], QUESTIONS, language, words["description"])
