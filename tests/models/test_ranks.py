"""Several ranks give the bits of one: ids, and logprobs of prompts and outputs."""

from itertools import cycle, islice

import numpy as np
import pytest

from llmpy import ConfigError, UnsupportedError, devices, models
from llmpy.models.shard import shard

# Each rank has a GPU of its own. If there are fewer GPUs than ranks, ranks share them.
GPUS = [device["device"] for device in devices() if device["available"] and device["device"].startswith("cuda")]
# Numbers of ranks, the bytes up to which each rank computes a matrix by itself (None: the default, by which ranks of tiny
# models replicate what they can), and how ranks share experts.
TEAMS = [
    (2, 0, "rank"),
    (3, None, "rank"),
    (4, 0, "rank"),
    (2, None, "width"),
    (3, 0, "width"),
    pytest.param((2, None, "rank"), marks=pytest.mark.slow),
    pytest.param((3, 0, "rank"), marks=pytest.mark.slow),
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
            shard(spec, n_ranks, None, experts)
        except (ConfigError, UnsupportedError) as error:
            return str(error)
        return "" if is_mixture(spec) or experts == "rank" else "no mixture"

    return reason


@pytest.fixture(scope="module")
def bits_of_one_rank():
    """(path, device) -> the bits of one rank, which every team's are compared with."""
    return {}


@pytest.mark.parametrize("team", TEAMS, ids=str)
def test_every_family_gives_the_bits_of_one_rank(
    case, each_device, tiny, open_engine, prompts, files_of, refused, team, bits_of_one_rank
):
    path, (n_ranks, replicate_bytes, experts) = tiny(case).directory, team
    if why := refused(path, n_ranks, experts):
        pytest.skip(why)
    if (path, each_device) not in bits_of_one_rank:
        with open_engine(each_device, path) as one:
            bits_of_one_rank[path, each_device] = bits(one.run(prompts, top=9))
    wanted = bits_of_one_rank[path, each_device]
    shared = {"n_ranks": n_ranks, "replicate_bytes": replicate_bytes, "experts": experts}
    shared["devices"] = list(islice(cycle(GPUS if each_device.startswith("cuda") else ["cpu"]), n_ranks))
    with open_engine(each_device, path, max_num_batched_tokens=40, max_num_seqs=3, **shared) as ranks:
        assert bits(ranks.run(prompts, top=9)) == wanted
