"""Writes what Pillow and transformers make of pictures, for the C tests in tests/unit/picture.

    python make_pictures.py --out ../tests/unit/picture --corpus ../tests/fuzz/corpus/picture

resized.inc    resizes of a picture made by a formula (samples.h), by Pillow
prepared.inc   the tiles of transformers' Idefics3 processor that works with Pillow, as bytes
smart.inc      the pictures of its Qwen2-VL processor, without the order of patches
stretched.inc  the pictures of its Gemma 3 processor
lined.inc      the pictures of its Pixtral processor
decoded.inc    small files in several formats and their pixels over white, by Pillow
corpus         the same files, and ones that would be large, for tests/fuzz/fuzz_picture.c
"""

import argparse
import io
import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

try:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil as StretchProcessor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil as Processor
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil as LineProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil as SmartProcessor
except ImportError:  # before version 5
    from transformers import Gemma3ImageProcessor as StretchProcessor
    from transformers import Idefics3ImageProcessor as Processor
    from transformers import PixtralImageProcessor as LineProcessor
    from transformers import Qwen2VLImageProcessor as SmartProcessor

RESIZES = [(40, 30, 20, 15), (20, 15, 57, 33), (64, 64, 64, 31), (33, 64, 80, 64), (300, 7, 11, 5), (5, 5, 1, 1), (1, 1, 9, 4),
           (128, 96, 127, 97), (3, 302, 9, 77), (3, 300, 9, 77), (200, 100, 64, 64), (37, 211, 37, 211)]
PICTURES = [(100, 100), (640, 480), (480, 640), (1000, 100), (100, 1000), (7, 1), (1, 1), (333, 250), (250, 333), (64, 64), (65, 63), (255, 257)]
# longest edge, edge of a tile, whether the picture is divided
FORMS = [(256, 64, True), (64, 64, True), (182, 91, True), (256, 64, False), (182, 91, False)]
# sides of a patch and of the patches that are joined, least and most pixels
SMART_FORMS = [(14, 2, 56 * 56, 28 * 28 * 100), (16, 2, 65536, 4 * 65536), (4, 2, 64, 64 * 64), (14, 1, 56 * 56, 28 * 28 * 800)]
# longest edge, edge of a token
LINE_FORMS = [(1024, 16), (1540, 28), (300, 28)]
SMART_PICTURES = [*PICTURES, (28, 28), (42, 70), (14, 14), (1000, 5), (5, 1000), (4, 600), (980, 700)]


def sample(width, height):
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([(x * 7 + y * 13 + c * 71 + (x * y) // 3) & 255 for c in range(3)], -1).astype(np.uint8)


def sums(array):
    flat = np.asarray(array).reshape(-1).astype(np.uint64)
    return f"{{{flat.sum()}u, {(flat * (np.arange(flat.size, dtype=np.uint64) % 251)).sum()}u}}"


def resizes():
    for width, height, to_width, to_height in RESIZES:
        for number in (1, 2, 3):
            made = Image.fromarray(sample(width, height)).resize((to_width, to_height), number)
            yield f"{{{width}, {height}, {to_width}, {to_height}, {number}, {sums(made)}}},"


def pictures():
    for longest, edge, splits in FORMS:
        processor = Processor(size={"longest_edge": longest}, max_image_size={"longest_edge": edge}, do_image_splitting=splits, resample=1,
                              image_mean=[0.5, 0.4, 0.3], image_std=[0.5, 0.25, 0.2])
        for width, height in PICTURES:
            made = processor([[Image.fromarray(sample(width, height))]], return_row_col_info=True, return_tensors="np")
            values = np.asarray(made["pixel_values"])[0]
            mean, std = (np.array(v).reshape(1, 3, 1, 1) for v in ([0.5, 0.4, 0.3], [0.5, 0.25, 0.2]))
            tiles = np.rint((values * std + mean) * 255).astype(np.uint8)
            assert np.abs((tiles / 255 - mean) / std - values).max() < 1e-5
            yield (f"{{{width}, {height}, {longest}, {edge}, {str(splits).lower()}, {made['rows'][0][0]}, {made['cols'][0][0]}, "
                   f"{len(tiles)}, {sums(tiles)}}},")


def smart():
    for patch, merge, least, most in SMART_FORMS:
        mean, std = np.array([0.48, 0.45, 0.4]), np.array([0.26, 0.25, 0.27])
        processor = SmartProcessor(patch_size=patch, merge_size=merge, min_pixels=least, max_pixels=most, image_mean=list(mean), image_std=list(std))
        for width, height in SMART_PICTURES:
            made = processor(Image.fromarray(sample(width, height)), return_tensors="np")
            _, high, wide = made["image_grid_thw"][0]
            values = np.asarray(made["pixel_values"]).reshape(high // merge, wide // merge, merge, merge, 3, 2, patch, patch)
            assert (values[:, :, :, :, :, 0] == values[:, :, :, :, :, 1]).all()
            values = values[:, :, :, :, :, 0].transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, high * patch, wide * patch)
            mean3, std3 = mean.reshape(3, 1, 1), std.reshape(3, 1, 1)
            tile = np.rint((values * std3 + mean3) * 255).astype(np.uint8)
            assert np.abs((tile / 255 - mean3) / std3 - values).max() < 1e-5
            yield f"{{{width}, {height}, {patch * merge}, {least}, {most}, {wide * patch}, {high * patch}, {sums(tile)}}},"


def stretched():
    for edge in (56, 224, 896):
        processor = StretchProcessor(size={"height": edge, "width": edge}, image_mean=[0.5] * 3, image_std=[0.5] * 3)
        for width, height in PICTURES:
            values = np.asarray(processor(Image.fromarray(sample(width, height)), return_tensors="np")["pixel_values"])[0]
            tile = np.rint((values * 0.5 + 0.5) * 255).astype(np.uint8)
            assert np.abs((tile / 255 - 0.5) / 0.5 - values).max() < 1e-5
            yield f"{{{width}, {height}, {edge}, {sums(tile)}}},"


def lined():
    for longest, edge in LINE_FORMS:
        mean, std = np.array([0.48, 0.45, 0.4]), np.array([0.26, 0.25, 0.27])
        processor = LineProcessor(size={"longest_edge": longest}, patch_size=edge, image_mean=list(mean), image_std=list(std))
        for width, height in PICTURES:
            made = processor(Image.fromarray(sample(width, height)), return_tensors="np")
            values, (high, wide) = np.asarray(made["pixel_values"])[0], made["image_sizes"][0]
            mean3, std3 = mean.reshape(3, 1, 1), std.reshape(3, 1, 1)
            tile = np.rint((values * std3 + mean3) * 255).astype(np.uint8)
            assert np.abs((tile / 255 - mean3) / std3 - values).max() < 1e-5
            yield f"{{{width}, {height}, {longest}, {edge}, {wide}, {high}, {sums(tile)}}},"


def framed(data, local=False):
    """A GIF file whose screen is larger than its frame; `local`: the table of colours is the frame's."""
    table = 3 << ((data[10] & 7) + 1)
    screen, colours, rest = data[:13], data[13:13 + table], data[13 + table:]
    frame = rest.index(b",")
    assert screen[10] & 0x80 and not rest[frame + 9] & 0x80 and (not frame or rest[0] == 0x21)
    screen = screen[:6] + (23).to_bytes(2, "little") + (17).to_bytes(2, "little") + screen[10:]
    description = b"," + (4).to_bytes(2, "little") + (3).to_bytes(2, "little") + rest[frame + 5:frame + 10]
    if local:
        screen = screen[:10] + bytes([screen[10] & 0x78]) + screen[11:]
        description = description[:9] + bytes([description[9] | 0x80 | (data[10] & 7)])
    return screen + (b"" if local else colours) + rest[:frame] + description + (colours if local else b"") + rest[frame + 10:]


def sample_files():
    """Names and bytes of small files."""
    colour = Image.fromarray(sample(23, 17))
    alpha = colour.copy()
    alpha.putalpha(Image.fromarray(sample(23, 17)[:, :, 1]))
    palette = colour.quantize(16)
    see_through = palette.copy()
    see_through.info["transparency"] = 3
    rows = [("png rgb", colour, "PNG", {}), ("png rgba", alpha, "PNG", {}), ("png grey", colour.convert("L"), "PNG", {}),
            ("png grey and alpha", alpha.convert("LA"), "PNG", {}), ("png palette", palette, "PNG", {}),
            ("png palette with alpha", see_through, "PNG", {}), ("png of two colours", colour.convert("1"), "PNG", {}),
            ("jpeg", colour, "JPEG", {"quality": 80}), ("jpeg 4:4:4", colour, "JPEG", {"quality": 80, "subsampling": 0}),
            ("jpeg in scans", colour, "JPEG", {"quality": 80, "progressive": True}), ("jpeg grey", colour.convert("L"), "JPEG", {}),
            ("jpeg of inks", colour.convert("CMYK"), "JPEG", {}), ("webp", colour, "WEBP", {"quality": 80}),
            ("webp without loss", alpha, "WEBP", {"lossless": True, "exact": True}), ("gif", palette, "GIF", {"interlace": 0}),
            ("gif interlaced", palette, "GIF", {"interlace": 1}), ("gif of 256 colours", colour.quantize(256), "GIF", {"interlace": 0}),
            ("gif grey", colour.convert("L"), "GIF", {}), ("gif with transparency", see_through, "GIF", {"interlace": 0}),
            ("gif of three frames", palette, "GIF", {"save_all": True, "append_images": [colour.quantize(8), colour.quantize(4)]})]
    made = []
    for name, image, form, settings in rows:
        out = io.BytesIO()
        image.save(out, form, **settings)
        made.append((name, out.getvalue()))
    for name, image in (("of a frame", palette), ("of a frame with transparency", see_through)):
        out = io.BytesIO()
        image.crop((2, 1, 15, 11)).save(out, "GIF", interlace=1, transparency=image.info.get("transparency"))
        made += [(f"gif {name}", framed(out.getvalue())), (f"gif {name} with its colours", framed(out.getvalue(), local=True))]
    return made


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def bombs():
    """Names and bytes of files that would take much memory or time."""
    small = dict(sample_files())
    png, jpeg, gif = small["png rgb"], small["jpeg"], small["gif"]
    size = struct.pack(">II", 25000, 20000)
    yield "png of 500 megapixels", png[:8] + chunk(b"IHDR", size + png[24:29]) + png[33:]
    packed = zlib.compress(bytes(16 << 20), 9)
    for name, text in ((b"zTXt", b"a\0\0"), (b"iCCP", b"a\0\0"), (b"iTXt", b"a\0\1\0\0\0")):
        yield f"png with a large {name.decode()}", png[:33] + chunk(name, text + packed) + png[33:]
    begin = jpeg.index(b"\xff\xc0")
    yield "jpeg of 500 megapixels", jpeg[:begin + 5] + struct.pack(">HH", 20000, 25000) + jpeg[begin + 9:]
    scans = small["jpeg in scans"]
    last = scans.rindex(b"\xff\xda")
    yield "jpeg of many scans", scans[:last] + scans[last:-2] * 250 + scans[-2:]
    yield "webp of 268 megapixels", b"RIFF\x1e\0\0\0WEBPVP8L\x11\0\0\0\x2f\xff\xff\xff\x0f" + bytes(12)
    yield "gif of 500 megapixels", gif[:6] + struct.pack("<HH", 25000, 20000) + gif[10:]
    out = io.BytesIO()
    Image.new("L", (250, 250)).save(out, "GIF")
    yield "gif of one colour", out.getvalue()
    frame = gif.index(b",", 13 + (3 << ((gif[10] & 7) + 1)))
    yield "gif of clear codes", gif[:frame + 10] + b"\2" + (b"\xff" + bytes([0x24, 0x49, 0x92]) * 85) * 4 + b"\0;"


def corpus(out):
    out.mkdir(parents=True, exist_ok=True)
    for name, data in [*sample_files(), *bombs()]:
        (out / name.replace(" ", "_").replace(":", "")).write_bytes(data)


def files():
    for name, data in sample_files():
        read = Image.open(io.BytesIO(data))
        # Inks go to light at once; all others are laid over white.
        pixels = (read.convert("RGB") if read.mode == "CMYK" else
                  Image.alpha_composite(Image.new("RGBA", read.size, (255, 255, 255)), read.convert("RGBA")).convert("RGB"))
        text = "".join(f"\\x{byte:02x}" for byte in data)
        lines = '"\n "'.join(text[i:i + 88] for i in range(0, len(text), 88))
        yield f'{{"{name}", {len(data)}, 23, 17, {sums(pixels)},\n "{lines}"}},'


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--out", type=Path, required=True)
    ap.add_argument("--corpus", type=Path, required=True)
    args = ap.parse_args()
    out = args.out
    corpus(args.corpus)
    for name, rows in [("resized", resizes()), ("prepared", pictures()), ("smart", smart()), ("stretched", stretched()),
                       ("lined", lined()), ("decoded", files())]:
        (out / f"{name}.inc").write_text("/* Written by training/make_pictures.py. */\n" + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
