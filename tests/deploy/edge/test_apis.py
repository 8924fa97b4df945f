"""What is known of a path before its request is read."""

import pytest

from deploy.edge.apis import ENDPOINTS, GENERATION_APIS, UNKNOWN, endpoint_of, error_shape_of

pytestmark = pytest.mark.pure

ANTHROPIC = ("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches", "/anthropic/v1/messages")


def test_the_shape_of_an_error_by_its_path() -> None:
    """Anthropic's at its API, below it and behind a prefix; OpenAI's of every other path, known or not."""
    assert {error_shape_of({"path": path}).name for path in ANTHROPIC} == {"AnthropicError"}
    others = (*ENDPOINTS.keys() - set(ANTHROPIC), "", "/", "/v1/messagesx", "/v1/message", "/v1/models/v1/messagesx")
    assert {error_shape_of({"path": path}).name for path in others} == {"Error"}
    assert all(error_shape_of({"path": path}) is endpoint.error for path, endpoint in ENDPOINTS.items())


def test_every_endpoint_is_known_by_its_path() -> None:
    """No two have one path, a model's path is that of any model, and only what generates is traced."""
    assert all(endpoint_of({"path": path}) is endpoint for path, endpoint in ENDPOINTS.items())
    assert endpoint_of({"path": "/v1/models/a/b"}) is ENDPOINTS["/v1/models/{model}"]
    assert endpoint_of({"path": "/v1/chat/completions/"}) is UNKNOWN
    traced = {path for path, endpoint in ENDPOINTS.items() if endpoint.operation is not None}
    assert traced == {api.path for api in GENERATION_APIS}


def test_a_models_prefix_changes_no_right() -> None:
    """The guard around Serve sees it in the path. Planted: another prefix, and a model whose name has a slash, are unknown."""
    for path in ("/v1/chat/completions", "/v1/models", "/v1/models/small", "/health/ready"):
        assert endpoint_of({"path": f"/models/small{path}"}) is endpoint_of({"path": path}) is not UNKNOWN
    assert endpoint_of({"path": "/other/small/v1/models"}) is UNKNOWN
    assert endpoint_of({"path": "/models/a/b/v1/models"}) is UNKNOWN
