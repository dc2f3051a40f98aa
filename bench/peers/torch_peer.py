"""Serves PyTorch's attention: python3 torch_peer.py THREADS

scaled_dot_product_attention where PyTorch has it (2.0), else matmul, softmax,
matmul. The protocol is in serve.mjs, the inputs are those of inputs.mjs.
"""
import json
import math
import re
import sys
import time

import numpy as np
import torch

SAMPLES = 64


def operand(c, stream):
    n = c["heads"] * c["seq"] * c["dim"]
    x = np.arange(n, dtype=np.uint32) * np.uint32(2654435769)
    x += np.uint32((stream + 1) * 1663821211 % 2**32)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(739982445)
    x ^= x >> np.uint32(13)
    x = (x >> np.uint32(8)).astype(np.float32) / np.float32(1 << 22) - np.float32(2)
    return torch.from_numpy(x.reshape(1, c["heads"], c["seq"], c["dim"]))


def status(key):
    with open("/proc/self/status") as f:
        return int(re.search(key + r":\s*(\d+) kB", f.read()).group(1)) * 1024


def extra_memory(call):
    try:
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")  # the peak begins anew
        before = status("VmRSS")
    except OSError:
        return call(), None
    o = call()
    return o, max(0, status("VmHWM") - before)


class Peer:
    def load(self, request):
        c = request["case"]
        self.call = None
        q, k, v = (operand(c, i) for i in range(3))
        if hasattr(torch.nn.functional, "scaled_dot_product_attention"):
            name = "scaled_dot_product_attention"
            sdpa = torch.nn.functional.scaled_dot_product_attention
            self.call = lambda: sdpa(q, k, v, is_causal=c["causal"])
        else:
            name = "matmul, softmax, matmul"
            hidden = None
            if c["causal"]:
                hidden = torch.full((c["seq"], c["seq"]), -math.inf).triu(1)

            def three():
                s = torch.matmul(q * (1 / math.sqrt(c["dim"])), k.transpose(2, 3))
                if hidden is not None:
                    s += hidden
                return torch.matmul(torch.softmax(s, -1), v)

            self.call = three
        o, extra = extra_memory(self.call)
        sample = []
        for j in range(SAMPLES):
            h, s, d = j % c["heads"], (c["seq"] - 1 + j * 7919) % c["seq"], (j * 31) % c["dim"]
            sample.append(float(o[0, h, s, d]))
        return {"extra": extra, "sample": sample, "version": torch.__version__, "route": name}

    def run(self, request):
        seconds = []
        for _ in range(request["calls"]):
            begin = time.perf_counter()
            self.call()
            seconds.append(time.perf_counter() - begin)
        return {"seconds": seconds}


torch.set_num_threads(int(sys.argv[1]))
peer = Peer()
with torch.no_grad():
    for line in sys.stdin:
        try:
            request = json.loads(line)
            answer = {"load": peer.load, "run": peer.run}[request["do"]](request)
        except Exception as err:
            answer = {"error": str(err).split("\n")[0]}
        print(json.dumps(answer), flush=True)
