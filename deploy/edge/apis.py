"""Every path that is served."""

import re
from collections.abc import Mapping

from starlette.types import Scope

from deploy.edge.adapters.adapter_requests import LOAD_ADAPTER, UNLOAD_ADAPTER
from deploy.edge.anthropic.messages_api import COUNT_TOKENS, MESSAGES_API
from deploy.edge.edge_settings import MODELS
from deploy.edge.http.endpoint import HttpEndpoint, Right
from deploy.edge.http.error_response import OPENAI_ERROR, ErrorShape
from deploy.edge.native.generate_api import GENERATE
from deploy.edge.native.tokenization import DETOKENIZE, TOKENIZE
from deploy.edge.openai.openai_apis import CHAT, COMPLETIONS, RESPONSES
from deploy.edge.openai.transcriptions import TRANSCRIPTIONS

GENERATION_APIS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES_API, GENERATE, TRANSCRIPTIONS)
TOKEN_APIS = (COUNT_TOKENS, TOKENIZE, DETOKENIZE)

PROBES = ("/health", "/health/live", "/health/ready")
METRICS_PATH = "/metrics"
UNKNOWN = HttpEndpoint(path="unknown", right="all")
_MODEL = "/v1/models/{model}"
_PREFIX = re.compile(rf"^{MODELS}[^/]+(?=/)")
_OTHERS: Mapping[Right, tuple[str, ...]] = {
    "open": (*PROBES, METRICS_PATH),
    "models": ("/v1/models", _MODEL),
    "docs": ("/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"),
}
_OTHER = [HttpEndpoint(path=path, right=right) for right, paths in _OTHERS.items() for path in paths]
_ALL = (*GENERATION_APIS, *TOKEN_APIS, *_OTHER, LOAD_ADAPTER, UNLOAD_ADAPTER)
ENDPOINTS: dict[str, HttpEndpoint] = {endpoint.path: endpoint for endpoint in _ALL}


def endpoint_of(scope: Scope) -> HttpEndpoint:
    """UNKNOWN for other paths. uvicorn prepends http_options.root_path."""
    path: str = _PREFIX.sub("", scope["path"].removeprefix(scope.get("root_path", "")))
    return ENDPOINTS.get(_MODEL if path.startswith("/v1/models/") else path, UNKNOWN)


def error_shape_of(scope: Scope) -> ErrorShape:
    return next((api.error for api in GENERATION_APIS if f"{api.path}/" in f"{scope['path']}/"), OPENAI_ERROR)
