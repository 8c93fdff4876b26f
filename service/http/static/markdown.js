// Markdown as elements. Whatever is no mark stays text; nothing of it becomes markup, and every line is looked at once.
import { element } from "/api.js";

const MAX_DEPTH = 4; // of lists, quotes and marks within marks
const FENCE = /^\s{0,3}(```+|~~~+)/;
const HEADING = /^\s{0,3}(#{1,6})\s+(.*)$/;
const RULE = /^\s{0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)(?:[-*+]|(\d{1,3})[.)])\s+(.*)$/;
const QUOTE = /^\s{0,3}> ?(.*)$/;
const TABLE_RULE = /^\|?(?:\s*:?-+:?\s*\|)+(?:\s*:?-+:?)?$/;
const INLINE =
  /`([^`\n]+)`|\*\*(?=\S)((?:[^*\n]|\*(?!\*))+)\*\*|__(?=\S)([^_\n]+)__|\*(?=\S)([^*\n]+)\*|(?<![\p{L}\p{N}_])_(?=\S)([^_\n]+)_(?![\p{L}\p{N}_])|!?\[([^[\]\n]+)\]\(([^()\s]+)\)|(https?:\/\/[^\s<>()[\]"'`*]+)/giu;

/** A link to a page of the web, else the text. */
function linkOf(text, address, depth) {
  const to = URL.canParse(address) ? new URL(address) : null;
  if (!["http:", "https:"].includes(to?.protocol)) return document.createTextNode(text);
  const link = inline(element("a"), text, depth);
  link.href = to.href;
  link.target = "_blank";
  link.rel = "noopener noreferrer nofollow";
  return link;
}

/** Put a text with marks within lines into an element. */
function inline(into, text, depth = 0) {
  let done = 0;
  for (const found of depth < MAX_DEPTH ? text.matchAll(INLINE) : []) {
    const [all, code, strong, strong2, em, em2, label, address, url] = found;
    into.append(text.slice(done, found.index));
    done = found.index + all.length;
    if (code !== undefined) into.append(element("code", code));
    else if (address !== undefined) into.append(linkOf(label, address, MAX_DEPTH));
    else if (url !== undefined) {
      const end = url.replace(/[.,;:!?]{1,9}$/, ""); // a sentence's mark is none of the address
      into.append(linkOf(end, end, MAX_DEPTH), url.slice(end.length));
    } else into.append(inline(element(strong ?? strong2 ? "strong" : "em"), strong ?? strong2 ?? em ?? em2, depth + 1));
  }
  into.append(text.slice(done));
  return into;
}

/** An element of the text that is said in it, where sentences are looked for. */
const said = (name, text) => inline(element(name, undefined, "said"), text);

/** The lines of a list, each within the item that it is indented under. */
function addItems(into, lines) {
  const open = []; // lists that are open, the outermost first
  for (const [, indent, number, text] of lines) {
    const name = number === undefined ? "ul" : "ol";
    while (open.length > 1 && indent.length < open.at(-1).indent) open.pop();
    let last = open.at(-1);
    if (!last || (indent.length > last.indent + 1 && open.length < MAX_DEPTH) || last.list.localName !== name) {
      const isInner = last && indent.length > last.indent + 1;
      if (last && !isInner) open.pop();
      const list = element(name);
      if (number !== undefined) list.start = number;
      (open.at(-1)?.list.lastChild ?? into).append(list);
      open.push((last = { indent: indent.length, list }));
    }
    const item = element("li");
    item.append(said("span", text));
    last.list.append(item);
  }
}

function tableOf(lines) {
  const table = element("table");
  for (const [place, line] of lines.entries()) {
    if (place === 1) continue;
    const row = element("tr");
    for (const cell of line.trim().replace(/^\||\|$/g, "").split("|")) row.append(said(place ? "td" : "th", cell.trim()));
    table.append(row);
  }
  const wide = element("div", undefined, "wide");
  wide.append(table);
  return wide;
}

const opensBlock = (line) => !line.trim() || [FENCE, HEADING, RULE, ITEM, QUOTE].some((form) => form.test(line));

/** Put Markdown into an element, in place of what is there. */
export function showMarkdown(into, text, depth = 0) {
  into.replaceChildren();
  const lines = text.split("\n");
  /** The lines from `at` on that fit, and the place after them. */
  const run = (at, fits) => {
    let end = at;
    while (end < lines.length && fits(lines[end], end)) end++;
    return [lines.slice(at, end), end];
  };
  for (let at = 0, found; at < lines.length; ) {
    const line = lines[at];
    if ((found = FENCE.exec(line))) {
      const [code, end] = run(at + 1, (one) => !one.trim().startsWith(found[1]));
      const block = element("pre");
      block.append(element("code", code.join("\n")));
      into.append(block);
      at = end + 1;
    } else if (!line.trim()) at++;
    else if ((found = HEADING.exec(line))) {
      into.append(said(`h${Math.min(6, found[1].length + 2)}`, found[2]));
      at++;
    } else if (RULE.test(line)) {
      into.append(element("hr"));
      at++;
    } else if (ITEM.test(line)) {
      const [items, end] = run(at, (one, place) => ITEM.test(one) || (!one.trim() && ITEM.test(lines[place + 1] ?? "")));
      addItems(into, items.map((one) => ITEM.exec(one)).filter(Boolean));
      at = end;
    } else if (depth < MAX_DEPTH && QUOTE.test(line)) {
      const [quoted, end] = run(at, (one) => QUOTE.test(one));
      const block = element("blockquote");
      showMarkdown(block, quoted.map((one) => QUOTE.exec(one)[1]).join("\n"), depth + 1);
      into.append(block);
      at = end;
    } else if (line.includes("|") && TABLE_RULE.test(lines[at + 1]?.trim() ?? "")) {
      const [rows, end] = run(at, (one) => one.includes("|"));
      into.append(tableOf(rows));
      at = end;
    } else {
      const [words, end] = run(at + 1, (one) => !opensBlock(one));
      into.append(said("p", [line, ...words].join("\n")));
      at = end;
    }
  }
}
