"""Prompts whose user turn is left open, so that any question can follow a cached document.

A chat template is rendered with a marker in place of the user's text and cut there: what comes before it and the
document are cached; the question and what comes after it, up to the assistant's first token, are the suffix. Both are
tokenised on their own, so a cache does not depend on the question.

Documents and questions are text and nothing else: where they spell a control token, say the one that ends a turn, it is
tokenised as the characters it consists of.
"""

from __future__ import annotations

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


def _tokenise(tokenizer: PreTrainedTokenizerBase, before: str, text: str, after: str) -> list[int]:
    """Ids of a user's `text` between two parts of the template.

    They are tokenised as one string, as the stock rendering is; only a text that spells a control token is tokenised
    apart from the template, whose own control tokens must stay.
    """

    def ids(part: str, *, plain: bool) -> list[int]:
        return list(tokenizer(part, add_special_tokens=False, split_special_tokens=plain)["input_ids"]) if part else []

    if not any(token in text for token in _control_tokens(tokenizer)):
        return ids(before + text + after, plain=False)
    return ids(before, plain=False) + ids(text, plain=True) + ids(after, plain=False)


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return {*tokenizer.all_special_tokens, *added}


def _split_template(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """The rendered template before and after the user's text."""
    try:
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": MARKER}], add_generation_prompt=True, tokenize=False
        )
    except Exception as error:
        # jinja2 errors, and whatever the template itself raises.
        raise InputError(
            f"the chat template cannot be rendered: {error}", hint="encode with the template turned off"
        ) from error
    parts = str(rendered).split(MARKER)
    if len(parts) != 2:
        raise InputError(
            f"the chat template shows the user's text {len(parts) - 1} times, not once",
            hint="encode with the template turned off",
        )
    return parts[0], parts[1]
