"""Metrics: Prometheus' own parser reads them, routers find their gauges, counters count."""

import httpx
from prometheus_client.parser import text_string_to_metric_families

ROUTERS = ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:cache_config_info")


def read(client):
    families = {family.name: family for family in text_string_to_metric_families(client.get("/metrics").text)}
    samples = [sample for family in families.values() for sample in family.samples]
    return families, {(s.name, s.labels.get("le"), s.labels.get("finished_reason")): s.value for s in samples}


def test_counters_count(client):
    _, before = read(client)
    client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 7, "ignore_eos": True})
    families, after = read(client)

    def more(name, le=None, reason=None):
        return after[name, le, reason] - before.get((name, le, reason), 0)

    for prefix in ("llmpy:", "vllm:"):
        assert more(f"{prefix}generation_tokens_total") == 7
        assert more(f"{prefix}request_success_total", reason="length") == 1
        assert more(f"{prefix}time_to_first_token_seconds_count") == 1
        assert more(f"{prefix}request_generation_tokens_sum") == 7
        assert more(f"{prefix}request_params_max_tokens_sum") == 7 and more(f"{prefix}inter_token_latency_seconds_count") == 6
    assert set(ROUTERS) <= families.keys()
    info = families["vllm:cache_config_info"].samples[0]
    assert info.value == 1 and info.labels["block_size"] == "16" and int(info.labels["num_gpu_blocks"]) > 0
    assert {sample.labels["model_name"] for family in families.values() for sample in family.samples} == {"tiny"}


GAUGES = "num_requests_waiting num_requests_running kv_cache_usage_perc num_dead_replicas cache_config_info"
GAUGES += " host_cache_blocks host_swapped_blocks num_requests_waiting_by_reason engine_sleep_state engine_state"
GAUGES += " disk_cache_blocks disk_cache_bytes weight_version_info host_cache_queued_bytes disk_cache_queued_blocks"
GAUGES += " kv_offload_cpu_cache_usage_perc"
COUNTERS = "prompt_tokens prompt_tokens_cached generation_tokens request_success num_preemptions prefix_cache_queries"
COUNTERS += " prefix_cache_hits spec_decode_num_draft_tokens spec_decode_num_accepted_tokens corrupted_requests request_errors"
COUNTERS += " num_swaps host_cache_hits skipped_load_tokens host_cache_stored_bytes host_cache_loaded_bytes"
COUNTERS += " external_prefix_cache_queries external_prefix_cache_hits disk_cache_stored_bytes disk_cache_loaded_bytes"
COUNTERS += " disk_cache_misses disk_cache_bad_files disk_cache_errors disk_cache_evictions"
COUNTERS += " blocks_swapped_out blocks_swapped_in saved_prompts saved_prompt_tokens saved_prompt_seconds"
COUNTERS += " kv_offload_total_bytes kv_offload_total_time kv_offload_tiering_write_bytes kv_offload_tiering_write_time"
COUNTERS += " kv_offload_tiering_read_bytes kv_offload_tiering_read_time"
COUNTERS += " fetched_prompt_tokens fetched_bytes fetch_seconds"
COUNTERS += " mm_cache_queries mm_cache_hits mm_cache_evictions images_encoded images_reencoded image_rows"
HISTOGRAMS = "time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds"
HISTOGRAMS += " e2e_request_latency_seconds request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds"
HISTOGRAMS += " request_inference_time_seconds iteration_tokens_total request_prompt_tokens request_generation_tokens"
HISTOGRAMS += " request_params_n request_params_max_tokens"


def test_every_series_is_there(client, serve):
    """All series exist, and none for unsupported features such as adapters."""
    families, _ = read(client)
    kinds = {"gauge": GAUGES, "counter": COUNTERS, "histogram": HISTOGRAMS}
    expected = {name: kind for kind, names in kinds.items() for name in names.split()}
    for prefix in ("llmpy:", "vllm:"):
        found = {name.removeprefix(prefix): family.type for name, family in families.items() if name.startswith(prefix)}
        assert found == expected
    with httpx.Client(base_url=serve(metrics_compat="none").url) as plain:
        assert read(plain)[0].keys() == {name for name in families if name.startswith("llmpy:")}


def test_buckets_add_up(client):
    families, values = read(client)
    for name, family in families.items():
        if family.type == "histogram":
            counts = [sample.value for sample in family.samples if sample.name.endswith("_bucket")]
            assert counts == sorted(counts) and counts[-1] == values[f"{name}_count", None, None]
