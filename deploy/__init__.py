"""What a user touches: the Serve app and its launcher; under them the HTTP edge, the models and the load generator; the CLI."""
