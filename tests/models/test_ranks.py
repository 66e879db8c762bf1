"""Several ranks give the bits of one: ids, and logprobs of prompts and outputs."""

import numpy as np
import pytest

from llmpy import ConfigError, UnsupportedError, models
from llmpy.models.shard import shard

# Numbers of ranks, and the bytes up to which each rank computes a matrix by itself. None: the default, by which ranks of tiny
# models replicate what they can.
TEAMS = [
    (2, 0),
    (3, None),
    (4, 0),
    pytest.param((2, None), marks=pytest.mark.slow),
    pytest.param((3, 0), marks=pytest.mark.slow),
]


def bits(answers):
    """What has to be equal to the last bit."""
    return [
        (one.ids, np.float32(one.logprobs).tobytes(), one.prompt.tobytes(), one.prompt_ids.tobytes(), one.prompt_top.tobytes())
        for one in answers
    ]


@pytest.fixture
def refused(files_of):
    """refused(path, n_ranks): why so many ranks cannot share a model; "": they can."""

    def reason(path, n_ranks):
        spec = models.load(files_of(path), None).spec
        try:
            shard(spec, n_ranks)
        except (ConfigError, UnsupportedError) as error:
            return str(error)
        return ""

    return reason


@pytest.mark.parametrize("team", TEAMS, ids=str)
def test_every_family_gives_the_bits_of_one_rank(case, each_device, tiny, open_engine, prompts, refused, team):
    path, (n_ranks, replicate_bytes) = tiny(case).directory, team
    if why := refused(path, n_ranks):
        pytest.skip(why)
    with open_engine(each_device, path) as one:
        wanted = bits(one.run(prompts, top=9))
    devices = ["cpu" if each_device.startswith("cpu") else each_device] * n_ranks
    shared = {"n_ranks": n_ranks, "replicate_bytes": replicate_bytes, "devices": devices}
    with open_engine(each_device, path, max_num_batched_tokens=40, max_num_seqs=3, **shared) as ranks:
        assert bits(ranks.run(prompts, top=9)) == wanted
