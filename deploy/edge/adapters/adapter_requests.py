"""vLLM's bodies of /v1/load_lora_adapter and /v1/unload_lora_adapter."""

from typing import Annotated

from msgspec import Meta

from deploy.edge.bodies.body_reader import BodyReader
from deploy.edge.bodies.key_types import Name
from deploy.edge.http.endpoint import HttpEndpoint
from engine.protocol import FrozenStruct


class LoadAdapterRequest(FrozenStruct):
    """POST /v1/load_lora_adapter. `lora_path`: a folder below adapter_folder. `load_inplace`: it may replace one of its name."""

    lora_name: Annotated[Name, Meta(min_length=1)]
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    load_inplace: bool = False
    is_3d_lora_weight: bool | None = None
    """vLLM must be told how experts are saved; here the tensors show it"""


class UnloadAdapterRequest(FrozenStruct):
    """POST /v1/unload_lora_adapter."""

    lora_name: Annotated[Name, Meta(min_length=1)]


LOAD_ADAPTER = HttpEndpoint(path="/v1/load_lora_adapter", right="adapters")
UNLOAD_ADAPTER = HttpEndpoint(path="/v1/unload_lora_adapter", right="adapters")
LOAD_READER = BodyReader(LoadAdapterRequest, {})
UNLOAD_READER = BodyReader(UnloadAdapterRequest, {"lora_int_id": ()})
