// The page asks the same API as any client. Whatever comes back is put in as text, never as markup.
export const $ = (id) => document.getElementById(id);
export const KEY = "cacheblend.key"; // in the tab's storage

/** Fetch a path; a refusal becomes an error with the service's words. */
export async function api(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = typeof options.body === "string" ? { "Content-Type": "application/json" } : {};
  if (key) headers.Authorization = `Bearer ${key}`;
  const send = () =>
    fetch(path, { ...options, headers }).catch((error) => {
      throw error.name === "AbortError" ? error : new Error("the service cannot be reached; see whether it runs, and ask again");
    });
  let response = await send();
  for (let left = 5; response.status === 429 && options.body instanceof FormData && left > 0; left--) {
    await new Promise((done) => setTimeout(done, 1000 * (Number(response.headers.get("Retry-After")) || 1)));
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
  const message = body?.error?.message ?? `the service answered ${response.status} ${response.statusText}`;
  throw Object.assign(new Error(message), { code: body?.error?.code });
}

export const json = async (path, options) => (await api(path, options)).json();

/** The JSON of every server-sent event. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await reader.read();
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
