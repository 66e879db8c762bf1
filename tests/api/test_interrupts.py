"""Ctrl-C: a script ends as a shell expects, and the outputs until then are correct."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from llmpy import GenerationInterrupted, PoolingParams, SamplingParams
from llmpy.engine import progress

WAIT_S = 60
SCRIPT = """
import sys
from llmpy import LLM
llm = LLM(sys.argv[1], device="cpu", kv_cache_memory_bytes="16MiB")
prompts = [[5, 6] * 60] * 4000
print("ready", flush=True)
{call}
print("went on")
"""
CALLS = {
    "generate": "llm.generate(prompts, max_tokens=100, ignore_eos=True)",
    "score": "llm.score(prompts * 10)",
    "embed": "llm.embed(prompts * 10)",
    "as_completed": "list(llm.as_completed(prompts, max_tokens=100, ignore_eos=True))",
    "stream": "[None for _ in range(9999) for _ in llm.stream(prompts[0], max_tokens=100, ignore_eos=True)]",
}


class InterruptingBar:
    """A progress bar that sends Ctrl-C when some requests have ended."""

    def __init__(self, **options):
        self.done = 0

    def update(self, n):
        self.done += n
        if self.done >= 60:
            self.done = float("-inf")
            os.kill(os.getpid(), signal.SIGINT)

    def close(self):
        pass


@pytest.fixture
def every_update(monkeypatch):
    """Updates progress bars at every finished request; with the usual interval a fast machine would finish first."""
    monkeypatch.setattr(progress, "REFRESH_S", 0.0)


@pytest.fixture
def run_script(tiny_model, tmp_path):
    """Runs shell text with the script as $0 and the model as $1, and waits until the call runs."""

    def run(call, shell):
        script = tmp_path / "job.py"
        script.write_text(SCRIPT.format(call=CALLS[call]))
        words = ["bash", "-c", shell, str(script), str(tiny_model), sys.executable]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, text=True)
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)
        return process

    return run


def interrupt(process):
    """Sends Ctrl-C until the script ends, because Python loses an interrupt during the finalisation of an object."""
    for _ in range(WAIT_S):
        process.send_signal(signal.SIGINT)
        try:
            return process.communicate(timeout=1)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError("the script goes on")


@pytest.mark.parametrize("call", CALLS)
def test_a_script_ends_by_sigint(run_script, call):
    process = run_script(call, 'exec "$2" "$0" "$1"')
    out, err = interrupt(process)
    assert process.returncode == -signal.SIGINT and out == "" and err.splitlines()[-1].startswith("KeyboardInterrupt"), err


def test_a_loop_of_a_shell_ends(run_script):
    process = run_script("generate", 'for i in 1 2; do "$2" "$0" "$1"; done')
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=WAIT_S)
    assert "ready" not in out and process.returncode in (-signal.SIGINT, 128 + signal.SIGINT)


def test_an_interrupt_before_anything_runs_has_no_outputs(open_tiny, monkeypatch):
    llm = open_tiny()

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm._frontend, "prompts", interrupt)
        for call in (llm.generate, llm.score, llm.embed):
            with pytest.raises(GenerationInterrupted) as caught:
                call("hello")
            assert list(caught.value.partial) == []
    assert llm.generate("hello", max_tokens=1)[0].finished


def test_states_that_were_not_computed_are_not_finished(open_tiny, every_update):
    llm = open_tiny(max_num_seqs=2)
    with pytest.raises(KeyboardInterrupt) as caught:
        llm.embed([[5, 6, 7]] * 3000, use_tqdm=InterruptingBar)
    partial = caught.value.partial
    done = [output for output in partial if output.finished]
    left = [output for output in partial if not output.finished]
    assert len(partial) == 3000 and done and left
    assert all(output.error is None and output.outputs.embedding.size for output in done)
    assert all(str(output.error) == "request was aborted before it finished" for output in left)
    assert all(output.outputs.embedding.size == 0 and "aborted" in repr(output) for output in left)
    with pytest.raises(ValueError, match=rf"numpy\(\): {len(left)} of 3000 prompts have no result; number \d+: request was ab"):
        partial.numpy()
    assert type(partial)(done).numpy().shape == (len(done), done[0].outputs.embedding.size)


def test_scores_that_were_not_computed_say_so(open_tiny, every_update):
    llm = open_tiny(max_num_seqs=2)
    with pytest.raises(KeyboardInterrupt) as caught:
        llm.score([[5, 6, 7]] * 3000, use_tqdm=InterruptingBar)
    partial = caught.value.partial
    done = [output for output in partial if output.error is None]
    assert 0 < len(done) < 3000
    assert all(len(output.token_logprobs) == 2 and np.isfinite(output.sum_logprob) for output in done)
    assert {str(output.error) for output in partial if output.error is not None} == {"request was aborted before it finished"}
    assert llm.score([[5, 6, 7]])[0].error is None
    assert llm.embed([[5]], PoolingParams())[0].finished
    assert llm.generate([[5]], SamplingParams(max_tokens=1))[0].finished


def test_what_was_queued_carries_what_was_done(open_tiny, every_update):
    llm = open_tiny()
    llm.enqueue([[5, 6]] * 300, max_tokens=20, ignore_eos=True)
    with pytest.raises(GenerationInterrupted) as caught:
        llm.wait_for_completion(use_tqdm=InterruptingBar)
    reasons = {output.outputs[0].finish_reason for output in caught.value.partial}
    assert len(caught.value.partial) == 300 and reasons == {"length", "abort"}
    assert llm.wait_for_completion() == [] and llm.stats().num_running == 0
