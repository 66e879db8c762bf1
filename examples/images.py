"""What do images show? Usage: python examples/images.py MODEL IMAGE [IMAGE ...], with a model that takes images"""

import sys

from llmpy import LLM

QUESTION = {"type": "text", "text": "What is this ?"}


def main() -> None:
    model, *images = sys.argv[1:]
    with LLM(model) as llm:
        chats = [[{"role": "user", "content": [{"type": "image", "image": image}, QUESTION]}] for image in images]
        for image, output in zip(images, llm.chat(chats, max_tokens=32, temperature=0), strict=True):
            print(f"{image}: {output.num_image_tokens} features: {output.outputs[0].text}")
        together = [{"type": "image", "image": image} for image in images]
        output = llm.chat([{"role": "user", "content": [*together, QUESTION]}], max_tokens=32, temperature=0)[0]
        stats = llm.stats()
        print(f"all together: {output.outputs[0].text}")
        print(f"{stats.images_encoded} images encoded, {stats.image_cache_hits} found")


if __name__ == "__main__":
    main()
