#!/usr/bin/env python3
"""Writes blocks.json: blocks of random bytes and their numbers as the Python package `gguf` reads them.

    pip install gguf==0.19.0 && python make_blocks.py
"""
import json
import pathlib

import gguf
import numpy as np

BLOCKS = 4
SCALES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2],
          "Q6_K": [208], "Q3_K": [108], "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [], "Q2_K": [80, 82],
          "NVFP4": []}
FIRST = {"MXFP4": [[3], [112], [124], [130]],  # first bytes of the blocks
         "NVFP4": [[0, 1, 7, 8], [56, 57, 63, 100], [126, 30, 40, 50], [9, 70, 80, 90]]}


def main():
    random = np.random.default_rng(12)
    cases = []
    for name, places in SCALES.items():
        kind = gguf.GGMLQuantizationType[name]
        _, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = random.integers(0, 256, (BLOCKS, size), dtype=np.uint8)
        for place in places:  # finite, of both signs and of all sizes, one below the normal numbers
            halves = (random.standard_normal(BLOCKS) * [1e-6, 0.01, 1, 100]).astype(np.float16)
            blocks[:, place:place + 2] = halves.view(np.uint8).reshape(BLOCKS, 2)
        if name in FIRST:
            blocks[:, :len(FIRST[name][0])] = FIRST[name]
        numbers = gguf.quants.dequantize(blocks, kind).astype("<f4")
        cases.append({"name": name, "format": int(kind), "blocks": blocks.tobytes().hex(),
                      "numbers": numbers.tobytes().hex()})
    path = pathlib.Path(__file__).with_name("blocks.json")
    path.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")


main()
