"""What did my engine do? A recorder, and pictures of what it saw.

    from nanoserve import LLM
    from nanoserve.extras import trace

    llm = LLM()
    recorder = trace.Recorder(llm)                                # one,
    llm.generate(["Once upon a time", "One day a clever fox"])    # two,
    recorder.save("run.html")  # three: a player. run.svg: an animation, run.json: a Chrome trace

Every picture is drawn from frames: what a Recorder keeps of each step, or a snapshot of a live
engine. Read the modules in this order:

    frames      the data: one Frame for each step
    recorder    listens to an engine, makes frames
    blocks      who owns which block               block_map
    steps       who ran when, how long it took     timeline, timelines, step_times, gantt
    tensors     one step's arrays                  step_tensors
    states      two state machines                 sequence_states, block_states
    charts      plain charts                       distribution, bars, lines
    as_text     a step as text                     decision
    movie       the run step by step               Player (recorder.play), the animated SVG
    chrome      the run as Chrome trace JSON
    timer       the parts of a step's time         StepTimer
    parts       these parts as shares              measure_parts, shares, print_operators
    launches    kernels, graphs, overlap           list_launches, launch_strip, GraphRunner, overlap
    limits      the limits of a machine            roofline, ridge_prompt
    compare     fair comparisons, their spread     time_in_turns, ratios, histograms, claims
    why         why pages, and who does what         memory_map, layers
    style, svg  colours and shapes

Pictures need matplotlib (pip install -e ".[notebooks]"); the recorder, the player, the animation
and the trace need no other package.
"""

from importlib import import_module

from nanoserve.extras.trace.as_text import decision
from nanoserve.extras.trace.blocks import block_map
from nanoserve.extras.trace.charts import bars, distribution, lines
from nanoserve.extras.trace.compare import (
    claims,
    histograms,
    ratios,
    serve_at,
    time_in_turns,
    unfair,
    wandering_times,
)
from nanoserve.extras.trace.parts import measure_parts, print_operators, shares
from nanoserve.extras.trace.recorder import Recorder
from nanoserve.extras.trace.states import block_states, sequence_states
from nanoserve.extras.trace.steps import gantt, step_times, timeline, timelines
from nanoserve.extras.trace.style import colour, on_colour, tint
from nanoserve.extras.trace.tensors import step_tensors
from nanoserve.extras.trace.timer import StepTimer
from nanoserve.extras.trace.why import layers, memory_map

# Modules that load torch, and what they define: imported when a name of them is used.
WITH_TORCH = {
    "launches": """GraphRunner TapeGraph decode_cost launch_strip list_launches one_layer overlap
        read_config record_calls""",
    "limits": "ridge_prompt roofline",
}
__all__ = [
    "Recorder",
    "StepTimer",
    "bars",
    "block_map",
    "block_states",
    "claims",
    "colour",
    "decision",
    "distribution",
    "gantt",
    "histograms",
    "layers",
    "lines",
    "measure_parts",
    "memory_map",
    "on_colour",
    "print_operators",
    "ratios",
    "sequence_states",
    "serve_at",
    "shares",
    "step_tensors",
    "step_times",
    "time_in_turns",
    "timeline",
    "timelines",
    "tint",
    "unfair",
    "wandering_times",
]


def __getattr__(name: str) -> object:
    """The names of WITH_TORCH."""
    for module, names in WITH_TORCH.items():
        if name in names.split():
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
