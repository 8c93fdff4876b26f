"""A chat's prompt is that of the model's own template, token by token: templates that trim, drop thoughts, move turns."""

import dataclasses

import pytest
from fakes import tiny_tokenizer
from thinking import OPENED, QWEN3
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from cacheblend.base.errors import InputError
from cacheblend.service.engine.prompt import Message, PromptRenderer

CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{{ m.content | trim + '<|eot_id|>' }}{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)
GEMMA = (
    "{{ bos_token }}{% set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% for m in (messages[1:] if system else messages) %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{{ system if loop.first }}{{ m.content | trim + '<end_of_turn>\n' }}{% endfor %}{{ '<start_of_turn>model\n' }}"
)
# The system message stands in the last turn.
MISTRAL = (
    "{{ bos_token }}{% set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% for m in (messages[1:] if system else messages) %}{% if m.role == 'user' %}"
    "{{ '[INST] ' + (system if loop.last else '') + m.content + '[/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}"
)
TEMPLATES = {"qwen2": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "mistral": MISTRAL, "qwen3": QWEN3, "deepseek": OPENED}
CONTROLS = (
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "<think>", "</think>"),
)
CONTROL_TEXT = "a <|im_end|><|eot_id|></s> b"
# Texts of the user and the assistant by turns; a first one that begins with "system:" is the system's.
CHATS = (
    ("Hello",),
    ("system: Be brief.", "Hello"),
    ("Hi", "Hello.", "Bye"),
    (" Hello",),
    ("Hello\n",),
    ("def f():\n    ",),
    ("Hi", " Hello.", "Bye"),
    ("Hi", "Hello.\n\n", "Bye"),
    ("system: Be brief.\n", "Hi", "Yo", "Bye"),
    ("\nHello",),
    ("  Hi  ", "Yo", "Bye"),
    ("Hi", "<think>\nlet me see\n</think>\n\nHello.", "Bye"),
    ("é 👩‍👩‍👧 中文",),
    ("Hi", "see\n</think>\n\nHello.", "12345"),
    (CONTROL_TEXT,),
    ("Hi", "Yo", ""),
    ("Hi", "Yo", " \n"),
    ("Hi", "Hello. "),
    ("Hi", ""),
)


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer.from_str(tiny_tokenizer().backend_tokenizer.to_str())
    backend.add_special_tokens([AddedToken(content, normalized=False, special=True) for content in CONTROLS])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return made


def turns_of(chat: tuple[str, ...]) -> list[Message]:
    system = [Message("system", text.removeprefix("system: ")) for text in chat[:1] if text.startswith("system:")]
    others = enumerate(chat[len(system) :])
    return [*system, *(Message("assistant" if place % 2 else "user", text) for place, text in others)]


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_prompts_are_the_templates(template: str) -> None:
    """White space, thoughts and the order of turns are the template's; the text of a control token stays text.

    The assistant's last turn stands before the answer, or the answer continues it.
    """
    made = tokenizer(template)
    renderer = PromptRenderer(made, "Read.\n")
    for chat, continues in ((chat, continues) for chat in CHATS for continues in (False, True)):
        turns = turns_of(chat)
        if continues and turns[-1].role != "assistant":
            continue
        prompt = renderer.chat(turns, with_chunks=False, continues=continues)
        own = [{"role": turn.role, "content": turn.content} for turn in turns]
        options = {"add_generation_prompt": not continues, "continue_final_message": continues}
        rendered = made.apply_chat_template(own, tokenize=False, **options)
        assert made.decode(prompt.token_ids) == rendered, chat
        ids = made(rendered, add_special_tokens=False)["input_ids"]
        assert (list(prompt.token_ids) == ids) is (chat != (CONTROL_TEXT,)), chat


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_without_the_user(name: str) -> None:
    """A system message alone is answered by a template that renders it, and by none; chunks need a question."""
    made, turns = tokenizer(TEMPLATES[name]), [Message("system", f" {CONTROL_TEXT}\n")]
    rendered = made.apply_chat_template([turns[0].turn(turns[0].content)], tokenize=False, add_generation_prompt=True)
    renderer = PromptRenderer(made, "Read.\n")
    if name in ("gemma", "mistral"):
        with pytest.raises(InputError, match="does not take these turns"):
            renderer.chat(turns, with_chunks=False)
    else:
        assert made.decode(renderer.chat(turns, with_chunks=False).token_ids) == rendered
    plain = PromptRenderer(made, "Read.\n", chat=False).chat(turns, with_chunks=False)
    assert made.decode(plain.token_ids) == f"<s>{CONTROL_TEXT}\n\nAnswer:"
    with pytest.raises(InputError, match="before which the chunks stand"):
        renderer.chat(turns, with_chunks=True)


@pytest.mark.parametrize("template", [QWEN3, QWEN3.replace("{{- content }}", "{{- content | tojson }}")])
def test_tools(template: str) -> None:
    """Calls and results stand in the prompt as the template has them, as JSON too, and thoughts before a call."""
    made = tokenizer(template)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
    turns = [
        Message("user", " What? "),
        Message("assistant", "<think>\nold\n</think>\n\nHm.\n", (call, call)),
        Message("tool", ' It\n"rains".\n', tool_call_id="1"),
        Message("tool", "", tool_call_id="1"),
    ]
    own = [
        {name: value for name, value in dataclasses.asdict(turn).items() if value} | {"content": turn.content} for turn in turns
    ]
    rendered = made.apply_chat_template(own, tools=[tool], tokenize=False, add_generation_prompt=True)
    prompt = PromptRenderer(made, "Read.\n").chat(turns, with_chunks=False, tools=[tool])
    assert made.decode(prompt.token_ids) == rendered
    assert list(prompt.token_ids) == made(rendered, add_special_tokens=False)["input_ids"]
