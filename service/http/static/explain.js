// What the service takes for passages in a prompt of somebody's application, why, and whose KV is stored.
import { $, counted, element, json, problem } from "/api.js";

const REASONS = {
  stored: "word for word a stored chunk",
  tag: "within a tag such as <source>",
  numbered: "numbered, such as [1]",
  labelled: "after a label such as Document 3:",
  context: "after a line such as Context:",
  json: "a text in a tool's JSON",
  paragraph: "several sentences between empty lines",
};

/** The request that was pasted; a text is a chat's only message. */
function requestOf(text) {
  if (text.trim().startsWith("{")) {
    try {
      const { model, ...body } = JSON.parse(text); // the model here is another than the application's
      if (body.messages) return body;
      // A completion's prompt is looked through as a user's message is; nothing is retrieved for it.
      if (typeof body.prompt === "string") return { messages: [{ role: "user", content: body.prompt }], num_chunks: 0 };
    } catch {
      // no JSON: a prompt that begins with a brace
    }
  }
  return { messages: [{ role: "user", content: text }] };
}

const contentOf = (content) => (Array.isArray(content) ? content.map((part) => part.text ?? part.refusal ?? "").join("") : (content ?? ""));

function markOf({ text, reason, document_id, stored, tokens }) {
  const made = element("mark", undefined, stored ? "hit" : "fresh");
  const of = document_id ? ` of ${document_id}` : "";
  made.append(element("b", `${REASONS[reason] ?? reason}${of}; ${stored ? `KV stored, ${counted(tokens, "token")}` : "KV not stored yet"}`), text);
  return made;
}

/** A message with its passages marked; places count characters, not JavaScript's halves of them. */
function messageOf({ role, content }, passages) {
  const letters = [...contentOf(content)];
  const shown = element("div", undefined, "tokens");
  let done = 0;
  for (const passage of passages) {
    shown.append(letters.slice(done, passage.start).join(""), markOf(passage));
    done = passage.end;
  }
  shown.append(letters.slice(done).join(""));
  const item = element("section");
  item.append(element("h3", role), shown);
  return item;
}

function summaryOf({ passages, prompt_tokens, reused_tokens, num_chunks }) {
  if (num_chunks) {
    const chunks = counted(num_chunks, "chunk");
    return `Nothing in it was retrieved, so ${chunks} would be retrieved for it, and its own text computed: ${counted(prompt_tokens, "token")}.`;
  }
  const stored = passages.filter((one) => one.stored).length;
  const reused = reused_tokens ? `${reused_tokens} of ${prompt_tokens} tokens would be reused` : `all ${prompt_tokens} tokens would be computed`;
  const why = stored && !reused_tokens ? ", since too few could be reused" : "";
  const again = passages.length > stored ? " A passage that is not stored yet is stored when a second request has it." : "";
  return `${counted(passages.length, "passage")}, ${stored} of them stored: ${reused}${why}.${again}`;
}

async function look() {
  problem("");
  $("looked").replaceChildren();
  $("explained").textContent = "";
  const body = requestOf($("prompt").value);
  try {
    const found = await json("/v1/chat/completions/explain", { method: "POST", body: JSON.stringify(body) });
    $("explained").textContent = summaryOf(found);
    const shown = body.messages.map((message, number) => messageOf(message, found.passages.filter((one) => one.message === number)));
    $("looked").replaceChildren(...shown);
  } catch (error) {
    $("explained").textContent = error.message;
  }
}

export function startExplain() {
  $("look_form").addEventListener("submit", (event) => {
    event.preventDefault();
    look();
  });
}
