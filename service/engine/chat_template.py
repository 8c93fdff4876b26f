"""A model's chat template: its variables, its tools, its thoughts, and its text around the turns of a chat."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from inspect import signature
from typing import Any

from jinja2 import meta, nodes
from jinja2.exceptions import TemplateError

from cacheblend.base.errors import ConfigError, InputError
from cacheblend.retriever import PlainTokenizer

from .reasoning import Thoughts

LAST_TOKENS = 32  # of a prompt, in which a template opens or closes thoughts
SWITCHES = ("enable_thinking", "thinking")
SWITCH = re.compile(r"(?<!\S)/(?:no_?)?think(?!\S)")


class ChatTemplate:
    """The chat template of a tokenizer, or the several that it has by name.

    Args:
        tokenizer: the model's fast tokenizer.
        plain: its copy that reads no control tokens.
        is_used: False to make plain texts of all chats, as with a tokenizer that has no template.

    Attributes:
        is_used: whether chats are rendered by a template.
        takes_tools: whether the template writes tools into the prompt.
        thoughts: how the model's answers have their thoughts; None for a model without any.
    """

    def __init__(self, tokenizer: Any, plain: PlainTokenizer, *, is_used: bool = True) -> None:
        self._tokenizer, self._plain = tokenizer, plain
        given = tokenizer.chat_template
        by_name = given if isinstance(given, Mapping) else {"default": given}
        self.is_used = is_used and given is not None
        self._texts: list[str] = [*by_name.values()] if self.is_used else []
        for_tools = by_name.get("tool_use") or by_name.get("default") or ""
        self.takes_tools = self.is_used and re.search(r"\btools\b", for_tools) is not None
        self.thoughts = Thoughts.find(tokenizer, "".join(self._texts)) if self.is_used else None

    @property
    def undated(self) -> dict[str, str]:
        """The template with a date in place of today's, as an argument of `apply_chat_template`; empty if it writes none."""
        template = next((text for text in self._texts[:1] if "strftime_now" in text), None)
        fixed = "{% macro strftime_now(format) %}2025-01-01{% endmacro %}"
        return {} if template is None else {"chat_template": fixed + template}

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names of the template's variables that a request may set."""
        # transformers' own environment, as templates have statements of its own.
        from transformers.utils.chat_template_utils import _compile_jinja_template

        found: set[str] = set()
        for template in self._texts:
            environment = _compile_jinja_template(template).environment
            parsed, first = environment.parse(template), dict[str, str]()
            for name, context in _names(parsed):
                first.setdefault(name, context)
            unset = meta.find_undeclared_variables(parsed) - environment.globals.keys()
            found |= {name for name in unset if first.get(name) == "load"}  # others are set before, if not in every branch
        ours = {*signature(self._tokenizer.apply_chat_template).parameters, *self._tokenizer.special_tokens_map, "messages"}
        return frozenset(found - ours)

    def check_kwargs(self, template_kwargs: Mapping[str, Any], field: str = "chat_template_kwargs") -> None:
        """Refuse variables that the template does not know, and texts that it would make control tokens.

        Raises:
            ConfigError: one of the names is no variable of the template, or a value has the text of a control token. A model
                that does not think may be asked not to, whatever its template: one setting serves several models.
        """
        if not template_kwargs:
            return
        known, text = self.variables, json.dumps(dict(template_kwargs), ensure_ascii=False)
        thinks = self.thoughts is not None and any(self.thoughts.format.closes in template for template in self._texts)
        off = {name for name in SWITCHES if not thinks and not template_kwargs.get(name)}
        if unknown := sorted(template_kwargs.keys() - known - off):
            names = f"knows {', '.join(sorted(known))}" if known else "has no variables to set; leave it out"
            raise ConfigError(field, unknown[0], f"the model's chat template {names}")
        if self._plain.controls(self.ids(text)):
            raise ConfigError(field, text, "values without the text of a control token of the model")

    def split_switch(self, role: str, text: str) -> tuple[str, str]:
        """A message's text, and the system's word in it by which this template switches thoughts, as SmolLM3's `/no_think`."""
        found = SWITCH.search(text) if role == "system" else None
        if found is None or not any(f"{quote}{found[0]}" in own for own in self._texts for quote in "'\""):
            return text, ""
        return f"{text[: found.start()]}{text[found.end() :]}".strip(), f" {found[0]}"

    def render(
        self, turns: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any]
    ) -> str:
        """The template's text of turns, up to where the answer begins; variables may be arguments of `apply_chat_template`.

        Raises:
            InputError: the template refuses the turns.
        """
        own = [dict(tool) for tool in tools] or None
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                list(turns), tools=own, tokenize=False, **{"add_generation_prompt": True, **template_kwargs}
            )
        except (TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
            fields = "messages or chat_template_kwargs" if template_kwargs else "messages"
            why = str(error).partition("Final message to continue:")[0]  # which transformers shows, with all before it
            raise InputError(f"{fields}: the model's chat template refuses these turns: {why}") from error
        return rendered

    def thoughts_after(self, suffix: Sequence[int]) -> Thoughts | None:
        """How the answer to a prompt that ends with `suffix` has its thoughts; None for a model without any."""
        if self.thoughts is None:
            return None
        last = self._tokenizer.decode(list(suffix[-LAST_TOKENS:]), skip_special_tokens=False).rstrip()
        marks = self.thoughts.format
        is_open, is_closed = last.endswith(marks.opens.rstrip()), last.endswith(marks.closes)
        return replace(self.thoughts, is_open=is_open, is_closed=is_closed and not marks.has_channels)

    def ids(self, text: str) -> tuple[int, ...]:
        """Token ids of the template's own text, control tokens read."""
        # As a batch: for a single text the tokenizer holds Python's lock.
        return tuple(self._tokenizer([text], add_special_tokens=False)["input_ids"][0])

    def opening_ids(self) -> tuple[int, ...]:
        """The ids that the tokenizer itself puts in front of a text: BOS, or none."""
        text, ids = list(self.ids("a")), self._tokenizer("a")["input_ids"]
        return next((tuple(ids[:place]) for place in range(len(ids)) if ids[place : place + len(text)] == text), ())


def _names(node: nodes.Node) -> Iterator[tuple[str, str]]:
    """The names in a template in the order of their evaluation, each with "load" or "store"."""
    if isinstance(node, nodes.Name):
        yield node.name, node.ctx
    parts = [node.node, node.target] if isinstance(node, nodes.Assign) else node.iter_child_nodes()
    for part in parts:
        yield from _names(part)
