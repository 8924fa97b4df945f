"""The commands of `quartet`, a module each with `register` and `run`, which import slow modules
only when they run."""
