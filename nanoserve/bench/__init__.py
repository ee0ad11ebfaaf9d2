"""What bench.py measures, and how: one file per concern.

    workload.py   which model, which requests: the same for every engine
    peers.py      the engines under one interface; runs inside each engine's own process
    process.py    the other end of the line: starts such a process and talks to it
    floor.py      what the machine could do at best: bytes / bandwidth, operations / rate
    suites.py     throughput, batch sizes, latency, prefix, steps: with a model
    control.py    scheduler and memory: the control plane alone
    kernels.py    attention alone
    plot.py       the pictures (needs matplotlib)
    report.py     the tables: on the terminal, and in the READMEs from notebooks/results/

Nothing in the engine imports this; deleting the folder leaves a working engine.
"""
