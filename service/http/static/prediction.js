// What a recompute ratio costs and loses: predicted by the service and from the runs on this page, and measured by a race.
import { $ } from "/api.js";

const runs = []; // ratio, prompt tokens and seconds for a token of the prompt, of what was asked here
let service = null; // its prediction: costs and loss by ratio
let quality = null; // of its answers, where some are compared with full recompute

/** What stands between the points of a curve at a ratio. */
function between(points, ratio, value) {
  const above = points.findIndex((point) => point.ratio >= ratio);
  if (above <= 0) return value(points.at(above));
  const [low, high] = [points[above - 1], points[above]];
  return value(low) + ((ratio - low.ratio) / (high.ratio - low.ratio)) * (value(high) - value(low));
}

/** Seconds for a token of the prompt at a ratio: a straight line through the runs. */
function fitted(ratio) {
  const mean = (of) => runs.reduce((sum, run) => sum + of(run), 0) / runs.length;
  const ratioMean = mean((run) => run.ratio);
  const timeMean = mean((run) => run.perToken);
  const slope = mean((run) => (run.ratio - ratioMean) * (run.perToken - timeMean)) / mean((run) => (run.ratio - ratioMean) ** 2);
  return Math.max(0, timeMean + slope * (ratio - ratioMean));
}

/** Seconds to the first token at a ratio and what they are predicted from; null where nothing says so yet. */
function expected(ratio) {
  const last = runs.at(-1);
  if (new Set(runs.map((run) => run.ratio)).size > 1) return [fitted(ratio) * last.tokens, `from ${runs.length} runs`];
  if (!service) return null;
  if (service.costs[0].prefill_s !== null) {
    const seconds = between(service.costs, ratio, (point) => point.prefill_s);
    const tokens = last?.tokens ?? service.prompt_tokens;
    return [(seconds * tokens) / service.prompt_tokens, `from the profile`];
  }
  if (!last) return null;
  const share = (of) => between(service.costs, of, (point) => point.work_share);
  return [(last.perToken * last.tokens * share(ratio)) / share(last.ratio), "from the last answer"];
}

function lost(ratio) {
  const curve = service?.loss;
  const words = curve
    ? ` Loss ${between(curve.points, ratio, (point) => point.first_token_kl_nats).toFixed(3)} nats, measured ${curve.about}.`
    : " Loss: not measured for this model; `cacheblend calibrate` does it on your documents.";
  if (quality?.first_token_kl_nats == null) return words;
  return `${words} Real in ${quality.evaluated} answers: ${quality.first_token_kl_nats.toFixed(3)} nats.`;
}

/** Say what is expected at the ratio of the slider. */
export function predict() {
  const automatic = runs.findLast((run) => run.ratio < 1)?.ratio ?? service?.recompute_ratio;
  const ratio = $("automatic").checked && automatic !== undefined ? automatic : Number($("ratio").value);
  $("ratio_shown").textContent = $("automatic").checked ? "automatic" : ratio.toFixed(2);
  $("ratio").disabled = $("automatic").checked;
  const time = expected(ratio);
  const words = time
    ? `First token predicted after ${time[0].toFixed(3)} s at ${ratio.toFixed(2)}, ${time[1]}.`
    : "Ask once: from then on the time is predicted here for every ratio.";
  $("prediction").textContent = words + lost(ratio);
}

/** Take in what the service says of its store. */
export function learn(store) {
  ({ prediction: service, quality } = store);
  predict();
}

/** Remember a run: the time for a token of its prompt, by the share of the tokens that were recomputed. */
export function remember(report, tokens) {
  const ratio = report.method === "full_recompute" ? 1 : report.method === "blend" ? report.recompute_ratio : null;
  if (ratio === null || !tokens) return;
  runs.push({ ratio, perToken: report.ttft_s / tokens, tokens });
  predict();
}

/** Say what a race measured of blending. */
export function showMeasured({ report, ttft, loss } = {}) {
  $("measured").hidden = report?.recompute_ratio == null;
  if ($("measured").hidden) return;
  const nats = loss == null ? "" : ` and lost ${loss.toFixed(3)} nats or a little more`;
  $("measured").textContent = `Real, in the last race: at ${report.recompute_ratio.toFixed(2)} the first token came after ${ttft.toFixed(3)} s${nats}.`;
}
