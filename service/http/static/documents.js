// Adding, listing, opening and deleting documents.
import { $, api, button, counted, element, json, problem } from "/api.js";

const LISTED = 20;
const MAX_LISTED = 1000; // documents, which the service gives at once
const MAX_SHOWN = 300; // chunks of an opened document
const SEARCHED_FROM = 6; // documents, from which a search is offered
const SEARCH_AFTER_MS = 250; // of no typing
const PROGRESS_EVERY_MS = 500;
const MAX_LOST = 20; // answers in a row about an upload
const AT_ONCE = 4; // uploads that wait or run
let last = null; // id of the last document that is listed
let lists = 0; // lists asked for: the answer to an earlier one comes too late
let opens = 0; // and documents opened
let resumed = false;
let onChange = () => {};

const path = (id) => `/v1/documents/${encodeURIComponent(id)}`;
const named = ({ id, title }) => (!title || id.includes(title) ? id : title);

function about(document) {
  const id = named(document) === document.id ? "" : `${document.id}, `;
  const parts = document.parts > 1 ? `${counted(document.parts, "part")}, ` : "";
  const stored = document.stored_chunks >= document.chunks ? "ready" : `${document.stored_chunks} ready`;
  return `${id}${parts}${counted(document.chunks, "chunk")}, ${stored}, ${(document.stored_bytes / 2 ** 20).toFixed(1)} MiB`;
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
  if (!resumed) act(resume);
  if (number !== lists) return;
  if (!further) $("documents").replaceChildren();
  $("documents").append(...page.data.map(row));
  last = page.last_id ?? last;
  const listed = $("documents").children.length;
  const searches = wanted() !== "";
  $("more").hidden = !page.has_more;
  $("search").hidden = !searches && !page.has_more && listed < SEARCHED_FROM;
  $("none_found").hidden = !searches || listed > 0;
  $("no_documents").hidden = searches || listed > 0 || $("uploads").children.length > 0;
  if (!searches && !further) onChange(page.data);
}

/** How far the service is with an upload in words, and the share of its chunks that is computed. */
function progress({ status, stage, done, total }) {
  if (status === "waiting") return { words: "waits for its turn" };
  if (!total || stage === "read") return { words: "being read" };
  if (stage === "index") return { words: `${done} of ${counted(total, "part")} indexed` };
  return { words: `${done} of ${counted(total, "chunk")} computed`, share: done / total };
}

/** A line for an upload, and what shows there how it gets on, until it ends; resolves to whether it was added. */
function line(name) {
  const item = element("li");
  const state = element("span", `${name}: waits`);
  const bar = element("progress");
  bar.setAttribute("aria-label", `${name} is being read`);
  item.append(state, bar);
  $("uploads").append(item);
  $("no_documents").hidden = true;
  const end = (words, failed) => {
    item.replaceChildren(`${words} `, removing("Dismiss", `Dismiss: ${name}`, item));
    if (failed) item.className = "failed";
    return !failed;
  };
  const follow = async ({ id }) => {
    const cancel = button("Cancel", () => act(() => api(`/v1/ingests/${id}`, { method: "DELETE" })), "plain");
    cancel.setAttribute("aria-label", `Cancel: ${name}`);
    item.append(cancel);
    for (let lost = 0; ; ) {
      const job = await json(`/v1/ingests/${id}`).catch((error) => {
        if (++lost === MAX_LOST) throw error;
      });
      if (job && !["waiting", "running"].includes(job.status)) return job;
      if (job) {
        lost = 0;
        const { words, share } = progress(job);
        state.textContent = `${name}: ${words}`;
        if (share === undefined) bar.removeAttribute("value");
        else bar.value = share;
      }
      await new Promise((done) => setTimeout(done, PROGRESS_EVERY_MS));
    }
  };
  return async (start) => {
    try {
      const { status, errors, faults, report } = await follow(await start());
      if (status === "cancelled") return end(`${name}: cancelled.`, true);
      if (errors.length) throw new Error(errors[0].message);
      const why = faults.length ? `${faults[0]} (${counted(faults.length, "fault")})` : "";
      if (report.unchanged === report.documents) return end(`${name} is there already, unchanged. ${why}`);
      if (why) return end(why);
      item.remove();
      return true;
    } catch (error) {
      const why = error.message.replace(/^file: /, "");
      return end(why.startsWith(`${name}:`) ? why : `${name}: ${why}`, true);
    }
  };
}

/** Upload files, a few at a time; the service goes on with them where the page is closed. */
async function add(files) {
  const waiting = [...files].map((file) => [line(file.name), file]);
  const work = async () => {
    for (let next; (next = waiting.shift()); ) {
      const [shown, file] = next;
      const form = new FormData();
      form.append("file", file, file.name);
      if (await shown(() => json("/v1/documents", { method: "POST", body: form }))) await act(list);
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, work));
}

/** Show the uploads that go on, as an earlier page has begun them. */
async function resume() {
  resumed = true;
  const { data } = await json("/v1/ingests");
  const going = data.filter(({ status }) => ["waiting", "running"].includes(status));
  await Promise.all(going.map(async (job) => (await line(job.name)(async () => job)) && act(list)));
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
