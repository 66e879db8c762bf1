"""`llmpy eval`: its own tasks, through llmpy and through transformers, and tasks of lm-evaluation-harness."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmpy import LLM, InvalidRequestError, UnsupportedError
from llmpy.cli import evaluate as cli_evaluate
from llmpy.cli import main
from llmpy.evaluation import TASKS, EngineModel, evaluate

EXACT: dict[str, Any] = {"device": "cpu", "dtype": "float32", "activation_dtype": "float", "max_model_len": 512}
DIGESTS = {"arithmetic": "d7c47b194f1e883a", "copying": "59894121da30ec6c", "json": "55c1080ba5b35bd3"}
DIGESTS["choice"] = "4109a4ba9c8bd768"
"""Of all items: a changed question changes every score that somebody has written down."""


@pytest.mark.parametrize("name", TASKS)
def test_the_questions_are_the_same_everywhere(name: str) -> None:
    items = TASKS[name].items()
    assert len(items) == 100 and TASKS[name].items(7) == items[:7]
    assert hashlib.sha256(json.dumps(items).encode()).hexdigest()[:16] == DIGESTS[name]
    assert all(item.answer in item.choices for item in items if item.choices)
    wrong = {"arithmetic": " 1000", "copying": " dog", "json": ' {"name": "Ada"', "choice": " E"}[name]
    assert all(TASKS[name].is_right(item.answer, item.answer) for item in items)
    assert not any(TASKS[name].is_right(wrong, item.answer) for item in items)


class Oracle:
    """Answers the first questions of every task right, and the others wrong."""

    def __init__(self, num_right: int) -> None:
        self.num_right, self.items = num_right, {item.prompt: item for task in TASKS.values() for item in task.items()}

    def logprobs(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        is_answer = [text == self.items[prompt].answer for prompt, text in pairs]
        return [-1.0 if same == (index < 4 * self.num_right) else -2.0 for index, same in enumerate(is_answer)]

    def complete(self, prompts: Sequence[str], max_tokens: int) -> list[str]:
        answers = [self.items[prompt].answer + "\nQuestion:" for prompt in prompts]
        return answers[: self.num_right] + [" no"] * (len(prompts) - self.num_right)


def test_right_answers_are_counted() -> None:
    for one in evaluate(Oracle(4), limit=16):
        assert one.is_right == [True] * 4 + [False] * 12 and one.score == 0.25
        assert one.error == pytest.approx((0.25 * 0.75 / 16) ** 0.5)
    with pytest.raises(InvalidRequestError, match="no built-in task 'sums'; have arithmetic, copying"):
        evaluate(Oracle(0), ["sums"])


def test_the_command(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "--max-model-len", "512", "--limit", "4"]
    assert main(["eval", str(demo_model), *options, "--tasks", "json,choice", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["task"], row["metric"], row["items"]) for row in rows] == [("json", "accuracy", 4), ("choice", "accuracy", 4)]
    assert rows[0]["value"] >= 0.75
    one = SimpleNamespace(json=False)
    cli_evaluate._show(one, "json", "accuracy", 0.75, 0.25, 4)
    cli_evaluate._show(one, "wiki", "perplexity", 12.5, None, 9)
    wanted = "json accuracy 0.7500 ± 0.2500 (4 items) wiki perplexity 12.5000 (9 items)"
    assert capsys.readouterr().out.split() == wanted.split()


class Reference:
    """The demo model in transformers, float32."""

    def __init__(self, path: Path) -> None:
        import torch
        import transformers

        options = {"gguf_file": path.name}
        self.torch, self.tokenizer = torch, transformers.AutoTokenizer.from_pretrained(path.parent, **options)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **options).eval()

    def logprobs(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        found = []
        for prompt, text in pairs:
            start, ids = len(self.tokenizer(prompt).input_ids), self.tokenizer(prompt + text).input_ids
            with self.torch.no_grad():
                rows = self.model(self.torch.tensor([ids])).logits[0].double().log_softmax(-1)
            found.append(sum(float(rows[place - 1, ids[place]]) for place in range(start, len(ids))))
        return found

    def complete(self, prompts: Sequence[str], max_tokens: int) -> list[str]:
        return [self._complete(prompt, max_tokens) for prompt in prompts]

    def _complete(self, prompt: str, max_tokens: int) -> str:
        ids = self.torch.tensor([self.tokenizer(prompt).input_ids])
        given, cache, text = ids, None, ""
        found: list[int] = []
        while len(found) < max_tokens and "\n" not in text and (not found or found[-1] != self.tokenizer.eos_token_id):
            with self.torch.no_grad():
                made = self.model(given, past_key_values=cache, use_cache=True)
            cache = made.past_key_values
            given = made.logits[:, -1:].argmax(-1)
            found.append(int(given))
            text = self.tokenizer.decode(found, skip_special_tokens=True)
        return text


MAX_LOGPROB_ERROR = 1e-4
"""Nats, of one continuation."""
NUM_COMPARED = 25


@pytest.mark.slow
def test_scores_equal_those_of_transformers(demo_model: Path) -> None:
    """In float32 every answer is the same, and logprobs differ by less than MAX_LOGPROB_ERROR (10 minutes of a processor)."""
    theirs = Reference(demo_model)
    pairs = [(item.prompt, choice) for item in TASKS["choice"].items(4) for choice in item.choices]
    pairs += [(item.prompt, item.answer) for item in TASKS["json"].items(4)]
    with LLM(demo_model, **EXACT) as llm:
        ours, found = EngineModel(llm).logprobs(pairs), evaluate(llm, limit=NUM_COMPARED)
    largest = max(abs(a - b) for a, b in zip(ours, theirs.logprobs(pairs), strict=True))
    wanted = evaluate(theirs, limit=NUM_COMPARED)
    print(f"largest difference {largest:.2g};", ", ".join(f"{one.task} {one.score:.2f}" for one in found))
    assert largest < MAX_LOGPROB_ERROR
    assert [one.answers for one in found] == [one.answers for one in wanted]
    assert [one.score for one in found] == [one.score for one in wanted]


@pytest.fixture(scope="module")
def harness(demo_model: Path) -> Any:
    """The demo model as a model of lm-evaluation-harness."""
    pytest.importorskip("lm_eval")
    from llmpy.integrations.lm_eval import HarnessModel

    with LLM(demo_model, **{**EXACT, "max_model_len": 128}, max_num_seqs=4) as llm:
        yield HarnessModel(llm)


def asked(*arguments: object) -> Any:
    return SimpleNamespace(args=arguments)


def test_logprobs_of_the_harness(harness: Any) -> None:
    pairs = [("The capital of France is", " Paris"), ("The capital of France is", " Rome"), ("", "Hello there")]
    found = harness.loglikelihood([asked(*pair) for pair in pairs], disable_tqdm=True)
    one, two = harness.llm.score(pairs[0][0], [" Paris", " Rome"])
    assert found[:2] == [(one.sum_logprob, True), (two.sum_logprob, False)]
    ids = [harness.prefix_token_id, *harness.tok_encode("Hello there")]
    assert found[2][0] == harness.llm.score([ids])[0].sum_logprob


def test_whole_texts_longer_than_the_model(harness: Any) -> None:
    """Every token counts once: a text of two windows has the sum of its windows."""
    text = "one two three four five six seven eight nine ten " * 14
    ids, length = harness.tok_encode(text), harness.max_length
    assert length < len(ids) < 2 * length - 2
    (found,) = harness.loglikelihood_rolling([asked(text)], disable_tqdm=True)
    first = harness.llm.score([[harness.prefix_token_id, *ids[: length - 1]]])[0]
    rest = len(ids) - (length - 1)
    second = harness.llm.score([ids[-length:]], start=length - rest)[0]
    assert found == first.sum_logprob + second.sum_logprob


def test_answers_of_the_harness(harness: Any) -> None:
    wanted = {"until": ["\n", "."], "max_gen_toks": 8, "do_sample": False}
    requests = [asked("The capital of France is", wanted), asked("1 2 3", {"until": " 6", "max_gen_toks": 16})]
    found = harness.generate_until(requests, disable_tqdm=True)
    assert found[0] == " Paris" and found[1].startswith(" 4 5") and "6" not in found[1]
    with pytest.raises(UnsupportedError, match="generation_kwargs: 'num_beams' is not supported"):
        harness.generate_until([asked("a", {"num_beams": 2})])
    assert harness.apply_chat_template([{"role": "user", "content": "Hi"}]).endswith("<|im_start|>assistant\n")


TASK = """
task: fruit
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["{{{{right}}}}", "{{{{wrong}}}}"]
doc_to_target: 0
target_delimiter: " "
metric_list: [{{metric: acc}}]
"""


@pytest.mark.slow
def test_a_task_of_the_harness_from_its_registry(harness: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.api.registry import get_model
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [("The capital of France is", "Paris", "Rome"), ("Two plus two is", "four", "purple")]
    rows.append(("The capital of Spain is", "Paris", "Madrid"))  # answered wrong
    data = tmp_path / "fruit.jsonl"
    data.write_text("".join(json.dumps({"question": a, "right": b, "wrong": c}) + "\n" for a, b, c in rows))
    (tmp_path / "fruit.yaml").write_text(TASK.format(data=data))
    assert get_model("llmpy") is type(harness)
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = simple_evaluate(model=harness, tasks=["fruit"], task_manager=tasks, bootstrap_iters=0)
    assert found["results"]["fruit"]["acc,none"] == pytest.approx(2 / 3)
