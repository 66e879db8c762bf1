"""Parameters of released shapes: the closed forms of their layers against what `llmpy inspect` counts from config.json alone.

A closed form is written from the published description of the family, with the config's numbers and nothing of the package.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmpy import cli

Fields = Mapping[str, object]


def attention(c: SimpleNamespace, *, bias: str = "", hd: int = 0) -> int:
    """Parameters of q, k, v and o; bias: those with a bias."""
    hd = hd or c.H // c.nh
    widths = {"q": c.nh * hd, "k": c.nkv * hd, "v": c.nkv * hd}
    return c.H * sum(widths.values()) + c.nh * hd * c.H + sum({**widths, "o": c.H}[each] for each in bias)


def plain(c: SimpleNamespace, inner: int, *, bias: bool = True) -> int:
    return 2 * c.H * inner + (inner + c.H if bias else 0)


def gated(c: SimpleNamespace, inner: int) -> int:
    return 3 * c.H * inner


def llama(c: SimpleNamespace, *, bias: str = "") -> int:
    """Parameters of a Llama with an untied head; bias: as in `attention`."""
    return 2 * c.V * c.H + c.L * (attention(c, bias=bias) + gated(c, c.I) + 2 * c.H) + c.H


def mamba(c: SimpleNamespace, d: int, n: int, r: int, *, taps: int = 4) -> int:
    """In, convolution with its bias, steps and both sides of the state, steps' matrix and bias, A, D, out."""
    return 2 * d * c.H + d * taps + d + (r + 2 * n) * d + r * d + d + d * n + d + d * c.H


def mamba2(c: SimpleNamespace, heads: int, size: int, groups: int, n: int, *, taps: int = 4) -> int:
    """In, convolution with its bias, A, D and the steps' bias, norm, out."""
    d, both = heads * size, groups * n
    return c.H * (2 * d + 2 * both + heads) + (d + 2 * both) * (taps + 1) + 3 * heads + d + d * c.H


def latent(c: SimpleNamespace, rq: int, rkv: int, dn: int, dr: int, dv: int) -> int:
    """Latent attention; rq 0: queries come of one matrix."""
    q = c.H * rq + rq + rq * c.nh * (dn + dr) if rq else c.H * c.nh * (dn + dr)
    return q + c.H * (rkv + dr) + rkv + rkv * c.nh * (dn + dv) + c.nh * dv * c.H


def delta_net(c: SimpleNamespace, nk: int, nv: int, dk: int, dv: int, *, taps: int = 4) -> int:
    keys, values = nk * dk, nv * dv
    return c.H * (2 * keys + 2 * values + 2 * nv) + (2 * keys + values) * taps + 2 * nv + dv + values * c.H


def usual(name: str, v: int, h: int, i: int, layers: int, nh: int, nkv: int, **more: object) -> dict[str, object]:
    """config.json in the words that most families use."""
    return {
        "architectures": [name], "vocab_size": v, "hidden_size": h, "intermediate_size": i, "num_hidden_layers": layers,
        "num_attention_heads": nh, "num_key_value_heads": nkv, "dtype": "bfloat16", **more,
    }  # fmt: skip


def gpt2(name: str, v: int, h: int, layers: int, nh: int, **more: object) -> dict[str, object]:
    """config.json in GPT-2's words."""
    own = {"architectures": [name], "vocab_size": v, "n_embd": h, "n_layer": layers, "n_head": nh, "dtype": "bfloat16"}
    return {**own, **more}


# config.json; the closed form of c (V, H, I, L, nh, nkv of it); the published number of parameters where one is known.
SHAPES: dict[str, tuple[Fields, Callable[[SimpleNamespace], int], int | None]] = {
    "OPT-125M": (
        usual("OPTForCausalLM", 50272, 768, 3072, 12, 12, 12, max_position_embeddings=2048, ffn_dim=3072),
        lambda c: c.V * c.H + 2050 * c.H + c.L * (attention(c, bias="qkvo") + plain(c, c.I) + 4 * c.H) + 2 * c.H,
        125239296,
    ),
    "GPT-2": (
        gpt2("GPT2LMHeadModel", 50257, 768, 12, 12, n_positions=1024),
        lambda c: (c.V + 1024) * c.H + c.L * (attention(c, bias="qkvo") + plain(c, 4 * c.H) + 4 * c.H) + 2 * c.H,
        124439808,
    ),
    "StarCoder": (
        gpt2("GPTBigCodeForCausalLM", 49152, 6144, 40, 48, n_positions=8192, n_inner=24576, num_key_value_heads=1),
        lambda c: (c.V + 8192) * c.H + c.L * (attention(c, bias="qkvo") + plain(c, 24576) + 4 * c.H) + 2 * c.H,
        15517456384,
    ),
    "StarCoder2-7B": (
        usual("Starcoder2ForCausalLM", 49152, 4608, 18432, 32, 36, 4),
        lambda c: c.V * c.H + c.L * (attention(c, bias="qkvo") + plain(c, c.I) + 4 * c.H) + 2 * c.H,
        7173923840,
    ),
    "GPT-J-6B": (
        gpt2("GPTJForCausalLM", 50400, 4096, 28, 16, n_positions=2048, rotary_dim=64),
        lambda c: 2 * c.V * c.H + c.V + c.L * (attention(c) + plain(c, 4 * c.H) + 2 * c.H) + 2 * c.H,
        6050882784,
    ),
    "CodeGen-350M": (
        gpt2("CodeGenForCausalLM", 51200, 1024, 20, 16, n_positions=2048, rotary_dim=32),
        lambda c: 2 * c.V * c.H + c.V + c.L * (attention(c) + plain(c, 4 * c.H) + 2 * c.H) + 2 * c.H,
        356712448,
    ),
    "GPT-NeoX-20B": (
        usual("GPTNeoXForCausalLM", 50432, 6144, 24576, 44, 64, 64, rotary_pct=0.25),
        lambda c: 2 * c.V * c.H + c.L * (attention(c, bias="qkvo") + plain(c, c.I) + 4 * c.H) + 2 * c.H,
        20554567680,
    ),
    "BLOOM-560M": (
        {"architectures": ["BloomForCausalLM"], "vocab_size": 250880, "hidden_size": 1024, "n_layer": 24, "n_head": 16},
        lambda c: c.V * c.H + 2 * c.H + c.L * (attention(c, bias="qkvo") + plain(c, 4 * c.H) + 4 * c.H) + 2 * c.H,
        559214592,
    ),
    "MPT-7B": (
        {"architectures": ["MPTForCausalLM"], "vocab_size": 50432, "d_model": 4096, "n_layers": 32, "n_heads": 32,
         "max_seq_len": 2048},
        lambda c: c.V * c.H + c.L * (attention(c) + plain(c, 4 * c.H, bias=False) + 2 * c.H) + c.H,
        6649286656,
    ),
    "Falcon-7B": (
        usual("FalconForCausalLM", 65024, 4544, 18176, 32, 71, 1),
        lambda c: c.V * c.H + c.L * (attention(c) + plain(c, c.I, bias=False) + 2 * c.H) + 2 * c.H,
        6921720704,
    ),
    "Falcon-40B": (
        usual("FalconForCausalLM", 65024, 8192, 32768, 60, 128, 8, new_decoder_architecture=True, num_kv_heads=8),
        lambda c: c.V * c.H + c.L * (attention(c) + plain(c, c.I, bias=False) + 4 * c.H) + 2 * c.H,
        41303293952,
    ),
    "Llama-2-7B": (
        usual("LlamaForCausalLM", 32000, 4096, 11008, 32, 32, 32),
        llama,
        6738415616,
    ),
    "Llama-3-8B": (
        usual("LlamaForCausalLM", 128256, 4096, 14336, 32, 32, 8, rope_theta=500000.0),
        llama,
        8030261248,
    ),
    "Mistral-7B": (
        usual("MistralForCausalLM", 32000, 4096, 14336, 32, 32, 8),
        llama,
        7241732096,
    ),
    "Qwen2-7B": (
        usual("Qwen2ForCausalLM", 152064, 3584, 18944, 28, 28, 4),
        lambda c: llama(c, bias="qkv"),
        7615616512,
    ),
    "Qwen3-8B": (
        usual("Qwen3ForCausalLM", 151936, 4096, 12288, 36, 32, 8, head_dim=128),
        lambda c: 2 * c.V * c.H + c.L * (attention(c) + 2 * 128 + gated(c, c.I) + 2 * c.H) + c.H,
        8190735360,
    ),
    "Gemma-2B": (
        usual("GemmaForCausalLM", 256000, 2048, 16384, 18, 8, 1, head_dim=256),
        lambda c: c.V * c.H + c.L * (attention(c, hd=256) + gated(c, c.I) + 2 * c.H) + c.H,
        2506172416,
    ),
    "Gemma-2-9B": (
        usual("Gemma2ForCausalLM", 256000, 3584, 14336, 42, 16, 8, head_dim=256, query_pre_attn_scalar=256),
        lambda c: c.V * c.H + c.L * (attention(c, hd=256) + gated(c, c.I) + 4 * c.H) + c.H,
        9241705984,
    ),
    "Gemma-3-1B": (
        usual("Gemma3ForCausalLM", 262144, 1152, 6912, 26, 4, 1, head_dim=256, query_pre_attn_scalar=256),
        lambda c: c.V * c.H + c.L * (attention(c, hd=256) + 2 * 256 + gated(c, c.I) + 4 * c.H) + c.H,
        999885952,
    ),
    "Phi-4": (
        usual("Phi3ForCausalLM", 100352, 5120, 17920, 40, 40, 10, sliding_window=None),
        llama,
        14659507200,
    ),
    "Phi-2": (
        usual("PhiForCausalLM", 51200, 2560, 10240, 32, 32, 32, partial_rotary_factor=0.4),
        lambda c: 2 * c.V * c.H + c.V + c.L * (attention(c, bias="qkvo") + plain(c, c.I) + 2 * c.H) + 2 * c.H,
        2779683840,
    ),
    "OLMo-2-7B": (
        usual("Olmo2ForCausalLM", 100352, 4096, 11008, 32, 32, 32),
        lambda c: 2 * c.V * c.H + c.L * (attention(c) + 2 * c.H + gated(c, c.I) + 2 * c.H) + c.H,
        7298617344,
    ),
    "Command-R": (
        usual("CohereForCausalLM", 256000, 8192, 22528, 40, 64, 64),
        lambda c: c.V * c.H + c.L * (attention(c) + gated(c, c.I) + c.H) + c.H,
        34980831232,
    ),
    "Command-R7B": (
        usual("Cohere2ForCausalLM", 256000, 4096, 14336, 32, 32, 8),
        lambda c: c.V * c.H + c.L * (attention(c) + gated(c, c.I) + c.H) + c.H,
        8028033024,
    ),
    "GLM-4-9B": (
        usual("GlmForCausalLM", 151552, 4096, 13696, 40, 32, 2),
        lambda c: llama(c, bias="qkv"),
        9399951360,
    ),
    "GLM-4-9B-0414": (
        usual("Glm4ForCausalLM", 151552, 4096, 13696, 40, 32, 2),
        lambda c: 2 * c.V * c.H + c.L * (attention(c, bias="qkv") + gated(c, c.I) + 4 * c.H) + c.H,
        9400279040,
    ),
    "Granite-3.3-2B": (
        usual("GraniteForCausalLM", 49159, 2048, 8192, 40, 32, 8, tie_word_embeddings=True),
        lambda c: c.V * c.H + c.L * (attention(c) + gated(c, c.I) + 2 * c.H) + c.H,
        2533539840,
    ),
    "PLaMo-3-8B": (
        usual("Plamo3ForCausalLM", 107520, 4096, 16384, 32, 32, 4, head_dim=128, tie_word_embeddings=False),
        lambda c: 2 * c.V * c.H + c.L * (attention(c, hd=128) + 2 * 128 + gated(c, c.I) + 4 * c.H) + c.H,
        None,
    ),
    "Mixtral-8x7B": (
        usual("MixtralForCausalLM", 32000, 4096, 14336, 32, 32, 8, num_local_experts=8),
        lambda c: 2 * c.V * c.H + c.L * (attention(c) + 8 * gated(c, c.I) + 8 * c.H + 2 * c.H) + c.H,
        46702792704,
    ),
    "Qwen1.5-MoE-A2.7B": (
        usual("Qwen2MoeForCausalLM", 151936, 2048, 5632, 24, 16, 16, num_experts=60, moe_intermediate_size=1408,
              shared_expert_intermediate_size=5632),
        lambda c: 2 * c.V * c.H + c.H + c.L * (
            attention(c, bias="qkv") + 60 * gated(c, 1408) + 60 * c.H + gated(c, 5632) + c.H + 2 * c.H),
        14315784192,
    ),
    "Qwen3-30B-A3B": (
        usual("Qwen3MoeForCausalLM", 151936, 2048, 6144, 48, 32, 4, head_dim=128, num_experts=128, moe_intermediate_size=768),
        lambda c: 2 * c.V * c.H + c.H + c.L * (
            attention(c, hd=128) + 2 * 128 + 128 * gated(c, 768) + 128 * c.H + 2 * c.H),
        30532122624,
    ),
    "Qwen3-Next-80B-A3B": (
        usual("Qwen3NextForCausalLM", 151936, 2048, 5120, 48, 16, 2, head_dim=256, num_experts=512, moe_intermediate_size=512,
              shared_expert_intermediate_size=512),
        lambda c: 2 * c.V * c.H + c.H + 36 * delta_net(c, 16, 32, 128, 128)
        + 12 * (attention(c, hd=256) + c.H * c.nh * 256 + 2 * 256)  # queries have a gate
        + c.L * (512 * gated(c, 512) + 512 * c.H + gated(c, 512) + c.H + 2 * c.H),
        None,
    ),
    "DeepSeek-V2-Lite": (
        usual("DeepseekV2ForCausalLM", 102400, 2048, 10944, 27, 16, 16, kv_lora_rank=512, q_lora_rank=None,
              qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=64, n_shared_experts=2,
              moe_intermediate_size=1408, first_k_dense_replace=1),
        lambda c: 2 * c.V * c.H + c.H + c.L * (latent(c, 0, 512, 128, 64, 128) + 2 * c.H) + gated(c, c.I)
        + 26 * (66 * gated(c, 1408) + 64 * c.H),
        15706484224,
    ),
    "DeepSeek-V3": (
        usual("DeepseekV3ForCausalLM", 129280, 7168, 18432, 61, 128, 128, kv_lora_rank=512, q_lora_rank=1536,
              qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=256, n_shared_experts=1,
              moe_intermediate_size=2048, first_k_dense_replace=3),
        lambda c: 2 * c.V * c.H + c.H + c.L * (latent(c, 1536, 512, 128, 64, 128) + 2 * c.H) + 3 * gated(c, c.I)
        + 58 * (257 * gated(c, 2048) + 256 * c.H + 256),
        None,
    ),
    "gpt-oss-20b": (
        usual("GptOssForCausalLM", 201088, 2880, 2880, 24, 64, 8, head_dim=64, num_local_experts=32, sliding_window=128),
        lambda c: 2 * c.V * c.H + c.H + c.L * (
            attention(c, bias="qkvo", hd=64) + c.nh + 32 * (gated(c, c.I) + 2 * c.I + c.H) + 32 * c.H + 32 + 2 * c.H),
        20914757184,
    ),
    "gpt-oss-120b": (
        usual("GptOssForCausalLM", 201088, 2880, 2880, 36, 64, 8, head_dim=64, num_local_experts=128, sliding_window=128),
        lambda c: 2 * c.V * c.H + c.H + c.L * (
            attention(c, bias="qkvo", hd=64) + c.nh + 128 * (gated(c, c.I) + 2 * c.I + c.H) + 128 * c.H + 128 + 2 * c.H),
        116829156672,
    ),
    "Llama-4-Scout": (
        usual("Llama4ForCausalLM", 202048, 5120, 8192, 48, 40, 8, head_dim=128, intermediate_size_mlp=16384,
              num_local_experts=16, interleave_moe_layer_step=1),
        lambda c: 2 * c.V * c.H + c.H + c.L * (attention(c, hd=128) + 17 * gated(c, c.I) + 16 * c.H + 2 * c.H),
        None,
    ),
    "Mamba-130M": (
        {"architectures": ["MambaForCausalLM"], "vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 24,
         "intermediate_size": 1536, "state_size": 16, "time_step_rank": 48},
        lambda c: c.V * c.H + c.L * (mamba(c, 1536, 16, 48) + c.H) + c.H,
        129135360,
    ),
    "Falcon-Mamba-7B": (
        {"architectures": ["FalconMambaForCausalLM"], "vocab_size": 65024, "hidden_size": 4096, "num_hidden_layers": 64,
         "intermediate_size": 8192, "state_size": 16, "time_step_rank": 256, "tie_word_embeddings": False},
        lambda c: 2 * c.V * c.H + c.L * (mamba(c, 8192, 16, 256) + c.H) + c.H,
        7272665088,
    ),
    "Codestral-Mamba-7B": (
        {"architectures": ["Mamba2ForCausalLM"], "vocab_size": 32768, "hidden_size": 4096, "num_hidden_layers": 64,
         "num_heads": 128, "head_dim": 64, "n_groups": 8, "state_size": 128},
        lambda c: 2 * c.V * c.H + c.L * (mamba2(c, 128, 64, 8, 128) + c.H) + c.H,
        7285403648,
    ),
    "Jamba-v0.1": (
        usual("JambaForCausalLM", 65536, 4096, 14336, 32, 32, 8, num_experts=16, mamba_d_state=16, mamba_dt_rank=256),
        lambda c: 2 * c.V * c.H + c.H + 4 * attention(c) + 28 * (mamba(c, 2 * c.H, 16, 256) + 256 + 2 * 16)
        + 16 * gated(c, c.I) + 16 * (16 * gated(c, c.I) + 16 * c.H) + c.L * 2 * c.H,
        51570323328,
    ),
    "Bamba-9B": (
        usual("BambaForCausalLM", 128256, 4096, 14336, 32, 32, 8, attn_layer_indices=[9, 18, 27], mamba_n_heads=128,
              mamba_d_head=64, mamba_n_groups=1, mamba_d_state=128),
        lambda c: 2 * c.V * c.H + c.H + 3 * attention(c) + 29 * mamba2(c, 128, 64, 1, 128) + c.L * (gated(c, c.I) + 2 * c.H),
        None,
    ),
    "Granite-4.0-H-Tiny": (
        usual("GraniteMoeHybridForCausalLM", 100352, 1536, 512, 40, 12, 4, num_local_experts=64, shared_intermediate_size=1024,
              mamba_n_heads=48, mamba_d_head=64, mamba_n_groups=1, mamba_d_state=128, tie_word_embeddings=True,
              layer_types=["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)]),
        lambda c: c.V * c.H + c.H + 4 * attention(c) + 36 * mamba2(c, 48, 64, 1, 128)
        + c.L * (64 * gated(c, c.I) + 64 * c.H + gated(c, 1024) + 2 * c.H),
        None,
    ),
    "Nemotron-H-8B": (
        usual("NemotronHForCausalLM", 131072, 4096, 21504, 52, 32, 8, head_dim=128, n_groups=8, mamba_num_heads=128,
              mamba_head_dim=64, ssm_state_size=128,
              hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"),
        lambda c: 2 * c.V * c.H + c.H + 24 * (mamba2(c, 128, 64, 8, 128) + c.H) + 4 * (attention(c, hd=128) + c.H)
        + 24 * (plain(c, c.I, bias=False) + c.H),
        None,
    ),
    "PLaMo-2-8B": (
        {"architectures": ["Plamo2ForCausalLM"], "vocab_size": 100000, "hidden_size": 4096, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 4, "mamba_num_heads": 64, "intermediate_size": 16384},
        lambda c: c.V * c.H + c.H + c.L // 2 * (plamo2(c, 64, 128, 64) + attention(c, hd=128) + 36 * 128)
        + c.L * (gated(c, c.I) + 4 * c.H),
        9118372864,
    ),
}  # fmt: skip


def plamo2(c: SimpleNamespace, heads: int, size: int, n: int) -> int:
    """The mixer of PLaMo 2: B, C and dt are computed from the convolution's output; there are no biases."""
    d, r = heads * size, max(64, c.H // 16)
    return 3 * d * c.H + 4 * d + d * (r + 2 * n) + r * heads + 3 * heads + r + 2 * n


def numbers(config: Fields) -> SimpleNamespace:
    """The config's sizes by the letters of the closed forms."""

    def first(*names: str) -> object:
        return next((config[name] for name in names if name in config), 0)

    heads = first("num_attention_heads", "n_head", "n_heads")
    return SimpleNamespace(
        V=config["vocab_size"], H=first("hidden_size", "n_embd", "d_model"), I=first("intermediate_size"), nh=heads,
        L=first("num_hidden_layers", "n_layer", "n_layers"), nkv=first("num_key_value_heads") or heads,
    )  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_the_program_has_the_parameters_of_its_closed_form(name: str, tmp_path: Path, capsys) -> None:
    config, closed_form, published = SHAPES[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.main(["inspect", str(tmp_path), "--config-only"]) == 0
    counted = re.search(r"tensors, ([\d,]+) parameters", capsys.readouterr().out)
    assert counted is not None and int(counted[1].replace(",", "")) == closed_form(numbers(config))
    assert published is None or closed_form(numbers(config)) == published


# Of a sequence: bytes of the recurrent states of a layer, how many layers have them, bytes of keys and values of a token in
# bfloat16 in all layers.
STATES = {
    "PLaMo-2-8B": (64 * 128 * 64 * 4 + 3 * 64 * 128 * 4, 16, 16 * 2 * 4 * 128 * 2),
    "Codestral-Mamba-7B": (128 * 64 * 128 * 4 + 3 * (8192 + 2 * 8 * 128) * 4, 64, 0),
    "Qwen3-Next-80B-A3B": (32 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 32 * 128) * 4, 36, 12 * 2 * 2 * 256 * 2),
    "DeepSeek-V3": (0, 0, 61 * (512 + 64) * 2),
    "Llama-3-8B": (0, 0, 32 * 2 * 8 * 128 * 2),
}


@pytest.mark.parametrize("name", STATES)
def test_states_and_pages_have_the_bytes_of_their_closed_forms(name: str, tmp_path: Path, capsys) -> None:
    state, n_layers, per_token = STATES[name]
    config = {**SHAPES[name][0], "dtype": "bfloat16", "full_attention_idx": list(range(32))}  # PLaMo 2 without windows
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.main(["inspect", str(tmp_path), "--config-only"]) == 0
    shown = capsys.readouterr().out
    units = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    found = re.search(r"a token more +([\d.,]+) (\w+)", shown)
    assert found is not None and float(found[1].replace(",", "")) * units[found[2]] == pytest.approx(per_token, rel=1e-3)
    found = re.search(r"recurrent states: ([\d.,]+) (\w+) a sequence", shown)
    given = 0.0 if found is None else float(found[1].replace(",", "")) * units[found[2]]
    assert given == pytest.approx(state * n_layers, rel=1e-3)
