"""A second architecture's model: logits of the next id = (row of the id before) E^T; no K or V."""

from typing import Any

import torch
from torch import Tensor

from engine.geometry import Geometry
from engine.rank.batch import ForwardBatch
from engine.rank.models.architecture import Model
from engine.rank.models.layers import VocabTable


class Bigram(Model):
    """Two tables: of the id before, and of the next one."""

    def __init__(self, geometry: Geometry, parallel: Any, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(geometry, parallel, dtype, device)
        self.first = VocabTable(self, geometry.vocab, geometry.hidden)
        self.second = VocabTable(self, geometry.vocab, geometry.hidden)
        self.frequencies = {}

    @property
    def head(self) -> VocabTable:
        return self.second

    def embed(self, ids: Tensor, _: object) -> Tensor:
        return self.first(ids)

    def states(self, batch: ForwardBatch, _attention: object, _peers: object = None) -> tuple[Tensor, Tensor]:
        ids = batch.ids if batch.logit_rows is None else batch.ids[batch.logit_rows]
        h = self.first(ids)
        return h, h
