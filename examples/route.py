"""Two servers behind `llmpy route`: conversations go back to the server that has cached them, until it is killed.

Usage: python examples/route.py [MODEL], with the extras server and kvevents (pip install ".[server,kvevents]")
"""

import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from urllib.request import Request, urlopen

from llmpy.demo import fetch_model


def start(*words: str) -> tuple[subprocess.Popen[str], str]:
    """Starts a program of llmpy on a free port; returns it and its address."""
    command = [sys.executable, "-m", "llmpy", *words, "--port", "0", "--log-level", "error"]
    program = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert program.stderr is not None
    line = ""
    for line in program.stderr:
        if line.startswith("http"):
            return program, line.strip().removesuffix("/v1")
    raise RuntimeError(f"llmpy {words[0]} has ended: {line}")


def ask(url: str, turns: list[dict[str, str]]) -> tuple[str, str, int]:
    """The answer to a conversation, the server that gave it, and the tokens that it had cached."""
    body = json.dumps({"messages": turns, "max_tokens": 16, "temperature": 0}).encode()
    with urlopen(Request(f"{url}/v1/chat/completions", body, {"content-type": "application/json"})) as answer:
        made = json.load(answer)
        cached = made["usage"]["prompt_tokens_details"]["cached_tokens"]
        return made["choices"][0]["message"]["content"], answer.headers["x-llmpy-engine"], cached


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else str(fetch_model())
    programs = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            options = ("--kv-cache-memory-bytes", "64MiB", "--max-model-len", "1024")
            servers = {}
            for i in range(2):
                events = ("--kv-events-address", f"ipc://{folder}/{i}", "--kv-events-replay-address", f"ipc://{folder}/r{i}")
                program, url = start("serve", model, *options, *events)
                programs.append(program)
                servers[url] = program
            router, url = start("route", "--poll", "0.2", *servers)
            programs.append(router)
            talks = {topic: [{"role": "user", "content": f"Tell me about {topic}. " * 20}] for topic in ("bees", "ships")}
            for _ in range(2):
                with ThreadPoolExecutor() as pool:
                    answers = list(pool.map(lambda turns: ask(url, turns), talks.values()))
                for (topic, turns), (text, server, cached) in zip(talks.items(), answers, strict=True):
                    print(f"{topic}: server {list(servers).index(server)}, {cached} tokens were cached")
                    turns += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
            servers[server].kill()
            print("after a kill:", "the other one answers" if ask(url, turns)[1] != server else "?")
        finally:
            for program in programs:
                program.kill()
                program.communicate()


if __name__ == "__main__":
    main()
