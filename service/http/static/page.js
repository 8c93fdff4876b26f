// The question, its answer, and what the service says of itself.
import { cite, showChunks } from "/answer.js";
import { $, KEY, api, button, counted, element, events, json, problem } from "/api.js";
import { list, startDocuments } from "/documents.js";
import { startExplain } from "/explain.js";
import { showMarkdown } from "/markdown.js";

const STORE_EVERY_MS = 3000;
const EXAMPLES = 3;
const TURNS = 6; // earlier ones that a question goes with
let model = "";
let asking = null;
let readingStore = false;
let holds = ""; // numbers of documents and chunks
let listed = []; // documents
let turns = []; // question and answer of each, the latest last
let last = null; // the request of the latest answer, and its report
let hasCompared = false;

/** The number in a field; undefined for an empty one, whose default the service knows. */
const numberIn = (id) => ($(id).value === "" ? undefined : Number($(id).value));
/** Times to first token without the waiting for other requests, which says nothing of the method. */
const firstToken = ({ ttft_s, queue_s }) => ttft_s - queue_s;
const inSeconds = (time) => `${time.toFixed(time < 0.1 ? 3 : time < 10 ? 2 : 1)} s`;

function body(question) {
  const earlier = turns.slice(-TURNS).flatMap((turn) => [
    { role: "user", content: turn.question },
    { role: "assistant", content: turn.answer },
  ]);
  return {
    messages: [...earlier, { role: "user", content: question }],
    method: $("method").value,
    stream: true,
    num_chunks: numberIn("num_chunks"),
    max_tokens: numberIn("max_tokens"),
    recompute_ratio: numberIn("ratio"),
    return_chunks: true,
  };
}

/** Show a question as asked, with nothing answered yet. */
function showAsked(question) {
  $("answered").hidden = false;
  $("asked").textContent = question;
  for (const id of ["answer", "summary", "how", "gain_number", "gain_words"]) $(id).textContent = "";
  for (const id of ["strip", "sources", "cut", "cited", "doubted", "without", "copy", "compare"]) $(id).hidden = true;
  $("answered").scrollIntoView({ block: "nearest" }); // a phone has no room for both
}

/** Show the turns before the one that is asked now. */
function showEarlier() {
  $("earlier").hidden = turns.length === 0;
  const shown = turns.map(({ question, answer }) => {
    const text = element("div", undefined, "text");
    showMarkdown(text, answer);
    const turn = element("div", undefined, "turn");
    turn.append(element("p", question, "asked"), text);
    return turn;
  });
  $("turns").replaceChildren(...shown);
}

/** Say which turns the next question goes with. */
function showFollowUp() {
  const sent = Math.min(turns.length, TURNS);
  $("with").hidden = sent === 0;
  $("with_turns").textContent = `A further question goes with the ${sent === 1 ? "turn" : `${sent} turns`} before it.`;
  $("question").placeholder = sent ? "Ask a further question" : "Ask about your documents";
}

/** Why no chunk went into an answer. */
function reasonWithout(report) {
  if (report.passages) return "The question brings its own passages, so no chunks of your documents were retrieved for it.";
  const why = report.no_chunks_reason ?? "it was asked for without chunks";
  return `The answer is what the model knows itself, from none of your documents: ${listed.length ? why : "there are none yet"}.`;
}

function showReport(report) {
  const ratio = report.recompute_ratio === null ? "" : ` at ratio ${report.recompute_ratio}`;
  $("gain_number").textContent = inSeconds(firstToken(report));
  $("gain_words").textContent = "to the first token";
  $("summary").textContent =
    report.hits + report.misses + report.num_chunks
      ? `${counted(report.hits, "chunk")} from the store, ${Math.max(report.misses, report.num_chunks - report.hits)} computed`
      : "Computed without chunks";
  $("how").textContent =
    `${report.method}${ratio}: ${report.recomputed_tokens} of ${counted(report.reusable_tokens, "reused token")} recomputed; ` +
    `waited ${inSeconds(report.queue_s)} for other requests, and ${inSeconds(report.retrieve_s)} for the search.`;
  $("without").hidden = report.chunks.length > 0;
  $("without").textContent = report.chunks.length ? "" : reasonWithout(report);
  showChunks(report.chunks);
  cite(report.chunks);
}

async function answer(question, signal) {
  const request = body(question);
  showEarlier();
  showAsked(question);
  const ask = () => api("/v1/chat/completions", { method: "POST", body: JSON.stringify(request), signal });
  const response = await ask().catch((error) => {
    if (error.code !== "context_length_exceeded" || !request.max_tokens) throw error;
    delete request.max_tokens; // less than that fits after the prompt
    return ask();
  });
  let report = null;
  let text = "";
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    const delta = event.choices[0]?.delta;
    if (delta?.reasoning_content) $("gain_words").textContent = "The model is thinking.";
    if (delta?.content) showMarkdown($("answer"), (text += delta.content));
    if (event.choices[0]?.finish_reason === "length") $("cut").hidden = false;
    report = event.cacheblend ?? report;
  }
  if (!report) return;
  turns.push({ question, answer: text });
  last = { request, report };
  $("copy").hidden = !navigator.clipboard;
  showReport(report);
  showFollowUp();
}

/** Have the service compute the same prompt in full, and show how much longer its first token takes. */
async function compare(signal) {
  const { request, report } = last;
  $("compare").hidden = hasCompared = true;
  const blended = firstToken(report);
  $("gain_words").textContent = "to the first token; full prefill is being measured";
  const asked = { ...request, method: "full_recompute", recompute_ratio: undefined, stream: false, max_tokens: 1, return_chunks: false };
  try {
    const full = firstToken((await json("/v1/chat/completions", { method: "POST", body: JSON.stringify(asked), signal })).cacheblend);
    const times = full / blended;
    $("gain_number").textContent = `${times.toFixed(times < 10 ? 1 : 0)} \u00d7`;
    const how = times > 1.05 ? "as fast" : times < 0.95 ? "as fast, so slower" : "as fast, so no gain";
    $("gain_words").textContent = `${how}: first token after ${inSeconds(blended)}, with full prefill ${inSeconds(full)}`;
  } catch (error) {
    if (last?.report !== report) throw error; // the page shows another question
    $("gain_words").textContent = "to the first token";
    $("compare").hidden = false;
    throw error;
  }
}

/** Do what can be stopped, in place of what is under way. */
async function run(work) {
  problem("");
  asking?.abort();
  const own = (asking = new AbortController());
  $("stop").disabled = false;
  try {
    await work(own.signal);
  } catch (error) {
    const isLong = error.code === "context_length_exceeded" && turns.length;
    if (error.name !== "AbortError") problem(isLong ? `${error.message}; or start anew, without the earlier turns` : error.message);
  } finally {
    if (asking === own) {
      $("stop").disabled = true;
      $("answer").setAttribute("aria-busy", "false");
    }
    showStore();
  }
}

async function ask() {
  const question = $("question").value.trim();
  if (!question) return;
  $("question").value = "";
  $("answer").setAttribute("aria-busy", "true");
  last = null;
  await run(async (signal) => {
    try {
      await answer(question, signal);
    } finally {
      if (!last && $("asked").textContent === question) $("question").value ||= question; // it can be asked again
    }
    $("answer").setAttribute("aria-busy", "false");
    if (!last?.report.hits || last.request.method === "full_recompute") return;
    $("compare").hidden = false;
    if (!hasCompared) await compare(signal); // of a visit's first answer, since it costs what the cache saves
  });
}

async function showStore() {
  if (readingStore) return; // a browser has few connections to a service, and the questions need them
  readingStore = true;
  try {
    const store = await json("/v1/store");
    const hits = store.ram.hits + store.nvme.hits;
    const asked = hits + store.misses;
    const fill = (tier) => `${(tier.bytes / 2 ** 20).toFixed(0)} of ${(tier.budget_bytes / 2 ** 20).toFixed(0)} MiB`;
    $("store").textContent = `${model}, ${store.chunks ? `over ${counted(store.chunks, "chunk")}` : "no documents yet"}`;
    $("tiers").textContent =
      `The store has KV of ${counted(store.nvme.entries, "chunk")}: RAM ${fill(store.ram)}, NVMe ${fill(store.nvme)}` +
      (asked ? `; hit rate ${Math.round((100 * hits) / asked)} %.` : ".");
    const now = `${store.documents} ${store.chunks}`;
    if (holds && $("documents").contains(document.activeElement)) return; // listed when no row has the focus any more
    if (holds && holds !== now) await list(); // by another tab or program
    holds = now;
  } catch {
    $("store").textContent = $("key_form").hidden ? "The service cannot be reached" : "";
  } finally {
    readingStore = false;
  }
}

/** Offer a question about each of the first documents. */
function showExamples() {
  const titles = listed.filter((document) => document.title && !document.damaged).map((document) => document.title);
  const questions = titles.slice(0, EXAMPLES).map((title) => `What is said about ${title}?`);
  const shown = [...$("examples").children].map((one) => one.textContent);
  if (questions.join("\n") === shown.join("\n")) return; // one of them may have the focus
  const exampleOf = (question) => {
    const made = button(question, () => {
      $("question").value = question;
      $("ask").requestSubmit();
    });
    made.title = question;
    return made;
  };
  $("examples").replaceChildren(...questions.map(exampleOf));
}

async function start() {
  try {
    const [first] = (await json("/v1/models")).data;
    model = first.id;
    const chosen = $("method").value || "blend";
    $("method").replaceChildren(...first.methods.map((name) => new Option(name, name, name === "blend", name === chosen)));
    problem("");
    await list();
  } catch (error) {
    problem(error.message);
  }
  await showStore();
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
// A browser says what is wrong with a field only where the field can be seen.
$("options").addEventListener("invalid", () => ($("options").open = true), true);
$("stop").addEventListener("click", () => {
  asking?.abort();
  $("gain_words").textContent = "The answer was stopped.";
});
$("compare").addEventListener("click", () => run(compare));
$("copy").addEventListener("click", () => navigator.clipboard.writeText(turns.at(-1).answer));
$("anew").addEventListener("click", () => {
  asking?.abort();
  turns = [];
  $("asked").textContent = ""; // nothing is asked again
  showEarlier();
  showFollowUp();
  $("answered").hidden = $("sources").hidden = true;
  $("question").focus();
});
$("key_form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value.trim());
  $("key_form").hidden = true;
  start();
});
setInterval(() => document.hidden || !$("key_form").hidden || showStore(), STORE_EVERY_MS);
startDocuments((documents) => {
  listed = documents;
  showExamples();
});
startExplain();
start();
