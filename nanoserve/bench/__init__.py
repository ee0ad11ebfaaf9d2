"""What bench.py measures, and how: one file per concern. Begin with the first two.

    workload.py   which model, which requests: the same for every engine
    suites.py     throughput, batch sizes, latency: engines compared
    inside.py     prefix caching, the parts of a step, ranks: one engine, looked into
    speculation.py speculative decoding: where it pays, and where it does not
    parallel.py   what each rank of a toy model holds, sends and takes
    control.py    scheduler and memory: the control plane alone
    kernels.py    attention alone
    roofline.py   the limits of the machine: bytes / bandwidth, operations / rate
    turns.py      how several engines are measured in turns
    peers.py      the engines under one interface; runs inside each engine's own process
    process.py    starts such a process and talks to it
    report.py     the tables on the terminal
    plot.py       the pictures (needs matplotlib)
    run.py        one run: defaults, settings, suites one after the other
    cli.py        the command line: `python bench.py`, `nanoserve bench`; imports no torch

No module of the engine imports this folder; without it the engine works as before.
"""
