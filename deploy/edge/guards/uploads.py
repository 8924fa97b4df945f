"""Request bodies and their memory: an upload is admitted before it is sent, and never ends another.

    head --claim--> [ body comes ] --parsed--> [ its media wait for decoders ] --decoded--> nothing
    text            `texts`                    (nothing)
    mostly media    `media`                    `media`

A body above LONGEST_TEXT_BYTES is likely media and counts so from its head, so waiting media never
cause the refusal of a shorter text. A body with a known length waits in line for room; meanwhile a
piece is read now and then, because HAProxy gives up a connection that takes nothing for 8 s
(`tcp-ut` in haproxy.sh).
"""

import asyncio
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from weakref import WeakSet

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from deploy.edge.edge_settings import LimitSettings
from deploy.edge.http.http_errors import TooLarge, TooSlow
from engine.errors import Overloaded
from engine.front.turns import Share

WAITS_S = (3.0,) * 6  # for room; a piece is read between two
RETRY_S = (5, 60)  # least and most that a refused client is to wait; SDKs ignore more
_PIECE_S = 0.05  # for a piece to arrive
SMALL_BYTES = 256 << 10  # of a body that is counted by number alone
LONGEST_TEXT_BYTES = 1 << 20  # some 250 000 tokens of English
_FULL = "Too many large bodies are being sent or wait to be read; please try again shortly."


class Uploads:
    """`coming` counts bodies in transit; `texts` and `media` count bytes of larger ones."""

    def __init__(self, limits: LimitSettings) -> None:
        self.limits = limits
        self.coming = Share(limits.uploads)
        self.texts = Share(limits.upload_bytes)
        self.media = Share(limits.upload_bytes)
        self._waiting: dict[asyncio.Future[None], tuple[Claim, int]] = {}  # for so many bytes, the oldest first
        self._began: float  # clock when the line formed
        self._freed = 0  # bytes since then

    async def read(self, upload: "Upload", receive: Receive, length: int) -> None:
        """The whole body. `length`: as its head says, or 0. TooLarge, TooSlow, ClientDisconnect;
        Overloaded: no room, after WAITS_S with a length."""
        if not self.coming.take(upload.claim.client, 1):
            raise Overloaded("Too many bodies are being sent; please try again shortly.")
        try:
            await self._wait_for_room(upload, receive, length)
            async with asyncio.timeout(self.limits.body_timeout_s):
                await self._receive(upload, receive)
        except TimeoutError as error:
            raise TooSlow(f"the body did not arrive within {self.limits.body_timeout_s:g} s") from error
        finally:
            self.coming.give_back(upload.claim.client, 1)

    def freed(self, size: int) -> None:
        self._freed += size
        for room, (claim, length) in list(self._waiting.items()):
            with suppress(Overloaded):
                claim.grow(length)
                del self._waiting[room]
                room.set_result(None)

    async def _wait_for_room(self, upload: "Upload", receive: Receive, length: int) -> None:
        if length <= SMALL_BYTES:
            return
        loop = asyncio.get_running_loop()
        if not self._waiting:
            self._began = loop.time()
            self._freed = 0
        room = loop.create_future()
        self._waiting[room] = (upload.claim, length)
        self.freed(0)
        try:
            for number, seconds in enumerate(WAITS_S):
                if number and not upload.expects_word:
                    await self._read_piece(upload, receive)
                await asyncio.wait({room}, timeout=seconds)
                if room.done():
                    return
            raise Overloaded(_FULL, self._retry_s(room, loop.time()))
        finally:
            self._waiting.pop(room, None)

    def _retry_s(self, room: asyncio.Future[None], now: float) -> int:
        """Seconds until there is room, at the rate since the line formed."""
        ahead = 0
        for other, (_, length) in self._waiting.items():
            ahead += length
            if other is room:
                break
        seconds = (now - self._began) * ahead / max(1, self._freed)
        return int(min(max(seconds, RETRY_S[0]), RETRY_S[1]))

    async def _read_piece(self, upload: "Upload", receive: Receive) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_PIECE_S):
                self._take(upload, await receive())

    async def _receive(self, upload: "Upload", receive: Receive) -> None:
        while not upload.is_whole:
            self._take(upload, await receive())
            upload.claim.grow(len(upload.body))

    def _take(self, upload: "Upload", message: Message) -> None:
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        upload.body += message.get("body", b"")
        upload.is_whole = not message.get("more_body", False)
        if len(upload.body) > self.limits.body_bytes:
            raise TooLarge(f"the body exceeds the limit of {self.limits.body_bytes} bytes")


class Claim:
    """Held until the body is parsed or its media are decoded."""

    def __init__(self, uploads: Uploads, client: str) -> None:
        self.client = client
        self._uploads = uploads
        self._share = uploads.texts
        self._bytes = 0

    def grow(self, size: int) -> None:
        """Hold at least `size` bytes. Overloaded holds nothing."""
        if size > max(SMALL_BYTES, self._bytes):
            self._hold(self._uploads.media if size > LONGEST_TEXT_BYTES else self._uploads.texts, size)

    def parsed(self, size: int, *, has_media: bool) -> None:
        """The body is parsed; its media are still to be decoded. Overloaded."""
        if not has_media:
            self.release()
        elif self._share is not self._uploads.media:
            self._hold(self._uploads.media, size)

    def release(self) -> None:
        """Idempotent."""
        size = self._give_back()
        if size:
            self._uploads.freed(size)

    def _give_back(self) -> int:
        size = self._bytes
        self._share.give_back(self.client, size)
        self._bytes = 0
        return size

    def _hold(self, share: Share, size: int) -> None:
        self._give_back()
        if not share.take(self.client, size):
            raise Overloaded(_FULL)
        self._share = share
        self._bytes = size


@dataclass(eq=False)
class Upload:
    """`expects_word`: its client sends nothing before we read (Expect: 100-continue)."""

    claim: Claim
    expects_word: bool = False
    body: bytearray = field(default_factory=bytearray)
    is_whole: bool = False

    def replayed(self, receive: Receive) -> Receive:
        """A `receive` that gives the body, then the disconnect. A second call ends the claim unless
        this process's application does."""
        is_read = False

        async def again() -> Message:
            nonlocal is_read
            if not is_read:
                is_read = True
                body = bytes(self.body)
                self.body = bytearray()  # the app's from now on
                return {"type": "http.request", "body": body, "more_body": False}
            if asyncio.get_running_loop() not in _APPLICATIONS:
                self.claim.release()
            message = await receive()
            while message["type"] == "http.request":
                message = await receive()
            return message

        return again


# The claim that the guard around Serve has made for this request, and its loop. Serve hands a body on before anybody parses it.
_GUARDS_CLAIM: ContextVar[tuple[asyncio.AbstractEventLoop, Claim] | None] = ContextVar("guards_claim", default=None)
_APPLICATIONS: WeakSet[asyncio.AbstractEventLoop] = WeakSet()  # loops of applications, which end claims themselves


def note_claim(claim: Claim) -> None:
    _GUARDS_CLAIM.set((asyncio.get_running_loop(), claim))


def noted_claim() -> Claim | None:
    loop = asyncio.get_running_loop()
    _APPLICATIONS.add(loop)
    guards_loop, claim = _GUARDS_CLAIM.get() or (None, None)
    if guards_loop is loop:
        return claim
    return None
