"""Builds a loadable library, packages that contain one, and the packages of examples/."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import llmpy

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 100, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
}  # fmt: skip
CLIP = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 42, "patch_size": 14}  # fmt: skip
LATENT = {"kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
          "first_k_dense_replace": 2, "n_routed_experts": 4, "moe_intermediate_size": 32}  # fmt: skip
NEEDING = {
    "layer_norm": {"architectures": ["CohereForCausalLM"]},
    "experts": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
    "conv": {"architectures": ["MambaForCausalLM"], "state_size": 8, "conv_kernel": 4, "expand": 2, "time_step_rank": 4},
    "row_attention": {"architectures": ["BertModel"], "layer_norm_eps": 1e-5, "hidden_act": "gelu", "type_vocab_size": 2},
    "head_linear": {"architectures": ["DeepseekV3ForCausalLM"], **LATENT},
    "splice": {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "image_token_index": 98,
               "text_config": {"model_type": "llama", **SIZES}, "vision_config": CLIP},
}  # fmt: skip
"""Configurations of models that need an operation."""
PAGE = Path(__file__).parents[2] / "docs/develop/adding-a-backend.md"
EXAMPLES = Path(__file__).parents[2] / "examples"
LIBRARY = """
#include <llmpy_backend.h>
#include <string.h>

static void nothing(void) {}
#define SOME(name) .name = (void *)nothing,

static struct device_traits traits = {.size_bytes = sizeof traits, .default_tokens = 77, .default_seqs = 5};

/* The table, with room behind it for the fields of a newer header. */
static struct {
    struct backend table;
    void *newer[4];
} grown = {.table = {
    .abi = BACKEND_ABI, .size_bytes = sizeof grown.table, .name = "fake", .traits = &traits,
    SOME(open) SOME(close) SOME(describe) SOME(fusions) SOME(supports) SOME(activations) SOME(buffer_create)
    SOME(buffer_destroy) SOME(upload) SOME(download) SOME(synchronize) SOME(matrix_create) SOME(matrix_destroy)
    SOME(matrix_bytes) SOME(matrix_arithmetic) SOME(matrix_write) SOME(matrix_read) SOME(kv_layer_bytes) SOME(embed)
    SOME(linear) SOME(rms_norm) SOME(gated) SOME(add) SOME(select) SOME(rope) SOME(kv_write) SOME(attention)
}};

__attribute__((visibility("default"))) const struct backend *ENTRY_NAME(const struct backend_host *host)
{
    (void)host;
    CHANGE
    return &grown.table;
}
"""


@pytest.fixture(scope="session")
def install_example(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Builds a package of examples/ by pip, in a new folder; a function may change its copied source first."""

    def install(name: str, change: Callable[[Path], None] = lambda source: None) -> Path:
        source, target = tmp_path_factory.mktemp("source") / name, tmp_path_factory.mktemp("site")
        shutil.copytree(EXAMPLES / name, source, ignore=shutil.ignore_patterns("*.so", "build", "*.egg-info", "__pycache__"))
        change(source)
        options = ["-q", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=target)
        assert done.returncode == 0, done.stdout + done.stderr
        return target

    return install


@pytest.fixture
def refusal_of(tmp_path: Path) -> Callable[[str, str], str]:
    """refusal_of(device, operation) -> why a model that needs an operation is refused; "": the device takes it."""

    def ask(device: str, operation: str) -> str:
        (tmp_path / "config.json").write_text(json.dumps({**SIZES, **NEEDING[operation]}))
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "CLIPImageProcessor"}))
        options = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "float32", "kv_cache_memory_bytes": "4MiB"}
        try:
            llmpy.LLM(tmp_path, device=device, **options).close()
        except llmpy.UnsupportedError as error:
            return str(error)
        return ""

    return ask


@pytest.fixture
def page_column() -> Callable[[str], dict[str, str]]:
    """page_column(kind) -> a column of the page's table of operations."""

    def column(kind: str) -> dict[str, str]:
        lines = PAGE.read_text().splitlines()
        first = next(i for i, line in enumerate(lines) if line.startswith("| operation "))
        rows = [[word.strip() for word in line.strip("| ").split("|")] for line in lines[first : lines.index("", first)]]
        number = rows[0].index(kind)
        return {row[0]: row[number] for row in rows[2:]}

    return column


@pytest.fixture
def build_library(tmp_path: Path) -> Callable[..., str]:
    """Builds a library against the installed header; a line of C may change its table before it is handed out."""

    def build(change: str = "", entry: str = "llmpy_backend") -> str:
        source, library = tmp_path / "fake.c", tmp_path / "fake.so"
        source.write_text(LIBRARY.replace("CHANGE", change).replace("ENTRY_NAME", entry))
        flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", f"-I{llmpy.get_include()}"]
        subprocess.run(["cc", *flags, str(source), "-o", str(library)], check=True)
        return str(library)

    return build


@pytest.fixture
def bring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs a package with an entry point of a kind, visible to importlib; `code` is the code of its function."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def bring(kind: str, code: str, package: str = "llmpy_fake", version: str = "1.2") -> None:
        monkeypatch.delitem(sys.modules, package, raising=False)
        (site / f"{package}.py").write_text(f"def library():\n    {code}\n")
        info = site / f"{package}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[llmpy.backends]\n{kind} = {package}:library\n")

    return bring
