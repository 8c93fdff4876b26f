// What an answer is made of: its prompt as bars, its chunks, and the numbers that lead from sentences to them.
import { $, button, element } from "/api.js";

const PLACES = { ram: "from RAM", nvme: "from NVMe", memory: "held by the service", computed: "computed" };
const COMMON_WORDS = 2; // that a sentence shares with a chunk to be led to it
const FIGURE_WORDS = 2; // that a figure counts as: chunks share it by chance less often than a word
const ITEM = /^\s*\p{N}{1,2}[.)]\s+(?=\S)/u; // the number of a list's item, which says nothing of where it is from
// A sentence ends after its mark, or with its line; the number of an item belongs to what follows it.
const SENTENCES = /(?<=(?<!(?:^|\n)\s*\p{N}{1,2})[.!?]\s|\n)/u;

const titled = (chunk) => chunk.title || chunk.document_id;
const textOf = (chunk) => chunk.tokens.map((token) => token.text).join("");
const recomputedOf = (chunk) => chunk.tokens.filter((token) => token.recomputed > 0).length;
const allWords = (text) => text.toLowerCase().match(/\p{N}+(?:[.,:]\p{N}+)*|[\p{L}\p{N}]+/gu) ?? [];
const isFigure = (word) => /^\p{N}/u.test(word);
/** What a text can be known by: its words of three letters or more, and its figures, however short. */
const wordsOf = (text) => new Set(allWords(text).filter((word) => word.length >= 3 || isFigure(word)));
/** The words alone with a space on each side, so that whole words are found in it. */
const spaced = (text) => ` ${allWords(text).join(" ")} `;
const open = (number) => $("chunks").children[number - 1].focus();

/** A chunk of the prompt as a bar, lit where its tokens were recomputed. */
function barOf(chunk, index) {
  const all = chunk.source === "computed";
  const bar = button(`${index + 1}  ${titled(chunk)}`, () => open(index + 1));
  bar.setAttribute("aria-label", `Chunk ${index + 1}, ${titled(chunk)}: ${all ? "all" : recomputedOf(chunk)} of ${chunk.tokens.length} tokens recomputed`);
  const width = 100 / chunk.tokens.length; // of a token, in percent
  const stops = chunk.tokens.map((token, place) => `${all || token.recomputed ? "var(--glow)" : "var(--dark)"} 0 ${(place + 1) * width}%`);
  const strip = element("span", undefined, "strip");
  strip.style.background = `linear-gradient(to right, ${stops.join()})`;
  bar.append(strip);
  const item = element("li");
  item.append(bar);
  return item;
}

/** A chunk's text, with recomputed tokens shaded by their share of the layers. */
function textItem(chunk, index) {
  const item = element("li");
  item.tabIndex = -1;
  const lines = chunk.lines ? `, lines ${chunk.lines[0]} to ${chunk.lines[1]}` : "";
  const tokens = element("div", undefined, "tokens");
  for (const token of chunk.tokens) {
    const shaded = chunk.source !== "computed" && token.recomputed > 0;
    const part = shaded ? element("mark", token.text) : document.createTextNode(token.text);
    if (shaded) {
      part.style.setProperty("--share", token.recomputed);
      part.title = `recomputed in ${Math.round(100 * token.recomputed)} % of the layers`;
    }
    tokens.append(part);
  }
  item.append(
    element("h3", `${index + 1}. ${titled(chunk)}, chunk ${chunk.position}${lines}`),
    element("p", `KV ${PLACES[chunk.source] ?? chunk.source}; ${chunk.tokens.length} tokens, ${recomputedOf(chunk)} recomputed`, "small"),
    tokens,
  );
  return item;
}

/** The prompt's chunks, as bars and as texts. */
export function showChunks(chunks) {
  $("bars").replaceChildren(...chunks.map(barOf));
  $("chunks").replaceChildren(...chunks.map(textItem));
  $("strip").hidden = $("sources").hidden = chunks.length === 0;
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
  for (const sentence of $("answer").textContent.split(SENTENCES)) {
    parts.push(sentence);
    const number = sourceOf(sentence, texts, known);
    if (!number) continue;
    const link = button(`[${number}]`, () => open(number), "plain");
    link.setAttribute("aria-label", `Source ${number}: ${titled(chunks[number - 1])}`);
    parts.push(link);
  }
  $("answer").replaceChildren(...parts);
  $("cited").hidden = !$("answer").querySelector("button");
}
