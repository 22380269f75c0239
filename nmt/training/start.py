"""How a run starts: the corpus report, initial weights, teachers.

Initial weights come from another run, whose vocabulary may be another one, or from files of pretrained word vectors.

Shapes: E embedding, V new vocabulary, W old vocabulary.
"""

import gzip
import hashlib
import logging
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nmt.config import schema
from nmt.config.compose import flatten
from nmt.config.errors import UserError
from nmt.config.overrides import for_shell, user_path
from nmt.config.schema.data import FileTokenizer
from nmt.config.schema.model import Model
from nmt.config.schema.training import Distillation
from nmt.data.prepared import Prepared, Split
from nmt.data.tokenizer import Tokenizer, Tokenizers
from nmt.data.word_alignment import WORD_START
from nmt.evaluate.bleu import ScoreSettings, nfc, score
from nmt.model.checkpoints import BEST, load_model, new_model
from nmt.model.seq2seq import Seq2Seq
from nmt.system.files import read_bytes
from nmt.system.machine import Machine
from nmt.system.run import RunDirectory, load_config

ROUND_TRIPS = 2_000  # sentences of a split, evenly spread, that are scored: takes a fifth of a second
MIN_BLEU = 99.0  # the corpus report warns below it
MIN_USED = 0.9  # share of the training pairs; the log warns below it
INITIAL = {"embedding.pretrained", "embedding.frozen"}  # values of a model that give it no other weights
TABLES = {
    "source_embedding.weight": "source",
    "target_embedding.weight": "target",
    "output.weight": "target",
    "output.bias": "target",
}
"""Parameters with a row for each token, and the side it belongs to."""
Vector = NDArray[np.float32]  # (E,)
log = logging.getLogger(__name__)


def corpus_report(prepared: Prepared, config: schema.TrainConfig, settings: ScoreSettings) -> dict[str, Any]:
    """Return the corpus's report with round_trip_bleu of each held-out split, and a warning where it is low.

    It is the BLEU of the references after the tokenizer has encoded and decoded them, against themselves: an upper
    bound for every model's translations.
    """
    splits, warnings = dict(prepared.report["splits"]), list(prepared.report["warnings"])
    for split in prepared:
        if split.name == "train":
            continue
        bleu = round_trip_bleu(split, prepared.tokenizers.target, settings)
        splits[split.name] = {**splits[split.name], "round_trip_bleu": round(bleu, 4)}
        if bleu < MIN_BLEU:
            remedy = _remedy(config, splits[split.name]["unknown_rate"][1])
            warnings.append(
                f"{split.name}: the references have BLEU {bleu:.2f} against themselves after the tokenizer has encoded "
                f"and decoded them, so all translations score too low; try {remedy}"
            )
    return {**prepared.report, "splits": splits, "warnings": warnings}


def round_trip_bleu(split: Split, tokenizer: Tokenizer, settings: ScoreSettings, sentences: int = ROUND_TRIPS) -> float:
    """Return the BLEU of up to this many references, encoded and decoded, against themselves."""
    chosen = range(0, len(split), -(-len(split) // sentences))
    references = nfc([split.target.line(index) for index in chosen])
    decoded = nfc([tokenizer.decode(split.target.ids(index).tolist()) for index in chosen])
    if all(line.split() == reference.split() for line, reference in zip(decoded, references, strict=True)):
        return 100.0  # sacreBLEU gives less if no sentence has four words
    return score(decoded, references, settings, ("bleu",)).bleu


def _remedy(config: schema.TrainConfig, unknown_rate: float) -> str:
    """Return overrides that keep more of each reference, or that make BLEU ignore the difference."""
    tokenizer = config.tokenizer
    if tokenizer.lowercase and not config.evaluation.lowercase:
        return "evaluation.lowercase=true"
    if isinstance(tokenizer, FileTokenizer):
        return "a tokenizer trained on this corpus (tokenizer=bpe)"
    values = ["tokenizer.byte_fallback=true"] if unknown_rate else []
    if tokenizer.normalization not in {"nfc", "identity"}:
        values.append("tokenizer.normalization=nfc")
    return " ".join(values) or "tokenizer.normalization=identity"


def log_corpus_report(report: Mapping[str, Any]) -> None:
    """Write the corpus report to the log, warnings last."""
    log.info("corpus: %s to %s, vocabulary %s", *report["languages"], " and ".join(map(str, report["vocabulary"])))
    for name, split in report["splits"].items():
        dropped = ", ".join(f"{count} {reason}" for reason, count in split["dropped"].items()) or "none"
        log.info(
            "  %-10s %8d pairs, dropped: %s; %s + %s tokens, longest %s, unknown %s%s%s",
            name,
            split["kept"],
            dropped,
            *(f"{tokens:,}" for tokens in split["tokens"]),
            "/".join(map(str, split["longest"])),
            "/".join(f"{100 * rate:.2f} %" for rate in split["unknown_rate"]),
            f"; {split['sources_in_train']} sources also in train" if "sources_in_train" in split else "",
            f"; round trip BLEU {split['round_trip_bleu']:.2f}" if "round_trip_bleu" in split else "",
        )
    train = report["splits"]["train"]
    if train["kept"] < MIN_USED * train["read"]:
        log.warning("corpus: only %d of %d training pairs are used", train["kept"], train["read"])
    for warning in report["warnings"]:
        log.warning("corpus: %s", warning)


class Start(NamedTuple):
    """Initial weights."""

    weights: dict[str, Tensor]
    record: dict[str, Any]  # where they come from, for the manifest: {"start_from": ...} or {"pretrained": ...}
    description: list[str]  # lines for the log


class Teachers(NamedTuple):
    """The models that a distillation learns from."""

    models: list[Seq2Seq]
    records: list[dict[str, Any]]  # of their runs, for the manifest


def load_start(config: schema.TrainConfig, prepared: Prepared) -> Start | None:
    """Load the initial weights: the best checkpoint of training.start_from, or a new model with the vectors of
    embedding.pretrained. Returns None if the configuration names neither.

    If that run has other tokenizers, its vectors move to the new vocabulary. Raises UserError if the weights or a file
    of vectors do not fit the model.
    """
    if config.embedding.pretrained is not None:
        model = _new_model(config, prepared)
        coverage = load_pretrained(model, config.embedding.pretrained, prepared.tokenizers)
        record = {side: covered._asdict() for side, covered in coverage.items()}
        lines = [covered.describe(side) for side, covered in coverage.items()]
        return Start(model.state_dict(), {"pretrained": record}, lines)
    if config.training.start_from is None:
        return None
    run = RunDirectory.existing(config.training.start_from, "training.start_from")
    saved = load_config(run.config)
    tokenizers = Tokenizers.load(run.path, saved.tokenizer.lowercase)
    path = run.checkpoints / BEST
    try:
        model, checkpoint = load_model(config, tokenizers, path)
    except UserError:
        if path.is_file() and (differences := model_differences(saved, config)):
            raise UserError(
                f"training.start_from={run.source}: its weights do not fit this model ({'; '.join(differences)})"
            ) from None
        raise
    record = record_of(run, checkpoint)
    lines = [f"initial weights: step {record['step']} of {record['run']}"]
    if all(old.same_as(new) for old, new in zip(tokenizers, prepared.tokenizers, strict=True)):
        return Start(model.state_dict(), {"start_from": record}, lines)
    new = _new_model(config, prepared).state_dict()
    weights, origins = transfer_weights(model.state_dict(), new, tokenizers, prepared.tokenizers)
    record["vocabulary"] = {side: origin.counts() for side, origin in origins.items()}
    lines += [f"another {side} tokenizer: {origin.describe()}" for side, origin in origins.items()]
    return Start(weights, {"start_from": record}, lines)


def _new_model(config: schema.TrainConfig, prepared: Prepared) -> Seq2Seq:
    torch.manual_seed(config.seed)
    return new_model(config, prepared.tokenizers)


def load_teachers(
    config: schema.TrainConfig, prepared: Prepared, machine: Machine, recorded: Sequence[Mapping[str, Any]] = ()
) -> Teachers:
    """Load the best checkpoints of objective.teachers; none if the objective is not distillation.

    recorded: the teachers' records when the run began. Raises UserError if a teacher is missing, has other tokenizers,
    or has another best checkpoint than recorded.
    """
    teachers = Teachers([], [])
    for path in config.objective.teachers if isinstance(config.objective, Distillation) else []:
        run = RunDirectory.existing(path, "objective.teachers")
        saved = load_config(run.config)
        try:
            refuse_other_tokenizers("objective.teachers", run, saved.tokenizer.lowercase, config, prepared)
        except UserError as error:
            if teachers.records:  # the remedy would name a different tokenizer for each teacher
                first = teachers.records[0]["run"]
                raise UserError(f"objective.teachers: {first} and {run.source} have different tokenizers") from error
            raise
        model, checkpoint = load_model(saved, prepared.tokenizers, run.checkpoints / BEST)
        teachers.models.append(model.eval().to(machine.device))
        teachers.records.append(record_of(run, checkpoint))
    if recorded:
        _refuse_other_teachers(teachers.records, recorded)
    return teachers


def _refuse_other_teachers(records: Sequence[Mapping[str, Any]], recorded: Sequence[Mapping[str, Any]]) -> None:
    """Raises UserError unless these are the same checkpoints in the same order; their runs may have moved."""
    if len(records) != len(recorded):
        raise UserError(f"objective.teachers: this run began with {len(recorded)}, not {len(records)}")
    for now, before in zip(records, recorded, strict=True):
        if any(now[key] != before.get(key) for key in ("step", "scores")):
            raise UserError(
                f"objective.teachers: the best checkpoint of {now['run']} (step {now['step']}) is not the one this run "
                f"began with (step {before.get('step')} of {before.get('run')}); name that one, or start a new run"
            )


def record_of(run: RunDirectory, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the manifest records of another run: its path, its best checkpoint's step and scores, its system."""
    best = {"step": checkpoint["step"], "scores": checkpoint.get("scores", {})}
    return {"run": str(run.source), **best, "system": run.system_digest()}


def refuse_other_tokenizers(
    key: str, run: RunDirectory, lowercase: bool, config: schema.TrainConfig, prepared: Prepared
) -> None:
    """Raises UserError that names the configuration's `key` unless the run has the corpus's tokenizers."""
    names = ["tokenizer.model"] if (run.path / "tokenizer.model").is_file() else ["source.model", "target.model"]
    paths = [run.path / names[0], run.path / names[-1]]
    pairs = zip(paths, prepared.tokenizers, strict=True)
    same = [path.is_file() and read_bytes(path) == tokenizer.model for path, tokenizer in pairs]
    if all(same) and lowercase == config.tokenizer.lowercase:
        return
    models = zip(("source_model", "target_model"), dict.fromkeys(paths), strict=False)
    remedy = ["tokenizer=file", *(for_shell(f"tokenizer.{name}", path) for name, path in models)]
    if lowercase:
        remedy.append("tokenizer.lowercase=true")
    raise UserError(
        f"{key}={run.source}: was trained with another tokenizer than this run; use the same one: {' '.join(remedy)}"
    )


def model_differences(saved: schema.TrainConfig, config: schema.TrainConfig) -> list[str]:
    """Describe the values that give the two models different weights."""
    here, there = (
        dict(flatten(values.model_dump(mode="json", include=set(Model.model_fields)))) for values in (config, saved)
    )
    return [
        f"{key} is {there.get(key)} there, {here.get(key)} here"
        for key in {**there, **here}
        if there.get(key) != here.get(key) and "dropout" not in key and key not in INITIAL
    ]


class Origins(NamedTuple):
    """Where the vectors of a new vocabulary come from: pieces that the old one has keep theirs, others start from their
    parts."""

    kept: dict[int, int]  # new token -> the old token of the same piece
    parts: dict[int, list[int]]  # new token -> the old tokens whose mean it starts from
    new: int  # tokens that share no part with the old vocabulary, and stay random

    def counts(self) -> dict[str, int]:
        """Count the tokens that start in each way, for the manifest."""
        return {"kept": len(self.kept), "from_parts": len(self.parts), "new": self.new}

    def describe(self) -> str:
        """Describe the counts for the log."""
        return (
            f"{len(self.kept)} pieces keep their vectors, {len(self.parts)} start from their parts, {self.new} are new"
        )


def transfer_weights(
    old: Mapping[str, Tensor], new: Mapping[str, Tensor], old_tokenizers: Tokenizers, new_tokenizers: Tokenizers
) -> tuple[dict[str, Tensor], dict[str, Origins]]:
    """Make the weights `old` of a model fit the vocabularies of the weights `new`. Returns them, and the origins by
    side."""
    origins = {
        side: origins_of(new_tokenizer, old_tokenizer)
        for side, new_tokenizer, old_tokenizer in zip(Tokenizers._fields, new_tokenizers, old_tokenizers, strict=True)
    }
    weights = dict(old)
    for name, side in TABLES.items():
        if name in old:
            weights[name] = _moved(old[name], new[name], origins[side])
    return weights, origins


def _moved(old: Tensor, new: Tensor, origins: Origins) -> Tensor:
    """Move the rows of a table: (W, ...), (V, ...) -> (V, ...)."""
    moved = new.clone()
    moved[torch.tensor(list(origins.kept), dtype=torch.int64)] = old[torch.tensor(list(origins.kept.values())).long()]
    for token, parts in origins.parts.items():
        moved[token] = old[parts].mean(0)
    return moved


def origins_of(new: Tokenizer, old: Tokenizer) -> Origins:
    """Find each token of a new tokenizer in the vocabulary of an old one. If the old one lowercases, so does the
    comparison."""
    old_ids = {piece: token for token, piece in enumerate(old.pieces(range(old.vocab_size)))}
    longest = max(map(len, old_ids))
    kept: dict[int, int] = {}
    parts: dict[int, list[int]] = {}
    for token, piece in enumerate(new.pieces(range(new.vocab_size))):
        if piece in old_ids:
            kept[token] = old_ids[piece]
        elif segments := _segment(piece.lower() if old.lowercase else piece, old_ids, longest):
            parts[token] = segments
    return Origins(kept, parts, new.vocab_size - len(kept) - len(parts))


def _segment(piece: str, vocabulary: Mapping[str, int], longest: int) -> list[int]:
    """Split a piece into tokens from left to right, each time the longest that fits. A character that the vocabulary
    lacks becomes its bytes, if the vocabulary has them."""
    tokens: list[int] = []
    start = 0
    while start < len(piece):
        ends = range(min(len(piece), start + longest), start, -1)
        end = next((end for end in ends if piece[start:end] in vocabulary), None)
        if end is None:
            codes = [f"<0x{byte:02X}>" for byte in piece[start].encode("utf-8", "replace")]
            tokens += [vocabulary[code] for code in codes if code in vocabulary]
            end = start + 1
        else:
            tokens.append(vocabulary[piece[start:end]])
        start = end
    return tokens


class VectorCoverage(NamedTuple):
    """How many pieces of a vocabulary have a pretrained vector."""

    pieces: int
    vocabulary: int
    file: str
    content: str  # digest of the vectors: two runs may read the same ones from files in different places

    def describe(self, side: str) -> str:
        """Describe the coverage for the log."""
        return f"{self.pieces} of {self.vocabulary} pieces of the {side} vocabulary have a vector in {self.file}"


@torch.no_grad()
def load_pretrained(model: Seq2Seq, files: Sequence[str | None], tokenizers: Tokenizers) -> dict[str, VectorCoverage]:
    """Fill the source and target embeddings from a file each (None leaves that side). Returns the coverage by side.

    In a table that both sides share, the target's file fills only the rows that the source's file did not. Raises
    UserError for a file that cannot be read, vectors of another size than the embeddings, or if no piece has a vector.
    """
    coverage: dict[str, VectorCoverage] = {}
    filled: dict[int, set[int]] = {}  # tokens, by table
    for side, file, tokenizer in zip(Tokenizers._fields, files, tokenizers, strict=True):
        table: Tensor = getattr(model, f"{side}_embedding").weight
        if file is None:
            continue
        vectors = _vectors_of_pieces(file, tokenizer, table.shape[1])
        if not vectors:
            raise UserError(
                f"embedding.pretrained: no piece of the {side} vocabulary has a vector in {file}; is it of this "
                "language?"
            )
        done = filled.setdefault(table.data_ptr(), set())
        for token in vectors.keys() - done:
            table[token] = torch.from_numpy(vectors[token])
        done.update(vectors)
        digest = hashlib.sha256()
        for token in sorted(vectors):
            digest.update(f"{token}:".encode() + vectors[token].tobytes())
        coverage[side] = VectorCoverage(len(vectors), tokenizer.vocab_size, file, digest.hexdigest())
    return coverage


def _vectors_of_pieces(file: str, tokenizer: Tokenizer, dim: int) -> dict[int, Vector]:
    """Read the vectors of tokens. If the file has several of a piece's names, the best one counts."""
    pieces = tokenizer.pieces(range(tokenizer.vocab_size))
    names = [_names_in_files(piece) for piece in pieces]
    vectors = _read_vectors(file, {name for candidates in names for name in candidates}, dim)
    best = (next((name for name in candidates if name in vectors), None) for candidates in names)
    return {token: vectors[name] for token, name in enumerate(best) if name is not None}


def _names_in_files(piece: str) -> list[str]:
    """Return the names under which a file may hold the vector of a piece, best first: the piece itself, the word
    without "▁", the lowercased word; for punctuation the piece alone. Parts of words have none."""
    if piece.startswith(WORD_START) and len(piece) > 1:
        return [piece, piece[1:], piece[1:].lower()]
    return [] if any(character.isalnum() for character in piece) else [piece]


def _read_vectors(file: str, words: set[str], dim: int) -> dict[str, Vector]:
    """Read the vectors of these words; of a repeated word the first one."""
    path = Path(user_path(file))
    vectors: dict[str, Vector] = {}
    number, opened = 0, gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8", errors="replace", newline="\n") as lines:
            for number, line in enumerate(lines, 1):
                if number == 1 and _is_header(file, line, dim):
                    continue
                word = line.partition(" ")[0]
                if word not in words or word in vectors:
                    continue
                name, *numbers = line.rstrip().rsplit(" ", dim)
                if name != word:  # a few names in GloVe's files contain spaces
                    continue
                vectors[word] = np.array(numbers, dtype=np.float32)
                if len(numbers) != dim or not np.isfinite(vectors[word]).all():
                    raise ValueError
    except UserError:  # which is a ValueError, too
        raise
    except ValueError:
        raise UserError(
            f"embedding.pretrained={file}, line {number}: expected a word and {dim} numbers, separated by spaces"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"embedding.pretrained={file}: cannot be read ({reason})") from None
    return vectors


def _is_header(file: str, line: str, dim: int) -> bool:
    """Is the first line a header (the numbers of words and dimensions) instead of a vector?

    Raises UserError if the file is not text, or has vectors of another size.
    """
    fields = line.split()
    header = len(fields) == 2 and all(field.isdigit() for field in fields)  # noqa: PLR2004
    size = int(fields[1]) if header else len(fields) - 1
    if size < 1 or "\ufffd" in line:
        raise UserError(
            f"embedding.pretrained={file}, line 1: is not a text file of vectors (word2vec's text format, GloVe, "
            "fastText's .vec; also as .gz)"
        )
    if size != dim:
        raise UserError(
            f"embedding.pretrained={file}: has vectors of {size} numbers, but embedding.dim={dim}; set "
            f"embedding.dim={size} (with embedding.tie_output=true also decoder.readout_dim={size})"
        )
    return header
