"""Prints the times of PyTorch's attention on a CUDA device, as JSON: python3 torch_table.py

The cases are those of the table in docs/gpu.md with B=1 and H=16. A time is the median of
the repetitions of one route alone. Without PyTorch, NumPy or a CUDA device it prints
nothing.
"""
import json
import statistics
import sys
import time

try:
    import torch
    from torch_peer import Peer
except ImportError:
    sys.exit()

CASES = [{"dtype": "f32", "dim": dim, "causal": causal} for causal in (False, True) for dim in (64, 128)]
REPETITIONS = 7


def measure(case, route):
    peer = Peer(route)
    peer.load({"case": case})
    times = []
    for n in range(2 + REPETITIONS):
        begin = time.perf_counter()
        peer.call()
        if n >= 2:  # the clock rates have settled
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


if torch.cuda.is_available():
    found = []
    for c in CASES:
        for route in ("math", "efficient"):
            case = {"heads": 16, "seq": 8192, **c}
            try:
                found.append({**case, "route": route, "seconds": measure(case, route)})
            except RuntimeError as e:  # no such kernel, or no memory
                print(f"{case} {route}: {e}", file=sys.stderr)
            torch.cuda.empty_cache()
    print(json.dumps(found))
