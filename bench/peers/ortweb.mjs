// ONNX Runtime for the web as a peer, and the reference in float64 that its output is compared with. Runs in Node for
// web.mjs and in browsers for the page of cmd/attn-web.

import { element, operand } from "./inputs.mjs";
import { model, operators } from "./onnx.mjs";
import { median, tolerances } from "./turns.mjs";

/** webOperators are those that compute a case. GroupQueryAttention is causal, which a row of a decode is too. */
export const webOperators = (c) => ["MultiHeadAttention", ...(c.causal || c.keys ? ["GroupQueryAttention"] : [])];

/** tolerance is the largest error of a right answer. */
export const tolerance = tolerances.f32[0];

/** everyRow lists the rows of a case's output [heads, seq, dim]. */
export const everyRow = ({ heads, seq }) => Array.from({ length: heads * seq }, (_, row) => row);

/** someRows lists every row of a short case, and 64 rows of a long one. */
export function someRows(c) {
  const all = c.heads * c.seq, few = Math.min(all, 64), stride = Math.floor(all / few);
  if (all * (c.keys ?? c.seq) * c.dim <= 2 ** 26) return everyRow(c);
  return Array.from({ length: few }, (_, i) => i * stride + ((i * 37) % stride));
}

// elements returns n inputs of a stream, beginning with input number first.
function elements(first, n, stream) {
  const data = new Float32Array(n);
  for (let i = 0; i < n; i++) data[i] = element(first + i, stream);
  return data;
}

/** reference returns rows, in order, of softmax(QKᵀ/√D)·V of a case in float64. */
export function reference(c, rows = everyRow(c)) {
  const { seq, keys = seq, dim } = c;
  const out = new Float64Array(rows.length * dim), p = new Float64Array(keys);
  let head = -1, k, v;
  for (const [n, row] of rows.entries()) {
    if (head !== Math.floor(row / seq)) {
      head = Math.floor(row / seq);
      [k, v] = [1, 2].map((stream) => elements(head * keys * dim, keys * dim, stream));
    }
    const q = elements(row * dim, dim, 0), seen = c.causal ? (row % seq) + 1 : keys;
    let top = -Infinity, sum = 0;
    for (let j = 0; j < seen; j++) {
      let s = 0;
      for (let d = 0; d < dim; d++) s += q[d] * k[j * dim + d];
      top = Math.max(top, (p[j] = s / Math.sqrt(dim)));
    }
    for (let j = 0; j < seen; j++) sum += p[j] = Math.exp(p[j] - top);
    for (let j = 0; j < seen; j++) {
      for (let d = 0; d < dim; d++) out[n * dim + d] += (p[j] / sum) * v[j * dim + d];
    }
  }
  return out;
}

/** largestError returns the largest absolute difference; Infinity for another length or what is no number. */
export function largestError(got, want) {
  if (got?.length !== want.length) return Infinity;
  return want.reduce((worst, x, i) => (Math.abs(got[i] - x) <= worst ? worst : Math.abs(got[i] - x) || Infinity), 0);
}

/**
 * changeAdapters makes navigator.gpu return adapters for these options only, and without subgroups where hidden(adapter)
 * holds: ONNX Runtime's flash kernel is wrong where subgroups have 4 invocations.
 */
export function changeAdapters(hidden, options) {
  const { gpu } = navigator, request = gpu.requestAdapter.bind(gpu);
  gpu.requestAdapter = async (asked) => {
    const adapter = await request(options ?? asked);
    if (adapter && hidden(adapter)) {
      const value = new Set([...adapter.features].filter((f) => !f.startsWith("subgroup")));
      Object.defineProperty(adapter, "features", { value });
    }
    return adapter;
  };
}

const count = (shape) => shape.reduce((a, b) => a * b);

/** ortPeer runs an operator of onnxruntime-web, with operands and outputs on the device. */
export function ortPeer(ort, operator) {
  let session, device, feeds, fetches, c, buffers = [];
  const onDevice = (shape, data) => {
    const { STORAGE, COPY_SRC, COPY_DST } = GPUBufferUsage;
    const buffer = device.createBuffer({ size: 4 * count(shape), usage: STORAGE | COPY_SRC | COPY_DST });
    if (data) device.queue.writeBuffer(buffer, 0, data);
    buffers.push(buffer);
    return ort.Tensor.fromGpuBuffer(buffer, { dataType: "float32", dims: shape });
  };
  // Tensor.getData would leave the tensor on the host, where later calls would then write it.
  async function download({ gpuBuffer: buffer, dims }) {
    const size = 4 * count(dims);
    const host = device.createBuffer({ size, usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST });
    const encoder = device.createCommandEncoder();
    encoder.copyBufferToBuffer(buffer, 0, host, 0, size);
    device.queue.submit([encoder.finish()]);
    await host.mapAsync(GPUMapMode.READ);
    const data = new Float32Array(host.getMappedRange().slice(0));
    host.destroy();
    return data;
  }
  const peer = {
    /** load prepares a case and warms up. */
    async load(next) {
      await peer.release();
      c = next;
      const spec = operators[operator](c);
      session = await ort.InferenceSession.create(model(spec), { executionProviders: ["webgpu"], logSeverityLevel: 3 });
      device = await ort.env.webgpu.device; // another one after the last session was released
      feeds = {}, fetches = {};
      for (const [name, , shape] of spec.outputs) fetches[name] = onDevice(shape);
      for (const [name, type, shape] of spec.inputs.filter(Boolean)) {
        const stream = ["q", "k", "v"].indexOf(name.at(-1));
        if (name === "last" || name === "total") {
          feeds[name] = new ort.Tensor("int32", Int32Array.of((c.keys ?? c.seq) - (name === "last" ? 1 : 0)), shape);
        } else if (name.startsWith("past")) { // the cache is updated in place
          feeds[name] = fetches[name.replace("past", "present")];
          device.queue.writeBuffer(feeds[name].gpuBuffer, 0, operand(c, stream, "bhsd"));
        } else {
          const rows = operand(c, stream, spec.layout);
          feeds[name] = onDevice(shape, rows.slice(-count(shape))); // with a cache, the last key alone
        }
      }
      await peer.run(3);
    },
    /** run returns the seconds of each of some calls. */
    async run(calls) {
      const seconds = [];
      for (let n = 0; n < calls; n++) {
        const begin = performance.now();
        await session.run(feeds, fetches);
        await device.queue.onSubmittedWorkDone();
        seconds.push((performance.now() - begin) / 1e3);
      }
      return seconds;
    },
    /** output returns rows of the last output. */
    async output(rows = everyRow(c)) {
      const data = await download(fetches.o), out = new Float32Array(rows.length * c.dim); // of [seq, heads, dim]
      for (const [n, row] of rows.entries()) {
        const at = ((row % c.seq) * c.heads + Math.floor(row / c.seq)) * c.dim;
        out.set(data.subarray(at, at + c.dim), n * c.dim);
      }
      return out;
    },
    async release() {
      await session?.release();
      buffers.splice(0).forEach((b) => b.destroy());
      session = null;
    },
  };
  return peer;
}

// A turn takes about turnSeconds, as the rounds of attn's cases, and at most maxCalls.
const turnSeconds = 0.05, maxCalls = 50;

/** Peer is ONNX Runtime next to attn: the best of its operators, in turns that begin with a case. */
export class Peer {
  #peers = [];

  /** start takes the functions of ortPeer by operator. */
  constructor(start) {
    this.start = start;
  }

  /** load prepares a case on all operators and compares their outputs. */
  async load(c) {
    for (const { peer } of this.#peers) await peer.release().catch(() => {}); // of a lost device
    const rows = someRows(c), want = reference(c, rows);
    this.#peers = webOperators(c).map((operator) => ({ operator, peer: this.start(operator), medians: [] }));
    for (const p of this.#peers) {
      await this.#try(p, async () => {
        await p.peer.load(c);
        p.error = largestError(await p.peer.output(rows), want);
        p.wrong = !(p.error <= tolerance);
        p.calls = Math.min(Math.max(Math.ceil(turnSeconds / median(await p.peer.run(1))), 1), maxCalls);
      });
    }
  }

  async #try(p, run) {
    try {
      await run();
    } catch (err) {
      p.failed = String(err.message ?? err).split("\n")[0];
    }
  }

  /** turn measures each operator whose answer is right. */
  async turn() {
    for (const p of this.#peers) {
      if (!p.wrong && !p.failed) await this.#try(p, async () => p.medians.push(median(await p.peer.run(p.calls))));
    }
  }

  /** result returns the operator, median and error of the fastest; {wrong, error} or {failed} if no answer is right. */
  result() {
    const all = this.#peers.map(({ operator, medians, error, wrong, failed }) => ({ operator, error, wrong, failed, seconds: median(medians) }));
    const right = all.filter((r) => !r.wrong && !r.failed).sort((a, b) => a.seconds - b.seconds);
    return right[0] ?? { ...(all.find((r) => r.wrong) ?? all[0]), seconds: undefined };
  }
}
