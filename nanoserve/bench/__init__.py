"""How fast is it, beside its peers, and beside itself with another option?

    python bench.py --quick                                       everything small, in a minute
    python bench.py throughput --dummy qwen3-29m                  many requests at once
    python bench.py latency --peer transformers                   one request at a time
    python bench.py throughput --variant "no chunks:enable_chunked_prefill=False"
    python bench.py serve --url http://127.0.0.1:8000/v1          any server of OpenAI's API

    workload.py   which model, which requests?
    engines.py    one interface for nanoserve, vLLM and transformers
    suites.py     what is measured, and in which turns?
    client.py     the same requests, sent to a server
    kernels.py    attention alone
    cli.py        the command line, the table, the JSON file

Engines take turns, round by round: what else the machine does slows all of them alike. Ratios are
taken within a round, and their median is shown.

Left out: a search for the best options, charts, energy.

vLLM: benchmarks/ (V0); vllm/benchmarks/: throughput.py, latency.py, serve.py (0.32). Those measure
one engine at a time.
"""
