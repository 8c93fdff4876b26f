// Adding, listing, opening, pinning and deleting documents.
import { $, Refused, api, button, element, problem } from "/api.js";

const LISTED = 20;
const TEXT = /\.(txt|text|md|markdown|rst|csv|tsv|json|jsonl|ya?ml|toml|ini|log|tex|py|js|ts|java|c|h|cpp|go|rs|rb|sh|sql)$/i;
const MOST_BYTES = 8 * 2 ** 20; // of a text; the service says the same
const RETRIES = 5;
let last = null; // id of the last document that is listed
let onChange = () => {};

const path = (id) => `/v1/documents/${encodeURIComponent(id)}`;
const named = (document) => document.title || document.id;

function about(document) {
  const stored = document.stored_chunks >= document.chunks ? "ready" : `${document.stored_chunks} ready`;
  return `${document.chunks} chunks, ${stored}, ${(document.stored_bytes / 2 ** 20).toFixed(1)} MiB`;
}

async function act(work) {
  problem("");
  try {
    await work();
  } catch (error) {
    problem(error.message);
  }
}

function row(document) {
  const item = element("li");
  const pin = button(document.pinned ? "Pinned" : "Pin", () =>
    act(async () => {
      const pinned = pin.getAttribute("aria-pressed") !== "true";
      await api(`${path(document.id)}/pin`, { method: "POST", body: JSON.stringify({ pinned }) });
      pin.setAttribute("aria-pressed", String(pinned));
      pin.textContent = pinned ? "Pinned" : "Pin";
    }), "plain");
  pin.setAttribute("aria-pressed", String(document.pinned));
  pin.title = "The KV of a pinned document is not evicted";
  const remove = button("Delete", () => open(document, item, true), "plain");
  for (const made of [pin, remove]) made.setAttribute("aria-label", `${made.textContent} ${named(document)}`);
  item.append(button(named(document), () => open(document, item, false), "plain open"), pin, remove);
  item.append(element("span", document.damaged ? "damaged: add it again" : about(document), "about"));
  return item;
}

async function open(document, item, deletes) {
  await act(async () => {
    const shown = await (await api(path(document.id))).json();
    $("shown_title").textContent = deletes ? `Delete ${named(document)}?` : named(document);
    $("shown_about").textContent = deletes ? "Its text goes, and the KV that no other document needs." : about(shown);
    $("shown_text").replaceChildren(...(deletes ? [] : shown.content.map((chunk) => element("pre", chunk.text))));
    $("confirm").hidden = !deletes;
    const dialog = $("shown");
    dialog.returnValue = "";
    dialog.onclose = () => {
      if (deletes && dialog.returnValue === "yes") {
        act(async () => {
          await api(path(document.id), { method: "DELETE" });
          item.remove();
          await list();
        });
      }
    };
    dialog.showModal();
  });
}

/** List the documents anew, or those after the ones that are listed. */
export async function list(further = false) {
  const after = further && last !== null ? `&after=${encodeURIComponent(last)}` : "";
  const page = await (await api(`/v1/documents?limit=${LISTED}${after}`)).json();
  const rows = page.data.map(row);
  if (further) $("documents").append(...rows);
  else $("documents").replaceChildren(...rows);
  last = page.last_id ?? last;
  $("more").hidden = !page.has_more;
  $("no_documents").hidden = $("documents").children.length > 0;
  onChange($("documents").children.length ? page.data : []);
}

const wait = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));

async function send(file) {
  if (!TEXT.test(file.name) && file.type !== "text/plain") {
    const form = new FormData();
    form.append("purpose", "assistants");
    form.append("file", file, file.name);
    try {
      return await api("/v1/files", { method: "POST", body: form });
    } catch (error) {
      if (error.status !== 404 && error.status !== 405) throw error;
      throw new Error("this service takes text files here; add others by `cacheblend ingest FILE`");
    }
  }
  if (file.size > MOST_BYTES) throw new Error(`it has more than ${MOST_BYTES / 2 ** 20} MiB; split it, or use \`cacheblend ingest\``);
  const bytes = await file.arrayBuffer();
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    text = new TextDecoder("windows-1252").decode(bytes);
  }
  if (!text.trim()) throw new Error("it is empty");
  return api("/v1/documents", { method: "POST", body: JSON.stringify({ documents: [{ id: file.name, title: file.name, text }] }) });
}

async function upload(file) {
  const item = element("li");
  const state = element("span", `${file.name}: waits`);
  const bar = element("progress");
  bar.setAttribute("aria-label", `${file.name} is being read`);
  item.append(state, bar);
  $("uploads").append(item);
  return async () => {
    const began = performance.now();
    const tick = setInterval(() => {
      state.textContent = `${file.name}: being read, ${Math.round((performance.now() - began) / 1000)} s`;
    }, 500);
    try {
      for (let tries = 0; ; tries++) {
        try {
          await send(file);
          break;
        } catch (error) {
          if (!(error instanceof Refused) || !error.retryAfterS || tries === RETRIES) throw error;
          await wait(error.retryAfterS); // the service is busy, and says when to come again
        }
      }
      item.remove();
      return true;
    } catch (error) {
      bar.remove();
      state.className = "failed";
      clearInterval(tick);
      state.textContent = `${file.name}: ${error.message} `;
      item.append(
        button("Try again", async () => {
          item.remove();
          await add([file]);
        }, "plain"),
        button("Dismiss", () => item.remove(), "plain"),
      );
      return false;
    } finally {
      clearInterval(tick);
    }
  };
}

/** Upload files, one after the other: each is computed with the whole machine. */
async function add(files) {
  const uploads = await Promise.all([...files].map(upload));
  for (const run of uploads) if (await run()) await act(list);
}

/** Make the section work; `changed` is given the documents that are listed first. */
export function startDocuments(changed) {
  onChange = changed;
  $("files").addEventListener("change", () => {
    const files = [...$("files").files];
    $("files").value = "";
    add(files);
  });
  const drop = $("drop");
  for (const name of ["dragenter", "dragover"]) {
    document.addEventListener(name, (event) => {
      event.preventDefault();
      drop.classList.add("over");
    });
  }
  document.addEventListener("dragleave", (event) => event.relatedTarget ?? drop.classList.remove("over"));
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    if (event.dataTransfer.files.length) add(event.dataTransfer.files);
  });
  $("more").addEventListener("click", () => act(() => list(true)));
}
