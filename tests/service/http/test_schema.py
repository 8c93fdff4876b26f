"""Whatever the schema allows, or forbids, the API answers as the schema says, and without an error of its own."""

import json

import httpx
import schemathesis
from api import MODEL, serving
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import checks
from schemathesis.specs.openapi import checks as openapi_checks

from cacheblend.service import Engine

EXAMPLES = 40  # for each route; `python -m schemathesis.cli run http://127.0.0.1:8000/openapi.json` tries more
STREAMS = ("/v1/chat/completions", "/v1/completions")
CHECKS = [
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
    openapi_checks.negative_data_rejection,
]


def test_no_request_breaks_it(engine: Engine) -> None:
    """Requests that the schema allows, and ones that it forbids, are answered on every route as it says, streams too."""
    with serving(engine, max_documents=5) as (_, address):
        described = httpx.get(f"{address}/openapi.json").json()
        for body in (
            "ChatBody",
            "CompletionBody",
            "EmbeddingsBody",
            "MessagesBody",
            "CountBody",
        ):  # nothing else comes further than the model's name
            described["components"]["schemas"][body]["properties"]["model"] = {"type": "string", "enum": [MODEL]}
        schema = schemathesis.openapi.from_dict(described)
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
                response = case.call(base_url=address, timeout=60)
                case.validate_response(response, checks=CHECKS)
                if not isinstance(case.body, dict) or case.body.get("model") != MODEL or case.path not in STREAMS:
                    return
                case.body["stream"] = True
                body, headers = json.dumps(case.body), {"Content-Type": "application/json"}
                streamed = httpx.post(f"{address}{case.path}", content=body, headers=headers, timeout=60)  # to its end
                assert streamed.status_code < 500, streamed.text
                if streamed.status_code == 200:
                    assert streamed.text.rstrip().endswith("data: [DONE]")

            answers()
