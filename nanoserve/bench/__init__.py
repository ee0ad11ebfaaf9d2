"""What bench.py measures, and how: one file per concern.

    workload.py   which model, which requests: the same for every engine
    floor.py      what the machine could do at best: bytes / bandwidth, operations / rate
    peers.py      the engines under one interface; runs inside each engine's own process
    process.py    the other end of the line: starts such a process and talks to it
    turns.py      several engines, in turns
    suites.py     throughput, batch sizes, latency: engines compared
    inside.py     prefix caching, and the parts of a step: one engine, looked into
    control.py    scheduler and memory: the control plane alone
    kernels.py    attention alone
    report.py     the tables on the terminal
    readme.py     the table in the READMEs, from notebooks/results/
    plot.py       the pictures (needs matplotlib)

(flash_attn_shim.py lends nano-vllm what it may lack.)

Nothing in the engine imports this; deleting the folder leaves a working engine.
"""
