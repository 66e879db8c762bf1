"""Makes the core's objects of an engine, or the objects that stand in their place where there are several replicas.

The latter have the same calls (a test compares them), so they pass for the former everywhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from .. import _core
from ..errors import UnsupportedError

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..models import Spec


def make_model(
    config: EngineConfig,
    programs: list[Spec],
    checkpoint: _core.Checkpoint | None,
    options: dict[str, Any],
    on_progress: Callable[[int, int], None] | None,
) -> _core.Model:
    """The model, or the models of `data_parallel_size` replicas.

    Args:
        config: Options with a chosen device.
        programs: One for each rank of a replica.
        checkpoint: The weights; None = dummy weights.
        options: The core's options; `devices` has the ranks of all replicas.
        on_progress: Called with the bytes of weights loaded so far and the total.
    """
    count = config.data_parallel_size
    if count == 1:
        return _core.Model(programs, checkpoint, options, on_progress)
    from .replicas.members import ReplicaModel
    from .replicas.placing import progress_of, replica_options

    each = replica_options(options, count)
    models = [
        _core.Model(programs, checkpoint, own, progress_of(replica, count, on_progress)) for replica, own in enumerate(each)
    ]
    return cast(_core.Model, ReplicaModel(models, [own["devices"] for own in each]))


def make_engine(model: _core.Model, options: dict[str, Any]) -> _core.Engine:
    """The engine of a model, or those of its replicas."""
    models = getattr(model, "models", None)
    if models is None:
        return _core.Engine(model, options)
    from .replicas.members import ReplicaEngine

    return cast(_core.Engine, ReplicaEngine([_core.Engine(one, options) for one in models], options["kv_event_capacity"]))


def thread_of(engine: _core.Engine, max_queued: int) -> _core.EngineThread:
    """What runs an engine for an AsyncEngine."""
    if not hasattr(engine, "engines"):
        return _core.EngineThread(engine, max_queued)
    from .replicas.threads import ReplicaThread

    return cast(_core.EngineThread, ReplicaThread(cast(Any, engine), max_queued))


def notifier_of(thread: _core.EngineThread) -> tuple[_core.Notifier, list[int]]:
    """What tells an event loop of output, and the descriptors that are readable then."""
    if not hasattr(thread, "threads"):
        notifier = _core.Notifier(thread)
        return notifier, [notifier.fileno()]
    from .replicas.threads import ReplicaNotifier

    notifiers = ReplicaNotifier(cast(Any, thread))
    return cast(_core.Notifier, notifiers), notifiers.filenos()


def update_of(
    model: _core.Model, runner: _core.Engine | _core.EngineThread, ordinal: int, drafts: bool = False
) -> _core.WeightUpdate:
    """A transaction over the weights.

    Args:
        model: The model.
        runner: What runs it.
        ordinal: Ordinal of the model's CUDA device; -1: the CPU. Replicas have their own.
        drafts: Whether the model is the drafter of what `runner` runs.
    """
    if not hasattr(model, "models"):
        return _core.WeightUpdate(model, runner, ordinal, drafts)
    from .replicas.update import ReplicaUpdate

    return cast(_core.WeightUpdate, ReplicaUpdate(cast(Any, model), cast(Any, runner)))


def raise_fault_of(thread: _core.EngineThread, number: int) -> None:
    """Raises what killed the replica of a request, if there are replicas and this one is dead."""
    replicas: Any = thread
    if hasattr(thread, "threads"):
        replicas.raise_fault_of(number)


def halt(engine: _core.Engine) -> None:
    """Waits until no replica runs. Without replicas no step runs between two calls."""
    replicas: Any = engine
    if hasattr(engine, "engines"):
        replicas.halt()


def engines_of(engine: _core.Engine) -> tuple[_core.Engine, ...]:
    """The engines of the replicas; the engine itself without replicas."""
    return getattr(engine, "engines", (engine,))


def check_one_device(model: _core.Model) -> None:
    """Refuses a weight group for replicas on several devices."""
    if len({device for own in getattr(model, "devices", ()) for device in own}) > 1:
        raise UnsupportedError(
            "init_weight_group() is not supported yet for replicas on several devices (data_parallel_size); "
            "update the weights from tensors in host memory, buckets of host memory or a directory"
        )
