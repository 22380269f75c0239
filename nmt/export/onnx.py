"""A model as two ONNX programs, for other runtimes: the encoder, and one step of the decoder.

Shapes: B batch, S source positions, V target vocabulary.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nmt.attention.gaussian_mixture import GaussianMixtureScore
from nmt.attention.heads import MultiHeadAttention
from nmt.config import schema
from nmt.config.compose import load_config
from nmt.config.errors import UserError, format_value
from nmt.data.tokenizer import TOKENIZER_FILES
from nmt.files import read_bytes, to_json
from nmt.model.cells import CellState
from nmt.model.seq2seq import Seq2Seq
from nmt.model.state import DecoderState
from nmt.run import RunDirectory
from nmt.searcher import EXTRA_TOKENS
from nmt.translator import Translator

PACKAGES = ("onnx", "onnxscript")
ENCODER, STEP, DESCRIPTION = "encoder.onnx", "decoder_step.onnx", "program.json"
BATCH, LENGTH = 3, 7  # of the sentences with which the programs are traced
NEXT = "next_"  # before the name of a state after a step
# Of the tensors between the programs, the dimension with the source positions, counted from the end; 0: there is none.
POSITIONS = {
    **{"values": 2, "keys": 2, "valid": 1, "projection": 0, "chunk_keys": 2, "chunk_projection": 0},
    **{"words": 2, "contexts": 2, "fixed": 0, "feed": 0},
    **{"past_weights": 1, "past_total": 1, "past_log_stops": 1, "past_means": 0},
}
MEMORY = ("values", "keys", "valid", "chunk_keys")  # with rows for each head
ONE_LENGTH = "for one source length only"
NORMALIZERS = {  # that are refused, and why
    "first_order": "has another first step than later ones",
    "linear_chain": "is a loop over the source within each step",
    "mocha": f"has chunks, which torch exports {ONE_LENGTH}",
}
WITHOUT_BATCH = ("projection", "chunk_projection")  # the same for all sentences
STATE = ("hidden", "cell", "feed", "past")  # how the names of what each step changes begin; the rest is constant


def refuse_unfit(config: schema.TrainConfig) -> None:
    """Raises UserError, with the reason, for a model that the two programs cannot express, or for missing packages."""
    attention = config.attention
    reason = None
    if attention.kind != "none":
        if attention.window.kind == "local_m":
            reason = "attention.window.kind=local_m depends on the number of the step"
        elif attention.normalizer.kind in NORMALIZERS:
            reason = f"attention.normalizer.kind={attention.normalizer.kind} {NORMALIZERS[attention.normalizer.kind]}"
        elif attention.alignment.kind in {"marginal", "variational", "posterior"}:
            reason = f"torch exports the sum of attention.alignment.kind={attention.alignment.kind} {ONE_LENGTH}"
    if config.decoder.copy and reason is None:
        reason = "with decoder.copy=true each step reads the source's tokens, which its program does not get"
    if config.encoder.self_attention.kind != "none" and reason is None:
        reason = f"torch exports encoder.self_attention {ONE_LENGTH}"
    if reason is not None:
        raise UserError(f"format=onnx: {reason}; use format=archive")
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise UserError(f"format=onnx: the package {missing[0]} is missing: pip install 'nmt[onnx]'")


def program_files(run: RunDirectory, checkpoint: str) -> dict[str, bytes]:
    """The files of an exported run by name, the description last. Raises UserError if the model cannot be exported."""
    config = load_config(run.config)
    refuse_unfit(config)
    translator = Translator.load(run.source, checkpoint=checkpoint, device="cpu", precision="fp32")
    exported = programs(translator.single)
    tokenizers = {name: read_bytes(run.path / name) for name in TOKENIZER_FILES if (run.path / name).is_file()}
    description = _description(exported, config, translator, list(tokenizers))
    text = f"{to_json(description, indent=2)}\n".encode()
    return {ENCODER: exported.encoder, STEP: exported.step, **tokenizers, DESCRIPTION: text}


def _description(
    exported: "Programs", config: schema.TrainConfig, translator: Translator, names: Sequence[str]
) -> dict[str, Any]:
    """What a program that uses the two needs to know."""
    source, target = translator.tokenizers
    constant, state = exported.memory, exported.state
    weights = ["weights"] if exported.attends else []
    search = config.search
    return {
        "encoder": {"file": ENCODER, "inputs": ["source", "lengths"], "outputs": [*constant, *state]},
        "step": {
            "file": STEP,
            "inputs": ["tokens", *constant, *state],
            "outputs": ["logits", *weights, *(f"{NEXT}{name}" for name in state)],
        },
        "state": state,
        "tokenizers": {"source": names[0], "target": names[-1], "lowercase": config.tokenizer.lowercase},
        "source": {"language": config.data.source_lang, "end": source.eos, "padding": source.pad},
        "target": {
            "language": config.data.target_lang,
            "start": target.bos,
            "end": target.eos,
            "never": sorted({target.pad, target.bos, *target.tag_ids}),
            "unknown": target.unk,
        },
        "limits": {
            "source_tokens": search.max_source_length,
            "min_tokens": search.min_length,
            "max_tokens": search.max_length,
            "max_ratio": search.max_ratio,
            "more_tokens": EXTRA_TOKENS,
        },
    }


class Programs(NamedTuple):
    """Both programs and the names of what goes in and out."""

    encoder: bytes
    step: bytes
    memory: list[str]  # outputs of the encoder that all steps read
    state: list[str]  # outputs of the encoder that the first step reads, and that each step gives to the next
    attends: bool


def programs(model: Seq2Seq) -> Programs:
    """Both programs of a model in evaluation mode, on the CPU. Raises UserError if torch cannot export it."""
    source = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % model.source_embedding.num_embeddings
    lengths = torch.tensor([LENGTH, LENGTH - 2, LENGTH - 4])
    with torch.no_grad():
        encoder = _Encoder(model).eval()
        state = model.encode(source, lengths)
        names = list(_tensors(_started(model, state)))
        step = _Step(model, state, names).eval()
        values = [tensor.clone() for tensor in encoder(source, lengths)]
        tokens = torch.full((BATCH,), 5) % model.target_embedding.num_embeddings
        batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
        shapes = [_dynamic(name, tensor, batch, length) for name, tensor in zip(names, values, strict=True)]
        kept = [name for name in names if name.startswith(STATE)]
        outputs = ["logits", *(["weights"] if model.attends else []), *(f"{NEXT}{name}" for name in kept)]
        return Programs(
            _exported(encoder, (source, lengths), ({0: batch, 1: length}, {0: batch}), ["source", "lengths"], names),
            _exported(step, (tokens, *values), ({0: batch}, tuple(shapes)), ["tokens", *names], outputs),
            [name for name in names if name not in kept],
            kept,
            model.attends,
        )


class _Encoder(nn.Module):
    def __init__(self, model: Seq2Seq) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        """int64 (B, S), int64 (B,) -> the tensors of the decoder's first state."""
        return tuple(_tensors(_started(self.model, self.model.encode(source, lengths))).values())


class _Step(nn.Module):
    def __init__(self, model: Seq2Seq, like: DecoderState, names: Sequence[str]) -> None:
        """like: a state with everything that is not a tensor of a sentence."""
        super().__init__()
        self.model, self.like, self.names = model, like, names

    def forward(self, tokens: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        """int64 (B,), the tensors of a state -> logits (B, V), attention weights (B, S), those of the next state."""
        state = _state(self.like, dict(zip(self.names, values, strict=True)))
        output = self.model.step(tokens, state)
        after = _tensors(output.state)
        kept = [after[name] for name in self.names if name.startswith(STATE)]
        return (output.logits, *(() if output.weights is None else (output.weights,)), *kept)


def _tensors(state: DecoderState) -> dict[str, Tensor]:
    """The tensors of a state by name, those with rows for each head as (B, N, ...); first what no step changes."""
    found: dict[str, Tensor | None] = {f"hidden_{n}": each for n, each in enumerate(state.cell.hidden)}
    found |= {f"cell_{n}": each for n, each in enumerate(state.cell.memory)}
    found |= {"feed": state.feed, "words": state.words, "fixed": state.fixed, "contexts": state.contexts}
    if state.memory is not None:
        memory = state.memory
        found |= {name: _by_sentence(getattr(memory, name), memory.heads) for name in MEMORY}
        found |= {name: getattr(memory, name) for name in WITHOUT_BATCH}
    if state.past is not None and not state.beams_share_memory:
        found |= {f"past_{name}": getattr(state.past, name) for name in ("weights", "total", "log_stops", "means")}
    present = [(name, tensor) for name, tensor in found.items() if tensor is not None]
    return dict(sorted(present, key=lambda item: item[0].startswith(STATE)))


def _state(like: DecoderState, tensors: Mapping[str, Tensor]) -> DecoderState:
    """The state with these tensors, and all else from `like`."""

    def layers(kind: str) -> tuple[Tensor, ...]:
        return tuple(tensors[name] for name in tensors if name.startswith(f"{kind}_"))

    memory, past = like.memory, like.past
    if memory is not None:
        rows: dict[str, Any] = {
            name: tensors[name].flatten(0, int(memory.heads > 1)) for name in MEMORY if name in tensors
        }
        shared: dict[str, Any] = {name: tensors[name] for name in WITHOUT_BATCH if name in tensors}
        # With `detailed`, a window is a mask over all positions: the program has no branch for long sentences.
        memory = memory._replace(**rows, **shared, mask=None, detailed=True)
    if past is not None:
        own: dict[str, Any] = {
            name.removeprefix("past_"): tensor for name, tensor in tensors.items() if name.startswith("past_")
        }
        past = past._replace(step=1, **own)
    alike: dict[str, Any] = {name: tensors.get(name) for name in ("feed", "words", "fixed", "contexts")}
    return like._replace(cell=CellState(layers("hidden"), layers("cell")), memory=memory, past=past, **alike)


def _started(model: Seq2Seq, state: DecoderState) -> DecoderState:
    """The state before the first step, with values in place of what is None then: monotonic reading is at position 0,
    Gaussians have not moved."""
    attention, past = model.decoder.attention, state.past
    if attention is None or past is None:
        return state
    inner = attention.inner if isinstance(attention, MultiHeadAttention) else attention
    if inner.normalizer.stops:
        start = torch.where(torch.arange(past.weights.shape[-1]) == 0, 0.0, -torch.inf)
        past = past._replace(log_stops=start.expand_as(past.weights).clone())
    if isinstance(inner.score, GaussianMixtureScore):
        past = past._replace(means=past.weights.new_zeros(*past.weights.shape[:-1], inner.score.moves.out_features))
    return state._replace(past=past)


def _by_sentence(rows: Tensor | None, heads: int) -> Tensor | None:
    """(B N, ...) -> (B, N, ...) with N > 1 heads."""
    return rows if rows is None or heads == 1 else rows.view(-1, heads, *rows.shape[1:])


def _dynamic(name: str, tensor: Tensor, batch: Any, length: Any) -> dict[int, Any]:  # noqa: ANN401
    """The dimensions of a tensor between the programs that any number may take the place of."""
    dims = {} if name in WITHOUT_BATCH else {0: batch}
    if place := POSITIONS.get(name, 0):
        dims[tensor.dim() - place] = length
    return dims


def _exported(
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    shapes: tuple[Any, ...],
    input_names: Sequence[str],
    output_names: Sequence[str],
) -> bytes:
    """Raises UserError, with torch's reason, if the module has no program for all sizes."""
    try:
        with _quiet():
            program = torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False)
            exported = torch.onnx.export(
                program, (), input_names=input_names, output_names=output_names, dynamo=True, verbose=False
            )
            assert exported is not None
            proto = exported.model_proto
    except Exception as error:  # torch raises nearly anything
        reason = format_value(str(error).strip().partition("\n")[0], 200) or type(error).__name__
        raise UserError(f"format=onnx: torch cannot export this model ({reason}); use format=archive") from None
    _name_sizes(proto, shapes)
    return bytes(proto.SerializeToString())


def _name_sizes(proto: Any, shapes: Sequence[Any]) -> None:  # noqa: ANN401
    """Call the sizes of inputs and outputs "batch" and "length" in place of torch's numbers."""
    flat = [shape for each in shapes for shape in (each if isinstance(each, tuple) else [each])]
    names = {}
    for value, dims in zip(proto.graph.input, flat, strict=True):
        for place, dim in dims.items():
            names[value.type.tensor_type.shape.dim[place].dim_param] = dim.__name__
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in names:
                dim.dim_param = names[dim.dim_param]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the exporter's remarks about packages that it does not need."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.setLevel(level)
