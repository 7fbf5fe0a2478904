"""Chapter 01, shares: what each process reads when several read the same list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from helpers.lab.exercises.framework import Mistake, brief, exercise
from helpers.lab.exercises.worlds import loader_process


class _Files(Sequence):
    """Items 'a', 'b', … that are read when indexed by a number, and count that; a slice reads nothing."""

    def __init__(self, names: Sequence[str], reads: list[str] | None = None):
        self.names, self.reads = names, [] if reads is None else reads

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return _Files(self.names[index], self.reads)
        self.reads.append(self.names[index])
        return self.names[index]


# (items, ranks, workers): divides, does not, fewer items than shares, one rank, none but the main process
SHARINGS = (12, 2, 3), (10, 2, 2), (3, 2, 2), (9, 1, 4), (7, 3, 0)


@exercise
def sharded(answer: Callable) -> str:
    """``answer(items, rank, world_size)`` must yield this rank's and loader worker's share of ``items``, reading
    no others."""
    for size, ranks, workers in SHARINGS:
        names = tuple("abcdefghijkl"[:size])
        where = f"{size} items, {ranks} rank{'s' * (ranks > 1)} and num_workers={workers}"
        processes = [(rank, worker) for rank in range(ranks) for worker in range(workers or 1)]
        results = [_share(answer, names, *process, ranks, workers, where) for process in processes]
        shares = dict(zip(processes, (share for share, _ in results), strict=True))
        wrong = _not_exactly_once(names, shares)
        sizes = [len(share) for share in shares.values()]
        if not wrong and max(sizes) == size > 1:
            wrong = (
                "one process takes everything; the others run apart from it and cannot know what it took, they can "
                "only count."
            )
        elif not wrong and max(sizes) - min(sizes) > 1:
            wrong = f"the shares have {', '.join(map(str, sizes))} items; they may differ by one at most."
        elif not wrong and any(len(reads) > len(share) for share, reads in results):
            wrong = "a process reads more than its share to find it; go by positions, and index only those."
        if wrong:
            raise Mistake(f"With {where} {wrong}")
    return "Each item comes once, however many ranks and workers share them, and nobody reads another's."


def _share(answer, names, rank, worker, ranks, workers, where) -> tuple[list[str], list[str]]:
    """What one process yields, and what it reads for that."""
    files, share, ahead = _Files(names), [], False
    try:
        with loader_process(worker, workers):
            result = answer(files, rank, ranks)
            if result is None:
                raise Mistake("It returned None; write `yield` to hand on one item after another.")
            for item in result:
                share.append(item)
                ahead = ahead or len(files.reads) > len(share)
                if item not in names or len(share) > len(names):
                    break
    except (Mistake, NotImplementedError):
        raise
    except Exception as error:
        place = (
            f"With {where}" if workers else "With num_workers=0 `get_worker_info()` is None, as the main process loads;"
        )
        raise Mistake(f"{place} your code raised {brief(error)}") from None
    if share and share[-1] not in names:
        raise Mistake(f"It yields {share[-1]!r}, which is none of the items; yield the items, not where they are.")
    if len(share) > len(names):
        raise Mistake(f"With {where} a share is longer than the whole; end after the last item.")
    if ahead and len(files.reads) == len(share):
        raise Mistake("It reads its whole share before it hands on the first item; `yield` each when it is read.")
    return share, files.reads


def _not_exactly_once(names: tuple, shares: dict[tuple[int, int], list]) -> str:
    """How ``shares``, by (rank, worker), miss giving each name once; empty if they do not."""
    comes = Counter(name for share in shares.values() for name in share)
    missing, repeated = [name for name in names if not comes[name]], [name for name in names if comes[name] > 1]
    if not missing and not repeated:
        return ""
    if not comes:
        return "nothing comes at all."
    several_workers, several_ranks = max(worker for _, worker in shares), max(rank for rank, _ in shares)
    blind_to_worker = several_workers and all(share == shares[rank, 0] for (rank, _), share in shares.items())
    blind_to_rank = several_ranks and all(share == shares[0, worker] for (_, worker), share in shares.items())
    if blind_to_worker and (blind_to_rank or not several_ranks):
        return "every process yields the same items; `rank` and `get_worker_info().id` tell them apart."
    if blind_to_worker:
        return "all workers of a rank yield the same items; share them out by `get_worker_info().id`, too."
    if blind_to_rank:
        return "all ranks yield the same items; share them out by `rank`, too."
    uneven = len(names) % len(shares)
    if uneven and missing and not repeated:
        return (
            f"nobody yields {', '.join(missing)}: {len(names)} does not divide by {len(shares)}, share the rest, too."
        )
    if uneven and not missing and len({len(share) for share in shares.values()}) == 1:
        return f"{', '.join(repeated)} come again to make the shares equal; each item should come once."
    if not repeated:
        return f"nobody yields {', '.join(missing)}; the shares together must be all items."
    owners = [f"worker {worker} of rank {rank}" for (rank, worker), share in shares.items() if repeated[0] in share]
    return (
        f"{repeated[0]} comes from {' and from '.join(dict.fromkeys(owners))}; number the {len(shares)} (rank, worker) "
        f"pairs, each differently, and step by {len(shares)}."
    )
