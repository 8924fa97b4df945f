"""Side processes and threads."""
