"""Adapters that are loaded and unloaded while the real processes serve, in fp32, against transformers with the adapter merged."""

import asyncio
import random
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from deploy.edge.adapters.adapter_registry import AdapterRegistry
from engine.config import EngineConfig, engine_config
from engine.errors import InvalidRequest, ModelNotFound
from engine.front.client import EngineClient
from engine.front.rank_links import RankLinks
from engine.geometry import read_geometry
from engine.protocol import SamplingParams
from tests.conftest import Nano
from tests.support.edge.served_settings import service_settings
from tests.support.engine.adapters import FILE, Recipe, merge, write
from tests.support.engine.drive import Answer, Request, ask, attached, booted
from tests.support.judge.near_tie import Match, compare
from tests.support.judge.oracle import judge, load_oracle

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("forked_groups")]

TOLERANCE = 1e-4  # fp32
FAULT = 100 * TOLERANCE
GREEDY = SamplingParams(max_tokens=6, logprobs=3)
NAMES = ("a", "b", "c")
Oracles = dict[str, transformers.PreTrainedModel]


class Text:
    """Encodes a text as ids of a small vocabulary."""

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        return [3 + ord(letter) % 90 for letter in text][:20]


class World:
    """A running group with a registry, and transformers' model of each adapter."""

    def __init__(self, client: EngineClient, registry: AdapterRegistry, oracles: Oracles, folder: Path) -> None:
        self.client, self.registry, self.oracles, self.folder = client, registry, oracles, folder
        rng = random.Random(5)
        self.prompts = [[rng.randrange(3, 90) for _ in range(length)] for length in (50, 7)]

    async def answer(self, name: str, prompt: list[int]) -> Answer:
        adapter = self.registry.id_of(None if name == "base" else name)
        return await ask(self.client, Request(prompt, GREEDY, adapter=adapter))

    def compare(self, answers: dict[tuple[str, int], Answer], other: dict[str, str] | None = None) -> Match:
        """All answers, added up; `other`: by whose model they are judged instead."""
        total = Match()
        for (name, at), answer in answers.items():
            prompt = self.prompts[at]
            oracle = self.oracles[(other or {}).get(name, name)]
            total += compare(prompt, answer, judge(oracle, torch.tensor(prompt + answer.tokens)))
        return total

    async def ask_all(self, names: tuple[str, ...]) -> dict[tuple[str, int], Answer]:
        """Each prompt of each name, all at once."""
        keys = [(name, at) for at in range(len(self.prompts)) for name in names]
        answers = await asyncio.gather(*(self.answer(name, self.prompts[at]) for name, at in keys))
        return dict(zip(keys, answers, strict=True))


@pytest.fixture(scope="module")
def made(nano: Nano, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path, Oracles]]:
    """The folder of a member, that of its adapters, and transformers' models by name."""

    @cache
    def make(member: str) -> tuple[Path, Path, Oracles]:
        folder = nano(member)
        adapters = tmp_path_factory.mktemp("adapters")
        oracles = {"base": load_oracle(folder)}
        recipes = (Recipe(1, rank=8, experts="fused"), Recipe(2, rank=16), Recipe(3, rank=3, alpha=9.0, targets="(q|k|v|o)_proj"))
        for name, recipe in zip(NAMES, recipes, strict=True):
            write(adapters / name, oracles["base"], recipe)
            oracles[name] = merge(load_oracle(folder), adapters / name)
        return folder, adapters, oracles

    return make


def config_of(folder: Path, tp: int, **settings: Any) -> EngineConfig:
    usual = {"max_seqs": 4, "max_len": 96, "prefill_budget": 32, "page": 16}
    usual |= {"max_adapters": 2, "max_rank": 16, "max_host_adapters": 3}
    return engine_config(model=str(folder), tp=tp, device="cpu", dtype="float32", **usual | settings)


@asynccontextmanager
async def served(group: Any, config: EngineConfig, folder: Path, oracles: Oracles) -> AsyncIterator[World]:
    settings = service_settings(
        "base", read_geometry(Path(config.model)).vocab, config.max_len,
        adapters=config.adapters, adapter_folder=str(folder), most_adapters=config.most_adapters,
    )  # fmt: skip
    async with attached(group) as (client, _), asyncio.timeout(240):
        links = RankLinks(group.adapter_sockets)
        await links.start()
        try:
            yield World(client, AdapterRegistry(settings, client, Text(), links), oracles, folder)  # type: ignore[arg-type]
        finally:
            links.close()


@pytest.mark.parametrize(("member", "tp"), [("31b", 2), ("26b-a4b", 1)])
def test_adapters_come_and_go_while_others_are_served(made: Any, member: str, tp: int) -> None:
    """Three adapters in two slots, loaded while the base answers, then all at once; each greedy token is that of its merged model.
    One is replaced in place by another of its name, one is unloaded, and a fourth takes its room."""
    folder, adapters, oracles = made(member)
    config = config_of(folder, tp)

    async def drive(group: Any) -> None:
        async with served(group, config, adapters, oracles) as world:
            registry = world.registry
            base = asyncio.ensure_future(world.ask_all(("base",)))
            for name in NAMES:
                await registry.load(name, name, in_place=False)
            match = world.compare(await base)
            match += world.compare(await world.ask_all(("base", *NAMES)))
            print(f"{member} TP={tp}: {match}")
            assert match.wrong == 0
            assert match.worst < TOLERANCE
            again = await world.ask_all(NAMES)
            assert world.compare(again, {"a": "b", "b": "c", "c": "base"}).worst > FAULT
            with pytest.raises(InvalidRequest, match="max_host_adapters allows no more"):
                await registry.load("d", "a", in_place=False)
            registry.unload("c")
            with pytest.raises(ModelNotFound):
                registry.id_of("c")
            while "c" not in registry:
                try:
                    await registry.load("c", str(adapters / "a"), in_place=False)
                except InvalidRequest:  # the ranks still hold the old one
                    await asyncio.sleep(0.01)
            registry.unload("b")
            await world.ask_all(("a",))
            await registry.load("c", "b", in_place=True)
            found = world.compare(await world.ask_all(("a", "c")), {"c": "b"})
            assert found.wrong == 0
            assert found.worst < TOLERANCE

    with booted(config) as group:
        asyncio.run(drive(group))


def test_a_request_ends_with_the_adapter_that_was_unloaded(made: Any) -> None:
    """It runs to its end, exact; its pages are not found by what is loaded by the same name afterwards."""
    folder, adapters, oracles = made("31b")
    config = config_of(folder, 1)

    async def drive(group: Any) -> None:
        async with served(group, config, adapters, oracles) as world:
            await world.registry.load("x", "a", in_place=False)
            running = asyncio.ensure_future(world.ask_all(("x",)))
            await asyncio.sleep(0.02)
            world.registry.unload("x")
            assert world.compare(await running, {"x": "a"}).worst < TOLERANCE
            await world.registry.load("x", "b", in_place=False)
            assert world.compare(await world.ask_all(("x",)), {"x": "b"}).worst < TOLERANCE

    with booted(config) as group:
        asyncio.run(drive(group))


def test_what_cannot_be_served_is_refused_and_forgotten(made: Any, tmp_path: Path) -> None:
    """Folders outside, none, links out, bad names, ranks above max_rank, a name that is taken, an adapter that changes nothing:
    each is said; none takes room, and the right one is loaded after all of them."""
    folder, adapters, oracles = made("31b")
    config = config_of(folder, 2, max_host_adapters=2)
    below = tmp_path / "below"
    shutil.copytree(adapters / "a", below / "a")
    shutil.copytree(adapters / "a", below / "nothing")
    tensors = load_file(below / "nothing" / FILE)
    save_file({name: 0 * tensor if "lora_B" in name else tensor for name, tensor in tensors.items()}, below / "nothing" / FILE)
    write(below / "large", oracles["base"], Recipe(9, rank=17))
    (below / "out").symlink_to(adapters / "a")
    cases = [
        ("x", "../a", "no folder below"),
        ("x", str(adapters / "a"), "no folder below"),
        ("x", "out", "no folder below"),
        ("x", "absent", "no folder below"),
        ("x", "a\0", "lora_path"),
        ("x y", "a", "lora_name"),
        ("/x", "a", "lora_name"),
        ("base", "a", "a model is called"),
        ("x", "large", "has rank 17; max_rank is 16"),
        ("x", "nothing", "0 of"),
    ]

    async def drive(group: Any) -> None:
        async with served(group, config, below, oracles) as world:
            for name, path, why in cases:
                with pytest.raises(InvalidRequest, match=why):
                    await world.registry.load(name, path, in_place=False)
            await world.registry.load("x", "a", in_place=False)
            with pytest.raises(InvalidRequest, match="has already been loaded"):
                await world.registry.load("x", "a", in_place=False)
            await world.registry.load("y", "a", in_place=False)
            assert world.compare(await world.ask_all(("x",)), {"x": "a"}).worst < TOLERANCE

    with booted(config) as group:
        asyncio.run(drive(group))
