from torch.utils.data import get_worker_info


def sharded(items, rank, world_size):
    info = get_worker_info()
    worker, workers = (info.id, info.num_workers) if info else (0, 1)  # the main process is its own only worker
    # Each (rank, worker) pair takes every so-manieth item from a start of its own. With the rank counting fastest,
    # the ranks, too, differ by at most one item; a rank with more batches than another would wait for it for ever.
    for index in range(rank + world_size * worker, len(items), world_size * workers):
        yield items[index]
