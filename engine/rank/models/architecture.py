"""Interfaces of text models and media encoders."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from engine.media_geometry import MediaGeometry
from engine.rank.attention.base import AttentionBackend
from engine.rank.batch import ForwardBatch, RopeTensors
from engine.rank.models.layers import VocabTable
from engine.rank.parallel import Single
from engine.rank.products import Exchange, Peers
from engine.rank.shard import Shard
from kernels.norm import rms_norm

Launches = Generator[None, None, Tensor]  # launches a piece at a time: yields between pieces, returns their result


class Model(Shard, ABC):
    frequencies: RopeTensors

    @property
    @abstractmethod
    def head(self) -> VocabTable:
        """This rank's slice of the output table, before the soft cap."""

    @abstractmethod
    def embed(self, ids: Tensor, exchange: Exchange) -> Tensor:
        """ids int32 [R] -> scaled rows [R, hidden]."""

    @abstractmethod
    def states(self, batch: ForwardBatch, attention: AttentionBackend, peers: Peers = None) -> tuple[Tensor, Tensor]:
        """[R, hidden] each, of `batch.logit_rows`: the last residual, and its final norm. Writes K and V.

        peers: the ranks' inboxes, or sequence-parallel norms for many rows; None: collectives.
        """


class MediaEncoder(Shard, ABC):
    """Encodes media into rows that replace their placeholders' embeddings. Not cut over ranks."""

    def __init__(self, geometry: MediaGeometry, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(geometry, Single(), dtype, device)
        self.out = self.matrix(geometry.model, geometry.output)

    @abstractmethod
    def inputs(self, data: Tensor) -> list[Tensor]:
        """A medium's data -> consecutive views, encoded separately: a picture, or each frame of a
        video."""

    @abstractmethod
    def rows(self, one: Tensor) -> int:
        """Rows of one input."""

    @abstractmethod
    def largest(self) -> list[Tensor]:
        """Inputs that need as much memory as any batch."""

    def warm(self, *, graphs: bool) -> None:  # noqa: ARG002 (a tower's)
        self(self.largest())

    @abstractmethod
    def encoded(self, batch: Sequence[Tensor]) -> Launches:
        ...

    def pieces(self, batch: Sequence[Tensor]) -> Launches:
        return functional.linear(rms_norm((yield from self.encoded(batch)), None, self.geometry.eps), self.out.weight)

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        """Inputs on the device -> rows [n, hidden of the text model], in order."""
        pieces = self.pieces(batch)
        while True:
            try:
                next(pieces)
            except StopIteration as end:
                return end.value
