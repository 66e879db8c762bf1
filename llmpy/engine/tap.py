"""Intermediate values of prompts: `tap` of LLM and AsyncEngine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeAlias

from ..errors import InvalidRequestError, LlmpyError
from ..inputs import batch
from .jobs import beside

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .. import _core
    from ..inputs import Prompts
    from ..models import Spec
    from ..models.names import Named
    from .base import AnyDriver
    from .frontend import Frontend
    from .thread import ThreadDriver

Wanted: TypeAlias = str | int | Sequence[str | int]


class Tap:
    """Runs prompts through a program one operation at a time and keeps intermediate values.

    Args:
        model: The core's model.
        runner: The core object that runs steps.
        spec: The model's program.
        programs: The program of each rank.
        frontend: Tokenises prompts.
        claim: A context manager that keeps other threads from running the engine.
    """

    def __init__(
        self,
        model: _core.Model,
        runner: _core.Engine | _core.EngineThread,
        spec: Spec,
        programs: Sequence[Spec],
        frontend: Frontend,
        claim: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.model, self.runner, self.spec, self.programs = model, runner, spec, programs
        self.frontend, self.claim = frontend, claim

    def named(self) -> list[Named]:
        """The values of the text's program that have names."""
        from ..models import names

        return names.of_program(self.spec)

    def named_of_images(self) -> list[Named]:
        """The values of the tower that have names."""
        from ..models import names

        return names.of_tower(self.spec)

    def width(self, one: Named) -> int:
        """Columns of a value of the text's program."""
        from ..models import names

        return names.width(self.spec, one.value)

    def prompts(self, prompts: Prompts) -> Iterator[tuple[Any, dict[str, Any]]]:
        """The token ids of each prompt, int32, and its parameters, with the checks of a request."""
        import numpy as np

        from .images import core_params, has_axes

        for prompt in self.frontend.prompts(batch(prompts)):
            if isinstance(prompt, LlmpyError):
                raise prompt
            self.frontend.check_length(prompt, room=0)
            parts = [part for part in (prompt.ids, prompt.prior) if part is not None]
            ids = np.ascontiguousarray(np.concatenate(parts), dtype=np.int32)
            params: dict[str, Any] = {"seed": 0}
            if prompt.types is not None:  # the core takes them with pooling only
                params |= {"token_type_ids": prompt.types.tobytes(), "pooling": "last"}
            if prompt.prior is not None:
                params["score_start"] = len(ids) - len(prompt.prior)
            if prompt.images:
                params |= core_params(prompt.images, len(ids), has_axes(self.spec))
            yield ids, params

    def run(self, prompts: Prompts, wanted: Wanted) -> list[dict[str | int, NDArray[np.float32]]]:
        """The values of each prompt, as `LLM.tap` returns them."""
        from ..models import names

        chosen = _listed(wanted)
        known = {one.name: one for one in [*self.named_of_images(), *self.named()]}
        try:
            values = [names.find(self.spec, one, known) for one in chosen]
        except KeyError as error:
            raise InvalidRequestError(str(error.args[0]), parameter="names", value=wanted) from None
        found: list[dict[str | int, NDArray[np.float32]]] = []
        for ids, params in self.prompts(prompts):
            with self.claim():
                rows = self.model.tap(ids.tobytes(), values, self.runner, params)
            arrays = [self._joined(value, len(ids), [rank[i] for rank in rows]) for i, value in enumerate(values)]
            found.append(dict(zip(chosen, arrays, strict=True)))
        return found

    def _joined(self, value: int, n_tokens: int, of_ranks: Sequence[bytes]) -> NDArray[np.float32]:
        """A value with all columns, from the columns that each rank has. Rank 0 has whole logits."""
        import numpy as np

        from ..models import names

        width = names.width(self.spec, value)
        if value >= len(self.spec["values"]):  # every rank has the whole tower
            return np.frombuffer(of_ranks[0], np.float32).reshape(-1, width)
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


class _Named:
    """The call that lists names of values, for LLM and AsyncEngine."""

    if TYPE_CHECKING:
        _driver: AnyDriver
        _tap: Tap

    def tap_names(self, pattern: str | None = None) -> list[str]:
        """Names of what `tap` can return, in the order in which the model computes it.

        Args:
            pattern: Shell pattern, such as "model.layers.0.*"; None = all.

        Returns:
            The names: those of the modules that make a value; a layer's own name is what it hands to the next one.
        """
        self._driver.check()
        every = [*self._tap.named_of_images(), *self._tap.named()]
        return [one.name for one in every if pattern is None or fnmatchcase(one.name, pattern)]


class TapCalls(_Named):
    """LLM's calls of intermediate values."""

    def tap(self, prompts: Prompts, names: Wanted) -> list[dict[str | int, NDArray[np.float32]]]:
        """What the model computes on the way: any tensor inside it, for every token of a prompt.

        The prompt runs once more, beside what the engine has in flight, operation by operation; the values are those of a step,
        bit for bit, rounded as the engine's activations are.

        Args:
            prompts: As in `generate`.
            names: Names of values (`tap_names` lists them), numbers of operations, or several of these.

        Returns:
            A dict for each prompt: what was asked for, float32 [tokens, width]. What a tower computes of images has rows of all
            images of the prompt, one after another.

        Raises:
            InvalidRequestError: A name that there is not, or a prompt that is empty or too long.
            EngineBusyError: Another thread uses the engine, or the weights are being updated.
            WeightsMissingError: The weights are incomplete.
            EngineClosedError: It was closed.
        """
        self._driver.check()
        return self._tap.run(prompts, names)


class AsyncTapCalls(_Named):
    """AsyncEngine's calls of intermediate values."""

    if TYPE_CHECKING:
        _driver: ThreadDriver

    async def tap(self, prompts: Prompts, names: Wanted) -> list[dict[str | int, NDArray[np.float32]]]:
        """What the model computes on the way, as `LLM.tap`. Each prompt runs between two steps; the event loop goes on.

        Args:
            prompts, names: As in `LLM.tap`; a list of prompts is possible here, too.

        Returns:
            As in `LLM.tap`.

        Raises:
            InvalidRequestError, EngineBusyError, WeightsMissingError, EngineClosedError: As in `LLM.tap`.
            EngineDeadError: A fault has killed the engine.
        """
        self._driver.check_alive()
        return await beside(self._tap.run, prompts, names)


def _listed(wanted: object) -> list[str | int]:
    """A list of names and numbers of operations, from a sequence or a single one."""
    chosen: list[Any] = list(wanted) if isinstance(wanted, Sequence) and not isinstance(wanted, str) else [wanted]
    for one in chosen:
        if isinstance(one, bool) or not isinstance(one, str | int):
            message = f"names must be a name, the number of an operation, or a list of these, got {one!r}."
            raise InvalidRequestError(message, parameter="names", value=wanted)
    return chosen
