"""lm-evaluation-harness: loglikelihood by echoed prompts, and generate_until, through its own model classes."""

import math
import os
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.api_models import JsonChatStr
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

from tests.clients.cases import SUM, SUMMED, Server, case, expect, main

TOKENIZER = Path(__file__).resolve().parents[2] / "deploy" / "models" / "nano" / "trained" / "31b"
CONTEXT = "The old cat saw the"


def completions(server: Server, **more: Any) -> LocalCompletionsAPI:
    os.environ.setdefault("OPENAI_API_KEY", server.key)
    tokens = {"tokenizer_backend": "huggingface", "tokenizer": str(TOKENIZER), "add_bos_token": True, "max_length": 1024}
    options = {**tokens, "batch_size": 2, "max_retries": 1}
    return LocalCompletionsAPI(model=server.model, base_url=f"{server.base}/completions", **(options | more))


def generated(model: Any, context: Any, **more: Any) -> str:
    options = {"until": ["<nothing>"], "max_gen_toks": 4} | more
    (said,) = model.generate_until([Instance("generate_until", {}, (context, options), 0)], disable_tqdm=True)
    return str(said)


def weighed(model: Any, *continuations: str) -> list[tuple[float, bool]]:
    asked = [Instance("loglikelihood", {}, (CONTEXT, each), place) for place, each in enumerate(continuations)]
    return list(model.loglikelihood(asked, disable_tqdm=True))


@case("local-completions: generate_until")
def generate(server: Server) -> None:
    said = generated(completions(server), CONTEXT)
    assert said
    expect(generated(completions(server, tokenized_requests=False), CONTEXT), said)


@case("local-completions: loglikelihood")
def loglikelihood(server: Server) -> None:
    model = completions(server)
    likeliest = generated(model, CONTEXT)
    (first, first_greedy), (second, second_greedy) = weighed(model, likeliest, " ZQ9 ZQ9")
    expect((first_greedy, second_greedy), (True, False))
    assert math.isfinite(first), first
    assert second < first < 0, (second, first)


@case("local-chat-completions: generate_until")
def chat(server: Server) -> None:
    model = LocalChatCompletion(model=server.model, base_url=f"{server.base}/chat/completions", max_retries=1, max_length=1024)
    expect(generated(model, JsonChatStr(f'[{{"role": "user", "content": "{SUM}"}}]'), max_gen_toks=30), SUMMED)


if __name__ == "__main__":
    main()
