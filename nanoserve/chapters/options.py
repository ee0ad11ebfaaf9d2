class Options:
    pass
