// The protocol between run.mjs and the programs that it measures: a line of JSON for each
// request and answer.
//
//	{"do": "load", "case": {"heads": 8, "seq": 256, "dim": 64, "causal": false, "dtype": "f32"}}
//	  {"extra": 1048576, "sample": [...]}   bytes of the first call, or null
//	{"do": "run", "calls": 3}
//	  {"seconds": [0.1, 0.1, 0.1]}
//	{"do": "peak"}                          attn only
//	  {"flops": 1.17e11}
//	{"do": "device"}                        attn only
//	  {"device": {"name": "gpu:0", ...}}    as attn devices --json describes it
//
// The answer to a request that fails is {"error": "why"}.

import { createInterface } from "node:readline";
import { spawn } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";

/** serve answers requests on stdin with the results of handlers, one after the other. */
export async function serve(handlers) {
  for await (const line of createInterface({ input: process.stdin })) {
    let answer;
    try {
      const request = JSON.parse(line);
      answer = await handlers[request.do](request);
    } catch (err) {
      answer = { error: String(err.message ?? err).split("\n")[0] };
    }
    process.stdout.write(JSON.stringify(answer) + "\n");
  }
}

const children = new Set();
process.on("exit", () => children.forEach((c) => c.kill()));

/**
 * Child is a program that serves. It is stopped while it has nothing to answer:
 * threads that spin for more work would take a processor from whoever's turn it is.
 */
export class Child {
  #process;
  #waiting = [];
  #errors = "";

  constructor(command, args, env) {
    this.#process = spawn(command, args, { env: { ...process.env, ...env }, stdio: ["pipe", "pipe", "pipe"] });
    createInterface({ input: this.#process.stdout }).on("line", (line) => this.#waiting.shift()?.(JSON.parse(line)));
    this.#process.stderr.on("data", (data) => (this.#errors = (this.#errors + data).slice(-2000)));
    children.add(this);
    const gone = (why) => this.#waiting.splice(0).forEach((answer) => answer({ error: why }));
    this.#process.on("error", (err) => gone(err.message));
    this.#process.stdin.on("error", () => {}); // 'exit' reports it
    this.#process.on("exit", (code) => children.delete(this) && gone(`ended with ${code}: ${this.#errors.trim().split("\n").pop()}`));
  }

  /** ask sends a request and returns its answer. */
  async ask(request) {
    if (!children.has(this)) return { error: `ended with ${this.#process.exitCode}` };
    this.#process.kill("SIGCONT");
    const answer = await new Promise((answer) => {
      this.#waiting.push(answer);
      this.#process.stdin.write(JSON.stringify(request) + "\n");
    });
    this.#process.kill("SIGSTOP");
    return answer;
  }

  /** kill ends the program. */
  kill() {
    this.#process.kill("SIGKILL");
  }
}

/** extraMemory runs call and returns by how many bytes the resident memory rose; null when unknown. */
export async function extraMemory(call) {
  const status = (key) => Number(readFileSync("/proc/self/status", "utf8").match(new RegExp(`${key}:\\s*(\\d+) kB`))[1]) * 1024;
  let before;
  try {
    writeFileSync("/proc/self/clear_refs", "5"); // the peak begins anew
    before = status("VmRSS");
  } catch {
    await call();
    return null;
  }
  await call();
  return Math.max(0, status("VmHWM") - before);
}
