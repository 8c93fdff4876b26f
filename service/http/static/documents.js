// Adding, listing, opening, pinning and deleting documents.
import { $, Refused, api, button, element, problem } from "/api.js";

const LISTED = 20;
const SHOWN = 100; // chunks of an opened document at first, and at each "Show more"
const MAX_LISTED = 1000; // documents, which the service gives at once
const UPLOADED = /^file-[0-9a-f]{32}\/[^/]+\/([^#]+)/; // the id of a file that was uploaded, and its name
const RETRIES = 5;
let last = null; // id of the last document that is listed
let lists = 0; // lists asked for: the answer to an earlier one comes too late
let opens = 0; // and documents opened
let onChange = () => {};
const paces = {}; // seconds a byte of the last upload, by kind of file: what the next ones of the kind are expected to take

const path = (id) => `/v1/documents/${encodeURIComponent(id)}`;
const named = (document) => document.id.match(UPLOADED)?.[1] ?? (document.title || document.id);
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

/** Have a file read; says whether it was there, and which others have its name. */
async function send(file) {
  const form = new FormData();
  form.append("purpose", "assistants");
  form.append("file", file, file.name);
  const { data } = await (await api("/v1/files")).json();
  const { id, filename } = await (await api("/v1/files", { method: "POST", body: form })).json();
  return {
    isThere: data.some((other) => other.id === id),
    earlier: data.filter((other) => other.filename === filename && other.id !== id),
  };
}

/** Say what became of a file where that is not only that it was added, and offer what can be done about it. */
function answerUpload(item, file, { isThere, earlier }) {
  const leave = () => {
    item.remove();
    $("documents_title").focus(); // what had the focus is gone
  };
  if (!isThere && !earlier.length) return item.remove();
  const choice = (words, work) => {
    const made = button(words, work, "plain");
    made.setAttribute("aria-label", `${words}: ${file.name}`);
    return made;
  };
  const replace = () =>
    act(async () => {
      for (const { id } of earlier) await api(`/v1/files/${id}`, { method: "DELETE" });
      leave();
      await list();
    });
  if (isThere) item.replaceChildren(`${file.name} is there already, unchanged. `, choice("Dismiss", leave));
  else {
    const words = `${file.name} is added. An earlier file of this name is there too. `;
    item.replaceChildren(words, choice("Replace the earlier", replace), choice("Keep both", leave));
  }
}

async function upload(file) {
  const item = element("li");
  const state = element("span", `${file.name}: waits`);
  const bar = element("progress");
  const kind = file.name.split(".").at(-1).toLowerCase();
  bar.setAttribute("aria-label", `${file.name} is being read`);
  item.append(state, bar);
  $("uploads").append(item);
  return async () => {
    const began = performance.now();
    const taken = () => (performance.now() - began) / 1000;
    const expected = paces[kind] * file.size; // not a number for the first of its kind
    let told = null; // what the service says last
    let asking = false;
    const tick = setInterval(async () => {
      const whole = told?.share ? taken() / told.share : expected;
      const of = whole > taken() ? ` of about ${Math.ceil(whole)} s` : " s";
      state.textContent = `${file.name}: ${told?.words ?? "being read"}, ${Math.round(taken())}${of}`;
      const share = told?.share ?? (expected > taken() ? taken() / expected : undefined);
      if (share === undefined) bar.removeAttribute("value");
      else bar.value = share;
      if (asking) return;
      asking = true;
      told = await readProgress(file.name).catch(() => null);
      asking = false;
    }, 500);
    try {
      let sent;
      for (let tries = 0; !sent; tries++) {
        try {
          sent = await send(file);
        } catch (error) {
          if (!(error instanceof Refused) || !error.retryAfterS || tries === RETRIES) throw error;
          await wait(error.retryAfterS); // the service is busy, and says when to come again
        }
      }
      if (!sent.isThere) paces[kind] = taken() / file.size;
      clearInterval(tick);
      answerUpload(item, file, sent);
      return true;
    } catch (error) {
      bar.remove();
      state.className = "failed";
      clearInterval(tick);
      const why = error.message.replace(/^file: /, "");
      state.textContent = why.startsWith(`${file.name}:`) ? `${why} ` : `${file.name}: ${why} `;
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
