"""Adding a grammar backend: from a constraint to the tokens that may come next.

A backend compiles a constraint for one tokenizer. What it gives is a `CompiledGrammar`, whose matchers each follow one
sequence and write allowed tokens into a bitmask. This script writes a backend for one kind of constraint (a regular
expression that is a plain list of words) and runs it beside the one that sgl uses.
"""

import random

import sgl
from sgl.errors import InvalidRegex
from sgl.grammars.choices import row_of, write_row
from sgl.grammars.compiler import BACKENDS, GrammarCompiler
from sgl.grammars.matcher import StopReason, allocate_bitmask, bitmask_to_bool, num_acceptable
from sgl.grammars.spec import Regex

# ## What a matcher is
#
# The protocol is in `grammars/matcher.py`, eight methods. The state here is the text so far. A token may come when some
# word still begins with the text behind it. `accept` moves on, `rollback` goes back, `fill` writes one row of the
# bitmask, and end-of-sequence is allowed where a word is complete.


class WordsMatcher:
    """Follows one sequence; keeps the text behind each accepted token."""

    def __init__(self, words, vocabulary, texts=(b"",), ended=0):
        self.words, self.vocabulary = words, vocabulary
        self.texts, self.ended = list(texts), ended

    def _possible(self, text):
        return any(word.startswith(text) for word in self.words)

    def fill(self, bitmask, row):
        """Write what may come next."""
        allowed = set(self.vocabulary.eos_ids) if self.is_complete() else set()
        if not self.ended:
            tokens = self.vocabulary.token_bytes.items()
            allowed |= {token for token, piece in tokens if self._possible(self.texts[-1] + piece)}
        write_row(bitmask, row, row_of(allowed, self.vocabulary.vocab_size))

    def accept(self, token_id):
        """Move on by a token; False, and no change, when it may not come."""
        if token_id in self.vocabulary.eos_ids:
            if not self.is_complete():
                return False
            self.ended += 1
            self.texts.append(self.texts[-1])
            return True
        piece = self.vocabulary.token_bytes.get(token_id)
        if piece is None or self.ended or not self._possible(self.texts[-1] + piece):
            return False
        self.texts.append(self.texts[-1] + piece)
        return True

    def validate_tokens(self, token_ids):
        """How many of them would be accepted."""
        return num_acceptable(self, token_ids)

    def rollback(self, num_tokens):
        """Take back the last tokens."""
        if not 0 <= num_tokens < len(self.texts):
            raise ValueError(f"rollback of {num_tokens} tokens; {len(self.texts) - 1} were accepted")
        del self.texts[len(self.texts) - num_tokens :]
        self.ended = max(0, self.ended - num_tokens)

    def clone(self):
        """The same state, on its own."""
        return WordsMatcher(self.words, self.vocabulary, self.texts, self.ended)

    def forced_tokens(self):
        """Tokens that must come next. An empty list is always right, and only slower."""
        return []

    def is_complete(self):
        """Whether the text is a word."""
        return self.texts[-1] in self.words

    def stop_reason(self):
        """Why nothing more may come."""
        if self.ended:
            return StopReason.EOS
        longer = any(word != self.texts[-1] and word.startswith(self.texts[-1]) for word in self.words)
        return StopReason.NOT_STOPPED if longer else StopReason.COMPLETE


class WordsGrammar:
    """The compiled form: shared by sequences, never changed."""

    def __init__(self, words, vocabulary):
        self.words, self.vocabulary = words, vocabulary

    def matcher(self):
        """A new matcher at the start."""
        return WordsMatcher(self.words, self.vocabulary)


# ## What a backend is
#
# One object per tokenizer: `compile`, which raises a typed error for what it cannot do, and `close`. It never returns a
# grammar that allows more than the constraint says.


class WordsBackend:
    """Compiles `a|b|c` and `(a|b|c)` of plain words."""

    def __init__(self, vocabulary):
        self.vocabulary = vocabulary

    def compile(self, constraint):
        """The grammar of a constraint that has passed its checks."""
        words = constraint.pattern.strip("()").split("|") if isinstance(constraint, Regex) else []
        if not words or not all(word.isalnum() for word in words):
            raise InvalidRegex("the backend 'words' takes words joined by |", hint="use grammar_backend 'llguidance'")
        return WordsGrammar([word.encode() for word in words], self.vocabulary)

    def close(self):
        """There is nothing to give back."""


# ## The table
#
# `BACKENDS` in `grammars/compiler.py` maps names to factories. The last argument of a factory gives the tokenizer's
# vocabulary (the bytes of every token), of which a compiler has one.

BACKENDS["words"] = lambda tokenizer_json, vocab_size, eos_ids, limits, vocabulary: WordsBackend(vocabulary())

tokenizer = sgl.default_backend().renderer().tokenizer
compiler = GrammarCompiler(tokenizer.to_json(), tokenizer.vocab_size, tokenizer.eos_ids)
pattern = Regex("(yes|no|nobody)")
ours = compiler.compile(pattern, backend="words")
theirs = compiler.compile(pattern)
print("compiled by", type(ours).__name__, "and", type(theirs).__name__)

# ## The test
#
# Walk both at random along tokens that ours allows, and compare. Where a text is forced, llguidance allows its
# canonical tokens only, so what it allows is a part of what ours does; both agree about where a text is complete.


def allowed(matcher):
    """Ids that may come next."""
    bitmask = allocate_bitmask(1, tokenizer.vocab_size)
    matcher.fill(bitmask, 0)
    return set(bitmask_to_bool(bitmask, tokenizer.vocab_size)[0].nonzero()[0].tolist())


rng = random.Random(0)
ends = set()
for _ in range(20):
    mine, reference = ours.matcher(), theirs.matcher()
    while mine.stop_reason() is StopReason.NOT_STOPPED:
        may = allowed(reference)
        assert may <= allowed(mine)
        assert mine.is_complete() == reference.is_complete()
        token = rng.choice(sorted(may))
        assert mine.accept(token)
        assert reference.accept(token)
    ends.add(mine.texts[-1].decode())
print("words that came out:", sorted(ends))
assert ends <= {"yes", "no", "nobody"}

try:
    compiler.compile(Regex("[0-9]+"), backend="words")
except InvalidRegex as error:
    print("refused:", error)

compiler.close()
del BACKENDS["words"]

# To keep it: a module in `grammars/`, a row of `BACKENDS`, a keyword table in `grammars/keyword_tables.py` (what of
# JSON schemas it enforces; everything else is refused before it is asked), and the conformance suite,
# `tests/support/matcher_conformance.py`, which every matcher has to pass. Next:
# [reading the engine](16_reading_the_engine.py).
