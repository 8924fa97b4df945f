"""OpenAI's API: requests, answers and errors."""
