"""One image file to pixels: always height x width x 3, 8-bit RGB, upright; or an ``ImageError`` with the path and
the reason.

EXIF rotation is applied; an animation gives its first frame; 16-bit grey is scaled by its full range (of 16-bit
colour Pillow keeps the upper 8 bits, at most one level below rounding). Transparency is laid over white: dropping
the alpha channel shows the hidden colour below it, and turns black drawings on a clear ground into solid black.
Where a file does not say what white is (floats, wide integers) it is refused. torchcodec decodes only 8-bit RGB
and grey JPEG, where it gives Pillow's very bits.

Pillow's ``MAX_IMAGE_PIXELS`` is obeyed, never set. ``LOAD_TRUNCATED_IMAGES`` feeds grey garbage to a training, so
it is held at False while a file is decoded, even where the process has set it (some libraries do), and put back
afterwards.
"""

from __future__ import annotations

import functools
import os
import re
import stat
import threading
import warnings
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from helpers.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

DECODERS = ("pillow", "torchcodec", "scaled")

# What a file is by its first bytes. Kinds that Pillow reads, given the plugin; then others, for the message.
_IMAGES = {
    "a JPEG file": rb"\xff\xd8\xff",
    "a PNG file": rb"\x89PNG\r\n\x1a\n",
    "a GIF file": rb"GIF8[79]a",
    "a WebP file": rb"RIFF....WEBP",
    "a TIFF file": rb"II[*+]\0|MM\0[*+]",
    "a BMP file": rb"BM.{12}[\x0c\x28\x34\x38\x40\x6c\x7c]\0\0\0",  # with its second header's length: a text may start with BM
    "a JPEG 2000 file": rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51",
    "an AVIF file": rb"....ftypavi[fs]",
    "a HEIC file": rb"....ftyp(hei|hev|mif1|msf1)",
}
_OTHERS = {
    "a gzip file": rb"\x1f\x8b",
    "a zip file": rb"PK\x03\x04",
    "a PDF or PostScript file": rb"%PDF|%!PS",
    "a macOS sidecar": rb"\0\x05\x16[\0\x07]",
    "a video": rb"....ftyp|\x1aE\xdf\xa3|RIFF....AVI ",
    "an unfinished download (zero bytes only)": rb"\0+\Z",
    "a Git LFS pointer (run git lfs pull)": rb"version https://git-lfs",
    "an HTML page": rb"(?i)(\xef\xbb\xbf)?\s*(<!--.*?-->\s*)*<(!doctype html|html|head|body|script|title)",
    "an SVG drawing": rb"(?i)(\xef\xbb\xbf)?\s*(<\?xml.*?>\s*)?(<!--.*?-->\s*)*<(!doctype svg|svg)",
    "a text file": rb"(\xef\xbb\xbf)?([\t-\r\x1b -~]|[\xc2-\xf4][\x80-\xbf]+)+[\x80-\xff]{0,3}\Z",
}
# Recognised by Pillow, but not photos: decoding would start Ghostscript, ask Windows, or find only a header.
NOT_PHOTOS = {"EPS", "WMF", "BUFR", "GRIB", "HDF5", "MPEG", "IPTC"}
_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}  # EXIF orientation -> PIL.Image.Transpose


def printable(text: object) -> str:
    """``text`` in one line: newlines, control characters and undecodable bytes become escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


class ImageError(InputError):
    """One image file that cannot be used: ``str()`` is ``"<path>: <reason>"`` in one printable line.

    One argument is enough to build it, because the DataLoader rebuilds a worker's exception from its message
    alone.
    """

    def __init__(self, message: str, path: str = "", reason: str = ""):
        super().__init__(message)
        self.path, self.reason = path, reason


class _Refused(Exception):
    """Our own reason; becomes an ImageError where the path is known."""


@dataclass(frozen=True)
class ImageInfo:
    """What the file holds: Pillow's format name, size in pixels before turning, and EXIF orientation (1 =
    upright)."""

    format: str
    width: int
    height: int
    orientation: int


def looks_like(head: bytes) -> tuple[str, bool] | None:
    """What a file is by its first bytes (64 or more), as ("a JPEG file", whether that is a readable kind of
    image)."""
    kinds = (_IMAGES | _OTHERS).items()
    return next(((name, name in _IMAGES) for name, pattern in kinds if re.match(pattern, head, re.DOTALL)), None)


def read_image(path: str | bytes | os.PathLike, size: int | None = None, decoder: str = "pillow") -> np.ndarray:
    """Read one image file as a writable uint8 array, height x width x 3, RGB, upright.

    ``size``: squash to ``size`` x ``size`` pixels (bilinear with antialiasing; the aspect ratio is not kept).
    ``decoder``: ``"pillow"``; ``"torchcodec"``, the same bits, by Pillow where ``torchcodec_reason()`` is not
    None; ``"scaled"``: a JPEG is decoded at 1/2, 1/4 or 1/8 while that is at least 1.5 times ``size``, so that the
    antialiasing still has something to average (on the embedded digits 0.5 of 255 away from a full decode in
    the mean).

    Raises ``ImageError`` for every file that is missing, damaged, cut short, no image, or without a known range of
    values.
    """
    import numpy as np
    from PIL import Image

    if decoder not in DECODERS or (size is not None and size < 1):
        raise InputError(
            f"decoder is {decoder!r}, size {size}: choose one of {', '.join(DECODERS)}, and a size of 1 or more"
        )

    def pixels(image):
        if size is not None:  # grey is resized as one channel: each channel is resized alone, so the result is the same
            image = image.resize((size, size), Image.Resampling.BILINEAR)
        return np.array(image.convert("RGB") if image.mode == "L" else image)

    return _read(path, size, decoder, pixels)[0]


def check_image(path: str | bytes | os.PathLike) -> ImageInfo:
    """Find out whether ``read_image`` would succeed, at less cost, and what the file holds. Raises ``ImageError``.

    A JPEG is decoded at 1/8, which still reads all of its compressed data: a file cut anywhere is found.
    """
    return _read(path, 1, "scaled", lambda image: None)[1]


def _read(path, size, decoder, use):
    """``(use(image), ImageInfo)`` where ``image`` is upright, 8-bit, of mode L or RGB. Every fault is an
    ImageError."""
    path, head = os.fsdecode(path), b""
    try:
        if not stat.S_ISREG(kind := os.stat(path).st_mode):  # opening a FIFO would wait for ever
            raise _Refused("is a folder, not an image" if stat.S_ISDIR(kind) else "is not a regular file")
        with open(path, "rb") as file, _strict_pillow():
            if not (head := file.read(256)):
                raise _Refused("is empty (0 bytes)")
            image, info = _decode(file, head, size, decoder)
            return use(image), info
    except Exception as e:  # Pillow's plugins raise OSError, SyntaxError, struct.error, zlib.error, KeyError …
        reason = printable(_reason(e, head))
        raise ImageError(f"{printable(path)}: {reason}", path, reason) from e


def _decode(file: BinaryIO, head: bytes, size: int | None, decoder: str) -> tuple[Image.Image, ImageInfo]:
    from PIL import Image

    if head[4:8] == b"ftyp":  # HEIC, which Pillow reads with this plugin
        with suppress(ImportError):
            import pillow_heif

            pillow_heif.register_heif_opener()
    image = Image.open(file)
    if image.format in NOT_PHOTOS or 0 in image.size:
        raise _Refused(
            "has no pixels" if 0 in image.size else f"is of kind {image.format}, not a photo: convert it to PNG"
        )
    as_stored = image.size
    depth = re.search(r";(2|4|16)", str(image.tile[0][3])) if image.tile else None
    stored = _orientation(image) if image.format == "TIFF" else 1  # Pillow turns a TIFF itself, while loading
    jpeg = image.format in ("JPEG", "MPO")
    if jpeg and decoder == "scaled" and size is not None:
        image.draft(None, (size * 3 // 2, size * 3 // 2))
    suits = jpeg and decoder == "torchcodec" and image.mode in ("RGB", "L") and torchcodec_reason() is None
    if (upright := _by_torchcodec(file, image) if suits else None) is None:
        image.load()
        upright = _eight_bit(image, int(depth[1]) if depth else 8)
    turn = _orientation(image)
    if turn > 1:
        upright = upright.transpose(Image.Transpose(_TURNS[turn]))
    return upright, ImageInfo(image.format, *as_stored, max(turn, stored))


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(0x0112, 1)
        return int(value) if value in _TURNS else 1
    except Exception:  # broken EXIF raises almost anything; the pixels do not depend on it
        return 1


def _eight_bit(image: Image.Image, depth: int) -> Image.Image:
    """A loaded image as mode L or RGB. ``depth``: bits a channel in the file, which Pillow has scaled to 8 where
    it could."""
    from PIL import Image

    if image.mode == "F":
        raise _Refused("has floating-point pixels, whose range is not known: save it with 8 or 16 bits a channel")
    if image.mode.startswith("I"):
        return _from_integers(image)
    if image.has_transparency_data:
        key = image.info.get("transparency")  # the one transparent colour of a PNG is left in the file's own depth
        if depth == 16 and isinstance(key, tuple):
            image.info["transparency"] = tuple(value >> 8 for value in key)
        elif depth in (2, 4) and image.mode == "L" and isinstance(key, int):
            image.info["transparency"] = key * 255 // (2**depth - 1)
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, "white")
        white.paste(image, mask=image.getchannel("A"))
        return white
    mode = "L" if image.mode in ("1", "L") else "RGB"
    return image if image.mode == mode else image.convert(mode)


def _from_integers(image: Image.Image) -> Image.Image:
    """16-bit grey (mode I;16 in any byte order, or I within its range) to 8 bits by round(v / 257), by a table."""
    import numpy as np
    from PIL import Image

    values = np.asarray(image)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 65535:
        raise _Refused(
            f"has pixel values from {low} to {high}, and no known white: save it with 8 or 16 bits a channel"
        )
    tags = getattr(image, "tag_v2", {}) if image.mode != "I" else {}
    bits = tags.get(258, (16,))[0]
    top = 2**bits - 1 if 8 < bits < 16 else 65535  # a 12-bit TIFF is white at 4095
    table = ((np.arange(65536).clip(max=top) * 255 + top // 2) // top).astype(np.uint8)
    table = 255 - table if tags.get(262) == 0 else table  # "white is zero", which Pillow leaves to us at this depth
    grey, key = table[values], image.info.get("transparency")
    if isinstance(key, int):
        grey[values == key] = 255
    return Image.fromarray(grey)


@functools.cache
def torchcodec_reason() -> str | None:
    """Why torchcodec cannot be used here, in one line, or None where it can. Found out once per process."""
    try:
        from torchcodec.decoders import decode_jpeg  # noqa: F401
    except Exception as e:  # a missing or mismatched native library shows as OSError or RuntimeError, over many lines
        if isinstance(e, ModuleNotFoundError) and e.name == "torchcodec":
            return "torchcodec is not installed"
        return printable(
            f"torchcodec (0.16 or later) does not load: {(str(e).strip() or type(e).__name__).splitlines()[0]}"
        )
    return None


def _by_torchcodec(file: BinaryIO, image: Image.Image) -> Image.Image | None:
    """The stored (not yet turned) pixels of an 8-bit RGB or grey JPEG, or None where Pillow has to decide."""
    import torch
    from PIL import Image
    from torchcodec.decoders import decode_jpeg

    file.seek(0)
    data, at = bytearray(file.read()), 2  # a writable buffer: torch warns about others
    try:
        # torchcodec turns the image by its own reading of EXIF. One rule for all: APP1 becomes APP15, which is
        # skipped.
        while data[at + 1] != 0xDA:
            data[at + 1] = 0xEF if data[at + 1] == 0xE1 else data[at + 1]
            at += 1 if data[at + 1] == 0xFF else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if data[at] != 0xFF:
            return None
        pixels = decode_jpeg(torch.frombuffer(data, dtype=torch.uint8), mode="UNCHANGED")
    except Exception:  # damaged or unusual: Pillow reads it, or finds the reason
        return None
    if pixels.shape != (len(image.getbands()), image.height, image.width):
        return None
    return Image.fromarray(pixels.permute(1, 2, 0).squeeze(2).numpy())


def _reason(error: Exception, head: bytes) -> str:
    from PIL import Image, UnidentifiedImageError

    if isinstance(error, (_Refused, MemoryError)):
        return str(error) if isinstance(error, _Refused) else "does not fit in memory"
    if isinstance(error, Image.DecompressionBombError):
        mpx = [f"{int(n) / 1e6:.0f} Mpx, " for n in re.findall(r"\((\d+) pixels", str(error))]
        return (
            f"is too large: {''.join(mpx)}Pillow's limit is {2 * Image.MAX_IMAGE_PIXELS / 1e6:.0f} Mpx; make it smaller"
        )
    if isinstance(error, (FileNotFoundError, PermissionError)):
        return "does not exist" if isinstance(error, FileNotFoundError) else "may not be read: no permission"
    if getattr(error, "errno", None) is not None:
        return f"cannot be read: {error.strerror}"
    if isinstance(error, UnidentifiedImageError):
        name, image = looks_like(head) or ("not an image that Pillow knows", False)
        if name == "a HEIC file":
            return "is a HEIC photo, which needs pillow-heif: pip install pillow-heif, or convert it to JPEG"
        return f"is {name}" + (" with a damaged header, or of a kind that this Pillow cannot read" if image else "")
    return f"is damaged or cut short ({(str(error).strip() or type(error).__name__).splitlines()[0][:120]})"


_lock, _users, _flag = threading.Lock(), 0, False
if hasattr(os, "register_at_fork"):  # the threads that are inside do not exist after a fork
    os.register_at_fork(after_in_child=lambda: globals().update(_lock=threading.Lock(), _users=0))


@contextmanager
def _strict_pillow():
    """While any thread is inside, truncated files are errors; good ones raise no warning."""
    global _users, _flag
    from PIL import ImageFile

    # A lasting filter instead of catch_warnings, which is not safe among threads and makes all old warnings print
    # again.
    if not warnings.filters or warnings.filters[0][3] != re.compile(r"PIL\."):
        warnings.filterwarnings("ignore", module=r"PIL\.")
    with _lock:
        _flag = _flag if _users else ImageFile.LOAD_TRUNCATED_IMAGES
        _users, ImageFile.LOAD_TRUNCATED_IMAGES = _users + 1, False
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            ImageFile.LOAD_TRUNCATED_IMAGES = bool(_users == 0 and _flag)
