// The page asks the same API as any client. Whatever comes back is put in as text, never as markup.
const $ = (id) => document.getElementById(id);
const STORE_EVERY_MS = 3000;
let model = "";
let asking = null;

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function api(path, options = {}) {
  const response = await fetch(path, { ...options, headers: headers() });
  if (response.ok) return response;
  if (response.status === 401) $("key_label").hidden = false;
  const body = await response.json().catch(() => null);
  throw new Error(body?.error?.message ?? `${response.status} ${response.statusText}`);
}

function body(method, stream) {
  const ratio = $("ratio").value;
  return JSON.stringify({
    model,
    messages: [{ role: "user", content: $("question").value }],
    method,
    stream,
    num_chunks: Number($("num_chunks").value),
    max_tokens: $("max_tokens").value === "" ? null : Number($("max_tokens").value),
    recompute_ratio: ratio === "" ? null : Number(ratio),
    return_chunks: true,
  });
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    waiting += value;
    const blocks = waiting.split("\n\n");
    waiting = blocks.pop();
    for (const block of blocks) {
      const data = block.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function problem(message) {
  $("problem").hidden = !message;
  $("problem").textContent = message;
}

function summarise(report) {
  const ratio = report.recompute_ratio === null ? "" : ` at ratio ${report.recompute_ratio}`;
  $("summary").textContent =
    `${report.method}${ratio}: first token after ${report.ttft_s.toFixed(3)} s; ${report.hits} chunks from the store, ` +
    `${report.misses} computed; ${Math.round(report.recomputed_tokens)} of ${report.reusable_tokens} reused tokens recomputed.`;
}

function showChunks(chunks) {
  const places = { ram: "from RAM", nvme: "from NVMe", memory: "held by the service", computed: "computed" };
  const deviations = chunks.flatMap((chunk) => chunk.tokens.filter((t) => t.recomputed > 0).map((t) => t.deviation)).sort((a, b) => a - b);
  const rank = (deviation) => Math.min(3, Math.floor((4 * deviations.findIndex((d) => d >= deviation)) / Math.max(1, deviations.length)));
  $("chunks").replaceChildren(
    ...chunks.map((chunk) => {
      const item = element("li");
      const recomputed = chunk.tokens.filter((token) => token.recomputed > 0).length;
      item.append(element("h3", `${chunk.title || chunk.document_id}, chunk ${chunk.position}`));
      item.append(element("p", `KV ${places[chunk.source] ?? chunk.source}; ${chunk.tokens.length} tokens, ${recomputed} recomputed`));
      const tokens = element("div", undefined, "tokens");
      for (const token of chunk.tokens) {
        if (chunk.source === "computed" || token.recomputed === 0) {
          tokens.append(document.createTextNode(token.text));
          continue;
        }
        const mark = element("mark", token.text, `d${rank(token.deviation)}${token.recomputed > 0.5 ? " most" : ""}`);
        mark.title = `KV deviation ${token.deviation}, recomputed in ${Math.round(100 * token.recomputed)} % of the layers`;
        tokens.append(mark);
      }
      item.append(tokens);
      return item;
    }),
  );
  $("sources").hidden = chunks.length === 0;
}

async function during(work) {
  problem("");
  asking?.abort();
  asking = new AbortController();
  $("stop").disabled = false;
  $("answer").setAttribute("aria-busy", "true");
  try {
    await work(asking.signal);
  } catch (error) {
    if (error.name !== "AbortError") problem(error.message);
  } finally {
    $("stop").disabled = true;
    $("answer").setAttribute("aria-busy", "false");
    showStore();
  }
}

async function ask(signal) {
  $("answer").textContent = "";
  $("summary").textContent = "";
  const response = await api("/v1/chat/completions", { method: "POST", body: body($("method").value, true), signal });
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    $("answer").append(document.createTextNode(event.choices[0]?.delta?.content ?? ""));
    if (event.cacheblend) {
      summarise(event.cacheblend);
      showChunks(event.cacheblend.chunks);
    }
  }
}

async function compare(signal) {
  $("methods").replaceChildren();
  $("compared").hidden = false;
  for (const option of $("method").options) {
    // Under a salt of its own prefix_cache finds none of this very prompt's blocks: every method meets the prompt for the first time.
    const salt = option.value === "prefix_cache" ? { cache_salt: String(Math.random()) } : {};
    const asked = JSON.stringify({ ...JSON.parse(body(option.value, false)), ...salt });
    const response = await api("/v1/chat/completions", { method: "POST", body: asked, signal });
    const result = await response.json();
    const report = result.cacheblend;
    const row = element("tr");
    const name = element("th", option.value);
    name.scope = "row";
    const recomputed = option.value === "full_recompute" ? "all" : Math.round(report.recomputed_tokens);
    row.append(name, element("td", report.ttft_s.toFixed(3)), element("td", recomputed), element("td", result.choices[0].message.content));
    $("methods").append(row);
  }
}

async function showStore() {
  try {
    const store = await (await api("/v1/store")).json();
    const { prefix, ...tiers } = store;
    const hits = Object.values(tiers).reduce((sum, tier) => sum + (tier?.hits ?? 0), 0);
    const asked = hits + store.misses;
    const fill = (tier) => `${(tier.bytes / 2 ** 20).toFixed(0)} of ${(tier.budget_bytes / 2 ** 20).toFixed(0)} MiB`;
    $("store").textContent =
      `RAM ${fill(store.ram)}, NVMe ${fill(store.nvme)}, ${store.nvme.entries} chunks` +
      (asked ? `, hit rate ${Math.round((100 * hits) / asked)} %` : "");
  } catch {
    $("store").textContent = "Store: cannot be read";
  }
}

async function start() {
  try {
    const [first] = (await (await api("/v1/models")).json()).data;
    model = first.id;
    const chosen = $("method").value || "blend";
    $("method").replaceChildren(...first.methods.map((name) => new Option(name, name, name === "blend", name === chosen)));
    problem("");
  } catch (error) {
    problem(error.message);
  }
  showStore();
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  during(ask);
});
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
$("compare").addEventListener("click", () => $("ask").reportValidity() && during(compare));
$("stop").addEventListener("click", () => asking?.abort());
$("key").addEventListener("change", start);
setInterval(() => document.hidden || showStore(), STORE_EVERY_MS);
start();
