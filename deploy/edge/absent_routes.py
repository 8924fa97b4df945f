"""Paths that other servers have: a 404 says in a sentence why there is none here."""

_NO_STATE = "Nothing is stored here: send the whole conversation."
_NO_BATCHES = "There are no batches here: send each request by itself."
_TEXT_ONLY = "This server gives text only."
_GENERATES = "This server generates text: Gemma 4 makes no embeddings and no scores."
_NO_VERSION = "Paths begin with /v1: the base URL may lack it."
_SENTENCES = {
    **dict.fromkeys(("/v1/embeddings", "/v1/score", "/v1/rerank", "/v2/rerank", "/v1/classify", "/v1/pooling",
                     "/embeddings", "/encode", "/score", "/rerank", "/classify", "/pooling"), _GENERATES),
    "/v1/responses/input_tokens": "Tokens are counted by /tokenize and /v1/messages/count_tokens.",
    **dict.fromkeys(("/v1/audio", "/v1/images", "/v1/realtime", "/v1/videos"), _TEXT_ONLY),
    **dict.fromkeys(("/v1/responses", "/v1/conversations", "/v1/threads", "/v1/assistants"), _NO_STATE),
    **dict.fromkeys(("/v1/batches", "/v1/files", "/v1/messages/batches"), _NO_BATCHES),
    **dict.fromkeys(("/chat", "/completions", "/responses", "/models", "/messages"), _NO_VERSION),
    "/v1/v1": "Paths begin with /v1: the base URL of Anthropic's clients goes without it.",
    "/metrics": "Metrics have a port of their own: docs/monitoring.md.",
}


def why_absent(path: str) -> str | None:
    """The sentence for a path that has no route; None: nobody would expect it here."""
    return next((text for prefix, text in _SENTENCES.items() if f"{path}/".startswith(f"{prefix}/")), None)
