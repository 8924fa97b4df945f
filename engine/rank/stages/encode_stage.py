"""Encodes media into soft tokens, which replace embeddings in the forward.

    encoders' stream   | layer | layer | ... | layer |           a piece is launched between steps, once the previous one has ended
    the steps' stream  step   step   step   step     | gather | step with the rows

Each rank encodes a share of a plan's items and gets all rows. A slot's outputs live until its next admission.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from engine.media_memory import MediaReader
from engine.memory import ENCODER_CACHE_BYTES, ENCODER_ROWS
from engine.plan import Admission, PlanView
from engine.protocol import MediaItem, MediaKind, PlacedItem
from engine.rank.batch import Chunk, SoftTokens
from engine.rank.models.architecture import MediaEncoder
from engine.rank.output_cache import EncodedRows, Key, OutputCache
from engine.rank.parallel import Parallel
from engine.rank.step_clock import DeviceEvent, Stopwatch, record_event
from engine.rank.upload import uploaded
from engine.rank_status import EncoderFigures

_DTYPES: dict[MediaKind, torch.dtype] = {"image": torch.uint8, "video": torch.uint8, "audio": torch.float32}
_COUNTED_AS: dict[MediaKind, str] = {"image": "images", "video": "frames", "audio": "clips"}


@dataclass
class EncodedItem:
    """positions int64 [n] of an item's soft tokens, ascending; output: once gathered."""

    item: MediaItem
    positions: np.ndarray
    output: EncodedRows | None = None


@dataclass(frozen=True)
class EncodeShare:
    encoder: MediaEncoder
    items: Sequence[MediaItem]
    inputs: Sequence[Tensor]  # of this rank, on the host
    counts: Sequence[int]  # rows by rank; one number if every rank makes all
    parts: list[Tensor] = field(default_factory=list)


class EncodeStage:
    """host: bytes of outputs cached on the host."""

    def __init__(
        self, encoders: Mapping[MediaKind, MediaEncoder], device: torch.device, parallel: Parallel, host: int, media: MediaReader
    ) -> None:
        self._media = media
        self._encoders = encoders
        self._device = device
        self._parallel = parallel
        self._slot_items = defaultdict[int, list[EncodedItem]](list)
        self._cache = OutputCache(device, ENCODER_CACHE_BYTES, host)
        self._stopwatch = Stopwatch(device)
        self._counts = Counter[str]()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))  # weights were written there
        self._plans = 0  # that encode, so far; of the last one:
        self._items: list[EncodedItem] = []  # without rows yet
        self._outputs: dict[Key, EncodedRows] = {}
        self._shares: list[EncodeShare] = []
        self._pieces: Iterator[None] | None = None  # not launched yet
        self._end: DeviceEvent | None = None  # of the last piece that was launched

    def warm(self, *, graphs: bool) -> None:
        with torch.cuda.stream(self._stream):  # stream None: the current stream
            for encoder in set(self._encoders.values()):
                encoder.warm(graphs=graphs)

    @property
    def figures(self) -> EncoderFigures:
        """Figures since boot; the time is of ended work."""
        cache = self._cache
        return EncoderFigures(
            self._stopwatch.us,
            cached_bytes=cache.on_device.bytes,
            host_bytes=cache.on_host.bytes,
            host_hits=cache.host_hits,
            evictions=cache.evictions,
            **self._counts,
        )

    @property
    def ended(self) -> int:
        """Plans whose encodes have ended."""
        running = self._pieces is not None or (self._end is not None and not self._end.query())
        return self._plans - running

    @property
    def read(self) -> int:
        """Plans with encodes whose media are read."""
        return self._plans - bool(self._media.left)

    def admit(self, admissions: Sequence[Admission]) -> None:
        for admission in admissions:
            self._slot_items.pop(admission.slot, None)

    def encode(self, plan: PlanView) -> None:
        """Begin the encodes of a plan."""
        self._gather()
        items = [item for _, item in plan.encodes]
        asked = {_key(item): item for item in items}
        self._outputs = {key: output for key in asked if (output := self._cache.take(key)) is not None}
        new = [item for key, item in asked.items() if key not in self._outputs]
        of_kinds = ((encoder, [item for item in new if item.kind == kind]) for kind, encoder in self._encoders.items())
        self._shares = [self._share_out(encoder, items) for encoder, items in of_kinds if items]
        self._items = [EncodedItem(item, np.concatenate([np.arange(*run) for run in item.runs])) for item in items]
        for (slot, _), encoded in zip(plan.encodes, self._items, strict=True):
            self._slot_items[slot].append(encoded)
        self._pieces = self._launches()
        self._end = None
        self._plans += 1
        self._counts.update(queries=len(items), hits=len(items) - len(new))
        for item in new:
            self._counts[_COUNTED_AS[item.kind]] += item.shape[0] if item.kind == "video" else 1
            self._counts["rows"] += item.soft_tokens

    @torch.inference_mode()
    def advance(self) -> bool:
        """Read a piece of data or, after the last, launch the next piece if the device has ended
        the previous one."""
        if self._media.advance():
            return True
        if self._pieces is None or (self._end is not None and not self._end.query()):
            return False
        self._launch(self._pieces)
        return True

    def _launch(self, pieces: Iterator[None]) -> None:
        with torch.cuda.stream(self._stream), self._stopwatch.timed():
            if next(pieces, True):
                self._pieces = None
            self._end = record_event(self._device)

    def _launches(self) -> Iterator[None]:
        for share in self._shares:
            for batch in batches(share.encoder, share.inputs):
                share.parts.append((yield from share.encoder.pieces([uploaded(one, self._device) for one in batch])))

    def _gather(self) -> None:
        """Launch what is left, gather rows on the steps' stream, cache them. Reads unread data, does not wait for the device."""
        self._media.finish()
        while self._pieces is not None:
            self._launch(self._pieces)
        if self._end is not None and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).wait_event(self._end)
        for share in self._shares:
            rows = self._gathered_rows(share).split([item.soft_tokens for item in share.items])
            self._outputs |= {_key(item): EncodedRows(own.clone()) for item, own in zip(share.items, rows, strict=True)}
        for key, output in self._outputs.items():
            self._cache.put(key, output)
        for encoded in self._items:
            encoded.output = self._outputs[_key(encoded.item)]
        self._items = []
        self._outputs = {}
        self._shares = []

    def soft_tokens(self, chunks: Sequence[Chunk]) -> SoftTokens | None:
        """Drops items that end in a chunk."""
        reached = [(chunk, item) for chunk in chunks for item in self._slot_items[chunk.slot] if item.positions[0] < chunk.end]
        if any(encoded.output is None for _, encoded in reached):
            self._gather()
        places = []
        rows = []
        for chunk, encoded in reached:
            first, last = np.searchsorted(encoded.positions, (chunk.start, chunk.end)).tolist()
            places.append(encoded.positions[first:last] + (chunk.offset - chunk.start))
            assert encoded.output is not None
            rows.append(encoded.output.rows[first:last].to(self._device, non_blocking=True))
        for chunk in chunks:
            self._slot_items[chunk.slot] = [left for left in self._slot_items[chunk.slot] if left.item.end > chunk.end]
        if not places:
            return None
        return SoftTokens(uploaded(torch.from_numpy(np.concatenate(places)), self._device), torch.cat(rows))

    def _share_out(self, encoder: MediaEncoder, items: Sequence[PlacedItem]) -> EncodeShare:
        inputs: list[Tensor] = []
        places: list[int] = []
        for item in items:
            data = torch.empty(item.shape, dtype=_DTYPES[item.kind], pin_memory=self._stream is not None)
            split = encoder.inputs(data)
            inputs += split
            places += accumulate((one.nbytes for one in split[:-1]), initial=item.place)
        rows = [encoder.rows(one) for one in inputs]
        ranks = min(self._parallel.size, len(inputs))
        owners = [(2 * end - count) * ranks // (2 * sum(rows)) for end, count in zip(accumulate(rows), rows, strict=True)]
        own = self._parallel.rank if ranks > 1 else 0
        own_inputs = []
        for one, place, owner in zip(inputs, places, owners, strict=True):
            if owner == own:
                own_inputs.append(one)
                self._media.read_into(one.view(-1).view(torch.uint8).numpy().data, place)
        counts = np.bincount(owners, rows, self._parallel.size if ranks > 1 else 1).astype(int).tolist()
        return EncodeShare(encoder, items, own_inputs, counts)

    def _gathered_rows(self, share: EncodeShare) -> Tensor:
        encoder = share.encoder
        counts = share.counts
        width = share.encoder.out.shape[0]
        for part in share.parts if self._stream is not None else ():
            part.record_stream(torch.cuda.current_stream(self._device))  # made by encoders, and read here
        if len(counts) == 1:
            return torch.cat(share.parts)
        padded = torch.zeros((max(counts), width), dtype=encoder.dtype, device=self._device)
        if share.parts:
            padded[: counts[self._parallel.rank]] = torch.cat(share.parts)
        gathered = self._parallel.all_gather(padded).view(max(counts), -1, width)
        return torch.cat([gathered[:count, rank] for rank, count in enumerate(counts)])


def batches(encoder: MediaEncoder, inputs: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    batch: list[Tensor] = []
    rows = 0
    for one in inputs:
        if batch and rows + encoder.rows(one) > ENCODER_ROWS:
            yield batch
            batch = []
            rows = 0
        batch.append(one)
        rows += encoder.rows(one)
    if batch:
        yield batch


def reaches_encodes(plan: PlanView) -> bool:
    """Whether a chunk reads an item that its own plan encodes."""
    ends = dict(plan.chunks[:, [0, 2]].tolist())
    return any(item.first < ends.get(slot, 0) for slot, item in plan.encodes)


def _key(item: MediaItem) -> Key:
    """Equal bytes of another shape are another picture."""
    return item.digest, item.shape
