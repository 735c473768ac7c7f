"""The published document: true to the routes, and whatever is made from it is answered as it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings

schemathesis = pytest.importorskip("schemathesis")

from schemathesis.checks import (  # noqa: E402
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

from lynxkv.integrations.hf import Model  # noqa: E402
from lynxkv.server.app import Api, create_app, routes_of  # noqa: E402
from lynxkv.server.openapi import openapi  # noqa: E402
from lynxkv.server.options import ServeOptions  # noqa: E402
from lynxkv.server.service import Service  # noqa: E402
from tests.server.test_answers import SCHEMA  # noqa: E402
from tests.server.test_operations import get  # noqa: E402

if TYPE_CHECKING:
    from tests.server.conftest import Running

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture
def schema(model: Model, store: Path) -> Iterator[Any]:
    """The document as a server in this process publishes it; whatever its clients call it by."""
    options = ServeOptions(host="0.0.0.0", max_new_tokens=3, deadline_s=30)
    yield schemathesis.openapi.from_asgi("/openapi.json", create_app(Service(model, str(store), options)))
    schemathesis.python.asgi.shutdown_lifespans()


def test_the_document_is_true_to_the_routes(server: Running) -> None:
    published = json.loads(get(server, "/openapi.json")[2])
    assert published == openapi("org/tiny", server.service.options)
    assert published["paths"].keys() == {route.path.replace(":path", "") for route in routes_of(Api(server.service))}
    figures = published["components"]["schemas"]["Figures"]["required"]
    assert sorted(figures) == sorted(SCHEMA["$defs"]["figures"]["required"])
    jsonschema.Draft202012Validator.check_schema(published["components"]["schemas"]["ChatRequest"])


@pytest.mark.parametrize(
    ("path", "mode"),
    [
        ("/v1/completions", "positive"),
        ("/v1/completions", "negative"),
        ("/v1/chat/completions", "positive"),
        ("/v1/chat/completions", "negative"),
        ("/v1/models/{name}", "positive"),
    ],
)
def test_whatever_is_sent_is_answered_as_the_document_says(schema: Any, path: str, mode: str) -> None:
    """Answers and refusals have the forms that are published, and there is no 500."""
    operation = schema[path]["GET" if "models" in path else "POST"]
    strategy = operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode))
    statuses: set[int] = set()

    @settings(
        max_examples=60,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def check(case: Any) -> None:
        if mode == "positive" and "chat" in path:
            case.body["messages"][-1]["role"] = "user"  # which no schema can say
        statuses.add(case.call_and_validate(checks=CHECKS).status_code)

    check()
    # Whatever a schema cannot say, such as which caches there are, is refused as well.
    assert statuses <= {200, 400, 404, 405, 413, 415}
    assert 200 in statuses or mode == "negative" or "models" in path
