"""Intermediate values of prompts: `LLM.tap`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ..errors import InvalidRequestError, LlmpyError
from ..inputs import batch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .. import _core
    from ..inputs import Prompts
    from ..models import Spec
    from ..models.names import Named
    from .frontend import Frontend


class Tap:
    """Runs prompts through a program one operation at a time and keeps intermediate values.

    Args:
        model: The core's model.
        spec: The model's program.
        programs: The program of each rank.
        frontend: Tokenises prompts.
        claim: A context manager that keeps other threads from running the engine.
    """

    def __init__(
        self,
        model: _core.Model,
        spec: Spec,
        programs: Sequence[Spec],
        frontend: Frontend,
        claim: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.model, self.spec, self.programs, self.frontend, self.claim = model, spec, programs, frontend, claim

    def named(self) -> list[Named]:
        """The values that have names."""
        from ..models import names

        return names.of_program(self.spec)

    def width(self, one: Named) -> int:
        """Columns of a value."""
        from ..models import names

        return names.width(self.spec, one.value)

    def ids(self, prompts: Prompts) -> Iterator[Any]:
        """The token ids of each prompt, int32, with the checks of a request."""
        import numpy as np

        for prompt in self.frontend.prompts(batch(prompts)):
            if isinstance(prompt, LlmpyError):
                raise prompt
            self.frontend.check_length(prompt, room=0)
            parts = [part for part in (prompt.ids, prompt.prior) if part is not None]
            yield np.ascontiguousarray(np.concatenate(parts), dtype=np.int32)

    def run(self, prompts: Prompts, wanted: str | int | Sequence[str | int]) -> list[dict[str | int, NDArray[np.float32]]]:
        """The values of each prompt, as `LLM.tap` returns them."""
        from ..models import names

        chosen = _listed(wanted)
        known = {one.name: one for one in self.named()}
        try:
            values = [names.find(self.spec, one, known) for one in chosen]
        except KeyError as error:
            raise InvalidRequestError(str(error.args[0]), parameter="names", value=wanted) from None
        found: list[dict[str | int, NDArray[np.float32]]] = []
        for ids in self.ids(prompts):
            with self.claim():
                rows = self.model.tap(ids, values)
            arrays = [self._joined(value, len(ids), [rank[i] for rank in rows]) for i, value in enumerate(values)]
            found.append(dict(zip(chosen, arrays, strict=True)))
        return found

    def _joined(self, value: int, n_tokens: int, of_ranks: Sequence[bytes]) -> NDArray[np.float32]:
        """A value with all columns, from the columns that each rank has. Rank 0 has whole logits."""
        import numpy as np

        from ..models import names

        width = names.width(self.spec, value)
        parts = [np.frombuffer(one, np.float32).reshape(n_tokens, -1) for one in of_ranks]
        if value == names.LOGITS or parts[0].shape[1] == width:
            return parts[0]
        whole = np.empty((n_tokens, width), np.float32)
        for part, program in zip(parts, self.programs, strict=True):
            first = 0
            for start, end in program["columns"][value]:
                whole[:, start:end] = part[:, first : first + end - start]
                first += end - start
        return whole


def _listed(wanted: object) -> list[str | int]:
    """A list of names and numbers of operations, from a sequence or a single one."""
    chosen: list[Any] = list(wanted) if isinstance(wanted, Sequence) and not isinstance(wanted, str) else [wanted]
    for one in chosen:
        if isinstance(one, bool) or not isinstance(one, str | int):
            message = f"names must be a name, the number of an operation, or a list of these, got {one!r}."
            raise InvalidRequestError(message, parameter="names", value=wanted)
    return chosen
