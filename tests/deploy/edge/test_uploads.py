"""Uploads and their room: who waits, who is refused, and what counts until when."""

import asyncio

import pytest
from starlette.types import Message, Receive, Scope, Send

from deploy.edge.edge_settings import LimitSettings
from deploy.edge.guards import uploads as uploads_module
from deploy.edge.guards.limits import Limits
from deploy.edge.guards.uploads import LONGEST_TEXT_BYTES, Claim, Upload, Uploads
from deploy.edge.http.error_response import JsonResponse
from deploy.edge.http.scope import CLAIM
from engine.errors import Overloaded
from tests.support.edge.http_edge import never

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("parsed", [True, False])
def test_a_body_counts_until_it_is_parsed(parsed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parsed body gives its room to the next. Planted: a body that is not parsed yet keeps it, and the next one gets a 429."""
    monkeypatch.setattr(uploads_module, "WAITS_S", (0.0,))

    async def main() -> None:
        uploads = Uploads(LimitSettings(body_bytes=1 << 20, upload_bytes=1 << 20))
        first, second = Upload(Claim(uploads, "one")), Upload(Claim(uploads, "two"))
        await uploads.read(first, client(600_000), 600_000)
        if parsed:
            first.claim.parsed(600_000, has_media=False)
        try:
            await uploads.read(second, client(600_000), 600_000)
            assert parsed
        except Overloaded:
            assert not parsed
            assert not second.body, "it is refused by its head"
        for upload in (first, second):
            upload.claim.release()
        assert (uploads.texts.total, uploads.media.total, uploads.coming.total) == (0, 0, 0)

    asyncio.run(main())


def test_each_body_on_its_way_is_one() -> None:
    """Of four places a client alone may have two: its third body is refused until one has ended."""

    async def main() -> None:
        uploads = Uploads(LimitSettings(uploads=4))
        reads = [asyncio.create_task(uploads.read(Upload(Claim(uploads, "one")), never, 0)) for _ in range(2)]
        await asyncio.sleep(0)
        assert uploads.coming.total == 2
        with pytest.raises(Overloaded, match="Too many bodies"):
            await uploads.read(Upload(Claim(uploads, "one")), client(9), 9)
        reads[0].cancel()
        await asyncio.wait({reads[0]})
        await uploads.read(Upload(Claim(uploads, "one")), client(9), 9)
        reads[1].cancel()
        await asyncio.wait({reads[1]})
        assert uploads.coming.total == 0

    asyncio.run(main())


@pytest.mark.parametrize("waits", [True, False])
def test_a_body_waits_for_room_unread(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is read before another's is parsed, and then all. Planted: without a wait it is refused."""
    monkeypatch.setattr(uploads_module, "WAITS_S", (10.0 * waits,))

    async def main() -> None:
        uploads = Uploads(LimitSettings(body_bytes=1 << 20, upload_bytes=1 << 20))
        first, second = Upload(Claim(uploads, "one")), Upload(Claim(uploads, "two"))
        await uploads.read(first, client(600_000), 600_000)
        coming = asyncio.create_task(uploads.read(second, client(600_000), 600_000))
        await asyncio.sleep(0.2)
        assert not second.body
        assert coming.done() is not waits
        first.claim.parsed(600_000, has_media=False)
        try:
            await coming
            assert waits
            assert len(second.body) == 600_000
        except Overloaded:
            assert not waits
        assert uploads.coming.total == 0

    asyncio.run(main())


@pytest.mark.parametrize("in_line", [True, False])
def test_room_goes_to_who_has_waited_longest(in_line: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three that wait for the room of one, one after another gets it. Planted: the newest gets it first."""
    if not in_line:
        monkeypatch.setattr(uploads_module, "list", lambda items: list(items)[::-1], raising=False)

    async def main() -> list[int]:
        uploads = Uploads(LimitSettings(body_bytes=1 << 20, upload_bytes=1 << 20))
        first, order = Claim(uploads, "first"), list[int]()
        first.grow(900_000)

        async def come(number: int) -> None:
            upload = Upload(Claim(uploads, str(number)))
            await uploads.read(upload, client(600_000), 600_000)
            order.append(number)
            upload.claim.release()

        coming = [asyncio.create_task(come(number)) for number in range(3)]
        await asyncio.sleep(0.02)
        assert not order
        first.release()
        await asyncio.gather(*coming)
        return order

    assert asyncio.run(main()) == ([0, 1, 2] if in_line else [2, 1, 0])


@pytest.mark.parametrize("expects_word", [True, False])
def test_a_client_that_expects_a_word_gets_none_before_there_is_room(expects_word: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server says `100 Continue` as soon as a body is read. Of one that comes anyway a piece is read while it waits."""
    monkeypatch.setattr(uploads_module, "WAITS_S", (0.02, 0.02))

    async def main() -> int:
        uploads = Uploads(LimitSettings(body_bytes=1 << 20, upload_bytes=1 << 20))
        Claim(uploads, "one").grow(1 << 20)
        upload = Upload(Claim(uploads, "two"), expects_word)
        piece: Message = {"type": "http.request", "body": b"x" * 1000, "more_body": True}

        async def receive() -> Message:
            return piece

        with pytest.raises(Overloaded):
            await uploads.read(upload, receive, 600_000)
        return len(upload.body)

    assert asyncio.run(main()) == (0 if expects_word else 1000)


def test_who_has_no_room_hears_when_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second in line is told twice the time of the first, by what was freed while they waited; 5 s at least and 60 at most."""

    async def seconds(freed: int) -> list[int]:
        uploads = Uploads(LimitSettings(body_bytes=1 << 20, upload_bytes=1 << 20))
        Claim(uploads, "one").grow(1 << 20)
        reads = [asyncio.create_task(uploads.read(Upload(Claim(uploads, str(n))), never, 600_000)) for n in range(2)]
        await asyncio.sleep(0.01)
        uploads.freed(freed)
        now = uploads._began + 10.0
        found = [uploads._retry_s(room, now) for room in uploads._waiting]
        for task in reads:
            task.cancel()
        await asyncio.wait(reads)
        return found

    assert asyncio.run(seconds(600_000)) == [10, 20]
    assert asyncio.run(seconds(6_000_000)) == [5, 5]
    assert asyncio.run(seconds(0)) == [60, 60]


@pytest.mark.parametrize("size", [LONGEST_TEXT_BYTES, LONGEST_TEXT_BYTES + 1])
def test_the_largest_text_is_text(size: int) -> None:
    """A byte more is taken for media."""
    uploads = Uploads(LimitSettings())
    claim = Claim(uploads, "one")
    claim.grow(size)
    is_text = size == LONGEST_TEXT_BYTES
    assert (uploads.texts.total, uploads.media.total) == ((size, 0) if is_text else (0, size))
    claim.parsed(size, has_media=True)
    assert (uploads.texts.total, uploads.media.total) == (0, size)


def test_text_has_room_beside_media() -> None:
    """Media that wait for decoders, large bodies and small ones, and no text is refused for them. Planted: a text that takes what
    the media have is."""

    async def main() -> None:
        uploads = Uploads(LimitSettings(body_bytes=40 << 20, upload_bytes=64 << 20))
        claims = [Claim(uploads, f"client {number}") for number in range(5)]
        for claim in claims[:2]:
            claim.grow(63 << 19)
        claims[2].grow(1 << 20)
        claims[2].parsed(1 << 20, has_media=True)
        with pytest.raises(Overloaded):
            claims[3].grow(31 << 20)
        claims[3].grow(1 << 20)
        with pytest.raises(Overloaded):
            claims[3].parsed(1 << 20, has_media=True)
        claims[4].grow(1 << 20)
        claims[4].parsed(1 << 20, has_media=False)
        for claim in claims:
            claim.release()
        assert (uploads.texts.total, uploads.media.total) == (0, 0)

    asyncio.run(main())


@pytest.mark.parametrize("waits", [True, False])
def test_a_clients_pictures_are_refused_by_their_heads_or_not_at_all(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """240 bodies of 2.5 MB from one client, decoded one after another: those without room wait, unread. Planted: bodies that count
    as text until they are parsed are read and refused then."""
    size, decoding = 2_500_000, asyncio.Lock()
    if not waits:
        monkeypatch.setattr(uploads_module, "LONGEST_TEXT_BYTES", 8 << 20)

    async def ask(uploads: Uploads) -> bool:
        upload = Upload(Claim(uploads, "one"))
        await uploads.read(upload, client(size), size)
        try:
            upload.claim.parsed(size, has_media=True)
        except Overloaded:
            return False
        async with decoding:
            await asyncio.sleep(0.001)
        upload.claim.release()
        return True

    async def main() -> int:
        uploads = Uploads(LimitSettings())
        return sum(await asyncio.gather(*(ask(uploads) for _ in range(240))))

    answered = asyncio.run(main())
    assert (answered == 240) is waits


SENT = 20 << 20


class GuardedStack:
    """The guard, a Serve that reads on while the application works, and an application whose media wait until `decoded`."""

    def __init__(self) -> None:
        limits = LimitSettings(body_bytes=32 << 20, upload_bytes=32 << 20)
        self.parsed, self.decoded = asyncio.Event(), asyncio.Event()
        self.inner = Limits(self._app, limits)
        self.guard = Limits(self._serve, limits, is_guard=True)
        self.found = list[tuple[int, int]]()

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            body = (await receive())["body"]
            scope[CLAIM].parsed(len(body), has_media=True)
            self.parsed.set()
            await self.decoded.wait()
            scope[CLAIM].release()
            await JsonResponse({}, 200)(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = iter([await receive()])

        async def read_on() -> None:
            await self.parsed.wait()  # before that the application claims what this gives back
            await receive()

        reading = asyncio.create_task(read_on())

        async def queued() -> Message:
            return next(given, None) or await never()

        await self.inner(scope, queued, send)
        reading.cancel()

    async def ask(self, address: str) -> None:
        """Send a body of SENT bytes; `found` gets the status, and how many bytes were taken before it."""
        sent = 0

        async def receive() -> Message:
            nonlocal sent
            if sent:
                return await never()
            sent = SENT
            return {"type": "http.request", "body": bytes(SENT), "more_body": False}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.found.append((message["status"], sent))

        headers = [(b"host", b"a"), (b"content-length", str(SENT).encode())]
        await self.guard({"type": "http", "method": "POST", "path": "/", "headers": headers, "client": (address, 1)}, receive, send)


@pytest.mark.parametrize("fault", [False, True])
def test_the_guards_claim_lasts_until_the_application_ends_it(fault: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve takes a body from the guard at once: the guard still counts its media while they wait, and another upload is refused by
    its head, before it is sent. Planted: an application that does not find the guard's claim; then that is sent in vain."""
    monkeypatch.setattr(uploads_module, "WAITS_S", (0.0,))
    if fault:
        monkeypatch.setattr("deploy.edge.guards.limits.noted_claim", lambda: None)

    async def main() -> list[tuple[int, int]]:
        stack = GuardedStack()
        await stack.inner({"type": "http", "method": "GET", "path": "/", "headers": []}, never, never)  # type: ignore[arg-type]
        first = asyncio.create_task(stack.ask("10.0.0.1"))
        await asyncio.sleep(0.05)
        async with asyncio.timeout(5):
            await stack.ask("10.0.0.2")
            stack.decoded.set()
            await first
        return stack.found

    assert asyncio.run(main()) == [(429, SENT if fault else 0), (200, SENT)]


def client(*sizes: int) -> Receive:
    """One that sends parts of a body, and goes."""
    parts = iter([{"type": "http.request", "body": b"x" * size, "more_body": False} for size in sizes])

    async def receive() -> Message:
        return next(parts, {"type": "http.disconnect"})

    return receive
