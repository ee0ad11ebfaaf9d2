"""What bench.py measures, and how: one file per concern. Begin with the first two.

    workload.py   which model, which requests: the same for every engine
    suites.py     throughput, batch sizes, latency: engines compared
    serving.py    serve: HTTP servers compared
    inside.py     prefix caching, the parts of a step, ranks: one engine, looked into
    speculation.py speculative decoding: where it pays, and where it does not
    parallel.py   what each rank of a toy model holds, sends and takes
    control.py    scheduler and memory: the control plane alone
    kernels.py    attention alone
    roofline.py   the limits of the machine: bytes / bandwidth, operations / rate
    cost_model.py what more machines would do: on paper
    ratios.py     what was measured, beside what the cost model says of it
    published.py  what others have published of GPUs, beside what the cost model says of it
    scale.py      replicas behind a router: the control plane alone, in virtual time
    hit_rates.py  what real replicas found in their caches, beside what scale.py finds
    scale_page.py the tables of notebooks/results/scale.md
    turns.py      how several engines are measured in turns
    peers.py      the engines under one interface; runs inside each engine's own process
    servers.py    the HTTP servers under the same interface; with http_client.py
    process.py    starts such a process and talks to it
    report.py     the tables on the terminal
    plot.py       the pictures (needs matplotlib)
    run.py        one run: defaults, settings, suites one after the other
    cli.py        the command line: `python bench.py`, `nanoserve bench`; imports no torch

No module of the engine imports this folder; without it the engine works as before.
"""
