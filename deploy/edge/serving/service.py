"""One served model."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, get_args

import msgspec

from deploy.edge.adapters.adapter_registry import AdapterRegistry
from deploy.edge.adapters.adapter_sync import AdapterSync
from deploy.edge.admission_control import AdmissionControl
from deploy.edge.answers.response_format import ServedModel
from deploy.edge.http.http_errors import Forbidden, QuotaExceeded, Unauthenticated
from deploy.edge.jobs.job_builder import JobBuilder
from deploy.edge.keys.key_ring import KeyRing
from deploy.edge.keys.replica_quotas import Centre
from deploy.edge.media.media_preparer import MediaPreparer
from deploy.edge.observe.record import RequestRecord
from deploy.edge.observe.spans import Tracer
from deploy.edge.processes.text_pool import TextPool
from deploy.edge.requests.ask import Ask
from deploy.edge.service_settings import ServiceSettings
from engine.events import ConversationHome, ConversationRequest, KeyDecision, KeyTokens, KeyVerdict, Sink
from engine.front.client import EngineClient
from engine.front.grammar_check import GrammarCheck
from engine.front.rank_links import RankLinks
from engine.front.text import TextProcessor

_REFUSALS: dict[type, KeyVerdict] = {
    Unauthenticated: "unauthenticated",
    Forbidden: "forbidden",
    QuotaExceeded: "rate_limited",
}

HOMES: dict[bytes | None, ConversationHome] = {home.encode(): home for home in get_args(ConversationHome)}


@dataclass
class Service:
    """`keys` None: no request needs one. `sink` gets events; `metrics`: (content type, maker) of
    their page. `rank_links`: where adapters may be loaded. `open` counts choices from submission
    to their answer's last byte. `about`: for clients on this machine."""

    settings: ServiceSettings
    text: TextProcessor
    engine: EngineClient
    grammars: GrammarCheck
    media_preparer: MediaPreparer
    keys: KeyRing | None
    sink: Sink
    tracer: Tracer | None
    about: dict[str, Any]
    metrics: tuple[str, Callable[[], bytes]] | None = None
    rank_links: RankLinks | None = None
    centre: Centre | None = None
    application: str = ""
    open: int = 0
    draining: bool = False

    def __post_init__(self) -> None:
        settings = self.settings
        self.model = ServedModel(settings.name, self.text.pieces, settings.fingerprint)
        self.pool = TextPool()
        self.adapters = AdapterRegistry(settings, self.engine, self.text, self.rank_links)
        self.adapter_sync = AdapterSync(self.adapters, self.centre, self.application)
        self.jobs = JobBuilder(settings, self.text, self.pool, self.grammars, self.media_preparer, self.adapters)
        self.admission = AdmissionControl(self.engine, settings.capacity, settings.queue_tokens, settings.media.waiting_bytes)
        self.idle = asyncio.Event()
        self.idle.set()

    def model_of(self, ask: Ask) -> ServedModel:
        if ask.model in self.adapters:
            return msgspec.structs.replace(self.model, name=ask.model)
        return self.model

    def check_holder(self, record: RequestRecord, model: str | None) -> None:
        """Forbidden: the API key's holder may not use this model."""
        if model in (None, *self.settings.names):
            names = self.settings.names
        else:
            names = (str(model),)
        if not any(map(record.may_ask, names)):
            raise Forbidden(f"This API key may not use the model `{names[0]}`.")

    @contextmanager
    def answering(self, choices: int) -> Iterator[None]:
        self.open += choices
        self.idle.clear()
        try:
            yield
        finally:
            self.open -= choices
            if not self.open:
                self.idle.set()

    def end(self, timeout_s: float) -> None:
        """Blocks for at most `timeout_s`."""
        self.media_preparer.pool.close()
        if self.tracer is not None:
            self.tracer.close(timeout_s)

    def settle(self, record: RequestRecord) -> None:
        """Return place and unused quota, and count the outcome."""
        if record.ticket is not None:
            record.ticket.leave()
        refused = _REFUSALS.get(type(record.error))
        if record.grant is not None or refused is not None:
            self.sink(KeyDecision(record.key or "", refused or "admitted"))
        if record.home in HOMES:
            self.sink(ConversationRequest(HOMES[record.home]))
        if record.key is not None and record.grant is not None:
            record.grant.close(record.used_tokens)
            self.sink(KeyTokens(record.key, record.used_tokens))

    def salt(self, ask: Ask, tenant: str) -> str:
        """With isolation only requests of one `tenant` share cached prefixes."""
        isolated = self.settings.limits.isolate_cache
        if isolated is None:
            isolated = self.keys is not None
        if isolated:
            shared = sha256(tenant.encode()).hexdigest()
        else:
            shared = ""
        return f"{len(shared)}:{shared}{ask.salt}"
