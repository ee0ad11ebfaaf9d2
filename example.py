"""The first thing to run. `python example.py` loads the embedded demo model. The model completes
two stories, answers four questions, and shows the steps in which the engine computes two requests.

`python example.py --model Qwen/Qwen3-0.6B` does the same with a model of your choice (an id on the
Hugging Face hub, or a folder). Every engine option is a flag, such as `--max-num-seqs 8`; `--help`
lists the flags.

On two GPUs, or on two processes of a CPU: `python example.py --tensor-parallel-size 2`; or, on one
machine or several: `torchrun --nproc-per-node 2 example.py --tensor-parallel-size 2`.
"""

import argparse
import os
import sys

STORIES = ["Once upon a time", "One day a clever fox named Ben"]
QUESTIONS = [
    "What is 17 + 25?",
    "What is the capital of France?",
    "What colour is the sky?",
    "Write JSON for Mia, age 7, with a cat.",
]


def main() -> None:
    from nanoserve import LLM, SamplingParams
    from nanoserve.entrypoints.flags import add_engine_flags, read_engine_flags

    parser = argparse.ArgumentParser(description="Complete two stories, answer a few questions.")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: always the likeliest")
    parser.add_argument("--max-tokens", type=int, default=200, help="per answer")
    add_engine_flags(parser)
    args = parser.parse_args()

    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    # Under torchrun, the processes of ranks above 0 work for rank 0 in this line, and exit there.
    with LLM(**read_engine_flags(args)) as llm:
        for output in llm.generate(STORIES, params):
            print(f"{output.prompt}{bold}{output.outputs[0].text}{plain}\n", flush=True)
        conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
        for question, output in zip(QUESTIONS, llm.chat(conversations, params), strict=True):
            print(f"Q: {question}\nA: {bold}{output.outputs[0].text}{plain}\n", flush=True)

        # What generate does: add requests, then run steps until nothing is unfinished.
        for name, story in zip("ab", STORIES, strict=True):
            llm.add_request(name, story, SamplingParams(temperature=0, max_tokens=6))
        pool, number = llm.llm_engine.block_manager.pool, 0
        while llm.has_unfinished_requests():
            number += 1
            texts = [f"{each.request_id}: {each.outputs[0].text!r}" for each in llm.step()]
            num_used = pool.num_blocks - len(pool.free_queue)
            print(f"step {number}: {num_used} KV blocks in use;  {'   '.join(texts)}", flush=True)


def run() -> None:
    """Call main(). What a user can cause ends in a sentence instead of a traceback."""
    if sys.version_info < (3, 10):  # noqa: UP036 (this file can be read by an older Python)
        sys.exit(f"example.py needs Python 3.10 or newer; this is {sys.version.split()[0]}.")
    try:
        main()
    except KeyboardInterrupt:
        print("\nexample.py: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # python example.py | head -1: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except ImportError as error:
        folder = os.path.dirname(os.path.abspath(__file__))
        sys.exit(f"example.py: {error}. Install what is missing: pip install -e {folder}")
    except (ValueError, OSError, RuntimeError) as error:
        if os.environ.get("NANOSERVE_LOGGING_LEVEL", "").upper() == "DEBUG":
            raise  # with its traceback
        sys.exit(f"example.py: {error}")


if __name__ == "__main__":
    run()
