"""The API keys in force. The file is read again with requests, at most once a second. A bad file
changes nothing and is logged. Open requests are not checked again."""

import asyncio
import hmac
import logging
import time
from datetime import UTC, datetime

from deploy.edge.edge_settings import KeySettings
from deploy.edge.keys.key_file import ApiKey, digest_of, parse, read
from deploy.edge.keys.replica_quotas import ReplicaQuotas, RequestGrant
from engine.errors import ConfigError

FILE_CHECK_PERIOD_S = 1.0  # between two looks at the file
FILE_CHECK_TIMEOUT_S = 1.0  # of requests for a look: a file system that hangs must not hang them

logger = logging.getLogger(__name__)


class KeyRing:
    """ConfigError if the keys cannot be read. `quotas`: what their holders have used."""

    def __init__(self, settings: KeySettings, quotas: ReplicaQuotas | None = None) -> None:
        self._settings = settings
        self._looked = time.monotonic()
        self._look: asyncio.Task[None] | None = None
        self._complaint = ""
        self._text = read(settings)
        self._quotas = quotas or ReplicaQuotas()
        self._install(parse(self._text))

    def _install(self, keys: tuple[ApiKey, ...]) -> None:
        self._keys = keys
        quotas = {key.name: key.quota for key in keys}
        self._quotas.change(quotas)
        logger.info("%d API keys of %d holders are in force", len(keys), len(quotas))

    async def refresh(self) -> None:
        """Make the keys at most a second old."""
        if not self._settings.file:
            return
        if self._look is None and time.monotonic() - self._looked >= FILE_CHECK_PERIOD_S:
            self._looked = time.monotonic()
            self._look = asyncio.create_task(self._read_again())
        if self._look is not None and (left := self._looked + FILE_CHECK_TIMEOUT_S - time.monotonic()) > 0:
            await asyncio.wait({self._look}, timeout=left)

    async def _read_again(self) -> None:
        try:
            text = await asyncio.to_thread(read, self._settings)
            if text != self._text:
                self._install(await asyncio.to_thread(parse, text))
                self._text = text
            self._complaint = ""
        except ConfigError as error:
            if str(error) != self._complaint:
                logger.error("the API keys stay as they were: %s", error)  # noqa: TRY400 - a sentence says it all
            self._complaint = str(error)
        finally:
            self._look = None

    def find(self, presented: bytes) -> ApiKey | None:
        """The valid key with this digest. Compares all of them, so its time reveals nothing."""
        digest = digest_of(presented)
        match = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                match = key
        if match is None or match.has_expired(datetime.now(UTC)):
            return None
        return match

    async def open(self, key: ApiKey) -> RequestGrant:
        return await self._quotas.open(key.name)
