"""A fake of all ranks that checks instead of computing: every page slot remembers what stands in it.

An entry is known by its content: the identity of all tokens up to and including its position, so that a page shared by sequences
with an equal prefix is right for each of them, and nothing else is. It runs plans as a rank would (releases, admissions, appends,
then all writes of the step, then all reads) and raises KVFault when a row would read a position whose page slot does not hold that
entry, or when a page number is not one of its pool's.

Logprobs of prompt tokens are numbers made of the prefix up to each. Of media items the content counts, not the tokens; a chunk that
cuts a span, or has a position whose item was not encoded, is a fault, too.

A decode row computes as many positions as it is wide: behind the first, guesses of the next tokens, of which those before the first
wrong one are accepted. What the others wrote is wrong, perhaps not finite, and stays in its pages until it is written again.
"""

import struct
from collections import deque
from collections.abc import Callable, Sequence

from engine.adapters import NO_ADAPTER
from engine.core.pending import MediaUses
from engine.geometry import KVGroup
from engine.plan import Admission, PromptRow, ResultRow, StepPlan, StepResult, encode_plan
from engine.protocol import MediaItem, PlacedItem, PromptLogprobs
from tests.support.engine.plans import PrefillChunk, decode_plan, decode_rows, result_of

Model = Callable[[int, int, int], int]
_MASK = (1 << 63) - 1


class KVFault(AssertionError):
    """A row would have read what is not its own, or an equal prefix's, K and V."""


def identity(before: int, token: int) -> int:
    """Of a prefix, from the identity of all of it but its last token."""
    return ((before ^ (token + 1)) * 0x5851F42D4C957F2D + 0x14057B7EF767814F) & _MASK


def root_of(adapter: int) -> int:
    """Of no tokens: nothing that another adapter computes is the same."""
    return 0 if adapter == NO_ADAPTER else identity(1 << 40, adapter)


def logprob_of(prefix: int) -> float:
    """What stands for the logprob of the last token of a prefix of that identity."""
    return -float(prefix & 0xFFFF)


def contents(tokens: Sequence[int], media: Sequence[MediaItem]) -> list[int]:
    """What stands at each position: a token, or a part of a media item."""
    found = list(tokens)
    for item in media:
        found[item.first : item.end] = [int.from_bytes(item.digest[:4]) + at for at in range(item.length)]
    return found


class KVMachine:
    """Executor with the two-step depth of the real one: `submit` a plan, `result` of the oldest comes when asked for.

    `model(prefix, position, seed)` gives the token at `position` behind a prefix of that identity; `guess(prefix, position)` says
    whether a draft is right there; `nan(prefix)` whether the logits behind it are finite.
    """

    def __init__(
        self, groups: tuple[KVGroup, ...], pages: tuple[int, ...], slots: int, max_len: int, model: Model
    ) -> None:
        self.groups = groups
        self.pages = pages
        width = -(-max_len // groups[0].page) + 1
        self.tables = [[[0] * width for _ in range(slots)] for _ in groups]  # by group and slot: pages
        self.entries = [[[0] * group.page for _ in range(count)] for group, count in zip(groups, pages, strict=True)]
        self.prefixes = [[0] * (max_len + 2) for _ in range(slots)]  # identity of each slot's tokens up to a position
        self.number = [0] * slots
        self.length = [0] * slots
        self.seed = [0] * slots
        self.admitted: dict[int, Admission] = {}
        self.media: dict[int, Sequence[MediaItem]] = {}  # by the seeds of their requests
        self.encoded: list[set[int]] = [set() for _ in range(slots)]  # items since the slot's admission
        self.encodes = self.spans = 0
        self.encoding = self.ended = 0  # plans that encode, and those whose encodes have ended
        self.slow: Callable[[int], bool] = lambda step: False  # whether encoders go on during this step
        self.unread = deque[tuple[int, list[PlacedItem]]]()  # plans that encode, whose media a rank has still to read
        self.submitted = self.encodes_read = 0  # plans that encode: so far, and those of which every rank has read the media
        self.reads_late: Callable[[int], bool] = lambda step: False  # whether no media are read during this step
        self.freed: list[range] = []  # media memory
        self.model = model
        self.poisoned: list[dict[int, set[int]]] = [{} for _ in groups]  # pages where NaN stands: at which positions
        self.queue: deque[StepPlan] = deque()
        self.reads = 0
        self.rejected = 0
        self.largest = 0  # bytes of a plan
        self.guess: Callable[[int, int], bool] = lambda prefix, position: True
        self.nan: Callable[[int], bool] = lambda prefix: False
        self.empty: Callable[[int], bool] = lambda prefix: False
        self.drafted: dict[int, list[int]] = {}  # behind each slot's last token

    def submit(self, plan: StepPlan) -> None:
        """Queue a plan, through its bytes."""
        if plan.encodes:
            self.submitted += 1
            self.unread.append((self.submitted, [item for _, item in plan.encodes]))
        data = encode_plan(plan)
        self.largest = max(self.largest, len(data))
        decoded = decode_plan(data)
        assert (decoded.step, decoded.chunks, decoded.rows) == (plan.step, plan.chunks, plan.rows)
        self.queue.append(decoded)

    def result(self) -> StepResult:
        """Run the oldest plan."""
        plan = self.queue.popleft()
        if not self.reads_late(plan.step):
            self.read_media()
        self._apply(plan)
        rows = [(chunk.slot, chunk.start, chunk.end) for chunk in plan.chunks]
        decodes = [(slot, self.length[slot], self.length[slot] + width) for slot, width, _ in decode_rows(plan)]
        for chunk in plan.chunks if self.media else ():
            self._check_media(plan, chunk)
        guessed = [self._verify(slot, start, end) for slot, start, end in decodes]
        for slot, start, end in rows + decodes:
            self._write(slot, start, end)
        for slot, start, end in rows + decodes:
            self._read(slot, start, end)
        for slot, start, end in decodes:
            self._poison(slot, start + 1, end)
        for slot, _, end in rows:
            self.length[slot] = end
        results = [self._sample(chunk.slot, chunk.end, []) for chunk in plan.chunks if chunk.samples]
        results += [self._sample(slot, start + 1, drafts) for (slot, start, _), drafts in zip(decodes, guessed, strict=True)]
        prompts = [row for chunk in plan.chunks if (row := self._prompt_row(chunk.slot, chunk.start, chunk.end)) is not None]
        for row in results if plan.drafts else ():
            self.drafted[row.slot] = self._draft(row.slot, plan.drafts)
        drafts = [self.drafted[row.slot] for row in results] if plan.masked and plan.drafts else ()
        self.ended = self.ended if self.slow(plan.step) else self.encoding
        return result_of(plan.step, results, prompts, drafts)._replace(ended=self.ended)

    def read_media(self) -> None:
        """What plans so far encode."""
        for number, media in self.unread:
            for item in media:
                assert not any(item.place in pages for pages in self.freed), "an item to encode has no data"
            self.encodes_read = number
        self.unread.clear()

    def free_from(self, uses: MediaUses) -> None:
        """What may be freed now, as the core does."""
        while (pages := uses.next_free(self.encodes_read)) is not None:
            assert not any(pages.start in freed for freed in self.freed), "memory is freed twice"
            self.freed.append(pages)

    def _check_media(self, plan: StepPlan, chunk: PrefillChunk) -> None:
        media = self.media.get(self.seed[chunk.slot], ())
        begun = {at for at, item in enumerate(media) if item.first < chunk.end and item.end > chunk.start}
        if missing := begun - self.encoded[chunk.slot]:
            raise KVFault(f"slot {chunk.slot} computes positions of items {missing}, which were not encoded")
        spans = [span for item in media for span in item.spans if span[0] < chunk.end and span[1] > chunk.start]
        if any(begin < chunk.start or end > chunk.end for begin, end in spans):
            raise KVFault(f"{chunk} cuts one of {spans}")
        told = plan.spans[chunk.first_span : chunk.first_span + chunk.spans]
        if [tuple(span) for span in told] != spans:
            raise KVFault(f"{chunk} has the spans {spans}, not {told}")
        self.spans += len(spans)

    def _prompt_row(self, slot: int, start: int, end: int) -> PromptRow | None:
        """Of positions [start, end), those that give a prompt's next token its logprob."""
        admission = self.admitted[slot]
        end = min(end, admission.prompt - 1)
        if admission.params.prompt_logprobs is None or start >= end:
            return None
        values = [logprob_of(prefix) for prefix in self.prefixes[slot][start + 1 : end + 1]]
        words = b"".join(struct.pack("<fi", value, 1) for value in values)
        return PromptRow(slot, self.number[slot], PromptLogprobs(start + 1, 0, words))

    def _apply(self, plan: StepPlan) -> None:
        for release in plan.releases:
            self.tables[release.group][release.slot][release.first : release.first + release.count] = [0] * release.count
        held = {slot: [table[slot] for table in self.tables] for slot in (admission.slot for admission in plan.admissions)}
        for admission in plan.admissions:
            slot, before = admission.slot, root_of(admission.adapter)
            self.admitted[slot] = admission
            self.number[slot], self.length[slot], self.seed[slot] = admission.number, admission.cached, admission.params.seed
            prefixes, self.encoded[slot] = self.prefixes[slot], set()
            for at, token in enumerate(contents(admission.tokens, self.media.get(admission.params.seed, ()))):
                before = prefixes[at] = identity(before, token)
            for table in self.tables:
                table[slot] = [0] * len(table[slot])
        self.encoding += bool(plan.encodes)
        for slot, item in plan.encodes:
            own = [(known.first, known.length) for known in self.media[self.seed[slot]]]
            self.encoded[slot].add(own.index((item.first, item.length)))
            self.encodes += 1
        for zero in plan.zeros:
            self.poisoned[zero.group].pop(zero.page, None)
        for append in plan.appends:
            again = append.slot in held and held[append.slot][append.group][append.index] == append.page
            if append.page in self.poisoned[append.group] and not again:
                raise KVFault(f"page {append.page} of group {append.group} holds NaN and is not zeroed before its next use")
            if not 0 < append.page < self.pages[append.group]:
                raise KVFault(f"page {append.page} is not one of group {append.group}'s {self.pages[append.group]}")
            self.tables[append.group][append.slot][append.index] = append.page

    def _draft(self, slot: int, count: int) -> list[int]:
        """Guess so many tokens behind the slot's last one."""
        drafts = []
        before, first = self.prefixes[slot][self.length[slot]], self.length[slot] + 1
        for at in range(first, first + count):
            right = self._likely(slot, before, at)
            drafts.append(right if self.guess(before, at) else right + 1)
            before = identity(before, drafts[-1])
        return drafts

    def _verify(self, slot: int, start: int, end: int) -> list[int]:
        """The drafts at positions (start, end), which get their identities."""
        drafts = self.drafted.get(slot, [])[: end - start - 1]
        assert len(drafts) == end - start - 1, "a row verifies what was not drafted"
        for at, token in enumerate(drafts, start + 1):
            self.prefixes[slot][at] = identity(self.prefixes[slot][at - 1], token)
        return drafts

    def _poison(self, slot: int, start: int, end: int) -> None:
        """Drafts of positions [start, end) write NaN where the model's logits behind them are."""
        for group, table, poisoned in zip(self.groups, self.tables, self.poisoned, strict=True):
            for at in range(start, end):
                page = table[slot][at // group.page]
                if self.nan(self.prefixes[slot][at]):
                    poisoned.setdefault(page, set()).add(at % group.page)

    def _write(self, slot: int, start: int, end: int) -> None:
        prefixes = self.prefixes[slot]
        for group, table, entries in zip(self.groups, self.tables, self.entries, strict=True):
            size = group.page
            for at, page in enumerate(table[slot][start // size : (end - 1) // size + 1], start // size):
                if not page:
                    raise KVFault(f"slot {slot} writes to the null page of {group.name} in [{start}, {end})")
                first, last = max(start, at * size), min(end, (at + 1) * size)
                entries[page][first - at * size : last - at * size] = prefixes[first:last]
                if self.poisoned[group.index].get(page):
                    self._overwrite(group.index, page, range(first - at * size, last - at * size))

    def _overwrite(self, group: int, page: int, entries: range) -> None:
        """What stood there is gone."""
        left = self.poisoned[group].pop(page).difference(entries)
        if left:
            self.poisoned[group][page] = left

    def _read(self, slot: int, start: int, end: int) -> None:
        prefixes = self.prefixes[slot]
        for group, table, entries in zip(self.groups, self.tables, self.entries, strict=True):
            size, low = group.page, 0 if group.window is None else max(0, start - group.window + 1)
            self.reads += end - low
            held = []
            for page in table[slot][low // size : (end - 1) // size + 1]:
                held += entries[page]
            skipped = low % size
            if held[skipped : skipped + end - low] != prefixes[low:end]:
                at = next(at for at in range(low, end) if held[at - low + skipped] != prefixes[at])
                raise KVFault(f"slot {slot} at [{start}, {end}) reads position {at} of {group.name}: not its own entry")

    def _sample(self, slot: int, position: int, drafts: list[int]) -> ResultRow:
        """The token at `position`, and one more for each draft that was right; the last one is the next row's input."""
        tokens = []
        before = self.prefixes[slot][position - 1]
        if self.nan(before):
            self._poison(slot, position - 1, position)
            return ResultRow(slot, self.number[slot], (), nan=True)
        if self.empty(before):
            return ResultRow(slot, self.number[slot], (), empty=True)
        for draft in [*drafts, None]:
            if tokens and self.silent(slot, position + len(tokens)):
                break
            token = self._token(slot, before, position + len(tokens))
            tokens.append(token)
            before = identity(before, token)
            if draft != token or self.nan(before):
                break
        self.rejected += 1 + len(drafts) - len(tokens)
        self.length[slot] = position + len(tokens) - 1
        self.prefixes[slot][self.length[slot]] = before
        return ResultRow(slot, self.number[slot], tuple(tokens))

    def _likely(self, slot: int, prefix: int, position: int) -> int:
        """What the model would give, if any token may come."""
        return self.model(prefix, position, self.seed[slot])

    def silent(self, slot: int, position: int) -> bool:
        """No token may come there, behind a draft."""
        return False

    def _token(self, slot: int, prefix: int, position: int) -> int:
        """What the model gives at `position` behind a prefix of that identity."""
        return self.model(prefix, position, self.seed[slot])
