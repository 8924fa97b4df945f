"""What a replica asks of its ranks about adapters while they serve, over a socket to each rank.

    replica -> rank   ReadAdapter    read and check a folder; keep the rank's part in host memory
                      PlaceAdapter   copy an adapter to a device slot
                      DropAdapter    forget it
    rank -> replica   CommandDone    one for each command. Other commands overtake a read
"""

import msgspec

from engine.protocol import FrozenStruct


class ReadAdapter(FrozenStruct, tag="read"):
    """`id`: as requests name the adapter to the core; never used twice."""

    number: int
    id: int
    name: str
    folder: str


class PlaceAdapter(FrozenStruct, tag="place"):
    """No row of a running sequence may use the slot."""

    number: int
    id: int
    slot: int


class DropAdapter(FrozenStruct, tag="drop"):
    """An adapter that was not read is no error."""

    number: int
    id: int


class CommandDone(FrozenStruct):
    """`error`: a sentence for the client; the adapter was not read."""

    number: int
    error: str | None = None


AdapterCommand = ReadAdapter | PlaceAdapter | DropAdapter

encode_command = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(AdapterCommand).decode
decode_done = msgspec.msgpack.Decoder(CommandDone).decode
