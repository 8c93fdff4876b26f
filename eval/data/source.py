"""Where the requests of a run come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from cacheblend.base.errors import ConfigError
from cacheblend.retriever import Embedder
from cacheblend.service.engine.prompt import PromptBuilder

from .request import Request
from .wording import Wording


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


def prompt_builder(tokenizer: Any, wording: Wording) -> PromptBuilder:
    """Lays out the prompts of a wording for a model.

    Raises:
        ConfigError: a chat prompt is asked for, and the model has no chat template.
    """
    has_template = tokenizer.chat_template is not None
    if wording.prompt == "chat" and not has_template:
        raise ConfigError("prompt", "chat", "only with a model that has a chat template; use auto or few-shot")
    chat = has_template and wording.prompt != "few-shot"
    return PromptBuilder(
        tokenizer,
        wording.instruction if chat else wording.text_instruction,
        before_question=wording.before_question,
        after_question=wording.after_question,
        chat=chat,
    )
