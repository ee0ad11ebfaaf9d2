"""Where do keys and values go when the device has no more room for them?

The prefix cache is what free KV blocks still hold, and it forgets a block when another sequence
needs it. With this chapter the block goes to main memory instead, and from there to a disk or to
another engine. A later request with the same beginning gets it back, and computes it not again:

    llm = LLM(kv_offloading_size=4)      # GiB of main memory

    config.py      KVTransferConfig: where to, and how many bytes
    base.py        what the parts promise each other, under vLLM's names
    connector.py   OffloadingConnector: which blocks leave, which come back
    manager.py     CPUOffloadingManager: which block is in which row of the CPU tier
    policies.py    LRUPolicy, ARCPolicy: which block leaves the CPU tier
    worker.py      OffloadingWorker: the copies, on each rank
    tiering.py     TieringOffloadingManager: to the tiers below the CPU tier, and back
    disk.py        FileSystemTierManager: the disk, and who waits for it (no step)
    files.py       BlockFiles: a file for each block, whole or not there
    peer.py        P2PSecondaryTierManager: one engine computes a prompt, another goes on from it
    transport.py   Transport: how one engine asks another for blocks
    proxy.py       one address in front of two such servers
    stats.py       OffloadingConnectorStats: how much went where
    digests.py     the name of a block outside of this process

On the way of a request through the engine:

    schedule       connector.is_ready: what is below the CPU tier is read into rows first. An
                   admitted sequence gets what the rows have; evicted blocks get rows
    runner         worker: copies at the head and at the end of the step
    update         the step was read: its rows are whole, and may go down

vLLM: vllm/v1/kv_offload/, vllm/distributed/kv_transfer/ (V1).
"""
