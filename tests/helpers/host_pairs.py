"""Models of two processes: host 0 in the test's process, host 1 beside it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llmpy import LLM, SamplingParams

COMMON = {
    "device": "cpu", "kv_cache_memory_bytes": "112KiB", "max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64,
    "load_format": "dummy", "skip_tokenizer_init": True,
}  # fmt: skip
BASE = {
    "vocab_size": 131, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "torch_dtype": "float32",
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {
    "dense": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16},
    "mixture": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 16, "num_experts": 6,
        "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "hybrid": {
        "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "head_dim": 16, "mamba_d_ssm": 64,
        "mamba_n_heads": 4, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_d_head": 16, "mamba_d_conv": 4,
        "mamba_chunk_size": 8, "mamba_expand": 1, "rope_theta": 10000.0,
    },
}  # fmt: skip
FOLLOW = """
import json, sys
import llmpy, llmpy.models.shard
llmpy.models.shard.default_replicate_bytes = lambda n_ranks: 0
options = json.loads(sys.argv[1])
if "version" in options:
    llmpy.__version__ = options.pop("version")
llmpy.LLM(**options)
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def start(options: dict[str, Any], **env: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", FOLLOW, json.dumps(options)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **env})


@contextmanager
def two_hosts(options: dict[str, Any], n_ranks: int, **changes: Any) -> Iterator[tuple[LLM, subprocess.Popen[str]]]:
    """The engine of host 0, and the process of host 1, which has the changes."""
    shared = {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": free_port(), "tensor_parallel_size": n_ranks}
    follower = start({**options, **shared, "node_rank": 1, **changes})
    try:
        with LLM(**options, **shared, node_rank=0) as llm:
            yield llm, follower
        follower.wait(20)
    finally:
        follower.kill()
        follower.communicate()


def params(index: int, **how: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": index % 2 * 0.8, "seed": index, "max_tokens": 24, "ignore_eos": True, "logprobs": 3,
           "prompt_logprobs": 1, **how}
    )  # fmt: skip


def bits(output: Any) -> list[Any]:
    """Ids, the three logprobs and the alternatives of an output, as bytes."""
    prompt, one = output.prompt_token_logprobs, output.outputs[0]
    columns = (one.sampled.raw, one.sampled.full, one.sampled.processed, one.logprobs.values)
    return [prompt is not None and prompt.tobytes(), one.token_ids, one.finish_reason, *(each.tobytes() for each in columns)]


PROMPTS = [[(7 * i + 3 * j) % 120 + 5 for j in range(n)] for i, n in enumerate((3, 90, 1, 40, 70, 17, 85, 33, 80, 66))]
PROMPTS += [[*PROMPTS[1][:64], 9, 8], [*PROMPTS[1][:80], 7]]
