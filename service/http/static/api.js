// The page asks the same API as any client. Whatever comes back is put in as text, never as markup.
export const $ = (id) => document.getElementById(id);
export const KEY = "cacheblend.key"; // in the tab's storage

const RETRY_AFTER_MS = 1000;
// What a proxy before the service says without a word of why.
const OF_PROXIES = {
  413: "what was sent is longer than the proxy before the service allows; send less, or raise its limit",
  502: "the proxy cannot reach the service; see whether it runs, and try again",
  504: "the proxy before the service has waited too long; ask for less, or raise its limit",
};

const wait = (ms) => new Promise((done) => setTimeout(done, ms));

/** The error of a connection that broke off: what happened, by whether the service still answers, and what to do. */
async function broken(error, isUpload = false) {
  if (error.name === "AbortError") return error;
  const runs = await fetch("/healthz").then(({ ok }) => ok, () => false);
  if (!runs) return new Error("the service cannot be reached: it has stopped, or the network is gone; see whether it runs, and try again");
  if (!isUpload) return new Error("the connection broke off, though the service runs; ask again");
  return new Error("the upload was cut off: the file has changed since it was chosen, or is longer than the service's max_body_bytes; add it again, or in parts");
}

/** Fetch a path; a refusal becomes an error with the service's words. What reads, or asks, is tried twice where there is no answer. */
export async function api(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = typeof options.body === "string" ? { "Content-Type": "application/json" } : {};
  if (key) headers.Authorization = `Bearer ${key}`;
  const isUpload = options.body instanceof FormData;
  const send = async (maySendAgain = !isUpload && options.method !== "DELETE") => {
    try {
      return await fetch(path, { ...options, headers });
    } catch (error) {
      if (!maySendAgain || error.name === "AbortError") throw await broken(error, isUpload);
    }
    await wait(RETRY_AFTER_MS);
    return send(false);
  };
  let response = await send();
  for (let left = 5; response.status === 429 && isUpload && left > 0; left--) {
    await wait(1000 * (Number(response.headers.get("Retry-After")) || 1));
    response = await send(); // a file that came while the service was busy
  }
  if (response.ok) return response;
  if (response.status === 401) {
    if ($("key_form").hidden) {
      $("key_form").hidden = false;
      $("key").focus();
    }
    throw new Error(key ? "the service does not know this key" : ""); // the form says that a key is missing
  }
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? OF_PROXIES[response.status] ?? `the service answered ${response.status} ${response.statusText}`;
  throw Object.assign(new Error(message), { code: body?.error?.code });
}

export const json = async (path, options) => (await api(path, options)).json();

/** The JSON of every server-sent event. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await reader.read().catch(async (error) => {
      throw await broken(error);
    });
    if (done) throw new Error("the answer ended before it was whole; ask again");
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

export function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

export function button(text, work, className) {
  const made = element("button", text, className);
  made.type = "button";
  made.addEventListener("click", work);
  return made;
}

export const counted = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

export function problem(message) {
  $("problem").hidden = !message;
  $("problem").textContent = message;
}
