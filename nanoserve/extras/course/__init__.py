"""How does an engine become a course?

    nanoserve course make OUT --labs 1,2,3     a student's tree: the engine with holes
    nanoserve course check                     is this machine ready?
    nanoserve course list                      the labs, their tasks and points
    nanoserve course grade SUBMISSION          points, and a sentence for what is wrong
    nanoserve course export gradescope FILE    a zip that grades on a service
    nanoserve course export nbgrader FILE      the quiz as a notebook; also for otter
    nanoserve course quiz ID                   the sheet of a student: ten numbers from a trace
    nanoserve course contest A B C             a leaderboard of schedulers

    spec.py      a lab, its tasks, and the behaviours that earn their points
    labs/        one module for each lab; some have no holes but an Exercise: a file of one's own
    holes.py     cut a function out of a file, and take one out of a submission
    make.py      the student's tree, without any solution in it
    later.py     in that tree: the holes of later labs block no check
    screen.py    which code of a student is run at all
    grader.py    the parent: one function at a time, in the right engine
    graft.py     a student's function in the place of the engine's
    child.py     the process that holds a student's function, within limits
    whole.py     what a student's whole engine is asked, and what is right
    mutants.py   mistakes that the checks must find; also the engines of the bug hunt
    exports.py   a zip for a grading service, a notebook for two others
    ready.py     `check`;  cli.py  the commands

The engine knows none of this.

vLLM: none.
"""
