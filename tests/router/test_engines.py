"""What the router knows of its engines: blocks, costs, load, addresses, polls that fail."""

import asyncio
import json
import random
from types import SimpleNamespace

import pytest

from llmpy import ConfigError
from llmpy.router.engines import parsed, watch
from llmpy.router.events import as_map
from llmpy.router.handover import prefill_body
from llmpy.router.policy import RUNNING_TOKENS, Chooser, Load, Prompt
from llmpy.router.prefixes import GUESS_S, Blocks, chain, root_of
from llmpy.router.prompts import prompt_of
from llmpy.router.proxy import Options, Router
from llmpy.router.upstream import Broken

IDS = list(range(100, 180))


def stored(names, ids, parent=None, salt=None, **more):
    keys = {"extra_keys": [[salt]] + [None] * (len(names) - 1)} if salt else {}
    event = {"type": "BlockStored", "block_hashes": names, "parent_block_hash": parent, "token_ids": ids, "block_size": 16}
    return event | keys | more


def matched(blocks, ids, salt=None, now=0.0):
    return blocks.matched(chain(ids, 16, root_of(salt)), now)


def test_events_tell_what_is_held():
    blocks = Blocks()
    blocks.take(stored([1, 2, 3], IDS[:48]))
    blocks.take(stored([4], IDS[48:64], parent=3))
    blocks.take(stored([5], IDS[64:], parent=99))  # the block before it is not known
    assert matched(blocks, IDS) == 4 and matched(blocks, IDS[:40]) == 2 and matched(blocks, [1, *IDS]) == 0
    assert matched(blocks, IDS, salt="mine") == 0
    blocks.take(stored([6, 7], IDS[:32], salt="mine"))
    assert matched(blocks, IDS, salt="mine") == 2 and matched(blocks, IDS) == 4
    blocks.take({"type": "BlockRemoved", "block_hashes": [2, 77]})
    assert matched(blocks, IDS) == 1 and len(blocks) == 5
    blocks.take(stored([8], IDS[16:32], parent=1))
    assert matched(blocks, IDS) == 4
    blocks.take(stored([9], IDS[:16], group_idx=1))
    blocks.take(stored([9], []))
    assert len(blocks) == 6
    blocks.take({"type": "AllBlocksCleared"})
    assert matched(blocks, IDS) == 0 and not len(blocks)


def test_blocks_of_equal_text_are_held_until_the_last_goes():
    blocks = Blocks()
    blocks.take(stored([1], IDS[:16]))
    blocks.take(stored([2], IDS[:16]))
    blocks.take({"type": "BlockRemoved", "block_hashes": [1]})
    assert matched(blocks, IDS) == 1
    blocks.take({"type": "BlockRemoved", "block_hashes": [2]})
    assert matched(blocks, IDS) == 0


def test_blocks_with_images_are_not_those_of_their_tokens():
    blocks = Blocks()
    blocks.take(stored([1, 2, 3], IDS[:48], extra_keys=[None, ["image"], None]))
    assert matched(blocks, IDS) == 1
    blocks.take(stored([4, 5], IDS[:32], extra_keys=[["mine", "image"], None]))
    blocks.take(stored([6], IDS[:16], extra_keys=[["mine"]]))
    assert matched(blocks, IDS, salt="mine") == 1 and len(blocks) == 6


def test_a_block_is_held_while_some_memory_has_it():
    """Copies in host memory come without ids; those of blocks that are not known yet count once they are."""
    blocks, host = Blocks(), {"parent_block_hash": None, "token_ids": [], "medium": "CPU", "type": "BlockStored"}
    blocks.take(stored([1, 2], IDS[:32]))
    blocks.take(host | {"block_hashes": [2, 3]})
    blocks.take({"type": "BlockRemoved", "block_hashes": [1, 2], "medium": "GPU"})
    assert matched(blocks, IDS) == 0 and len(blocks) == 1
    blocks.take(stored([1], IDS[:16]))
    assert matched(blocks, IDS) == 2
    blocks.take(stored([3], IDS[32:48], parent=2))
    blocks.take({"type": "BlockRemoved", "block_hashes": [3], "medium": "GPU"})
    assert matched(blocks, IDS) == 3
    blocks.take({"type": "BlockRemoved", "block_hashes": [2, 3], "medium": "CPU"})
    assert matched(blocks, IDS) == 1 and len(blocks) == 1
    assert len(blocks._keys) == len(blocks._media) == 1


def test_random_events_leave_what_is_left():
    """Against a set of the prefixes that are held."""
    rng, blocks, model = random.Random(4), Blocks(), {}
    for step in range(2000):
        if model and rng.random() < 0.4:
            name = rng.choice(list(model))
            del model[name]
            blocks.take({"type": "BlockRemoved", "block_hashes": [name]})
        else:
            ids = tuple(rng.choice((1, 2)) for _ in range(4))
            parents = [None, *(name for name, prefix in model.items() if len(prefix) < 12)]
            parent = rng.choice(parents)
            model[step] = (model[parent] if parent is not None else ()) + ids
            blocks.take(stored([step], list(ids), parent=parent) | {"block_size": 4})
        probe = [rng.choice((1, 2)) for _ in range(12)]
        found = 0
        while found < 3 and tuple(probe[: 4 * found + 4]) in model.values():
            found += 1
        assert blocks.matched(chain(probe, 4, root_of(None)), 0.0) == found


def test_sent_prompts_count_until_events_should_have_come():
    for has_events in (False, True):
        blocks = Blocks(has_events)
        blocks.guess(chain(IDS, 16, root_of(None)), now=10.0)
        assert matched(blocks, IDS, now=10.0) == 5
        assert matched(blocks, IDS, now=10.5 + GUESS_S) == (0 if has_events else 5)
        blocks.guess(chain(IDS[:40], 16, root_of("text")), now=20.0, is_told=False)
        assert matched(blocks, IDS, salt="text", now=1e6) == 2
        assert not blocks._guesses or not has_events


def test_models_and_adapters():
    """A request goes to engines that tell its model; an adapter's blocks are not those of its model."""
    engines = [parsed(f"127.0.0.1:{port}") for port in (1, 2, 3)]
    told = [["a", "a-lora"], ["a"], ["b"]]
    for one, names in zip(engines, told, strict=True):
        one.problem = None
        one._learn_models((200, json.dumps({"data": [{"id": n, "parent": "a" if "-" in n else None} for n in names]}).encode()))
    router = Router(engines=engines, options=Options())
    assert router.able("decode", model=router.known_model("a")) == engines[:2]
    assert router.able("decode", model=router.known_model("a-lora")) == engines[:1]
    assert router.able("decode", model=router.known_model("other")) == engines == router.able("decode", model=None)
    assert [router.is_adapter(name) for name in ("a", "a-lora", "b", None)] == [False, True, False, False]
    engines[2].fail("gone")
    assert "127.0.0.1:3: gone" in router.nobody("decode", "b").message

    async def main():
        made = []
        for model in ("a", "a-lora"):
            fields = {"token_ids": IDS, "model": model}
            passing = SimpleNamespace(fields=fields, router=router, model=model, path="/inference/v1/generate", body=b"")
            made.append(await prompt_of(passing, None))
        assert [one.is_told for one in made] == [True, True] and made[0].keys(16) != made[1].keys(16)
        assert prefill_body("/inference/v1/generate", fields, made[1])[1].count(b"a-lora") == 1

    asyncio.run(main())


def test_ids_do_not_tell_images_apart():
    """A prompt with images is told by its messages, or by its features and ids."""
    router = Router(engines=[parsed("127.0.0.1:1")], options=Options())
    rendered = {"token_ids": IDS, "features": None}

    async def asked(path: str, body: bytes) -> bytes:
        return json.dumps(rendered).encode()

    async def prompt(path: str, **fields: object) -> Prompt:
        return await prompt_of(SimpleNamespace(fields=fields, router=router, model=None, path=path, body=b""), asked)

    async def main():
        talk = [{"role": "user", "content": "hello"}]
        assert (await prompt("/v1/chat/completions", messages=talk)).is_told
        rendered["features"] = features = {"image_urls": ["data:"], "mm_hashes": {"image": ["00"]}}
        assert not (await prompt("/v1/chat/completions", messages=talk)).is_told
        found = [await prompt("/inference/v1/generate", token_ids=IDS, features=each) for each in (features, {"a": 1})]
        assert not found[0].is_told and found[0].keys(16) != found[1].keys(16)

    asyncio.run(main())


def test_arrays_are_events():
    blocks = Blocks()
    blocks.take(as_map(["BlockStored", [1, 2], None, IDS[:32], 16, None, "GPU", None]))
    assert matched(blocks, IDS) == 2
    blocks.take(as_map(["BlockRemoved", [2], "GPU"]))
    assert matched(blocks, IDS) == 1
    blocks.take(as_map(["AllBlocksCleared"]))
    assert matched(blocks, IDS) == 0


def test_the_cheapest_engine_is_chosen():
    """Less to compute wins until requests that run outweigh it; equals take turns."""
    loads, chooser, prompt = [Load() for _ in range(3)], Chooser(), Prompt(list(range(4096)))
    assert [loads.index(chooser.choose(loads, prompt, 0.0)) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    loads[1].blocks.guess(prompt.keys(16)[:64], 0.0)
    assert loads[1].cached(prompt, 0.0) == 1024 and chooser.choose(loads, prompt, 0.0) is loads[1]
    loads[1].running = 1024 // RUNNING_TOKENS - 1
    assert chooser.choose(loads, prompt, 0.0) is loads[1]
    loads[1].others = 2
    assert chooser.choose(loads, prompt, 0.0) is not loads[1]
    loads[0].pending = loads[2].pending = 2048
    assert chooser.choose(loads, prompt, 0.0) is loads[1]
    assert Chooser("load").choose(loads, prompt, 0.0) is not loads[1]
    order = Chooser("round-robin")
    order._number = chooser._number
    assert {id(order.choose(loads, prompt, 0.0)) for _ in range(3)} == {id(one) for one in loads}
    assert chooser.choose([], prompt, 0.0) is None


def test_a_cached_prompt_leaves_its_last_token():
    load, prompt = Load(), Prompt(IDS[:32])
    load.blocks.guess(prompt.keys(16), 0.0)
    assert load.cached(prompt, 0.0) == 16


def test_addresses():
    engine = parsed("http://127.0.0.1:8001,tcp://127.0.0.1:5557,tcp://127.0.0.1:5558", "decode")
    assert engine.events == ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558") and engine.kind == "decode"
    assert parsed("localhost:8001/v1").url == "http://localhost:8001" and parsed("a:1").events is None
    for wrong in ("ftp://a:1", "http://", "http://a:99999", "http://a:1/else", "http://a:1,5557", "a:1,b://1,c://2,d://3"):
        with pytest.raises(ConfigError):
            parsed(wrong)


def test_what_an_engine_tells():
    engine = parsed("http://10.0.0.7:8001")
    engine._learn(b'{"running": 3, "waiting": 2, "role": "prefill", "kv_events": {"endpoint": "tcp://*:5557"}}', 1)
    assert (engine.others, engine.kind, engine.told_events) == (4, "prefill", ("tcp://10.0.0.7:5557", None))
    engine._learn(b'{"server_load": 1}', 0)  # vLLM
    assert (engine.others, engine.kind) == (0, "both")
    engine._learn(b"[]", 0)
    assert engine.others == 0


def test_an_error_in_a_poll(monkeypatch):
    """One engine's polls go on behind an error, and so do those of others."""
    engines, asked = [parsed("127.0.0.1:1"), parsed("127.0.0.1:2")], []

    async def ask(self, *_):
        asked.append(self.url)
        if len(asked) == 1:
            raise ZeroDivisionError
        raise Broken("gone")

    monkeypatch.setattr("llmpy.router.upstream.Upstream.ask", ask)

    async def main():
        task = asyncio.ensure_future(watch(engines, [], 0.001))
        while len(asked) < 6:
            await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(main())
    assert {one.problem for one in engines} == {"gone"} and set(asked) == {one.url for one in engines}
