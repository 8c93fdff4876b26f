// What an answer is made of: its prompt as bars, its chunks, and the numbers that lead from sentences to them.
import { $, button, counted, element } from "/api.js";

const PLACES = { ram: "from RAM", nvme: "from NVMe", memory: "held by the service", computed: "computed" };
const COMMON_WORDS = 2; // that a sentence shares with a chunk to be led to it
const FIGURE_WORDS = 2; // that a figure counts as: chunks share it by chance less often than a word
const ITEM = /^\s*\p{N}{1,2}[.)]\s+(?=\S)/u; // the number of a list's item, which says nothing of where it is from
// A sentence ends after its mark, or with its line; the number of an item belongs to what follows it.
const SENTENCES = /(?<=(?<!(?:^|\n)\s*\p{N}{1,2})[.!?]\s|\n)/u;

// The first heading that stands in a chunk.
const OWN_HEADING = /^#{1,6}[ \t]+(\S.{0,79})/m;

const titled = (chunk) => chunk.title || chunk.document_id;
/** What tells a chunk from others of its document: the headings above it, and its first own one. */
function headingsOf(chunk) {
  const all = [...(chunk.headings ?? []), OWN_HEADING.exec(textOf(chunk))?.[1].trim()];
  return [...new Set(all)].filter((heading) => heading && heading.toLowerCase() !== titled(chunk).toLowerCase());
}
const nameOf = (chunk) => [titled(chunk), ...headingsOf(chunk)].join(" \u203a ");
const textOf = (chunk) => chunk.tokens.map((token) => token.text).join("");
const recomputedOf = (chunk) => chunk.tokens.filter((token) => token.recomputed > 0).length;
const WORD = /\p{N}+(?:[.,:]\p{N}+)*|[\p{L}\p{N}]+/gu;
const NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split(" ");
/** A word as it is compared: figures without the commas between thousands. */
const plain = (word) => word.replace(/(?<=\p{N}),(?=\p{N}{3}(?!\p{N}))/gu, "");
const allWords = (text) => (text.toLowerCase().match(WORD) ?? []).map(plain);
/** A number, or a code that has one: one that a chunk does not have is not from it. */
const isFigure = (word) => /\p{N}/u.test(word);
/** What a text can be known by: its words of three letters or more, and its figures, however short. */
const wordsOf = (text) => new Set(allWords(text).filter((word) => word.length >= 3 || isFigure(word)));
/** The same of a chunk, with the figures that it has as words. */
function knownOf(text) {
  const words = wordsOf(text);
  for (const [number, word] of NUMBERS.entries()) if (words.has(word)) words.add(String(number));
  return words;
}
/** The words alone with a space on each side, so that whole words are found in it. */
const spaced = (text) => ` ${allWords(text).join(" ")} `;

/** Open a chunk's text and go there. */
function open(number) {
  const shown = $("chunks").children[number - 1].firstChild;
  shown.open = true;
  shown.firstChild.focus();
}

/** A chunk of the prompt as a bar, lit where its tokens were recomputed. */
function barOf(chunk, index) {
  const all = chunk.source === "computed";
  const bar = button(`${index + 1}  ${headingsOf(chunk).at(-1) ?? titled(chunk)}`, () => open(index + 1));
  bar.title = nameOf(chunk);
  bar.setAttribute("aria-label", `Chunk ${index + 1}, ${nameOf(chunk)}: ${all ? "all" : recomputedOf(chunk)} of ${chunk.tokens.length} tokens recomputed`);
  const width = 100 / chunk.tokens.length; // of a token, in percent
  const stops = chunk.tokens.map((token, place) => `${all || token.recomputed ? "var(--glow)" : "var(--dark)"} 0 ${(place + 1) * width}%`);
  const strip = element("span", undefined, "strip");
  strip.style.background = `linear-gradient(to right, ${stops.join()})`;
  bar.append(strip);
  const item = element("li");
  item.append(bar);
  return item;
}

/** A chunk's text, with recomputed tokens shaded by their share of the layers, folded under its name. */
function textItem(chunk, index) {
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
  const name = element("summary");
  const about = `chunk ${chunk.position}${lines}; KV ${PLACES[chunk.source] ?? chunk.source}; ${counted(chunk.tokens.length, "token")}, ${recomputedOf(chunk)} recomputed`;
  name.append(element("h3", `${index + 1}. ${nameOf(chunk)}`), element("span", about, "small"));
  const folded = element("details");
  folded.append(name, tokens);
  const item = element("li");
  item.append(folded);
  return item;
}

/** The prompt's chunks, as bars and as texts. */
export function showChunks(chunks) {
  $("bars").replaceChildren(...chunks.map(barOf));
  $("chunks").replaceChildren(...chunks.map(textItem));
  $("strip").hidden = $("sources").hidden = chunks.length === 0;
}

/** The number of the chunk that a sentence is from: the first that holds all of it, else the one with all its figures that shares
 * most with it. Where none has all its figures, those that the nearest one lacks. */
function sourceOf(sentence, texts, known) {
  const said = sentence.replace(ITEM, "");
  const words = [...wordsOf(said)];
  if (!words.length) return { number: 0, missing: [] };
  const whole = texts.findIndex((text) => text.includes(spaced(said)));
  if (whole >= 0) return { number: whole + 1, missing: [] };
  const figures = words.filter(isFigure);
  const worth = (word) => (isFigure(word) ? FIGURE_WORDS : 1);
  const shared = known.map((own) => words.reduce((sum, word) => sum + (own.has(word) ? worth(word) : 0), 0));
  const sure = shared.map((sum, place) => (figures.every((figure) => known[place].has(figure)) ? sum : 0));
  const most = Math.max(0, ...sure);
  const number = most < Math.min(COMMON_WORDS, words.length) ? 0 : sure.indexOf(most) + 1;
  const nearest = known[shared.indexOf(Math.max(...shared))];
  return { number, missing: number ? [] : figures.filter((figure) => !nearest.has(figure)) };
}

/** The text node of an element, and the place in it, at which a character of its text stands. */
function placeOf(within, character) {
  const walker = document.createTreeWalker(within, NodeFilter.SHOW_TEXT);
  let left = character;
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    if (left <= node.length) return [node, left];
    left -= node.length;
  }
  return [within, within.childNodes.length];
}

/** Put the number of a sentence's chunk after it, and mark the figures that are in none. `begin` is where the sentence stands. */
function citeSentence(within, sentence, begin, { number, missing }, chunks) {
  if (number) {
    const link = button(`[${number}]`, () => open(number), "plain");
    link.setAttribute("aria-label", `Source ${number}: ${nameOf(chunks[number - 1])}`);
    const [node, place] = placeOf(within, begin + sentence.trimEnd().length);
    const outer = node.parentElement.closest("a, code");
    const range = document.createRange();
    if (outer) range.setStartAfter(outer);
    else range.setStart(node, place);
    range.insertNode(link);
  }
  for (const found of [...sentence.matchAll(WORD)].reverse()) {
    if (!missing.includes(plain(found[0].toLowerCase()))) continue;
    const [node, place] = placeOf(within, begin + found.index + found[0].length);
    if (place < found[0].length) continue; // it goes over a mark
    const doubted = element("span", undefined, "doubt");
    doubted.title = "the chunk nearest this sentence does not have this figure";
    const range = document.createRange();
    range.setStart(node, place - found[0].length);
    range.setEnd(node, place);
    range.surroundContents(doubted);
  }
}

/** After each sentence of the answer the number of the chunk that it is from, where one is found; the last one first, since what is put in moves what follows. */
export function cite(chunks) {
  const texts = chunks.map((chunk) => spaced(textOf(chunk)));
  const known = chunks.map((chunk) => knownOf(textOf(chunk)));
  for (const within of chunks.length ? $("answer").querySelectorAll(".said") : []) {
    const sentences = within.textContent.split(SENTENCES);
    let begin = within.textContent.length;
    for (const sentence of sentences.reverse()) {
      begin -= sentence.length;
      citeSentence(within, sentence, begin, sourceOf(sentence, texts, known), chunks);
    }
  }
  $("cited").hidden = !$("answer").querySelector("button");
  $("doubted").hidden = !$("answer").querySelector(".doubt");
}
