"""Where images come from: the embedded digits, a reader's folder, or a torchvision data set, all behind one small
interface."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from helpers.data.folders import scan
from helpers.data.images import read_image
from helpers.data.samples import Folder, PathList
from helpers.errors import InputError

DOWNLOADS = {"cifar10": "CIFAR10", "fashionmnist": "FashionMNIST", "imagenette": "Imagenette"}


def data_home() -> Path:
    """The data folder: the environment variable COURSE_DATA, else data/ beside the package."""
    return Path(os.environ.get("COURSE_DATA") or Path(__file__).resolve().parents[2] / "data")


class Source:
    """Images by number. ``size`` pixels square, ``labels`` int64 (N); ``pixels(index)`` gives uint8 S×S×3."""

    size: int
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def pixels(self, index: int) -> np.ndarray:
        raise NotImplementedError

    def name(self, index: int) -> str:
        return f"image {index}"

    def fingerprint(self) -> str:
        raise NotImplementedError


class Files(Source):
    """Image files, decoded and resized each time they are asked for."""

    def __init__(self, root: Path, paths: PathList, labels: np.ndarray, size: int, decoder: str = "pillow"):
        self.root, self.paths, self.size, self.decoder = Path(root), paths, size, decoder
        self.labels = torch.from_numpy(np.asarray(labels, dtype=np.int64))

    def pixels(self, index: int) -> np.ndarray:
        return read_image(self.paths[index], self.size, self.decoder)

    def name(self, index: int) -> str:
        return os.path.relpath(self.paths[index], self.root)

    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"{self.size} {self.decoder}".encode())
        for path in self.paths:
            status = os.stat(path)
            digest.update(
                f"{os.path.relpath(path, self.root)} {status.st_size} {status.st_mtime_ns}\n".encode(
                    errors="surrogateescape"
                )
            )
        return digest.hexdigest()


class Arrays(Source):
    """A uint8 array N×H×W or N×H×W×3 that lies in memory, resized each time it is asked for."""

    def __init__(self, images: np.ndarray, labels, size: int, name: str):
        self.images, self.size, self._name = images, size, name
        self.labels = torch.as_tensor(labels, dtype=torch.int64)

    def pixels(self, index: int) -> np.ndarray:
        from PIL import Image

        image = Image.fromarray(self.images[index]).convert("RGB")
        return np.asarray(image.resize((self.size, self.size), Image.Resampling.BILINEAR))

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self._name} {self.size}".encode() + self.images.tobytes()).hexdigest()


class Pixels(Source):
    """Decoded pixels, uint8 N×S×S×3, in memory or memory-mapped."""

    def __init__(self, pixels: np.ndarray, labels: torch.Tensor):
        self.array, self.labels, self.size = pixels, labels, pixels.shape[1]
        self._flat = torch.from_numpy(pixels).view(len(pixels), -1)

    def pixels(self, index: int) -> np.ndarray:
        return self.array[index]

    def gather(self, indices: torch.Tensor) -> torch.Tensor:
        """uint8 B×S×S×3. ``index_select`` over rows is a plain copy; ``x[indices]`` is several times slower on
        uint8."""
        return self._flat.index_select(0, indices).view(len(indices), self.size, self.size, 3)


class ImageDataset(Dataset):
    """Whole batches of a source for a list of keys (see ``loading.EpochBatches``): (images, int64 labels).

    Without ``transform`` the images are uint8 N×3×S×S, for a BatchTransform on the device; with it float32, made
    one by one.
    """

    def __init__(self, source: Source, transform=None):
        self.source, self.transform = source, transform
        self.in_memory = isinstance(source, Pixels)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: int):
        images, labels = self.__getitems__(np.array([key]))
        return images[0], labels[0]

    def __getitems__(self, keys: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        keys = np.asarray(keys)
        indices = torch.from_numpy(keys % len(self.source))
        labels = self.source.labels[indices]
        if self.transform is not None:
            return torch.stack([self.transform(self._pixels(int(k) % len(self)), int(k)) for k in keys]), labels
        if self.in_memory:
            images = self.source.gather(indices)
        else:
            images = torch.empty(len(keys), self.source.size, self.source.size, 3, dtype=torch.uint8)
            view = images.numpy()
            for row, index in enumerate(indices.tolist()):
                view[row] = self._pixels(index)
        return images.permute(0, 3, 1, 2), labels

    def _pixels(self, index: int) -> np.ndarray:
        try:
            return self.source.pixels(index)
        except InputError as error:
            # One argument and a plain text: an exception that a worker sends home is built anew from just that.
            raise InputError(f"{error} (it could be read before training: was it changed?)") from None
        except Exception as error:
            raise RuntimeError(f"{self.source.name(index)}: {type(error).__name__}: {error}") from error


@dataclass
class ImageData:
    """Training and validation images of one data set, and what was noticed while opening it."""

    name: str
    classes: tuple[str, ...]
    train: Source
    val: Source
    notes: list[str] = field(default_factory=list)
    folder: Folder | None = None


def open_data(
    name: str,
    size: int,
    *,
    decoder: str = "pillow",
    split_seed: int = 0,
    verify: bool = True,
    progress: bool = False,
) -> ImageData:
    """Open 'digits', a folder, or a torchvision data set by name, at ``size`` pixels square.

    A reader's folder is checked image by image before anything trains on it (``verify``); what cannot be read is
    left out and named in ``notes``. Raises InputError, in one line, for everything that cannot be opened.
    """
    if name == "digits":
        from helpers.data.digits import ensure_digits

        return _from_folder("digits", ensure_digits(progress=progress), size, decoder, split_seed, verify=False)
    if name.lower() in DOWNLOADS and not Path(name).exists():
        return _from_torchvision(DOWNLOADS[name.lower()], size, decoder, split_seed)
    if not Path(name).exists():
        known = ", ".join(["digits", *DOWNLOADS.values()])
        raise InputError(f"--data {name}: no such folder; give a folder of class folders, or one of {known}")
    return _from_folder(
        Path(name).resolve().name or "root",
        Path(name),
        size,
        decoder,
        split_seed,
        verify=verify,
        progress=progress,
    )


def _from_folder(name, root, size, decoder, split_seed, *, verify, progress=False) -> ImageData:
    folder = scan(
        root,
        split_seed=split_seed,
        verify=verify,
        progress=progress,
        cache_dir=data_home() / "cache" if verify else None,
    )
    train, val = (Files(root, part.paths, part.labels, size, decoder) for part in (folder.train, folder.val))
    notes = [] if name == "digits" else folder.describe().splitlines()
    return ImageData(name, folder.classes, train, val, notes, folder)


def _from_torchvision(name, size, decoder, split_seed) -> ImageData:
    import torchvision

    home = data_home() / "downloads"
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            if name == "Imagenette":
                for split in ("train", "val"):
                    loaded = torchvision.datasets.Imagenette(
                        home, split=split, size="160px", download=not (home / "imagenette2-160").exists()
                    )
                return _from_folder(
                    "imagenette", Path(loaded._image_root).parent, size, decoder, split_seed, verify=False
                )
            parts = [getattr(torchvision.datasets, name)(home, train=train, download=True) for train in (True, False)]
    except (OSError, RuntimeError) as error:  # URLError is an OSError; a broken archive is a RuntimeError
        reason = str(error).splitlines()[0]
        raise InputError(
            f"--data {name}: could not be downloaded ({reason}); go online once, or use --data digits"
        ) from None
    sources = [Arrays(np.asarray(part.data), part.targets, size, name) for part in parts]
    return ImageData(name.lower(), tuple(parts[0].classes), *sources)
