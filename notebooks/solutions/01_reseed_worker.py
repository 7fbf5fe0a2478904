import numpy as np
from torch.utils.data import get_worker_info


def reseed_worker(worker_id):
    info = get_worker_info()
    # info.dataset is this worker's own copy; info.seed is new in each worker and each time the workers start, and
    # the same when the run is repeated, because the main process drew it from torch's seeded generator.
    info.dataset.rng = np.random.default_rng(info.seed)
