"""What runs in the replica: text in and out, the client of the core, and the reading of a reply's channels."""
