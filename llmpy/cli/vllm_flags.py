"""Flags of `vllm serve` that are called otherwise here, and what to say to whoever gives one."""

from __future__ import annotations

LEAVE_OUT = "it is always so here; leave it out"

MEANINGS = {
    "--trust-remote-code": "no code of a checkpoint is ever run; leave it out",
    "--enable-chunked-prefill": LEAVE_OUT,
    "--async-scheduling": LEAVE_OUT,
    "--enable-sleep-mode": LEAVE_OUT,
    "--enable-prompt-tokens-details": LEAVE_OUT,
    "--enable-auto-tool-choice": "calls are always looked for; --tool-call-parser says how they are written",
    "--api-key": "use --api-key-file: everybody on the machine can read an argument",
    "--allowed-origins": "use --cors-origin",
    "--trust-request-chat-template": "use --allow-request-template",
    "--disable-log-requests": "prompts are not logged; leave it out",
    "--enable-log-requests": "use --log-prompts",
    "--kv-events-config": "use --kv-events-address",
    "--disable-log-stats": "/metrics costs nothing until it is asked for; leave it out",
    "--swap-space": "preempted sequences are computed again; leave it out",
    "--cpu-offload-gb": "weights lie on the device; leave it out",
    "--task": "the model's architecture says what it can do; leave it out",
    "--runner": "the model's architecture says what it can do; leave it out",
    "--convert": "the model's architecture says what it can do; leave it out",
    "--tokenizer-mode": "the model's files say which tokenizer it has; leave it out",
    "--compilation-config": "nothing is compiled; --enforce-eager leaves CUDA graphs out",
    "--cuda-graph-sizes": "graphs are captured for fixed sizes; --enforce-eager leaves them out",
    "--distributed-executor-backend": "one process runs one device; leave it out",
    "--data-parallel-size": "one process runs one engine; llmpy.distributed.ray serves several",
    "--api-server-count": "one process serves one engine; llmpy.distributed.ray serves several",
    "--lora-modules": "adapters are not served yet: merge them into the checkpoint",
    "--guided-decoding-backend": "there is one; leave it out",
    "--structured-outputs-config": "there is one backend; leave it out",
    "--uds": "it listens on --host and --port",
}
