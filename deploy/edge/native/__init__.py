"""What vLLM and SGLang speak beside OpenAI's API: token ids of a text and back, and SGLang's /generate."""
