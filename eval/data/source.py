"""Sources of a run's requests."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from cacheblend.base.errors import ConfigError
from cacheblend.base.options import check_whole
from cacheblend.retriever import Embedder
from cacheblend.service.engine.config import INSTRUCTION
from cacheblend.service.engine.prompt import AFTER_QUESTION, BEFORE_QUESTION, PromptRenderer

from .request import Request

# How a prompt is laid out. "auto" is the model's chat template, or a plain text with worked examples if it has none.
PROMPTS = ("auto", "chat", "few-shot")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """The words of a data set's prompts.

    Args:
        instruction: text before the passages.
        question: the question's form; `{question}` stands for the example's own.
        before_question: text before the question.
        after_question: text after the question if the model has no chat template.
        first_line: the answer ends at the first line break; models without a chat template go on with other questions.
        examples: questions and answers, worked in front of the passages of a plain text: they show a base model the answers'
            form. They are part of the prompt's head, which all requests and methods share.
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
        """The instruction and the worked examples, which stand before the passages of a plain text."""
        asked = ((self.question.format(question=question), answer) for question, answer in self.examples)
        worked = (f"{self.before_question}{question}{self.after_question} {answer}\n\n" for question, answer in asked)
        return self.instruction + "".join(worked)

    def answer_in(self, text: str) -> str:
        """Cut the answer out of a generated text."""
        text = text.strip()
        return text.split("\n", 1)[0].strip() if self.first_line else text


EXAMPLES = (
    ("In which season do apple trees blossom?", "spring"),
    ("How many legs does a spider have?", "eight"),
    ("Who looks after the books of a library?", "the librarian"),
)
# The paper's words (§7.1): answers become as short as the data sets' own.
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
        """Upper bound on the tokens of an answer."""

    @property
    def count(self) -> int:
        """Upper bound on the number of requests; 0 if unknown."""

    @property
    def caches_all(self) -> bool:
        """Whether each chunk of a request is cached before the request comes; else only chunks of earlier requests are."""

    def requests(
        self,
        tokenizer: Any,
        limit: int | None,
        embedder: Embedder | None = None,
        on_corpus: Callable[[int, int], None] | None = None,
    ) -> Iterator[Request]:
        """Yield the requests, in an order that depends on nothing but the source.

        Args:
            tokenizer: the model's.
            limit: longest prompt in tokens; None for no limit.
            embedder: replaces the retriever's own.
            on_corpus: if all requests search one corpus, called with the number of embedded documents and of all documents.
        """


def prompt_renderer(tokenizer: Any, wording: Wording) -> PromptRenderer:
    """Make the renderer of a wording's prompts for a model.

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


def answer_ids(prompts: PromptRenderer, answer: str) -> list[int]:
    """Token ids of an answer as it follows a question: after a space in a plain text, as it is after a chat template."""
    before, ids = prompts.after_question, prompts.text_ids
    if not before or before[-1].isspace():
        return ids(answer)
    # In one go, where the border holds: some tokenizers put a space of their own in front of a text.
    before_ids, joined = ids(before), ids(f"{before} {answer}")
    return joined[len(before_ids) :] if joined[: len(before_ids)] == before_ids else ids(f" {answer}")


CHUNKINGS = ("split", "passage")
ORDERS = ("retrieval", "reversed", "gold-middle")
SEARCHED_CHUNKS = 6  # the paper's


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Chunking, retrieval and what is cached before a request comes.

    Args:
        chunk_tokens: tokens of a chunk.
        num_chunks: chunks of a prompt; None for 6 where they are searched, else for all that fit.
        chunking: "split": passages are split into chunks; "passage": each passage of a case, title and text, is one chunk, in
            the file's order, without a search. None is the data set's own.
        order: of a prompt's chunks. "retrieval": nearest first, or the file's; "reversed"; "gold-middle": the first chunk
            that contains an answer moves to the middle. The order never changes which chunks there are.
        prompt: one of `PROMPTS`.
        shared_corpus: chunks are searched among all cases' passages, the cases come in random order, and only what an
            earlier case used is cached; else a case has its own passages, and each of its chunks is cached.
        warm_up: share of the cases that only fill the cache, 0..1.
    """

    chunk_tokens: int = 512
    num_chunks: int | None = None
    chunking: str | None = None
    order: str = ORDERS[0]
    prompt: str = PROMPTS[0]
    shared_corpus: bool = False
    warm_up: float = 0.0

    def __post_init__(self) -> None:
        check_whole("chunk_tokens", self.chunk_tokens)
        if self.num_chunks is not None:
            check_whole("num_chunks", self.num_chunks)
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
