"""The requests of the soak, the answers of an engine alone, and the comparison.

The engine's weights alternate between two sets; epoch e has set e % 2. A request that lived under one epoch must give the
lone engine's bits with those weights, or a beginning of them where it was ended early. One that lived through commits has
spans with rising epochs; if the last commit was a "recompute", its last span must equal the output of an engine alone for all
tokens before it.
"""

from __future__ import annotations

import importlib.util
import random
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from llmpy import LLM, CompletionOutput, RequestOutput, RequestOutputKind, SamplingParams, ScoreOutput
from llmpy.outputs import VersionSpan

DELTA = RequestOutputKind.DELTA
N_JOBS = 48
MOST_KEPT = 30
LENGTH = 320


def load(name: str, path: Path) -> ModuleType:
    """A module of another folder of tests."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def arrays(sample: CompletionOutput) -> tuple[np.ndarray, ...]:
    """All arrays of a sample with a row for each token."""
    found: list[np.ndarray] = [sample.token_ids_array]
    if sample.sampled is not None and sample.logprobs is not None:
        found += [*sample.sampled[:4], sample.logprobs.ids, sample.logprobs.values]
    return tuple(found)


def same_beginning(have: tuple[np.ndarray, ...], wanted: tuple[np.ndarray, ...]) -> bool:
    """Whether all arrays have the same bits up to the shorter length."""
    n = len(have[0])
    return all(len(a) == n and a.tobytes() == b[:n].tobytes() for a, b in zip(have, wanted, strict=True))


class Job:
    """A request of the catalogue.

    Args:
        prompt: Text or ids.
        params: Sampling parameters; a score uses only temperature and logprobs.
        start: First position of a score; 0 = a generation.
    """

    def __init__(self, prompt: object, params: SamplingParams, start: int) -> None:
        self.prompt = prompt
        self.params = params
        self.start = start
        self.answers: list[Any] = []
        """Answers of an engine alone, for each set of weights."""


class Catalogue:
    """Requests, two sets of weights, and the answers of engines alone.

    Args:
        folder: Folder for the model's files.
        device: "cpu" or a CUDA device.
        rng: Chooses the requests.
    """

    def __init__(self, folder: Path, device: str, rng: random.Random) -> None:
        helpers = load("soak_models", Path(__file__).parents[1] / "api/conftest.py")
        first, second = folder / "even", folder / "odd"
        for path in (first, second):
            path.mkdir()
            helpers.make_model(path, max_position_embeddings=LENGTH)
        self.path = first
        self.weights = [read_weights(first), change_weights(second)]
        lone = {"device": device, "kv_cache_memory_bytes": "4MiB", "enable_prefix_caching": False}
        self.options = {"device": device, "kv_cache_memory_bytes": "384KiB", "max_num_seqs": 12, "max_num_batched_tokens": 96,
                        "scheduling_policy": "priority"}  # fmt: skip
        self.lone = [LLM(path, **lone) for path in (first, second)]
        self.jobs = [self._make(rng, i) for i in range(N_JOBS)]
        for job in self.jobs:
            job.answers = [self._answer(llm, job) for llm in self.lone]
        self._crossed: list[tuple[Job, int, CompletionOutput]] = []
        self._lock = threading.Lock()
        self.recomputed: set[int] = set()
        """Epochs with a commit that recomputed running requests."""

    def _make(self, rng: random.Random, i: int) -> Job:
        """A prompt after one of three prefixes, and random parameters."""
        head = np.random.default_rng(i % 3).integers(3, 300, 80).tolist()
        ids = head[: rng.choice([0, 20, 64, 80])] + [rng.randrange(3, 300) for _ in range(rng.randrange(1, 70))]
        prompt: object = ids if i % 4 else "hello there, " * rng.randrange(1, 6)
        kind = rng.randrange(4)
        fields: dict[str, Any] = {"max_tokens": rng.randrange(1, 70), "seed": i, "ignore_eos": rng.random() < 0.8}
        fields |= {"temperature": 0.0} if kind == 0 else {"temperature": 0.9}
        if kind == 1:
            fields |= {"top_p": 0.9, "top_k": 40, "min_p": 0.001}
        if kind == 2:
            fields |= {"repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {7: 2.0}}
        if rng.random() < 0.5:
            fields["logprobs"] = rng.choice([0, 3])
        if kind and rng.random() < 0.3:
            fields["n"] = rng.randrange(2, 5)
        if rng.random() < 0.2:
            fields["prompt_logprobs"] = 1
        if rng.random() < 0.3:
            fields["stop_token_ids"] = [rng.randrange(300) for _ in range(6)]
        if rng.random() < 0.2 and i % 4 == 0:
            fields["stop"] = ["e", "ab"]
        fields["detokenize"] = rng.random() < 0.6 or "stop" in fields
        start = rng.randrange(1, 4) if i % 8 == 5 else 0
        if i % 8 == 3 and fields.get("n", 1) == 1 and "prompt_logprobs" not in fields:
            prompt = {"prompt_token_ids": ids, "output_token_ids": [rng.randrange(3, 300) for _ in range(8)]}
            fields["max_tokens"] += 8
        return Job(prompt, SamplingParams(**fields), min(start, len(ids)))

    @staticmethod
    def _answer(llm: LLM, job: Job) -> Any:
        if job.start:
            return llm.score([job.prompt], start=job.start, temperature=0.9, logprobs=2, use_tqdm=False)[0]
        return llm.generate([job.prompt], [job.params], use_tqdm=False)[0]

    def check_score(self, job: Job, found: ScoreOutput, epochs: tuple[int, int]) -> None:
        """Compares a score that was submitted in one epoch and finished in the same or a later one."""
        wanted = job.answers[epochs[0] % 2]
        assert len(found.token_logprobs) == len(wanted.token_logprobs)
        if epochs[0] == epochs[1]:
            assert found.token_logprobs.tobytes() == wanted.token_logprobs.tobytes(), job.prompt
            assert found.top is not None and found.top.values.tobytes() == wanted.top.values.tobytes(), job.prompt

    def keep(self, job: Job, sample: CompletionOutput) -> None:
        """Keeps a sample that lived through commits, to compare it when nothing runs."""
        with self._lock:
            if len(self._crossed) < MOST_KEPT:
                self._crossed.append((job, sample.index, sample))

    def compare_rebuilt(self) -> int:
        """Compares the last spans of samples after a recomputing commit with an engine alone; returns their number."""
        n = 0
        for job, index, sample in self._crossed:
            span = sample.weight_versions[-1]
            if span.epoch not in self.recomputed or sample.num_prior_tokens:
                continue
            before = sample.token_ids[: span.start]
            ids = self.lone[0].generate([job.prompt], max_tokens=1, use_tqdm=False)[0].prompt_token_ids
            params = job.params.replace(n=1, sample_index=index, prompt_logprobs=None, stop=(), detokenize=False)
            prompt = {"prompt_token_ids": ids, "output_token_ids": before}
            alone = self.lone[span.epoch % 2].generate([prompt], [params], use_tqdm=False)[0].outputs[0]
            have = tuple(part[span.start :] for part in arrays(sample))
            assert same_beginning(have, arrays(alone)), (job.prompt, job.params, sample.weight_versions)
            n += 1
        self._crossed.clear()
        return n


class Received:
    """The outputs of one request.

    Args:
        catalogue, job: The request.
        kind: Kind of the outputs.
        epoch: The engine's epoch before the request was submitted.
    """

    def __init__(self, catalogue: Catalogue, job: Job, kind: RequestOutputKind, epoch: int) -> None:
        self.catalogue = catalogue
        self.job = job
        self.kind = kind
        self.epoch = epoch
        self.samples: dict[int, CompletionOutput] = {}
        self.n_tokens = 0
        self.finished = False

    def add(self, output: RequestOutput) -> None:
        """Adds an output; checks that none follows the last one."""
        assert not self.finished
        self.finished = output.finished
        for sample in output.outputs:
            earlier = self.samples.get(sample.index)
            if earlier is not None and earlier.finish_reason is not None:
                assert self.kind is not DELTA and sample.token_ids == earlier.token_ids, "something came behind the end"
            if earlier is not None and self.kind is DELTA:
                sample = joined(earlier, sample)
            elif earlier is not None:
                assert same_beginning(arrays(earlier), arrays(sample)), "an output is no continuation of the one before"
                assert sample.text.startswith(earlier.text) or not self.job.params.detokenize
            self.samples[sample.index] = sample
        self.n_tokens = sum(len(sample.token_ids_array) for sample in self.samples.values())

    def check(self, epoch: int, ended_early: bool = False) -> None:
        """Compares all outputs.

        Args:
            epoch: The engine's epoch after the last output.
            ended_early: Whether another thread may have ended the request.
        """
        for index, sample in self.samples.items():
            wanted = self.job.answers[self.epoch % 2].outputs[index]
            check_spans(sample, self.epoch, epoch)
            is_whole = sample.finish_reason not in (None, "abort")
            assert ended_early or is_whole, (sample.finish_reason, self.job.prompt)
            if epoch != self.epoch:
                if len(sample.weight_versions) > 1:
                    self.catalogue.keep(self.job, sample)
                continue
            assert same_beginning(arrays(sample), arrays(wanted)), (self.job.prompt, self.job.params, index)
            if is_whole:
                assert len(sample.token_ids) == len(wanted.token_ids) and sample.text == wanted.text, (sample, wanted)
                assert (sample.finish_reason, sample.stop_reason) == (wanted.finish_reason, wanted.stop_reason)


def joined(first: CompletionOutput, second: CompletionOutput) -> CompletionOutput:
    """Two parts of a sample as one."""
    spans = [*first.weight_versions, *second.weight_versions]
    if first.weight_versions and second.weight_versions and first.weight_versions[-1].epoch == second.weight_versions[0].epoch:
        a, b = first.weight_versions[-1], second.weight_versions[0]
        assert a.end == b.start and a.version == b.version, (a, b)
        spans = [*first.weight_versions[:-1], VersionSpan(a.start, b.end, a.version, a.epoch), *second.weight_versions[1:]]
    return replace(
        second,
        text=first.text + second.text,
        token_ids_array=np.concatenate([first.token_ids_array, second.token_ids_array]),
        sampled=join_columns(first.sampled, second.sampled),
        logprobs=join_logprobs(first.logprobs, second.logprobs),
        weight_versions=spans,
        _token_ids=None,
    )


def join_columns(first: Any, second: Any) -> Any:
    if first is None or second is None:
        return second if first is None else first
    return type(first)(*(np.concatenate(pair) for pair in zip(first, second, strict=True)))


def join_logprobs(first: Any, second: Any) -> Any:
    if not first or not second:
        return first or second
    columns = (np.concatenate([getattr(part, name) for part in (first, second)]) for name in ("ids", "values", "ranks"))
    return type(first)(*columns, 304)


def check_spans(sample: CompletionOutput, first_epoch: int, last_epoch: int) -> None:
    """Checks that every token is in one span, and that epochs rise within the request's lifetime."""
    spans, end = sample.weight_versions, 0
    for span in spans:
        assert span.start == end < span.end and span.version == label(span.epoch), spans
        end = span.end
    assert end == len(sample.token_ids_array), (spans, end)
    epochs = [span.epoch for span in spans]
    assert epochs == sorted(set(epochs)) and all(first_epoch <= epoch <= last_epoch for epoch in epochs), (spans, first_epoch)


def label(epoch: int) -> int | str:
    """The trainer's label of an epoch's weights."""
    return f"step-{epoch}" if epoch else 0


def read_weights(path: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(path / "model.safetensors")


def change_weights(path: Path) -> Mapping[str, np.ndarray]:
    """Changes the weights in a model's file."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(11)
    weights = {
        name: (value * 0.9 + rng.normal(0, 0.05, value.shape)).astype(np.float32) for name, value in read_weights(path).items()
    }
    save_file(weights, path / "model.safetensors")
    return weights
