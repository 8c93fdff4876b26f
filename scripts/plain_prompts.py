"""Prompts without passages: code, schemas, logs, tables, verse, chats, other languages, examples and instructions.

They come from Python's own library and from templates, the same ones each time. What is prose of several sentences, such as
a licence or the text of a manual, is a passage, and is not among them.
"""

import ast
import csv
import inspect
import io
import json
import random
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

Messages = list[tuple[str, str]]  # role and text of each
NOUNS = (
    "river",
    "engine",
    "garden",
    "letter",
    "window",
    "market",
    "student",
    "planet",
    "camera",
    "bridge",
    "doctor",
    "village",
    "ticket",
    "forest",
    "kitchen",
)
VERBS = (
    "crosses",
    "follows",
    "measures",
    "paints",
    "repairs",
    "watches",
    "carries",
    "opens",
    "describes",
    "replaces",
    "studies",
    "visits",
)
OTHERS = (
    "old",
    "quiet",
    "bright",
    "narrow",
    "heavy",
    "early",
    "green",
    "distant",
    "simple",
    "wooden",
    "famous",
    "empty",
    "careful",
    "rapid",
)
ASKED = ("What does this do?", "Explain it.", "Find the mistake in this.", "Go on with it.", "Is anything wrong here?")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
# Instructions and a question in a language each.
LANGUAGES = (
    "Du bist ein hilfreicher Assistent für unsere Kunden. Antworte immer auf Deutsch und bleibe höflich. Nenne niemals Preise, "
    "die du nicht kennst. Bitte frage nach, wenn dir etwas fehlt.|Wie lange dauert die Lieferung?",
    "Vous êtes l'assistant de notre boutique. Répondez toujours en français et restez poli. Ne donnez jamais un prix que vous "
    "ne connaissez pas. Veuillez demander une précision si la question n'est pas claire.|Quand arrive ma commande ?",
    "Eres el asistente de nuestra tienda. Responde siempre en español y con cortesía. Nunca des un precio que no conozcas. "
    "Por favor, pregunta si algo no está claro, y debes ser breve en cada respuesta.|¿Cuándo llega mi pedido?",
    "Sei l'assistente del nostro negozio. Rispondi sempre in italiano e con cortesia. Non dare mai un prezzo che non conosci. "
    "Per favore chiedi se qualcosa non è chiaro, e devi essere breve in ogni risposta.|Quando arriva il mio ordine?",
    "Você é o assistente da nossa loja. Responda sempre em português e com cortesia. Nunca dê um preço que não conhece. "
    "Por favor pergunte se algo não estiver claro, e deve ser breve em cada resposta.|Quando chega o meu pedido?",
    "Jij bent de assistent van onze winkel. Antwoord altijd in het Nederlands en blijf beleefd. Noem nooit een prijs die je "
    "niet kent. Vraag door als iets niet duidelijk is, en elk antwoord moet kort zijn.|Wanneer komt mijn bestelling?",
    "Вы помощник нашего магазина. Всегда отвечайте на русском языке и вежливо. Никогда не называйте цену, которую вы не "
    "знаете. Пожалуйста, уточняйте, если вопрос непонятен, и пишите кратко.|Когда придёт мой заказ?",
    "你是我们商店的助手。请始终用中文回答。不要说出你不知道的价格。如果问题不清楚请先询问顾客。" * 6 + "|我的订单什么时候到。",
    "あなたは当店の担当です。必ず日本語で丁寧に答えてください。知らない価格は決して言わないでください。" * 5
    + "|いつ届きますか。",
    "당신은 우리 가게의 도우미입니다. 항상 한국어로 공손하게 답변하세요. 모르는 가격은 절대 말하지 마세요. " * 4
    + "|언제 도착하나요?",
    "أنت مساعد متجرنا وتتحدث مع الزبائن كل يوم. أجب دائما باللغة العربية وبأدب. لا تذكر أبدا سعرا لا تعرفه. من فضلك اسأل إذا "
    "كان السؤال غير واضح، ويجب أن تكون كل إجابة قصيرة ومفيدة للزبون.|متى يصل طلبي؟",
    "आप हमारी दुकान के सहायक हैं। हमेशा हिंदी में और विनम्रता से उत्तर दें। जो कीमत आप नहीं जानते वह कभी न बताएँ। कृपया पूछें यदि "
    "सवाल साफ़ न हो, और हर उत्तर छोटा होना चाहिए ताकि ग्राहक उसे जल्दी पढ़ सकें।|मेरा ऑर्डर कब आएगा?",
)


class Words:
    """Draws words, sentences and values."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.some = self.draw.choice

    def sentence(self) -> str:
        """A sentence of some fifty characters."""
        some = self.some
        return f"The {some(OTHERS)} {some(NOUNS)} {some(VERBS)} the {some(OTHERS)} {some(NOUNS)} near the {some(NOUNS)}."

    def text(self, sentences: int) -> str:
        """Several sentences."""
        return " ".join(self.sentence() for _ in range(sentences))

    def number(self, digits: int = 4) -> int:
        """A number of so many digits at most."""
        return self.draw.randrange(10**digits)


def _sources() -> list[str]:
    """The library's modules of at least 2,000 characters, and C headers where they are installed."""
    library = Path(sysconfig.get_path("stdlib"))
    found = sorted(name for name in sys.stdlib_module_names if (library / f"{name}.py").is_file() and name != "this")
    texts = [(library / f"{name}.py").read_text(encoding="utf-8", errors="replace") for name in found]
    texts += [path.read_text(errors="replace") for path in sorted(Path(sysconfig.get_path("include")).glob("*.h"))[:40]]
    return [text for text in texts if len(text) >= 2000]


def _code(words: Words, sources: list[str]) -> str:
    lines = words.some(sources).splitlines(keepends=True)
    first, text = words.draw.randrange(max(1, len(lines) - 60)), ""
    for line in lines[first:]:
        if len(text) > 4000:
            break
        text += line
    return text if words.draw.random() < 0.5 else f"```python\n{text}\n```"


def _functions() -> list[dict[str, object]]:
    """Functions of the library as tools for a model: name, first lines of their description, and parameters."""
    found: list[dict[str, object]] = []
    for module in (ast, csv, inspect, io, json, random, traceback):
        for name, value in sorted(vars(module).items()):
            if not inspect.isfunction(value) or not (told := inspect.getdoc(value)):
                continue
            fields = {one: {"type": "string", "description": f"The {one}."} for one in inspect.signature(value).parameters}
            schema = {"type": "object", "properties": fields, "required": sorted(fields)}
            found.append({"name": name, "description": told[:600], "parameters": schema})
    return found


def _schema(words: Words, functions: list[dict[str, object]]) -> str:
    tools = [{"type": "function", "function": one} for one in words.draw.sample(functions, 5)]
    return json.dumps(tools, indent=words.some([None, None, 1, 2]))


def _log(words: Words) -> str:
    some = words.some
    if words.draw.random() < 0.2:
        try:
            json.loads(words.sentence())
        except ValueError:
            return traceback.format_exc() * 3
    forms: tuple[Callable[[int], str], ...] = (
        lambda n: (
            f"2026-11-{n % 28 + 1:02} 12:{n:02}:07,{words.number(3):03} {some(LEVELS)} [{some(NOUNS)}] {words.sentence()}"
        ),
        lambda n: f"Nov {n % 28 + 1:2} 08:{n:02}:11 host {some(NOUNS)}[{words.number()}]: {words.text(2)}",
        lambda n: f'10.0.{n}.7 - - [25/Nov/2026:10:{n:02}:00 +0000] "GET /{some(NOUNS)} HTTP/1.1" 200 {words.number()}',
        lambda n: json.dumps({"ts": n, "level": some(LEVELS).lower(), "msg": words.sentence(), "id": words.number(8)}),
        lambda n: f"I{n:04} {some(NOUNS)}.cc:{words.number(3)}] {words.sentence()}",
    )
    form = some(forms)
    return "\n".join(map(form, range(30)))


def _table(words: Words) -> str:
    rows = [
        [words.some(NOUNS), words.number(), f"{words.number() / 100:.2f}", words.some(OTHERS), words.sentence()]
        for _ in range(20)
    ]
    kind = words.draw.randrange(5)
    if kind == 0:
        head = "| name | count | price | kind | note |\n|---|---|---|---|---|\n"
        return head + "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)
    if kind == 1:
        written = io.StringIO()
        csv.writer(written).writerows([["name", "count", "price", "kind", "note"], *rows])
        return written.getvalue().replace("\r\n", "\n")
    if kind == 2:
        return "\n".join("\t".join(map(str, row)) for row in rows)
    if kind == 3:
        return (
            "<table>\n" + "\n".join("<tr>" + "".join(f"<td>{one}</td>" for one in row) + "</tr>" for row in rows) + "\n</table>"
        )
    return "\n".join("".join(f"{one!s:<12}" for one in row[:4]) for row in rows)


def _verse(words: Words) -> str:
    some, ends = words.some, words.some([",", ".", "", ";"])
    verses = [
        "\n".join(
            f"{some(OTHERS).capitalize()} {some(NOUNS)}, the {some(OTHERS)} {some(NOUNS)} {some(VERBS)}{ends}" for _ in "abcd"
        )
        for _ in range(5)
    ]
    return "\n\n".join(verses)


def _examples(words: Words) -> str:
    forms: tuple[Callable[[], str], ...] = (
        lambda: f"Input: {words.text(5)}\nOutput: {words.some(OTHERS)}",
        lambda: f"Review: {words.text(5)}\nSentiment: {words.some(['positive', 'negative'])}",
        lambda: f"Q: {words.text(4)}\nA: {words.sentence()}",
        lambda: f"### Input\n{words.text(5)}\n### Response\n{words.some(NOUNS)}",
        lambda: f"English: {words.text(3)}\nGerman: {words.text(3)}",
        lambda: f"User: {words.text(4)}\n\nAssistant: {words.text(4)}",
        lambda: f"Text: {words.text(5)}\nTopic: {words.some(NOUNS)}",
        lambda: f"Example:\n{words.text(4)}\nAnswer: {words.some(NOUNS)}",
        lambda: json.dumps({"text": words.text(4), "label": words.some(OTHERS)}),
        lambda: f"{words.text(3)} => {words.some(OTHERS)}",
    )
    form = words.some(forms)
    return "\n\n".join(form() for _ in range(5))


def _orders(words: Words) -> str:
    some = words.some
    forms: tuple[Callable[[], str], ...] = (
        lambda: (
            f"You must always name the {some(NOUNS)}. Never speak of a {some(NOUNS)}. Please write about the {some(OTHERS)} "
            f"{some(NOUNS)} in two sentences. If you are asked for more, answer that you do not know the {some(NOUNS)}."
        ),
        lambda: "\n".join(f"- Do not use the word {some(NOUNS)}. Say {some(NOUNS)} in its place." for _ in range(6)),
        lambda: "\n".join(f"{n}. Describe the {some(OTHERS)} {some(NOUNS)} first. {words.sentence()}" for n in range(1, 6)),
        lambda: (
            f"## Style\nKeep answers short. Use the {some(OTHERS)} tone. Avoid lists. Write for a {some(NOUNS)}, not for you."
        ),
        lambda: (
            "Use the following format:\nThought: what you should do\nAction: one of [search, read]\nAction Input: its input\n"
            "Observation: its result\n... (this can repeat N times)\nFinal Answer: the answer to the question"
        ),
    )
    return "\n\n".join(some(forms)() for _ in range(6))


def _chat(words: Words) -> Messages:
    turns: Messages = [("system", f"You are a {words.some(OTHERS)} assistant. Be brief.")]
    for _ in range(words.draw.randint(2, 5)):
        turns += [("user", f"{words.text(2)} Why?"), ("assistant", "\n\n".join(words.text(6) for _ in range(3)))]
    return [*turns, ("user", f"And the {words.some(NOUNS)}?")]


def _language(words: Words) -> Messages:
    orders, question = words.some(LANGUAGES).split("|")
    text = "\n\n".join([orders] * words.draw.randint(3, 5))
    return [("system", text), ("user", question)] if words.draw.random() < 0.5 else [("user", f"{text}\n\n{question}")]


def plain_prompts(count: int) -> Iterator[tuple[str, Messages]]:
    """So many prompts without passages, each with the name of its kind, in turn."""
    words, sources, functions = Words(5), _sources(), _functions()
    kinds: dict[str, Callable[[], str | Messages]] = {
        "code": lambda: _code(words, sources),
        "schema": lambda: _schema(words, functions),
        "log": lambda: _log(words),
        "table": lambda: _table(words),
        "verse": lambda: _verse(words),
        "examples": lambda: _examples(words),
        "orders": lambda: _orders(words),
        "chat": lambda: _chat(words),
        "language": lambda: _language(words),
    }
    for number in range(count):
        name = list(kinds)[number % len(kinds)]
        made = kinds[name]()
        asked = words.some(ASKED)
        yield name, [("user", f"{asked}\n\n{made}\n\n{words.some(ASKED)}")] if isinstance(made, str) else made
