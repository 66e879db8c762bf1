"""GET /metrics: Prometheus text with our names, and with vLLM's names for the metrics that mean the same.

Routers poll often, so all text but the numbers is built once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ..metrics import families, layout_of
from .service import METRICS, Service

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@lru_cache(maxsize=8)
def _template(prefixes: tuple[str, ...], model: str, *layout: Any) -> str:
    """The Prometheus text with %s for each value."""
    common = {"model_name": model, "engine": "0"}
    lines: list[str] = []
    for prefix in prefixes:
        for family in families(*layout):
            shown = prefix + family.name
            titled = shown + ("_total" if family.kind == "counter" else "")
            lines += [f"# HELP {titled} {family.help}", f"# TYPE {titled} {family.kind}"]
            lines += [f"{shown}{suffix}{{{','.join(_labels({**common, **labels}))}}} %s" for suffix, labels in family.series]
    return "\n".join(lines) + "\n"


def _adapters(service: Service) -> str:
    """The gauge by which routers find adapters; "" if the engine serves none. Its value is the time."""
    engine = service.engine
    if not engine.config.enable_lora:
        return ""
    names: dict[str, bool] = {}
    running = engine._frontend.adapters.running()
    for feed in engine._driver.find(None):
        if (adapter := feed.request.prompt.adapter) is not None:
            names[adapter.request.name] = names.get(adapter.request.name, False) or adapter.number in running
    found = {is_running: ",".join(sorted(name for name, runs in names.items() if runs == is_running)) for is_running in (0, 1)}
    labels = {
        "model_name": service.names[0],
        "engine": "0",
        "max_lora": engine.config.max_loras,
        "running_lora_adapters": found[1],
        "waiting_lora_adapters": found[0],
    }
    lines = []
    for prefix in METRICS[service.options.metrics_compat]:
        name = f"{prefix}lora_requests_info"
        lines += [f"# HELP {name} Adapters whose requests run or only wait; the time.", f"# TYPE {name} gauge"]
        lines.append(f"{name}{{{','.join(_labels(labels))}}} {time.time():.3f}".replace("%%", "%"))
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, object]) -> Iterator[str]:
    for name, value in labels.items():
        clean = str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n").replace("%", "%%")
        yield f'{name}="{clean}"'


def text(service: Service) -> str:
    """All metrics in Prometheus' text format."""
    engine, prefixes = service.engine, METRICS[service.options.metrics_compat]
    stats, histograms = replace(engine.stats(), states=service.states()), engine.histograms()
    layout = layout_of(engine, stats, histograms)
    values = list(chain.from_iterable(family.values(stats, histograms) for family in families(*layout)))
    return _template(prefixes, service.names[0], *layout) % tuple(values * len(prefixes)) + _adapters(service)


async def metrics(service: Service, request: Request) -> ASGIApp:
    """Answers with all metrics."""
    return Response(text(service), media_type=CONTENT_TYPE)
