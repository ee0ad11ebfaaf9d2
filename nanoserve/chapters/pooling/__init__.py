"""How does a language model make one vector of a text?

A model that writes text computes, for each token, a hidden state of some hundred numbers, and makes
logits of the last one. A *pooling* model stops before that: one vector of the hidden states is the
result. Texts that mean the same have vectors with a small angle between them.

    "How do I sleep well?"   8 tokens -> 8 hidden states -> pooling -> [ 0.31, -0.02, ...]
                                                                          cosine: 0.83
    "Tips for a good night"  6 tokens -> 6 hidden states -> pooling -> [ 0.27,  0.05, ...]

    LLM(model, runner="pooling").embed(["How do I sleep well?", ...])     the vectors
    LLM(model, runner="pooling").score("How do I sleep well?", [...])     the cosines

The step is that of a model which writes text: the same scheduler, KV blocks, batch and kernels.
Only its end differs. There are no logits, no sampling and no decode: a request ends with the step
that computes the last token of its prompt, and gives its blocks back.

*What do chunks and cached prefixes do to it?* The KV cache keeps keys and values, not the hidden
states at the end of the last layer.

    pooling, attention     prompts in chunks          prefixes from the cache
    last token, causal     yes: the last chunk has    yes: the last token is always computed, and
                           the token                  sees the keys of all others
    mean, causal           yes: a sum goes on from    no: the hidden states of cached tokens are
                           chunk to chunk             missing in the sum
    any, bidirectional     no: each token sees later  no: a key depends on what follows it
                           ones

So the engine switches off what is "no" above. (vLLM has no running sum: there, mean needs the whole
prompt in one step.)

    params.py      PoolerConfig: which pooling, as the checkpoint or the user says
                   PoolingParams: what one request asks for
    outputs.py     PoolingRequestOutput, EmbeddingRequestOutput, ScoringRequestOutput
    models.py      models without their heads, and encoders such as BERT
    parts.py       what changes in the engine; LLM.encode, embed and score

Left out: classification, rewards and cross-encoders; a vector for each token (token_embed); Dense
layers of sentence-transformers behind the pooling; prompts that config_sentence_transformers.json
recommends (write them before your texts); decoders with bidirectional attention.

vLLM: vllm/worker/pooling_model_runner.py (V0, before that embedding_model_runner.py);
vllm/pooling_params.py, vllm/model_executor/layers/pooler/, vllm/entrypoints/pooling/ (V1).
"""

from nanoserve.chapters.pooling.outputs import EmbeddingOutput as EmbeddingOutput
from nanoserve.chapters.pooling.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
from nanoserve.chapters.pooling.outputs import PoolingOutput as PoolingOutput
from nanoserve.chapters.pooling.outputs import PoolingRequestOutput as PoolingRequestOutput
from nanoserve.chapters.pooling.outputs import ScoringOutput as ScoringOutput
from nanoserve.chapters.pooling.outputs import ScoringRequestOutput as ScoringRequestOutput
from nanoserve.chapters.pooling.params import PoolerConfig as PoolerConfig
from nanoserve.chapters.pooling.params import PoolingParams as PoolingParams
