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
import { changeAdapters, largestError, ortPeer, reference, tolerance, webOperators } from "./ortweb.mjs";
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

// copyShared copies what is written to buffers from memory that threads share, which Dawn in Node refuses.
function copyShared() {
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

// serveORT runs an operator of onnxruntime-web.
async function serveORT(operator) {
  await webgpu();
  copyShared();
  changeAdapters(() => true);
  const ort = await import("onnxruntime-web/webgpu");
  ort.env.wasm.numThreads = 1;
  const peer = ortPeer(ort, operator);
  await serve({
    async load(request) {
      await peer.load(request.case);
      await quiet();
      return {};
    },
    run: async ({ calls }) => ({ seconds: await peer.run(calls) }),
    output: async () => ({ sample: Array.from(await peer.output()) }),
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
  const names = webOperators({ causal: true });
  const children = [start("serve-attn", wasm), ...names.map((op) => start("serve-ort", op))];
  const { device } = await children[0].ask({ do: "device" });
  const date = new Date().toISOString().slice(0, 10);
  console.log(`${cpus()[0].model.trim()} · ${cpus().length} CPUs · ${device?.device} · ${date}\n`);
  const head = ["median (minimum) ms, error", "attn", ...names.map((n) => `ORT ${n}`), "ORT's best / attn", "attn's kernel"];
  console.log(`| ${head.join(" | ")} |\n|${" --- |".repeat(head.length)}`);
  const report = [], list = webCases.filter((c) => new RegExp(flags.only).test(c.name));
  for (const c of list) {
    const taking = children.slice(0, 1 + webOperators(c).length);
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
