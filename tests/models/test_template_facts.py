"""Chat templates of several families: system prompts, thinking on and off, and the tokens of a prompt."""

import pytest
from chat_cases import CHATML, chatml

from perilune.errors import RequestError
from perilune.models.text.template_facts import (
    TemplateFacts,
    prompt_tokens,
    template_facts,
    with_recipe_template,
)
from perilune.models.text.tokenizer import Tokenizer

USER = [{"role": "user", "content": "hello"}]
WITH_DEFAULT = (  # like SmolLM2 and Qwen2.5
    "{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{%- endif %}"
) + CHATML
REFUSES = (
    "{%- if messages[0].role == 'system' %}{{- raise_exception('no system role') }}{%- endif %}" + CHATML
)
IN_USER = (  # like Mistral
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content + '\\n\\n' %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
    "{%- for message in messages %}{%- if message.role == 'user' %}"
    "{{- '<|im_start|>' + system + message.content + '<|im_end|>' }}"
    "{%- else %}{{- message.content + '<|endoftext|>' }}{%- endif %}{%- endfor %}"
)
IGNORES = CHATML.replace(
    "{%- for message in messages %}", "{%- for message in messages if message.role != 'system' %}"
)
THINKING = CHATML.replace(  # like Qwen3 and SmolLM3
    "{{- '<|im_start|>assistant\\n' }}",
    "{{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}",
)


@pytest.mark.parametrize(
    "template, facts",
    [
        (CHATML, TemplateFacts("own turn")),
        (WITH_DEFAULT, TemplateFacts("own turn", "Be kind.")),
        (REFUSES, TemplateFacts("refused")),
        (IN_USER, TemplateFacts("in the user's turn")),
        (IGNORES, TemplateFacts("ignored")),
    ],
)
def test_template_facts_detect_system_prompt_handling(template: str, facts: TemplateFacts) -> None:
    assert template_facts(chatml(template)) == facts


def test_system_prompt_without_template_goes_into_the_user_turn() -> None:
    assert template_facts(Tokenizer.characters()) == TemplateFacts("in the user's turn")


def test_template_kwargs_set_saved_defaults_for_thinking(tmp_path) -> None:
    plain = chatml(THINKING)
    off = with_recipe_template(plain, {"chat_template_kwargs": {"enable_thinking": False}})
    on = with_recipe_template(plain, {"chat_template_kwargs": {"enable_thinking": True}})
    assert off.render_prompt(USER) == plain.render_prompt(USER, enable_thinking=False)
    assert off.render_prompt(USER).endswith("</think>\n\n")
    assert on.render_prompt(USER) == plain.render_prompt(USER) != off.render_prompt(USER)
    assert off.render_prompt(USER, enable_thinking=True) == plain.render_prompt(
        USER
    )  # the default can be overridden
    off.save(tmp_path)
    assert Tokenizer.load(tmp_path).render_prompt(USER) == off.render_prompt(USER)


@pytest.mark.parametrize("value", [True, 7, 0.5, 'say "hi" \\ {{ x }}\nä', None])
@pytest.mark.parametrize("start", ["", "  ", "\n", "{# note #}\n"])
def test_template_kwargs_equal_passing_the_variable(value, start: str) -> None:
    source = (
        start
        + "{% macro m() %}{{ depth }}{% endmacro %}{{ m() }}|{{ depth is none }}|{{ messages[0].content }}"
    )
    plain = chatml(source)
    changed = with_recipe_template(plain, {"chat_template_kwargs": {"depth": value}})
    assert changed.render_prompt(USER) == plain.render_prompt(USER, depth=value)


def test_unknown_template_variables_are_rejected() -> None:
    for name in ("enable_thinkin", "thinking", "x y"):
        with pytest.raises(RequestError, match="no variable"):
            with_recipe_template(chatml(THINKING), {"chat_template_kwargs": {name: True}})
    with pytest.raises(RequestError, match="no chat template"):
        with_recipe_template(Tokenizer.characters(), {"chat_template_kwargs": {"enable_thinking": True}})
    same = chatml(THINKING)
    assert with_recipe_template(same, {"chat_template": None, "chat_template_kwargs": {}}) is same


def test_prompt_tokens_returns_ids_texts_and_answer_start() -> None:
    tokenizer = chatml()
    tokens, start = prompt_tokens(tokenizer, [{"role": "user", "content": "ä <|im_end|>"}])
    assert [token.id for token in tokens] == tokenizer.encode_prompt(
        [{"role": "user", "content": "ä <|im_end|>"}]
    )
    assert [token.text for token in tokens if token.special] == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
    assert "".join(token.text for token in tokens[start:]) == "<|im_start|>assistant\n"
    opening = "".join(token.text for token in tokens[:start])
    assert opening in (
        "<|im_start|>user\nä <|im_end|><|im_end|>\n",
        "<|im_start|>user\n\\xc3\\xa4 <|im_end|><|im_end|>\n",
    )
    plain = Tokenizer.characters()
    tokens, start = prompt_tokens(plain, USER)
    assert (start, "".join(token.text for token in tokens)) == (5, "hello")
