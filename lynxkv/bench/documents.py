"""Documents that every machine with Python has, and what is asked about them.

Two are prose (the language reference in `pydoc_data.topics`), two are code (modules of the standard library). Their
text differs between Python versions, so results carry each document's digest.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

from lynxkv.standard_texts import source, topics

_STATEMENTS = ("compound", "assignment", "import", "try", "raise", "with", "function", "class")
_OBJECTS = (
    "objects",
    "execmodel",
    "naming",
    "exceptions",
    "types",
    "customization",
    "attribute-access",
    "specialnames",
)

GENERAL_PROMPTS = (
    "Summarise the text above in a paragraph.",
    "What is the most important point of the text above, and why?",
    "List five facts from the text above.",
    "Explain the text above to a beginner, step by step.",
    "Which part of the text above is the hardest to understand? Explain it in other words.",
    "Write three questions that the text above answers, with their answers.",
    "Continue the text above in the same style.",
    "Quote a passage of the text above word for word and comment on it.",
)
_STATEMENT_PROMPTS = (
    "Summarise the text above in a paragraph.",
    "What is a compound statement? Explain in your own words, with an example.",
    "How does the `if` statement choose which suite to run? Answer in two or three sentences.",
    "Explain what the `else` clause of a loop does and when it is run.",
    "Write a short Python program that uses a `while` loop and a `break` statement, and explain it.",
    "What happens in a `try` statement when no handler matches the exception?",
    "Quote the grammar of the `for` statement and explain its parts.",
    "List the statements that the text describes, with a sentence on each.",
)
_OBJECT_PROMPTS = (
    "Summarise the text above in a paragraph.",
    "What are the identity, the type and the value of an object? Explain with an example.",
    "What is the difference between mutable and immutable objects? Answer in two or three sentences.",
    "Explain how names are bound, and list the things that bind names.",
    "What does the text say about garbage collection and reference counts?",
    "Write a short Python program that shows a container which holds references to other objects, and explain it.",
    "How does Python resolve a name that is used in a function? Explain step by step.",
    "Quote one sentence of the text word for word and explain why it matters.",
)
_ARGPARSE_PROMPTS = (
    "Summarise what this module does in a paragraph.",
    "Write a small program that uses this module to read a file name from the command line.",
    "List the public classes of this module, with a sentence on each.",
    "What is a HelpFormatter, and which arguments does its constructor take?",
    "Explain how the usage message is formatted, step by step.",
    "What does the code above do with the width of the terminal?",
    "Write a unit test for one of the functions above and explain it.",
    "Copy one function of the code above and add a comment to each line.",
)
_STATISTICS_PROMPTS = (
    "Summarise what this module does in a paragraph.",
    "List the functions that this module provides, with a sentence on each.",
    "How does this module compute the mean of a list of numbers? Explain step by step.",
    "Write a small program that uses this module to compute a median and a standard deviation.",
    "What is the difference between `mean` and `fmean`?",
    "Explain how the code above keeps sums exact.",
    "Which errors can the functions above raise, and when?",
    "Copy one function of the code above and add a comment to each line.",
)


@dataclass(frozen=True, kw_only=True)
class Document:
    """A text to cache and the questions that follow it."""

    name: str
    kind: Literal["prose", "code", "file"]
    text: str
    prompts: tuple[str, ...]

    @property
    def sha256(self) -> str:
        """Digest of the text and the prompts: what was measured."""
        return hashlib.sha256("\0".join((self.text, *self.prompts)).encode()).hexdigest()


def standard_documents() -> tuple[Document, ...]:
    """Four documents of at least 8,000 tokens with eight prompts each: prose, code, prose, code.

    Raises:
        InputError: this Python was installed without the source of its standard library.
    """
    return (
        Document(name="statements", kind="prose", text=topics(_STATEMENTS), prompts=_STATEMENT_PROMPTS),
        Document(name="argparse.py", kind="code", text=source("argparse"), prompts=_ARGPARSE_PROMPTS),
        Document(name="objects", kind="prose", text=topics(_OBJECTS), prompts=_OBJECT_PROMPTS),
        Document(name="statistics.py", kind="code", text=source("statistics"), prompts=_STATISTICS_PROMPTS),
    )
