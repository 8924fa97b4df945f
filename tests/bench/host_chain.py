"""From a result to the next plan, and to the next masks: `python -m tests.bench.host_chain [--masked 8 32] [--features]`.

The real core in its own process, over its own rings and socket; this process plays rank 0 and the replica. As on a device, two
plans are out: with step n's result published step n + 1 begins, and the core has that step's time to make plan n + 2. Measured are
the microseconds from the publication of result n to the rank's receipt of plan n + 2; where some sequences have a grammar, also to
that of the masks of step n + 1, whose forward has begun: all of the batch waits for what exceeds that.

31B geometry at TP=4, every sequence decoding behind 1100 tokens; grammars of random schemas, over and over, in a vocabulary of
262 144 pieces (the nano's, and made-up words), walked at random. The median and the tenth percentile: whatever else runs on the
machine only ever adds.
"""

import argparse
import json
import os
import random
import shutil
import socket
import string
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

import msgspec
import numpy as np

from cluster.children import environment
from deploy.models.resolve import resolve
from engine.channel import RingReader, RingWriter, create_shared, map_shared, ring_bytes
from engine.config import EngineConfig, engine_config
from engine.front.grammar import Thought, grammar, json_answer
from engine.front.reply import Markers
from engine.front.text import TextProcessor
from engine.lifeline import Allocate, BootArgs, BootSocket, Configure, RanksReady, Ready
from engine.logit_adjustments import LogitAdjustments
from engine.plan import DEPTH, NUMBER_MASK, PlanView, encode_rows, read_plan
from engine.protocol import GenerateRequest, Grammar, SamplingParams, ThoughtBudget, pack_tokens
from engine.rank_status import StatusBlock
from engine.step_masks import StepMasks, decode_masks
from tests.bench.record import Row, add_record_option, append
from tests.support.engine.core_loop import Front
from tests.support.engine.schemas import members

VOCABULARY = 262_144
PROMPT, TOKENS = 1100, 900
TOKEN, ENDS = 1000, (1, 106)  # what a row without a mask gives; ids that end a reply


class CoreProcess:
    """A core that this process boots. plans, masks, results: the rank's ends of its rings; front: the replica's of its socket."""

    def __init__(self, config: EngineConfig, pages: tuple[int, int]) -> None:
        shared = {name: create_shared(name, ring_bytes(1)) for name in ("plan", "result", "masks", "media")}
        shared["status"] = create_shared("status", StatusBlock.size(2))
        (lifeline, theirs), (ours, front) = socket.socketpair(), socket.socketpair()
        args = BootArgs(
            index=1, tp=1, parent=os.getpid(), lifeline=theirs.fileno(), reduce=-1, front=front.fileno(), store="",
            spin=200, **shared,
        )  # fmt: skip
        command = [sys.executable, "-m", "engine.core.loop", msgspec.json.encode(args).decode()]
        descriptors = (theirs.fileno(), front.fileno(), *shared.values())
        self.process = subprocess.Popen(command, env=environment(dict(os.environ), "cpu"), pass_fds=descriptors)
        self.plans = RingReader(map_shared(shared["plan"]), 1, 0)
        self.masks = RingReader(map_shared(shared["masks"]), 1, 0)
        self.results = RingWriter(map_shared(shared["result"]), 1)
        self._boot = BootSocket(lifeline)
        for message in (Configure(config), Allocate(pages), RanksReady(None)):
            self._boot.send(message)
        assert isinstance(self._boot.receive(), Ready)
        theirs.close()
        front.close()
        self.front = Front(ours)

    def read(self) -> int:
        """Take in what the core has told; tokens in it."""
        try:
            return sum(len(output.tokens) for output in self.front.hear())
        except BlockingIOError:
            return 0

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        self.front.sock.close()
        self._boot.sock.close()


class StandInRank:
    """Answers plans: one token a row, never a stop id."""

    def __init__(self, core: CoreProcess) -> None:
        self._core = core
        self._numbers = np.zeros(1024, np.int64)
        self._out: list[PlanView] = []
        self._random = random.Random(1)
        self._masks: deque[StepMasks] = deque()

    def wait(self) -> float:
        """Take the next plan; when it had been read. AssertionError after ten seconds."""
        record = self._polled(self._core.plans)
        now = time.perf_counter()
        plan = read_plan(record)
        for admission in plan.admissions:
            self._numbers[admission.slot] = admission.number & NUMBER_MASK
        self._out.append(plan)
        return now

    def publish(self) -> float:
        """Publish the result of the oldest plan, whose masks, if it has masked rows, have come; when that was done."""
        plan = self._out.pop(0)
        slots = plan.result_slots
        table = np.zeros((len(slots), 5), np.int32)
        table[:, 0], table[:, 1], table[:, 2], table[:, 4] = slots, self._numbers[slots], 1, TOKEN
        if plan.masked:
            masks = self._masks.popleft()
            assert masks.step == plan.step
            allowed = {int(slot): self._one_of(bits) for slot, bits in zip(masks.slots, masks.bits, strict=True)}
            table[:, 4] = [allowed.get(int(slot), TOKEN) for slot in slots]
        self._core.results.write(plan.step, encode_rows(plan.step, table, {}))
        return time.perf_counter()

    @property
    def out(self) -> int:
        """Plans that were read and not answered."""
        return len(self._out)

    def wait_for_masks(self) -> float | None:
        """Take the masks of the oldest plan; when they had been read. None: it has no masked rows."""
        if not self._out[0].masked:
            return None
        record = self._polled(self._core.masks)
        now = time.perf_counter()
        self._masks.append(decode_masks(record))
        return now

    def _polled(self, ring: RingReader) -> bytes:
        """The next record. AssertionError after ten seconds."""
        deadline = time.monotonic() + 10
        while (record := ring.poll()) is None:
            assert time.monotonic() < deadline, "nothing came"
        return record[1]

    def _one_of(self, bits: np.ndarray) -> int:
        """An id that the mask allows; one that ends the reply only where nothing else is."""
        ids = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        others = ids[~np.isin(ids, ENDS)]
        return int(self._random.choice(others if len(others) else ids))


@dataclass(frozen=True)
class Chain:
    """Microseconds from a result, of each step: to the plan behind the next, and to the next step's masks."""

    plans: list[float]
    masks: list[float]


PLAIN = SamplingParams(max_tokens=TOKENS, stop_ids=ENDS)
_ADJUSTMENTS = LogitAdjustments(
    repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5, bias=tuple((number, 1.0) for number in range(200, 500))
)
FEATURES = {
    "penalties": msgspec.structs.replace(PLAIN, adjustments=_ADJUSTMENTS),  # three, and 300 biased ids
    "thinking": msgspec.structs.replace(PLAIN, thought=ThoughtBudget(2 * TOKENS, 100, 101, label=0, begin_call=None, open_label=0)),
}


def requests(sequences: int, grammars: Sequence[str], params: SamplingParams) -> Iterator[GenerateRequest]:
    """The first of them have a grammar."""
    for number in range(sequences):
        prompt = pack_tokens(5 + (number + at) % 1000 for at in range(PROMPT))
        rules = Grammar(grammars[number]) if number < len(grammars) else None
        yield GenerateRequest(id=number, prompt=prompt, params=msgspec.structs.replace(params, grammar=rules))


def measure(
    config: EngineConfig, sequences: int, steps: int, step_s: float, grammars: Sequence[str] = (), params: SamplingParams = PLAIN
) -> Chain:
    """Steps in which all sequences decode."""
    core = CoreProcess(config, (sequences * 40 + 300, sequences * 64 + 200))
    try:
        for request in requests(sequences, grammars, params):
            core.front.send(request)
        core.front.sock.setblocking(False)
        rank, started = StandInRank(core), 0
        rank.wait()
        rank.wait_for_masks()
        while started < 4 * sequences:  # until all decode; with a chunk a step few tokens come
            rank.publish()
            if not rank.out:
                rank.wait()
            rank.wait_for_masks()
            started += core.read()
        while rank.out < DEPTH:
            rank.wait()
        found = Chain([], [])
        for _ in range(steps):
            time.sleep(step_s)
            core.read()
            published = rank.publish()
            if (masked := rank.wait_for_masks()) is not None:
                found.masks.append(1e6 * (masked - published))
            found.plans.append(1e6 * (rank.wait() - published))
    finally:
        core.close()
    return found


def random_grammars(markers: Markers, count: int, answer: str = "item+") -> list[str]:
    """Of objects by random schemas, one behind another: so many of them as `answer` says."""
    schemas = [members(random.Random(seed), 2) for seed in range(count)]
    items = [json_answer(each).replace("answer:", "item:", 1) for each in schemas]
    return [grammar(markers, f"answer: {answer}\n{item}", Thought.none) for item in items]


def made_up_words(known: Iterable[str], count: int) -> list[str]:
    """Words of letters that are not `known`, half of them behind a space."""
    rng, known, words = random.Random(1), set(known), []
    while len(words) < count:
        word = " " * rng.randint(0, 1) + "".join(rng.choices(string.ascii_letters, k=rng.randint(3, 10)))
        if word not in known:
            known.add(word)
            words.append(word)
    return words


def large_tokenizer(folder: Path, to: Path) -> Path:
    """The checkpoint's files in `to`, its tokenizer filled up with made-up words to as many pieces as the model has ids."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    file = to / "tokenizer.json"
    described = json.loads(file.read_text())
    known = described["model"]["vocab"]
    first = 1 + max([*known.values(), *(token["id"] for token in described["added_tokens"])])
    words = made_up_words([piece.replace("\u2581", " ") for piece in known], VOCABULARY - first)
    known |= {word.replace(" ", "\u2581"): number for number, word in enumerate(words, first)}
    file.write_text(json.dumps(described))
    return to


def main() -> None:
    """A line a size."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 100, 256])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=5.0, help="what a step takes the device")
    parser.add_argument("--masked", type=int, nargs="*", default=[], help="of 100 sequences, how many have a grammar")
    parser.add_argument("--features", action="store_true", help="100 sequences with penalties and biases; with budgets of thought")
    add_record_option(parser)
    args = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        model = large_tokenizer(resolve("dummy:31b"), Path(scratch)) if args.masked else resolve("dummy:31b")
        sizes = [(sequences, 0, "") for sequences in args.sequences] + [(100, masked, "") for masked in args.masked]
        for sequences, masked, feature in [*sizes, *((100, 0, feature) for feature in FEATURES if args.features)]:
            config = engine_config(
                model=str(model), tp=4, device="cuda", load_format="dummy", max_len=4096, prefill_budget=2048,
                max_seqs=sequences, core_log="warning",
            )  # fmt: skip
            markers = Markers.of(TextProcessor.load(model))
            assert markers is not None
            params = FEATURES[feature] if feature else PLAIN
            found = measure(config, sequences, args.steps, args.step_ms / 1e3, random_grammars(markers, masked), params)
            beside = f"-masked{masked}" if masked else f"-{feature}" if feature else ""
            rows += described(f"host-chain-b{sequences}{beside}", found)
    append(rows, args.record, "tests.bench.host_chain")


def described(case: str, found: Chain) -> list[Row]:
    """The rows of a case, which are printed."""
    plans, masks = "result in the ring to next plan out of it", "result in the ring to next masks out of theirs"
    rows: list[Row] = []
    for metric, values in ((plans, found.plans), (masks, found.masks)):
        if values:
            tenths = quantiles(values, n=10)
            rows.append((case, f"{metric}, median", median(values), "us"))
            rows.append((case, f"{metric}, tenth percentile", tenths[0], "us"))
    if found.masks:
        rows.append((case, f"{masks}, 90th percentile", quantiles(found.masks, n=10)[-1], "us"))
    for _, metric, value, unit in rows:
        print(f"{case:28} {metric:70} {value:7.0f} {unit}", flush=True)
    return rows


if __name__ == "__main__":
    main()
