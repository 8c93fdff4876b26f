// All methods on one question, as bars of the time to the first token.
import { $, api, element } from "/api.js";

const NAMES = { full_recompute: "Full recompute", prefix_cache: "Prefix cache", full_reuse: "Full reuse", blend: "Blend" };
const FIRST = ["full_recompute", "blend"]; // whose bars are drawn first: the others take as long again
const MAX_LOGPROBS = 20; // that the service gives
const MARKED_WORDS = 400; // of an answer; the comparison's table has the square of them

/** The words, each with the space around it, so that together they are the text. */
const wordsOf = (text) => text.match(/\s*\S+\s*/g) ?? [];

/** Which of the words are not in the longest common subsequence with the others. */
function differing(words, others) {
  const common = Array.from({ length: words.length + 1 }, () => new Uint16Array(others.length + 1));
  for (let i = words.length - 1; i >= 0; i--) {
    for (let j = others.length - 1; j >= 0; j--) {
      common[i][j] = words[i] === others[j] ? common[i + 1][j + 1] + 1 : Math.max(common[i + 1][j], common[i][j + 1]);
    }
  }
  const differs = [];
  for (let i = 0, j = 0; i < words.length; ) {
    if (j < others.length && words[i] === others[j]) {
      differs.push(false);
      i++;
      j++;
    } else if (j < others.length && common[i][j + 1] > common[i + 1][j]) j++;
    else {
      differs.push(true);
      i++;
    }
  }
  return differs;
}

/** Probabilities of the likeliest first tokens by their texts, parts of a character left out; null where none are given. */
function likeliest(choice) {
  const first = choice.logprobs?.content?.[0];
  if (!first) return null;
  const whole = first.top_logprobs.filter(({ token }) => !token.includes("\ufffd"));
  return new Map(whole.map(({ token, logprob }) => [token, Math.exp(logprob)]));
}

/** KL divergence of the first token from full recompute's, in nats, of the tokens that both have and all others together. */
function lossOf(full, other) {
  if (!full || !other) return null;
  const shared = [...full].filter(([token]) => other.has(token)).map(([token, share]) => [share, other.get(token)]);
  const others = [0, 1].map((at) => Math.max(1e-9, 1 - shared.reduce((sum, pair) => sum + pair[at], 0)));
  return Math.max(0, [...shared, others].reduce((sum, [p, q]) => sum + p * Math.log(p / q), 0));
}

/** A method's bar, its answer and what it did; `drawLane` says how long it took. */
function addLane(method, { text, report }, reference) {
  const item = element("li");
  const track = element("div", undefined, `lane ${method}`);
  track.append(element("span"));
  const answer = element("p");
  const words = wordsOf(text);
  const compared = words.slice(0, MARKED_WORDS);
  const trimmed = (word) => word.trim();
  const differs = reference === null ? [] : differing(compared.map(trimmed), wordsOf(reference).slice(0, MARKED_WORDS).map(trimmed));
  compared.forEach((word, index) => answer.append(differs[index] ? element("mark", word) : document.createTextNode(word)));
  answer.append(words.slice(MARKED_WORDS).join(""));
  const exact = method === "full_recompute" || method === "prefix_cache";
  const recomputed = exact ? "every token" + (report.hits ? " but a known prefix" : "") : `${Math.round(report.recomputed_tokens)} tokens`;
  const about = `${recomputed} computed anew${reference === null ? "" : `; ${differs.filter(Boolean).length} words differ`}`;
  item.append(element("strong", NAMES[method] ?? method), track, element("b"), answer, element("p", about, "small"), element("p", "", "small loss"));
  item.dataset.method = method;
  $("lanes").append(item);
  return item;
}

function drawLane(item, { ttft, loss }, slowest) {
  const bar = item.querySelector(".lane span");
  bar.style.width = `${(100 * ttft) / slowest}%`;
  bar.style.setProperty("--took", ttft);
  item.querySelector("b").textContent = ttft < 1 ? `${(1000 * ttft).toFixed(ttft < 0.1 ? 1 : 0)} ms` : `${ttft.toFixed(2)} s`;
  if (loss != null) item.querySelector(".loss").textContent = `loss ${loss.toFixed(3)} nats`;
  item.dataset.seconds = ttft;
}

function showSpeedUp(reference, blend) {
  if (!reference || !blend) return;
  const times = reference.ttft / blend.ttft;
  const words = times >= 1 ? "faster with blending" : "as fast with blending: this prompt is too short to gain";
  $("speed_up").replaceChildren(element("strong", `${times.toFixed(1)} ×`), words);
}

/** Run the methods on one question; `bodyOf` makes the request of one. Gives what each took, said and lost. */
export async function race(methods, bodyOf, signal) {
  $("raced").setAttribute("aria-busy", "true");
  try {
    return await raceAll(methods, bodyOf, signal);
  } catch (error) {
    $("racing").textContent = "The race was stopped.";
    throw error;
  } finally {
    $("raced").setAttribute("aria-busy", "false");
  }
}

async function raceAll(methods, bodyOf, signal) {
  const results = new Map();
  const lanes = new Map();
  $("raced").hidden = false;
  $("raced").scrollIntoView({ block: "nearest" });
  $("lanes").replaceChildren();
  $("speed_up").replaceChildren();
  const there = FIRST.filter((method) => methods.includes(method));
  const others = methods.filter((method) => !there.includes(method));
  const runs = [there, others].flatMap((some) => [...some, ...some.toReversed()]);
  for (const [done, method] of runs.entries()) {
    $("racing").textContent = `Running ${NAMES[method] ?? method}, ${done + 1} of ${runs.length} …`;
    // Under a salt of its own prefix_cache finds none of this very prompt's blocks: every method meets the prompt for the first time.
    const salt = method === "prefix_cache" ? { cache_salt: String(Math.random()) } : {};
    const again = results.has(method) ? { max_tokens: 1, logprobs: true, top_logprobs: MAX_LOGPROBS } : {};
    const response = await api("/v1/chat/completions", { method: "POST", body: JSON.stringify({ ...bodyOf(method), ...salt, ...again }), signal });
    const { cacheblend: report, choices, usage } = await response.json();
    const result = results.get(method);
    if (result) Object.assign(result, { ttft: Math.min(result.ttft, report.ttft_s), first: likeliest(choices[0]) });
    else {
      results.set(method, { ttft: report.ttft_s, text: choices[0].message.content, report, tokens: usage.prompt_tokens });
      const reference = method === "full_recompute" ? null : (results.get("full_recompute")?.text ?? null);
      lanes.set(method, addLane(method, results.get(method), reference));
    }
    const reference = results.get("full_recompute");
    const slowest = Math.max(...[...results.values()].map((one) => one.ttft));
    for (const [name, one] of results) {
      if (one !== reference) one.loss = lossOf(reference?.first, one.first);
      drawLane(lanes.get(name), one, slowest);
    }
    showSpeedUp(reference, results.get("blend"));
  }
  $("racing").textContent = "";
  $("raced").scrollIntoView({ block: "nearest" });
  return results;
}
