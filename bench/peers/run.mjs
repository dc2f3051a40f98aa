#!/usr/bin/env node
// Measures attn's backends and their peers on the same shapes, in turns, and prints the
// tables of README.md.
//
//	cd bench/peers && npm install
//	node bench/peers/run.mjs [--help]

import { execFileSync, spawnSync } from "node:child_process";
import { existsSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { cpus, tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";
import { gpuCases, gpuPeers, notMeasured, settleSeconds } from "./gpu.mjs";
import { operators } from "./onnx.mjs";
import { Child } from "./serve.mjs";
import { cases, measure, memoryTable, speedTable } from "./turns.mjs";

const here = dirname(fileURLToPath(import.meta.url));

const usage =
  "usage: node bench/peers/run.mjs [--on cpu,gpu] [--gpu gpu:1] [--threads 1,2] [--repetitions 7] [--only REGEXP] [--json FILE]";

const flags = parse();

// parse returns the command line's flags. It ends the process after --help and unknown flags.
function parse() {
  try {
    const { values } = parseArgs({
      options: {
        on: { type: "string", default: "cpu,gpu" },
        gpu: { type: "string", default: "gpu" },
        threads: { type: "string", default: "1,2" },
        repetitions: { type: "string", default: "7" },
        only: { type: "string", default: "" },
        json: { type: "string" },
        help: { type: "boolean", default: false },
      },
    });
    if (!values.help) return values;
    console.log(usage);
    process.exit(0);
  } catch (err) {
    console.error(`${err.message}\n${usage}`);
    process.exit(2);
  }
}

// .ci/sid unpacks a newer one. Debian's package belongs to the interpreter of the system, which may not be the first in PATH.
const python = [join(here, "..", "..", ".cache", "torch", "python"), "python3", "/usr/bin/python3"].find((p) => spawnSync(p, ["-c", "import torch, numpy"]).status === 0);

// allowed returns the processors that this process may run on.
function allowed() {
  try {
    const list = readFileSync("/proc/self/status", "utf8").match(/Cpus_allowed_list:\s*(\S+)/)[1];
    return list.split(",").flatMap((part) => {
      const [lo, hi = lo] = part.split("-").map(Number);
      return Array.from({ length: hi - lo + 1 }, (_, i) => lo + i);
    });
  } catch {
    return [];
  }
}

// pinned returns a command that runs on as many processors as it has threads. Threads that
// migrate or share a processor would measure the operating system.
function pinned(threads, command, args) {
  const list = allowed().slice(0, threads);
  if (list.length < threads || spawnSync("taskset", ["--version"]).status !== 0) return [command, args];
  return ["taskset", ["-c", list.join(","), command, ...args]];
}

// peers returns the installed peers, attn first, with their commands and cases.
function peers(attn, threads) {
  const n = String(threads);
  const start = (command, args, env = {}) => () => new Child(...pinned(threads, command, args), env);
  const list = [{ name: "attn", start: start(attn, [], { GOMAXPROCS: n }), takes: () => true }];
  if (existsSync(join(here, "node_modules", "onnxruntime-node"))) {
    for (const op of Object.keys(operators)) {
      list.push({
        name: `ONNX Runtime ${op}`, start: start(process.execPath, [join(here, "ort.mjs"), op, n]),
        takes: (c) => !c.backward && !c.dtype && (op === "GroupQueryAttention" ? c.causal : !c.window) && !(c.kvHeads && op === "MultiHeadAttention"),
      });
    }
  }
  if (python) {
    const openmp = { OMP_NUM_THREADS: n, OMP_PROC_BIND: "true", MKL_NUM_THREADS: n, OPENBLAS_NUM_THREADS: n };
    list.push({ name: "PyTorch", start: start(python, [join(here, "torch_peer.py"), n], openmp), takes: (c) => !c.window });
    // Without AMX its fused bf16 path is slower than three calls.
    list.push({ name: "PyTorch by hand", start: start(python, [join(here, "torch_peer.py"), n, "hand"], openmp), takes: (c) => c.dtype === "bf16" && !c.kvHeads });
  }
  return list;
}

const temporary = mkdtempSync(join(tmpdir(), "attn-peers-"));
process.on("exit", () => rmSync(temporary, { recursive: true, force: true }));
["SIGINT", "SIGTERM"].forEach((signal) => process.on(signal, () => process.exit(1)));
const attn = join(temporary, "attn-peer");
execFileSync("go", ["build", "-o", attn, "./bench/peers/attn"], { cwd: join(here, "..", ".."), stdio: "inherit" });

const report = [];
const chosen = (all) => all.filter((c) => new RegExp(flags.only).test(c.name));

// table measures cases on the peers in list and returns a row for each.
async function table(list, cases, title, extra = {}, settle = 0) {
  const rows = [], names = list.map((p) => p.name);
  for (const c of cases) {
    // Each case has its own processes: after another case, a process already has memory
    // that the call needs.
    const taking = list.filter((p) => p.takes(c)).map((p) => ({ ...p, child: p.start() }));
    const results = await measure(c, taking, Number(flags.repetitions), settle);
    results.forEach((r, i) => r.error && console.error(`${taking[i].name}, ${c.name}: ${r.error}`));
    taking.forEach((p) => p.child.kill());
    rows.push({ name: c.name, results: list.map((p) => results[taking.findIndex((t) => t.name === p.name)]) });
    process.stderr.write(`${title}, ${c.name}: done\n`);
  }
  report.push(...rows.map((r) => ({ name: r.name, ...extra, results: Object.fromEntries(names.map((n, i) => [n, r.results[i] ?? null])) })));
  return rows;
}

async function onCPU() {
  console.log(`${cpus()[0].model.trim()} · ${cpus().length} CPUs · ${new Date().toISOString().slice(0, 10)} · float32, B=1 H=8 unless stated\n`);
  if (!existsSync(join(here, "node_modules", "onnxruntime-node"))) console.log("ONNX Runtime is absent: npm install in bench/peers\n");
  if (!python) console.log("PyTorch is absent: .ci/sid torch unpacks 2.14 on Debian, or any python3 with torch and numpy\n");
  for (const threads of flags.threads.split(",").map(Number)) {
    const list = peers(attn, threads);
    const count = threads === 1 ? "one thread" : `${threads} threads`;
    const rows = await table(list, chosen(cases), count, { threads });
    const names = list.map((p) => p.name);
    console.log(`${count}\n\n${speedTable(names, rows)}\n${memoryTable(names, rows)}`);
  }
}

async function onGPU() {
  const start = (command, args) => () => new Child(command, args);
  const probe = start(attn, ["-backend", flags.gpu])();
  const answer = await probe.ask({ do: "device" });
  probe.kill();
  const why = notMeasured(answer, flags.gpu);
  if (why) return console.log(why);
  const { device, provider, driver } = answer.device;
  console.log(`${device} · ${driver} · attn by ${provider} · ${new Date().toISOString().slice(0, 10)} · B=1 H=16\n`);
  const cuda = ["python3", "/usr/bin/python3"].find((p) => spawnSync(p, ["-c", "import torch, numpy; exit(not torch.cuda.is_available())"]).status === 0);
  if (!cuda) console.log("PyTorch with a CUDA device is absent\n");
  const list = gpuPeers(attn, flags.gpu, cuda, join(here, "torch_peer.py"), start);
  const rows = await table(list, chosen(gpuCases), device, { device }, settleSeconds);
  console.log(`${speedTable(list.map((p) => p.name), rows)}
% is of attn's float32 FMA peak throughout: what multiplies 16 bit numbers on tensor cores can be above 100.`);
}

for (const place of flags.on.split(",")) await (place === "gpu" ? onGPU() : onCPU());
if (flags.json) writeFileSync(flags.json, JSON.stringify(report, null, 2) + "\n");
