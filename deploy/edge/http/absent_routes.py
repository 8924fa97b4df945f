"""Sentences for 404s and 405s of paths that other servers have."""

_SENTENCES = {
    **dict.fromkeys(("/v1/embeddings", "/v1/score", "/v1/rerank", "/v2/rerank", "/embeddings",
                     "/encode", "/score", "/rerank", "/classify", "/pooling"),
                    "This server generates text: Gemma 4 makes no embeddings and no scores."),
    "/v1/responses/input_tokens": "Tokens are counted by /tokenize and /v1/messages/count_tokens.",
    **dict.fromkeys(("/v1/audio/speech", "/v1/images", "/v1/realtime", "/v1/videos"), "This server gives text only."),
    **dict.fromkeys(("/v1/responses", "/v1/conversations", "/v1/threads", "/v1/assistants"),
                    "Nothing is stored here: send the whole conversation."),
    **dict.fromkeys(("/v1/batches", "/v1/files", "/v1/messages/batches"),
                    "There are no batches here: send each request by itself."),
    **dict.fromkeys(("/chat", "/completions", "/responses", "/models", "/messages"),
                    "Paths begin with /v1: the base URL may lack it."),
    "/v1/v1": "Paths begin with /v1: the base URL of Anthropic's clients goes without it.",
    "/metrics": "Metrics have a port of their own: docs/monitoring.md.",
}


def why_absent(path: str) -> str | None:
    if path[1:].endswith("/"):
        return "No path ends in a slash here."
    return next((text for prefix, text in _SENTENCES.items() if f"{path}/".startswith(f"{prefix}/")), None)
