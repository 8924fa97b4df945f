"""The commands of `quartet`. Each module has `register` and `run`; slow modules are imported only
to run."""
