"""Measures what generation costs through a wrapped model, in turns with PyTorch's.

    python -m benchmarks.generate [--tokens 64] [--repeats 9]

A GPT-2 of two layers and GPT-2's own size; greedy, with and without the cache of keys and values.
"""

import argparse
import copy
import statistics
import time
import warnings

import torch
import transformers

from ortmodule import ORTModule, explain

SIZES = {"2 layers, 64 wide": {"n_layer": 2, "n_head": 4, "n_embd": 64}, "GPT-2 124M": {}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    for name, size in SIZES.items():
        eager = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size)).eval()
        ours = ORTModule(copy.deepcopy(eager))
        ids = torch.randint(0, 50000, (2, 16))
        for cache in (True, False):
            times = {eager: [], ours: []}
            for repeat in range(options.repeats + 1):
                for model, found in times.items():
                    start = time.perf_counter()
                    model.generate(ids, max_new_tokens=options.tokens, do_sample=False, use_cache=cache, pad_token_id=0)
                    if repeat:  # the first captures
                        found.append(time.perf_counter() - start)
            first, second = (statistics.median(found) / options.tokens * 1e3 for found in times.values())
            kept = "with" if cache else "without"
            exports = explain(ours).exports
            print(f"{name}, {kept} cache: eager {first:.2f} ms a token, ours {second:.2f}; exports {exports}")


if __name__ == "__main__":
    main()
