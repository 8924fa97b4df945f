"""APIs of vLLM and SGLang: token ids of a text and back, and SGLang's /generate."""
