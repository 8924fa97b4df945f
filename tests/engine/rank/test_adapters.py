"""Adapters against transformers in fp32, whose weights they are merged into: rows of two adapters and of none in each step."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path

import pytest
import torch
import transformers

from engine.rank.parallel import Single
from engine.rank.products import words
from tests.conftest import Nano
from tests.support.engine import adapted
from tests.support.engine.adapted import FAULT, TOLERANCE, Case, verdicts_of
from tests.support.engine.adapters import Recipe, merge, write
from tests.support.engine.format_model import write_base
from tests.support.engine.paged import Logits
from tests.support.engine.quantised import dequantised, saved
from tests.support.engine.threads import run_ranks
from tests.support.judge.oracle import load_oracle, soft_cap

pytestmark = pytest.mark.cpu

FIRST = Recipe(1, rank=8, experts="fused")
SECOND = Recipe(
    2,
    rank=5,
    experts="each",
    prefix="base_model.model.model.language_model.",
    settings={"use_rslora": True, "rank_pattern": {"o_proj": 17}, "alpha_pattern": {r"layers\.1\..*": 9.0}},
)


def merged(folder: Path, adapters: Mapping[str, str], fault: str = "") -> list[transformers.PreTrainedModel]:
    """Transformers' model with each adapter, and without."""
    return [*(merge(load_oracle(folder), Path(each), fault) for each in adapters.values()), load_oracle(folder)]


def case_of(folder: Path, plain: Path, made: Path) -> Case:
    """Two adapters of the model in `folder`, whose numbers `plain` has for transformers."""
    oracle = load_oracle(plain)
    adapters = {recipe.prefix: str(write(made / str(recipe.seed), oracle, recipe)) for recipe in (FIRST, SECOND)}
    return adapted.case_of(folder, adapters, merged(plain, adapters))


@pytest.fixture(scope="module")
def case(nano: Nano, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    @cache
    def make(member: str) -> Case:
        return case_of(nano(member), nano(member), tmp_path_factory.mktemp("adapters"))

    return make


FAST = {("31b", 1), ("26b-a4b", 4), ("e2b", 2)}  # the others are PEFT's own, or in four bits
SIZES = [("31b", 1), ("31b", 2), ("31b", 4), ("26b-a4b", 1), ("26b-a4b", 2), ("26b-a4b", 4), ("e2b", 1), ("e2b", 2)]


@pytest.mark.parametrize(("member", "tp"), [pytest.param(*each, marks=() if each in FAST else pytest.mark.slow) for each in SIZES])
def test_logits_are_those_of_merged_weights(case: Callable[[str], Case], member: str, tp: int) -> None:
    """Two adapters on every kind of matrix, of other ranks, and a row of none, in chunks and decode rows, on every rank."""
    it = case(member)
    if tp == 1:
        found = it.run(Single())
    else:
        found, *others = run_ranks(tp, it.run)
        assert all(torch.equal(other[place], row) for other in others for place, row in found.items())
    error = it.error(found)
    print(f"{member} TP={tp}: max error {error:.1e}")
    assert error < TOLERANCE


@pytest.mark.parametrize("member", ["31b", "26b-a4b", "e2b"])
def test_rows_with_anothers_adapter_show(case: Callable[[str], Case], member: str) -> None:
    """Planted faults: no row has its adapter; the two are taken for each other."""
    it = case(member)
    assert it.error(it.run(Single(), (-1, -1, -1))) > FAULT
    assert it.error(it.run(Single(), (1, -1, 0))) > FAULT


@pytest.mark.parametrize(
    ("member", "fault"),
    [("31b", "alpha"), ("31b", "swapped"), ("31b", "v"), ("26b-a4b", "swapped"), ("26b-a4b", "expert slowest"), ("e2b", "alpha")],
)
def test_a_wrong_merge_shows(case: Callable[[str], Case], member: str, fault: str) -> None:
    """Planted faults, in what is compared with: alpha is left out, gate and up are swapped, the expert's index in B is slowest, V
    of layers whose V is K's product lacks what is added to K."""
    it = case(member)
    wrong = verdicts_of(merged(it.folder, it.adapters, fault), it.ids)
    assert it.error(it.run(Single()), wrong) > FAULT


@pytest.mark.parametrize("rank", [1, 16, 64])
def test_each_rank_is_exact(nano: Nano, tmp_path: Path, rank: int) -> None:
    """Ranks of 1, of a kernel's tile and of several; the same adapter with an eighth of its alpha is another."""
    folder = nano("12b")
    recipe = Recipe(rank, rank=rank, alpha=2.0 * rank)
    oracle = load_oracle(folder)
    adapters = {"one": str(write(tmp_path / "one", oracle, recipe))}
    adapters["other"] = str(write(tmp_path / "other", oracle, replace(recipe, alpha=0.25 * rank)))
    it = adapted.case_of(folder, adapters, merged(folder, adapters))
    assert it.error(it.run(Single())) < TOLERANCE
    assert it.error(it.run(Single(), (1, -1, 0))) > FAULT


def test_a_step_of_no_adapter_is_the_models(case: Callable[[str], Case]) -> None:
    """Rows without adapters have the model's own bits, beside rows that have them; with the index of an adapter they have not."""
    it = case("31b")
    alone = it.run(Single(), (-1, -1, -1))
    mixed = it.run(Single())
    assert all(torch.equal(alone[place], row) for place, row in mixed.items() if place[0] == 1)
    assert not any(torch.equal(alone[place], row) for place, row in mixed.items() if place[0] == 0)


def test_packed_weights_take_adapters(case: Callable[[str], Case]) -> None:
    """Over FP8 weights adapters add what they add over plain ones: logits differ from those of merged weights by FP8's own error,
    a tenth of what they differ by without the adapters."""
    it = replace(case("31b"), weights="fp8")
    with_adapters, without = it.run(Single()), it.run(Single(), (-1, -1, -1))
    alone = max(spread(it, with_adapters, slot) for slot in (0, 2))
    print(f"FP8 with adapters: {alone:.3f} of the spread; without: {min(spread(it, without, slot) for slot in (0, 2)):.3f}")
    assert alone < 0.1 * min(spread(it, without, slot) for slot in (0, 2))


@pytest.mark.parametrize(("kind", "member", "tp"), [("int4-32", "31b", 2), ("int4-32-zero", "26b-a4b", 2)])
def test_four_bits_take_adapters(tmp_path: Path, kind: str, member: str, tp: int) -> None:
    """Logits are those of the numbers that the folder holds, with adapters merged into them; exchanged adapters show."""
    folder = saved(write_base(tmp_path / "base", member), tmp_path / "saved", kind=kind)
    plain = dequantised(folder, tmp_path / "plain")
    it = case_of(folder, plain, tmp_path)
    found = it.run(Single()) if tp == 1 else run_ranks(tp, it.run)[0]
    print(f"{kind} {member} TP={tp}: max error {it.error(found):.1e}")
    assert it.error(found) < TOLERANCE
    assert it.error(it.run(Single(), (1, -1, 0))) > FAULT


def spread(it: Case, found: Logits, slot: int) -> float:
    """The mean square of the logits' differences, as a part of theirs about their mean."""
    rows = {place[1]: row for place, row in found.items() if place[0] == slot}
    ours = soft_cap(torch.stack(list(rows.values())), it.geometry.softcap)
    right = it.verdicts[slot].logits[list(rows)]
    return ((ours - right).square().mean() / right.var()).item()


def test_every_product_has_a_word_of_its_own() -> None:
    """However many a forward has: in pieces they are more than are made at once."""
    given = list(islice(words(torch.device("cpu")), 1200))
    assert len({word.data_ptr() for word in given}) == len(given)
    assert not torch.cat(given).any()
