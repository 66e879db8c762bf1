"""Families with recurrent layers under pressure: sequences that are preempted and start again give the same bits."""

import numpy as np
import pytest

from llmpy import ConfigError

SLOW = pytest.mark.slow
FAMILIES = ["plamo2", "nemotron_h", *(pytest.param(name, marks=SLOW) for name in ("bamba", "jamba", "qwen3_next"))]


@pytest.mark.parametrize("family", FAMILIES)
def test_preemption_changes_nothing(family, tiny, engine, prompts) -> None:
    path, batch = tiny(family).directory, [*prompts, *reversed(prompts)]
    with engine(path) as roomy:
        page_bytes = roomy.model.describe()["page_bytes"]
        alone = [roomy.run([ids], 24)[0] for ids in batch]
    preemptions = 0
    for pages in range(14, 40, 3):
        try:
            small = engine(path, max_num_batched_tokens=24, kv_cache_bytes=pages * page_bytes)
        except ConfigError:  # no room for one sequence
            continue
        with small:
            for answer, wanted in zip(small.run(batch, 24), alone, strict=True):
                assert answer.ids == wanted.ids and answer.logprobs == wanted.logprobs
                assert np.array_equal(answer.prompt, wanted.prompt)
            preemptions += small.engine.stats()["num_preemptions"]
        if preemptions > 1:
            return
    pytest.fail("nothing was ever preempted")
