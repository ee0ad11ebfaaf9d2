"""Which continuations are likeliest as a whole?

Beam search keeps the beam_width likeliest texts instead of one. After each step every beam brings
its 2 * beam_width likeliest next tokens as candidates. The best of all candidates become the next
beams; candidates that end in an EOS token are completed. On top of fork this costs no copying: a
beam with two successors is forked, a beam without one is finished, and all beams share the blocks
of their common beginning. beam_width 2:

    step 1          step 2                      block tables
    the -> cat      the cat -> sat  0.40  *     beam 0: [7, 2]   (fork of "the cat")
                    the cat -> ran  0.30  *     beam 1: [7, 4]   (fork of "the cat")
    a   -> dog      a dog   -> ran  0.20        finished: its blocks are free again

The rule is vLLM's: beams are ranked by cumulative log-probability / length ** length_penalty. The
length counts the prompt too, but not the EOS token.

Left out: stop strings and structured output.

vLLM: vllm/beam_search.py, entrypoints/llm.py (V0); vllm/entrypoints/generate/beam_search/ (V1).
"""

from nanoserve.chapters.beam_search.parts import (
    BeamSearchOutput,
    BeamSearchParams,
    BeamSearchSequence,
)

__all__ = ["BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence"]
