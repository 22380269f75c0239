"""A translator without a network that behaves like one: alternatives, a beam search, alignments, steering.

It translates word by word from a small lexicon, and a French adjective goes behind its noun. Wherever it is made to
attend, it translates that word. All it does follows from the words alone, so tests can tell what the page must show.
"""

import math
from dataclasses import dataclass, field
from typing import Any

END = "</s>"
LEXICON: dict[str, list[str]] = {
    "a": ["un", "une"],
    "the": ["le", "la"],
    "man": ["homme", "type"],
    "woman": ["femme", "dame"],
    "dog": ["chien", "cabot"],
    "house": ["maison", "demeure"],
    "red": ["rouge", "vermeil"],
    "small": ["petit", "menu"],
    "in": ["dans", "en"],
    "sees": ["voit", "regarde"],
    "with": ["avec", "à"],
    "and": ["et", "puis"],
    "hat": ["chapeau", "bonnet"],
    "street": ["rue", "voie"],
    "walks": ["marche", "promène"],
    "down": ["dans", "en"],
    "two": ["deux", "couple"],
    "football": ["football", "ballon"],
}
ADJECTIVES = {"red"}
RTL = {"رجل": ["man", "guy"], "في": ["in", "at"], "قبعة": ["hat", "cap"], "حمراء": ["red", "scarlet"]}
PIECE_LENGTH = 5


def pieces(word: str) -> list[str]:
    """A long word falls into pieces, as SentencePiece would cut it; Chinese and Japanese have no "▁" inside."""
    if any("\u3040" <= character <= "\u9fff" for character in word):
        return ["▁" + word[:2], *(word[i : i + 2] for i in range(2, len(word), 2))]
    size = PIECE_LENGTH if len(word) > PIECE_LENGTH + 1 else len(word)
    return ["▁" + word[:size], *(word[i : i + size] for i in range(size, len(word), size))]


def joined(tokens: list[str]) -> str:
    return "".join(token for token in tokens if token != END).replace("▁", " ").strip()


@dataclass
class Plan:
    """The order in which the source's words are translated, and the pieces that each word occupies."""

    words: list[str]
    order: list[int]
    tokens: list[str]
    span: dict[int, range]  # of each word
    slots: dict[tuple[str, ...], int] = field(default_factory=dict)  # that come after the tokens of whole words

    def resume(self, tokens: list[str]) -> tuple[int, int]:
        """The number of tokens that make whole words, and the slot after them, as far back as a word may be long."""
        for length in range(len(tokens), max(0, len(tokens) - 9), -1):
            slot = self.slots.get(tuple(tokens[:length]))
            if slot is not None:
                return length, slot
        return 0, 0

    def word_at(self, position: int) -> int | None:
        return next((word for word, span in self.span.items() if position in span), None)


def plan(text: str, *, reorder: bool) -> Plan:
    words, tokens, span = text.split(), [], {}
    for index, word in enumerate(words):
        cut = pieces(word)
        span[index] = range(len(tokens), len(tokens) + len(cut))
        tokens += cut
    order = list(range(len(words)))
    for index in range(len(words) - 1):
        if reorder and words[index].lower() in ADJECTIVES:
            order[index], order[index + 1] = order[index + 1], order[index]
    return Plan(words, order, [*tokens, END], span)


@dataclass
class FakeModel:
    """`description` is what /v1/models says; `variant` shifts the choice of words, so that models differ."""

    description: dict[str, Any]
    variant: int = 0
    reorder: bool = True
    choices: dict[str, list[str]] = field(default_factory=lambda: LEXICON | RTL)

    def options(self, source: Plan, slot: int, steered: int | None) -> tuple[int | None, list[tuple[str, float]]]:
        """The word attended to at a slot, and its translations with their probabilities; the end behind the last."""
        word = source.order[slot] if slot < len(source.order) else None
        if steered is not None:
            word = source.word_at(steered)
        if word is None:
            return None, [(END, 0.92), ("!", 0.08)]
        original = source.words[word]
        found = self.choices.get(original.lower().strip(".,"), [original])
        ranked = [found[(self.variant + index) % len(found)] for index in range(len(found))]
        shares = [0.72, 0.2] if len(ranked) > 1 else [0.95]
        return word, list(zip(ranked, shares, strict=False))

    def row(self, source: Plan, word: int | None, part: int) -> list[float]:
        """(S,) weights around the pieces of a word."""
        size = len(source.tokens)
        span = source.span[word] if word is not None else range(size - 1, size)
        centre = span.start + min(part, len(span) - 1)
        raw = [math.exp(-1.6 * abs(position - centre)) + 0.004 for position in range(size)]
        return [value / sum(raw) for value in raw]

    def next_tokens(
        self, source: Plan, tokens: list[str], attend: dict[int, Any]
    ) -> tuple[list[float], dict[str, float]]:
        """The weights of the next step and log-probabilities of what may follow `tokens`."""
        step, slot = source.resume(tokens)
        while True:
            steered = attend.get(step)
            row = steered if isinstance(steered, list) else None
            position = max(range(len(row)), key=row.__getitem__) if row else steered
            word, options = self.options(source, slot, position)
            candidates = {tuple(pieces(text)) if text != END else (END,): share for text, share in options}
            if step == len(tokens):
                weights = row or self.row(source, word, 0)
                if isinstance(steered, int):
                    weights = [float(index == steered) for index in range(len(source.tokens))]
                return weights, {cut[0]: math.log(share) for cut, share in candidates.items()}
            begun = [cut for cut in candidates if list(cut[: len(tokens) - step]) == tokens[step:]]
            if begun and len(begun[0]) > len(tokens) - step:
                part = len(tokens) - step
                return self.row(source, word, part), {begun[0][part]: math.log(0.97)}
            matching = [cut for cut in candidates if list(cut) == tokens[step : step + len(cut)]]
            step += len(matching[0]) if matching else 1
            slot += 1
            source.slots[tuple(tokens[:step])] = slot

    def score_of(self, log_prob: float, length: int, penalty: str | None, alpha: float | None) -> float:
        kind = penalty or self.description["length_penalty"]
        power = self.description["alpha"] if alpha is None else alpha
        divisor = {"none": 1.0, "average": length**power, "gnmt": ((5 + length) / 6) ** power}[kind]
        return log_prob / divisor

    def force(self, text: str, target: list[str], attend: dict[int, Any]) -> dict[str, Any]:
        """The probability of given tokens; what the model would not say has a small one."""
        source = plan(text, reorder=self.reorder)
        rows, log_probs = [], []
        for step, token in enumerate(target):
            weights, following = self.next_tokens(source, target[:step], attend)
            rows.append(weights)
            log_probs.append(following.get(token, math.log(0.003)))
        return self.hypothesis(source, target, log_probs, rows)

    def hypothesis(
        self, source: Plan, tokens: list[str], log_probs: list[float], rows: list[list[float]]
    ) -> dict[str, Any]:
        log_prob = sum(log_probs)
        return {
            "text": joined(tokens),
            "score": self.score_of(log_prob, len(tokens), None, None),
            "log_prob": log_prob,
            "source_tokens": source.tokens,
            "tokens": tokens,
            "token_log_probs": log_probs,
            "alignment": rows if self.description["attention"] else None,
        }

    def search(
        self, text: str, beam: int, penalty: tuple[str | None, float | None], prefix: list[str], attend: dict[int, Any]
    ) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
        """All finished hypotheses, best first, and the tree of the beam."""
        source = plan(text, reorder=self.reorder)
        alive: list[tuple[list[str], float, int | None]] = [([], 0.0, None)]
        ended: list[list[str]] = []
        steps: list[list[dict[str, Any]]] = []
        for step in range(len(source.tokens) * 3 + 8):
            candidates = []
            for tokens, log_prob, index in alive:
                following = self.next_tokens(source, tokens, attend)[1]
                if step < len(prefix):
                    following = {prefix[step]: following.get(prefix[step], math.log(0.003))}
                candidates += [([*tokens, token], log_prob + share, index, token) for token, share in following.items()]
            candidates.sort(key=lambda each: -each[1])
            nodes, survivors = [], []
            for rank, (tokens, log_prob, parent, token) in enumerate(candidates):
                fate = "pruned" if rank >= beam else "ended" if token == END else "kept"
                score = self.score_of(log_prob, len(tokens), *penalty)
                nodes.append({"parent": parent, "token": token, "log_prob": log_prob, "score": score, "fate": fate})
                if fate == "kept":
                    survivors.append((tokens, log_prob, rank))
                elif fate == "ended":
                    ended.append(tokens)
            steps.append(nodes)
            alive = survivors[: beam - len(ended)]
            for _, _, rank in survivors[len(alive) :]:
                nodes[rank]["fate"] = "pruned"
            if not alive:
                break
        found = [self.force(text, tokens, attend) for tokens in ended]
        for each in found:
            each["score"] = self.score_of(each["log_prob"], len(each["tokens"]), *penalty)
        return sorted(found, key=lambda each: -each["score"]), steps

    def tokens_of(self, target: str | list[str], *, end: bool) -> list[str]:
        if isinstance(target, list):
            return target
        return [piece for word in target.split() for piece in pieces(word)] + [END] * end


def described(name: str, **changes: object) -> dict[str, Any]:
    return {
        **{"name": name, "source": "en", "target": "fr", "attention": "bahdanau", "members": 1, "latent": False},
        **{"heads": 0, "window": None, "monotonic": False, "parameters": 12_345_678, "bleu": 41.2},
        **{"beam_size": 4, "length_penalty": "average", "alpha": 1.0, "max_beam_size": 32, "max_tokens": 256},
        "examples": ["A small dog sees the red house", "A man in a red hat walks down the street"],
        **changes,
    }


def fake_models() -> dict[str, FakeModel]:
    everywhere = ["رجل في قبعة حمراء", "小さい犬が赤い家を見る"]
    models = [
        FakeModel(described("bahdanau-1", examples=[*described("")["examples"], *everywhere])),
        FakeModel(described("local", attention="luong_local_p", window="local_p", bleu=40.1), variant=1),
        FakeModel(described("multihead", attention="multihead", heads=4, bleu=41.9), reorder=False),
        FakeModel(described("monotonic", attention="monotonic", monotonic=True, bleu=None), variant=1, reorder=False),
        FakeModel(described("none", attention=None, bleu=28.3), reorder=False),
        FakeModel(described("ensemble", members=3, bleu=43.0, parameters=37_000_000)),
        FakeModel(described("posterior", attention="posterior", latent=True)),
    ]
    return {model.description["name"]: model for model in models}
