"""Bounds on parts of a body, and on the process that reads it: what is one too much is refused, what is not is read."""

import resource
import subprocess
import sys

import pytest
from msgspec import UNSET, Raw

from deploy.edge.bodies import raw_json
from deploy.edge.bodies.form_reader import _fields
from deploy.edge.observe.record import RequestRecord
from engine.errors import InvalidRequest
from engine.front.stream import Clock

pytestmark = pytest.mark.pure

FORM = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nnano\r\n--x'


@pytest.mark.parametrize("mark", raw_json._MARKS)
def test_marks_of_a_large_body_are_counted(mark: bytes) -> None:
    """Over all of its slices; one mark more is refused."""
    most = raw_json._MEDIA_MARKS
    raw_json.check_large(mark * (most // 2) + b"A" * (2 << 20) + mark * (most // 2))
    with pytest.raises(InvalidRequest, match="few texts"):
        raw_json.check_large(mark * (most // 2) + b"A" * (2 << 20) + mark * (most // 2 + 1))


def test_a_small_value_is_small() -> None:
    """A number of 64 characters is read, and one of 65 is refused by its key."""
    assert raw_json.read_small(Raw(b"1" * 64), "seed", raw_json.ANYTHING, 64) == int("1" * 64)
    with pytest.raises(InvalidRequest, match="seed: more than 64 bytes"):
        raw_json.read_small(Raw(b"1" * 65), "seed", raw_json.ANYTHING, 64)


def test_raw_json_is_kept_on_one_line() -> None:
    """Nothing else of the body stays with it; null and an absent key are nothing."""
    assert raw_json.copied(Raw(b'{ "a":\n [1, 2] }')) == Raw(b'{"a":[1,2]}')
    assert raw_json.copied(Raw(b" null")) is None
    assert raw_json.copied(UNSET) is None


@pytest.mark.parametrize(("key", "param"), [("tools[0].name", "tools"), ("", None)])
def test_what_is_no_json_names_its_key(key: str, param: str | None) -> None:
    """The whole body has none."""
    with pytest.raises(InvalidRequest, match="not JSON") as caught:
        raw_json.decode(Raw(b"{"), key, raw_json.ANYTHING)
    assert caught.value.param == param


def test_a_form_ends_with_its_closing_boundary() -> None:
    """The same form without the two dashes is cut."""
    assert _fields(FORM + b"--\r\n") == {"model": b"nano"}
    for cut in (b"", b"\r\n", b"-"):
        with pytest.raises(InvalidRequest, match="is cut"):
            _fields(FORM + cut)


@pytest.mark.parametrize(("scheduled", "used"), [((), 0), ((None, None), 0), ((None, 1.0), 107)])
def test_a_request_that_never_began_used_no_tokens(scheduled: tuple[float | None, ...], used: int) -> None:
    """With choices that all wait as without any; with one that began its prompt counts, and what came."""
    record = RequestRecord("id", "POST", "/", 0.0, 1.0, None, prompt_tokens=100, output_tokens=7)
    record.clocks = [Clock(0.0, scheduled=at) for at in scheduled]
    assert record.used_tokens == used


def test_a_side_process_bounds_itself() -> None:
    """CPU, memory and core files, before it says that it has the task. Without `begin` they are not bound so."""
    code = (
        "import resource, socket\n"
        "from deploy.edge.processes.side_process import begin\n"
        "one, other = socket.socketpair()\n"
        "begin(one, 7, 64 << 20)\n"
        "print(other.recv(1), *(resource.getrlimit(which)[0] for which in"
        " (resource.RLIMIT_CPU, resource.RLIMIT_DATA, resource.RLIMIT_CORE)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    said, cpu_s, data, core = done.stdout.split()
    assert (said, cpu_s, core) == ("b'+'", "7", "0")
    assert 64 << 20 < int(data) < 1 << 30
    assert resource.getrlimit(resource.RLIMIT_CPU)[0] != 7
