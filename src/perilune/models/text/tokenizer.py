"""Converts text to token ids and back with the tokenizer of a Hugging Face folder.

The `tokenizers` library does the encoding. This module adds the files of the folder (tokenizer.json,
tokenizer_config.json, chat_template.jinja), prompts and completions. It treats text as text: an `<eos>`
spelled out in a question or an answer is five characters, not the token that ends a sequence.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from perilune.errors import RequestError
from perilune.files import read_json, read_regular, write_atomic, write_json
from perilune.models.checkpoints.folder import CheckpointFolder
from perilune.models.text.chat_template import ChatTemplate
from perilune.models.text.spelled_tokens import Rendered, SpelledTokens
from perilune.models.text.token_bytes import Boundaries, token_bytes
from perilune.terminal import escape_control

PRINTABLE_ASCII = "\n" + "".join(chr(code) for code in range(32, 127))

ANY_TEXT = "for a new model, set `tokenizer` to bytes or bpe, which encode any text; or change the text"

_TEMPLATE_FILE = "chat_template.jinja"
_SPECIALS = ("<pad>", "<eos>")  # of new tokenizers


class Tokenizer:
    """A tokenizer with its special tokens and chat template.

    Args:
        backend: the `tokenizers.Tokenizer`.
        config: the contents of tokenizer_config.json. `eos_token` is required; `pad_token`, `bos_token`,
            `add_bos_token` and `chat_template` are optional; `save` writes all other keys back.
        chat_template: the text of chat_template.jinja, which takes precedence over the config's.
        where: file to name in errors.

    Attributes:
        eos_token_id: the token that ends a completion. Models may have further end tokens
            (generation_config.json).
        pad_token_id, bos_token_id: None when the tokenizer has none.
        vocab_size: one more than the largest id.
        prompt_prefix: tokens at the beginning of a prompt without a template: BOS or none.

    Raises:
        RequestError: when a special token is missing from the vocabulary, or the template is malformed.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any],
        *,
        chat_template: str | None = None,
        where: str = "tokenizer",
    ) -> None:
        # A saved tokenizer may have padding and truncation switched on.
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True  # special tokens in a text are encoded as text
        self._backend = self._decoder = backend
        self._config = dict(config)
        self._where = where
        self.vocab_size: int = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.pad_token_id = self._special("pad_token")
        self.bos_token_id = self._special("bos_token")
        eos_token_id = self._special("eos_token")
        if eos_token_id is None:
            raise RequestError(
                "the tokenizer has no eos_token", where=where, remedy="set eos_token in tokenizer_config.json"
            )
        self.eos_token_id = eos_token_id

        source = chat_template if chat_template is not None else _template_in(self._config, where)
        self.chat_template = None if source is None else ChatTemplate(source, where=where)
        self._special_tokens = {
            name: token for name in ("bos_token", "eos_token", "pad_token") if (token := self._token(name))
        }
        self.prompt_prefix = self._bos_prefix()

    @classmethod
    def load(cls, path: Path | str) -> Tokenizer:
        """Read the tokenizer of the Hugging Face folder `path`.

        Raises:
            RequestError: when a file is missing or malformed, naming it.
        """
        folder = CheckpointFolder(Path(path))
        file = folder.file("tokenizer.json")
        if not file.exists():
            raise RequestError(
                "no tokenizer.json",
                where=str(path),
                remedy="write it with transformers:"
                " AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
            )
        config_file = folder.file("tokenizer_config.json")
        config = read_json(config_file) if config_file.exists() else {}
        if not isinstance(config, dict):
            raise RequestError("not a JSON object", where=str(config_file))
        template_file = folder.file(_TEMPLATE_FILE)
        template = _read_text(template_file) if template_file.exists() else None
        where = config_file if template is None else template_file
        return cls(_read_backend(file), config, chat_template=template, where=str(where))

    @classmethod
    def characters(cls, alphabet: str = PRINTABLE_ASCII) -> Tokenizer:
        """Return a tokenizer with one token per character: `<pad>` 0, `<eos>` 1, then `alphabet` in order.

        The default alphabet, newline and printable ASCII, makes 98 tokens. Encoding another character is an
        error; there is no `<unk>`.
        """
        vocabulary = {token: index for index, token in enumerate((*_SPECIALS, *alphabet))}
        if len(vocabulary) != len(_SPECIALS) + len(alphabet):
            raise ValueError("the alphabet repeats a character")
        backend = tokenizers.Tokenizer(models.WordLevel(vocabulary))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
        backend.decoder = decoders.Fuse()
        return cls._new(backend)

    @classmethod
    def byte_level(cls) -> Tokenizer:
        """Return a tokenizer with one token per byte of UTF-8, which encodes any text.

        `<pad>` is 0, `<eos>` is 1, then the 256 bytes by their names in GPT-2's byte-level alphabet.
        """
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {token: index for index, token in enumerate((*_SPECIALS, *alphabet))}
        backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        return cls._new(backend)

    @classmethod
    def trained(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Return a byte-level BPE tokenizer that is trained on `texts`. It encodes any text.

        `<pad>` is 0, `<eos>` is 1, then come the 256 bytes, then merges in order of frequency. A merge must
        occur at least twice. Each digit is a token of its own. The same texts give the same tokenizer.
        """
        backend = tokenizers.Tokenizer(models.BPE())
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=list(_SPECIALS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        return cls._new(backend)

    @classmethod
    def for_new_model(cls, model: Mapping[str, Any], texts: Iterable[str] | None = None) -> Tokenizer:
        """Return the tokenizer of a new model that `tokenizer` in a recipe's model section selects.

        Args:
            texts: training texts of `bpe`. Without them, the tokens are bytes, which `bpe` starts from.
        """
        kind = model.get("tokenizer")
        if kind == "bpe" and texts is not None:
            return cls.trained(texts, model["vocab_size"])
        return cls.characters() if kind in (None, "characters") else cls.byte_level()

    @classmethod
    def _new(cls, backend: tokenizers.Tokenizer) -> Tokenizer:
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIALS])
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "<pad>",
            "eos_token": "<eos>",
            "clean_up_tokenization_spaces": False,
            "padding_side": "left",
        }
        return cls(backend, config)

    def with_chat_template(self, template: str | None, *, where: str) -> Tokenizer:
        """Return the same tokenizer with another chat template, or with none.

        Raises:
            RequestError: when the template is malformed, naming `where` it comes from.
        """
        config = {key: value for key, value in self._config.items() if key != "chat_template"}
        return Tokenizer(self._backend, config, chat_template=template, where=where)

    def showing(self, marks: Sequence[str]) -> Tokenizer:
        """Return a tokenizer whose `decode` also writes these special tokens. Unknown tokens are ignored."""
        document = json.loads(self._decoder.to_str())
        hidden = [t for t in document["added_tokens"] if t["special"] and t["content"] in marks]
        if not hidden:
            return self
        for token in hidden:
            token["special"] = False
        return self._decoding_as(document)

    def continuing(self) -> Tokenizer:
        """Return a tokenizer whose `decode` keeps a space at the beginning, for tokens that continue a text.

        SentencePiece writes a space before each word, and drops the one before the first word of a text.
        """
        changes = {"Strip": {"start": 0}, "Metaspace": {"prepend_scheme": "never"}}
        backend = self._decoder
        decoder = {"type": ""} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        steps = [step for step in decoder.get("decoders", [decoder]) if step["type"] in changes]
        if not steps:
            return self
        for step in steps:
            step.update(changes[step["type"]])
        return self._decoding_as({**json.loads(backend.to_str()), "decoder": decoder})

    def _decoding_as(self, document: Mapping[str, Any]) -> Tokenizer:
        """Return a tokenizer that encodes like this one and decodes like the tokenizer.json in `document`."""
        clone = copy.copy(self)
        clone.__dict__.pop("boundaries", None)
        clone._decoder = tokenizers.Tokenizer.from_str(json.dumps(document))
        return clone

    def limited(self, size: int) -> Tokenizer:
        """Return the tokenizer of a model with `size` embeddings, without special tokens beyond these.

        The text models of Gemma 3 have no embedding for the image token, and other models have none for the
        padding token. Texts that spell out such a token are encoded as text.

        Raises:
            RequestError: when the end-of-sequence token, or a token that is not special, has no embedding.
        """
        if self.vocab_size <= size:
            return self
        document = json.loads(self._backend.to_str())
        added = document["added_tokens"]
        document["added_tokens"] = [token for token in added if not token["special"] or token["id"] < size]
        dropped = [token["content"] for token in added if token not in document["added_tokens"]]
        config = dict(self._config)
        if self._token("pad_token") in dropped:
            del config["pad_token"]
        template = None if self.chat_template is None else self.chat_template.source
        backend = tokenizers.Tokenizer.from_str(json.dumps(document))
        limited = Tokenizer(backend, config, chat_template=template, where=self._where)
        if limited.vocab_size > size:
            raise RequestError(
                f"the tokenizer has {self.vocab_size} tokens but the model has {size}",
                where=self._where,
                remedy="use the tokenizer of this model. If you added tokens, resize the embeddings:"
                " model.resize_token_embeddings(len(tokenizer))",
            )
        message = f"{self._where}: ignores {', '.join(dropped)}, for which the model has no embedding"
        print(escape_control(message), file=sys.stderr, flush=True)
        return limited

    def to_json(self) -> str:
        """Return the text of tokenizer.json."""
        return f"{self._backend.to_str(pretty=True)}\n"

    def save(self, path: Path | str) -> None:
        """Write tokenizer.json, tokenizer_config.json and, when there is one, chat_template.jinja."""
        folder = Path(path)
        write_atomic(folder / "tokenizer.json", self.to_json())
        config = {key: value for key, value in self._config.items() if key != "chat_template"}
        write_json(folder / "tokenizer_config.json", config)
        if self.chat_template is not None:
            write_atomic(folder / _TEMPLATE_FILE, self.chat_template.source)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text` alone. Special tokens that it spells out are encoded as text.

        Raises:
            RequestError: when the vocabulary cannot express the text.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return `encode` of many texts, several times faster than one by one."""
        return self._encode(self._backend, texts)

    def encode_rendered(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of texts from a chat template, in which special tokens become tokens."""
        return self._encode(self._template_backend, texts)

    def has_same_tokens(self, other: Tokenizer) -> bool:
        """Return whether both have the same vocabulary and end-of-sequence token."""
        return self._vocabulary() == other._vocabulary() and self.eos_token_id == other.eos_token_id

    def _vocabulary(self) -> dict[str, int]:
        return dict(self._backend.get_vocab(with_added_tokens=True))

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of `token_ids` (any sequence of integers, also numpy).

        Args:
            special: whether to write the names of special tokens.
        """
        text: str = self._decoder.decode([int(token) for token in token_ids], skip_special_tokens=not special)
        return text

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, with its space if it begins a word; the name of a control token."""
        text: str = self._continued.decode([token_id], skip_special_tokens=False)
        return text

    @cached_property
    def _continued(self) -> tokenizers.Tokenizer:
        return self.continuing()._decoder

    @cached_property
    def control_tokens(self) -> dict[str, int]:
        """Ids of the special tokens by their text."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: index for index, token in added.items() if token.special}

    @cached_property
    def boundaries(self) -> Boundaries:
        """Finds boundaries between characters in sequences of tokens."""
        return Boundaries(self._decoder)

    def token_bytes(self) -> list[bytes | None]:
        """Return the bytes of each token by id; None for control tokens.

        Raises:
            RequestError: when the text of a token depends on its neighbors.
        """
        return token_bytes(self._backend, where=self._where)

    def render_prompt(self, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
        """Return the text of the prompt: the chat template up to the beginning of the assistant's turn.

        Without a template, the joined contents of the messages. `variables` are passed to the template (for
        example `enable_thinking=False` for Qwen3).
        """
        if self.chat_template is None:
            return "".join(str(message["content"]) for message in messages)
        return self.chat_template.render_all([self._defaults | variables | {"messages": messages}])[0]

    def encode_prompt(self, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> list[int]:
        """Return the token ids of `render_prompt`.

        Control tokens of the template become tokens. Control tokens that a message or a variable spells out
        are encoded as text. Without a template, `eos_token_id` follows each message of the assistant except a
        last message, as in sampled conversations.
        """
        return self.encode_prompts([messages], **variables)[0]

    def encode_prompts(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]], /, **variables: Any
    ) -> list[list[int]]:
        """Return `encode_prompt` of many conversations."""
        if self.chat_template is None:
            return self._plain_prompts(conversations)
        return self.encode_pieces(self.render_pieces(conversations, **variables))

    def _plain_prompts(self, conversations: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[int]]:
        parts: list[list[str]] = []  # of each conversation, the texts that end with an assistant's message
        for messages in conversations:
            texts = [""]
            for index, message in enumerate(messages):
                texts[-1] += str(message["content"])
                if message["role"] == "assistant" and index + 1 < len(messages):
                    texts.append("")
            parts.append(texts)
        encoded = iter(self.encode_batch([text for texts in parts for text in texts]))
        prompts = []
        for texts in parts:
            first, *more = [next(encoded) for _ in texts]
            prompts.append(
                [*self.prompt_prefix, *first, *(x for ids in more for x in (self.eos_token_id, *ids))]
            )
        return prompts

    def render_pieces(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]], /, **variables: Any
    ) -> list[Rendered]:
        """Render conversations as `render_prompt`, and mark control tokens that messages spell out."""
        return self.render_inputs([{**variables, "messages": messages} for messages in conversations])

    def render_inputs(self, inputs: Sequence[Mapping[str, Any]]) -> list[Rendered]:
        """Render as `render_pieces`, with separate variables for each conversation beside its `messages`."""
        assert self.chat_template is not None
        hidden = [self._spelled_tokens.hide(item) for item in inputs]
        texts = self.chat_template.render_all([{**self._defaults, **inputs} for inputs, _ in hidden])
        return [Rendered(text, spelled) for text, (_, spelled) in zip(texts, hidden, strict=True)]

    def encode_pieces(self, rendered: Sequence[Rendered]) -> list[list[int]]:
        """Return the token ids of rendered templates with BOS; control tokens in messages stay text."""
        pieces = [item.pieces() for item in rendered]
        token_ids = iter(self.encode_rendered([piece for parts in pieces for piece in parts[::2]]))
        return [
            [
                token
                for index, piece in enumerate(parts)
                for token in (self.encode(piece) if index % 2 else next(token_ids))
            ]
            for parts in pieces
        ]

    def encode_text_prompt(self, text: str) -> list[int]:
        """Return the token ids of a text to continue without a template, after BOS if there is one."""
        return self.prompt_prefix + self.encode(text)

    def encode_document(self, text: str, *, starts: bool = True, ends: bool = False) -> list[int]:
        """Return the token ids of a text without a template. Control tokens that it spells out become tokens.

        Args:
            starts: whether BOS comes first if the tokenizer adds it; never twice.
            ends: whether `eos_token_id` comes last; never twice.
        """
        (ids,) = self.encode_rendered([text])
        prefix = self.prompt_prefix if starts and ids[:1] != self.prompt_prefix else []
        end = [self.eos_token_id] if ends and ids[-1:] != [self.eos_token_id] else []
        return [*prefix, *ids, *end]

    def encode_completion(self, text: str) -> list[int]:
        """Return the token ids of an answer of the assistant, with `eos_token_id` at the end."""
        return [*self.encode(text), self.eos_token_id]

    def encode_completions(self, texts: Sequence[str]) -> list[list[int]]:
        """Return `encode_completion` of many texts."""
        return [[*ids, self.eos_token_id] for ids in self.encode_batch(texts)]

    @cached_property
    def _template_backend(self) -> tokenizers.Tokenizer:
        """A copy that encodes special tokens as tokens; two threads cannot share one backend for both."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = False
        return backend

    @cached_property
    def _spelled_tokens(self) -> SpelledTokens:
        return SpelledTokens(self._backend)

    @property
    def _defaults(self) -> dict[str, Any]:
        """The default inputs of a template."""
        return {"tools": None, "documents": None, "add_generation_prompt": True, **self._special_tokens}

    def _encode(self, backend: tokenizers.Tokenizer, texts: Sequence[str]) -> list[list[int]]:
        try:
            encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except (KeyboardInterrupt, SystemExit):
            raise
        # A pattern beyond its matching limit panics in the Rust library; a panic is not an Exception.
        except BaseException as error:
            raise self._cannot_encode(texts, error) from None
        return [encoding.ids for encoding in encodings]

    def lacks(self, text: str) -> str | None:
        """Return the first character of `text` that has no token; None if all characters have one."""
        for character in dict.fromkeys(text):
            try:
                self._backend.encode(character, add_special_tokens=False)
            except Exception:
                return character
        return None

    def _cannot_encode(self, texts: Sequence[str], cause: BaseException) -> RequestError:
        for text in texts:
            if (character := self.lacks(text)) is not None:
                what = f"the tokenizer cannot encode {character!r} in {_shorten(text)!r}"
                return RequestError(what, where=self._where, remedy=ANY_TEXT)
        return RequestError(f"the tokenizer failed: {cause}", where=self._where)

    def _token(self, name: str) -> str | None:
        """Return a special token of the config: a string, or the dictionary form of an AddedToken."""
        value = self._config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if value is None or isinstance(value, str):
            return value
        raise RequestError(f"{name} is {value!r}, not a string", where=self._where)

    def _special(self, name: str) -> int | None:
        token = self._token(name)
        if token is None:
            return None
        token_id: int | None = None
        with suppress(UnicodeEncodeError):  # half a surrogate pair
            token_id = self._backend.token_to_id(token)
        if token_id is None:
            raise RequestError(
                f"{name} {token!r} is not in the vocabulary",
                where=self._where,
                remedy="use the tokenizer.json and tokenizer_config.json of the same model",
            )
        return token_id

    def _bos_prefix(self) -> list[int]:
        """Return BOS if `add_bos_token` or the post-processor (Llama 3) adds it."""
        if self.bos_token_id is None:
            return []
        processed = self._backend.encode("", add_special_tokens=True).ids[:1] == [self.bos_token_id]
        return [self.bos_token_id] if self._config.get("add_bos_token", processed) else []


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    content = _read_text(file)
    try:
        return tokenizers.Tokenizer.from_str(content)
    except (KeyboardInterrupt, SystemExit):
        raise
    # A malformed file can panic in the Rust library; a panic is not an Exception.
    except BaseException as error:
        raise RequestError(
            f"not a tokenizer: {_shorten(str(error), 200)}", where=str(file), remedy="fetch the file again"
        ) from None


def _read_text(file: Path) -> str:
    try:
        return read_regular(file).decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"not UTF-8 text: {error}", where=str(file)) from None


def _template_in(config: Mapping[str, Any], where: str) -> str | None:
    """Return the template under `chat_template`: a text, or "default" from a list of named templates."""
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default")
    if template is None or isinstance(template, str):
        return template
    raise RequestError("chat_template is neither text nor a list of named templates", where=where)


def _shorten(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
