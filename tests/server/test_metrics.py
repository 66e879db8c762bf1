"""Metrics: Prometheus' own parser reads them, routers find their gauges, counters count."""

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


def test_buckets_add_up(client):
    families, values = read(client)
    for name, family in families.items():
        if family.type == "histogram":
            counts = [sample.value for sample in family.samples if sample.name.endswith("_bucket")]
            assert counts == sorted(counts) and counts[-1] == values[f"{name}_count", None, None]
