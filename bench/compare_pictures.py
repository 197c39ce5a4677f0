"""Compares the pixels that keepd prepares of pictures' files with those of the published processors that work with Pillow.

    python compare_pictures.py --driver ../build/dev/tests/golden/picture_tiles FILE...

Pixels under transparent ones are white, which the processors leave to their callers: each gets the file laid over white. Needs
transformers and Pillow before version 13; no weights."""
import argparse
import subprocess
from collections import defaultdict

import numpy as np
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def tiles(made):
    return np.asarray(made["pixel_values"]).reshape(-1, *np.asarray(made["pixel_values"]).shape[-3:])


def unfolded(patch, merge):
    """The picture of Qwen's patches, which are joined in squares and stand twice, as frames of a video."""
    def read(made):
        _, high, wide = made["image_grid_thw"][0]
        values = np.asarray(made["pixel_values"]).reshape(high // merge, wide // merge, merge, merge, 3, 2, patch, patch)
        assert (values[:, :, :, :, :, 0] == values[:, :, :, :, :, 1]).all()
        return values[:, :, :, :, :, 0].transpose(4, 0, 2, 5, 1, 3, 6).reshape(1, 3, high * patch, wide * patch)
    return read


def smart(patch, least, most, **values):
    processor = Qwen2VLImageProcessorPil(patch_size=patch, merge_size=2, min_pixels=least, max_pixels=most, **values)
    return processor, values, (2, 3, 2 * patch, 0, 0, least, most), unfolded(patch, 2)


def lines(longest, edge):
    return PixtralImageProcessorPil(size={"longest_edge": longest}, patch_size=edge, **CLIP), CLIP, (4, 3, edge, 0, longest, 0, 0), tiles


# The processor, its values, the driver's numbers, and how its tiles are read. Bounds are keepd's where they are lower.
FAMILIES = {
    "SmolVLM": (Idefics3ImageProcessorPil(size={"longest_edge": 2048}, max_image_size={"longest_edge": 512}, resample=1, **HALF), HALF,
                (1, 1, 64, 512, 2048, 0, 0), tiles),
    "Gemma 3": (Gemma3ImageProcessorPil(size={"height": 896, "width": 896}, **HALF), HALF, (3, 2, 56, 896, 896, 0, 0), tiles),
    "Qwen2.5-VL": smart(14, 56 * 56, 28 * 28 * 4096, **CLIP),
    "Qwen3-VL": smart(16, 256 * 256, 32 * 32 * 4096, **HALF),
    "Pixtral": lines(1024, 16),
    "Mistral Small 3.1": lines(1540, 28)}


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--driver", required=True)
    ap.add_argument("files", nargs="+")
    args = ap.parse_args()
    worst, equal, least, skipped = defaultdict(float), defaultdict(int), {}, defaultdict(list)
    for path in args.files:
        with Image.open(path) as image:
            image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255)), image.convert("RGBA")).convert("RGB")
        for name, (processor, values, numbers, read) in FAMILIES.items():
            out = subprocess.run([args.driver, *map(str, numbers), path], capture_output=True, check=True).stdout
            head, body = out.split(b"\n", 1)
            if head.startswith(b"refused"):
                skipped[name].append((path, head.decode()))
                continue
            count, height, width = map(int, head.split())
            bytes_ = np.frombuffer(body, np.uint8).reshape(count, 3, height, width)
            mean, std = (np.array(values[f"image_{n}"], np.float32).reshape(1, 3, 1, 1) for n in ("mean", "std"))
            found = ((bytes_ * (1 / 255)).astype(np.float32) - mean) / std
            wanted = read(processor([[image]] if name == "SmolVLM" else image, return_tensors="np"))
            assert found.shape == wanted.shape, (path, name, found.shape, wanted.shape)
            difference = float(np.abs(found - wanted).max())
            worst[name], equal[name] = max(worst[name], difference), equal[name] + (difference < 1e-5)
            if difference >= 1e-5:
                least[name, path] = difference
    print("| family | pictures | pixels within 1e-5 | largest difference |\n|---|---|---|---|")
    for name in FAMILIES:
        print(f"| {name} | {len(args.files) - len(skipped[name])} | {equal[name]} | {worst[name]:.1e} |")
    for (name, path), difference in least.items():
        print(f"{name}: {path}: {difference:.1e}")
    for name, rows in skipped.items():
        for path, why in rows:
            print(f"{name}: {path}: {why}")


if __name__ == "__main__":
    main()
