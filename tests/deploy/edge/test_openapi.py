"""The API's document by two judges of others: openapi-spec-validator, and requests that schemathesis makes up from it."""

from collections import Counter
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from openapi_spec_validator import OpenAPIV31SpecValidator
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance

from deploy.edge.http import error_response
from deploy.edge.jobs.job_builder import JobBuilder
from engine.errors import ModelNotFound
from tests.support.edge.http_edge import Edge

pytestmark = pytest.mark.pure

CHAT, TEXT, MODEL = "/v1/chat/completions", "/v1/completions", "/v1/models/{model}"
POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
RESPONSES, GENERATE, TOKENIZE, DETOKENIZE = "/v1/responses", "/generate", "/tokenize", "/detokenize"
POSTS = (CHAT, TEXT, RESPONSES, MESSAGES, COUNT, GENERATE, TOKENIZE, DETOKENIZE)
GETS = ("/v1/models", MODEL, "/health", "/health/live", "/health/ready")
CASES = [(path, "POST", mode) for path in POSTS for mode in (POSITIVE, NEGATIVE)]
CASES += [(path, "GET", POSITIVE) for path in GETS]
EXAMPLES = {CHAT: 12, TEXT: 12}  # of the APIs that say in other words what a chat says, fewer
FEW = 4
# What makes a positive body one that can be served, beside the model: of these keys no schema says what they need or exclude.
SERVED: dict[str, dict[str, Any]] = {
    CHAT: {"stream_options": None, "logprobs": True},
    TEXT: {"stream_options": None, "logprobs": None},
    RESPONSES: {"input": "x", "tool_choice": None, "text": None, "include": None, "reasoning": None},
    GENERATE: {"input_ids": None, "sampling_params": {}, "text": "x"},
    TOKENIZE: {"prompt": None, "messages": [{"role": "user", "content": "x"}], "tools": None, "chat_template_kwargs": None},
    DETOKENIZE: {"tokens": [5]},
    MESSAGES: {"output_config": None, "output_format": None},
    COUNT: {"output_config": None, "output_format": None},
}
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def document(shared_edge: Edge) -> dict[str, Any]:
    return shared_edge.get("/openapi.json").json()


def test_the_document_is_valid_openapi(document: dict[str, Any]) -> None:
    """No complaint of a validator that is not ours; each planted mistake gives one."""
    assert [str(error) for error in OpenAPIV31SpecValidator(document).iter_errors()] == []
    post, get = document["paths"][CHAT]["post"], document["paths"][MODEL]["get"]
    faults = [
        {"info": {"title": "Quartet"}},
        {"paths": document["paths"] | {CHAT: {"post": post | {"responses": {"fine": {"description": "no status"}}}}}},
        {"paths": document["paths"] | {MODEL: {"get": get | {"parameters": []}}}},
        {"paths": document["paths"] | {MODEL: {"get": get | {"operationId": post["operationId"]}}}},
    ]
    for fault in faults:
        assert list(OpenAPIV31SpecValidator(document | fault).iter_errors()), fault


def requests(edge: Edge, document: dict[str, Any], path: str, method: str, mode: GenerationMode) -> Counter[int]:
    """Statuses of the replies to requests as the document has them, or as it forbids them; a reply that breaks a check raises.

    A positive body names the model that is served, and keeps what no schema says. Otherwise nearly all would be refused for that.
    """
    codes = Counter()

    @given(case=schemathesis.openapi.from_dict(document)[path][method].as_strategy(generation_mode=mode))
    @settings(max_examples=EXAMPLES.get(path, FEW), derandomize=True, database=None, deadline=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    def run(case: Case) -> None:
        if mode is POSITIVE and isinstance(case.body, dict):
            case.body |= {"model": edge.name} | SERVED[path]
        reply = case.call(base_url=edge.url, timeout=20)
        case.validate_response(reply, checks=CHECKS)
        codes[reply.status_code] += 1

    run()
    return codes


@pytest.mark.parametrize(("path", "method", "mode"), CASES)
def test_no_request_is_answered_by_a_5xx(
    edge: Edge, document: dict[str, Any], path: str, method: str, mode: GenerationMode
) -> None:
    """Good requests and bad ones: a status, a type and a shape that the document names, and no 5xx."""
    codes = requests(edge, document, path, method, mode)
    print(f"\n{method} {path}, {mode.value}: {dict(codes)}")
    assert codes.total() == EXAMPLES.get(path, FEW) or method == "GET"
    if mode is POSITIVE:
        assert codes[200] > 0 or path == MODEL
    else:
        assert codes[200] < codes.total() / 2


@pytest.mark.parametrize("fault", ["bug", "shape"])
def test_a_5xx_and_a_wrong_shape_are_noticed(
    edge: Edge, document: dict[str, Any], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: a check of ours raises what it should not; an error has no code."""

    def broken(self: JobBuilder, model: str) -> None:
        raise ZeroDivisionError if fault == "bug" else ModelNotFound("nothing here")

    if fault == "shape":
        monkeypatch.setattr(error_response.ErrorShape, "body", lambda shape, error: {"error": {"message": str(error)}})
    monkeypatch.setattr(JobBuilder, "check_model", broken)
    with pytest.raises((FailureGroup, Failure)):
        requests(edge, document, TEXT, "POST", POSITIVE)
