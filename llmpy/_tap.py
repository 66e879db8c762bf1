"""Intermediate values of prompts: `LLM.tap`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from .errors import InvalidRequestError, LlmpyError
from .inputs import batch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from . import _core
    from ._frontend import Frontend
    from .inputs import PromptType
    from .models import Spec
    from .models.names import Named


class Tap:
    """Runs prompts through a program, operation by operation, and keeps what they make.

    Args:
        model: The core's.
        spec: Its program.
        frontend: Makes ids of prompts.
        claim: Keeps others from driving the engine for a while.
    """

    def __init__(
        self, model: _core.Model, spec: Spec, frontend: Frontend, claim: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.model, self.spec, self.frontend, self.claim = model, spec, frontend, claim

    def named(self) -> list[Named]:
        """The values that have names."""
        from .models import names

        return names.of_program(self.spec)

    def width(self, one: Named) -> int:
        """Columns of a value."""
        from .models import names

        return names.width(self.spec, one.value)

    def run(
        self, prompts: PromptType | Sequence[PromptType], wanted: str | int | Sequence[str | int]
    ) -> list[dict[str | int, NDArray[np.float32]]]:
        """The values of each prompt, as `LLM.tap`."""
        import numpy as np

        from .models import names

        chosen = [wanted] if isinstance(wanted, str | int) else list(wanted)
        known = {one.name: one for one in self.named()}
        try:
            values = [names.find(self.spec, one, known) for one in chosen]
        except KeyError as error:
            raise InvalidRequestError(str(error.args[0]), parameter="names", value=wanted) from None
        found: list[dict[str | int, NDArray[np.float32]]] = []
        parsed = self.frontend.prompts(batch(prompts))
        for prompt in parsed:
            if isinstance(prompt, LlmpyError):
                raise prompt
            self.frontend.check_length(prompt, room=0)
            parts = [part for part in (prompt.ids, prompt.prior) if part is not None]
            ids: Any = np.ascontiguousarray(np.concatenate(parts), dtype=np.int32)
            with self.claim():
                rows = self.model.tap(ids, values)
            arrays = (
                np.frombuffer(one, np.float32).reshape(len(ids), names.width(self.spec, value))
                for one, value in zip(rows, values, strict=True)
            )
            found.append(dict(zip(chosen, arrays, strict=True)))
        return found
