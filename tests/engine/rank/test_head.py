"""`head: fp8`: each row's best logits are the plain table's, the others those of the e4m3 copy; greedy text is the same."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from engine.config import engine_config
from engine.errors import ConfigError
from engine.geometry import vocab_share
from engine.logit_adjustments import LogitAdjustments
from engine.protocol import GenerateRequest, Output
from engine.quantisation import read_quantisation
from engine.rank.builder import load_rank
from engine.rank.models import layers
from engine.rank.models.gemma4 import Gemma4
from engine.rank.parallel import Parallel, Single
from kernels.packed import fp8_matrix, pack_rows, scaled_product
from kernels.recheck import COUNT, block_of, recheck
from kernels.tiles import MOST_ROWS
from tests.conftest import Nano
from tests.engine.rank.test_drafts import folder_of, guessing, stepping
from tests.support.engine.answers import answers, request, texts
from tests.support.engine.drafting_world import AnyDrafts
from tests.support.engine.format_model import model
from tests.support.engine.recording import config_of
from tests.support.engine.threads import run_ranks

pytestmark = pytest.mark.cpu

TOLERANCE = 1e-5  # of fp32 logits of deviation 1: another order of sums
MEMBERS = ("31b", "26b-a4b", "e2b")
ROWS = 8
Fault = Callable[[Gemma4], None]


def scales_a_row_off(made: Gemma4) -> None:
    copy = made.head.fp8_copy
    assert copy is not None
    copy.scale.copy_(copy.scale.roll(1, 0))


def of_the_next_id(logits: Tensor, x: Tensor, table: Tensor) -> None:
    recheck(logits, x, table.roll(1, 0))


def x_of(folder: Path) -> Tensor:
    """Rows like final ones: near the table's rows of some ids. The table is that of a tied model."""
    table = model(folder, Single(), read_quantisation(folder)).head.head.weight
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, len(table) - 3, (ROWS,), generator=generator)
    x = table[ids] + 0.5 * table.std() * torch.randn(ROWS, table.shape[1], generator=generator)
    return x / (x @ table.T).std()


def found(folder: Path, x: Tensor, tp: int, plant: Fault = lambda _: None, *, exact: bool = False) -> Tensor:
    """Logits fp32 [tp, ROWS, share] of all ranks."""

    def of_rank(parallel: Parallel) -> Tensor:
        made = model(folder, parallel, read_quantisation(folder))
        made.head.add_fp8_copy()
        plant(made)
        return made.head.logits(x, exact=exact)

    return torch.stack(run_ranks(tp, of_rank) if tp > 1 else [of_rank(Single())])


def wrong(given: Tensor, exact: Tensor, near: Tensor) -> float:
    """Largest error of each row's best, which must be exact, and of the others, which are exact or near."""
    share = given.shape[2]
    count = min(COUNT, -(-share // block_of(share)))
    best = near.topk(count).indices
    kept = exact.isfinite()
    others = torch.minimum((given - exact).abs(), (given - near).abs())[kept]
    return max((given - exact).gather(2, best).abs().max().item(), others.max().item())


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("member", MEMBERS)
def test_the_best_logits_are_the_tables(nano: Nano, monkeypatch: pytest.MonkeyPatch, member: str, tp: int) -> None:
    """On any number of ranks, by the formula. Faults are seen: scales a row off, no recheck, one that takes the next id's row."""
    folder = nano(member)
    x = x_of(folder)
    exact = found(folder, x, tp, exact=True)
    table = model(folder, Single(), read_quantisation(folder)).head.head.weight
    share = vocab_share(len(table), tp)
    near = torch.full((tp * share, ROWS), -torch.inf)
    near[: len(table)] = scaled_product(pack_rows(x), fp8_matrix(table), torch.empty(ROWS, len(table))).T
    near = near.view(tp, share, ROWS).transpose(1, 2)
    given = found(folder, x, tp)
    assert wrong(given, exact, near) < TOLERANCE
    assert torch.equal(given.transpose(0, 1).flatten(1).argmax(1), exact.transpose(0, 1).flatten(1).argmax(1))
    assert wrong(found(folder, x, tp, scales_a_row_off), exact, near) > 100 * TOLERANCE
    for fault in (lambda *_: None, of_the_next_id):
        with monkeypatch.context() as patch:
            patch.setattr(layers, "recheck", fault)
            assert wrong(found(folder, x, tp), exact, near) > 100 * TOLERANCE


def test_many_rows_read_the_table(nano: Nano) -> None:
    """Above the rows that our tiles take all logits are exact; up to them not all are."""
    folder = nano("31b")
    x = x_of(folder)
    for rows, are_exact in ((MOST_ROWS, False), (MOST_ROWS + 1, True)):
        many = x.repeat(rows, 1)[:rows]
        assert torch.equal(found(folder, many, 1), found(folder, many, 1, exact=True)) == are_exact


def greedy(numbers: Sequence[int]) -> list[GenerateRequest]:
    asked = [request(number, (16, 12, 16, 8)) for number in numbers]
    return [msgspec.structs.replace(one, params=msgspec.structs.replace(one.params, temperature=0.0)) for one in asked]


def text(folder: Path, tp: int, asked: list[GenerateRequest], **settings: Any) -> dict[int, list[Output]]:
    config = config_of(folder, tp, debug_hash=False, max_len=320, **settings)
    with stepping(config) as step:
        return answers(step, config, asked, every=1)[0]


@pytest.mark.parametrize(("member", "tp"), [("31b", 1), ("26b-a4b", 2), ("e2b", 4)])
def test_greedy_text_is_the_bf16_heads(
    nano: Nano, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, member: str, tp: int
) -> None:
    """With drafts too, and the best alternative is the token. A recheck that takes the next id's row gives another
    text."""
    folder = folder_of(nano, tmp_path, member)
    asked = greedy(range(5))
    expected = text(folder, tp, asked)
    given = text(folder, tp, asked, head="fp8")
    assert texts(given) == texts(expected)
    reported = [out for outs in given.values() for out in outs if out.logprobs]
    assert all(one.top[0][0] == token for out in reported for token, one in zip(out.tokens, out.logprobs, strict=True))
    mtp = {"model": str(folder / "assistant"), "drafts": 4}
    config = config_of(folder, tp, debug_hash=False, max_len=320, head="fp8", mtp=mtp)
    whole = [[*memoryview(one.prompt).cast("i"), *texts(expected)[one.id][0]] for one in asked]
    with stepping(config, partial(guessing, whole, 0.8)) as step:
        drafted, _, _ = answers(step, config, asked, every=1, drafting=AnyDrafts(range(5), (config.max_seqs,), 5))
    assert texts(drafted) == texts(expected)
    assert sum(one.accepted for outs in drafted.values() for one in outs) > 10
    monkeypatch.setattr(layers, "recheck", of_the_next_id)
    assert texts(text(folder, tp, asked, head="fp8")) != texts(expected)


def test_adjusted_rows_and_prompts_read_the_table(nano: Nano) -> None:
    """Drawn tokens under a penalty, and logprobs of prompts, are those of the bf16 head, to the bit. Those without a penalty are
    not."""
    folder = nano("31b")

    def asked(adjustments: LogitAdjustments | None) -> list[GenerateRequest]:
        made = []
        for number in range(4):
            one = request(number, (24,) * 4)
            params = msgspec.structs.replace(one.params, temperature=1.0, top_k=0, top_p=1.0, logprobs=3, prompt_logprobs=2)
            made.append(msgspec.structs.replace(one, params=msgspec.structs.replace(params, adjustments=adjustments)))
        return made

    penalties = LogitAdjustments(presence_penalty=0.5)
    assert text(folder, 1, asked(penalties), head="fp8") == text(folder, 1, asked(penalties))
    plain = text(folder, 1, asked(None), head="fp8"), text(folder, 1, asked(None))
    assert plain[0] != plain[1]
    scored = [[out.prompt_logprobs for out in given[0]] for given in plain]
    assert scored[0] == scored[1]
    assert any(one is not None for one in scored[0])


def test_the_copy_counts_as_weights(nano: Nano) -> None:
    """Also on the meta device, by which `quartet plan` counts: a byte for a number, and a scale for a row."""
    meta = torch.device("meta")
    configs = [config_of(nano("31b"), 1, head=head) for head in ("bf16", "fp8")]
    plain, copied = (load_rank(config, Single(), meta, checked=False).weight_bytes for config in configs)
    geometry = configs[0].geometry
    assert copied - plain == geometry.vocab * (geometry.hidden + 4)


def test_what_no_gpu_does_is_refused(nano: Nano) -> None:
    """On a GPU other numbers than bf16 would be unpacked whole at each step."""
    with pytest.raises(ConfigError, match="head fp8 with dtype float32 is not implemented on a GPU"):
        engine_config(model=str(nano("31b")), device="cuda", dtype="float32", head="fp8")
    with pytest.raises(ConfigError, match="head"):
        engine_config(model=str(nano("31b")), device="cpu", head="int4")
    assert engine_config(model=str(nano("31b")), device="cuda", head="fp8").head == "fp8"
