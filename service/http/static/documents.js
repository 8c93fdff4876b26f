// Adding, listing, opening, pinning and deleting documents.
import { $, Refused, api, button, element, problem } from "/api.js";

const LISTED = 20;
const SHOWN = 100; // chunks of an opened document at first, and at each "Show more"
const MAX_LISTED = 1000; // documents, which the service gives at once
const RETRIES = 5;
const PROGRESS_EVERY_MS = 500;
let last = null; // id of the last document that is listed
let lists = 0; // lists asked for: the answer to an earlier one comes too late
let opens = 0; // and documents opened
let onChange = () => {};

const path = (id) => `/v1/documents/${encodeURIComponent(id)}`;
const named = ({ id, title }) => (!title || id.includes(title) ? id : title);
const counted = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

function about(document) {
  const parts = document.parts > 1 ? `${counted(document.parts, "part")}, ` : "";
  const stored = document.stored_chunks >= document.chunks ? "ready" : `${document.stored_chunks} ready`;
  return `${parts}${counted(document.chunks, "chunk")}, ${stored}, ${(document.stored_bytes / 2 ** 20).toFixed(1)} MiB`;
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
  const pin = button("", () =>
    act(async () => {
      const pinned = pin.getAttribute("aria-pressed") !== "true";
      await api(`${path(document.id)}/pin`, { method: "POST", body: JSON.stringify({ pinned }) });
      showPinned(pinned);
    }), "plain");
  const showPinned = (pinned) => {
    pin.setAttribute("aria-pressed", String(pinned));
    pin.textContent = pinned ? "Pinned" : "Pin";
    pin.setAttribute("aria-label", `${pin.textContent} ${named(document)}`);
  };
  showPinned(document.pinned);
  pin.title = "The KV of a pinned document is not evicted";
  const remove = button("Delete", () => askToDelete(document, item), "plain");
  remove.setAttribute("aria-label", `Delete ${named(document)}`);
  item.append(button(named(document), () => open(document), "plain open"), pin, remove);
  item.append(element("span", document.damaged ? "damaged: add it again" : about(document), "about"));
  return item;
}

/** Show the dialog, with so many of the chunks at first; `confirmed` is what its button does, where it has one. */
function show(title, words, chunks, confirmed) {
  const dialog = $("shown");
  opens++;
  $("shown_title").textContent = title;
  $("shown_about").textContent = words;
  $("shown_text").replaceChildren();
  $("shown_more").onclick = () => {
    const from = $("shown_text").children.length;
    $("shown_text").append(...chunks.slice(from, from + SHOWN).map((chunk) => element("pre", chunk.text)));
    $("shown_more").hidden = from + SHOWN >= chunks.length;
  };
  $("shown_more").onclick();
  $("confirm").hidden = !confirmed;
  dialog.returnValue = "";
  dialog.onclose = () => dialog.returnValue === "yes" && confirmed();
  if (!dialog.open) dialog.showModal();
}

async function open(document) {
  const number = ++opens;
  await act(async () => {
    const shown = await (await api(path(document.id))).json();
    if (number === opens) show(named(document), about(shown), shown.content); // another one was opened meanwhile
  });
}

/** Ask first; of a damaged document nothing is read for it. */
function askToDelete(document, item) {
  show(`Delete ${named(document)}?`, "Its text goes, and the KV that no other document needs.", [], () =>
    act(async () => {
      await api(path(document.id), { method: "DELETE" });
      item.remove();
      $("documents_title").focus(); // what had the focus is gone
      await list();
    }));
}

/** List the documents anew, as many as are listed, or those after them; the newest come first. */
export async function list(further = false) {
  const after = further && last !== null ? `&after=${encodeURIComponent(last)}` : "";
  const limit = further ? LISTED : Math.min(MAX_LISTED, Math.max(LISTED, $("documents").children.length));
  const number = ++lists;
  const page = await (await api(`/v1/documents?by=file&order=desc&limit=${limit}${after}`)).json();
  if (number !== lists) return;
  const rows = page.data.map(row);
  if (further) $("documents").append(...rows);
  else $("documents").replaceChildren(...rows);
  last = page.last_id ?? last;
  $("more").hidden = !page.has_more;
  $("no_documents").hidden = $("documents").children.length > 0;
  onChange($("documents").children.length ? page.data : []);
}

/** How far the service is with a file in words, and the share of its chunks that is computed; null where it does not say. */
async function readProgress(name) {
  const { data } = await (await api("/v1/ingests")).json();
  const own = data.findLast((ingest) => ingest.name === name);
  if (!own) return null;
  if (own.stage === "waiting") return { words: "waits for its turn" };
  if (own.stage === "read" || !own.total) return { words: "being read" };
  if (own.stage === "index") return { words: `${own.done} of ${counted(own.total, "part")} indexed` };
  return { words: `${own.done} of ${counted(own.total, "chunk")} computed`, share: own.done / own.total };
}

const wait = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));

/** Have a file ingested, as often as the service is busy and says when to come again. */
async function send(file) {
  const form = new FormData();
  form.append("file", file, file.name);
  for (let tries = 0; ; tries++) {
    try {
      return await (await api("/v1/documents", { method: "POST", body: form })).json();
    } catch (error) {
      if (!(error instanceof Refused) || !error.retryAfterS || tries === RETRIES) throw error;
      await wait(error.retryAfterS);
    }
  }
}

/** A line for a file, and the work that uploads it and resolves to whether it was added. */
function upload(file) {
  const item = element("li");
  const state = element("span", `${file.name}: waits`);
  const bar = element("progress");
  bar.setAttribute("aria-label", `${file.name} is being read`);
  item.append(state, bar);
  $("uploads").append(item);
  const dismiss = () => {
    const dismissed = button("Dismiss", () => {
      item.remove();
      $("documents_title").focus(); // what had the focus is gone
    }, "plain");
    dismissed.setAttribute("aria-label", `Dismiss: ${file.name}`);
    return dismissed;
  };
  return async () => {
    const began = performance.now();
    const tick = setInterval(async () => {
      const progress = await readProgress(file.name).catch(() => null);
      const seconds = Math.round((performance.now() - began) / 1000);
      state.textContent = `${file.name}: ${progress?.words ?? "being read"}, ${seconds} s`;
      if (progress?.share === undefined) bar.removeAttribute("value");
      else bar.value = progress.share;
    }, PROGRESS_EVERY_MS);
    try {
      const report = await send(file);
      if (report.unchanged === report.documents) item.replaceChildren(`${file.name} is there already, unchanged. `, dismiss());
      else item.remove();
      return true;
    } catch (error) {
      clearInterval(tick);
      bar.remove();
      state.className = "failed";
      const why = error.message.replace(/^file: /, "");
      state.textContent = why.startsWith(`${file.name}:`) ? `${why} ` : `${file.name}: ${why} `;
      const again = () => {
        item.remove();
        add([file]);
      };
      item.append(button("Try again", again, "plain"), dismiss());
      return false;
    } finally {
      clearInterval(tick);
    }
  };
}

/** Upload files, one after the other: each is computed with the whole machine. */
async function add(files) {
  for (const run of [...files].map(upload)) if (await run()) await act(list);
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
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files"); // text goes where it is dropped
  for (const name of ["dragenter", "dragover"]) {
    document.addEventListener(name, (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      drop.classList.add("over");
    });
  }
  document.addEventListener("dragleave", (event) => event.relatedTarget ?? drop.classList.remove("over"));
  document.addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    drop.classList.remove("over");
    add(event.dataTransfer.files);
  });
  $("more").addEventListener("click", () => act(() => list(true)));
}
