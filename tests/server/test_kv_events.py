"""Events of the prefix cache over ZeroMQ: a reader that follows them knows what the cache holds."""

import asyncio
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from modules import load

from llmpy import AsyncEngine, LoRARequest, UnsupportedError
from llmpy.cli import main
from llmpy.outputs import KvEvent
from llmpy.router.prefixes import Blocks, chain, root_of, salted
from llmpy.server.kv_events import KvEventPublisher, is_open, maps

files = load(Path(__file__).parents[1] / "helpers/adapter_files.py")
BLOCK = 16
SEEDED = [14359468307579009414, 3403602651247566687]  # hashes of the two blocks of test_a_seed_makes_hashes_equal


@pytest.fixture
def open_engine(tmp_path, write_model):
    made = []

    def make(**options):
        model = write_model(tmp_path)
        made.append(AsyncEngine(model, device="cpu", kv_cache_memory_bytes="256KiB", **{"kv_event_capacity": 4096, **options}))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


class View:
    """A cache rebuilt from its events."""

    def __init__(self):
        self.blocks, self.salts = {}, {}

    def take(self, events):
        for event in events:
            if event["type"] == "BlockStored":
                parent, size = event["parent_block_hash"], event["block_size"]
                for i, key in enumerate(event["block_hashes"]):
                    assert key not in self.blocks
                    self.blocks[key] = (parent, tuple(event["token_ids"][i * size : (i + 1) * size]))
                    self.salts[key] = (event.get("extra_keys") or [None] * (i + 1))[i]
                    parent = key
            elif event["type"] == "BlockRemoved":
                for key in event["block_hashes"]:
                    del self.blocks[key]
            else:
                self.blocks.clear()

    def hit(self, prompt):
        """Leading tokens of a prompt that the cache holds."""
        by_content = {content: key for key, content in self.blocks.items()}
        parent, n = None, 0
        while (parent := by_content.get((parent, tuple(prompt[n : n + BLOCK])))) is not None:
            n += BLOCK
        return n


def test_images_are_extra_keys():
    """A block with tokens of images names their contents; blocks beside it have none."""
    a, b = b"\x01" * 16, b"\x02" * 16
    rows = [(1, None, b"", b""), (2, 1, b"", a + b), (3, 2, b"", b""), (4, None, b"salt", a), (5, 4, b"", b)]
    events = [KvEvent(i, 0, *own, 0, bytes(4 * BLOCK), *rest) for i, (*own, rest) in enumerate(
        (key, parent, (salt, images)) for key, parent, salt, images in rows)]  # fmt: skip
    first, second = maps(events, BLOCK)
    assert first["extra_keys"] == [None, [a.hex(), b.hex()], None]
    assert second["extra_keys"] == [["salt", a.hex()], [b.hex()]]
    assert "extra_keys" not in maps(events[:1], BLOCK)[0]


class Reader(View):
    """A router's view of a cache."""

    def __init__(self, address, subscribes=True):
        super().__init__()
        self.socket = zmq.Context.instance().socket(zmq.SUB if subscribes else zmq.DEALER)
        self.socket.linger, self.socket.rcvtimeo = 0, 60_000
        self.socket.connect(address)
        if subscribes:
            self.socket.subscribe(b"kv@")
        self.numbers, self.topics = [], set()
        self._wanted, self._next = View(), 0

    def join(self, engine):
        """Waits until published events arrive, because a new subscription takes effect late."""
        deadline = time.monotonic() + 60
        while not self.socket.poll(10):
            assert time.monotonic() < deadline
            asyncio.run(engine.reset_prefix_cache())

    def read(self, engine):
        """Reads until this view equals the cache of the engine's events."""
        while events := engine.kv_events(self._next)[1]:
            self._next = events[-1].number + 1
            self._wanted.take(maps(events, BLOCK))
        while self.blocks != self._wanted.blocks:
            topic, number, payload = self.socket.recv_multipart()
            self.topics.add(topic)
            self.numbers.append(int.from_bytes(number, "big"))
            stamp, events = msgspec.msgpack.decode(payload)
            assert abs(stamp - time.time()) < 3600
            self.take(events)


async def run(engine, prompts, tokens=3, **options):
    return [await engine.generate(prompt, max_tokens=tokens, ignore_eos=True, **options) for prompt in prompts]


def prompts(count, length, seed=3):
    return np.random.default_rng(seed).integers(3, 250, (count, length)).tolist()


def test_a_reader_knows_what_is_cached(open_engine, tmp_path):
    engine = open_engine()
    publisher = KvEventPublisher(engine, "kv@host:8000@tiny", f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    reader = Reader(f"ipc://{tmp_path}/events")
    reader.join(engine)
    asked = prompts(12, 70)
    asyncio.run(run(engine, asked, 12))
    reader.read(engine)
    stats = engine._driver.engine.stats()
    assert reader.topics == {b"kv@host:8000@tiny"}
    assert reader.numbers == list(range(reader.numbers[0], reader.numbers[-1] + 1))
    assert len(reader.blocks) == stats["kv_blocks_cached"] and stats["evictions"] > 0
    for prompt in (*asked[-3:], asked[0]):
        expected = min(reader.hit(prompt), (len(prompt) - 1) // BLOCK * BLOCK)
        assert asyncio.run(run(engine, [prompt]))[0].num_cached_tokens == expected
        reader.read(engine)
    asyncio.run(engine.reset_prefix_cache())
    asyncio.run(run(engine, asked[:1], cache_salt="mine"))
    reader.read(engine)
    assert len(reader.blocks) == 4 and [salt for salt in reader.salts.values() if salt] == [["mine"]]

    late = Reader(f"ipc://{tmp_path}/replay", subscribes=False)
    late.socket.send_multipart([b"", (0).to_bytes(8, "big")])
    for number in range(reader.numbers[-1] + 1):
        _, got, payload = late.socket.recv_multipart()
        assert int.from_bytes(got, "big") == number
        late.take(msgspec.msgpack.decode(payload)[1])
    assert late.socket.recv_multipart() == [b"", b"\xff" * 8, b""] and late.blocks == reader.blocks
    publisher.close()


def test_blocks_of_adapters_have_their_names(open_engine):
    """A router finds a prompt's blocks under the adapter's name, and not under another one."""
    engine = open_engine(enable_lora=True, max_loras=2)
    for seed, name in enumerate(("maths", "law")):
        shapes = {info["name"].removesuffix(".weight"): tuple(info["shape"]) for info in engine.weight_info("*_proj.weight")}
        engine.load_adapter(name, files.factors(shapes, 4, seed), {"r": 4, "lora_alpha": 8})
    first, second, third = asked = prompts(3, 40)
    blocks = Blocks()
    asyncio.run(run(engine, [first], lora_request=LoRARequest("maths", 7)))
    asyncio.run(run(engine, [second], cache_salt="mine", lora_request="law"))
    engine.load_adapter("maths", files.factors(shapes, 4, 9), {"r": 4, "lora_alpha": 8})
    asyncio.run(run(engine, [third]))
    events = maps(engine.kv_events()[1], BLOCK)
    assert [(one["lora_name"], len(one["block_hashes"])) for one in events] == [("maths", 2), ("law", 2), (None, 2)]
    for event in events:
        blocks.take(event)
    names, salts = ("maths", "law", None), (None, "mine", None)
    for name, salt in zip(names, salts, strict=True):
        found = [blocks.matched(chain(prompt, BLOCK, root_of(salted(salt, name))), 0.0) for prompt in asked]
        assert found == [2 * (name == each and salt == own) for each, own in zip(names, salts, strict=True)]


def test_arrays(open_engine, tmp_path):
    engine = open_engine()
    publisher = KvEventPublisher(engine, "kv@h@tiny", f"ipc://{tmp_path}/events", style="array")
    reader = Reader(f"ipc://{tmp_path}/events")
    reader.join(engine)
    prompt = prompts(1, 40)[0]
    asyncio.run(run(engine, [prompt]))
    event = ["AllBlocksCleared"]
    while event == ["AllBlocksCleared"]:
        _, _, payload = reader.socket.recv_multipart()
        *_, event = msgspec.msgpack.decode(payload)[1]
    assert event[0] == "BlockStored" and len(event[1]) == 2 and event[2:] == [None, prompt[:32], 16, None, "GPU", None]
    publisher.close()


def test_what_was_read_too_late_shows_as_a_gap(open_engine, tmp_path):
    engine = open_engine(kv_event_capacity=8)
    asyncio.run(run(engine, prompts(10, 70)))
    number, events = engine.kv_events()
    assert len(events) == 8 and events[0].number == number - 8 > 0
    publisher = KvEventPublisher(engine, "kv@h@tiny", f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    late = Reader(f"ipc://{tmp_path}/replay", subscribes=False)
    first = end = b"\xff" * 8
    while first == end:  # nothing was published yet
        late.socket.send_multipart([b"", (0).to_bytes(8, "big")])
        first = late.socket.recv_multipart()[1]
    assert first == (1).to_bytes(8, "big")
    publisher.close()


def test_without_a_capacity_nothing_is_noted(open_engine):
    engine = open_engine(kv_event_capacity=0)
    asyncio.run(run(engine, prompts(1, 40)))
    assert engine.kv_events() == (0, [])


def test_a_seed_makes_hashes_equal(open_engine, tmp_path):
    def stored(seed):
        engine = open_engine(prefix_cache_seed=seed)
        asyncio.run(run(engine, [list(range(5, 45))]))
        return [event.hash for event in engine.kv_events()[1]]

    drawn = [stored(seed) for seed in (7, 7, 8, 2**64 - 1, None, None)]
    assert drawn[0] == drawn[1] == SEEDED and len({tuple(hashes) for hashes in drawn}) == 5
    with pytest.raises(UnsupportedError, match="prefix_cache_seed=7 is not supported yet with kv_event_capacity and data_par"):
        open_engine(prefix_cache_seed=7, data_parallel_size=2)


def test_a_slow_reader_gets_all_that_it_asks_for(open_engine, tmp_path):
    publisher = KvEventPublisher(open_engine(), "kv@h@tiny", f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    publisher._kept.extend((number, b"x" * 4000) for number in range(6000))
    late = Reader(f"ipc://{tmp_path}/replay", subscribes=False)
    late.socket.rcvhwm = 1
    late.socket.send_multipart([b"", (0).to_bytes(8, "big")])
    time.sleep(0.5)
    assert [int.from_bytes(late.socket.recv_multipart()[1], "big") for _ in range(6000)] == list(range(6000))
    assert late.socket.recv_multipart()[1] == b"\xff" * 8
    publisher.close()


@pytest.mark.parametrize(("events", "replay"), [("nowhere", None), ("tcp://lo:0", "tcp://lo:none")])
def test_a_wrong_address_is_told_before_a_model_is_loaded(events, replay, capsys):
    words = ["--kv-events-address", events, *(["--kv-events-replay-address", replay] if replay else [])]
    assert main(["serve", "no/model", *words]) == 1
    assert f"{replay or events}: " in capsys.readouterr().err


def test_an_address_open_to_other_machines_is_reported():
    for address in ("tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://[::]:5557"):
        assert is_open(address), address
    for address in ("tcp://lo:5557", "tcp://127.0.0.1:5557", "ipc:///tmp/x", "inproc://x", "tcp://router.example:5557"):
        assert not is_open(address), address


def test_copies_in_host_memory_are_told(tmp_path, write_model):
    """What pool and host memory hold by events is what they hold; a router finds prompts that only host memory has."""
    from llmpy.router.prefixes import Blocks, chain, root_of

    options = {"kv_cache_memory_bytes": "256KiB", "host_cache_bytes": "512KiB", "kv_event_capacity": 65536}
    with AsyncEngine(write_model(tmp_path), device="cpu", **options) as engine:
        asked, blocks, start = prompts(30, 70), Blocks(), 0
        asyncio.run(run(engine, asked))
        media = {"GPU": set(), "CPU": set()}
        while events := engine.kv_events(start)[1]:
            start = events[-1].number + 1
            for event in maps(events, BLOCK):
                blocks.take(event)
                own = media[event["medium"]]
                (own.update if event["type"] == "BlockStored" else own.difference_update)(event["block_hashes"])
        stats = engine._driver.engine.stats()
        assert len(media["CPU"]) == stats["host_blocks_cached"] > 0 and len(media["GPU"]) == stats["kv_blocks_cached"]
        assert len(blocks) == len(media["GPU"] | media["CPU"]) > len(media["GPU"])
        found = [blocks.matched(chain(prompt, BLOCK, root_of(None)), 0.0) for prompt in asked]
        assert found[0] == 0 and found[-12:] == [4] * 12  # the pool has room for less than these; the oldest are gone
        assert stats["kv_blocks_total"] < 12 * 4
        asyncio.run(engine.reset_prefix_cache())
        asyncio.run(run(engine, [[5] * 20]))
        kinds = [event.kind for event in engine.kv_events(start)[1]]
        assert kinds.count(2) == 1 and 4 not in kinds[kinds.index(2) :]
