"""Where do blocks go that the prefix cache would forget?

To CPU blocks. The pool of the CPU, which preemption by swap uses, becomes a prefix cache, too. A
BlockPool knows how to find a block by its hash and how to forget the least recently used one, so
the second level of the cache is the same class as the first:

    LLM(kv_offloading_size=4)                                  4 GiB of main memory, over all ranks

    KV pool    a request takes the block of "a b c d"     -->  copied to CPU block 7
    CPU pool   a later prompt begins with "a b c d"       -->  CPU block 7 is copied to a KV block

A copy is as fast as the bus, and for long prompts much faster than computing the block again. What
is copied when is one more entry of the step's blocks_to_swap_out and blocks_to_swap_in: the runner
has nothing to learn.

And to files, for the next process or for another one. Prefill in one engine and decode in another
is the same thing: two engines, one folder.

    producer   computes a prompt of 1000 tokens           -->  62 files of 16 tokens each
    consumer   gets the same prompt                       -->  reads 62 files, computes 8 tokens

    config.py    the keys of kv_transfer_config
    parts.py     what changes in the engine
    policies.py  which block leaves the CPU pool: LRU, or ARC, which is not impressed by a scan
    disk.py      a file for each block

Left out: copies and files beside the computation (they precede and follow it), what fills a block
only in part, other transports between machines than a folder that they share.

vLLM: vllm/v1/kv_offload/; offloading_connector.py, example_connector.py in
vllm/distributed/kv_transfer/kv_connector/v1/ (0.32).
"""
