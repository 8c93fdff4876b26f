"""Whatever the schema allows, or forbids, the API answers without an error of its own."""

from __future__ import annotations

import schemathesis
from api import MODEL, listening
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from cacheblend.service import Engine
from cacheblend.service.http import HttpConfig, Server

EXAMPLES = 12  # for each route; `python -m schemathesis.cli run http://127.0.0.1:8000/openapi.json` tries more


def test_no_request_breaks_it(engine: Engine) -> None:
    """Generated requests to every route, with bodies of the schema and mutated ones, give no 5xx, and errors in their shape."""
    http = HttpConfig(model_name=MODEL, max_documents=5)
    with Server(engine.config, http=http, engine=engine) as server, listening(server) as address:
        schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
        modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
        for result in schema.get_all_operations():
            operation = result.ok()
            cases = st.one_of(operation.as_strategy(generation_mode=mode) for mode in modes)

            @settings(
                max_examples=EXAMPLES,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=cases)
            def answers(case: schemathesis.Case) -> None:
                if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                    case.body["model"] = MODEL  # else nothing comes further than the model's name
                response = case.call(base_url=address, timeout=60)
                assert response.status_code < 500, response.text
                if response.status_code >= 400:
                    assert set(response.json()["error"]) == {"message", "type", "param", "code"}

            answers()
