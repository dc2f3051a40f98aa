#!/usr/bin/env node
// Measures attn's WebGPU kernels next to those of ONNX Runtime for the web, on one driver and in turns. Both run in
// Node on Dawn, Chromium's WebGPU: attn as a Go program for js/wasm, ONNX Runtime as its package onnxruntime-web.
//
//	cd bench/peers && npm ci --ignore-scripts       # the scripts fetch libraries of onnxruntime-node
//	export VK_ICD_FILENAMES=/usr/lib/chromium/vk_swiftshader_icd.json    # Debian's package chromium; or a GPU's driver
//	node web.mjs [--repetitions 7] [--only REGEXP] [--tune] [--json FILE]
//
// A cell is the median (minimum) time of a call in ms and the largest error of its output against a reference in
// float64. An answer that is wrong has no time. --tune measures the variants of attn's prefill kernel before a case,
// and the case then uses the fastest. Operands and outputs are on the device, and a call ends when the device has.
//
// ONNX Runtime opens a device without subgroups: its flash kernel is wrong where subgroups have 4 invocations.

import { execFileSync } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { cpus, tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";
import { operand } from "./inputs.mjs";
import { model, operators } from "./onnx.mjs";
import { Child, serve } from "./serve.mjs";
import { median } from "./turns.mjs";

const self = fileURLToPath(import.meta.url);

/** webCases are the rows of the table, float32, plain unless the name says otherwise. */
export const webCases = [
  { heads: 4, seq: 512, dim: 64 },
  { heads: 4, seq: 512, dim: 64, causal: true },
  { heads: 4, seq: 1024, dim: 64 },
  { heads: 4, seq: 1024, dim: 64, causal: true },
  { heads: 4, seq: 1024, dim: 128 },
  { heads: 1, seq: 1024, dim: 128 },
  { heads: 8, seq: 1, keys: 2048, dim: 64 },
].map((c) => {
  const name = c.keys ? `decode of ${c.keys} keys` : `${c.causal ? "causal" : "plain"} S=${c.seq}`;
  return { causal: false, ...c, name: `${name} H=${c.heads} D=${c.dim}` };
});

// The largest error that a right answer may have: as in turns.mjs.
const tolerance = 5e-5;

/** reference returns softmax(QKᵀ/√D)·V of a case in float64, as [heads, seq, dim]. */
export function reference(c) {
  const { heads, seq, keys = seq, dim } = c;
  const [q, k, v] = [0, 1, 2].map((stream) => operand(c, stream, "bhsd"));
  const out = new Float64Array(q.length), p = new Float64Array(keys);
  for (let row = 0; row < heads * seq; row++) {
    const first = Math.floor(row / seq) * keys, seen = c.causal ? (row % seq) + 1 : keys;
    let top = -Infinity, sum = 0;
    for (let j = 0; j < seen; j++) {
      let s = 0;
      for (let d = 0; d < dim; d++) s += q[row * dim + d] * k[(first + j) * dim + d];
      top = Math.max(top, (p[j] = s / Math.sqrt(dim)));
    }
    for (let j = 0; j < seen; j++) sum += p[j] = Math.exp(p[j] - top);
    for (let j = 0; j < seen; j++) {
      for (let d = 0; d < dim; d++) out[row * dim + d] += (p[j] / sum) * v[(first + j) * dim + d];
    }
  }
  return out;
}

/** largestError returns the largest absolute difference; Infinity for another length or what is no number. */
export function largestError(got, want) {
  if (got?.length !== want.length) return Infinity;
  return want.reduce((worst, x, i) => (Math.abs(got[i] - x) <= worst ? worst : Math.abs(got[i] - x) || Infinity), 0);
}

// webgpu makes Dawn the navigator.gpu of this process, and keeps the process alive: Dawn's promises do not.
async function webgpu() {
  const { create, globals } = await import("webgpu");
  Object.assign(globalThis, globals);
  Object.defineProperty(globalThis, "navigator", { value: { gpu: create([]) }, configurable: true });
  setInterval(() => {}, 1000);
}

// serveAttn runs bench/peers/attn, compiled for js/wasm.
async function serveAttn(wasm) {
  await webgpu();
  const runner = join(execFileSync("go", ["env", "GOROOT"], { encoding: "utf8" }).trim(), "lib/wasm/wasm_exec_node.js");
  process.argv = [process.argv[0], runner, wasm, "-backend", "gpu"];
  createRequire(import.meta.url)(runner);
}

// hideSubgroups makes adapters without subgroups of all that navigator.gpu returns. It also copies what is written to
// buffers from memory that threads share, which Dawn in Node refuses.
function hideSubgroups() {
  const { gpu } = navigator, request = gpu.requestAdapter.bind(gpu);
  gpu.requestAdapter = async (options) => {
    const adapter = await request(options);
    if (adapter) {
      const value = new Set([...adapter.features].filter((f) => !f.startsWith("subgroup")));
      Object.defineProperty(adapter, "features", { value });
    }
    return adapter;
  };
  const write = GPUQueue.prototype.writeBuffer;
  GPUQueue.prototype.writeBuffer = function (buffer, at, data, ...rest) {
    return write.call(this, buffer, at, data.buffer instanceof SharedArrayBuffer ? data.slice() : data, ...rest);
  };
}

// quiet waits until V8 no longer compiles in the background, for two minutes at most.
async function quiet() {
  for (let n = 0; n < 120; n++) {
    const before = process.cpuUsage();
    await new Promise((done) => setTimeout(done, 1000));
    const { user, system } = process.cpuUsage(before);
    if (user + system < 1e5) return; // a tenth of a processor
  }
}

const elements = (shape) => shape.reduce((a, b) => a * b);

// serveORT runs an operator of onnxruntime-web.
async function serveORT(operator) {
  await webgpu();
  hideSubgroups();
  const ort = await import("onnxruntime-web/webgpu");
  ort.env.wasm.numThreads = 1;
  let session, device, feeds, fetches, c, buffers = [];
  const onDevice = (shape, data) => {
    const size = 4 * elements(shape), { STORAGE, COPY_SRC, COPY_DST } = GPUBufferUsage;
    const buffer = device.createBuffer({ size, usage: STORAGE | COPY_SRC | COPY_DST });
    if (data) device.queue.writeBuffer(buffer, 0, data);
    buffers.push(buffer);
    return ort.Tensor.fromGpuBuffer(buffer, { dataType: "float32", dims: shape, download: () => download(buffer, size) });
  };
  async function download(buffer, size) {
    const host = device.createBuffer({ size, usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST });
    const encoder = device.createCommandEncoder();
    encoder.copyBufferToBuffer(buffer, 0, host, 0, size);
    device.queue.submit([encoder.finish()]);
    await host.mapAsync(GPUMapMode.READ);
    return new Float32Array(host.getMappedRange().slice(0));
  }
  async function call() {
    await session.run(feeds, fetches);
    await device.queue.onSubmittedWorkDone();
  }
  await serve({
    async load(request) {
      c = request.case;
      await session?.release();
      buffers.splice(0).forEach((b) => b.destroy());
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
          feeds[name] = onDevice(shape, rows.slice(-elements(shape))); // with a cache, the last key alone
        }
      }
      for (let n = 0; n < 3; n++) await call();
      await quiet();
      return {};
    },
    async run({ calls }) {
      const seconds = [];
      for (let n = 0; n < calls; n++) {
        const begin = performance.now();
        await call();
        seconds.push((performance.now() - begin) / 1e3);
      }
      return { seconds };
    },
    async output() {
      const data = await fetches.o.getData(), all = new Array(data.length);
      for (let i = 0; i < data.length; i++) { // [seq, heads, dim] as [heads, seq, dim]
        const d = i % c.dim, h = Math.floor(i / c.dim) % c.heads, s = Math.floor(i / c.dim / c.heads);
        all[(h * c.seq + s) * c.dim + d] = data[i];
      }
      return { sample: all };
    },
  });
  process.exit(0);
}

/**
 * turns runs a case on children, alternating single calls, and returns {times, error, path} or {failed} of each.
 * tune asks attn, the first, to measure its variants before.
 */
export async function turns(c, children, repetitions, tune = false) {
  const want = reference(c), results = [];
  for (const [i, child] of children.entries()) {
    const tuned = tune && i === 0 && !c.keys ? await child.ask({ do: "tune", case: c }) : {};
    const loaded = await child.ask({ do: "load", case: c }), { sample, error } = await child.ask({ do: "output" });
    const worst = largestError(sample, want);
    const failed = loaded.error || error || (worst > tolerance ? `WRONG ${worst.toPrecision(2)}` : "");
    results.push({ times: [], error: worst, path: loaded.path, trials: tuned.trials ?? tuned.error, failed });
  }
  for (let n = 0; n < repetitions; n++) {
    for (const [i, r] of results.entries()) {
      if (r.failed) continue;
      const run = await children[i].ask({ do: "run", calls: 1 });
      if (run.error) r.failed = run.error;
      else r.times.push(run.seconds[0] * 1e3);
    }
  }
  return results;
}

/** row writes the results of a case as a line of the table. */
export function row(name, [attn, ...others]) {
  const cell = (r) => r.failed || `${median(r.times).toFixed(1)} (${Math.min(...r.times).toFixed(1)}), ${r.error.toExponential(1)}`;
  const best = Math.min(...others.filter((r) => !r.failed).map((r) => median(r.times)));
  const ratio = attn.failed || best === Infinity ? "-" : `${(best / median(attn.times)).toFixed(2)}x`;
  return `| ${[name, ...[attn, ...others].map(cell), ratio, attn.path].join(" | ")} |`;
}

async function main() {
  const { values: flags } = parseArgs({ options: {
    repetitions: { type: "string", default: "7" },
    only: { type: "string", default: "" },
    tune: { type: "boolean" },
    json: { type: "string" },
  } });
  const at = createRequire(import.meta.url);
  try {
    ["webgpu", "onnxruntime-web/webgpu"].forEach((name) => at.resolve(name));
  } catch {
    return console.log("The packages webgpu and onnxruntime-web are absent: run npm ci --ignore-scripts in bench/peers.");
  }
  const temporary = mkdtempSync(join(tmpdir(), "attn-web-"));
  process.on("exit", () => rmSync(temporary, { recursive: true, force: true }));
  ["SIGINT", "SIGTERM"].forEach((signal) => process.on(signal, () => process.exit(1)));
  const wasm = join(temporary, "attn.wasm");
  const env = { ...process.env, GOOS: "js", GOARCH: "wasm" };
  execFileSync("go", ["build", "-o", wasm, "./attn"], { cwd: join(self, ".."), env, stdio: "inherit" });
  const start = (...args) => new Child(process.execPath, ["--stack-size=8192", self, ...args], { XDG_CACHE_HOME: temporary });
  const names = ["MultiHeadAttention", "GroupQueryAttention"];
  const children = [start("serve-attn", wasm), ...names.map((op) => start("serve-ort", op))];
  const { device } = await children[0].ask({ do: "device" });
  const date = new Date().toISOString().slice(0, 10);
  console.log(`${cpus()[0].model.trim()} · ${cpus().length} CPUs · ${device?.device} · ${date}\n`);
  const head = ["median (minimum) ms, error", "attn", ...names.map((n) => `ORT ${n}`), "ORT's best / attn", "attn's kernel"];
  console.log(`| ${head.join(" | ")} |\n|${" --- |".repeat(head.length)}`);
  const report = [], list = webCases.filter((c) => new RegExp(flags.only).test(c.name));
  for (const c of list) {
    // GroupQueryAttention is causal, which a row of a decode is too.
    const taking = c.causal || c.keys ? children : children.slice(0, 2);
    const results = await turns(c, taking, Number(flags.repetitions), flags.tune);
    if (taking.length < children.length) results.push({ failed: "-" });
    console.log(row(c.name, results));
    if (results[0].trials) console.error(c.name, JSON.stringify(results[0].trials));
    report.push({ ...c, results });
  }
  if (flags.json) writeFileSync(flags.json, JSON.stringify(report, null, 2) + "\n");
  process.exit(0);
}

if (process.argv[2] === "serve-attn") await serveAttn(process.argv[3]);
else if (process.argv[2] === "serve-ort") await serveORT(process.argv[3]);
else if (process.argv[1] === self) await main();
