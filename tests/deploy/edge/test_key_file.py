"""Entries of a file of API keys: what they say, what is wrong with those that say nothing, and the command that makes them."""

import json
import os
import resource
import signal
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from hashlib import sha256
from pathlib import Path
from threading import Barrier

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from deploy.cli import key_command
from deploy.cli.main import main
from deploy.edge.edge_settings import KeySettings
from deploy.edge.keys.key_file import MAX_KEYS, RIGHTS, ApiKey, Quota, parse, read
from engine.errors import ConfigError
from tests.support.repo_rules import ROOT

pytestmark = pytest.mark.pure

SECRET = "sk-quartet-never-in-a-message"


def digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()


HASH = digest(SECRET)
OTHER = digest("other")

names = st.text("abcXYZ019._-", min_size=1, max_size=64)
counts = st.none() | st.integers(1, 10**12)
times = st.none() | st.datetimes(timezones=st.just(timezone(timedelta(hours=2))))
keys = st.builds(
    ApiKey,
    st.binary(min_size=32, max_size=32),
    names,
    st.frozensets(st.sampled_from(RIGHTS), min_size=1),
    st.builds(Quota, counts, counts, counts),
    times,
)


def entry(digest: str, rest: str) -> str:
    """In flow style, on a line."""
    return f"- {{sha256: {digest}, {rest}}}\n"


def written(key: ApiKey) -> str:
    """As somebody writes it who says no more than is needed."""
    options = [f"name: '{key.name}'"]
    options += [f"rights: [{', '.join(key.rights)}]"] if key.rights != frozenset(RIGHTS) else []
    options += [f"{name}: {value}" for name, value in asdict(key.quota).items() if value is not None]
    options += [f"expires: {key.expires.isoformat()}"] if key.expires is not None else []
    return entry(key.digest.hex(), ", ".join(options))


@settings(max_examples=30)
@given(keys, st.sampled_from(["", "  # a comment", "\n\n# a comment\n"]))
def test_an_entry_says_what_the_key_may(key: ApiKey, comment: str) -> None:
    """A key's entry gives the key again, whatever it may do, and comments say nothing."""
    assert parse(written(key).rstrip() + comment) == (key,)
    assert parse(written(replace(key, quota=Quota(7, 8, 9), rights=frozenset(RIGHTS)))) != (replace(key, quota=Quota(7, 8, 10)),)


BAD = {
    f"- {{sha256: {SECRET}, name: a}}": r"`str` matching .* at `\$.sha256`",
    entry(HASH.upper(), "name: a"): r"`str` matching .* at `\$.sha256`",
    f"- {{sha256: {HASH}}}": "missing required field `name`",
    f"- {SECRET}": "Expected `object`, got `str`",
    entry(HASH, f"name: a/{SECRET}"): r"`str` matching .* at `\$.name`",
    entry(HASH, f"name: {'x' * 65}"): r"`str` matching .* at `\$.name`",
    entry(HASH, f"name: a, rights: [{SECRET}]"): "its rights are of generate, tokenize, models, docs, adapters",
    entry(HASH, "name: a, rights: []"): r"`array` of length >= 1 - at `\$.rights`",
    entry(HASH, "name: a, requests: 0"): r"`int` >= 1 - at `\$.requests`",
    entry(HASH, f"name: a, tokens: {SECRET}"): r"`int \| null`, got `str` - at `\$.tokens`",
    entry(HASH, f"name: a, concurrent: {10**13}"): r"`int` <= 1000000000000 - at `\$.concurrent`",
    entry(HASH, f"name: a, expires: {SECRET}"): "expires: neither",
    entry(HASH, f"name: a, {SECRET}: 1"): "its options are sha256, name, rights",
    entry(HASH, "name: a") + entry(HASH, "name: b"): "the same key",
    entry(HASH, "name: a, requests: 1") + entry(OTHER, "name: a, requests: 2"): "other rights, models or limits",
    entry(HASH, "name: a, rights: [models]") + entry(OTHER, "name: a"): "other rights, models or limits",
    entry(HASH, "name: a, models: [large]") + entry(OTHER, "name: a"): "other rights, models or limits",
    entry(HASH, "name: a, models: ['']"): r"`str` of length >= 1 - at `\$.models",
    "".join(entry(digest(str(number)), f"name: k{number}") for number in range(MAX_KEYS + 1)): "more than 1024 keys",
}


@pytest.mark.parametrize(("text", "complaint"), BAD.items(), ids=list(BAD.values()))
def test_a_bad_entry_is_named_and_not_quoted(text: str, complaint: str) -> None:
    """The number of the entry, and what is wrong; never what stands there, which may be a key put there by mistake."""
    with pytest.raises(ConfigError, match=complaint) as caught:
        parse("# first\n" + text)
    assert str(caught.value).startswith(f"keys: entry {len(text.splitlines())}: ")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (f"{HASH}  a  rights={SECRET}", "expected a list"),
        (f"{SECRET}: a", "expected a list"),
        (entry(HASH, f"name: a, {SECRET}: 1, {SECRET}: 2"), "not YAML, or an option stands twice"),
        (f"- [{SECRET}", "not YAML"),
        (f"- !!python/object:{SECRET} x\n- &a [*b]", "not YAML"),
        ("[" * 100_000, "not YAML"),
    ],
)
def test_a_file_that_is_no_list_is_not_quoted(text: str, complaint: str) -> None:
    """The message is one line, and holds nothing of the file."""
    with pytest.raises(ConfigError, match=f"^keys: {complaint}") as caught:
        parse(text)
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_are_texts() -> None:
    """YAML's numbers, words and dates are names like others. Planted: PyYAML's usual loader reads them as what they are there."""
    names = ["007", "on", "null", "2027-01-01", "1.5"]
    text = "".join(entry(digest(name), f"name: {name}") for name in names)
    assert [key.name for key in parse(text)] == names
    assert [entry["name"] for entry in yaml.safe_load(text)] != names


def test_two_keys_of_a_holder_share_all_but_their_end() -> None:
    """That is how a key is replaced: the old one with an end, the new one without."""
    old, new = parse(entry(HASH, "name: a, requests: 5, expires: 2027-01-01") + entry(OTHER, "name: a, requests: 5"))
    assert (old.name, old.quota, old.rights) == (new.name, new.quota, new.rights)
    assert old.has_expired(datetime(2027, 1, 1, tzinfo=UTC))
    assert not old.has_expired(datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC))
    assert not new.has_expired(datetime(2090, 1, 1, tzinfo=UTC))


def test_the_command_makes_a_key_and_its_entry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The entry is of the key that was shown, the file gets it after what it had, and the key itself is not in the file."""
    file = tmp_path / "keys"
    file.write_text("# ours\n" + entry(HASH, "name: alice, requests: 5").rstrip())
    options = ["--rights", "generate", "--models", "large,small", "--tokens", "1000", "--expires", "2090-01-01"]
    assert main(["key", "new", "--name", "bob", *options, "--append", str(file), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    alice, bob = parse(file.read_text())
    assert file.read_text().splitlines()[0] == "# ours"
    assert bob.digest == sha256(made["key"].encode()).digest() != alice.digest
    assert (bob.name, bob.rights, bob.models, bob.quota) == ("bob", {"generate"}, {"large", "small"}, Quota(tokens=1000))
    assert made["key"] not in file.read_text()
    assert main(["key", "new", "--name", "bob"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert parse(said[3])[0].digest == sha256(said[1].encode()).digest() != bob.digest


def test_keys_that_are_added_at_once_are_both_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though both have read the file before one writes; through a link too, which stays one, as does the file's mode. Planted: what
    is not appended is lost."""
    linked, file = tmp_path / "link", tmp_path / "keys"
    linked.symlink_to(file)
    both_have_read = Barrier(2)

    def slow_read(settings: KeySettings) -> str:
        text = read(settings)
        both_have_read.wait(20)
        return text

    monkeypatch.setattr(key_command, "read", slow_read)
    for appended in (True, False):
        file.write_text("")
        file.chmod(0o640)
        if not appended:
            monkeypatch.setattr(key_command.os, "O_APPEND", 0)
        with ThreadPoolExecutor(2) as pool:
            lines = [entry(HASH, "name: a").rstrip(), entry(OTHER, "name: b").rstrip()]
            list(pool.map(key_command._append, (linked, linked), lines))
        assert (len(parse(file.read_text())) == 2) == appended
        assert linked.is_symlink()
        assert file.stat().st_mode & 0o777 == 0o640
        assert len(list(tmp_path.iterdir())) == 2


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where half a line has room, none of it stays. Planted: with room for it all it is there."""
    file, line = tmp_path / "keys", entry(HASH, "name: alice")
    file.write_text(line)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for room, code in ((len(line) + 9, 2), (len(line), 2), (4096, 0)):
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
            assert main(["key", "new", "--name", "bob", "--append", str(file)]) == code
            assert (file.read_text() == line) == (code == 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    said = capsys.readouterr().err.splitlines()
    assert said == [f"quartet: {file}: no room for the entry", f"quartet: {file}: File too large"]


@pytest.mark.parametrize(
    "options",
    [
        ["--name", "a b"], ["--name", "a#b"], ["--name", "a", "--requests", "0"], ["--name", "alice", "--tokens", "9"],
        ["--name", "a", "--expires", "2020-01-01"],
    ],
)  # fmt: skip
def test_a_key_that_does_not_go_with_the_file_is_not_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    """Exit code 2, one line, and the file is as it was."""
    file = tmp_path / "keys"
    file.write_text(entry(HASH, "name: alice, requests: 5"))
    assert main(["key", "new", *options, "--append", str(file)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    starts = ("keys: entry ", "--name: 1 to 64 of ", "--expires: that time has passed")
    assert said.err.removeprefix("quartet: ").startswith(starts)
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]
    assert file.read_text() == entry(HASH, "name: alice, requests: 5")


def test_only_a_file_gets_an_entry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe stays one, as would /dev/null; so does a folder. Nobody waits for the pipe's other end."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe"):
        assert main(["key", "new", "--name", "alice", "--append", str(tmp_path / name)]) == 2
        assert capsys.readouterr().err == f"quartet: --append: {tmp_path / name} is no file\n"
    assert (tmp_path / "pipe").is_fifo()
    assert len(list(tmp_path.iterdir())) == 2


def test_check_config_checks_the_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A good file is counted, a bad one is exit code 2 with the entry's number, and an open door is said to be one."""
    config = yaml.safe_load((ROOT / "deploy" / "nano.yaml").read_text())
    keys, path = tmp_path / "keys", tmp_path / "nano.yaml"

    def checked() -> int:
        path.write_text(yaml.safe_dump(config))
        return main(["check-config", str(path)])

    config["applications"][0]["args"]["keys"] = {"file": str(keys)}
    keys.write_text(entry(HASH, "name: a") + entry(OTHER, "name: a, expires: 2020-01-01"))
    assert checked() == 0
    assert "note: keys: 2 of 1 holders, 1 of them expired" in capsys.readouterr().out
    keys.write_text(entry(HASH, "name: a") + "- nonsense\n")
    assert checked() == 2
    assert f"{path}: keys: entry 2: Expected `object`" in capsys.readouterr().err
    keys.unlink()
    assert checked() == 2
    assert f"keys.file: {keys}: No such file" in capsys.readouterr().err
    config["applications"][0]["args"]["keys"] = {"file": str(keys), "variable": "X"}
    assert checked() == 2
    assert "keys: " in capsys.readouterr().err
    del config["applications"][0]["args"]["keys"]
    config["http_options"]["host"] = "0.0.0.0"
    assert checked() == 0
    assert "anybody who reaches the port may use it" in capsys.readouterr().out
