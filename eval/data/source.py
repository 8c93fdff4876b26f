"""Sources of a run's requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from cacheblend.base.errors import ConfigError
from cacheblend.retriever import Embedder
from cacheblend.service.engine.config import INSTRUCTION
from cacheblend.service.engine.prompt import AFTER_QUESTION, BEFORE_QUESTION, PromptRenderer

from .request import Request

# How a prompt is laid out. "auto" takes the model's chat template where it has one, else a plain text with worked examples.
PROMPTS = ("auto", "chat", "few-shot")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """The words of a data set's prompts.

    Args:
        instruction: in front of the passages.
        question: what is asked; `{question}` stands for the example's own.
        before_question: in front of it.
        after_question: after it, where the model has no chat template.
        first_line: the answer ends at the first line break; models without a chat template go on with other questions.
        examples: questions and answers, worked in front of the passages of a plain text: they show a base model the answers'
            form. They are part of the prompt's head, the same for every request and method.
        prompt: one of `PROMPTS`.
    """

    instruction: str = INSTRUCTION
    question: str = "{question}"
    before_question: str = BEFORE_QUESTION
    after_question: str = AFTER_QUESTION
    first_line: bool = True
    examples: tuple[tuple[str, str], ...] = ()
    prompt: str = PROMPTS[0]

    @property
    def text_instruction(self) -> str:
        """What stands in front of the passages of a plain text: the instruction, then the worked examples."""
        asked = ((self.question.format(question=question), answer) for question, answer in self.examples)
        worked = (f"{self.before_question}{question}{self.after_question} {answer}\n\n" for question, answer in asked)
        return self.instruction + "".join(worked)

    def answer_in(self, text: str) -> str:
        """The answer in a generated text."""
        text = text.strip()
        return text.split("\n", 1)[0].strip() if self.first_line else text


EXAMPLES = (
    ("In which season do apple trees blossom?", "spring"),
    ("How many legs does a spider have?", "eight"),
    ("Who looks after the books of a library?", "the librarian"),
)
# The paper's words (§7.1): they keep answers as short as the data sets' own.
SHORT_ANSWER = Wording(question="{question} Answer within 5 words.", examples=EXAMPLES)
# A user's own questions, asked as the service asks them.
OWN_QUESTION = Wording(examples=EXAMPLES)
DIALOGUE = Wording(
    instruction="Summarize the last dialogue in a few short sentences, as in the examples.\n\n",
    before_question="",
    after_question="\nSummary:",
)
NEWS = Wording(
    instruction="Read the news passages below.\n\n",
    question="Write a one-page summary of all the news.",
    before_question="",
    after_question="\nSummary:",
    first_line=False,
)


class RequestSource(Protocol):
    """A data set in one set-up; frozen, since it is part of a run's configuration."""

    @property
    def name(self) -> str:
        """Name of the data set."""

    @property
    def wording(self) -> Wording:
        """The words around passages and questions."""

    @property
    def new_tokens(self) -> int:
        """Most tokens of an answer."""

    @property
    def count(self) -> int:
        """At most so many requests."""

    @property
    def caches_all(self) -> bool:
        """Whether each chunk of a request is cached before it comes, or only what earlier requests had."""

    def requests(
        self,
        tokenizer: Any,
        limit: int | None,
        embedder: Embedder | None = None,
        on_corpus: Callable[[int, int], None] | None = None,
    ) -> Iterator[Request]:
        """The requests, in an order that the source alone fixes.

        Args:
            tokenizer: the model's.
            limit: longest prompt in tokens; None for no limit.
            embedder: in place of the retriever's own.
            on_corpus: where all are searched in one corpus, called with its documents that are embedded and their number.
        """


def prompt_renderer(tokenizer: Any, wording: Wording) -> PromptRenderer:
    """Lays out the prompts of a wording for a model.

    Raises:
        ConfigError: a chat prompt is asked for, and the model has no chat template.
    """
    has_template = tokenizer.chat_template is not None
    if wording.prompt == "chat" and not has_template:
        raise ConfigError("prompt", "chat", "only with a model that has a chat template; use auto or few-shot")
    chat = has_template and wording.prompt != "few-shot"
    return PromptRenderer(
        tokenizer,
        wording.instruction if chat else wording.text_instruction,
        before_question=wording.before_question,
        after_question=wording.after_question,
        chat=chat,
    )


CHUNKINGS = ("split", "passage")
ORDERS = ("retrieval", "reversed", "gold-middle")
SEARCHED_TOP_K = 6  # the paper's


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Chunking, retrieval and what is cached before a request comes.

    Args:
        chunk_tokens: tokens of a chunk.
        top_k: chunks of a prompt; None for 6 where they are searched, else for all that fit.
        chunking: "split": passages are split into chunks; "passage": each passage of a case, title and text, is one chunk, in
            the file's order, without a search. None takes the data set's own.
        order: of a prompt's chunks. "retrieval": nearest first, or the file's; "reversed"; "gold-middle": the first chunk in
            which an answer stands moves to the middle. The chunks are the same in every order.
        prompt: one of `PROMPTS`.
        shared_corpus: chunks are searched among all cases' passages, the cases come in random order, and only what an
            earlier case used is cached; else a case has its own passages, and each of its chunks is cached.
        warm_up: share of the cases that only fill the cache, 0..1.
    """

    chunk_tokens: int = 512
    top_k: int | None = None
    chunking: str | None = None
    order: str = ORDERS[0]
    prompt: str = PROMPTS[0]
    shared_corpus: bool = False
    warm_up: float = 0.0

    def __post_init__(self) -> None:
        for field in ("chunk_tokens", "top_k"):
            value = getattr(self, field)
            if field == "top_k" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(field, value, "a whole number of at least 1")
        for field, allowed in (("chunking", (None, *CHUNKINGS)), ("order", ORDERS), ("prompt", PROMPTS)):
            if getattr(self, field) not in allowed:
                raise ConfigError(field, getattr(self, field), f"one of {', '.join(filter(None, allowed))}")
        if self.shared_corpus and self.chunking == "passage":
            raise ConfigError("chunking", self.chunking, "split where all cases share one corpus, which is searched in chunks")
        if not 0 <= self.warm_up < 1:
            raise ConfigError("warm_up", self.warm_up, "0 or above, below 1")


PRESETS = {
    "paper": Preset(),
    # The paper skips the first 1,000 of 6,000 queries.
    "extended": Preset(shared_corpus=True, warm_up=1 / 6),
}
