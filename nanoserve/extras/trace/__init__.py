"""What did my engine do? A recorder, and pictures of what it saw.

    from nanoserve import LLM
    from nanoserve.extras import trace

    llm = LLM()
    recorder = trace.Recorder(llm)                                # one,
    llm.generate(["Once upon a time", "One day a clever fox"])    # two,
    recorder.save("run.html")  # three: a player. run.svg: an animation, run.json: a Chrome trace

Every picture of a run is drawn from frames: what a Recorder keeps of each step, or a snapshot of a
live engine. HOMES says where each name is. A module is imported when a name of it is used, so that
a recorder needs neither matplotlib (pip install -e ".[notebooks]") nor what a single picture needs.

Read frames, snapshot and recorder first. Every picture uses style (colours, canvas, labels); the
player and the animation are made by movie, player and svg, the Chrome trace by chrome.
"""

from importlib import import_module
from typing import Any

# module -> the names that it gives to the package
HOMES = {
    # a run: what was recorded
    "recorder": "Recorder",
    "blocks": "block_map",  # who owns which block
    "steps": "timeline timelines step_times gantt",  # who ran when, how long it took
    "tensors": "step_tensors",  # one step's arrays, and the blocks that it writes
    "states": "sequence_states block_states",  # two state machines
    "as_text": "decision",  # a step as a table of text
    "timer": "StepTimer",  # the parts of a step's time
    "style": "colour on_colour tint",
    "charts": "distribution bars lines points",  # plain charts
    # one subject each
    "why": "memory_map layers",  # why pages, and who does what
    "memory": "memory_history memory_use",  # all slots over a whole run
    "chains": "hash_chain block_digests",  # hashes of the prefix cache
    "async_steps": "calls overlap",  # what CPU and device do, recorded
    "bubble": "pipeline idle_share",  # what each stage of a pipeline does when
    "attention": "online_softmax slot_weights roofline token_texts BlockRead Work",
    "model": """hidden_states layer_words packed_weights placements rank_weights rope_pairs
        two_matrices""",
    "messages": "listen conversation",  # what ranks say to each other
    "journey": "watch call_chain CALL_CHAIN Visit",  # the functions that a request passes
    "sampling": "token_path filters stages streams frequencies surprise perplexity TokenPath",
    "weights": "matrices staircase",  # LoRA and quantization
    "beams": "beam_tree beam_blocks BeamTree",
    "drafts": "watch_drafts drafted Verified",  # speculative decoding: which drafts were right
    "tiers": "watch_tiers tier_map evictions",  # blocks in main memory and on a disk
    "grammars": "automaton token_table overruled",  # what a grammar allows and forbids
    "parts": "measure_parts recorded_parts shares print_operators",  # where the time of a step goes
    "launches": """list_launches launch_strip one_layer decode_cost overlap_scheme read_config
        record_calls GraphRunner TapeGraph""",
    "limits": "rooflines ridge_prompt",
    "compare": """time_in_turns ratios histograms claims read_claim serve_at unfair
        wandering_times""",
}
__all__ = sorted(name for names in HOMES.values() for name in names.split())


def __getattr__(name: str) -> Any:
    """Import the module of this name when it is first used."""
    for module, names in HOMES.items():
        if name in names.split():
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """For tab completion: also the names that were not used yet."""
    return sorted({*globals(), *__all__})
