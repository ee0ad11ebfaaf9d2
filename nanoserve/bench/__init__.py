"""How fast is it, beside its peers, and beside itself with another option?

    python bench.py --quick                                       everything small, in a minute
    python bench.py throughput --dummy qwen3-29m                  many requests at once
    python bench.py latency --peer transformers                   one request at a time
    python bench.py gpu                                           what a first GPU should measure
    python bench.py serve --url http://127.0.0.1:8000/v1          any server of OpenAI's API

What this engine promises of itself, each beside itself, in turns (RESULTS.md has the figures):

    python bench.py repeat --dummy qwen3-29m                      n-gram drafts, 2 x
    python bench.py structured --dummy qwen3-29m                  grammars, at least 0.95 x
    python bench.py latency --dummy qwen3-29m --variant "int8:quantization=int8"          1.8 x
    python bench.py throughput --dummy qwen3-29m --peer http      streams over HTTP, 0.9 x
    python bench.py chats --dummy qwen3-29m                       KV offload, 5 x
    python bench.py pipeline --dummy qwen3-29m                    two batches in flight
    python bench.py throughput --variant "no chunks:enable_chunked_prefill=False"     your own

    workload.py    which model, which requests?
    engines.py     one interface for nanoserve, vLLM, transformers and others
    suites.py      what is measured, and in which turns?
    client.py      the same requests, sent to a server
    kernels.py     attention alone
    cost_model.py  how long should a step take?
    scale.py       64 replicas and a router, in virtual time: scale.md
    cli.py         the command line, the table, the JSON file

Engines take turns, round by round: what else the machine does slows all of them alike. Ratios are
taken within a round, and their median is shown.

Left out: a search for the best options, charts, energy.

vLLM: benchmarks/ (V0); vllm/benchmarks/: throughput.py, latency.py, serve.py (0.32). Those measure
one engine at a time.
"""
