"""OpenAI's API: what a request may say, how it is answered, and how each error looks."""
