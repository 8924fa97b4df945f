"""The commands of `quartet`, one a module: `register` adds its options, `run` does it.

What a command needs it imports when it runs: `--help` stays quick.
"""
