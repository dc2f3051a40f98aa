// The cases and peers of run.mjs on a GPU.

const f32 = [
  ...[1024, 4096, 8192].map((seq) => ({ seq, dim: 64 })),
  ...[4096, 8192].map((seq) => ({ seq, dim: 128 })),
  ...[80, 96, 256].map((dim) => ({ seq: 8192, dim })),
];

/** gpuCases of the table: one batch of 16 heads, arithmetic in float32 unless the name of a peer says otherwise. */
export const gpuCases = [
  ...f32.map((c) => ({ ...c, dtype: "f32", causal: false })),
  ...[64, 128].map((dim) => ({ seq: 8192, dim, dtype: "f32", causal: true })),
  ...["f16", "bf16"].flatMap((dtype) => [64, 128].map((dim) => ({ seq: 8192, dim, dtype, causal: false }))),
].map((c) => ({ heads: 16, ...c, name: `${c.dtype} ${c.causal ? "causal" : "plain"} S=${c.seq} D=${c.dim}` }));

/** settleSeconds is the computing time before the first measurement that lets the clock rates of a GPU settle. */
export const settleSeconds = 0.5;

/** tensorCores are the cases of PyTorch's flash kernel, which multiplies 16-bit numbers. */
export const tensorCores = (c) => c.dtype !== "f32";

/**
 * notMeasured returns a line with the reason why there is no table for an adapter, of which attn
 * answered that to {"do": "device"}; "" when there is one. A software driver is
 * measured only when it was asked for by its number.
 */
export function notMeasured(answer, adapter) {
  if (answer.error || !answer.device) return `GPU: none, so no table (${answer.error ?? "no answer"})`;
  const { name, device, type } = answer.device;
  if (type === "cpu" && !/^gpu:\d+$/.test(adapter)) {
    return `GPU: none, so no table (${name} is ${device}, a software driver; --gpu ${name} measures it all the same)`;
  }
  return "";
}

/**
 * gpuPeers returns what there is, attn first: start(command, args) starts a program,
 * python is an interpreter whose PyTorch has a CUDA device, undefined without one.
 */
export function gpuPeers(attn, adapter, python, torchPeer, start) {
  const list = [{ name: "attn", start: start(attn, ["-backend", adapter]), takes: () => true }];
  if (!python) return list;
  for (const [route, takes] of [["math", () => true], ["efficient", () => true], ["flash", tensorCores]]) {
    list.push({ name: `PyTorch ${route}`, start: start(python, [torchPeer, "1", "cuda", route]), takes });
  }
  return list;
}
