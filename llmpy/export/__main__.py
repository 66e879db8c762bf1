"""The child process of a conversion: reads the fields of config.json; writes the program, skeleton or graph, and the error."""

import json
import sys

from ..errors import UnsupportedError
from .conversion import Conversion, graph


def answer_to(raw: dict[str, object], wants: str) -> dict[str, object]:
    """What the parent asked for, and the error, if there is one."""
    answer: dict[str, object] = {}
    try:
        if wants == "graph":
            answer["graph"] = graph(raw)
        else:
            found = Conversion(raw)
            if wants == "skeleton":
                answer["skeleton"] = found.skeleton()
                found.check()
            else:
                answer["program"] = found.stored()
    except UnsupportedError as error:
        answer |= {"error": str(error), "module": error.module, "node": error.node}
    return answer


if __name__ == "__main__":
    request = json.load(sys.stdin)
    print(json.dumps(answer_to(request["config"], request["wants"]), separators=(",", ":")))
