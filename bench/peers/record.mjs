// Runs ONNX Runtime on calls of its operators, and writes them with its outputs: node record.mjs CALLS FILE [PROVIDER]
//
// CALLS and FILE are JSON of the form of ONNX Runtime's operator tests (js/web/test/data/ops). Inputs are rounded to three decimals
// first. It also prints the largest difference to the outputs in CALLS. PROVIDER is cpu or webgpu.

import { readFileSync, writeFileSync } from "node:fs";
import { InferenceSession, Tensor, env } from "onnxruntime-node";
import { model, types } from "./onnx.mjs";

const arrays = { float32: Float32Array, int8: Int8Array, int32: Int32Array, int64: BigInt64Array, float16: Uint16Array };

/** half returns the bits of the float16 next to x, the even one of two. */
export function half(x) {
  const sign = x < 0 || Object.is(x, -0) ? 0x8000 : 0, a = Math.abs(x);
  const exponent = Math.max(Math.floor(Math.log2(a || 1e-9)), -14), n = a / 2 ** (exponent - 10);
  const even = n % 1 === 0.5 ? 2 * Math.round(n / 2) : Math.round(n);
  return sign | Math.min(even + ((exponent + 14) << 10), 0x7c00);
}

/** number returns the value of the bits of a float16. */
export function number(bits) {
  const exponent = (bits >> 10) & 31, m = bits & 1023, sign = bits & 0x8000 ? -1 : 1;
  if (exponent === 31) return m ? NaN : sign * Infinity;
  return sign * (exponent ? (1024 + m) * 2 ** (exponent - 25) : m * 2 ** -24);
}

const stored = { float16: half, int64: BigInt };
const tensor = ({ type, dims, data }) => new Tensor(type, arrays[type].from(data, stored[type]), dims);

/** record returns a test with the outputs of ONNX Runtime in its cases. */
async function record(test, provider) {
  const attributes = Object.fromEntries(test.attributes.map(({ name, type, data }) => [name, type === "float" ? { float: data } : data]));
  const cases = [];
  let worst = 0;
  for (const c of test.cases) {
    for (const t of c.inputs.filter((t) => t?.data && t.type.startsWith("float"))) t.data = t.data.map((x) => Math.round(x * 1e3) / 1e3);
    const value = (kind) => (t, i) => (t?.data ? [kind + i, types[t.type], t.dims] : null);
    const spec = { op: test.operator, domain: test.opset.domain, attributes, inputs: c.inputs.map(value("in")), outputs: c.outputs.map(value("out")) };
    const session = await InferenceSession.create(model(spec), { executionProviders: [provider], graphOptimizationLevel: "disabled", logSeverityLevel: 3 });
    const feeds = {};
    c.inputs.forEach((t, i) => { if (t?.data) feeds["in" + i] = tensor(t); });
    const got = await session.run(feeds);
    await session.release();
    const outputs = c.outputs.map((t, i) => {
      if (!t?.data) return t;
      const { type, dims, data } = got["out" + i];
      const list = Array.from(data, type === "float16" ? number : Number);
      if (type !== t.type || String(dims) !== String(t.dims)) throw Error(`output ${i} is ${type} [${dims}], the call has ${t.type} [${t.dims}]`);
      if (attributes.sliding_window_cache) list.forEach((_, j) => { if (!t.data[j]) list[j] = 0; }); // rows without a token
      list.forEach((x, j) => { worst = Math.max(worst, Math.abs(x - t.data[j])); if (Number.isNaN(x)) worst = NaN; });
      return { type, dims, data: type.startsWith("float") ? list.map((x) => Number.isFinite(x) ? Number(x.toPrecision(8)) : String(x)) : list };
    });
    cases.push({ name: c.name, inputs: c.inputs, outputs });
  }
  return [{ ...test, cases }, worst];
}

const [calls, file, provider = "cpu"] = process.argv.slice(2);
const done = [];
for (const test of JSON.parse(readFileSync(calls))) {
  try {
    const [recorded, worst] = await record(test, provider);
    done.push(recorded);
    console.log(`${test.name}: ${worst}`);
  } catch (err) {
    console.log(`${test.name}: ${String(err.message).split("\n")[0]}`);
  }
}
writeFileSync(file, `[${done.map((t) => JSON.stringify(t)).join(",\n")}]\n`);
