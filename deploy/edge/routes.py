"""The routes. Our own models validate raw bodies, so that every error has its API's shape."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from msgspec import Raw, Struct
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp

from deploy.edge.adapters.adapter_requests import LOAD_ADAPTER, LOAD_READER, UNLOAD_ADAPTER, UNLOAD_READER
from deploy.edge.admission_control import AdmissionTicket
from deploy.edge.answers.response_format import JSON, ResponseFormat
from deploy.edge.apis import GENERATION_APIS, METRICS_PATH, TOKEN_APIS, error_shape_of
from deploy.edge.guards.access_log import AccessLog
from deploy.edge.guards.key_gate import check_key
from deploy.edge.guards.limits import Limits, with_cors
from deploy.edge.http.absent_routes import why_absent
from deploy.edge.http.error_response import OPENAI_ERROR, ErrorShape, JsonResponse, plain_error, refusal
from deploy.edge.http.http_errors import NO_RETRY, DeadlineExceeded, ForeignHost, WrongMediaType
from deploy.edge.http.scope import CLAIM, client_name, is_from_loopback
from deploy.edge.observe.record import record_of
from deploy.edge.requests.ask import Ask, ChatPrompt
from deploy.edge.serving.api import GenerationApi, TokenApi
from deploy.edge.serving.http_answer import CompletionResponse
from deploy.edge.serving.service import Service
from engine.errors import ModelNotFound, QuartetError
from engine.protocol import JsonObject

Responses = dict[int | str, JsonObject]

_KEY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_GENERATED: Responses = {
    200: {"description": "Successful Response", "content": {"application/json": {}, "text/event-stream": {}}},
}


def _schema_of(value: object) -> JsonObject:
    if not isinstance(value, dict):
        return {"type": ["string", "null"]}
    return {"type": "object", "required": [*value], "properties": {name: _schema_of(inner) for name, inner in value.items()}}


_ERROR_SCHEMAS = {api.error.name: _schema_of(api.error.write(400, "", None, None)) for api in GENERATION_APIS}


def _errors(shape: ErrorShape) -> Responses:
    schema = {"$ref": f"#/components/schemas/{shape.name}"}
    texts = {"4XX": "The request cannot be served as it is.", "5XX": "The server failed, or is not ready."}
    return {status: {"description": text, "content": {"application/json": {"schema": schema}}} for status, text in texts.items()}


def create_app(service: Service) -> ASGIApp:
    """Ray Serve adds `x-request-id` to replies."""
    about = "OpenAI's and Anthropic's APIs of a Gemma 4 deployment."
    app = FastAPI(title="Quartet", description=about, redirect_slashes=False, responses=_errors(OPENAI_ERROR))
    app.add_exception_handler(QuartetError, _refusal)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _bug)
    for api in GENERATION_APIS:
        _add_generation(app, service, api)
    for tokens in TOKEN_APIS:
        _add_tokens(app, service, tokens)
    _add_models(app, service)
    _add_adapters(app, service)
    _add_health(app, service)
    if service.metrics is not None:
        _add_metrics(app, service.metrics)
    generate = app.openapi

    def openapi() -> JsonObject:
        document = generate()
        document.setdefault("components", {}).setdefault("schemas", {}).update(_documentation()[1] | _ERROR_SCHEMAS)
        if service.keys is not None:
            document["components"]["securitySchemes"] = _KEY_SCHEMES
            document["security"] = [{name: []} for name in _KEY_SCHEMES]
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # the way that FastAPI documents
    limits = service.settings.limits
    check = partial(check_key, service.keys, proxies=limits.proxies) if service.keys is not None else None
    # limits here, too: Ray may have been started without our settings
    return AccessLog(with_cors(Limits(app, limits, check), limits), service)


def _add_generation(app: FastAPI, service: Service, api: GenerationApi) -> None:
    @app.post(api.path, responses=_GENERATED | _errors(api.error), openapi_extra=_body(api.reader.kind, api.media_type))
    async def generate(request: Request) -> Response:
        async with _admitted(service, request, api.media_type) as ticket:
            ask, form = await _parsed(service, request, api)
            service.check_holder(record_of(request.scope), ask.model)
            job = await service.jobs.job(ask, ticket.client)
            request.scope[CLAIM].release()  # nothing of its body is left
            key = record_of(request.scope).key
            header = request.headers.get("authorization") or request.headers.get("x-api-key", "")
            tenant = f"header {header}" if key is None else f"key {key}"  # no holder is taken for a header
            job = replace(job, salt=service.salt(ask, tenant))
            return CompletionResponse(service, job, form, stream=ask.stream)


async def _parsed(service: Service, request: Request, api: GenerationApi) -> tuple[Ask, ResponseFormat]:
    """A function, so that nothing holds the body while the job is made."""

    def read(body: bytes) -> tuple[Ask, ResponseFormat]:
        said = api.reader.read(body)
        ask = said.ask()
        return ask, api.format(service.model_of(ask), said)

    body = await _body_of(request)
    if api.media_type == JSON:
        ask, form = await service.pool.read(read, body)
    else:
        ask, form = await service.pool.run(lambda: read(body))
    request.scope[CLAIM].parsed(len(body), has_media=isinstance(ask.prompt, ChatPrompt) and bool(ask.prompt.media))
    return ask, form


def _add_tokens(app: FastAPI, service: Service, api: TokenApi) -> None:
    @app.post(api.path, responses=_errors(api.error), openapi_extra=_body(api.reader.kind))
    async def tokens(request: Request) -> Response:
        async with _admitted(service, request) as ticket:
            parsed = await _parsed_tokens(service, request, api)
            service.jobs.check_model(parsed.model)
            service.check_holder(record_of(request.scope), parsed.model)
            answer = await api.answer(service, parsed, ticket.client)
            return JsonResponse(Raw(await service.pool.run(lambda: msgspec.json.encode(answer))))


async def _parsed_tokens(service: Service, request: Request, api: TokenApi) -> Any:
    body = await _body_of(request)
    parsed = await service.pool.read(api.reader.read, body)
    request.scope[CLAIM].parsed(len(body), has_media=True)  # whether it has some shows later
    return parsed


@asynccontextmanager
async def _admitted(service: Service, request: Request, media_type: str = JSON) -> AsyncIterator[AdmissionTicket]:
    """A ticket, which the access log returns, and time until the deadline."""
    service.engine.health()
    _check_media_type(request, media_type, service.settings.limits.cors_origins)
    record = record_of(request.scope)
    record.ticket = service.admission.enter(client_name(request.scope, record.key, service.settings.limits.proxies))
    try:
        async with asyncio.timeout_at(record.deadline):
            yield record.ticket
    except TimeoutError as error:
        raise DeadlineExceeded(f"The request took longer than {service.settings.limits.request_timeout_s:g} s.") from error


async def _body_of(request: Request) -> bytes:
    """Limits gives it in one message. `request.body()` would keep it until the answer ends."""
    return (await request.receive())["body"]


def _check_media_type(request: Request, media_type: str, origins: Sequence[str]) -> None:
    """Only JSON triggers a browser's permission check, so other types must come from `origins`."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != media_type:
        raise WrongMediaType(f"the body must be {media_type}: so must the header Content-Type")
    origin = request.headers.get("origin", "")
    own = request.headers.get("host")
    if media_type != JSON and origin and origin.partition("://")[2] != own and not {"*", origin} & set(origins):
        raise ForeignHost("limits.cors_origins does not name the web page's Origin", code="origin_not_allowed")


def _add_models(app: FastAPI, service: Service) -> None:
    settings = service.settings
    since = int(time.time())
    own = [(name, settings.max_len, {"weights": settings.weight_format}) for name in settings.names]
    others: list[tuple[str, int, JsonObject]] = [(name, max_len, {}) for name, max_len in settings.others]
    cards: dict[str, JsonObject] = {
        name: {"id": name, "object": "model", "created": since, "owned_by": "quartet", "max_model_len": max_len, **more}
        for name, max_len, more in (*own, *others)
    }

    def listed() -> dict[str, JsonObject]:
        adapted = {name: {**cards[settings.name], "id": name, "parent": settings.name} for name in service.adapters}
        return cards | adapted

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        record = record_of(request.scope)
        return JsonResponse({"object": "list", "data": [card for name, card in listed().items() if record.may_ask(name)]})

    @app.get("/v1/models/{model:path}")
    async def model(request: Request, model: str) -> Response:
        if not model:
            raise HTTPException(404)
        found = listed().get(model)
        if found is None or not record_of(request.scope).may_ask(model):
            raise ModelNotFound(model)
        return JsonResponse(found)


def _add_adapters(app: FastAPI, service: Service) -> None:
    @app.post(LOAD_ADAPTER.path, response_class=PlainTextResponse, openapi_extra=_body(LOAD_READER.kind))
    async def load(request: Request) -> Response:
        async with _admitted(service, request):
            asked = LOAD_READER.read(await _body_of(request))
            await service.adapter_sync.load(asked.lora_name, asked.lora_path, in_place=asked.load_inplace)
            return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' added successfully.")

    @app.post(UNLOAD_ADAPTER.path, response_class=PlainTextResponse, openapi_extra=_body(UNLOAD_READER.kind))
    async def unload(request: Request) -> Response:
        async with _admitted(service, request):
            asked = UNLOAD_READER.read(await _body_of(request))
            await service.adapter_sync.unload(asked.lora_name)
            return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")


def _add_metrics(app: FastAPI, page: tuple[str, Callable[[], bytes]]) -> None:
    kind, body = page

    @app.get(METRICS_PATH, include_in_schema=False)
    async def metrics() -> Response:
        return Response(await asyncio.to_thread(body), media_type=kind)


def _add_health(app: FastAPI, service: Service) -> None:
    @app.head("/health/live", include_in_schema=False)
    @app.get("/health/live")
    async def live() -> Response:
        if service.engine.dead is None:
            return JsonResponse({"status": "live"})
        return JsonResponse({"status": "dead"}, 503)

    @app.head("/health", include_in_schema=False)
    @app.head("/health/ready", include_in_schema=False)
    @app.get("/health")
    @app.get("/health/ready")
    async def ready(request: Request) -> Response:
        if service.engine.dead is not None:
            return JsonResponse({"status": "dead"}, 503)
        if service.draining:
            return JsonResponse({"status": "draining"}, 503)
        # Addresses are told to this machine and, where there are API keys, to those who have one.
        is_trusted = is_from_loopback(request.scope) and (service.keys is None or record_of(request.scope).key is not None)
        return JsonResponse({"status": "ready", "model": service.settings.name, **(service.about if is_trusted else {})})


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, QuartetError), error
    record_of(request.scope).error = error
    return refusal(error, error_shape_of(request.scope))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    message = " ".join(filter(None, (f"{error.detail}: {request.method} {path}.", why_absent(path))))
    return plain_error(error_shape_of(request.scope), error.status_code, message, headers=error.headers)


async def _bug(request: Request, error: Exception) -> Response:
    record_of(request.scope).error = error
    return plain_error(error_shape_of(request.scope), 500, "Internal error", "internal_error", NO_RETRY)


@cache
def _documentation() -> tuple[dict[type[Struct], JsonObject], JsonObject]:
    kinds = [LOAD_READER.kind, UNLOAD_READER.kind, *(api.reader.kind for api in TOKEN_APIS)]
    kinds += [kind for api in GENERATION_APIS for kind in (api.reader.kind, *api.parts)]
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    return dict(zip(kinds, schemas, strict=True)), components


def _body(kind: type[Struct], media_type: str = JSON) -> JsonObject:
    return {"requestBody": {"required": True, "content": {media_type: {"schema": _documentation()[0][kind]}}}}
