"""How does an engine become a course?

    python -m nanoserve.teaching.course start mylabs      write the labs of a student
    python -m nanoserve.teaching.course grade mylabs      points, and a sentence for what is wrong

A lab is a file with a class, a subclass of a class of the engine, whose methods raise
NotImplementedError. A student writes the methods; the installed engine runs them:

    lab1_pages.py      class MyPool(BlockPool): def allocate(self): ...
    grade              MyPool.allocate runs in the engine's pool, its other methods are the engine's

So the first task is green after one function, a mistake costs once, and the messages at home are
those of the lecturer. `grade` is pytest: what it does not know it gives to pytest (-k 1_2, --pdb),
and a plain `pytest` in the folder does the same.

    labs/        what a student gets        handouts/    a page for each lab, English and Chinese
    graders/     the tests, with points     toy.py       the engine without a model
    plugin.py    pytest as a grader         INSTRUCTORS.md

The solutions are not installed: tests/course_solutions/ of the repository has them.

Left out: a fence against cheating (the engine is public; ask questions), a file format of its own.
"""
