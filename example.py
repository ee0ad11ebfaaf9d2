"""The first thing to run: `python example.py` loads the embedded demo model and lets it speak.

`python example.py --model Qwen/Qwen3-0.6B` does the same with a model of your choice (an id on the
Hugging Face hub, or a folder); `--help` lists the options.

On two GPUs, or on two processes of a CPU: `python example.py --tensor-parallel-size 2`; or, on one
machine or several: `torchrun --nproc-per-node 2 example.py --tensor-parallel-size 2`.
"""

import argparse
import sys

from nanoserve import LLM, SamplingParams

STORIES = ["Once upon a time", "One day a clever fox named Ben"]
QUESTIONS = [
    "What is 17 + 25?",
    "What is the capital of France?",
    "What colour is the sky?",
    "Write JSON for Mia, age 7, with a cat.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description="Complete two stories, answer a few questions.")
    parser.add_argument("--model", help="folder or Hugging Face id (default: the demo model)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: always the likeliest")
    parser.add_argument("--max-tokens", type=int, default=200, help="per answer")
    parser.add_argument(
        "--tensor-parallel-size", type=int, default=1, help="ranks that share the model"
    )
    args = parser.parse_args()

    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    # Under torchrun, ranks above 0 do not come out of this line: they serve rank 0, then exit.
    with LLM(args.model, tensor_parallel_size=args.tensor_parallel_size) as llm:
        for output in llm.generate(STORIES, params):
            print(f"\n{output.prompt}{bold}{output.outputs[0].text}{plain}")
        conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
        for question, output in zip(QUESTIONS, llm.chat(conversations, params), strict=True):
            print(f"\nQ: {question}\nA: {bold}{output.outputs[0].text}{plain}")


if __name__ == "__main__":
    main()
