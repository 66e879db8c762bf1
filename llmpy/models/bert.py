"""BERT, RoBERTa and XLM-RoBERTa: MiniLM, BGE, E5, GTE and other encoders of sentences."""

from .blocks import Model, Value
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "all-MiniLM-L6-v2, BGE, E5, GTE, multilingual-e5, cross-encoders"
LIMITS = "embeddings and classes; no generation"
_ENDS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
_UNUSED = ["*embeddings.position_ids", "*pooler.dense.*"]


def encoder(cfg: ModelConfig, m: Model, stem: str, first_position: int) -> Value:
    """Encoder with learned positions, norms after the residual sums, and attention in both directions.

    Args:
        cfg: The configuration.
        m: The program.
        stem: Prefix of the tensors' names.
        first_position: Row of the position table for the first token.
    """
    eps, width = cfg.get("layer_norm_eps", 1e-12), cfg.hidden_size
    cfg.only("position_embedding_type", "absolute")
    cfg.unused_positions = first_position
    x = m.embed(f"{stem}embeddings.word_embeddings") + m.embed_types(
        f"{stem}embeddings.token_type_embeddings", cfg.size("type_vocab_size", 2)
    )
    positions = cfg.size("max_position_embeddings", 512)
    x = x + m.embed_positions(f"{stem}embeddings.position_embeddings", positions, first=first_position)
    x = m.layer_norm(x, f"{stem}embeddings.LayerNorm", eps)
    for layer in m.layers(f"{stem}encoder.layer", cfg.num_layers):
        q, k, v = layer.linear(x, [f"attention.self.{name}" for name in ("query", "key", "value")], [width] * 3, bias=True)
        x = x + layer.linear(layer.row_attention(q, k, v), "attention.output.dense", width, bias=True)
        x = layer.layer_norm(x, "attention.output.LayerNorm", eps)
        x = x + layer.mlp(x, "intermediate.dense", "output.dense", cfg.intermediate_size, act=cfg.hidden_act)
        x = layer.layer_norm(x, "output.LayerNorm", eps)
    return x


@architecture(
    *(f"Bert{end}" for end in _ENDS),
    defaults={"hidden_act": "gelu", "max_position_embeddings": 512},
    ignore=[*_UNUSED, "cls.*"],
)
def bert(cfg: ModelConfig, m: Model) -> None:
    """BERT, with its classifiers."""
    stem = m.stem("bert.", "embeddings.word_embeddings")
    x = encoder(cfg, m, stem, 0)
    if cfg.architecture.endswith("ForSequenceClassification"):
        x = m.act(m.linear(x, f"{stem}pooler.dense", cfg.hidden_size, bias=True), "tanh")
        m.states(m.linear(x, "classifier", cfg.num_labels, bias=True), "classify", pooling="cls")
    elif cfg.architecture.endswith("ForTokenClassification"):
        m.states(m.linear(x, "classifier", cfg.num_labels, bias=True), "token_classify")
    else:
        m.states(x, pooling="cls")


@architecture(
    *(f"{family}{end}" for family in ("Roberta", "XLMRoberta") for end in _ENDS),
    defaults={"hidden_act": "gelu", "max_position_embeddings": 512, "pad_token_id": 1},
    ignore=[*_UNUSED, "lm_head.*"],
)
def roberta(cfg: ModelConfig, m: Model) -> None:
    """RoBERTa, with its classifiers: BERT with positions that start after the padding's position."""
    stem = m.stem("roberta.", "embeddings.word_embeddings")
    x = encoder(cfg, m, stem, cfg.get("pad_token_id", 1) + 1)
    if cfg.architecture.endswith("ForSequenceClassification"):
        x = m.act(m.linear(x, "classifier.dense", cfg.hidden_size, bias=True), "tanh")
        m.states(m.linear(x, "classifier.out_proj", cfg.num_labels, bias=True), "classify", pooling="cls")
    elif cfg.architecture.endswith("ForTokenClassification"):
        m.states(m.linear(x, "classifier", cfg.num_labels, bias=True), "token_classify")
    else:
        m.states(x, pooling="cls")
