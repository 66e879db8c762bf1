"""The child process of a conversion: reads the fields of config.json, writes the program, the skeleton and the error."""

import json
import sys

from .convert import Conversion

if __name__ == "__main__":
    request = json.load(sys.stdin)
    found = Conversion(request["config"])
    answer: dict[str, object] = {}
    if request["wants"] == "skeleton":
        answer["skeleton"] = found.skeleton()
    elif found.error is None:
        answer["program"] = found.stored()
    if found.error is not None:
        answer |= {"error": str(found.error), "module": found.error.module, "node": found.error.node}
    print(json.dumps(answer, separators=(",", ":")))
