"""The trainer's process of benchmarks/rl.py: tensors of given shapes, packed into buckets for an engine or broadcast to it.

    python benchmarks/rl_trainer.py ipc|nccl cuda:N BUCKET_BYTES

Standard input has the shapes by name as a line of JSON, then one command a line. The answers go to standard output, pickled.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

SEED = 11
HOST = "127.0.0.1"
BARE_BYTES, BARE_TIMES = 1 << 30, 16


def tensors(shapes: Mapping[str, Sequence[int]], device: str) -> dict[str, Any]:
    """Random tensors, the same on every device of a kind."""
    import torch

    torch.manual_seed(SEED)
    made = torch.bfloat16
    return {name: torch.empty(tuple(s), dtype=made, device=device).normal_(0, 0.02) for name, s in shapes.items()}


class Trainer:
    """The trainer's process, for use by the engine's side.

    Args:
        kind: "ipc" or "nccl".
        device: Device of the trainer's tensors.
        shapes: Shapes of the weights, by name.
        bucket_bytes: Most bytes of a bucket (exceeded by at most one tensor), or of a packet.
    """

    def __init__(self, kind: str, device: str, shapes: Mapping[str, Sequence[int]], bucket_bytes: int) -> None:
        command = [sys.executable, __file__, kind, device, str(bucket_bytes)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.tell(json.dumps(shapes))

    def tell(self, line: str) -> None:
        """Sends a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Waits for an answer."""
        stream = self._process.stdout
        assert stream is not None
        (size,) = struct.unpack("=Q", stream.read(8))
        return pickle.loads(stream.read(size))

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def bare(channel: Any) -> float:
    """Seconds of broadcasts of BARE_BYTES, two in flight, whose data is not used."""
    from llmpy.weights.group import Deadline

    deadline = Deadline(120, "the other side", lambda: False)
    begin = time.perf_counter()
    for turn in range(BARE_TIMES + 2):
        if turn >= 2:
            channel.wait(turn % 2, deadline)
        if turn < BARE_TIMES:
            channel.start(turn % 2, BARE_BYTES, deadline)
    return time.perf_counter() - begin


def main() -> None:
    kind, device, bucket_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    shapes = json.loads(sys.stdin.readline())
    weights = tensors(shapes, device)

    def answer(what: object) -> None:
        data = pickle.dumps(what)
        out.write(struct.pack("=Q", len(data)) + data)
        out.flush()

    if kind == "ipc":
        from llmpy.rl import ipc_bucket
        from llmpy.weights.group import packed

        pairs = list(weights.items())
        chunks = packed([t.numel() * t.element_size() for t in weights.values()], bucket_bytes)
        buckets = [ipc_bucket([pairs[i] for i in chunk]) for chunk in chunks]
        answer(buckets)
        sys.stdin.readline()
        return
    from llmpy.rl import WeightSender

    with WeightSender(HOST, 0, 2, device=device, buffer_bytes=bucket_bytes) as sender:
        answer(sender.master_port)
        for line in sys.stdin:
            if line.strip() == "send":
                answer(tuple(sender.send(weights)))
            else:
                answer(bare(sender._channel._channel))


if __name__ == "__main__":
    main()
