"""Runs the ranks of one process, a thread each."""

import threading
from collections.abc import Callable


def run_all(n_ranks: int, work: Callable[[int], None]) -> None:
    """Runs the ranks, one thread each; raises the first failure."""
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(n_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
