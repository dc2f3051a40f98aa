// Tests of run.mjs without any peer: node --test. go test runs them if node is installed.

import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import test from "node:test";
import { element, flops, operand, place, sampled, samples, visible } from "./inputs.mjs";
import { gpuCases, gpuPeers, notMeasured } from "./gpu.mjs";
import { model, operators } from "./onnx.mjs";
import { largestError, reference, Peer, someRows, webOperators } from "./ortweb.mjs";
import { row, turns } from "./web.mjs";
import { cases, differs, measure, median, memoryTable, speedTable } from "./turns.mjs";

test("inputs are those of every other program", () => {
  // attn/main_test.go has the same numbers.
  assert.deepEqual([element(0, 0), element(1, 0), element(12345, 1), element(4194303, 2)],
    [-1.3081400394439697, 1.36948823928833, 0.15833115577697754, -1.38590669631958]);
});

test("both layouts hold the same elements", () => {
  const c = { batch: 2, heads: 3, seq: 5, dim: 4, causal: true };
  const a = operand(c, 1, "bhsd"), b = operand(c, 1, "bshd");
  assert.notDeepEqual(a, b);
  assert.deepEqual(sampled(c, a, "bhsd"), sampled(c, b, "bshd"));
  assert.equal(sampled(c, a, "bhsd").length, samples);
  assert.equal(operand({ ...c, keys: 7 }, 1, "bhsd").length, 2 * 3 * 7 * 4);
  assert.deepEqual(place(c, 0), [0, 0, 4, 0]);
});

test("FLOPs are those of visible pairs", () => {
  assert.equal(flops({ heads: 8, seq: 4096, dim: 64, causal: false }), 8 * 4 * 4096 * 4096 * 64);
  assert.equal(visible({ heads: 2, seq: 3, dim: 1, causal: true }), 2 * 6);
  assert.equal(visible({ heads: 1, seq: 5, dim: 1, causal: true, window: 2 }), 1 + 2 + 2 + 2 + 2);
  assert.equal(visible({ batch: 3, heads: 2, seq: 4, keys: 9, dim: 1, causal: false }), 3 * 2 * 4 * 9);
  assert.equal(flops({ heads: 1, seq: 3, dim: 5, causal: true, backward: true }), 3.5 * flops({ heads: 1, seq: 3, dim: 5, causal: true }));
});

// fields reads a protobuf message: [number, value] pairs, messages as bytes.
function fields(bytes) {
  const out = [];
  let at = 0;
  const number = () => {
    let n = 0, scale = 1;
    for (;;) {
      const b = bytes[at++];
      n += (b & 127) * scale;
      if (b < 128) return n;
      scale *= 128;
    }
  };
  while (at < bytes.length) {
    const key = number();
    if (key % 8 === 0) out.push([key >> 3, number()]);
    else {
      assert.equal(key % 8, 2);
      const length = number();
      out.push([key >> 3, bytes.subarray(at, (at += length))]);
    }
  }
  assert.equal(at, bytes.length);
  return out;
}
const all = (bytes, n) => fields(bytes).filter(([f]) => f === n).map(([, v]) => v);
const words = (bytes, n) => all(bytes, n).map((b) => Buffer.from(b).toString());

test("models are ONNX messages", () => {
  for (const [op, spec] of Object.entries(operators)) {
    const s = spec({ heads: 8, seq: 300, dim: 64, causal: true });
    const m = model(s);
    const [graph] = all(m, 7), [node] = all(graph, 1);
    assert.deepEqual(words(node, 4), [op]);
    assert.deepEqual(words(node, 7), [s.domain]);
    assert.deepEqual(words(node, 1), s.inputs.map((v) => (v ? v[0] : "")));
    assert.equal(all(graph, 11).length, s.inputs.filter(Boolean).length);
    assert.equal(all(graph, 12).length, s.outputs.length);
    const attributes = Object.fromEntries(all(node, 5).map((a) => [words(a, 1)[0], all(a, 3)[0]]));
    assert.deepEqual(attributes, s.attributes);
    const opsets = all(m, 8).map((o) => [words(o, 1)[0], all(o, 2)[0]]);
    assert.deepEqual(opsets, [["", 23], ["com.microsoft", 1]]);
    // The shape of q: ValueInfo, type, tensor, shape, dimensions.
    const [type] = all(all(graph, 11)[0], 2), [tensor] = all(type, 1), [shape] = all(tensor, 2);
    assert.deepEqual(all(shape, 1).map((d) => all(d, 1)[0]), s.inputs[0][2]);
  }
});

test("median and samples", () => {
  assert.equal(median([3, 1, 2]), 2);
  assert.equal(median([4, 1]), 2.5);
  assert.equal(differs([1, 2], [1.00001, 2]), "");
  assert.match(differs([1, 3], [1, 2]), /element 1 is 3/);
  assert.match(differs([NaN], [0]), /element 0/);
  assert.equal(differs(undefined, [0]), "no sample");
});

// pretended is a peer whose calls take that many seconds.
function pretended(name, seconds, turns, { sample = [1], error } = {}) {
  return {
    name,
    child: {
      async ask(request) {
        turns.push(`${name}:${request.do}`);
        if (request.do === "load") return { extra: 2 ** 20, sample };
        if (request.do === "peak") return { flops: 1e9 };
        if (error) return { error };
        return { seconds: Array(request.calls).fill(seconds) };
      },
    },
  };
}

test("peers take turns, each with its peak", async () => {
  const turns = [];
  const c = { heads: 1, seq: 10, dim: 25, causal: false }; // 10,000 operations
  const results = await measure(c, [
    pretended("attn", 2e-5, turns), pretended("slow", 4e-5, turns),
    pretended("wrong", 1e-9, turns, { sample: [2] }), pretended("failing", 1, turns, { error: "no memory" }),
  ], 2);
  assert.deepEqual(results.slice(0, 2).map((r) => ({ ...r, gflops: r.gflops.toFixed(3), percent: r.percent.toFixed(1) })),
    [{ gflops: "0.500", percent: "50.0", extra: 2 ** 20 }, { gflops: "0.250", percent: "25.0", extra: 2 ** 20 }]);
  assert.match(results[2].error, /element 0 is 2, attn has 1/);
  assert.equal(results[3].error, "no memory");
  const begins = turns.slice(turns.lastIndexOf("failing:run") + 1);
  assert.deepEqual(begins, ["attn:peak", "attn:run", "attn:peak", "slow:run", "attn:peak", "slow:run", "attn:peak", "attn:run"]);
});

test("clocks settle before the first turn", async () => {
  const turns = [];
  await measure({ heads: 1, seq: 10, dim: 25, causal: false }, [pretended("attn", 1e-3, turns)], 1, 0.5);
  assert.deepEqual(turns.slice(0, 4), ["attn:load", "attn:run", "attn:run", "attn:peak"]);
});

test("what 16 bits round is no difference, a wrong mask is", () => {
  assert.equal(differs([0.0625, 0.5], [0.0627, 0.503], "bf16"), "");
  assert.match(differs([0.0625], [0.0625 + 1e-2], "bf16"), /element 0/);
  assert.match(differs([0.0625], [0.0627]), /element 0/);
});

test("without a GPU a line reports it", () => {
  assert.match(notMeasured({ error: "no usable device" }, "gpu"), /^GPU: none, so no table \(no usable device\)$/);
  const software = { device: { name: "gpu:0", device: "llvmpipe", type: "cpu" } };
  assert.match(notMeasured(software, "gpu"), /software driver; --gpu gpu:0/);
  assert.equal(notMeasured(software, "gpu:0"), "");
  assert.equal(notMeasured({ device: { ...software.device, type: "discrete-gpu" } }, "gpu"), "");
});

test("peers on a GPU", () => {
  const start = (command, args) => () => [command, ...args].join(" ");
  assert.deepEqual(gpuPeers("attn", "gpu", undefined, "t.py", start).map((p) => p.start()), ["attn -backend gpu"]);
  const list = gpuPeers("attn", "gpu:1", "python3", "t.py", start);
  assert.deepEqual(list.map((p) => p.start()),
    ["attn -backend gpu:1", "python3 t.py 1 cuda math", "python3 t.py 1 cuda efficient", "python3 t.py 1 cuda flash"]);
  const takers = (dtype) => list.filter((p) => p.takes({ dtype })).map((p) => p.name);
  assert.deepEqual(takers("f32"), ["attn", "PyTorch math", "PyTorch efficient"]);
  assert.deepEqual(takers("bf16"), list.map((p) => p.name));
  assert.equal(new Set(gpuCases.map((c) => c.name)).size, gpuCases.length);
});

test("usage", () => {
  const run = (flag) => spawnSync(process.execPath, [new URL("run.mjs", import.meta.url).pathname, flag], { encoding: "utf8" });
  const help = run("--help"), wrong = run("--onn");
  assert.equal(help.status, 0);
  assert.match(help.stdout, /^usage: .*--only REGEXP/);
  assert.equal(wrong.status, 2);
  assert.match(wrong.stderr, /^Unknown option '--onn'.*\nusage: /);
});

test("tables", () => {
  const rows = [{ name: "plain S=1 D=1", results: [{ gflops: 100, percent: 85.6, extra: 1.5 * 2 ** 20 }, { gflops: 80, percent: 68, extra: null }, undefined, { error: "x" }] }];
  assert.equal(speedTable(["attn", "a", "b", "c"], rows).split("\n")[2], "| plain S=1 D=1 | 100 (86) | 80 (68) | - | error | 1.25x |");
  assert.equal(speedTable(["attn"], [{ name: "x", results: [{ gflops: 1, percent: 1 }] }]).split("\n")[2], "| x | 1.0 (1) | - |");
  assert.equal(memoryTable(["attn", "a", "b", "c"], rows).split("\n")[2], "| plain S=1 D=1 | 1.5 | - | - | - |");
  assert.equal(new Set(cases.map((c) => c.name)).size, cases.length);
});

test("the reference in float64", () => {
  const one = { heads: 2, seq: 1, dim: 4, causal: false }; // one key: the output is the value
  assert.equal(largestError(operand(one, 2, "bhsd"), reference(one)), 0);
  const c = { heads: 2, seq: 6, dim: 4, causal: true }, decode = { ...c, causal: false, seq: 1, keys: 6 };
  assert.equal(largestError(operand(c, 2, "bhsd").slice(24, 28), reference(c).slice(24, 28)), 0); // the first row sees one key
  assert.equal(reference(decode).length, 8);
  assert.equal(largestError([1, 2.5], [1, 2]), 0.5);
  assert.equal(largestError([NaN, 2], [1, 2]), Infinity);
  assert.equal(largestError(undefined, [1]), Infinity);
});

test("turns in the browser's WebGPU give no time to a wrong answer", async () => {
  const c = { heads: 1, seq: 1, dim: 4, causal: false }, asked = [];
  const child = (name, sample, error) => ({
    async ask({ do: what }) {
      asked.push(`${name}:${what}`);
      return { load: { path: "plain" }, output: { sample, error }, run: { seconds: [0.002] } }[what];
    },
  });
  const right = operand(c, 2, "bhsd");
  const results = await turns(c, [child("a", right), child("b", right), child("c", [0, 0, 0, 0]), child("d", undefined, "no memory")], 2);
  assert.deepEqual(asked.filter((x) => x.endsWith("run")), ["a:run", "b:run", "a:run", "b:run"]);
  assert.match(row("x", results), /^\| x \| 2.0 \(2.0\), 0.0e\+0 \| 2.0 \(2.0\), 0.0e\+0 \| WRONG \d\.\d+ \| no memory \| 1.00x \| plain \|$/);
  assert.match(row("x", results.slice(2)), /\| - \|/);
});

test("a decode has its keys in the cache of GroupQueryAttention", () => {
  const shapes = (c) => operators.GroupQueryAttention({ heads: 8, seq: 1, dim: 64, ...c }).inputs.map((v) => v?.[2]);
  assert.deepEqual(shapes({ keys: 2048 }).slice(3, 5), [[1, 8, 2048, 64], [1, 8, 2048, 64]]);
  assert.deepEqual(shapes({}).slice(3, 5), [undefined, undefined]);
});

test("rows of a long case are those of the whole reference", () => {
  const c = { heads: 3, seq: 40, dim: 4, causal: true }, rows = [5, 39, 40, 119];
  assert.deepEqual([...reference(c, rows)], rows.flatMap((row) => [...reference(c).slice(row * 4, row * 4 + 4)]));
  assert.equal(someRows(c).length, 120);
  const some = someRows({ heads: 8, seq: 8192, dim: 64 });
  assert.deepEqual([...new Set(some)].sort((a, b) => a - b), some);
  assert.ok(some.length === 64 && some.at(-1) < 8 * 8192 && new Set(some.map((row) => row % 128)).size > 16);
});

test("ONNX Runtime's result is that of its fastest operator that is right", async () => {
  const c = { heads: 1, seq: 1, dim: 4, causal: true }, right = operand(c, 2, "bhsd"), [first, second] = webOperators(c);
  const peer = (answer, seconds, why) => ({
    async load() { if (why === "load") throw new Error("no memory\nat x"); },
    async run(calls) { if (why === "run" && calls > 1) throw new Error("lost"); return Array(calls).fill(seconds); },
    output: async () => answer,
    async release() { throw new Error("lost"); },
  });
  const result = async (peers) => {
    const all = new Peer((operator) => peers[operator]);
    for (let n = 0; n < 2; n++) await all.load(c);
    await all.turn();
    return JSON.parse(JSON.stringify(all.result()));
  };
  const slow = peer(right, 0.02), fast = peer(right, 0.01), wrong = peer([0, 0, 0, 0], 0.001);
  assert.deepEqual(await result({ [first]: slow, [second]: fast }), { operator: second, error: 0, wrong: false, seconds: 0.01 });
  assert.equal((await result({ [first]: slow, [second]: wrong })).seconds, 0.02);
  const bad = await result({ [first]: wrong, [second]: peer(right, 0.01, "run") });
  assert.ok(bad.wrong && bad.error > 0.1 && !("seconds" in bad));
  assert.deepEqual(await result({ [first]: peer(right, 0.01, "load"), [second]: wrong }).then((r) => r.wrong), true);
  const failed = await result({ [first]: peer(right, 0.01, "load"), [second]: peer(right, 0.01, "load") });
  assert.equal(failed.failed, "no memory");
});
