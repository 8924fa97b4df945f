"""The commands of `quartet`, one a module: `register` adds its options, `run` does it.

What takes a while to import, a command imports when it runs: `--help` stays quick.
"""
