"""The commands of `quartet`, a module each with `register` and `run`.

Commands import slow modules only when they run.
"""
