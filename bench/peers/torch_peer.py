"""Serves PyTorch's attention: python3 torch_peer.py THREADS [hand | cuda ROUTE]

On the CPU scaled_dot_product_attention where PyTorch has it (2.0), else or by hand matmul,
softmax, matmul, and in cases with "backward" the gradients of q, k and v. On a CUDA device scaled_dot_product_attention by one ROUTE alone:
math, efficient or flash; products of float32 never by TF32; a call ends when the
device is done. The protocol is in serve.mjs, the inputs are those of inputs.mjs.
"""
import json
import math
import re
import sys
import time

import numpy as np
import torch

SAMPLES = 64


DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def only(route):
    """Returns a context in which no other way to compute is taken."""
    if hasattr(torch.nn, "attention"):
        backends = torch.nn.attention.SDPBackend
        one = {"math": backends.MATH, "efficient": backends.EFFICIENT_ATTENTION, "flash": backends.FLASH_ATTENTION}[route]
        return torch.nn.attention.sdpa_kernel([one])
    return torch.backends.cuda.sdp_kernel(
        enable_math=route == "math", enable_mem_efficient=route == "efficient", enable_flash=route == "flash")


def operand(c, stream):
    heads, rows = (c.get("kvHeads", c["heads"]), c.get("keys", c["seq"])) if stream in (1, 2) else (c["heads"], c["seq"])
    shape = c.get("batch", 1), heads, rows, c["dim"]
    x = np.arange(math.prod(shape), dtype=np.uint32) * np.uint32(2654435769)
    x += np.uint32((stream + 1) * 1663821211 % 2**32)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(739982445)
    x ^= x >> np.uint32(13)
    x = (x >> np.uint32(8)).astype(np.float32) / np.float32(1 << 22) - np.float32(2)
    return torch.from_numpy(x.reshape(shape))


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
    def __init__(self, by_hand=False, route=None):
        self.by_hand, self.route = by_hand, route

    def on_device(self, request):
        c = request["case"]
        self.call = None
        q, k, v = (operand(c, i).to("cuda", DTYPES[c.get("dtype", "f32")]) for i in range(3))
        sdpa = torch.nn.functional.scaled_dot_product_attention

        def call():
            with only(self.route):
                o = sdpa(q, k, v, is_causal=c["causal"])
            torch.cuda.synchronize()
            return o

        self.call = call
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        o = call()
        extra = torch.cuda.max_memory_allocated() - before - o.numel() * o.element_size()
        return self.answer(c, [o], max(0, extra), "scaled_dot_product_attention, " + self.route)

    def load(self, request):
        if self.route:
            return self.on_device(request)
        c = request["case"]
        self.call = None
        q, k, v = (operand(c, i).to(DTYPES[c.get("dtype", "f32")]) for i in range(3))
        if hasattr(torch.nn.functional, "scaled_dot_product_attention") and not self.by_hand:
            name = "scaled_dot_product_attention"
            sdpa = torch.nn.functional.scaled_dot_product_attention
            grouped = {"enable_gqa": True} if "kvHeads" in c else {}
            self.call = lambda: sdpa(q, k, v, is_causal=c["causal"], **grouped)
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
        if c.get("backward"):
            forward, inputs, d_o = self.call, [x.requires_grad_() for x in (q, k, v)], operand(c, 3)

            def both():
                with torch.enable_grad():
                    return torch.autograd.grad(forward(), inputs, d_o)

            self.call, name = both, name + ", autograd"
        o, extra = extra_memory(self.call)
        return self.answer(c, o if c.get("backward") else [o], extra, name)

    def answer(self, c, results, extra, route):
        sample = []
        for j in range(SAMPLES):
            b, h, s, d = j * 1009 % c.get("batch", 1), j % c["heads"], (c["seq"] - 1 + j * 7919) % c["seq"], (j * 31) % c["dim"]
            sample.append(float(results[j % len(results)][b, h, s, d]))
        return {"extra": extra, "sample": sample, "version": torch.__version__, "route": route}

    def run(self, request):
        seconds = []
        for _ in range(request["calls"]):
            begin = time.perf_counter()
            self.call()
            seconds.append(time.perf_counter() - begin)
        return {"seconds": seconds}


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    if sys.argv[2:3] == ["cuda"]:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.set_float32_matmul_precision("highest")
    peer = Peer(sys.argv[2:3] == ["hand"], *sys.argv[3:4])
    with torch.no_grad():
        for line in sys.stdin:
            try:
                request = json.loads(line)
                answer = {"load": peer.load, "run": peer.run}[request["do"]](request)
            except Exception as err:
                answer = {"error": str(err).split("\n")[0]}
            print(json.dumps(answer), flush=True)
