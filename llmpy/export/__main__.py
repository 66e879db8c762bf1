"""The child process of a conversion: reads the fields of config.json, writes the program or the error."""

import json
import sys

from ..errors import UnsupportedError
from .convert import convert

if __name__ == "__main__":
    try:
        answer: dict[str, object] = {"program": convert(json.load(sys.stdin))}
    except UnsupportedError as error:
        answer = {"error": str(error), "module": error.module, "node": error.node}
    print(json.dumps(answer, separators=(",", ":")))
