"""APIs of vLLM and SGLang: tokenization, and SGLang's /generate."""
