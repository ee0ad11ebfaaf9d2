"""What went wrong in real engines, and how would one have known?

Five bugs of vLLM and of small engines like this one, each as a subclass of a few lines. The README
beside this file tells them, a page each. A module has, of one bug:

    BROKEN, SECOND    the bug as parts of LLM, and its second act: the repair that did not repair
    story(**BROKEN)   what the user saw (the demo model); story() is the right engine
    test(**BROKEN)    the test that catches it: AssertionError. test() passes
    rule(...)         the promise that was broken, as an assert
    picture()         the blocks at the wrong moment

    python -m nanoserve.teaching.post_mortems                 all stories
    python -m nanoserve.teaching.post_mortems stale_hash      one; --pictures FOLDER writes all

Left out: the fixes as they were made. They are behind the links.
"""

from __future__ import annotations

from typing import Any

NAMES = ("stale_hash", "whole_prompt_hit", "hit_not_consumed", "freed_page", "pinned_too_early")
RED = "#D55E00"


def ask(llm: Any, questions: dict[str, int], most_steps: int = 60) -> str:
    """The answer of the demo model to the last one of these questions, which run at once (question
    -> tokens at most); or that there is none."""
    from nanoserve.sampling_params import SamplingParams
    from nanoserve.teaching.lesson import prompt

    texts: dict[str, str] = {}
    for number, (question, most) in enumerate(questions.items()):
        params = SamplingParams(temperature=0, max_tokens=most)
        llm.add_request("ABC"[number], prompt(llm, question), params)
    try:
        for _ in range(most_steps):
            texts |= {each.request_id: each.outputs[0].text for each in llm.step() if each.finished}
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        llm.abort_request(["A", "B", "C"])
    return texts.get("ABC"[len(questions) - 1], f"no answer after {most_steps} steps")


def draw_blocks(toy: Any, title: str, wrong: dict[int, str]) -> Any:
    """The blocks of a ToyEngine that hold something: what each holds, how it is found, who has it.
    wrong: block -> what is wrong there."""
    from nanoserve.teaching.pictures import SLOT, Picture, colour_of

    picture, manager, size = Picture(title), toy.block_manager, toy.config.block_size
    names = {seq.seq_id: name for name, seq in toy.sequences.items()}
    left, y = 60 + size * SLOT, 50
    for x, head in ((0, "block"), (60, "holds"), (left + 20, "is found as"), (left + 220, "is in")):
        picture.text(x, 40, head, colour="#666")
    for block in range(manager.num_blocks):
        tokens = [toy.contents.get(block * size + slot) for slot in range(size)]
        if not any(tokens):
            continue
        tables = manager.block_tables.items()
        owners = [names[seq_id] for seq_id, table in tables if block in table]
        for slot, token in enumerate(tokens):
            fill = colour_of(owners[0]) if owners else "#cccccc"
            picture.box(60 + slot * SLOT, y, SLOT, 24, fill if token else "none", 0.35)
            picture.text(60 + (slot + 0.5) * SLOT, y + 16, chr(token or 32), 12, anchor="middle")
        picture.text(0, y + 16, str(block))
        keys = [key for key, found in manager.pool.cached_blocks.items() if found == block]
        picture.text(left + 20, y + 16, " and ".join(map(chain_of, keys)) or "-")
        places = [f"the table of {', '.join(owners)}"] * bool(owners)
        places += ["the free queue"] * (block in manager.pool.free_queue)
        count = manager.pool.ref_counts[block]
        text = f"{' and '.join(places) or 'nothing'}; references: {count}"
        picture.text(left + 220, y + 16, text)
        if block in wrong:
            picture.box(-6, y - 4, 806, 48, edge=RED)
            picture.text(60, y + 39, wrong[block], colour=RED, bold=True)
            y += 18
        y += 34
    return picture


def chain_of(key: Any) -> str:
    """The tokens of a block hash and of its parents: abcd > efgh."""
    own = "".join(map(chr, key.token_ids))
    return f"{chain_of(key.parent)} > {own}" if key.parent.parent is not None else own
