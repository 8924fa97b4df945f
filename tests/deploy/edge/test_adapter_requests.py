"""Adapters loaded and unloaded over HTTP: who may, what is said, and what requests may name afterwards. Ranks are scripted."""

import asyncio
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from deploy.edge.edge_settings import KeySettings
from deploy.edge.keys.key_ring import KeyRing
from engine.adapter_commands import AdapterCommand, DropAdapter, PlaceAdapter, ReadAdapter
from engine.errors import CheckpointError
from engine.protocol import AdapterOrders
from tests.support.edge.api_client import chat_body, error_of
from tests.support.edge.http_edge import Edge, Edges, until

pytestmark = [pytest.mark.pure, pytest.mark.alone]

LOAD, UNLOAD, CHAT = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/chat/completions"
ADMIN, USER = "sk-admin", "sk-user"


class ScriptedRanks:
    """What RankLinks is, without ranks. wrong: names of adapters that cannot be read."""

    def __init__(self) -> None:
        self.commands: list[AdapterCommand] = []
        self.wrong = set[str]()
        self.read_s = 0.0

    def next_number(self) -> int:
        return len(self.commands)

    async def do(self, command: AdapterCommand) -> None:
        self.commands.append(command)
        await asyncio.sleep(self.read_s)
        if isinstance(command, ReadAdapter) and command.name in self.wrong:
            raise CheckpointError(f"adapters.{command.name}: 0 of 4 matrices act: it changes nothing")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for name in ("sql", "poems", "other"):
        (root / name).mkdir()
    return root


@pytest.fixture
def open_edge(edges: Edges, root: Path) -> Edge:
    """Without keys, with a folder: anybody may load."""
    return edges(adapter_folder=str(root), most_adapters=2, rank_links=ScriptedRanks())


def load(edge: Edge, name: str, path: str, **more: Any) -> Any:
    return edge.post(LOAD, {"lora_name": name, "lora_path": path, **more})


def test_an_adapter_is_loaded_named_and_unloaded(open_edge: Edge, root: Path) -> None:
    """vLLM's words and statuses; the list of models follows; the core is told its id, which no other adapter ever has."""
    edge = open_edge
    answer = load(edge, "sql", "sql")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert edge.rank_links.commands == [ReadAdapter(0, 0, "sql", str(root / "sql"))]
    assert edge.post(CHAT, chat_body(max_tokens=1) | {"model": "sql"}).json()["model"] == "sql"
    assert edge.core.requests[-1].adapter == 0
    cards = edge.get("/v1/models").json()["data"]
    assert [(card["id"], card.get("parent")) for card in cards] == [("nano", None), ("sql", "nano")]
    again = load(edge, "sql", "sql")
    assert "has already been loaded" in error_of(again, 400)["message"]
    assert load(edge, "sql", "poems", load_inplace=True).status_code == 200
    assert edge.post(CHAT, chat_body(max_tokens=1) | {"model": "sql"}).status_code == 200
    assert edge.core.requests[-1].adapter == 1
    assert edge.core.changes == [("add", 0), ("add", 1), ("remove", 0)]
    gone = edge.post(UNLOAD, {"lora_name": "sql"})
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert edge.post(CHAT, chat_body(max_tokens=1) | {"model": "sql"}).status_code == 404
    assert edge.post(UNLOAD, {"lora_name": "sql"}).status_code == 404
    assert edge.get("/v1/models/sql").status_code == 404


def test_what_the_core_wants_is_done_by_every_rank(open_edge: Edge) -> None:
    """A slot is told when it is filled; memory is counted until the ranks have forgotten an adapter."""
    edge = open_edge
    for name in ("sql", "poems"):
        assert load(edge, name, name).status_code == 200
    assert "max_host_adapters" in error_of(load(edge, "other", "other"), 400)["message"]
    assert edge.post(UNLOAD, {"lora_name": "sql"}).status_code == 200
    assert load(edge, "other", "other").status_code == 400
    edge.on_loop(lambda: edge.client.on_orders(AdapterOrders([(1, 5)], [0])))
    until(lambda: ("placed", 1) in edge.core.changes, "the core hears of the slot")
    placed, dropped = edge.rank_links.commands[-2:]
    assert (placed.id, placed.slot) == (1, 5)
    assert isinstance(placed, PlaceAdapter)
    assert isinstance(dropped, DropAdapter)
    assert dropped.id == 0
    assert load(edge, "other", "other").status_code == 200


def test_the_configs_own_folder_may_come_back(edges: Edges, root: Path, tmp_path: Path) -> None:
    """In place, wherever it lies. Planted: by another name it would have to be below adapter_folder."""
    own = str(tmp_path)
    edge = edges(adapters={"own": own}, adapter_folder=str(root), most_adapters=3, rank_links=ScriptedRanks())
    for path in ("sql", own):
        assert load(edge, "own", path, load_inplace=True).status_code == 200
    assert edge.rank_links.commands[-1] == ReadAdapter(1, 2, "own", own)
    assert "no folder below adapter_folder" in error_of(load(edge, "other", own), 400)["message"]


def test_a_load_that_fails_leaves_nothing(open_edge: Edge) -> None:
    """The sentence of the ranks is a 400; so is one prompt whose logprobs are the model's own. Neither takes room."""
    edge = open_edge
    edge.rank_links.wrong.add("bad")
    assert "0 of 4 matrices act" in error_of(load(edge, "bad", "sql"), 400)["message"]
    assert isinstance(edge.rank_links.commands[-1], DropAdapter)
    edge.core.deaf.add(1)
    assert "logits of a prompt are the model's own" in error_of(load(edge, "deaf", "sql"), 400)["message"]
    assert edge.core.changes == [("add", 1), ("remove", 1)]
    edge.on_loop(lambda: edge.client.on_orders(AdapterOrders([], [1])))
    assert [card["id"] for card in edge.get("/v1/models").json()["data"]] == ["nano"]
    for name in ("sql", "poems"):
        assert load(edge, name, name).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"lora_name": "x"},
        {"lora_name": "", "lora_path": "sql"},
        {"lora_name": "x", "lora_path": ""},
        {"lora_name": "x", "lora_path": "../.."},
        {"lora_name": "x", "lora_path": "/etc"},
        {"lora_name": "x", "lora_path": "sql/../../.."},
        {"lora_name": "x", "lora_path": "a" * 5000},
        {"lora_name": "x\ny", "lora_path": "sql"},
        {"lora_name": "nano", "lora_path": "sql"},
        {"lora_name": "x", "lora_path": ["sql"]},
        {"lora_name": "x", "lora_path": "sql", "load_inplace": "maybe"},
        "no JSON",
    ],
)
def test_bad_bodies_are_refused(edges: Edges, root: Path, body: Any) -> None:
    """A 400, and no rank hears of it; the same without the fault is a 200."""
    edge = edges(adapter_folder=str(root), most_adapters=2, rank_links=ScriptedRanks())
    assert edge.post(LOAD, body).status_code == 400
    assert edge.rank_links.commands == []
    assert load(edge, "x", "sql").status_code == 200


def test_requests_go_on_while_an_adapter_is_read(open_edge: Edge) -> None:
    """A read of half a second holds up nobody; who asked for it may leave, and it is served all the same."""
    edge = open_edge
    edge.rank_links.read_s = 0.5
    work = edge.start(edge.service.adapters.load("slow", "sql", in_place=False))
    until(lambda: bool(edge.rank_links.commands), "the ranks read")
    work.cancel()
    assert edge.post(CHAT, chat_body(max_tokens=1)).status_code == 200
    assert "slow" not in edge.service.adapters
    until(lambda: "slow" in edge.service.adapters, "the adapter is served")


def test_only_keys_with_the_right_may(edges: Edges, root: Path, tmp_path: Path) -> None:
    """403 for a key that does not name the right, even one with all usual rights; 401 without a key."""
    keys = tmp_path / "keys"
    line = "- {{sha256: {}, name: {}}}\n"
    text = line.format(sha256(ADMIN.encode()).hexdigest(), "admin, rights: [adapters]")
    keys.write_text(text + line.format(sha256(USER.encode()).hexdigest(), "user"))
    ring = KeyRing(KeySettings(file=str(keys)))
    edge = edges(adapter_folder=str(root), most_adapters=2, rank_links=ScriptedRanks(), keys=ring)
    body = {"lora_name": "sql", "lora_path": "sql"}
    for path in (LOAD, UNLOAD):
        user = edge.post(path, body, headers={"authorization": f"Bearer {USER}"})
        assert "lacks the right `adapters`" in error_of(user, 403)["message"]
        assert edge.post(path, body).status_code == 401
    for path in (LOAD, UNLOAD):
        assert edge.post(path, body, headers={"authorization": f"Bearer {ADMIN}"}).status_code == 200


def test_without_a_folder_nobody_may(edge: Edge) -> None:
    """Where the config does not say so, with keys or without, nothing is loaded or unloaded."""
    assert "adapter_folder" in error_of(load(edge, "sql", "sql"), 403)["message"]
    assert edge.post(UNLOAD, {"lora_name": "sql"}).status_code == 403
