"""What a user touches: the Serve app, the OpenAI API, limits, configs, the CLI and the embedded nano model."""
