"""Where do blocks go that the prefix cache would forget?

To CPU blocks: the pool of the CPU, which preemption by swap uses, is a prefix cache of its own. A
BlockPool knows how to find a block by its hash and how to forget the least recently used one, so
the second level of the cache is the same class as the first:

    KV pool    allocate() takes the block of "a b c d"  -->  copied to CPU block 7, found by its hash
    CPU pool   ... a later request begins with "a b c d":    CPU block 7 is copied back

vLLM: vllm/v1/kv_offload/, vllm/distributed/kv_transfer/ (V1).
"""
