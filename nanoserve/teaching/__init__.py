"""How does one watch the engine at work?

The notebooks run the real engine, with the demo model and a KV cache that fits into a picture:

    llm = small_llm(num_blocks=24)               blocks of 4 tokens; each step is recorded
    serve(llm, {"A": 8, "D": (20, 3)})           A: 8 tokens; D: 20, and it arrives at step 3
    timeline(llm)                                who ran in which step, with how many tokens
    block_map(llm, step=3)                       what each KV block held then, and whose it was
    step_tensors(llm, step=3)                    what the model got as its input
    hash_chain(llm)                              what the prefix cache can find
    drafts(llm, "A")                             which guesses of a speculative engine were right

    recorder.py   a scheduler and a runner that remember what they did
    lesson.py     small engines, four requests, checks of guesses
    pictures.py   the state of the engine as SVG; those of chapters: model_, chapter_pictures.py
    course/       nine labs: a student's subclasses in the engine, graded by pytest
    post_mortems/ five bugs of real engines, each as a subclass
    notebooks.py  runs notebooks, and makes a student's copy without outputs

The engine knows nothing of it: the recorder is a subclass of the scheduler, like one that you write
and give to LLM(scheduler_cls=...).
"""

from importlib import import_module

WHERE = {
    "lesson": ("CAST", "check", "prompt", "serve", "small_llm", "source"),
    "pictures": (
        *("block_map", "drafts", "hash_chain", "step_tensors", "timeline", "token_path"),
        *("bars", "group_map", "lines"),
    ),
    "model_pictures": ("adapters", "automaton", "codes"),
    "chapter_pictures": ("two_levels", "lanes", "heat"),
    "recorder": ("record",),
}
__all__ = [name for names in WHERE.values() for name in names]


def __getattr__(name: str) -> object:
    """Imported when it is used."""
    for module, names in WHERE.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
