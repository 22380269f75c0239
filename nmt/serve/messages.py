"""The requests and answers of the service. The descriptions of the fields appear in its OpenAPI document."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from nmt.config.schema.training import BeamSize, LengthExponent, LengthPenalty

MAX_CHARACTERS = 1_000_000  # characters of one text; the limit on the bytes of a body is usually reached earlier

Text = Annotated[str, Field(max_length=MAX_CHARACTERS)]
Piece = Annotated[Text, Field(min_length=1, max_length=1000)]
Weight = Annotated[float, Field(ge=0.0, le=1.001)]
Step = Annotated[int, Field(ge=0, le=100_000, strict=False)]  # not strict, because the keys of JSON objects are strings
Attend = dict[Step, Annotated[int, Field(ge=0, le=100_000)] | list[Weight]]


class Message(BaseModel):
    """A message that rejects unknown keys and converts no types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TranslateRequest(Message):
    """Texts to translate, or texts whose given translations are scored."""

    beam_size: BeamSize | None = Field(None, description="null: as in the run's configuration")
    length_penalty: LengthPenalty | None = Field(None, description="null: as in the run's configuration")
    alpha: LengthExponent | None = Field(None, description="null: as in the run's configuration")
    text: Text | list[Text] = Field(description="a line or several; each is translated by itself")
    model: str | None = Field(None, description="a name of /v1/models; null: the default")
    nbest: BeamSize = Field(1, description="translations of each text, best first")
    alignment: bool = Field(False, description="return the attention")
    target: Text | list[Text] | None = Field(None, description="translations to score instead of searching")
    prefix: Text | list[Piece] | None = Field(
        None, description="what the translation of the one text starts with: text, or tokens as in the answer"
    )
    attend: Attend | None = Field(
        None, description="for the one text: step -> source position to attend to, or a row of weights; both from 0"
    )
    tree: bool = Field(False, description="return the beam search of the one text as a tree")

    def search(self) -> dict[str, Any]:
        """Collect the settings of the search, by their keys in the section `search` of a configuration."""
        return self.model_dump(include={"beam_size", "length_penalty", "alpha"}, exclude_none=True)


class ScoredText(Message):
    """A translation with its score and token probabilities."""

    text: str
    score: float = Field(description="log_prob divided by the length penalty, plus the coverage score")
    log_prob: float = Field(description="natural logarithm")
    source_tokens: list[str] = Field(description='SentencePiece pieces: "▁" starts a word, "</s>" is last')
    tokens: list[str]
    token_log_probs: list[float]
    alignment: list[list[float]] | None = Field(description="a row of source weights for each of `tokens`")


class TreeNode(Message):
    """A candidate at one step of a beam search."""

    parent: int | None = Field(description="index among the previous step's candidates; null at the first step")
    token: str
    log_prob: float = Field(description="of the hypothesis up to here")
    score: float
    fate: Literal["kept", "ended", "pruned"]


class Tree(Message):
    """A beam search: the candidates at each step."""

    steps: list[list[TreeNode]]


class TranslateAnswer(Message):
    """The n-best list of each text, in order."""

    model: str
    translations: list[list[ScoredText]]
    tree: Tree | None = None


class ExplainRequest(Message):
    """A sentence and the translation of it to explain."""

    text: Text
    target: Text | list[Piece] = Field(description="text, or tokens as in an answer")
    model: str | None = None
    attend: Attend | None = None
    saliency: bool = True


class Window(Message):
    """The windows of a local attention, one at each step."""

    centres: list[float] = Field(description="source position of each step's centre, from 0")
    reach: int


class ExplainAnswer(Message):
    """The probabilities, attention and saliency of a sentence pair."""

    model: str
    source_tokens: list[str]
    tokens: list[str]
    token_log_probs: list[float]
    log_prob: float
    alignment: list[list[float]] | None
    heads: list[list[list[float]]] | None = Field(description="the weights of each head, if there are several")
    window: Window | None
    stops: list[int | None] | None = Field(
        description="where monotonic reading stopped at each step; null: past the end"
    )
    saliency: list[list[float]] | None = Field(description="gradient norms, divided by the sum of their row")


class ModelInfo(Message):
    """A model that this service has loaded."""

    name: str
    source: str
    target: str
    attention: str | None
    members: int
    latent: bool
    heads: int
    window: str | None
    monotonic: bool
    parameters: int
    score: str | None  # by the first of evaluation.metrics, such as "BLEU 35.2"
    beam_size: int
    length_penalty: str | None
    alpha: float | None
    max_beam_size: int
    max_tokens: int
    examples: list[str]


class ModelsAnswer(Message):
    """All models of this service."""

    models: list[ModelInfo]
    default: str


class Problem(Message):
    """Why a request was refused."""

    error: str


PROBLEMS: dict[int | str, dict[str, Any]] = {"default": {"model": Problem, "description": "Any problem"}}


def describe_invalid(errors: Sequence[Any]) -> str:
    """Describe the first of FastAPI's validation errors as "key: reason"."""
    problem = errors[0]
    if problem["type"] == "json_invalid":
        return f"the body is not valid JSON ({problem['ctx']['error']})"
    # A location also has parts that are no keys: they name a type of a union, or say that the key itself is wrong.
    branches = ("list[", "dict[", "constrained-", "[key]")
    keys = [str(part) for part in problem["loc"][1:] if not str(part).startswith(branches)]
    if not keys:
        return 'the body must be a JSON object, such as {"text": "..."}, with content-type application/json'
    key, reason = ".".join(keys[:3])[:100], str(problem["msg"])
    return f"{key}: {reason[:1].lower()}{reason[1:]}"
