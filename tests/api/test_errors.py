"""Errors: bases, attributes, pickling."""

import pickle
import re

import pytest

import llmpy
from llmpy import errors

BASES = {
    "InvalidRequestError": (ValueError, ["parameter", "value", "index"]),
    "ChatTemplateError": (errors.InvalidRequestError, ["parameter", "value", "index"]),
    "ConfigError": (ValueError, ["option", "value"]),
    "ModelNotFoundError": (OSError, []),
    "CheckpointError": (ValueError, ["file", "tensor"]),
    "UnsupportedError": (NotImplementedError, []),
    "RequestFailedError": (RuntimeError, ["outputs", "output"]),
    "NonFiniteLogitsError": (ArithmeticError, ["position"]),
    "NoAllowedTokenError": (ValueError, ["position", "fields"]),
    "WeightUpdateError": (ValueError, ["unknown", "missing", "mismatched"]),
    "WeightsMissingError": (errors.WeightUpdateError, ["unknown", "missing", "mismatched"]),
    "DeviceError": (RuntimeError, ["operation", "code"]),
    "EngineDeadError": (errors.DeviceError, ["operation", "code"]),
    "DeviceMemoryError": (MemoryError, ["wanted_bytes", "free_bytes"]),
    "EngineBusyError": (RuntimeError, []),
    "EngineClosedError": (RuntimeError, []),
    "EngineAsleepError": (RuntimeError, []),
    "EngineStuckError": (RuntimeError, []),
    "QueueFullError": (RuntimeError, ["num_waiting"]),
}


@pytest.mark.parametrize("name", BASES)
def test_error_has_base_attributes_and_pickles(name):
    base, attributes = BASES[name]
    cls = getattr(llmpy, name)
    assert issubclass(cls, base) and issubclass(cls, llmpy.LlmpyError)
    plain = cls("message")
    assert str(plain) == "message"
    assert all(getattr(plain, attribute) is None for attribute in attributes)
    full = cls("message", **{attribute: 3 for attribute in attributes})
    copy = pickle.loads(pickle.dumps(full))
    assert type(copy) is cls and str(copy) == "message"
    assert all(getattr(copy, attribute) == 3 for attribute in attributes)


def test_unknown_attribute_is_refused():
    with pytest.raises(TypeError, match="ConfigError has no attribute 'nonsense'"):
        errors.ConfigError("message", nonsense=1)


def test_generation_interrupted_is_a_keyboard_interrupt():
    error = errors.interrupted([1])
    assert type(error) is KeyboardInterrupt is llmpy.GenerationInterrupted  # CPython ends by SIGINT for no subclass
    assert pickle.loads(pickle.dumps(error)).partial == [1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beam_width": 0}, "beam_width must be at least 1 and at most 64, got 0."),
        ({"beam_width": 65}, "beam_width must be at least 1 and at most 64, got 65."),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0."),
        ({"temperature": -1.0}, "temperature must be a finite number, 0 or more, got -1.0."),
        ({"length_penalty": float("nan")}, "length_penalty must be a finite number, got nan."),
        ({"early_stopping": "soon"}, "early_stopping must be True, False or 'never', got soon."),
    ],
)
def test_parameters_of_beam_search(changes, message):
    with pytest.raises(llmpy.InvalidRequestError, match=re.escape(message)) as caught:
        llmpy.BeamSearchParams(**{"beam_width": 4, "max_tokens": 8, **changes})
    assert caught.value.parameter in changes
    with pytest.raises(TypeError, match="beam_width must be an int"):
        llmpy.BeamSearchParams(2.5, 8)
