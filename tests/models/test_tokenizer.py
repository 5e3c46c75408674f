"""The tokenizer: agreement with transformers, control tokens in text, hostile templates, malformed files."""

import json
import os
import signal
import string
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from chat_cases import CHATML, chatml
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from perilune.errors import RequestError
from perilune.models.text import chat_template
from perilune.models.text.tokenizer import PRINTABLE_ASCII, Tokenizer
from perilune.models.text.turns import render_continued
from perilune.sandbox import Sandbox

CHARACTERS = Tokenizer.characters()
HELLO = [{"role": "user", "content": "hello"}]

# Features of Qwen3's template: system message, tools as JSON, no thinking in past turns, an empty think
# block when thinking is off; and statements that only the Jinja environment of transformers supports.
QWEN3_LIKE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{%- endif %}
    {%- if message.role not in ('user', 'assistant', 'tool') %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' and '</think>' in content and loop.index0 < ns.last %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- generation %}{{ content }}{% endgeneration %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
{% if eos_token == '<|im_end|>' %}
  {# a comment and a block on lines of their own leave nothing #}
{% endif %}
"""


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer with ChatML tokens and a template, like that of Qwen3."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    backend.train_from_iterator(["the quick brown fox says hello to the user and the assistant"] * 4, trainer)
    backend.add_tokens(["<think>", "</think>"])
    folder = tmp_path_factory.mktemp("chat")
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
        "pad_token": "<|endoftext|>",
        "chat_template": QWEN3_LIKE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def transformers_tokenizer(folder: Path):
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


CONVERSATIONS = [
    ([{"role": "user", "content": 'hello <tag> & the "fox"'}], {}),
    ([{"role": "user", "content": "hello"}], {"enable_thinking": False}),
    (
        [
            {"role": "system", "content": "be brief\n"},
            {"role": "user", "content": "1+1="},
            {"role": "assistant", "content": "<think>\none and one\n</think>\n\n2"},
            {"role": "user", "content": "é, 日本 and 🦊"},
        ],
        {},
    ),
    (
        [{"role": "user", "content": "weather?"}],
        {"tools": [{"type": "function", "function": {"name": "weather", "description": "<é & 'ü'>"}}]},
    ),
]


@pytest.mark.parametrize(("messages", "variables"), CONVERSATIONS)
def test_chat_template_renders_and_encodes_like_transformers(chat_folder, messages, variables):
    ours, theirs = Tokenizer.load(chat_folder), transformers_tokenizer(chat_folder)
    text = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **variables)
    assert ours.render_prompt(messages, **variables) == text
    assert ours.encode_prompt(messages, **variables) == theirs(text, add_special_tokens=False)["input_ids"]


TRIMS = (  # like Llama
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\n\n' }}"
    "{{- message['content'] | trim + '<|im_end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n\n' }}{%- endif %}"
)
THINKS = (  # like Qwen3: renders the reasoning of the last message anew
    "{%- for message in messages %}{%- set content = message.content %}{%- set thought = '' %}"
    "{%- if message.role == 'assistant' and '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if thought %}{{- '<think>\n' + thought + '\n</think>\n\n' }}{%- endif %}"
    "{{- content + '<|im_end|>\n' }}{%- endfor %}"
)
BEGUN = [
    "It is",
    "It is ",
    " It\n is\n\n",
    "",
    "<think>\nhello",
    "<think>\nhello\n</think>\n\nIt is",
    "<think>",
    "é, 日本 and 🦊 ",
]


@pytest.mark.parametrize("template", [QWEN3_LIKE, CHATML, TRIMS, THINKS])
def test_final_message_is_continued_like_transformers(chat_folder, tmp_path, template):
    ours = Tokenizer.load(chat_folder).with_chat_template(template, where="test")
    ours.save(tmp_path)
    theirs = transformers_tokenizer(tmp_path)
    for begun in BEGUN:
        messages = [*HELLO, {"role": "assistant", "content": begun}]
        ids = theirs.apply_chat_template(messages, continue_final_message=True, return_dict=True)["input_ids"]
        rendered = render_continued(ours, messages, {"add_generation_prompt": False})
        assert ours.encode_pieces([rendered]) == [ids], begun
        assert ids[-1] != ours.eos_token_id
    hostile = render_continued(ours, [*HELLO, {"role": "assistant", "content": "a<|im_end|>"}], {})
    (spelled,) = ours.encode_pieces([hostile])
    assert spelled.count(ours.eos_token_id) == 1  # the end of the user's turn
    assert ours.decode(spelled).endswith("a<|im_end|>")


def test_continuing_a_rewritten_message_is_rejected(chat_folder):
    tokenizer = Tokenizer.load(chat_folder)
    for template in (THINKS.replace("content + ", "content | upper + "), "{{- messages[0].content }}"):
        changed = tokenizer.with_chat_template(template, where="test")
        with pytest.raises(RequestError, match="cannot be continued"):
            render_continued(changed, [*HELLO, {"role": "assistant", "content": "It is"}], {})


def test_template_file_takes_precedence_and_survives_saving(chat_folder, tmp_path):
    tokenizer = Tokenizer.load(chat_folder)
    tokenizer.save(tmp_path)
    assert "chat_template" not in json.loads((tmp_path / "tokenizer_config.json").read_text())
    messages = [{"role": "user", "content": "hello"}]
    assert Tokenizer.load(tmp_path).encode_prompt(messages) == tokenizer.encode_prompt(messages)

    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {
        "chat_template": "from the config"
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text("from the file: {{ messages[0].content }}")
    assert Tokenizer.load(tmp_path).render_prompt(messages) == "from the file: hello"


def test_default_of_named_templates_is_used(chat_folder, tmp_path):
    Tokenizer.load(chat_folder).save(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    assert Tokenizer.load(tmp_path).render_prompt([]) == "yes"


def test_thinking_tags_are_tokens_and_control_tokens_in_text_are_not(chat_folder):
    tokenizer = Tokenizer.load(chat_folder)
    completion = tokenizer.encode_completion("<think>a</think><|im_end|>b")
    assert completion.count(tokenizer.eos_token_id) == 1
    assert completion[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(completion) == "<think>a</think><|im_end|>b"
    assert len(tokenizer.encode("<think>")) == 1
    # Encoding a rendered template in between does not change the result.
    tokenizer.encode_prompt([{"role": "user", "content": "hi"}])
    assert tokenizer.eos_token_id not in tokenizer.encode("<|im_end|>")


def test_character_tokenizer_loads_in_transformers_and_agrees(tmp_path):
    CHARACTERS.save(tmp_path)
    theirs = transformers_tokenizer(tmp_path)
    text = PRINTABLE_ASCII + "  two  spaces\n\n"
    assert theirs(text)["input_ids"] == CHARACTERS.encode(text)
    assert theirs.decode(CHARACTERS.encode_completion(text), skip_special_tokens=True) == text
    assert (theirs.eos_token_id, theirs.pad_token_id) == (CHARACTERS.eos_token_id, CHARACTERS.pad_token_id)
    assert len(theirs) == CHARACTERS.vocab_size == 98


def test_character_tokenizer_loads_beside_a_qwen3_config(tmp_path):
    CHARACTERS.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert transformers_tokenizer(tmp_path)("1+2=")["input_ids"] == CHARACTERS.encode("1+2=")


def test_saving_a_loaded_tokenizer_gives_the_same_bytes(tmp_path):
    CHARACTERS.save(tmp_path / "a")
    Tokenizer.load(tmp_path / "a").save(tmp_path / "b")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@given(st.text(alphabet=PRINTABLE_ASCII))
def test_character_tokenizer_round_trips_its_alphabet(text):
    ids = CHARACTERS.encode(text)
    assert len(ids) == len(text)
    assert CHARACTERS.decode(ids) == text
    assert CHARACTERS.decode(CHARACTERS.encode_completion(text)) == text


@given(st.lists(st.sampled_from(["<eos>", "<pad>", "1", " ", "\n", "<"]), max_size=6).map("".join))
def test_control_tokens_spelled_in_text_are_encoded_as_text(text):
    ids = CHARACTERS.encode(text)
    assert CHARACTERS.eos_token_id not in ids
    assert CHARACTERS.decode(ids) == text


@given(st.lists(st.text(alphabet=string.printable[:95], max_size=20), max_size=8))
def test_batch_encoding_equals_single_encoding(texts):
    assert CHARACTERS.encode_batch(texts) == [CHARACTERS.encode(text) for text in texts]
    ids = CHARACTERS.encode_completions(texts)
    assert ids == [CHARACTERS.encode_completion(text) for text in texts]
    assert [CHARACTERS.decode(row) for row in ids] == texts


@given(st.text(max_size=30))
def test_byte_level_tokenizer_round_trips_any_text(text):
    tokenizer = byte_level()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"})


def test_prompt_without_template_is_optional_bos_and_contents():
    messages = [{"role": "system", "content": "ab"}, {"role": "user", "content": "c"}]
    plain = byte_level()
    contents = plain.encode("abc")
    assert plain.encode_prompt(messages) == contents

    configured = Tokenizer(plain._backend, {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True})
    assert configured.encode_prompt(messages) == [configured.bos_token_id, *contents]

    # Llama 3 adds the BOS token with a post-processor.
    plain._backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", plain.bos_token_id), ("</s>", plain.eos_token_id)]
    )
    processed = Tokenizer(plain._backend, {"bos_token": "<s>", "eos_token": "</s>"})
    assert processed.encode_prompt(messages) == [processed.bos_token_id, *contents]
    assert processed.encode("abc") == contents


def test_saved_padding_and_truncation_are_disabled(tmp_path):
    CHARACTERS.save(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_padding(length=8)
    backend.enable_truncation(2)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode("12345") == CHARACTERS.encode("12345")


@pytest.mark.parametrize("text", ["café", "tab\t", "\ud800"])
def test_character_outside_the_alphabet_is_named(text):
    with pytest.raises(RequestError, match="cannot encode") as caught:
        CHARACTERS.encode_batch(["fine", text])
    assert repr(next(c for c in text if c not in PRINTABLE_ASCII)) in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"version": "1.0"}',
        b'{"version": "1.0", "model": {"type": "Pickle"}}',
        b'{"version": "1.0", "added_tokens": 3, "model": {"type": "BPE", "vocab": {}, "merges": []}}',
        b'{"version": "1.0", "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "invert": false, '
        b'"behavior": "Isolated"}, "model": {"type": "BPE", "vocab": {}, "merges": []}}',
        b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}',
    ],
)
def test_malformed_tokenizer_json_is_rejected(tmp_path, content):
    CHARACTERS.save(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(RequestError, match=r"tokenizer\.json: not (a tokenizer|UTF-8)"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "tokenizer_config.json:1: not valid JSON"),
        ("[]", "tokenizer_config.json: not a JSON object"),
        ("{}", "no eos_token"),
        ('{"eos_token": 3}', "eos_token is 3"),
        ('{"eos_token": "<|end|>"}', "'<|end|>' is not in the vocabulary"),
        ('{"eos_token": "\\ud800"}', "eos_token .* is not in the vocabulary"),
        ('{"eos_token": "<eos>", "chat_template": 3}', "chat_template is neither"),
        (
            '{"eos_token": "<eos>", "chat_template": "a\\n{% if %}"}',
            "tokenizer_config.json:2: .*does not parse",
        ),
    ],
)
def test_malformed_tokenizer_config_is_rejected(tmp_path, config, message):
    CHARACTERS.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(RequestError, match=message.replace("|", r"\|")):
        Tokenizer.load(tmp_path)


def test_missing_tokenizer_is_rejected(tmp_path):
    with pytest.raises(RequestError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    with pytest.raises(RequestError, match="no such checkpoint folder"):
        Tokenizer.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content / 0 }}",
        "{{ nothing.at.all }}",
        "{{ range(10000000) | list }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ messages | tojson(indent=100000000) }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{{ 'x' * 5000000 }}",
        "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4,
    ],
    ids=lambda template: template[:40],
)
def test_hostile_or_failing_template_raises_request_error(tmp_path, template, monkeypatch):
    if "99999" in template:  # the only one that no other limit ends
        monkeypatch.setattr(chat_template, "_RENDER_SECONDS", 0.5)
    CHARACTERS.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.load(tmp_path)
    for _ in range(2 if "99999" not in template else 1):  # a killed process is replaced
        with pytest.raises(RequestError, match=r"chat_template\.jinja: chat template cannot render"):
            tokenizer.encode_prompt([{"role": "user", "content": "1"}])


@pytest.mark.parametrize(
    "template",
    [
        "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
        "{{ 'x' * 100000000 }}",
        "{{" + "[" * 90 + "]" * 90 + "}}",
    ],
    ids=lambda template: template[:12],
)
def test_uncompilable_template_raises_request_error(tmp_path, template):
    CHARACTERS.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(RequestError, match=r"chat_template\.jinja.*: chat template does not parse"):
        Tokenizer.load(tmp_path)


def process_id(tokenizer: Tokenizer) -> int:
    return tokenizer.chat_template._process._channel.process_id


def test_killed_template_process_is_restarted_for_the_next_prompt():
    tokenizer = chatml()
    before, first = tokenizer.encode_prompt(HELLO), process_id(tokenizer)
    os.kill(first, signal.SIGKILL)
    assert tokenizer.encode_prompt(HELLO) == before
    assert process_id(tokenizer) != first


def kill_process(tokenizer: Tokenizer) -> None:
    with suppress(AttributeError, ProcessLookupError):  # between two processes
        os.kill(process_id(tokenizer), signal.SIGKILL)


@pytest.mark.parametrize("kill", [lambda tokenizer: tokenizer.chat_template.interrupt(), kill_process])
def test_killing_the_template_process_fails_only_the_current_prompt(kill):
    tokenizer = chatml()
    before = tokenizer.encode_prompt(HELLO)
    slow = "{% if messages[0].content == 'hang' %}" + "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4
    hangs = chatml(slow + "{% endif %}ok")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(hangs.encode_prompt, [{"role": "user", "content": "hang"}])
        while not waiting.done():
            kill(hangs)
            time.sleep(0.05)
        with pytest.raises(RequestError, match="killed by SIGKILL"):
            waiting.result()
    assert hangs.encode_prompt(HELLO) == hangs.encode("ok")
    assert tokenizer.encode_prompt(HELLO) == before


def test_template_process_cannot_access_files_network_or_processes():
    """The template process is confined even if a template escapes the Jinja sandbox."""
    attempt = """
import os, socket
from perilune.models.text.template_worker import _confine
_confine()
for name, attempt in {
    "read": lambda: open(__FILE__).read(),
    "write": lambda: open("written", "w").write("x"),
    "socket": lambda: socket.socket(),
    "fork": os.fork,
    "run": lambda: os.execv("/bin/true", ["true"]),
    "signal": lambda: os.kill(os.getppid(), 0),
    "memory": lambda: bytearray(1 << 30),
}.items():
    try:
        attempt()
    except (OSError, MemoryError):
        continue
    os.write(1, name.encode() + b" ")
""".replace("__FILE__", repr(__file__))
    result = subprocess.run([sys.executable, "-c", attempt], capture_output=True, text=True, check=True)
    walls = Sandbox().capabilities().mechanisms
    missing = set() if walls.landlock else {"read", "write"}
    assert set(result.stdout.split()) <= missing, result


def test_template_variables_must_be_json():
    for inputs in ({"x": object()}, {"x": {1, 2}}, {"x": b"bytes"}):
        with pytest.raises(RequestError, match="cannot render"):
            chatml().encode_prompt(HELLO, **inputs)
    nested: list = []
    for _ in range(900):
        nested = [nested]
    with pytest.raises(RequestError, match="nest too deeply"):
        chatml().encode_prompt(HELLO, x=nested)
    assert chatml().encode_prompt(HELLO, self=1, messages=2, conversations=3) == chatml().encode_prompt(HELLO)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ 'Current date: ' + strftime_now('%Y-%m-%d') }}", "Current date: 2024-07-26"),  # like gpt-oss
        ("{% set today = strftime_now('%d %B %Y') %}{{ today }}", "26 July 2024"),  # like SmolLM3, Mistral
        (  # like Llama 3.2
            "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% else %}26 Jul 2024{% endif %}",
            "26 Jul 2024",
        ),
    ],
)
def test_date_in_a_template_is_fixed(template: str, text: str) -> None:
    assert chatml(template).render_prompt(HELLO) == text


def test_template_can_append_an_object_to_a_text() -> None:
    tokenizer = chatml("{{ 'call ' + tools[0]['arguments'] + '!' }}")
    assert tokenizer.render_prompt(HELLO, tools=[{"arguments": {"é": [1, {}]}}]) == 'call {"é": [1, {}]}!'


LOUD = chatml(
    # The texts are separated: adjacent texts could form a control token, which no known template allows.
    "{% for message in messages %}<|im_start|>{{ message.role }} {{ message.name }}\n"
    "{{ message.content | trim }}<|im_end|>\n{% endfor %}{{ extra }}"
)
spellings = st.lists(
    st.sampled_from(
        ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "end|>", "<", "\U00020000", "a", " "]
    ),
    max_size=6,
).map("".join)


@settings(max_examples=60, deadline=None)
@given(spellings, spellings, spellings, spellings)
def test_only_the_template_writes_control_tokens(content, role, name, extra):
    """Content, role, name and variables of a request cannot end a turn or start another."""
    message = {"role": role, "name": name, "content": content}
    ids = LOUD.encode_prompt([message, message], extra={"key": [extra], extra: 1})
    controls = [token for token in ids if token < 3]
    assert controls == [*LOUD.encode_rendered(["<|im_start|><|im_end|>"])[0]] * 2
    text = LOUD.render_prompt([message, message], extra={"key": [extra], extra: 1})
    assert LOUD._backend.decode(ids, skip_special_tokens=False) == text


@settings(max_examples=40, deadline=None)
@given(st.text(alphabet="ab <|>_é\n", max_size=12))
def test_prompt_without_spelled_control_tokens_is_encoded_whole(content):
    messages = [{"role": "user", "content": content}]
    assert [LOUD.encode_prompt(messages)] == LOUD.encode_rendered([LOUD.render_prompt(messages)])


def test_thousands_of_short_prompts_are_fast():
    prompts = [[{"role": "user", "content": f"{number}+{number}="}] for number in range(5000)]
    start = time.process_time()
    CHARACTERS.encode_prompts(prompts)
    # Takes about 0.03 CPU seconds; the bound detects encoding prompts one by one in Python.
    assert time.process_time() - start < 1.0


def test_regex_that_exceeds_its_matching_limit_raises_request_error() -> None:
    """The Rust library panics in this case, and a panic is not an Exception."""
    backend = Backend(models.WordLevel({"a": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"((a{1,100}){1,100}){1,100}b"), behavior="isolated")
    tokenizer = Tokenizer(backend, {"eos_token": "<eos>"})
    with pytest.raises(RequestError, match="tokenizer"):
        tokenizer.encode("a" * 200 + "c")


TEXTS = [
    "Πόσο κάνει 12+34; Κάνει 46.",
    "Πόσο κάνει 56+78; Κάνει 134.",
    "3 加 4 等于多少？",
    "5 加 6 等于多少？",
] * 4
BPE = Tokenizer.trained(TEXTS, 512)


@pytest.mark.parametrize("pad", ["<extra>", {"content": "<extra>"}, "<pad>"])
def test_special_tokens_without_an_embedding_are_dropped(tmp_path, capsys, pad) -> None:
    tokenizer = added_token(tmp_path, {"pad_token": pad}, special=True)
    limited = tokenizer.limited(98)
    assert limited.vocab_size == 98
    assert limited.pad_token_id == (0 if pad == "<pad>" else None)
    assert limited.encode("<extra>!") == CHARACTERS.encode("<extra>!")
    assert limited.chat_template.source == "{{ messages[0].content }}<extra>"
    assert limited.encode_prompt(HELLO) == CHARACTERS.encode("hello<extra>")
    assert capsys.readouterr().err.endswith(": ignores <extra>, for which the model has no embedding\n")
    limited.save(tmp_path / "saved")
    assert Tokenizer.load(tmp_path / "saved").limited(98).vocab_size == 98
    assert not capsys.readouterr().err


def test_text_and_eos_tokens_without_an_embedding_are_rejected(tmp_path) -> None:
    for special, config, message in (
        (False, {}, "the tokenizer has 99 tokens but the model has 98"),
        (True, {"eos_token": "<extra>"}, "eos_token '<extra>' is not in the vocabulary"),
    ):
        with pytest.raises(RequestError, match=message):
            added_token(tmp_path, config, special=special).limited(98)


def added_token(folder, config, *, special) -> Tokenizer:
    """The character tokenizer with one more token, and a template that contains it."""
    CHARACTERS.save(folder)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens([AddedToken("<extra>", special=special)])
    backend.save(str(folder / "tokenizer.json"))
    own = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(own | config))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}<extra>")
    return Tokenizer.load(folder)


@given(st.text(max_size=40))
def test_trained_tokenizer_round_trips_any_text(text):
    encodable = text.encode("utf-8", "ignore").decode()
    assert BPE.decode(BPE.encode_completion(encodable)) == encodable


def test_trained_tokenizer_compresses_text_and_splits_digits():
    assert len(BPE.encode(TEXTS[0])) < len(TEXTS[0].encode()) / 2
    assert len(BPE.encode("1234")) == 4
    assert BPE.eos_token_id not in BPE.encode("<eos>")
    assert (BPE.pad_token_id, BPE.eos_token_id) == (0, 1) and 258 < BPE.vocab_size <= 512


def test_tokenizer_training_is_deterministic_across_processes(tmp_path):
    """In another process, Rust's hash maps have another order."""
    BPE.save(tmp_path / "here")
    code = "import sys; from perilune.models.text.tokenizer import Tokenizer as T;"
    code += f"T.trained({TEXTS!r}, 512).save(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "there")], check=True, timeout=120)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "there" / name).read_bytes()


def test_trained_tokenizer_loads_in_transformers_and_exports_to_gguf(tmp_path):
    from perilune.models.gguf.vocabulary import vocabulary_metadata

    BPE.save(tmp_path)
    theirs = transformers_tokenizer(tmp_path)
    text = f"{TEXTS[0]}\n{TEXTS[2]} naïve <x> 1234  two spaces"
    assert theirs(text)["input_ids"] == BPE.encode(text) == Tokenizer.load(tmp_path).encode(text)
    assert theirs.decode(BPE.encode_completion(text), skip_special_tokens=True) == text
    assert vocabulary_metadata(tmp_path, BPE.vocab_size)["tokenizer.ggml.pre"] == "smollm"
