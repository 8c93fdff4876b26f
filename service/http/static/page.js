// The question, its answer, and what the service says of itself.
import { cite, showChunks } from "/answer.js";
import { $, KEY, api, button, events, json, problem } from "/api.js";
import { list, startDocuments } from "/documents.js";

const STORE_EVERY_MS = 3000;
const EXAMPLES = 3;
let model = "";
let asking = null;
let readingStore = false;
let examples = []; // questions that stand beside the store
let listed = []; // documents

/** The number in a field; undefined for an empty one, whose default the service knows. */
const numberIn = (id) => ($(id).value === "" ? undefined : Number($(id).value));

function body() {
  return {
    model,
    messages: [{ role: "user", content: $("question").value }],
    method: $("method").value,
    stream: true,
    num_chunks: numberIn("num_chunks"),
    max_tokens: numberIn("max_tokens"),
    recompute_ratio: numberIn("ratio"),
    return_chunks: true,
  };
}

async function answer(signal) {
  $("answered").scrollIntoView({ block: "nearest" }); // a phone has no room for both
  for (const id of ["answer", "summary"]) $(id).textContent = "";
  for (const id of ["strip", "sources", "cited"]) $(id).hidden = true;
  const response = await api("/v1/chat/completions", { method: "POST", body: JSON.stringify(body()), signal });
  let report = null;
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    const delta = event.choices[0]?.delta;
    if (delta?.reasoning_content) $("summary").textContent = "The model is thinking.";
    $("answer").append(delta?.content ?? "");
    report = event.cacheblend ?? report;
  }
  if (!report) return;
  const ratio = report.recompute_ratio === null ? "" : ` at ratio ${report.recompute_ratio}`;
  $("summary").textContent =
    `${report.method}${ratio}: first token after ${report.ttft_s.toFixed(3)} s; ${report.hits} chunks from the store, ` +
    `${report.misses} computed; ${Math.round(report.recomputed_tokens)} of ${report.reusable_tokens} reused tokens recomputed.`;
  showChunks(report.chunks);
  cite(report.chunks);
}

async function ask() {
  problem("");
  asking?.abort();
  const own = (asking = new AbortController());
  $("stop").disabled = false;
  $("answer").setAttribute("aria-busy", "true");
  try {
    await answer(own.signal);
  } catch (error) {
    if (error.name !== "AbortError") problem(error.message);
  } finally {
    if (asking === own) {
      $("stop").disabled = true;
      $("answer").setAttribute("aria-busy", "false");
    }
    showStore();
  }
}

async function showStore() {
  if (readingStore) return; // a browser has few connections to a service, and the questions need them
  readingStore = true;
  try {
    const store = await json("/v1/store");
    const hits = store.ram.hits + store.nvme.hits;
    const asked = hits + store.misses;
    const fill = (tier) => `${(tier.bytes / 2 ** 20).toFixed(0)} of ${(tier.budget_bytes / 2 ** 20).toFixed(0)} MiB`;
    $("store").textContent =
      `RAM ${fill(store.ram)}, NVMe ${fill(store.nvme)}\n${store.nvme.entries} chunks` +
      (asked ? `, hit rate ${Math.round((100 * hits) / asked)} %` : "");
    examples = store.examples;
    showExamples();
  } catch {
    $("store").textContent = "Store: cannot be read";
  } finally {
    readingStore = false;
  }
}

/** Offer the questions that stand beside the store, and after them one for each of the first documents. */
function showExamples() {
  const titles = listed.filter((document) => document.title && !document.damaged).map((document) => document.title);
  const questions = [...(listed.length ? examples : []), ...titles.map((title) => `What is said about ${title}?`)].slice(0, EXAMPLES);
  const shown = [...$("examples").children].map((one) => one.textContent);
  if (questions.join("\n") === shown.join("\n")) return; // one of them may have the focus
  const exampleOf = (question) =>
    button(question, () => {
      $("question").value = question;
      $("ask").requestSubmit();
    });
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
$("ask").addEventListener("invalid", () => ($("ask").querySelector("details").open = true), true);
$("stop").addEventListener("click", () => asking?.abort());
$("key_form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value.trim());
  $("key_form").hidden = true;
  start();
});
setInterval(() => document.hidden || showStore(), STORE_EVERY_MS);
startDocuments((documents) => {
  listed = documents;
  showExamples();
});
start();
