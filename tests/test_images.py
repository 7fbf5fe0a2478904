"""helpers.data.images: the same upright 8-bit RGB whatever the file, and one line with the path for every file
that has none."""

from __future__ import annotations

import gzip
import multiprocessing
import os
import pickle
import struct
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
from messy import encoded, picture, png, put
from PIL import Image, ImageFile, ImageOps

from helpers.data import images
from helpers.data.images import DECODERS, ImageError, check_image, looks_like, read_image, torchcodec_reason
from helpers.errors import InputError

needs_torchcodec = pytest.mark.skipif(torchcodec_reason() is not None, reason=str(torchcodec_reason()))
WRITABLE = [
    ("JPEG", "RGB", {}), ("JPEG", "RGB", {"progressive": True}), ("JPEG", "L", {}), ("JPEG", "CMYK", {}), ("MPO", "RGB", {}),
    ("PNG", "RGB", {}), ("PNG", "P", {}), ("PNG", "1", {}), ("PNG", "RGBA", {}), ("GIF", "P", {}), ("BMP", "RGB", {}),
    ("TIFF", "RGB", {}), ("TIFF", "L", {"compression": "tiff_lzw"}), ("TIFF", "RGB", {"compression": "tiff_adobe_deflate"}),
    ("WEBP", "RGB", {}), ("WEBP", "RGBA", {"lossless": True}), ("PPM", "RGB", {}), ("TGA", "RGB", {}),
    ("ICO", "RGBA", {"sizes": [(60, 40), (31, 23)]}), ("JPEG2000", "RGB", {}), ("AVIF", "RGB", {}),
]  # fmt: skip


@pytest.fixture
def file(tmp_path):
    return lambda data, name="x.jpg": put(tmp_path / name, data)


def written(kind, mode, options, **size):
    try:
        return encoded(picture(mode=mode, **size), kind, **options)
    except (KeyError, OSError) as e:  # a Pillow built without this codec
        pytest.skip(f"Pillow cannot write {kind}: {e}")


def one(path):
    """The colours of an image of few pixels, as a list of tuples."""
    return [tuple(pixel) for pixel in read_image(path).reshape(-1, 3).tolist()]


@pytest.mark.parametrize("kind, mode, options", WRITABLE)
def test_every_kind_gives_upright_rgb_and_equal_bits(file, kind, mode, options):
    path = file(written(kind, mode, options))
    a = read_image(path)
    assert a.shape == (40, 60, 3) and a.dtype == np.uint8 and a.flags.writeable
    expected = np.asarray(picture())
    if mode == "RGBA" or mode == "RGB":
        assert np.abs(a.astype(int) - expected).mean() < 12  # lossy codecs, but the right picture
    assert np.array_equal(a, read_image(path, decoder="torchcodec"))
    small = read_image(path, 16)
    assert small.shape == (16, 16, 3) and np.array_equal(small, read_image(path, 16, "torchcodec"))
    assert np.array_equal(small, np.asarray(Image.fromarray(a).resize((16, 16), Image.Resampling.BILINEAR)))
    info = check_image(path)
    assert info == images.ImageInfo({"MPO": "JPEG"}.get(kind, kind), 60, 40, 1)  # an MPO of one picture is a JPEG


@pytest.mark.parametrize("kind, mode, options", WRITABLE)
def test_a_file_cut_anywhere_is_an_error_or_has_all_its_pixels(file, kind, mode, options):
    data = written(kind, mode, options, width=31, height=23)
    path = file(data)
    whole, small = read_image(path), read_image(path, 4, "scaled")
    for cut in sorted({1, 5, 20, *np.linspace(40, len(data) - 40, 12).astype(int), *range(len(data) - 12, len(data))}):
        path.write_bytes(data[:cut])
        for decoder in DECODERS:
            try:
                a = read_image(path, 4 if decoder == "scaled" else None, decoder)
            except ImageError as e:
                assert str(e).startswith(f"{path}: ") and "\n" not in str(e)
                lost = True
            else:
                lost = False
                assert np.array_equal(a, small if decoder == "scaled" else whole)
                assert len(data) - cut < 40 or kind == "ICO", "pixels cannot all be there"
        try:
            check_image(path)
        except ImageError:
            assert lost
        else:
            assert not lost


def test_truncation_is_found_even_when_the_process_wants_it_hidden(file, monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    path = file(encoded(picture())[:-200])
    for decoder in DECODERS:
        with pytest.raises(ImageError, match="damaged or cut short"):
            read_image(path, 8, decoder)
    errors = []

    def many():
        for _ in range(30):
            try:
                read_image(path)
                errors.append("read")
            except ImageError:
                pass

    threads = [threading.Thread(target=many) for _ in range(4)]
    [t.start() for t in threads], [t.join() for t in threads]
    assert not errors and ImageFile.LOAD_TRUNCATED_IMAGES is True  # and the setting is theirs again


@pytest.mark.parametrize("value", range(10))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP", "MPO"])
def test_exif_orientation(file, kind, value):
    exif = Image.Exif()
    exif[0x0112] = value
    path = file(written(kind, "RGB", {"exif": exif} | ({"lossless": True} if kind == "WEBP" else {})))
    with Image.open(path) as image:
        expected = np.asarray(ImageOps.exif_transpose(image))
    turned = value in range(2, 9)
    for decoder in ("pillow", "torchcodec"):
        assert np.array_equal(read_image(path, decoder=decoder), expected)
    assert expected.shape[:2] == ((60, 40) if value >= 5 and turned else (40, 60))
    close = np.abs(read_image(path, 12, "scaled").astype(int) - read_image(path, 12)).mean()
    assert close < 6 and check_image(path).orientation == (value if turned else 1)


def test_broken_exif_is_ignored_and_decoders_agree(file):
    exif = Image.Exif()
    exif[0x0112] = 1
    data, rng = encoded(picture(), exif=exif), np.random.default_rng(0)
    at = data.index(b"Exif\0\0") + 6
    for _ in range(60):
        bad = bytearray(data)
        for i in rng.integers(at, at + len(exif.tobytes()) - 6, 4):
            bad[i] = rng.integers(256)
        path = file(bytes(bad))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert np.array_equal(read_image(path), read_image(path, decoder="torchcodec"))


@pytest.mark.parametrize("raised", [SyntaxError("not a TIFF"), struct.error(), KeyError(1), ValueError()])
def test_exif_that_cannot_be_parsed_is_ignored(file, monkeypatch, raised):
    def getexif(self):
        raise raised

    monkeypatch.setattr(Image.Image, "getexif", getexif)
    assert read_image(file(encoded(picture()))).shape == (40, 60, 3)


def test_the_truncation_setting_outlives_threads_and_forks(file, monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with images._strict_pillow():
        with images._strict_pillow():
            assert ImageFile.LOAD_TRUNCATED_IMAGES is False
        assert ImageFile.LOAD_TRUNCATED_IMAGES is False  # one is still inside
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True
    if "fork" in multiprocessing.get_all_start_methods():
        path = file(encoded(picture()))
        with images._lock:  # as if a thread were inside while a worker starts
            child = multiprocessing.get_context("fork").Process(target=read_image, args=(path,))
            child.start()
            child.join(10)
            code = child.exitcode
            child.kill()
        assert code == 0


@needs_torchcodec
def test_unexpected_pixels_from_torchcodec_are_not_used(file, monkeypatch):
    import torch
    import torchcodec.decoders

    monkeypatch.setattr(torchcodec.decoders, "decode_jpeg", lambda *a, **k: torch.zeros(3, 60, 40, dtype=torch.uint8))
    path = file(encoded(picture()))
    assert np.array_equal(read_image(path, decoder="torchcodec"), read_image(path))


@needs_torchcodec
@pytest.mark.parametrize("size", [(1, 1), (1, 50), (50, 1), (17, 31), (64, 64), (129, 65)])
def test_torchcodec_is_used_and_gives_the_same_bits(file, size, monkeypatch):
    used, real = [], images._by_torchcodec
    monkeypatch.setattr(images, "_by_torchcodec", lambda *a: used.append(real(*a)) or used[-1])
    for mode in ("RGB", "L"):
        for options in (
            {"quality": 30},
            {"quality": 92, "subsampling": 0},
            {"progressive": True},
            {"keep_rgb": mode == "RGB"},
        ):
            path = file(encoded(picture(*size, mode=mode), **options))
            assert np.array_equal(read_image(path), read_image(path, decoder="torchcodec"))
    assert len(used) == 8 and all(image is not None for image in used)


def test_torchcodec_that_does_not_load_falls_back(file):
    path = file(encoded(picture()))
    for loader, words in (("None", "not installed"), ("Broken()", "does not load: libav is missing")):
        code = f"""if True:
            import sys
            class Broken:
                def __getattr__(self, name): raise RuntimeError("libav is missing\\nand more")
            if {loader} is None:
                class Finder:
                    def find_spec(self, name, *rest):
                        if name.split(".")[0] == "torchcodec": raise ModuleNotFoundError(name, name="torchcodec")
                sys.meta_path.insert(0, Finder())
            else:
                import types
                sys.modules["torchcodec"] = types.ModuleType("torchcodec")
                class Loud(types.ModuleType):
                    def __getattr__(self, name): raise RuntimeError("libav is missing\\nand more")
                sys.modules["torchcodec.decoders"] = Loud("torchcodec.decoders")
            from helpers.data.images import read_image, torchcodec_reason
            assert read_image({str(path)!r}, decoder="torchcodec").shape == (40, 60, 3)
            print(torchcodec_reason())"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert words in done.stdout and done.stdout.count("\n") == 1


def test_sixteen_bit_grey_is_scaled_by_its_range(file):
    values = np.array([[0, 128, 129, 30000, 65407, 65535]])
    expected = [(v, v, v) for v in np.round(values[0] / 257).astype(int).tolist()]
    for dtype in ("<u2", ">u2", "i4"):
        assert one(file(encoded(Image.fromarray(values.astype(dtype)), "TIFF"), "x.tif")) == expected
    assert one(file(encoded(Image.fromarray(values.astype("<u2")), "PNG"), "x.png")) == expected
    assert one(file(b"P5 6 1 65535\n" + values.astype(">u2").tobytes(), "x.pgm")) == expected
    white_is_zero = encoded(Image.fromarray(values.astype("<u2")), "TIFF", tiffinfo={262: 0})
    assert one(file(white_is_zero, "x.tif")) == [(255 - r, 255 - g, 255 - b) for r, g, b in expected]


def test_a_twelve_bit_tiff_is_white_at_4095(file):
    tags = [
        (256, 4, 2),
        (257, 4, 1),
        (258, 3, 12),
        (259, 3, 1),
        (262, 3, 1),
        (273, 4, 122),
        (277, 3, 1),
        (278, 4, 1),
        (279, 4, 3),
    ]
    ifd = struct.pack("<H", len(tags)) + b"".join(
        struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags
    )
    data = (b"II*\0" + struct.pack("<I", 8) + ifd + bytes(4)).ljust(122, b"\0") + bytes(
        [0x80, 0x0F, 0xFF]
    )  # 2048, 4095
    assert one(file(data)) == [(128, 128, 128), (255, 255, 255)]


@pytest.mark.parametrize(
    "dtype, value, words", [("i4", 70000, "70000"), ("i4", -1, "-1"), ("f4", 0.5, "floating-point")]
)
def test_pixels_without_a_known_white_are_refused(file, dtype, value, words):
    path = file(encoded(Image.fromarray(np.full((2, 2), value, dtype)), "TIFF"), "x.tif")
    with pytest.raises(ImageError, match=words) as e:
        read_image(path)
    assert "save it with 8 or 16 bits" in e.value.reason
    with pytest.raises(ImageError):
        check_image(path)


def test_sixteen_bit_colour_and_transparent_colours_of_any_depth(file):
    deep = struct.pack(">9H", 0, 0, 0, 30000, 30000, 30000, 65535, 0, 0)
    black, white, grey, red = (0, 0, 0), (255, 255, 255), (117, 117, 117), (255, 0, 0)
    assert one(file(png(3, 1, 16, 2, [deep]))) == [black, grey, red]
    assert one(file(png(3, 1, 16, 2, [deep], (b"tRNS", struct.pack(">3H", 30000, 30000, 30000))))) == [
        black,
        white,
        red,
    ]
    shallow = png(3, 1, 8, 2, [bytes([0, 0, 0, 7, 8, 9, 255, 0, 0])], (b"tRNS", struct.pack(">3H", 7, 8, 9)))
    assert one(file(shallow)) == [black, white, red]
    for bits, row, key in [(1, 0b00100000, 0), (2, 0b00011100, 1), (4, 0x05, 5), (8, None, 5), (16, None, 5)]:
        data = bytes([row, 0xF0]) if row is not None else struct.pack(">3B" if bits == 8 else ">3H", 0, 5, 2**bits - 1)
        result = one(file(png(3, 1, bits, 0, [data], (b"tRNS", struct.pack(">H", key)))))
        assert result == ([white, white, white] if bits == 1 else [black, white, white]), bits
    alpha = struct.pack(">12H", 0, 0, 0, 65535, 30000, 30000, 30000, 65535, 0, 0, 0, 0)
    assert one(file(png(3, 1, 16, 6, [alpha]))) == [black, grey, white]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "RGBa", "P", "GIF"])
def test_transparency_is_laid_over_white(file, mode):
    drawing = Image.new("RGBA", (3, 1))  # black ink on a clear ground whose hidden colour is black
    drawing.putpixel((0, 0), (0, 0, 0, 255))
    drawing.putpixel((1, 0), (0, 0, 0, 128))
    if mode == "GIF":
        drawing.putpixel((1, 0), (0, 0, 0, 255))
    elif mode == "P":
        drawing = drawing.quantize(4)
    elif mode == "PA":
        alpha, drawing = drawing.getchannel("A"), drawing.convert("L").convert("P").convert("PA")
        drawing.putalpha(alpha)
    elif mode == "LA":
        drawing = drawing.convert("LA")
    data = encoded(drawing, {"RGBa": "TIFF", "GIF": "GIF", "PA": "TIFF"}.get(mode, "PNG"))
    if mode == "RGBa":  # the tag that says: colours are multiplied by alpha
        data = data.replace(struct.pack("<HHIHH", 338, 3, 1, 2, 0), struct.pack("<HHIHH", 338, 3, 1, 1, 0))
    path = file(data)
    with Image.open(path) as stored:
        assert stored.mode == {"GIF": "P", "RGBa": "RGBA"}.get(mode, mode)
    ink, half, ground = (pixel[0] for pixel in one(path))
    assert ink == 0 and ground == 255 and (half == 0 if mode == "GIF" else 126 <= half <= 128)


def test_colour_spaces(file):
    assert one(file(encoded(Image.new("CMYK", (1, 1), (0, 255, 255, 0)), quality=100)))[0][0] > 250
    lab = Image.frombytes("LAB", (2, 1), bytes([138, 81, 70, 255, 0, 0]))  # red and white, a and b signed
    red, white = one(file(encoded(lab, "TIFF")))
    assert red[0] > 245 and max(red[1:]) < 12 and min(white) > 252
    assert one(file(encoded(Image.new("YCbCr", (1, 1), (76, 85, 255)), "TIFF")))[0][0] > 250


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_the_first_frame_is_taken(file, kind):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
    path = file(encoded(frames[0], kind, save_all=True, append_images=frames[1:]))
    assert one(path)[0][0] > 200 and one(path)[0][2] < 60


def test_thin_and_tiny_images(file):
    for size in [(1, 1), (1, 3000), (3000, 1)]:
        path = file(encoded(picture(*size), "PNG"))
        assert all(read_image(path, 8, decoder).shape == (8, 8, 3) for decoder in DECODERS)


def test_huge_images_keep_pillows_limit_without_a_warning(file, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5000)
    path = file(encoded(picture(90, 80), "PNG"))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert read_image(path).shape == (80, 90, 3)
        warnings.simplefilter("error")
        assert read_image(path, 8).shape == (8, 8, 3)
    assert not seen and Image.MAX_IMAGE_PIXELS == 5000
    with pytest.raises(ImageError, match=r"too large: .*limit.*make it smaller"):
        read_image(file(encoded(picture(110, 100), "PNG")))


JPEG = encoded(picture())
BAD = {
    "empty": (b"", "is empty"),
    "html": (b"\n<!doctype HTML><p>404", "an HTML page"),
    "gzip": (gzip.compress(JPEG), "a gzip file"),
    "text": ("hello wörld, this is no picture".encode(), "a text file"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
    "sidecar": (b"\0\5\x16\7\0\2\0\0Mac OS X" + bytes(60), "macOS sidecar"),
    "svg": (b'<?xml version="1.0"?><svg></svg>', "SVG"),
    "zeros": (bytes(5000), "unfinished download"),
    "heic": (struct.pack(">I", 24) + b"ftypheic" + bytes(200), "pillow-heif"),
    "pdf": (b"%PDF-1.7 ...", "PDF"),
    "noise": (bytes(np.random.default_rng(1).integers(0, 256, 999, np.uint8)), "not an image"),
    "header only": (JPEG[:20], "a JPEG file with a damaged header"),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n%%EOF\n", "EPS, not a photo"),
    "bad png": (png(3, 1, 8, 0, [b"abc"])[:-30] + b"xx" + png(3, 1, 8, 0, [b"abc"])[-28:], "damaged"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_say_what_they_are(file, name):
    data, words = BAD[name]
    path = file(data)
    for decoder in DECODERS:
        with pytest.raises(ImageError) as e:
            read_image(path, 8, decoder)
        assert words in e.value.reason and str(e.value) == f"{path}: {e.value.reason}" and e.value.path == str(path)
    with pytest.raises(ImageError):
        check_image(path)


def test_no_plugin_error_escapes(file):
    rng = np.random.default_rng(0)
    for kind, mode, options in WRITABLE:
        if kind in ("TIFF", "AVIF"):  # their C libraries print to stderr; tried at length by hand
            continue
        data = written(kind, mode, options)
        for _ in range(12):
            bad = bytearray(data)
            for i in rng.integers(0, min(400, len(data)), 3):
                bad[i] = rng.integers(256)
            path, results = file(bytes(bad)), []
            for decoder in ("pillow", "torchcodec"):
                try:
                    results.append(read_image(path, 8, decoder).tobytes())
                except ImageError:
                    results.append(None)
            assert results[0] == results[1]


@pytest.mark.parametrize(
    "raised", [MemoryError(), struct.error("x"), OverflowError("y\x1bz\nmore"), KeyError("k"), OSError(5, "I/O")]
)
def test_any_exception_of_a_plugin_is_translated(file, monkeypatch, raised):
    def load(self):
        raise raised

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    with pytest.raises(ImageError) as e:
        read_image(file(encoded(picture(), "BMP")))
    assert str(e.value).isprintable() and ("memory" in str(e.value)) == isinstance(raised, MemoryError)


def test_paths_that_are_no_files(tmp_path):
    def reason(path):
        with pytest.raises(ImageError) as e:
            read_image(path)
        assert str(e.value).isprintable()
        str(e.value).encode()
        return e.value.reason

    assert "does not exist" in reason(tmp_path / "no.jpg") and "is a folder" in reason(tmp_path)
    assert "does not exist" in reason(os.fsencode(tmp_path) + b"/\xff\nodd\x1b.jpg")
    assert reason("nul\0.jpg")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "fifo.jpg")
        assert "not a regular file" in reason(tmp_path / "fifo.jpg")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_no_permission(file):
    path = file(JPEG)
    path.chmod(0)
    with pytest.raises(ImageError, match="no permission"):
        read_image(path)


def test_odd_names_are_read_and_errors_travel_between_processes(tmp_path):
    path = os.fsencode(tmp_path) + b"/\xff.jpg"
    with open(path, "wb") as f:
        f.write(JPEG)
    assert read_image(path).shape == (40, 60, 3)
    with pytest.raises(ImageError) as e:
        read_image(tmp_path)
    copy = pickle.loads(pickle.dumps(e.value))
    assert (str(copy), copy.path, copy.reason) == (str(e.value), e.value.path, e.value.reason)
    assert isinstance(ImageError("Caught ImageError in worker 0"), InputError)


def test_wrong_arguments(file):
    path = file(JPEG)
    with pytest.raises(InputError, match="choose one of"):
        read_image(path, decoder="opencv")
    for size in (0, -3):
        with pytest.raises(InputError, match="size"):
            read_image(path, size)


def test_looks_like():
    assert looks_like(JPEG[:64]) == ("a JPEG file", True)
    for text in (
        "BMW cars and more of them",
        "P1 is a plan",
        "RIFF is no WEBP",
        "GIF89 is a year",
        "é" * 40 + "x",
    ):
        assert looks_like(text.encode()[:64]) == ("a text file", False)
    assert looks_like(b"") is None and looks_like(bytes(range(200, 255))) is None


def test_scaled_stays_close_and_import_is_light(file):
    path = file(encoded(picture(330, 270)))
    assert np.abs(read_image(path, 64, "scaled").astype(int) - read_image(path, 64)).mean() < 2.5
    assert not np.array_equal(read_image(path, 64, "scaled"), read_image(path, 64))  # it does take the short cut
    assert np.array_equal(read_image(path, decoder="scaled"), read_image(path))  # no size: a full decode
    code = "import sys, helpers.data.images; sys.exit(bool({'torch', 'numpy', 'PIL', 'torchcodec'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)
