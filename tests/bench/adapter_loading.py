"""What streams notice of an adapter that is loaded beside them: the longest gap between steps, and whether its bytes are right.

python -m tests.bench.adapter_loading --model dummy:31b --shard-of 2 --rank 32     of a rank's shard only adapters have memory

A thread replays a graph of some milliseconds, as a rank does, and times each; the loader's threads read a folder of random numbers,
and copy it to a slot, three times over. What the slot holds then is compared with what host memory has.
"""

import argparse
import json
import socket
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file

from deploy.models.resolve import resolve
from engine.adapter_commands import CommandDone, PlaceAdapter, ReadAdapter, decode_done, encode_command
from engine.geometry import read_geometry
from engine.protocol import FrameReader, frame
from engine.rank.adapter_loader import AdapterLoader
from engine.rank.adapter_store import AdapterStore
from engine.rank.load.adapter_tensors import adapter_pieces
from engine.rank.models.gemma4 import Gemma4
from engine.rank.models.gemma4_weights import TENSORS
from engine.rank.parallel import FirstOfGroup

SLOTS = 4
ROUNDS = 3


def write_adapter(folder: Path, model: Gemma4, rank: int) -> int:
    """Write an adapter of every dense matrix in bf16; returns its bytes."""
    tensors = {}
    for name, piece in adapter_pieces(TENSORS, model.geometry).items():
        if ".experts." in name:
            continue
        module = "base_model.model." + name.removesuffix(".weight")
        tensors[f"{module}.lora_A.weight"] = torch.randn(rank, piece.shape[1]).bfloat16()
        tensors[f"{module}.lora_B.weight"] = torch.randn(piece.shape[0], rank).bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ".*"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return sum(tensor.nbytes for tensor in tensors.values())


class Steps:
    """Steps of some milliseconds in a thread, each waited for; `longest`: ms between two ends since it was reset."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self._work()
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._work()
        self.longest = 0.0
        self.count = 0
        self._running = True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        for _ in range(20 if self._device.type == "cuda" else 1):
            torch.mm(self._rows, self._rows)

    def _run(self) -> None:
        last = time.perf_counter()
        while self._running:
            if self._graph is None:
                time.sleep(0.004)
            else:
                self._graph.replay()
                torch.cuda.current_stream(self._device).synchronize()
            now = time.perf_counter()
            self.longest = max(self.longest, 1e3 * (now - last))
            self.count += 1
            last = now

    def reset(self) -> None:
        self.longest = 0.0

    def stop(self) -> None:
        self._running = False
        self._thread.join()


class Link:
    """The replica's end of a loader's socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._frames = sock, FrameReader()

    def do(self, command: ReadAdapter | PlaceAdapter) -> tuple[CommandDone, float]:
        """Returns the answer, and the seconds that it took."""
        began = time.perf_counter()
        self._sock.sendall(frame(encode_command(command)))
        while not (messages := self._frames.feed(self._sock.recv(1 << 16))):
            continue
        return decode_done(messages[0]), time.perf_counter() - began


def differing(store: AdapterStore, adapter: int, slot: int) -> int:
    """How many of a slot's tensors differ from host memory."""
    count = 0
    for path, host in store._host[adapter].items():
        stack = store._stacks[path]
        for made, right in ((stack.a, host.a), (stack.b, host.b)):
            count += not torch.equal(made.unflatten(0, (stack.experts, -1))[:, slot].cpu(), right)
    return count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="dummy:31b")
    parser.add_argument("--shard-of", type=int, default=2)
    parser.add_argument("--rank", type=int, default=64)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    geometry = read_geometry(resolve(args.model))
    model = Gemma4(geometry, FirstOfGroup(args.shard_of), torch.bfloat16, torch.device("meta"))
    model.device = device  # only adapters have memory
    known = adapter_pieces(TENSORS, geometry)
    store = AdapterStore(model, TENSORS, {name: args.rank for name in known if ".experts." not in name}, SLOTS)
    ours, theirs = socket.socketpair()

    def fail(error: BaseException) -> None:
        raise error

    AdapterLoader(store, theirs, fail).start()
    link = Link(ours)
    with TemporaryDirectory() as folder:
        size = write_adapter(Path(folder), model, args.rank)
        print(f"{args.model}, shard of {args.shard_of}, rank {args.rank}: {size / 1e6:.0f} MB in the folder, {device}", flush=True)
        steps = Steps(device)
        time.sleep(1.0)
        print(f"alone: longest gap {steps.longest:.1f} ms", flush=True)
        for number in range(ROUNDS):
            steps.reset()
            read, read_s = link.do(ReadAdapter(number, number, "it", folder))
            of_read = steps.longest
            steps.reset()
            _, place_s = link.do(PlaceAdapter(number, number, number % SLOTS))
            gaps = f"longest gap {of_read:.1f} ms while it is read, {steps.longest:.1f} ms while it is placed"
            print(f"read {read_s:.2f} s, placed {place_s:.3f} s; {gaps}; {read.error or 'no error'}", flush=True)
        steps.stop()
    wrong = sum(differing(store, number, number % SLOTS) for number in range(ROUNDS))
    print(f"{wrong} tensors differ; compared with another slot {differing(store, 0, SLOTS - 1)} do")


if __name__ == "__main__":
    main()
