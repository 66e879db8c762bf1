"""Several ranks give the bits of one: ids, and logprobs of prompts and outputs."""

from itertools import cycle, islice

import numpy as np
import pytest

from llmpy import ConfigError, UnsupportedError, devices, models
from llmpy.models.shard import shard, shard_by_data

# Each rank has a GPU of its own. If there are fewer GPUs than ranks, ranks share them.
GPUS = [device["device"] for device in devices() if device["available"] and device["device"].startswith("cuda")]
# Numbers of ranks, the bytes up to which each rank computes a matrix by itself (None: the default, by which ranks of tiny
# models replicate what they can), and how ranks share experts; "data": each has sequences of its own.
TEAMS = [
    (2, 0, "rank"),
    (3, None, "rank"),
    (4, 0, "rank"),
    (2, None, "width"),
    (3, 0, "width"),
    pytest.param((2, None, "rank"), marks=pytest.mark.slow),
    pytest.param((3, 0, "rank"), marks=pytest.mark.slow),
    pytest.param((2, None, "data"), marks=pytest.mark.slow),
    pytest.param((3, None, "data"), marks=pytest.mark.slow),
]


def bits(answers):
    """What has to be equal to the last bit."""
    return [
        (one.ids, np.float32(one.logprobs).tobytes(), one.prompt.tobytes(), one.prompt_ids.tobytes(), one.prompt_top.tobytes())
        for one in answers
    ]


def is_mixture(spec):
    return any(name == "experts" for name, _ in spec["ops"])


@pytest.fixture
def refused(files_of):
    """refused(path, n_ranks, experts): why so many ranks cannot share a model; "": they can."""

    def reason(path, n_ranks, experts):
        spec = models.load(files_of(path), None).spec
        try:
            shard_by_data(spec, n_ranks) if experts == "data" else shard(spec, n_ranks, None, experts)
        except (ConfigError, UnsupportedError) as error:
            return str(error)
        return "" if is_mixture(spec) or experts == "rank" else "no mixture"

    return reason


@pytest.fixture(scope="module")
def bits_of_one_rank():
    """(path, device) -> the bits of one rank, which every team's are compared with."""
    return {}


@pytest.fixture
def compare(tiny, open_engine, prompts, files_of, bits_of_one_rank):
    """compare(case, device, team): asserts that the ranks of a team give the bits of one rank."""

    def run(case, device, team):
        path, (n_ranks, replicate_bytes, experts) = tiny(case).directory, team
        if (path, device) not in bits_of_one_rank:
            with open_engine(device, path) as one:
                bits_of_one_rank[path, device] = bits(one.run(prompts, top=9))
        wanted = bits_of_one_rank[path, device]
        shared = {"n_ranks": n_ranks, "replicate_bytes": replicate_bytes, "experts": experts}
        # Compares what each rank computes alone.
        shared["synchronous"] = shared["checks_ranks"] = replicate_bytes is None and experts != "data"
        shared["devices"] = list(islice(cycle(GPUS if device.startswith("cuda") else ["cpu"]), n_ranks))
        with open_engine(device, path, max_num_batched_tokens=40, max_num_seqs=3, **shared) as ranks:
            assert bits(ranks.run(prompts, top=9)) == wanted

    return run


@pytest.mark.parametrize("team", TEAMS, ids=str)
def test_every_family_gives_the_bits_of_one_rank(case, each_device, tiny, refused, compare, team):
    if why := refused(tiny(case).directory, team[0], team[2]):
        pytest.skip(why)
    compare(case, each_device, team)


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_next", "jamba"])
def test_ranks_with_sequences_of_their_own_give_the_bits_of_one(name, device, compare):
    """Windows and sinks, and recurrent states; test_by_data.py has more. All families are slow."""
    compare(name, device, (2, None, "data"))
