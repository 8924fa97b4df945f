"""The scheduler: requests and results in, plans and outputs out. Pure: no clock, no sockets, no
torch.

Per plan, in order of precedence (priority, then arrival):

    1. release   sliding pages that no position after the committed ones can see
    2. run       for each running sequence a decode row, or a prefill chunk
    3. admit     from the queue, while slots, pages and budget last; running prefills get the rest
    4. fill      if the step is still empty, the first prefill that has pages

A sequence short of pages shrinks its chunk or row, then preempts the last sequence. The first
always advances: its worst case fits the empty pools.
"""

from itertools import takewhile

import msgspec

from engine.adapter_slots import AdapterSlots
from engine.config import EngineConfig
from engine.core.admit import Admissions
from engine.core.allocator import Allocator
from engine.core.draft_policy import DraftPolicy
from engine.core.requests import Requests
from engine.core.results import ChunkRow, InFlightStep, Results
from engine.core.sequence import Sequence
from engine.core.step_budget import POLICIES, UNMEASURED, DecodeRows, Prompt, StepBudget, prompt_token_ms
from engine.geometry import KVGroup
from engine.kv_events import CacheEvents
from engine.lifeline import StepTimes
from engine.media_geometry import MediaGeometries
from engine.memory import ENCODER_ROWS, longest_sequence
from engine.plan import MAX_SCORED, ROW_MASKED, Encode, StepPlan, StepResult
from engine.protocol import DraftSwitches, Load, PlacedItem, PoolLoad
from engine.step_shapes import buckets


class StepBuilder(InFlightStep, kw_only=True):
    encoder_rows: int  # positions of media items that it may still encode
    begun: dict[Sequence, int]  # the position at which each one's chunk begins; it ends at `planned`
    drafts: int = 0  # of each sequence, if one may have any
    budget: int = 0  # prompt tokens that it may still get
    scored: int = MAX_SCORED  # prompt tokens with logprobs that it may still get
    decode_rows: int = 0  # of sequences that decode
    prompts: int = 0  # tokens that prompts want

    def encode(self, sequence: Sequence, item: PlacedItem) -> bool:
        if self.plan.encodes and item.length > self.encoder_rows:
            return False
        self.plan.encodes.append(Encode(sequence.slot, item))
        self.encoder_rows -= item.length
        return True


class Scheduler:
    """`schedule` gives the next plan, None if no sequence can use a step. `commit` takes each
    plan's result, in order.

    pages  of each group, null page included
    times  of steps, measured at boot; needed for time limits and to choose drafts
    """

    def __init__(
        self,
        config: EngineConfig,
        groups: tuple[KVGroup, ...],
        pages: tuple[int, ...],
        times: StepTimes | None,
        encoders: MediaGeometries,
    ) -> None:
        self.config = config
        self.encoder_rows = ENCODER_ROWS  # positions of media items that a step encodes at most; one item may have more
        self.cache_events = CacheEvents() if config.kv_events.endpoint else None
        self.allocator = Allocator(groups, pages, caches=config.prefix_cache, events=self.cache_events)
        adapters = AdapterSlots(config.adapter_slots, len(config.adapters))
        longest = longest_sequence(groups, pages)
        self.requests = Requests(self.allocator, config.max_seqs, config.max_len, longest, encoders, adapters)
        self._pending = self.requests.pending
        self._draft_policy = _draft_policy(config, times or UNMEASURED)
        self._results = Results(self.requests, self._draft_policy)
        policy = POLICIES[config.policy]
        self._admissions = Admissions(self.requests, policy, config.prefill_budget)
        self._budget = StepBudget(policy, config.prefill_budget, times, config.step_limit_ms, config.tpot_target_ms)
        self._filled = 0  # prompt tokens of the last step, if it left others
        self._plan = StepPlan(1)  # the next one: pages may change without one that is sent

    @property
    def planned(self) -> int:
        return self._plan.step - 1

    @property
    def in_flight(self) -> int:
        return len(self._results.in_flight)

    @property
    def stuck(self) -> bool:
        """A broken invariant: requests are open, no plan is in flight, and none waits for the host."""
        unfinished = self.requests.unfinished.values()
        if not unfinished or self.in_flight or self.requests.adapters.placing:
            return False
        return not any(sequence.waits for sequence in unfinished)

    def schedule(self) -> StepPlan | None:
        plan = self._plan
        step = StepBuilder(plan, encoder_rows=self.encoder_rows, begun={})
        self._admissions.new_plan(plan)
        self._release_waiting()
        for sequence in self.requests.running:
            if sequence.committed >= sequence.pages.release_at:
                self.allocator.release(sequence, plan)
        shares = self._shares(step)
        self._run_all(step, shares)
        if shares:
            self._admit(step, shares)
            self._spend(step, sum(shares.values()))
            self._run_any(step)
        self._encode_ahead(step)
        _add_chunks(step)
        if not (plan.chunks or plan.rows or plan.admissions or plan.encodes):
            if not self._pending.waiting or self.in_flight:
                return None
            self._pending.release_all()  # no decode row had pages, and no result will come
            self._budget.forget_lateness()
            return self.schedule()
        if plan.encodes:
            self._pending.begin()
            self._budget.encodes()
        plan.drafts = step.drafts if step.drafting else 0
        step.waiting = self._pending.waiting
        self._filled = 0
        if shares:
            step.expected_ms = self._budget.planned(_chunks(step))
            if plan.prompt_tokens < step.prompts and not self._budget.saving:
                self._filled = plan.prompt_tokens
        self._plan = StepPlan(plan.step + 1)
        self._results.in_flight.append(step)
        return plan

    def commit(self, result: StepResult) -> None:
        step = self._results.commit(result)
        self._pending.end(result.ended)
        if not result.took_us:
            return
        took_ms = result.took_us / 1e3
        self.requests.counters.encoder_wait_s += step.waiting * took_ms / 1e3
        if step.expected_ms:
            self._budget.record(step.expected_ms, took_ms, prompts=bool(step.chunks))
        if rows := len(step.rows):
            self._budget.decoded(took_ms, result.table[result.split(rows)[1], 2].mean())
            drafting = min(1.0, step.drafting / rows)
            if not step.crowded:
                self._draft_policy.record(step.size, drafting, step.plan.drafts, step.plan.prompt_tokens, took_ms)

    def load(self) -> Load:
        requests = self.requests
        return Load(
            step=self.planned - self.in_flight,
            waiting=len(requests.waiting),
            running=len(requests.running),
            encoder_waiting=self._pending.waiting,
            waiting_tokens=sum(len(sequence.tokens) for sequence in requests.waiting),
            evicted_pages=self.allocator.cache.evicted_pages,
            drafts=self._draft_policy.drafts,
            draft_positions=self._draft_policy.positions,
            draft_switches=[DraftSwitches(*switches) for switches in self._draft_policy.switches.items()],
            pools=[
                PoolLoad(pool.group.name, pool.total, pool.used, pool.idle)
                for pool in self.allocator.pools
            ],
            **msgspec.structs.asdict(requests.counters),
        )

    def _release_waiting(self) -> None:
        """Continue sequences whose transfers have ended; all if no decode row would be delayed."""
        if self._pending.waiting and not any(sequence.decodable for sequence in self.requests.running):
            self._pending.release_all()
        self._pending.release()

    def _shares(self, step: StepBuilder) -> dict[Sequence, int]:
        prompts = self._prompts()
        for sequence in self._admissions.candidates():  # probably what was cached at its last look-up still is
            if sequence.pages.hit:
                cached = sequence.pages.hit.count * self.allocator.page
            else:
                cached = 0
            prompts[sequence] = Prompt(len(sequence.tokens) - cached, cached)
        if not prompts:
            self._budget.idle()
            step.drafts, step.size = self._draft_policy.choose(len(self.requests.running))
            return {}
        decoding = [sequence for sequence in self.requests.running if sequence.decodable]
        step.decode_rows = len(decoding)
        step.drafts, step.size = self._draft_policy.choose(step.decode_rows)
        decodes = _decode_rows(decoding, step.drafts)
        step.prompts = sum(prompt.tokens for prompt in prompts.values())
        if step.drafts and 0 < self._filled < step.prompts:
            step.crowded = True
            if not self._budget.drafts_pay(decodes.rows, step.drafts, self._draft_policy.tokens):
                step.drafts = 0
                decodes = _decode_rows(decoding, 0)
        step.budget = self._budget.prompt_tokens(decodes.rows + decodes.verified)
        return dict(zip(prompts, self._budget.share(list(prompts.values()), step.budget, decodes), strict=True))

    def _prompts(self) -> dict[Sequence, Prompt]:
        prefills = [sequence for sequence in self.requests.running if sequence.planned < sequence.target]
        return {sequence: Prompt(sequence.ready, sequence.planned) for sequence in prefills if sequence.ready > 0}

    def _run_all(self, step: StepBuilder, shares: dict[Sequence, int]) -> None:
        """Another sequence is preempted only for a single position."""
        add_to_plan = step.plan.rows.append
        add_row = step.rows.append
        single = self.config.widest == 1
        for sequence in list(self.requests.running):
            slot = sequence.slot
            if slot < 0:
                continue  # preempted for one before it
            planned = sequence.planned
            if planned < sequence.target:
                self._prefill(sequence, shares.get(sequence, 0), step)
            elif planned < sequence.limit - 1 and not sequence.waits:
                if not (sequence.number or self._admissions.readmit(sequence)):
                    continue
                may_draft = not single and sequence.drafts.allowed
                width = 1 + min(step.drafts, sequence.drafts.planned, sequence.limit - 2 - sequence.planned) if may_draft else 1
                end = planned + width
                if end > sequence.pages.held:
                    width = self.allocator.fitting(sequence, width) or int(self._preempt_for(sequence, 1))
                    if not width:
                        continue
                    end = planned + width
                    self.allocator.hold(sequence, end, step.plan)
                sequence.planned = end
                if not single:
                    _note_drafts(sequence, step)
                flags = 0
                if sequence.masked:
                    flags = ROW_MASKED
                    step.plan.masked = True
                add_to_plan((slot, end - planned, flags))
                add_row((sequence, sequence.number, end - planned))

    def _prefill(self, sequence: Sequence, share: int, step: StepBuilder, *, may_preempt: bool = True) -> None:
        if sequence.reports_prompt:
            most = min(step.budget, step.scored)
        else:
            most = step.budget
        planned = sequence.planned
        least = sequence.media.uncut_ends(planned + 1)[1] - planned  # a whole span, if one begins there
        count = min(sequence.ready, share, most)
        if count < 1:
            return
        count = max(least, sequence.media.last_end(planned + count) - planned)
        if count > sequence.ready or (count > most and step.begun):
            return  # a span that is longer than the budget has a step without other chunks
        fitting, headroom = self.allocator.fitting, len(self.requests.running) - 1  # a page for each other sequence
        fit = fitting(sequence, count, headroom)
        if fit < least:
            fit = fitting(sequence, count)
        size = sequence.media.last_end(planned + fit) - planned
        if size < least:
            if may_preempt and self._preempt_for(sequence, least):
                size = least
            else:
                size = 0
        if sequence.media.items and size:
            size = self._encode(sequence, size, step)
        if size:
            step.begun.setdefault(sequence, planned)
            self.allocator.hold(sequence, planned + size, step.plan)
            sequence.planned = planned + size
            step.budget = max(0, step.budget - size)
            step.scored -= size if sequence.reports_prompt else 0

    def _encode(self, sequence: Sequence, size: int, step: StepBuilder) -> int:
        """Plan encodes of media items in the next `size` positions; returns how many positions can
        be computed now.

        An item and text near it wait for its encode. With decode rows encodes begin in
        `_encode_ahead`; otherwise none begins while an earlier sequence is at an item.
        """
        media = sequence.media
        decodes = step.decode_rows > 0
        before = takewhile(lambda other: other is not sequence, self.requests.running)
        full = decodes or any(other.before_item for other in before)
        for item in media.items[media.encoded :]:
            if item.first >= sequence.planned + size:
                break
            if item.end > sequence.planned and (full or not step.encode(sequence, item)):
                if not decodes:
                    self._pending.wait(sequence, self._pending.begun + bool(step.plan.encodes))
                if decodes and sequence.is_near(item):
                    return 0
                return max(0, item.first - sequence.planned)
            media.encoded += 1
        return size

    def _encode_ahead(self, step: StepBuilder) -> None:
        """One plan's encodes run at a time; with a time target, one item."""
        begins = not (self._pending.running or self._budget.holds_encodes)
        if not step.decode_rows:
            return
        for sequence in self.requests.running:
            if not sequence.before_item or "transfer" in sequence.waits:
                continue
            media = sequence.media
            end = sequence.planned + self.config.prefill_budget
            for item in media.items[media.encoded :]:
                if not begins or item.first >= end:
                    break
                begins = item.end <= sequence.planned or step.encode(sequence, item)
                if begins:
                    media.encoded += 1
                    begins = self.config.tpot_target_ms is None or not step.plan.encodes
            self._pending.wait(sequence, self._pending.begun + bool(step.plan.encodes))

    def _admit(self, step: StepBuilder, shares: dict[Sequence, int]) -> None:
        for sequence in self._admissions.admit() if step.budget else ():
            self._prefill(sequence, shares.get(sequence, 0), step, may_preempt=False)
            if not step.budget:
                return

    def _spend(self, step: StepBuilder, planned: int) -> None:
        chunks = _chunks(step)
        if sum(chunk.tokens for chunk in chunks) >= planned:
            return
        prompts = self._prompts()
        rest = self._budget.share_rest(list(prompts.values()), step.budget, chunks)
        for sequence, share in zip(prompts, rest, strict=True):
            self._prefill(sequence, share, step, may_preempt=False)

    def _run_any(self, step: StepBuilder) -> None:
        for sequence in list(self.requests.running) if step.budget else ():
            if step.begun or step.plan.rows or sequence.slot < 0:
                return
            self._prefill(sequence, sequence.ready, step)

    def _preempt_for(self, sequence: Sequence, count: int) -> bool:
        """False if preempting all younger sequences is not enough."""
        while self.allocator.fitting(sequence, count) < count:
            youngest = self.requests.running[-1]
            if youngest is sequence:
                return False
            self.requests.preempt(youngest)
        return True


def _draft_policy(config: EngineConfig, times: StepTimes) -> DraftPolicy:
    if config.mtp.drafts == "auto":
        numbers = config.drafts
    else:
        numbers = config.drafts[-1:]
    known = [points for drafts, points in times.drafts if drafts in numbers]
    return DraftPolicy(numbers, buckets(config.max_seqs), known, prompt_token_ms(times))


def _decode_rows(decoding: list[Sequence], drafts: int) -> DecodeRows:
    verified = sum(min(drafts, sequence.drafts.planned) for sequence in decoding)
    return DecodeRows(len(decoding), sum(sequence.planned for sequence in decoding), verified, drafts)


def _note_drafts(sequence: Sequence, step: StepBuilder) -> None:
    step.drafting += sequence.drafts.allowed
    if sequence.drafts.allowed:
        sequence.drafts.planned = step.drafts
    else:
        sequence.drafts.planned = 0


def _chunks(step: StepBuilder) -> list[Prompt]:
    return [Prompt(sequence.planned - start, start) for sequence, start in step.begun.items()]


def _add_chunks(step: StepBuilder) -> None:
    plan = step.plan
    for sequence, start in step.begun.items():
        end = sequence.planned
        samples = sequence.planned == sequence.target
        spans = [span for span in sequence.media.spans if start <= span[0] < end]
        plan.chunks.append((sequence.slot, start, end, end - samples, len(plan.spans), len(spans)))
        plan.spans += spans
        step.chunks.append(ChunkRow(sequence, sequence.number, end, samples))
        if samples:
            plan.masked |= sequence.masked
            _note_drafts(sequence, step)
