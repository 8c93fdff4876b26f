// Adding, listing, opening and deleting documents.
import { $, api, button, counted, element, json, problem } from "/api.js";

const LISTED = 20;
const MAX_LISTED = 1000; // documents, which the service gives at once
const MAX_SHOWN = 300; // chunks of an opened document
const SEARCHED_FROM = 6; // documents, from which a search is offered
const SEARCH_AFTER_MS = 250; // of no typing
const PROGRESS_EVERY_MS = 500;
let last = null; // id of the last document that is listed
let lists = 0; // lists asked for: the answer to an earlier one comes too late
let opens = 0; // and documents opened
let onChange = () => {};

const path = (id) => `/v1/documents/${encodeURIComponent(id)}`;
const named = ({ id, title }) => (!title || id.includes(title) ? id : title);

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

/** A button that removes a line, and with it what had the focus. */
function removing(text, name, item, work = async () => {}) {
  const made = button(text, () =>
    act(async () => {
      if ((await work()) === false) return;
      item.remove();
      $("documents_title").focus();
    }), "plain");
  made.setAttribute("aria-label", name);
  return made;
}

function row(document) {
  const item = element("li");
  const name = named(document);
  const remove = removing("Delete", `Delete ${name}`, item, async () => {
    if (!confirm(`Delete ${name}? Its text goes, and the KV that no other document needs.`)) return false;
    await api(path(document.id), { method: "DELETE" });
    await list();
  });
  item.append(button(name, () => act(() => open(document)), "plain open"), remove);
  item.append(element("span", document.damaged ? "damaged: add it again" : about(document), "about"));
  return item;
}

/** Show a document in the dialog. */
async function open(document) {
  const number = ++opens;
  const { content, ...shown } = await json(path(document.id));
  if (number !== opens) return;
  $("shown_title").textContent = named(document);
  $("shown_about").textContent = about(shown);
  $("shown_text").replaceChildren(...content.slice(0, MAX_SHOWN).map((chunk) => element("pre", chunk.text)));
  if (content.length > MAX_SHOWN) $("shown_text").append(element("p", `and ${counted(content.length - MAX_SHOWN, "chunk")} more`));
  if (!$("shown").open) $("shown").showModal();
  $("shown").scrollTop = 0;
}

const wanted = () => $("search").value.trim().toLowerCase();

/** A page of the documents, the newest first; in a search, of those with the letters, for which pages are read until enough are found. */
async function readPage(limit, after) {
  const read = (limit, after) =>
    json(`/v1/documents?by=file&order=desc&limit=${limit}${after === null ? "" : `&after=${encodeURIComponent(after)}`}`);
  const letters = wanted();
  if (!letters) return read(limit, after);
  const found = { data: [], has_more: true, last_id: after };
  while (found.has_more && found.data.length < limit && letters === wanted()) {
    const { data, has_more, last_id } = await read(MAX_LISTED, found.last_id);
    found.data.push(...data.filter(({ id, title }) => `${title}\n${id}`.toLowerCase().includes(letters)));
    Object.assign(found, { has_more, last_id });
  }
  return found;
}

/** List the documents anew, as many as are listed, or those after them. */
export async function list(further = false) {
  const limit = further ? LISTED : Math.min(MAX_LISTED, Math.max(LISTED, $("documents").children.length));
  const number = ++lists;
  const page = await readPage(limit, further ? last : null);
  if (number !== lists) return;
  if (!further) $("documents").replaceChildren();
  $("documents").append(...page.data.map(row));
  last = page.last_id ?? last;
  const listed = $("documents").children.length;
  const searches = wanted() !== "";
  $("more").hidden = !page.has_more;
  $("search").hidden = !searches && !page.has_more && listed < SEARCHED_FROM;
  $("none_found").hidden = !searches || listed > 0;
  $("no_documents").hidden = searches || listed > 0;
  if (!searches && !further) onChange(page.data);
}

/** How far the service is with a file in words, and the share of its chunks that is computed. */
async function readProgress(name) {
  const { data } = await json("/v1/ingests");
  const own = data.findLast((ingest) => ingest.name === name);
  if (own?.stage === "waiting") return { words: "waits for its turn" };
  if (!own?.total || own.stage === "read") return { words: "being read" };
  if (own.stage === "index") return { words: `${own.done} of ${counted(own.total, "part")} indexed` };
  return { words: `${own.done} of ${counted(own.total, "chunk")} computed`, share: own.done / own.total };
}

/** A line for a file, and the work that uploads it and resolves to whether it was added. */
function upload(file) {
  const item = element("li");
  const state = element("span", `${file.name}: waits`);
  const bar = element("progress");
  bar.setAttribute("aria-label", `${file.name} is being read`);
  item.append(state, bar);
  $("uploads").append(item);
  const dismiss = () => removing("Dismiss", `Dismiss: ${file.name}`, item);
  return async () => {
    const tick = setInterval(async () => {
      const progress = await readProgress(file.name).catch(() => null);
      if (!progress) return;
      state.textContent = `${file.name}: ${progress.words}`;
      if (progress.share === undefined) bar.removeAttribute("value");
      else bar.value = progress.share;
    }, PROGRESS_EVERY_MS);
    const form = new FormData();
    form.append("file", file, file.name);
    try {
      const report = await json("/v1/documents", { method: "POST", body: form });
      if (report.unchanged === report.documents) item.replaceChildren(`${file.name} is there already, unchanged. `, dismiss());
      else item.remove();
      return true;
    } catch (error) {
      const why = error.message.replace(/^file: /, "");
      item.replaceChildren(why.startsWith(`${file.name}:`) ? `${why} ` : `${file.name}: ${why} `, dismiss());
      item.className = "failed";
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
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files"); // text goes where it is dropped
  document.addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
  document.addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    add(event.dataTransfer.files);
  });
  let typed = 0;
  $("search").addEventListener("input", () => {
    clearTimeout(typed);
    typed = setTimeout(() => act(list), SEARCH_AFTER_MS);
  });
  $("more").addEventListener("click", () => act(() => list(true)));
}
