"use strict";
// The page around the worker: worker.js runs the program of attn-web, whose messages are the
// events of its package measure.

const $ = id => document.getElementById(id);
const form = $("form");
const see = $("see");
let worker, devices = [], rows = [], report = "", running = false, watch = 0, first = true;
let peer, peerResult; // the worker of ONNX Runtime Web during a run with it, and its result of the case
let words = [], weights, writing = ""; // the buttons of a story, the weights of one, the device

// The events that a worker sends.
const on = {
  devices(e) {
    devices = e.devices || [];
    form.device.replaceChildren(...devices.map(d => new Option(d.name, d.name)));
    trouble(e.text || "");
    choose();
    if (e.text && first) start({device: ""}); // no GPU: the CPU's figures at once
    first = false;
  },
  progress(e) {
    state(e.text, e.step);
    if (peer) turn(e);
  },
  row(e) {
    rows.push(e.row);
    report = e.report;
    show(e.row, peerResult);
    peerResult = undefined;
  },
  done(e) {
    report = e.report || report;
    if (e.text) trouble(e.text);
    ended("Done.");
  },
  tokens(e) {
    for (const text of e.texts || []) {
      const button = element("button", text);
      button.type = "button";
      button.setAttribute("aria-pressed", "false");
      words.push(button);
      const token = words.length; // 0 is the special one at the beginning
      button.addEventListener("click", () => attend(token));
      $("story").append(button);
    }
    $("rate").textContent = e.rate ? `${words.length} tokens, ${digits(e.rate)} a second on ${writing}` : `Reading the beginning on ${writing}.`;
  },
  wrote(e) {
    if (e.text) trouble(e.text);
    free(true);
    state("");
    if (!words.length) $("rate").textContent = "";
  },
  weights(e) {
    weights = e;
    drawMap();
  },
  failed(e) {
    trouble(e.text);
    ended("");
    $("start").disabled = $("write").disabled = true; // without a program
  },
};

// load starts a worker; its first message is the list of devices.
function load() {
  worker = new Worker("worker.js");
  worker.onmessage = m => {
    const e = JSON.parse(m.data);
    on[e.type](e);
  };
  worker.onerror = e => on.failed({text: "The program does not load: " + (e.message || "worker.js is missing") + "."});
}

function trouble(text) {
  $("trouble").textContent = text;
  $("trouble").hidden = !text;
}

// software reports whether a device computes on the CPU: its defaults are short.
const software = d => !d || d.type === "cpu";

// choose shows the chosen device, and ticks the cases that it can compute in the time limit.
function choose() {
  const d = devices.find(d => d.name === form.device.value);
  if (!d) return;
  const limit = l => l.name + " " + (/bytes|memory/.test(l.name) && l.value >= 1024 ? bytes(l.value) : l.value);
  const facts = [["device", d.device], ["reached through", [d.provider, d.driver].filter(Boolean).join(" · ")],
    ["limits", (d.limits || []).map(limit).join(" · ")], ["features", (d.features || []).join(" · ")], ["browser", browser()]].filter(([, value]) => value);
  $("device").replaceChildren(...facts.flatMap(([name, value]) => [element("dt", name), element("dd", value)]));
  const slow = software(d);
  const defaults = {
    seqs: d.name === "cpu" ? ["256", "1024"] : slow ? ["256", "1024", "2048"] : ["1024", "2048", "4096", "8192"],
    kinds: ["full", "causal", "decode"], dims: ["64"], dtypes: slow ? ["f32"] : ["f32", "f16"],
  };
  for (const box of form.querySelectorAll("fieldset input[type=checkbox]")) box.checked = defaults[box.name].includes(box.value);
  form.low.checked = (d.features || []).some(f => f.endsWith("f16->f32"));
  form.turns.disabled = d.name === "cpu";
  form.heads.value = slow ? 1 : 8;
  form.seconds.value = slow ? 60 : 180;
  $("start").disabled = $("write").disabled = running;
}

// state shows what is done. Screen readers read the text, not the many steps of it.
function state(text, step = "") {
  if ($("progress").textContent !== text) $("progress").textContent = text;
  $("step").textContent = step;
}

// free allows or prevents another run; the worker does one thing at a time.
function free(yes) {
  running = !yes;
  clearTimeout(watch);
  for (const id of ["start", "write"]) $(id).disabled = !yes;
  $("stop").disabled = $("halt").disabled = true;
  for (const button of words) button.disabled = !yes;
}

// start measures a request, by default that of the form.
function start(request) {
  const ticked = name => [...form.querySelectorAll(`input[name=${name}]:checked`)].map(box => box.value);
  request ??= {
    device: form.device.value, seqs: ticked("seqs").map(Number), dims: ticked("dims").map(Number), kinds: ticked("kinds"),
    dtypes: ticked("dtypes"), heads: Number(form.heads.value), low_precision: form.low.checked,
    seconds: Number(form.seconds.value), rounds: Number(form.rounds.value),
  };
  request.browser = browser();
  free(false);
  [rows, report] = [[], ""];
  if (request.device) trouble("");
  $("rows").replaceChildren();
  $("line").value = $("copied").textContent = "";
  for (const id of ["download", "copy"]) $(id).disabled = true;
  $("stop").disabled = false;
  state("Starting.");
  const turns = form.turns.checked && !form.turns.disabled && Boolean(request.device);
  peer = turns ? new Worker("peer.js", {type: "module"}) : undefined;
  for (const e of document.querySelectorAll(".ort")) e.hidden = !turns;
  worker.postMessage(JSON.stringify({type: "start", request, turns}));
}

// turn runs ONNX Runtime Web after a step of attn, before each round of a case, and lets attn go on.
async function turn({text, step, case: c}) {
  const mine = peer;
  if (c.device !== "cpu" && c.dtype === "f32" && step.startsWith("round") && !mine.broken) {
    state(text, step + ", ONNX Runtime Web");
    const powerPreference = c.device === "gpu:1" ? "low-power" : "high-performance"; // as attn numbers them
    const result = await new Promise(done => {
      mine.onmessage = m => done(m.data);
      mine.onerror = e => done({failed: mine.broken = e.message || "peer.js does not load"});
      mine.postMessage({powerPreference, case: c, first: step === "round 1"});
    });
    if (mine === peer) peerResult = result;
  }
  if (mine === peer) worker.postMessage(JSON.stringify({type: "turn"}));
}

// offer shows the choice of ONNX Runtime Web if its package lies in ort/.
async function offer() {
  const response = await fetch("ort/package.json");
  const {version} = response.ok ? await response.json() : {};
  $("version").textContent = version;
  $("ort").hidden = !version;
}

// stop lets the running call end. A program that does not answer is ended: a call of the CPU, or of
// a GPU that hangs.
function stop() {
  $("stop").disabled = $("halt").disabled = true;
  state("Stopping.");
  worker.postMessage(JSON.stringify({type: "stop"}));
  watch = setTimeout(() => {
    worker.terminate();
    ended("Stopped in the middle of a case.");
    load();
  }, 10000);
}

function ended(text) {
  free(true);
  peer?.terminate();
  peer = peerResult = undefined;
  $("download").disabled = !report;
  $("line").value = line();
  $("copy").disabled = !$("line").value;
  state(text);
}

// show adds a row to the table, with the result of ONNX Runtime Web. Cases without figures have their reason.
function show(m, ort) {
  const tr = document.createElement("tr");
  const name = element("th", m.backend + " · " + kind(m) + " · H=" + m.heads + " D=" + m.dim + " " + type(m));
  name.scope = "row";
  const wrong = m.status === "wrong";
  const note = wrong ? "WRONG" + m.note.replace("WRONG", "") : m.note ? (m.status === "ok" ? "ok, " : "") + m.note : m.status;
  const status = element("td", note + (ort?.failed ? ", ORT failed: " + ort.failed : ort ? ", ORT " + ort.operator : ""));
  status.className = wrong || m.status === "failed" ? "note bad" : "note";
  tr.append(name, ...[
    String(m.seq_k), m.median_s == null ? "" : seconds(m.median_s), digits(m.gflops), percent(m.gflops, m.ceiling_gflops),
    digits(m.gbs), percent(m.gbs, m.ceiling_gbs), m.max_error == null ? "" : m.max_error.toExponential(1),
    m.error_bound == null ? "" : m.error_bound.toExponential(1),
    ...peer ? [ort?.wrong ? "wrong" : ort?.seconds ? seconds(ort.seconds) : "",
      ort?.seconds && m.median_s ? (ort.seconds / m.median_s).toFixed(2) + "×" : "", ort?.error?.toExponential(1)] : [],
  ].map(text => element("td", text || "–")), status);
  $("rows").append(tr);
  $("results").hidden = false;
}

// line describes the best prefill and decode of the report in Markdown.
function line() {
  const right = rows.filter(m => m.status === "ok" && m.gflops);
  const best = (of, by) => of.reduce((a, b) => !a || b[by] > a[by] ? b : a, undefined);
  const prefill = best(right.filter(m => m.seq_q > 1), "gflops"), decode = best(right.filter(m => m.seq_q === 1), "gbs");
  if (!prefill && !decode) return "";
  const e = JSON.parse(report).environment;
  const of = (prefill || decode).backend;
  const d = e.backends.find(b => b.name === of);
  const name = m => `${kind(m)} S=${m.seq_k} H=${m.heads} D=${m.dim} ${type(m)}`;
  const worst = Math.max(...right.filter(m => m.error_bound).map(m => m.max_error / m.error_bound));
  return "| " + [
    d.device, browser(),
    prefill ? `${digits(prefill.gflops)} GFLOP/s, ${percent(prefill.gflops, prefill.ceiling_gflops)} of peak (${name(prefill)})` : "–",
    decode ? `${digits(decode.gbs)} GB/s, ${percent(decode.gbs, decode.ceiling_gbs) || "–"} of read (${name(decode)})` : "–",
    `${right.length} of ${rows.filter(m => ["ok", "wrong", "failed"].includes(m.status)).length} cases right, error at most ${(100 * worst).toPrecision(2)}% of its bound`, e.version, e.date.slice(0, 10),
  ].map(text => text.replaceAll("|", "/")).join(" | ") + " |";
}

// write writes a story.
function write() {
  const [beginning, temperature] = [see.prompt.value, Number(see.temperature.value)];
  writing = form.device.value;
  trouble("");
  words = [];
  $("story").replaceChildren();
  $("attention").hidden = true;
  $("rate").textContent = "Loading the model.";
  free(false);
  $("halt").disabled = false;
  const seed = Math.floor(Math.random() * 2 ** 31);
  worker.postMessage(JSON.stringify({type: "write", story: {device: writing, prompt: beginning, steps: 256, temperature, seed}}));
}

// attend asks for the weights of a token.
function attend(token) {
  worker.postMessage(JSON.stringify({type: "weights", token}));
  words.forEach((button, i) => button.setAttribute("aria-pressed", String(i + 1 === token)));
}

// drawMap shows the weights of a token in a layer: a row for each head, a column for each token.
function drawMap() {
  const layers = weights.weights, layer = $("layer");
  if (!layer.options.length) layer.replaceChildren(...layers.map((_, i) => new Option(i + 1, i)));
  const names = ["(start)", ...words.slice(0, weights.token).map(button => button.textContent.replace("\n", "↵"))];
  $("word").textContent = names.at(-1).trim();
  const head = (text, scope) => Object.assign(element("th", text), {scope});
  $("keys").replaceChildren(head("head", "col"), ...names.map(name => head(name, "col")));
  $("heads").replaceChildren(...layers[layer.value].map((row, i) => {
    const tr = document.createElement("tr");
    tr.append(head(String(i + 1), "row"), ...row.map(w => {
      const td = element("td", w < 0.01 ? "" : (100 * w).toFixed(0));
      td.style.setProperty("--weight", w);
      td.className = w > 0.5 ? "strong" : "";
      return td;
    }));
    return tr;
  }));
  $("attention").hidden = false;
}

const kind = m => m.seq_q === 1 ? "decode" : m.causal ? "causal" : "full";
const type = m => m.dtype + (m.low_precision ? " low precision" : "");
const digits = x => x == null ? "" : x >= 100 ? x.toFixed(0) : x.toPrecision(3);
const percent = (x, of) => x == null || !of ? "" : (100 * x / of).toFixed(1) + "%";
const seconds = s => s >= 1 ? s.toPrecision(3) + " s" : s >= 1e-3 ? (s * 1e3).toPrecision(3) + " ms" : (s * 1e6).toPrecision(3) + " µs";

function bytes(n) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  for (; n >= 1024 && i < units.length - 1; i++) n /= 1024;
  return Number(n.toPrecision(3)) + " " + units[i];
}

// browser names the browser, its version and system.
function browser() {
  const agent = navigator.userAgent;
  const [, name, version] = /(Edg|OPR|Firefox|Chrome|Version)\/(\d+)/.exec(agent) || [, "browser", ""];
  const system = navigator.userAgentData?.platform || navigator.platform;
  return ({Edg: "Edge", OPR: "Opera", Version: "Safari"}[name] || name) + " " + version + (system && ", " + system);
}

function element(tag, text) {
  const e = document.createElement(tag);
  e.textContent = text;
  return e;
}

// save offers the report as a file.
function save() {
  const a = document.createElement("a");
  a.href = URL.createObjectURL(new Blob([report], {type: "application/json"}));
  a.download = "attn-web.json";
  a.click();
  setTimeout(() => URL.revokeObjectURL(a.href), 60000); // the download has begun
}

async function copy() {
  try {
    await navigator.clipboard.writeText($("line").value);
    $("copied").textContent = "Copied.";
  } catch { // not allowed: the line is selected, for the visitor to copy
    $("line").select();
    $("copied").textContent = "Selected, press Ctrl-C.";
  }
}

form.addEventListener("submit", e => {
  e.preventDefault();
  start();
});
form.device.addEventListener("change", choose);
see.addEventListener("submit", e => {
  e.preventDefault();
  write();
});
$("layer").addEventListener("change", drawMap);
$("stop").addEventListener("click", stop);
$("halt").addEventListener("click", stop);
$("download").addEventListener("click", save);
$("copy").addEventListener("click", copy);
offer().catch(() => {}); // without it
load();
