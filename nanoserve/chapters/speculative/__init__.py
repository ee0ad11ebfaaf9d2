"""Can one step of the model bring several tokens?

A step reads all weights to compute one token of each sequence, and it would read the same weights
to compute five. So a *proposer* guesses the next tokens, and one step computes all guesses and
finds out which of them the model would have sampled itself. With k = 3 drafts of the n-gram "a b":

    known tokens       ... x a b c d e ... a b        "c d e" stood behind "a b" before
    drafts                                    c d e
    the step samples                          c d f g   at four positions
    accepted                                  c d       the first two are right ...
    new tokens                                c d f     ... and the third comes instead of "e"

Nothing but the number of steps changes: the tokens are those of plain decoding, also those of
requests that sample. (In float32. In bfloat16 a near tie may go the other way, as in any other
batch. The RejectionSampler keeps the distribution only: see rejection.py.) A step with drafts
computes more, so it pays where steps wait for the memory (few sequences, large models) and guesses
are often right.

    parts.py        what changes in scheduler and runner
    config.py       SpeculativeConfig: speculative_config={"method": "ngram", ...}
    proposer.py     Proposer: what the runner calls; NgramProposer: looks into the request itself
    suffix.py       SuffixDecodingProposer: looks into earlier outputs, too
    draft_model.py  DraftModelProposer: a small model guesses
    medusa.py       MedusaProposer: more heads on the hidden states of the model
    eagle.py        EagleProposer: a small model that reads these hidden states
    rejection.py    RejectionSampler: another way to accept, for drafts that were drawn

Left out: trees of drafts (vLLM 0.32 has none either).

vLLM: vllm/spec_decode/ (V0); vllm/v1/spec_decode/, vllm/config/speculative.py (0.32).
"""
