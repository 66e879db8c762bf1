"""An architecture in your own file: a Llama that stops after some layers and shows its answer there.

Run it: python examples/own_architecture.py [model] [prompt]
"""

import sys

from llmpy import LLM, SamplingParams, architecture
from llmpy.demo import fetch_model
from llmpy.models import Model, ModelConfig


@architecture("EarlyExitLlama", ignore=["blk.*", "model.layers.*"])
def early_exit_llama(cfg: ModelConfig, m: Model) -> None:
    """Llama, cut after `exit_layer` layers; `ignore` allows unused weights of the other layers."""
    q_width, kv_width = cfg.num_attention_heads * cfg.head_dim, cfg.num_key_value_heads * cfg.head_dim
    x = m.embed("model.embed_tokens")
    for layer in m.layers("model.layers", cfg.get("exit_layer", cfg.num_layers)):
        h = layer.rms_norm(x, "input_layernorm", cfg.rms_norm_eps)
        q, k, v = layer.linear(
            h, ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], [q_width, kv_width, kv_width]
        )
        q, k = layer.rope(q, k, cfg.rope)
        x = x + layer.linear(layer.attention(q, k, v), "self_attn.o_proj", cfg.hidden_size)
        h = layer.rms_norm(x, "post_attention_layernorm", cfg.rms_norm_eps)
        x = x + layer.gated_mlp(h, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", cfg.intermediate_size, act="silu")
    m.logits(m.rms_norm(x, "model.norm", cfg.rms_norm_eps), "lm_head", tied_to="model.embed_tokens")


def main() -> None:
    """Shows the next token after 10, 20, 25, 29 and 30 layers."""
    model = sys.argv[1] if len(sys.argv) > 1 else fetch_model()
    prompt = sys.argv[2] if len(sys.argv) > 2 else "The capital of France is"
    greedy = SamplingParams(temperature=0, max_tokens=1, logprobs=3)
    for layers in (10, 20, 25, 29, 30):
        changes = {"architectures": ["EarlyExitLlama"], "exit_layer": layers}
        with LLM(model, hf_overrides=changes, max_model_len=256, max_num_seqs=1) as llm:
            output = llm.generate(prompt, greedy, use_tqdm=False)[0]
            best = output.outputs[0].logprobs[0].values()
            print(f"{layers:3} layers:", ", ".join(f"{t.decoded_token!r} {t.logprob:.2f}" for t in best))


if __name__ == "__main__":
    main()
