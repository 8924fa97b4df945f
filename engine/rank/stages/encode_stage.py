"""Pictures, video and audio become rows in the place of embeddings, before the forward that reads them.

    items of a plan --encoders--> rows, of all items in one batch --> held by slot until a chunk has passed the item's end
                                  cache: rows by digest, on           each rank encodes a share of them, and gets all rows

Outputs belong to a slot until its next admission: a preempted sequence has its items encoded again, or finds them in the cache.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from engine.memory import ENCODER_CACHE_BYTES, ENCODER_ROWS
from engine.plan import PlanView
from engine.protocol import MediaItem, MediaKind
from engine.rank.batch import Chunk, SoftTokens
from engine.rank.models.architecture import MediaEncoder
from engine.rank.output_cache import Key, OutputCache
from engine.rank.parallel import Parallel
from engine.rank.step_clock import Stopwatch
from engine.rank.upload import uploaded
from engine.rank_status import EncoderFigures

_COUNTED_AS: dict[MediaKind, str] = {"image": "images", "video": "frames", "audio": "clips"}


@dataclass(frozen=True)
class EncodedItem:
    """positions int64 [n] of an item's soft tokens, ascending, on the host; rows [n, hidden] in their place;   end: of the item."""

    positions: np.ndarray
    rows: Tensor
    end: int


class EncodeStage:
    """A rank's encoders by what they encode, and their outputs. cached: bytes of outputs that are kept by digest on the device;
    host: and behind them on the host."""

    def __init__(
        self,
        encoders: Mapping[MediaKind, MediaEncoder],
        device: torch.device,
        parallel: Parallel,
        host: int = 0,
        cached: int = ENCODER_CACHE_BYTES,
    ) -> None:
        self._encoders, self._device, self._parallel = encoders, device, parallel
        self._encoded: list[EncodedItem] = []  # of the next plan, in the order of its encodes
        self._held: dict[int, list[EncodedItem]] = {}
        self._cache = OutputCache(device, cached, host)
        self._stopwatch, self._counts = Stopwatch(device), Counter[str]()

    def warm(self) -> None:
        """Run each encoder on as much as it will ever get at once."""
        for encoder in set(self._encoders.values()):
            encoder(encoder.largest())

    @property
    def figures(self) -> EncoderFigures:
        """Since boot; the time is that of what the device has ended."""
        cache = self._cache
        held = {"cached_bytes": cache.on_device.bytes, "host_bytes": cache.on_host.bytes}
        return EncoderFigures(self._stopwatch.us, host_hits=cache.host_hits, evictions=cache.evictions, **held, **self._counts)

    def encode(self, items: Sequence[MediaItem]) -> None:
        """Start the encoders of the next plan's items, those in the cache apart."""
        assert not self._encoded, "the items of a plan were not taken"
        with self._stopwatch.timed():
            outputs = self._outputs(items)
        self._encoded = [EncodedItem(_positions(item), outputs[_key(item)], item.end) for item in items]

    def _outputs(self, items: Sequence[MediaItem]) -> dict[Key, Tensor]:
        """Rows of the items, from the cache or encoders; they are the newest in the cache."""
        asked = {_key(item): item for item in items}
        outputs = {key: rows for key in asked if (rows := self._cache.take(key)) is not None}
        new = {key: item for key, item in asked.items() if key not in outputs}
        for kind, encoder in self._encoders.items():
            of_kind = {key: item for key, item in new.items() if item.kind == kind}
            outputs |= zip(of_kind, self._run(encoder, list(of_kind.values())), strict=True)
        for key, rows in outputs.items():
            self._cache.put(key, rows)
        self._count(items, list(new.values()))
        return outputs

    def _count(self, items: Sequence[MediaItem], encoded: Sequence[MediaItem]) -> None:
        self._counts.update(queries=len(items), hits=len(items) - len(encoded))
        for item in encoded:
            self._counts[_COUNTED_AS[item.kind]] += item.shape[0] if item.kind == "video" else 1
            self._counts["rows"] += item.soft_tokens

    def take(self, plan: PlanView) -> None:
        """Give what was encoded for `plan` to its slots, which new sequences leave empty."""
        for admission in plan.admissions:
            self._held.pop(admission.slot, None)
        for slot, item in zip(plan.encodes[:, 0].tolist(), self._encoded, strict=True):
            self._held.setdefault(slot, []).append(item)
        self._encoded = []

    def holds(self, slots: Iterable[int]) -> bool:
        """Whether any of the slots has an item whose end no chunk has reached."""
        return any(self._held.get(slot) for slot in slots)

    def soft_tokens(self, chunks: Sequence[Chunk]) -> SoftTokens | None:
        """The chunks' rows of a batch that items take; None: none do. Items that end in a chunk are dropped."""
        places, rows = [], []
        for chunk in chunks:
            for item in self._held.get(chunk.slot, ()):
                first, last = np.searchsorted(item.positions, (chunk.start, chunk.end)).tolist()
                places.append(item.positions[first:last] + (chunk.offset - chunk.start))
                rows.append(item.rows[first:last])
            if chunk.slot in self._held:
                self._held[chunk.slot] = [item for item in self._held[chunk.slot] if item.end > chunk.end]
        if not places:
            return None
        return SoftTokens(uploaded(torch.from_numpy(np.concatenate(places)), self._device), torch.cat(rows))

    def _run(self, encoder: MediaEncoder, items: Sequence[MediaItem]) -> list[Tensor]:
        """Rows of each item, in memory of its own."""
        if not items:
            return []
        encoded = self._rows(encoder, [one for item in items for one in encoder.inputs(_data(item))])
        return [rows.clone() for rows in encoded.split([item.soft_tokens for item in items])]

    def _rows(self, encoder: MediaEncoder, inputs: Sequence[Tensor]) -> Tensor:
        """The rows of inputs that lie on the host, in order. Several are shared out: runs of about as many rows."""
        rows = [encoder.rows(one) for one in inputs]
        ranks = min(self._parallel.size, len(inputs))
        owners = [(2 * end - count) * ranks // (2 * sum(rows)) for end, count in zip(accumulate(rows), rows, strict=True)]
        own = self._parallel.rank if ranks > 1 else 0
        mine = [uploaded(one, self._device) for one, owner in zip(inputs, owners, strict=True) if owner == own]
        parts = [encoder(batch) for batch in batches(encoder, mine)]
        if ranks == 1:
            return torch.cat(parts)
        counts = np.bincount(owners, rows, self._parallel.size).astype(int).tolist()
        padded = torch.zeros((max(counts), encoder.width), dtype=encoder.dtype, device=self._device)
        if parts:
            padded[: counts[own]] = torch.cat(parts)
        gathered = self._parallel.all_gather(padded).view(max(counts), -1, encoder.width)
        return torch.cat([gathered[:count, rank] for rank, count in enumerate(counts)])


def batches(encoder: MediaEncoder, inputs: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of inputs that give at most ENCODER_ROWS rows, or of one."""
    batch: list[Tensor] = []
    rows = 0
    if not inputs:
        return
    for one in inputs:
        if batch and rows + encoder.rows(one) > ENCODER_ROWS:
            yield batch
            batch, rows = [], 0
        batch.append(one)
        rows += encoder.rows(one)
    yield batch


def _data(item: MediaItem) -> Tensor:
    """What the encoder gets, on the host."""
    data = np.frombuffer(item.data, np.float32 if item.kind == "audio" else np.uint8)
    return torch.from_numpy(data.reshape(item.shape).copy())


def _positions(item: MediaItem) -> np.ndarray:
    return np.concatenate([np.arange(*run) for run in item.runs])


def _key(item: MediaItem) -> Key:
    """Of the same bytes another shape is another picture."""
    return item.digest, item.shape
