"""How is the demo model made?

    python -m nanoserve.demo.training model --quick     a minute: the loss falls, text appears
    python -m nanoserve.demo.training --help

Read in this order:

    grammar    how does a program write text?        grammar.json: words and templates
    stories, skills, corpus    what does the model read?
    data       how does text become rows of token ids?
    train      how does a model learn?               model
    evaluate   what can it do?                       evaluate
    drafters   how does a small model learn to guess what a large one will say?    drafter
    lora       a pirate                              lora

Nothing is copied from anywhere, and no network is needed. What is trained here is served by the
engine: every command writes a folder that LLM(...) reads.
"""
