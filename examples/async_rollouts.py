"""Rollouts as in a trainer: a group per prompt, a pause, an abort, and continuing partial outputs bit for bit.

Usage: python examples/async_rollouts.py [MODEL]
"""

import asyncio
import sys

from llmpy import AsyncEngine, RequestOutputKind, SamplingParams
from llmpy.demo import fetch_model

GROUP = 4
PARAMS = SamplingParams(
    temperature=1.0, seed=7, max_tokens=48, logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
)


async def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else str(fetch_model())
    async with AsyncEngine.create(model) as engine:
        prompt = engine.tokenizer.encode("Write a short poem about a river that " + "runs and " * 20 + "sings.")
        params = [PARAMS.replace(sample_index=i) for i in range(GROUP)]
        whole = await asyncio.gather(*[engine.generate(prompt, p) for p in params])
        print("prompt tokens computed:", [len(prompt) - output.num_cached_tokens for output in whole])

        streams = [engine.generate(prompt, p, f"rollout-{i}") for i, p in enumerate(params)]
        await asyncio.sleep(0.2)
        await engine.pause("keep")  # requests stop between two steps and keep their cache
        partial = {output.request_id: output for output in await engine.abort()}
        await engine.resume()
        for i, (stream, p) in enumerate(zip(streams, params, strict=True)):
            made = partial.get(f"rollout-{i}") or await stream
            resumed = {"prompt_token_ids": prompt, "output_token_ids": made.token_ids}
            rest = await engine.generate(resumed, p)
            same = made.token_ids + rest.token_ids == whole[i].token_ids
            print(f"rollout {i}: {len(made.token_ids)} + {len(rest.token_ids)} tokens, same as uninterrupted: {same}")


if __name__ == "__main__":
    asyncio.run(main())
