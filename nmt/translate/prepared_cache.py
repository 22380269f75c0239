"""Models prepared for search, kept for the next one."""

from threading import Lock

from nmt.model.ensemble import Ensemble, SearchEnsemble
from nmt.model.seq2seq import Seq2Seq
from nmt.ops.packed import pack, pack_int8
from nmt.system.machine import Machine
from nmt.translate.prepared_model import SearchModel, prepare_for_search

MAX_PREPARED = 4  # copies of the weights, one per beam size


class PreparedModels:
    """The model prepared for search, for each of the last few beam sizes; anew if its weights have visibly changed."""

    def __init__(self, model: Seq2Seq | Ensemble, machine: Machine) -> None:
        self._model, self._machine = model, machine
        self._lock = Lock()
        self.clear()

    def clear(self) -> None:
        """Prepare the model anew for the next search."""
        self._versions: list[tuple[int, int]] = []
        self._prepared: dict[int, SearchModel | SearchEnsemble] = {}

    def get(self, beam_size: int) -> SearchModel | SearchEnsemble:
        """The model prepared for a beam of this size."""
        with self._lock:
            versions = [(weight.data_ptr(), weight._version) for weight in self._model.parameters()]
            if versions != self._versions:
                self.clear()
                self._versions = versions
            prepared = self._prepared.pop(beam_size, None)
            if prepared is None:
                with self._machine.autocast():
                    packing = pack_int8 if self._machine.int8 else pack
                    prepared = prepare_for_search(self._model, beam_size, packing)
            self._prepared[beam_size] = prepared  # the most recent one last
            if len(self._prepared) > MAX_PREPARED:
                del self._prepared[next(iter(self._prepared))]
            return prepared
