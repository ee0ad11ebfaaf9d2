"""A search for bugs with random inputs, until the time is over.

    python -m nanoserve.tools.soak 3600 --seed 7

Five parts take turns. Each part is a class whose instances are called with a Round: random numbers
in, requests and findings out. Round 12 of part "control" of seed 7 is the same on every machine.

    control   the control plane over the fake executor: options, aborts, threads, planted faults
    engine    real engines on the demo model and on tiny random checkpoints: any features at once
    signals   Ctrl-C at random moments of every call
    inputs    valid calls and checkpoints with one value changed for a bad one
    ranks     the requests of "engine" on two ranks

Each part runs in a process of its own (worker.py), so that a crash, a hang or too much memory is a
finding, too, and the search goes on. cli.py gives the turns and prints the findings.

Left out: GPUs, several machines, and speed.
"""
