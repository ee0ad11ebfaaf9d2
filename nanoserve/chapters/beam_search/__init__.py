"""Which continuations are likeliest as a whole?

Beam search keeps the beam_width likeliest texts instead of one. In each step every beam brings its
2 * beam_width likeliest next tokens as candidates. The best of all candidates become the next
beams; candidates that end in an EOS token are completed. beam_width 2:

    step 1          step 2
    the -> cat      the cat -> sat  0.40  *
                    the cat -> ran  0.30  *
    a   -> dog      a dog   -> ran  0.20        forgotten

    llm.beam_search(["Once upon a time"], BeamSearchParams(beam_width=2, max_tokens=20))

Beams are ranked by cumulative log-probability / length ** length_penalty. The length counts the
prompt too, but not the EOS token: vLLM's rule.

So is the way: a plain loop, in which each beam of each step is a request for one token. The engine
knows nothing of beams. Two beams share the blocks of their common beginning because the prefix
cache has them; what stands in the last, partly filled block is computed again. (V0's scheduler
forked the beams, with copy-on-write. With enable_prefix_caching=False a step computes all tokens.)

Left out: stop strings and structured output.

vLLM: vllm/beam_search.py, entrypoints/llm.py (V0); vllm/entrypoints/generate/beam_search/ (V1).
"""

from nanoserve.chapters.beam_search.parts import BeamSearchOutput as BeamSearchOutput
from nanoserve.chapters.beam_search.parts import BeamSearchParams as BeamSearchParams
from nanoserve.chapters.beam_search.parts import BeamSearchSequence as BeamSearchSequence
