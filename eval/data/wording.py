"""What stands around passages and question in a prompt."""

from __future__ import annotations

from dataclasses import dataclass

from cacheblend.eval.world import WORKING_ENDS
from cacheblend.service.engine.config import INSTRUCTION
from cacheblend.service.engine.prompt import AFTER_QUESTION, BEFORE_QUESTION

# How a prompt is laid out. "auto" takes the model's chat template where it has one, else a plain text with worked examples.
PROMPTS = ("auto", "chat", "few-shot")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """The words of a data set's prompts.

    Args:
        instruction: in front of the passages.
        question: what is asked; `{question}` stands for the example's own.
        before_question: in front of it.
        after_question: behind it, where the model has no chat template.
        first_line: the answer ends at the first line break; models without a chat template go on with other questions.
        working_ends: what stands between a working that the model may write first and its answer; empty for none.
        examples: questions and answers, worked in front of the passages of a plain text: they show a base model the answers'
            form. They are part of the prompt's head, the same for every request and method.
        prompt: one of `PROMPTS`.
    """

    instruction: str = INSTRUCTION
    question: str = "{question}"
    before_question: str = BEFORE_QUESTION
    after_question: str = AFTER_QUESTION
    first_line: bool = True
    working_ends: str = ""
    examples: tuple[tuple[str, str], ...] = ()
    prompt: str = PROMPTS[0]

    @property
    def text_instruction(self) -> str:
        """What stands in front of the passages of a plain text: the instruction, then the worked examples."""
        asked = ((self.question.format(question=question), answer) for question, answer in self.examples)
        worked = (f"{self.before_question}{question}{self.after_question} {answer}\n\n" for question, answer in asked)
        return self.instruction + "".join(worked)

    def as_written(self, answer: str, text: str) -> str:
        """An answer as the model would write it: after the working that it wrote in a generated text, if any."""
        working, ends, _ = text.strip().split("\n", 1)[0].rpartition(self.working_ends) if self.working_ends else ("", "", "")
        return working + ends + answer

    def answer_in(self, text: str) -> str:
        """The answer in a generated text."""
        text = text.strip()
        if self.first_line:
            text = text.split("\n", 1)[0].strip()
        return text.rpartition(self.working_ends)[2].strip() if self.working_ends else text


EXAMPLES = (
    ("In which season do apple trees blossom?", "spring"),
    ("How many legs does a spider have?", "eight"),
    ("Who looks after the books of a library?", "the librarian"),
)
WORLD = Wording(working_ends=WORKING_ENDS)
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
