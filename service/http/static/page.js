// The question, its answer, and what the service says of itself.
import { cite, showChunks, showStrip } from "/answer.js";
import { $, api, button, events, keep, problem } from "/api.js";
import { list, startDocuments } from "/documents.js";
import { learn, predict, remember, showMeasured } from "/prediction.js";
import { race } from "/race.js";

const STORE_EVERY_MS = 3000;
const EXAMPLES = 3;
const small = matchMedia("(max-width: 40rem)"); // as in page.css
let model = "";
let asking = null;
let readingStore = false;
let examples = []; // questions that stand beside the store
let listed = []; // documents

function body(method, stream) {
  return {
    model,
    messages: [{ role: "user", content: $("question").value }],
    method,
    stream,
    num_chunks: $("num_chunks").value === "" ? undefined : Number($("num_chunks").value), // left out: the service's default
    max_tokens: $("max_tokens").value === "" ? null : Number($("max_tokens").value),
    recompute_ratio: $("automatic").checked ? null : Number($("ratio").value),
    return_chunks: true,
  };
}

function summarise(report) {
  const ratio = report.recompute_ratio === null ? "" : ` at ratio ${report.recompute_ratio}`;
  $("summary").textContent =
    `${report.method}${ratio}: first token after ${report.ttft_s.toFixed(3)} s; ${report.hits} chunks from the store, ` +
    `${report.misses} computed; ${Math.round(report.recomputed_tokens)} of ${report.reusable_tokens} reused tokens recomputed.`;
}

async function during(work) {
  problem("");
  asking?.abort();
  asking = new AbortController();
  const { signal } = asking;
  $("stop").disabled = false;
  $("answer").setAttribute("aria-busy", "true");
  try {
    await work(signal);
  } catch (error) {
    if (error.name !== "AbortError") problem(error.message);
  } finally {
    if (asking.signal === signal) {
      $("stop").disabled = true;
      $("answer").setAttribute("aria-busy", "false");
    }
    showStore();
  }
}

async function ask(signal) {
  if (small.matches) $("answered").scrollIntoView({ block: "start" }); // a phone has no room for both
  for (const id of ["answer", "summary"]) $(id).textContent = "";
  for (const id of ["strip", "sources", "cited"]) $(id).hidden = true;
  const asked = { ...body($("method").value, true), stream_options: { include_usage: true } };
  const response = await api("/v1/chat/completions", { method: "POST", body: JSON.stringify(asked), signal });
  let report = null;
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    $("answer").append(document.createTextNode(event.choices[0]?.delta?.content ?? ""));
    if (event.cacheblend) {
      report = event.cacheblend;
      summarise(report);
      showStrip(report.chunks);
      showChunks(report.chunks);
    }
    if (event.usage && report) remember(report, event.usage.prompt_tokens);
  }
  if (report) cite(report.chunks);
}

async function raceAll(signal) {
  const methods = [...$("method").options].map((option) => option.value);
  const results = await race(methods, (method) => body(method, false), signal);
  for (const { report, ttft, tokens } of results.values()) remember({ ...report, ttft_s: ttft }, tokens);
  showMeasured(results.get("blend"));
}

async function showStore() {
  if (readingStore) return; // a browser has few connections to a service, and the questions need them
  readingStore = true;
  try {
    const store = await (await api("/v1/store")).json();
    const { prefix, ...tiers } = store;
    const hits = Object.values(tiers).reduce((sum, tier) => sum + (tier?.hits ?? 0), 0);
    const asked = hits + store.misses;
    const fill = (tier) => `${(tier.bytes / 2 ** 20).toFixed(0)} of ${(tier.budget_bytes / 2 ** 20).toFixed(0)} MiB`;
    $("store").textContent =
      `RAM ${fill(store.ram)}, NVMe ${fill(store.nvme)}\n${store.nvme.entries} chunks` +
      (asked ? `, hit rate ${Math.round((100 * hits) / asked)} %` : "");
    learn(store);
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
  $("examples").replaceChildren(
    ...questions.map((question) => {
      const example = button(question, () => {
        $("question").value = question;
        $("ask").requestSubmit();
      });
      example.title = question; // the row may cut it
      return example;
    }),
  );
}

async function start() {
  try {
    const [first] = (await (await api("/v1/models")).json()).data;
    model = first.id;
    const chosen = $("method").value || "blend";
    $("method").replaceChildren(...first.methods.map((name) => new Option(name, name, name === "blend", name === chosen)));
    problem("");
    await list();
  } catch (error) {
    problem(error.message);
  }
  await showStore();
  predict();
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  during(ask);
});
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
// A browser says what is wrong with a field only where the field can be seen.
$("ask").addEventListener("invalid", () => ($("ask").querySelector("details").open = true), true);
$("race").addEventListener("click", () => $("ask").reportValidity() && during(raceAll));
$("stop").addEventListener("click", () => asking?.abort());
for (const id of ["ratio", "automatic"]) $(id).addEventListener("input", predict);
$("key_form").addEventListener("submit", (event) => {
  event.preventDefault();
  keep($("key").value.trim());
  $("key_form").hidden = true;
  start();
});
/** The ratio has its row above the buttons where there is room, and is one of the options on a phone. */
function placeRatio() {
  if (small.matches) $("options").prepend($("tuning"));
  else $("actions").before($("tuning"));
}
small.addEventListener("change", placeRatio);
placeRatio();
setInterval(() => document.hidden || showStore(), STORE_EVERY_MS);
startDocuments((documents) => {
  listed = documents;
  showExamples();
});
start();
