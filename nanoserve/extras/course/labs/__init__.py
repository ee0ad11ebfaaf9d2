"""The labs: one module each, pages_1.py to ..., with its tasks and their behaviours."""
