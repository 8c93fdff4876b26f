"""The requests that applications' own libraries write, as the service's recipes have recorded them, sent to vLLM.

They pass the plugin's middleware and vLLM's renderer, and an engine with the connector.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient
from vllm_engines import POSITIONS, RECIPES, VOCAB, MakeModel, Served, apart, open_engine

from cacheblend.blend.loading import load_tokenizer
from cacheblend.integrations.vllm.router import CHAT, COMPLETIONS, BlendRoutes
from cacheblend.retriever import PlainTokenizer


class Answers(NamedTuple):
    """Of a recipe's last request: vLLM's outputs with the connector, at ratio 1.0 too, and without it."""

    first: Any
    second: Any
    third: Any
    whole: Any
    exact: Any = None


@contextmanager
def opened_routes(served: Served) -> Iterator[TestClient]:
    """A client of the plugin's middleware in front of a route that answers with what it got."""
    from vllm.renderers.online_renderer import OnlineRenderer

    async def echo(request: Request) -> Response:
        return Response(await request.body())

    engine, routes = served.llm.llm_engine, BlendRoutes()
    renderer = OnlineRenderer(
        engine.model_config,
        engine.renderer,
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
        enable_auto_tools=True,
        tool_parser="pythonic",
    )
    client_of_engine = SimpleNamespace(vllm_config=engine.vllm_config, collective_rpc=None)
    app = Starlette(routes=[Route(path, echo, methods=["POST"]) for path in (CHAT, COMPLETIONS)])
    routes.attach_router(app)
    with TestClient(app) as client:
        assert client.portal is not None
        client.portal.call(routes.init_state, client_of_engine, SimpleNamespace(online_renderer=renderer), None)
        assert routes.engine is not None
        yield client
        routes.engine.marker.close()


def generate(llm: Any, token_ids: list[int], salt: str, marks: dict[str, Any] | None) -> Any:
    """VLLM's output of a prompt, under the salt that a recipe has for itself."""
    from vllm import SamplingParams

    extra = {} if marks is None else {"kv_transfer_params": {"cacheblend": marks}}
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=VOCAB, ignore_eos=True, extra_args=extra)
    (output,) = llm.generate([{"prompt_token_ids": token_ids, "cache_salt": salt}], params, use_tqdm=False)
    return output


def ask_all(served: Served, client: TestClient, name: str) -> Answers:
    """Send a recipe's requests, the last one at ratio 1.0 as well; the KV of what was missed is stored between two."""
    outputs, scheduler = list[Any](), served.scheduler.connector._scheduler
    scheduler.largest_share = type(scheduler).largest_share
    for one in RECIPES["requests"][name]:
        given = {**one["body"], "cache_salt": name}
        marked = client.post(one["path"], json=given).raise_for_status().json()
        if marked == given:
            outputs.append(None)
            continue
        params = marked["kv_transfer_params"]
        token_ids, marks = params.get("prompt_token_ids") or marked["prompt"], params["cacheblend"]
        outputs.append(generate(served.llm, token_ids, name, marks))
        for _ in range(20):
            served.llm.llm_engine.engine_core.get_output()  # steps, as the engine's own loop does while there are misses
        served.connector._worker._store.flush()
    scheduler.largest_share = 9.0  # at ratio 1.0 nothing is worth a blend
    return Answers(*outputs, generate(served.llm, token_ids, name, {**marks, "ratio": 1.0}))


@pytest.fixture(scope="module")
def answers(make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answers]:
    """Every recipe's."""
    folder, store = make_model("llama", positions=POSITIONS), tmp_path_factory.mktemp("recipes")
    options: dict[str, Any] = {"max_model_len": POSITIONS, "connector": {"context_filler": "none"}}
    with open_engine(folder, store, **options) as served, opened_routes(served) as client:
        found = {name: ask_all(served, client, name) for name in RECIPES["requests"]}
    with open_engine(folder, None, max_model_len=POSITIONS) as plain:
        exact = {name: generate(plain.llm, one.whole.prompt_token_ids, name, None) for name, one in found.items()}
    return {name: one._replace(exact=exact[name]) for name, one in found.items()}


@pytest.mark.parametrize("name", RECIPES["requests"])
def test_recipes(answers: dict[str, Answers], make_model: MakeModel, name: str) -> None:
    """Texts that came twice are hits in another order under another question, and at ratio 1.0 the answer is vLLM's own."""
    plain = PlainTokenizer(load_tokenizer(str(make_model("llama", positions=POSITIONS))))
    tokens = sum(len(plain.ids(text)) for text in RECIPES["texts"])
    one = answers[name]
    assert one.first is None
    assert one.second.kv_transfer_params["cacheblend"] == {"blended": False, "reason": "not_stored"}
    for output in (one.third, one.whole):
        report = output.kv_transfer_params["cacheblend"]
        assert (report["blended"], report["hits"]) == (True, len(RECIPES["texts"])), report
        assert report["hit_tokens"] >= 0.9 * tokens
    assert one.whole.outputs[0].token_ids == one.exact.outputs[0].token_ids
    assert apart(one.whole, one.exact) < 1e-3
