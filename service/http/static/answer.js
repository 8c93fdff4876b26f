// What an answer is made of: its prompt as a strip, its chunks, and the numbers that lead from sentences to them.
import { $, button, element } from "/api.js";

const CELLS = 48; // of a chunk's bar at most
const PLACES = { ram: "from RAM", nvme: "from NVMe", memory: "held by the service", computed: "computed" };
const COMMON_WORDS = 2; // that a sentence shares with a chunk to be led to it
const FIGURE_WORDS = 2; // that a figure counts as: chunks share it by chance less often than a word
const ITEM = /^\s*\p{N}{1,2}[.)]\s+(?=\S)/u; // the number of a list's item, which says nothing of where it is from
// A sentence ends after its mark, or with its line; the number of an item belongs to what follows it.
const SENTENCES = /(?<=(?<!(?:^|\n)\s*\p{N}{1,2})[.!?]\s|\n)/u;

const titled = (chunk) => chunk.title || chunk.document_id;
const textOf = (chunk) => chunk.tokens.map((token) => token.text).join("");
const allWords = (text) => text.toLowerCase().match(/\p{N}+(?:[.,:]\p{N}+)*|[\p{L}\p{N}]+/gu) ?? [];
const isFigure = (word) => /^\p{N}/u.test(word);
/** What a text can be known by: its words of three letters or more, and its figures, however short. */
const wordsOf = (text) => new Set(allWords(text).filter((word) => word.length >= 3 || isFigure(word)));
/** The words alone with a space on each side, so that whole words are found in it. */
const spaced = (text) => ` ${allWords(text).join(" ")} `;

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

/** The number of the chunk that a sentence is from: the first that holds all of it, else the one that shares most with it. */
function sourceOf(sentence, texts, known) {
  const said = sentence.replace(ITEM, "");
  const words = [...wordsOf(said)];
  if (!words.length) return 0;
  const whole = texts.findIndex((text) => text.includes(spaced(said)));
  if (whole >= 0) return whole + 1;
  const worth = (word) => (isFigure(word) ? FIGURE_WORDS : 1);
  const shared = known.map((own) => words.reduce((sum, word) => sum + (own.has(word) ? worth(word) : 0), 0));
  const most = Math.max(0, ...shared);
  return most < Math.min(COMMON_WORDS, words.length) ? 0 : shared.indexOf(most) + 1;
}

/** After each sentence the number of the chunk that it is from, where one is found. */
export function cite(chunks) {
  const texts = chunks.map((chunk) => spaced(textOf(chunk)));
  const known = chunks.map((chunk) => wordsOf(textOf(chunk)));
  const parts = [];
  let cited = false;
  for (const sentence of $("answer").textContent.split(SENTENCES)) {
    parts.push(document.createTextNode(sentence));
    const number = sourceOf(sentence, texts, known);
    if (!number) continue;
    const link = button(`[${number}]`, () => open(number), "plain");
    link.setAttribute("aria-label", `Source ${number}: ${titled(chunks[number - 1])}`);
    parts.push(link);
    cited = true;
  }
  $("answer").replaceChildren(...parts);
  $("cited").hidden = !cited;
}
