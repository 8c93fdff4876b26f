// What an answer is made of: its prompt as a strip, its chunks, and the numbers that lead from sentences to them.
import { $, button, element } from "/api.js";

const CELLS = 48; // of a chunk's bar at most
const PLACES = { ram: "from RAM", nvme: "from NVMe", memory: "held by the service", computed: "computed" };
const COMMON_WORDS = 2; // that a sentence shares with a chunk to be led to it

const titled = (chunk) => chunk.title || chunk.document_id;
const wordsOf = (text) => new Set((text.toLowerCase().match(/[\p{L}\p{N}]{3,}/gu) ?? []));

function open(number) {
  const item = $("chunks").children[number - 1];
  item.scrollIntoView({ block: "center" });
  item.focus();
}

/** The prompt's chunks as bars: every cell some neighbouring tokens, as bright as their share that was recomputed. */
export function showStrip(chunks) {
  $("bars").replaceChildren(
    ...chunks.map((chunk, index) => {
      const item = element("li");
      const bar = button(undefined, () => open(index + 1));
      const recomputed = chunk.tokens.filter((token) => token.recomputed > 0).length;
      const all = chunk.source === "computed";
      bar.setAttribute("aria-label", `Chunk ${index + 1}, ${titled(chunk)}: ${all ? "all" : recomputed} of ${chunk.tokens.length} tokens recomputed`);
      bar.append(element("span", `${index + 1}  ${titled(chunk)}`, "name"));
      const cells = element("span", undefined, "cells");
      const size = Math.max(1, Math.ceil(chunk.tokens.length / CELLS));
      for (let first = 0; first < chunk.tokens.length; first += size) {
        const part = chunk.tokens.slice(first, first + size);
        const share = all ? 1 : part.filter((token) => token.recomputed > 0).length / part.length;
        const cell = element("span", undefined, share ? "lit" : "");
        cell.style.setProperty("--share", share);
        cell.style.setProperty("--place", index * 12 + first / size);
        cells.append(cell);
      }
      bar.append(cells);
      item.append(bar);
      return item;
    }),
  );
  $("strip").hidden = chunks.length === 0;
}

/** The chunks' texts, recomputed tokens shaded. */
export function showChunks(chunks) {
  const deviations = chunks.flatMap((chunk) => chunk.tokens.filter((t) => t.recomputed > 0).map((t) => t.deviation)).sort((a, b) => a - b);
  const quarters = [1, 2, 3].map((quarter) => deviations[Math.ceil((quarter * deviations.length) / 4) - 1]);
  const rank = (deviation) => quarters.filter((most) => most < deviation).length;
  $("chunks").replaceChildren(
    ...chunks.map((chunk, index) => {
      const item = element("li");
      item.tabIndex = -1;
      const recomputed = chunk.tokens.filter((token) => token.recomputed > 0).length;
      const lines = chunk.lines ? `, lines ${chunk.lines[0]} to ${chunk.lines[1]}` : "";
      item.append(element("h3", `${index + 1}. ${titled(chunk)}, chunk ${chunk.position}${lines}`));
      item.append(element("p", `KV ${PLACES[chunk.source] ?? chunk.source}; ${chunk.tokens.length} tokens, ${recomputed} recomputed`, "small"));
      const tokens = element("div", undefined, "tokens");
      for (const token of chunk.tokens) {
        if (chunk.source === "computed" || token.recomputed === 0) {
          tokens.append(document.createTextNode(token.text));
          continue;
        }
        const mark = element("mark", token.text, `d${rank(token.deviation)}${token.recomputed > 0.5 ? " most" : ""}`);
        mark.title = `recomputed in ${Math.round(100 * token.recomputed)} % of the layers`;
        tokens.append(mark);
      }
      item.append(tokens);
      return item;
    }),
  );
  $("sources").hidden = chunks.length === 0;
}

/** After each sentence the number of the chunk that shares most words with it, where one does. */
export function cite(chunks) {
  const of = chunks.map((chunk) => wordsOf(chunk.tokens.map((token) => token.text).join("")));
  const parts = [];
  let cited = false;
  for (const sentence of $("answer").textContent.split(/(?<=[.!?]\s|\n)/)) {
    parts.push(document.createTextNode(sentence));
    const words = [...wordsOf(sentence)];
    const shared = of.map((known) => words.filter((word) => known.has(word)).length);
    const most = Math.max(0, ...shared);
    if (most < Math.min(COMMON_WORDS, words.length || COMMON_WORDS)) continue;
    const number = shared.indexOf(most) + 1;
    const link = button(`[${number}]`, () => open(number), "plain");
    link.setAttribute("aria-label", `Source ${number}: ${titled(chunks[number - 1])}`);
    parts.push(link);
    cited = true;
  }
  $("answer").replaceChildren(...parts);
  $("cited").hidden = !cited;
}
