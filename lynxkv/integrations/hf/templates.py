"""Prompts whose user turn is left open, so that any question can follow a cached document.

A chat template is rendered with a marker in place of the user's text and cut there: what comes before it and the
document are cached; the question and what comes after it, up to the assistant's first token, are the suffix. Both are
tokenised on their own, so a cache does not depend on the question.

Documents and questions are text and nothing else: where they spell a control token, say the one that ends a turn, it is
tokenised as the characters it consists of.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from lynxkv.errors import InputError

MARKER = "lynxkv-user-text"
SEPARATOR = "\n\n"


def open_turn(tokenizer: PreTrainedTokenizerBase, document: str) -> list[int]:
    """Token ids of a prompt that ends inside the user's turn, right after `document`.

    Without a chat template, the ids of `document` with the tokenizer's own special tokens.

    Raises:
        InputError: the document is empty, or the template does not show the user's text once.
    """
    if not document.strip():
        raise InputError("the prompt is empty", hint="give the text to cache")
    if not tokenizer.chat_template:
        return list(tokenizer(document, split_special_tokens=True)["input_ids"])
    head, _ = _split_template(tokenizer)
    return _tokenise(tokenizer, head, document, "")


def suffix(tokenizer: PreTrainedTokenizerBase, question: str = "", *, turn: str | None = None) -> list[int]:
    """Token ids that follow a cached prompt: the question, the end of the user's turn, the assistant's header.

    Args:
        question: an empty one only closes the turn; others are set off by an empty line.
        turn: what the cache states, "open" or "none"; by default "open" where there is a chat template.

    Raises:
        InputError: the turn is open but the tokenizer has no template, or the template is unusable.
    """
    if turn is None:
        turn = "open" if tokenizer.chat_template else "none"
    if turn == "none":
        return _tokenise(tokenizer, "", question, "") if question else []
    if not tokenizer.chat_template:
        raise InputError("the cache ends inside a chat turn, but this tokenizer has no chat template")
    _, tail = _split_template(tokenizer)
    return _tokenise(tokenizer, "", f"{SEPARATOR}{question}" if question else "", tail)


def conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[tuple[str, str]], *, turn: str | None = None
) -> list[int]:
    """Token ids of a chat, (role, text) each, up to the assistant's next token.

    Args:
        turn: what the cache states that the chat follows, "open" or "none"; None: the chat follows nothing. After an
            open turn the first message is the question on the cached text.

    Raises:
        InputError: there is no template, it refuses the roles or does not show each text once, or the chat cannot
            follow such a cache.
    """
    if turn is not None and messages[0][0] != "user":
        raise InputError(
            "a chat over a cached text starts with a message of the user",
            hint="the cache holds what comes before it; leave the system message out",
        )
    if turn == "none":
        if len(messages) > 1:
            raise InputError(
                "the cache is plain text, after which one message can follow", hint="send the question only"
            )
        return suffix(tokenizer, messages[0][1], turn=turn)
    if not tokenizer.chat_template:
        raise InputError("this model has no chat template", hint="ask for a completion instead")
    texts = [text for _, text in messages]
    between = _split_template(tokenizer, [role for role, _ in messages])
    if turn is not None:
        between[0], texts[0] = "", SEPARATOR + texts[0]
    parts = [part for pair in zip(between, texts, strict=False) for part in pair]
    return _tokenise(tokenizer, *parts, between[-1])


def _tokenise(tokenizer: PreTrainedTokenizerBase, *parts: str) -> list[int]:
    """Ids of parts of the template, at even places, and texts of people between them, at odd ones.

    They are tokenised as one string, as the stock rendering is; only where a text spells a control token, texts are
    tokenised apart from the template, whose own control tokens must stay.
    """

    def ids(part: str, *, plain: bool) -> list[int]:
        return list(tokenizer(part, add_special_tokens=False, split_special_tokens=plain)["input_ids"]) if part else []

    if not any(token in text for token in _control_tokens(tokenizer) for text in parts[1::2]):
        return ids("".join(parts), plain=False)
    return [token for number, part in enumerate(parts) for token in ids(part, plain=number % 2 == 1)]


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return {*tokenizer.all_special_tokens, *added}


def _split_template(tokenizer: PreTrainedTokenizerBase, roles: Sequence[str] = ("user",)) -> list[str]:
    """The rendered template before, between and after messages of these roles."""
    markers = [f"{MARKER}-{number}-" for number in range(len(roles))]
    messages = [{"role": role, "content": marker} for role, marker in zip(roles, markers, strict=True)]
    try:
        left = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    except Exception as error:
        # jinja2 errors, and whatever the template itself raises.
        raise InputError(
            f"the chat template cannot be rendered: {error}", hint="encode with the template turned off"
        ) from error
    parts = []
    for marker in markers:
        found = left.split(marker)
        if len(found) != 2:
            raise InputError(
                f"the chat template shows the user's text {len(found) - 1} times, not once",
                hint="encode with the template turned off",
            )
        parts.append(found[0])
        left = found[1]
    return [*parts, left]
