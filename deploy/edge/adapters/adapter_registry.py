"""The adapters that requests may name.

    load     every rank reads the folder --> the core knows it --> a prompt's logprobs are not the model's --> its name is served
    unload   its name is served no more --> its requests end --> every rank forgets it
"""

import asyncio
import re
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

from deploy.edge.http.http_errors import Forbidden
from deploy.edge.service_settings import ServiceSettings
from engine.adapter_commands import DropAdapter, PlaceAdapter, ReadAdapter
from engine.adapters import NAME, NO_ADAPTER
from engine.errors import CheckpointError, EngineDead, InvalidRequest, ModelNotFound
from engine.front.client import EngineClient
from engine.front.rank_links import RankLinks
from engine.front.text import TextProcessor
from engine.protocol import AbortReason, AdapterChange, AdapterOrders, Output, SamplingParams

_PROMPT = "The sheep of the farm are counted every morning, and the dogs help."
_CHECK = SamplingParams(max_tokens=1, logprobs=0, prompt_logprobs=0)
_FIRST = -(1 << 62)  # the priority of a check, before every request


class AdapterRegistry:
    """Runs on the loop of `client`. `links`: to the ranks; None: only the config's adapters are
    served."""

    def __init__(self, settings: ServiceSettings, client: EngineClient, text: TextProcessor, links: RankLinks | None) -> None:
        self._settings = settings
        self._client = client
        self._links = links
        self.ids = {name: adapter for adapter, name in enumerate(settings.adapters)}
        self._folders = dict(settings.adapters)
        self._next = len(self.ids)
        self._held = len(self.ids)  # adapters that ranks hold, those that are leaving included
        self._prompt = text.encode(_PROMPT, add_bos=True)[: max(1, settings.max_len - 1)]
        self._loading = asyncio.Lock()
        self._tasks = set[asyncio.Task[None]]()
        client.on_orders = self._carry_out

    def __iter__(self) -> Iterator[str]:
        return iter(list(self.ids))

    def __contains__(self, name: object) -> bool:
        return name in self.ids

    def id_of(self, model: str | None) -> int:
        """-1: the model itself. ModelNotFound."""
        if model in (None, *self._settings.names):
            return NO_ADAPTER
        if model not in self.ids:
            raise ModelNotFound(str(model))
        return self.ids[str(model)]

    def name_of(self, adapter: int) -> str | None:
        """None: the adapter is leaving."""
        return next((name for name, known in self.ids.items() if known == adapter), None)

    async def check_all(self) -> None:
        """CheckpointError names an adapter that changes nothing."""
        for name, adapter in self.ids.items():
            await self._check(name, adapter)

    async def load(self, name: str, path: str, *, in_place: bool) -> tuple[str, str | None]:
        """Returns the folder, once it can be used, and the folder that it replaces. InvalidRequest:
        it cannot be served; Forbidden: loading is off."""
        async with self._loading:
            folder = str(await asyncio.to_thread(self._folder, name, path))
            self._check_name(name, in_place=in_place)
            before = self._folders.get(name)
            await asyncio.shield(self._start(self._load(name, folder)))
            return folder, before

    def unload(self, name: str) -> None:
        """Refuse new requests; open ones go on. ModelNotFound; Forbidden."""
        self._check_allowed()
        if name not in self.ids:
            raise ModelNotFound(name)
        del self._folders[name]
        self._client.change_adapter(AdapterChange("remove", self.ids.pop(name)))

    def _check_allowed(self) -> None:
        if self._links is None or self._settings.adapter_folder is None:
            raise Forbidden("Adapters are loaded and unloaded only where the config sets max_adapters and adapter_folder.")

    def _folder(self, name: str, path: str) -> Path:
        """InvalidRequest: no folder, or neither the config's of that name nor below adapter_folder."""
        self._check_allowed()
        if path == self._settings.adapters.get(name):
            return Path(path)
        assert self._settings.adapter_folder is not None
        root = Path(self._settings.adapter_folder)
        try:
            folder = (root / path).resolve()
            inside = folder.is_relative_to(root.resolve()) and folder.is_dir()
        except (OSError, ValueError, RuntimeError) as error:  # a loop of links, a name with a zero byte
            raise InvalidRequest(f"lora_path: {error}", param="lora_path") from error
        if not inside:
            raise InvalidRequest("lora_path: no folder below adapter_folder of the config", param="lora_path")
        return folder

    def _check_name(self, name: str, *, in_place: bool) -> None:
        others = [other for other, _ in self._settings.others]
        if not re.fullmatch(NAME, name):
            raise InvalidRequest("lora_name: begins with no slash, and has neither blanks nor backslashes", param="lora_name")
        if name in self._settings.names or name in others:
            raise InvalidRequest(f"lora_name: a model is called `{name}`", param="lora_name")
        if name in self.ids and not in_place:
            raise InvalidRequest(
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set 'load_inplace' "
                "to True.",
                param="lora_name",
            )
        if self._held >= self._settings.most_adapters:
            raise InvalidRequest(
                f"{self._held} adapters are loaded, those included whose last requests are still running; max_host_adapters "
                "allows no more: unload one"
            )

    async def _load(self, name: str, folder: str) -> None:
        assert self._links is not None
        adapter = self._next
        self._next += 1
        self._held += 1
        try:
            await self._links.do(ReadAdapter(self._links.next_number(), adapter, name, folder))
        except CheckpointError as error:
            await self._drop(adapter)
            raise InvalidRequest(str(error), param="lora_path") from error
        self._client.change_adapter(AdapterChange("add", adapter))
        try:
            await self._check(name, adapter)
        except CheckpointError as error:
            self._client.change_adapter(AdapterChange("remove", adapter))
            raise InvalidRequest(str(error), param="lora_path") from error
        before = self.ids.get(name)
        self.ids[name] = adapter
        self._folders[name] = folder
        if before is not None:
            self._client.change_adapter(AdapterChange("remove", before))

    async def _check(self, name: str, adapter: int) -> None:
        """CheckpointError: a prompt's logprobs are the model's own, which are computed anew:
        kernels may have changed."""
        if await self._logprobs(adapter) == await self._logprobs(NO_ADAPTER):
            raise CheckpointError(f"adapters.{name}: logits of a prompt are the model's own: the adapter changes nothing")

    async def _logprobs(self, adapter: int) -> list[Any]:
        stream = self._client.generate(self._prompt, _CHECK, salt="adapter check", priority=_FIRST, adapter=adapter)
        prompt = b""
        given: list[Any] = []
        output: Output | None = None
        try:
            while output is None or output.finish is None:
                while not stream.ready:
                    ready = asyncio.Event()
                    stream.on_ready = ready.set
                    await ready.wait()
                output = stream.take()
                assert output is not None, "the reader has not left the stream"
                prompt += b"".join(piece.words for piece in output.prompt_logprobs)
                given += output.logprobs
        finally:
            stream.abort(AbortReason.client_gone)
        return [prompt, *given]

    def _carry_out(self, orders: AdapterOrders) -> None:
        for adapter, slot in orders.places:
            self._start(self._place(adapter, slot))
        for adapter in orders.drops:
            self._start(self._drop(adapter))

    async def _place(self, adapter: int, slot: int) -> None:
        assert self._links is not None
        await self._links.do(PlaceAdapter(self._links.next_number(), adapter, slot))
        self._client.change_adapter(AdapterChange("placed", adapter))

    async def _drop(self, adapter: int) -> None:
        assert self._links is not None
        await self._links.do(DropAdapter(self._links.next_number(), adapter))
        self._held -= 1

    def _start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run it to its end, even if the waiting client leaves."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        """Waiters get errors. Without one the only error is that the group is gone, which its
        watcher reports."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        assert error is None or isinstance(error, EngineDead | InvalidRequest), error
