"""An event loop streams several chats at once and cancels one of them. Usage: python examples/async_stream.py [MODEL]"""

import asyncio
import sys

from llmpy import AsyncEngine, RequestOutputKind
from llmpy.demo import fetch_model

QUESTIONS = ("What is the capital of Italy?", "Name three colours.", "What do bees make?")


async def answer(engine: AsyncEngine, question: str) -> str:
    text = ""
    async for output in engine.chat(question, temperature=0, max_tokens=32, output_kind=RequestOutputKind.DELTA):
        text += output.text  # show each piece here
    return text


async def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else str(fetch_model())
    async with AsyncEngine.create(model) as engine:
        endless = asyncio.create_task(answer(engine, "Tell me a story."))
        for question, text in zip(QUESTIONS, await asyncio.gather(*[answer(engine, q) for q in QUESTIONS]), strict=True):
            print(f"> {question}\n{text}\n")
        endless.cancel()  # ends its request and frees its memory
        await engine.wait_for_requests_to_drain()
        print(engine)


if __name__ == "__main__":
    asyncio.run(main())
