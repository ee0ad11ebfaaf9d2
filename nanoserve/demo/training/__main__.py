"""python -m nanoserve.demo.training: the commands. Each says first how long it takes."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from nanoserve.demo import MODEL_DIR

COMMANDS = {
    "model": "train the demo model from nothing",
    "drafter": "train a drafter for it: a draft model, Medusa heads or an EAGLE layer",
    "lora": "train a LoRA adapter for it that talks like a pirate (needs peft)",
    "evaluate": "score it on questions that the training never shows",
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m nanoserve.demo.training")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, about in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about)
        command.add_argument("--quick", action="store_true", help="about a minute, to see it work")
        if name != "model":
            command.add_argument("--model", type=Path, default=MODEL_DIR, help="a folder")
        if name == "drafter":
            command.add_argument("method", choices=["draft_model", "medusa", "eagle"])
        if name == "evaluate":
            command.add_argument("--json", type=Path, help="write the scores here, too")
            about = "only count the sampled stories with sensible names"
            command.add_argument("--stories", action="store_true", help=about)
        else:
            command.add_argument("--output", type=Path, default=Path(f"demo-{name}"))
            command.add_argument("--steps", type=int)
            command.add_argument("--seed", type=int, default=0)
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    if args.command == "evaluate":
        return run_evaluation(args)
    from nanoserve.demo.training import drafters, lora, train

    plan = {"model": train.Plan(), "drafter": drafters.PLAN, "lora": lora.PLAN}[args.command]
    plan = plan.quick() if args.quick else plan
    plan = replace(plan, seed=args.seed, steps=args.steps or plan.steps)
    if args.command == "model":
        report = train.train_model(args.output, plan)
    elif args.command == "drafter":
        count = 128 if args.quick else 2048
        report = drafters.train_drafter(args.method, args.output, args.model, plan, count)
        print(f"{report['accepted_of_3']} of 3 guesses are accepted")
    else:
        try:
            report = lora.train_lora(args.output, args.model, plan)
        except ModuleNotFoundError as error:
            parser.error(f'{error}. pip install "nanoserve[training]" brings it.')
    print(f"wrote {args.output}: {report['minutes']} minutes, loss {report['loss']}")


def run_evaluation(args: argparse.Namespace) -> None:
    from nanoserve import LLM, SamplingParams
    from nanoserve.demo.training import evaluate

    size = 8 if args.quick else 200
    if args.stories:
        llm, count = LLM(args.model, dtype="float32"), 8 if args.quick else 60
        for sampling in (llm.get_default_sampling_params(), SamplingParams()):
            stories = evaluate.sample_stories(llm, count, sampling)
            bad = [story for story in stories if not evaluate.has_sensible_names(story)]
            print(*bad, sep="\n")
            print(f"{len(bad)} of {count} have other names at temperature {sampling.temperature}")
        return
    print(f"about {'a minute' if args.quick else 'five minutes'} on two CPU cores")
    scores, bad = evaluate.evaluate(LLM(args.model, dtype="float32"), size)
    print("Bad answers to first guesses:", *bad, sep="\n  ", file=sys.stderr)
    print(evaluate.as_table(scores))
    if args.json:
        args.json.write_text(json.dumps([s._asdict() for s in scores], indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
