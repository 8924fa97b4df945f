"""The Serve application: `import_path: deploy.app:build`.

When its group ends, a replica sends every stream an error event, kills its children and exits:
Serve replaces it faster than by a failing health check.
"""

import asyncio
import contextlib
import gc
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import ray
from ray import serve
from ray.serve import Application

from cluster.gauges import read_gauges
from cluster.group import Group
from cluster.health import Death, Watcher
from dashboards.exporter import Exporter, Facts
from deploy import environment, ray_private
from deploy.edge.adapters.adapter_sync import AdapterSync
from deploy.edge.keys.key_ring import KeyRing
from deploy.edge.keys.replica_quotas import ReplicaQuotas
from deploy.edge.media.media_preparer import MediaPreparer
from deploy.edge.observe import logs
from deploy.edge.observe.spans import tracer
from deploy.edge.processes.freed_memory import keep_large_blocks_apart
from deploy.edge.processes.grammar_process import complaint
from deploy.edge.processes.side_pool import SidePool
from deploy.edge.routes import create_app
from deploy.edge.service_settings import Defaults, ServiceSettings, audio_row_samples, media_kinds
from deploy.edge.serving.service import Service
from deploy.models.fingerprint import fingerprint
from deploy.nodes import check_host_of_nodes, check_nodes, gpus_of, replica_resources
from deploy.placement import check_model, place
from deploy.ports import check_port
from deploy.registry import HeartbeatSender, RayRegistryClient, target_here
from deploy.routing import served_names
from deploy.scaling import Demand
from deploy.settings import DEPLOYMENT, ServeConfig, Settings
from deploy.shared_quotas import RayCentre, beat_for_ever
from engine.config import EngineConfig
from engine.events import to_each
from engine.front.client import EngineClient
from engine.front.grammar_check import GrammarCheck
from engine.front.rank_links import RankLinks
from engine.front.text import TextProcessor
from engine.quantisation import read_quantisation

FLUSH_S = 0.3
JOIN_S = 10.0
DRAIN_MARGIN_S = 10.0  # beyond the deadline of the last request: a replica that goes (fewer replicas, a new build) cuts no answer

logger = logging.getLogger("ray.serve")


def build(args: ServeConfig) -> Application:
    """ConfigError: a wrong key, or what the cluster lacks. Serve then keeps the running replicas."""
    settings = Settings.read(args)
    check_model(settings)
    environment.refuse_kernels_distribution()
    gpus = gpus_of(ray.nodes())
    if len(gpus) > 1:
        check_host_of_nodes(ray_private.http_host(), len(gpus))
    check_nodes(settings, gpus)
    options = deployment_options(settings)
    return Quartet.options(**options).bind(msgspec.to_builtins(settings))  # type: ignore[attr-defined]


def deployment_options(settings: Settings) -> ServeConfig:
    """Serve's defaults, unless the YAML's `deployments:` differs."""
    logging_config = logs.serve_config(settings.logs)
    return {
        # The guard around Serve lets no more in than this, so that Serve never refuses anything itself, in words of its own.
        "max_ongoing_requests": settings.limits.requests,
        "max_queued_requests": settings.limits.requests,
        "backpressure_config": {"status_code": 429, "retry_after_s": 1},
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 10.0,
        "graceful_shutdown_timeout_s": settings.limits.request_timeout_s + DRAIN_MARGIN_S,
        "graceful_shutdown_wait_loop_s": 0.5,
        "max_constructor_retry_count": 2,  # what is wrong with a checkpoint is wrong every time
        "ray_actor_options": replica_resources(settings),
        **({"logging_config": logging_config} if logging_config else {}),
    }


def read_text(folder: Path, template: Path | None) -> tuple[TextProcessor, GrammarCheck]:
    text = TextProcessor.load(folder, template)
    pool = SidePool("deploy.edge.processes.grammar_process", str(folder.absolute()))
    pool.start()
    return text, GrammarCheck(partial(complaint, pool))


@serve.deployment(name=DEPLOYMENT)
@serve.ingress()
class Quartet:
    async def __init__(self, args: ServeConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        started = time.monotonic()
        self._closing = False
        self._settings = Settings.read(args)
        logs.install(self._settings.logs)
        keep_large_blocks_apart()
        _warn_about_environment(self._settings)
        self._reach_centre()
        metrics = self._settings.metrics
        self._metrics_host = metrics.host or ray.util.get_node_ip_address()
        check_port(self._metrics_host, metrics.port, "metrics.port 0 is a free one for each replica", least=0)
        config = place(self._settings)
        self._encoders = config.media
        self._media_preparer = MediaPreparer()
        if self._encoders:
            self._media_preparer.pool.start()
        self._spawner = ThreadPoolExecutor(1, "spawner")  # its thread lives as long as the replica: children end with theirs
        self._group, read = await self._boot(config)
        with contextlib.ExitStack() as failed:
            failed.callback(self._group.kill)
            await self._open(self._group, config, *read)
            failed.pop_all()
        logger.info("%s ready in %.1f s", self._settings.name, time.monotonic() - started)

    def _reach_centre(self) -> None:
        """What replicas share: discovery, quotas, and the keys that count by them."""
        discovery = self._settings.metrics.discovery
        self._registry = RayRegistryClient(discovery) if discovery.enabled else None
        tag = serve.get_replica_context().replica_id.unique_id
        self._centre = RayCentre(self._registry, tag) if self._registry is not None else None
        self._quotas = ReplicaQuotas(self._centre)
        self._keys = KeyRing(self._settings.keys, self._quotas) if self._settings.keys.needed else None

    async def _boot(self, config: EngineConfig) -> tuple[Group, tuple[TextProcessor, GrammarCheck]]:
        loop = asyncio.get_running_loop()
        booting = loop.run_in_executor(self._spawner, Group.boot, config)
        # meanwhile: this process only waits for the ranks
        reading = loop.run_in_executor(None, read_text, Path(config.model), self._settings.template)
        return await asyncio.gather(booting, reading)

    async def _open(self, group: Group, config: EngineConfig, text: TextProcessor, grammars: GrammarCheck) -> None:
        settings = self._settings
        metrics = self._settings.metrics
        folder = Path(config.model)
        replica = serve.get_replica_context()
        chosen = group.attention.name
        weights = read_quantisation(folder, config.weights).name
        self._exporter = Exporter(self._facts(config, chosen, weights))
        exporter_url = self._exporter.serve(self._metrics_host, metrics.port)
        self._demand = Demand(config.max_seqs, metrics.ttft_objective_s)
        self._client = EngineClient(group.front_socket, group.media, sink=to_each(self._exporter, self._demand))
        await self._client.start()
        links = RankLinks(group.adapter_sockets) if group.adapter_sockets else None
        if links is not None:
            await links.start()
        alike = {name: getattr(settings, name) for name in ServiceSettings.__struct_fields__ if hasattr(settings, name)}
        told = served_names(os.environ)
        served = ServiceSettings(
            others=tuple((other.name, other.max_len) for other in told if other.name not in settings.served),
            vocab=config.geometry.vocab,
            defaults=Defaults.read(folder),
            most_adapters=config.most_adapters,
            media_kinds=media_kinds(self._encoders, text),
            row_samples=audio_row_samples(self._encoders),
            weight_format=weights,
            fingerprint=fingerprint(folder, settings.build, str(settings.tp), config.dtype, chosen, text.template or ""),
            **alike,
        )
        self._service = Service(
            served,
            text,
            self._client,
            keys=self._keys,
            sink=self._exporter,
            tracer=tracer(settings.tracing, {"service.namespace": replica.app_name, "service.instance.id": replica.replica_tag}),
            grammars=grammars,
            media_preparer=self._media_preparer,
            about={"metrics": exporter_url, "attention": str(group.attention)},
            metrics=self._exporter.page if metrics.on_api else None,
            rank_links=links,
            centre=self._centre,
            application=replica.app_name,
        )
        self._exporter.read_gauges = partial(read_gauges, group, self._client, self._service.adapters.ids)
        await self._service.adapters.check_all()
        raylet = int(os.environ["RAY_RAYLET_PID"])  # Ray sets it in its workers
        self._watcher = Watcher(group, self._died, waiting=lambda: self._client.waiting_since, raylet=raylet)
        self._watcher.start()
        self._client.report()
        gc.collect()
        gc.freeze()  # what lives as long as the process: a full collection then takes a millisecond, not a hundred
        self._heartbeats = self._start_heartbeats(exporter_url)
        if self._registry is not None:
            await self._share_quotas(replica.app_name)
            if links is not None:
                await self._share_adapters(self._service.adapter_sync)

    def _facts(self, config: EngineConfig, attention: str, weights: str) -> Facts:
        metrics = self._settings.metrics
        return Facts(
            model_name=self._settings.name,
            build=self._settings.build,
            attention=attention,
            weights=weights,
            tp=self._settings.tp,
            slots=config.max_seqs,
            adapter_slots=config.adapter_slots,
            page_tokens=config.page,
            step_bound_s=config.step_timeout_s,
            ttft_objective_s=metrics.ttft_objective_s,
            tpot_objective_s=metrics.tpot_objective_s,
        )

    async def _share_quotas(self, app_name: str) -> None:
        self._beats = asyncio.ensure_future(beat_for_ever(self._quotas, self._service.admission, app_name))
        if self._keys is not None:
            with contextlib.suppress(TimeoutError):  # until then it would allow every quota whole
                await asyncio.wait_for(self._quotas.joined.wait(), JOIN_S)

    async def _share_adapters(self, sync: AdapterSync) -> None:
        for _ in range(int(JOIN_S)):
            if await sync.sync():
                break
            await asyncio.sleep(1)
        self._syncing = asyncio.ensure_future(sync.run())

    def _start_heartbeats(self, exporter_url: str) -> HeartbeatSender | None:
        if self._registry is None:
            return None
        target = target_here(self._settings.name, exporter_url)
        return HeartbeatSender(self._registry, target, self._exporter.counts, lambda url: self._service.about.update(discovery=url))

    def __serve_build_asgi_app__(self) -> Callable[..., Awaitable[None]]:
        return create_app(self._service)

    def check_health(self) -> None:
        """EngineDead once the group is gone, except after an orderly end."""
        if not self._service.draining:
            self._client.health()

    def record_autoscaling_stats(self) -> dict[str, float]:
        return self._demand.figures()

    def _died(self, death: Death) -> None:
        if self._closing:
            return
        self._closing = True
        self._client.fail(death.sentence)
        self._exit = asyncio.ensure_future(self._exit_replica(death))

    async def _exit_replica(self, death: Death) -> None:
        """Kill the children, which may hold GPUs, while streams flush; then exit."""
        try:
            ending = asyncio.gather(asyncio.to_thread(self._group.kill), self._deregister(death.cause))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._service.idle.wait(), FLUSH_S)
            await asyncio.sleep(0.02)  # the last bytes are the transport's by now; let it write them
            await asyncio.gather(ending, asyncio.to_thread(self._service.end, FLUSH_S))
            sys.stderr.write(f"quartet: the group ended ({death.sentence}); this replica exits, Serve starts a new one\n")
            sys.stderr.flush()
        finally:
            os._exit(1)

    async def _deregister(self, cause: str | None) -> None:
        if self._heartbeats is not None:
            await asyncio.to_thread(self._heartbeats.deregister, cause)

    async def __del__(self) -> None:
        """End in order when Serve asks: open answers are done, or time is up."""
        if self._closing or not hasattr(self, "_service"):
            return
        self._closing = True
        self._service.draining = True
        self._watcher.close()
        self._client.stop()
        await asyncio.to_thread(self._group.close)
        await self._deregister(None)
        await self._client.close()
        await asyncio.to_thread(self._service.end, 2.0)  # seconds for the last traces
        self._exporter.close()


def _warn_about_environment(settings: Settings) -> None:
    if names := environment.missing(os.environ, settings):
        logger.warning(
            "Ray was started without %s: errors, limits, keys, clients' addresses and recovery are not as documented. Before "
            '`ray start`, run settings="$(quartet env --for head CONFIG)" && eval "$settings"; on other nodes with --for node',
            ", ".join(names),
        )
