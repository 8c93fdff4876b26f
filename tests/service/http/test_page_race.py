"""The race of the methods on the page, in a real browser, and the slider of the recompute ratio, which predicts."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from browser import NEEDS_BROWSER, ONCE, ask, fits, open_page
from engines import QUESTION
from waiting import wait_until

from cacheblend.service import Engine

pytestmark = NEEDS_BROWSER


@ONCE
def test_blend_is_drawn_before_the_others_run(page: Any, address: str) -> None:
    """Full recompute and blend race first: their bars and the speed-up are there while the other methods wait."""
    held: list[Any] = []

    def hold(route: Any) -> None:
        if route.request.post_data_json["method"] == "prefix_cache" and not held:
            held.append(route)
        else:
            route.continue_()

    page.route("**/v1/chat/completions", hold)
    open_page(page, address)
    ask(page, QUESTION, 3, 4)
    page.get_by_role("button", name="Race the methods").click()
    page.locator("#racing", has_text="Running Prefix cache, 5 of 8").wait_for()
    lanes = page.locator("#lanes li")
    assert [lane.get_attribute("data-method") for lane in lanes.all()] == ["full_recompute", "blend"]
    assert page.locator("#speed_up strong").is_visible()
    assert lanes.nth(1).locator(".loss").inner_text().startswith("loss 0.")
    wait_until(lambda: bool(held))
    held[0].continue_()
    page.locator("#raced[aria-busy=false]").wait_for()
    assert lanes.count() == 4
    assert page.locator("#racing").inner_text() == ""


def known_loss_nats(full: torch.Tensor, other: torch.Tensor, tokenizer: Any) -> float:
    """KL over the tokens, parts of a character left out, that are among the 20 likeliest of both, and all others together."""
    shares = [logits.double().softmax(0) for logits in (full, other)]
    likely = set.intersection(*(set(share.topk(20).indices.tolist()) for share in shares))
    shared = sorted(token for token in likely if "\ufffd" not in tokenizer.decode([token]))
    p, q = (torch.cat([share[shared], (1 - share[shared].sum())[None]]) for share in shares)
    return float((p * (p / q).log()).sum())


def test_race(page: Any, address: str, engine: Engine) -> None:
    """Each method has a bar as long as its time, the speed-up is what the bars say, and the ratio's time is predicted."""
    open_page(page, address)
    ask(page, QUESTION, 3, 12)
    page.get_by_role("button", name="Race the methods").click()
    page.locator("#raced[aria-busy=false]").wait_for()
    lanes = page.locator("#lanes li")
    assert [lane.get_attribute("data-method") for lane in lanes.all()] == [
        "full_recompute",
        "blend",
        "prefix_cache",
        "full_reuse",
    ]
    seconds = {lane.get_attribute("data-method"): float(lane.get_attribute("data-seconds")) for lane in lanes.all()}
    widths = [float(bar.evaluate("one => parseFloat(one.style.width)")) for bar in page.locator(".lane span").all()]
    slowest = max(seconds.values())
    assert widths == pytest.approx([100 * value / slowest for value in seconds.values()], abs=0.01)
    told = float(page.locator("#speed_up strong").inner_text().split()[0])
    assert told == pytest.approx(seconds["full_recompute"] / seconds["blend"], abs=0.06)
    losses = {lane.get_attribute("data-method"): lane.locator(".loss").inner_text() for lane in lanes.all()}
    assert losses["full_recompute"] == ""
    reference = engine.answer(QUESTION, top_k=3, max_tokens=1, method="full_recompute").first_logits
    for method in ("prefix_cache", "full_reuse", "blend"):
        logits = engine.answer(QUESTION, top_k=3, max_tokens=1, method=method).first_logits
        assert float(losses[method].split()[1]) == pytest.approx(
            known_loss_nats(reference, logits, engine.fusor.tokenizer), abs=0.0011
        )
    real = page.locator("#measured").inner_text()
    assert f"at 0.15 the first token came after {seconds['blend']:.3f} s and lost {losses['blend'].split()[1]} nats" in real
    assert page.locator('[data-method="prefix_cache"] mark').count() == 0  # exact
    page.get_by_role("checkbox", name="automatic").uncheck()
    slider = page.get_by_role("slider", name="Recompute ratio")
    for ratio in ("0", "1"):  # of so small a model both may take the same time
        slider.fill(ratio)
        words = page.locator("#prediction").inner_text()
        found = re.search(r"predicted after (\d+\.\d+) s at (\d\.\d\d), from (\d+) runs", words)
        assert found, words
        assert 0 <= float(found[1]) <= 2 * slowest
        assert (float(found[2]), int(found[3]) > 1) == (float(ratio), True)
    page.locator("#stop:disabled").wait_for()
    assert fits(page)


@ONCE
def test_the_loss_of_a_race(page: Any, address: str) -> None:
    """The loss is the KL divergence over the tokens that both answers name and all others together."""
    open_page(page, address)
    full, blend = {"a": 0.5, "b": 0.25, "c": 0.05}, {"a": 0.25, "b": 0.5, "d": 0.1}
    page.evaluate(
        """async (shares) => {
          window.fetch = async (path, options) => {
            const {method, top_logprobs} = JSON.parse(options.body);
            const report = {ttft_s: 0.1, recomputed_tokens: 5, method, recompute_ratio: null};
            const likely = Object.entries(shares[method]).map(([token, share]) => ({token, logprob: Math.log(share)}));
            const logprobs = top_logprobs === 20 ? {content: [{top_logprobs: likely}]} : null;
            const choices = [{message: {content: "green"}, logprobs}];
            return new Response(JSON.stringify({cacheblend: report, choices, usage: {prompt_tokens: 50}}));
          };
          const { race } = await import("/race.js");
          await race(["full_recompute", "blend"], (method) => ({method}), undefined);
        }""",
        {"full_recompute": full, "blend": blend},
    )
    expected = 0.5 * math.log(0.5 / 0.25) + 0.25 * math.log(0.25 / 0.5)  # and 0.25 of each are others
    assert page.locator('[data-method="blend"] .loss').inner_text() == f"loss {expected:.3f} nats"


def test_words_that_differ_are_marked(page: Any, address: str) -> None:
    open_page(page, address)
    page.evaluate(
        """async () => {
          const answers = {full_recompute: "the lamp is green today", blend: "the lamp was green"};
          window.fetch = async (path, options) => {
            const method = JSON.parse(options.body).method;
            const report = {ttft_s: method === "blend" ? 0.1 : 0.3, recomputed_tokens: 5, method, recompute_ratio: null};
            const message = {content: answers[method]};
            return new Response(JSON.stringify({cacheblend: report, choices: [{message}], usage: {prompt_tokens: 50}}));
          };
          const { race } = await import("/race.js");
          await race(["full_recompute", "blend"], (method) => ({method}), undefined);
        }"""
    )
    assert page.locator('[data-method="blend"] mark').all_inner_texts() == ["was "]
    assert page.locator('[data-method="full_recompute"] mark').count() == 0
    assert page.locator("#speed_up").inner_text().startswith("3.0 ")


@ONCE
def test_a_race_shows_whole_answers_and_its_end(page: Any, address: str) -> None:
    """Empty lines are no words that differ, a long answer is shown whole, and a race that fails does not stay running."""
    open_page(page, address)
    answer = "green lamp\n\n" + "word " * 500 + "end"
    page.evaluate(
        """async (content) => {
          window.fetch = async () => new Response(JSON.stringify(
            {cacheblend: {ttft_s: 1, recomputed_tokens: 5}, choices: [{message: {content}}], usage: {prompt_tokens: 50}}));
          const { race } = await import("/race.js");
          await race(["full_recompute", "blend"], (method) => ({method}), undefined);
        }""",
        answer,
    )
    lane = page.locator('[data-method="blend"]')
    assert lane.locator("p").first.evaluate("one => one.textContent") == answer
    assert "0 words differ" in lane.inner_text()
    page.evaluate(
        """async () => {
          window.fetch = async () => new Response("{}", {status: 500});
          const { race } = await import("/race.js");
          await race(["blend"], (method) => ({method}), undefined).catch(() => {});
        }"""
    )
    assert page.locator("#racing").inner_text() == "The race was stopped."


@ONCE
@pytest.mark.parametrize(
    ("costs", "answers", "expected"),
    [
        ([(0, 1.0, 0.1), (0.5, 2.0, 0.5), (1, 3.0, 1.0)], 0, "0.300 s at 0.25, from the profile."),
        ([(0, 0.1, None), (0.5, 0.5, None), (1, 1.0, None)], 1, "4.500 s at 0.25, from the last answer."),
        ([(0, 0.1, None), (0.5, 0.5, None), (1, 1.0, None)], 0, "Ask once"),
    ],
    ids=["profile", "one answer", "nothing yet"],
)
def test_the_slider_predicts(
    page: Any, address: str, costs: list[tuple[float, float, float | None]], answers: int, expected: str
) -> None:
    """Before a race the time is the profile's or follows from the answers given; the loss follows the slider, too."""
    points = [{"ratio": ratio, "work_share": share, "prefill_s": seconds} for ratio, share, seconds in costs]
    loss = [{"ratio": ratio, "first_token_kl_nats": kl} for ratio, kl in ((0, 0.3), (0.5, 0.1), (1, 0))]
    prediction = {"recompute_ratio": 0.15, "prompt_tokens": 100, "costs": points, "loss": {"about": "on lamps", "points": loss}}
    tier = {"bytes": 1, "budget_bytes": 2, "entries": 1, "hits": 0}
    quality = {"evaluated": 7, "first_token_kl_nats": 0.0421}
    store = {"ram": tier, "nvme": tier, "misses": 0, "prefix": {}, "quality": quality, "prediction": prediction}
    page.route("**/v1/store", lambda route: route.fulfill(json=store))
    open_page(page, address)
    page.get_by_role("checkbox", name="automatic").uncheck()
    page.get_by_role("slider", name="Recompute ratio").fill("0.25")
    for _ in range(answers):
        page.evaluate(
            """async () => {
              const { remember } = await import("/prediction.js");
              remember({method: "blend", recompute_ratio: 0.5, ttft_s: 7.5}, 250);
            }"""
        )
    page.locator("#prediction", has_text=expected).wait_for()
    words = page.locator("#prediction").inner_text()
    assert "Loss 0.200 nats, measured on lamps. Real in 7 answers: 0.042 nats." in words
    page.get_by_role("slider", name="Recompute ratio").fill("1")
    assert "Loss 0.000 nats" in page.locator("#prediction").inner_text()
