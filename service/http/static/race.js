// All methods on one question, as bars of the time to the first token.
import { $, api, element } from "/api.js";

const NAMES = { full_recompute: "Full recompute", prefix_cache: "Prefix cache", full_reuse: "Full reuse", blend: "Blend" };
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

function lane(method, { ttft, text, report }, slowest, reference) {
  const item = element("li");
  const track = element("div", undefined, `lane ${method}`);
  const bar = element("span");
  bar.style.width = `${(100 * ttft) / slowest}%`;
  bar.style.setProperty("--took", ttft);
  track.append(bar);
  const answer = element("p");
  const words = wordsOf(text);
  const compared = words.slice(0, MARKED_WORDS);
  const trimmed = (word) => word.trim();
  const differs = reference === null ? [] : differing(compared.map(trimmed), wordsOf(reference).slice(0, MARKED_WORDS).map(trimmed));
  compared.forEach((word, index) => answer.append(differs[index] ? element("mark", word) : document.createTextNode(word)));
  answer.append(words.slice(MARKED_WORDS).join(""));
  const exact = method === "full_recompute" || method === "prefix_cache";
  const recomputed = exact ? "every token" + (report.hits ? " but a known prefix" : "") : `${Math.round(report.recomputed_tokens)} tokens`;
  item.append(element("strong", NAMES[method] ?? method), track, element("b", ttft < 1 ? `${(1000 * ttft).toFixed(ttft < 0.1 ? 1 : 0)} ms` : `${ttft.toFixed(2)} s`), answer);
  item.append(element("p", `${recomputed} computed anew${reference === null ? "" : `; ${differs.filter(Boolean).length} words differ`}`, "small"));
  Object.assign(item.dataset, { method, seconds: ttft });
  return item;
}

/** Run the methods on one question; `bodyOf` makes the request of one. Gives what each took and said. */
export async function race(methods, bodyOf, signal) {
  try {
    return await raceAll(methods, bodyOf, signal);
  } catch (error) {
    $("speed_up").textContent = "The race was stopped.";
    throw error;
  }
}

async function raceAll(methods, bodyOf, signal) {
  const results = new Map();
  $("raced").hidden = false;
  $("raced").scrollIntoView({ block: "nearest" });
  $("lanes").replaceChildren();
  const runs = [...methods, ...[...methods].reverse()];
  for (const [done, method] of runs.entries()) {
    $("speed_up").textContent = `Running ${NAMES[method] ?? method}, ${done + 1} of ${runs.length} …`;
    // Under a salt of its own prefix_cache finds none of this very prompt's blocks: every method meets the prompt for the first time.
    const salt = method === "prefix_cache" ? { cache_salt: String(Math.random()) } : {};
    const again = results.has(method) ? { max_tokens: 1 } : {};
    const response = await api("/v1/chat/completions", { method: "POST", body: JSON.stringify({ ...bodyOf(method), ...salt, ...again }), signal });
    const { cacheblend: report, choices, usage } = await response.json();
    const first = results.get(method);
    if (first) first.ttft = Math.min(first.ttft, report.ttft_s);
    else results.set(method, { ttft: report.ttft_s, text: choices[0].message.content, report, tokens: usage.prompt_tokens });
  }
  const slowest = Math.max(...[...results.values()].map((result) => result.ttft));
  const reference = results.get("full_recompute");
  $("lanes").replaceChildren(
    ...[...results].map(([method, result]) => lane(method, result, slowest, result === reference ? null : (reference?.text ?? null))),
  );
  const blend = results.get("blend");
  $("speed_up").replaceChildren();
  if (blend && reference) {
    const times = reference.ttft / blend.ttft;
    $("speed_up").append(element("strong", `${times.toFixed(1)} ×`), times >= 1 ? "faster with blending" : "as fast with blending: this prompt is too short to gain");
  }
  $("raced").scrollIntoView({ block: "nearest" });
  return results;
}
