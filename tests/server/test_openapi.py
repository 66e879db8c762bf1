"""The OpenAPI document has every path, and no body, valid or not, causes a 500."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from llmpy import AsyncEngine
from llmpy.server import build_app
from llmpy.server.app import POST


@pytest.fixture(scope="module")
def app(tmp_path_factory, write_model):
    model = write_model(tmp_path_factory.mktemp("small"), max_position_embeddings=48)
    engine = AsyncEngine(model, device="cpu", kv_cache_memory_bytes="4MiB")
    yield build_app(engine, served_model_name=("tiny",))
    engine.close()


def test_every_path_with_a_body_is_there(client):
    found = client.get("/openapi.json").json()
    posts = {path for path, item in found["paths"].items() if "post" in item}
    assert posts == {path for path in POST if not path.endswith("/cancel")}
    assert found["components"]["schemas"]["CompletionRequest"]["required"] == ["prompt"]


def test_nothing_is_a_500(app):
    operations = [result.ok() for result in schemathesis.openapi.from_asgi("/openapi.json", app).get_all_operations()]
    assert len(operations) > 20
    for operation in operations:

        @settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
        @given(case=operation.as_strategy())
        def check(case):
            response = case.call()
            assert response.status_code != 500, (case.path, case.body, response.text)

        check()
