// The conversation: what was said, what is being answered, and how it looks.

import { Refusal, stream } from "./api.js";
import { byId, formatted, make } from "./dom.js";
import { TokenView, fromLists } from "./tokens.js";

const STARTERS = [
  "Explain in two sentences why the sky is blue.",
  "Write a haiku about a quiet harbour.",
  "Name three uses of a paper clip.",
];
const NEAR = 80; // pixels from the end at which the log goes on following the answer
const ALTERNATIVES = 5; // of every token, where probabilities are wanted
const STORED = "llmpy-conversation"; // in this tab, so that a reload keeps it
const REASONS = { length: "cut at max tokens", tool_calls: "calls a tool" };
const WHO = { user: "You", assistant: "Answer", tool: "Result" };

export class Chat {
  // settings(): what requests carry; changed(): called when an answer begins or ends; refused(error): when the server refuses;
  // giveBack(text): takes a question that was not answered, or that is to be changed.
  constructor({ settings, changed, refused, giveBack }) {
    Object.assign(this, { settings, changed, refused, giveBack, log: byId("log"), turns: [], hasTemplate: true });
    this.model = undefined;
    this.waitsFor = "Waiting for the server";
  }

  // What was said before the page was loaded again.
  recall() {
    for (const facts of JSON.parse(sessionStorage.getItem(STORED) ?? "[]")) this.add(Turn.from(facts));
    this.offer();
  }

  remember() {
    try {
      sessionStorage.setItem(STORED, JSON.stringify(this.turns.filter((turn) => turn.isSaid).map((turn) => turn.facts())));
    } catch {} // longer than what a browser keeps
  }

  // The actions of every turn: the last answer can be asked for again, questions can be changed.
  offer() {
    for (const turn of this.turns) {
      if (turn.role === "assistant") turn.allow({ retry: turn === this.turns.at(-1) && (() => this.retry()) });
      else turn.allow({ edit: turn.role === "user" && (() => this.edit(turn)) });
    }
  }

  // Takes a question back, with all that came behind it.
  edit(turn) {
    this.stop();
    this.cut(this.turns.indexOf(turn));
    this.giveBack(turn.content);
  }

  cut(place) {
    for (const turn of this.turns.splice(place)) turn.element.remove();
    this.problem?.remove();
    if (!this.turns.length) this.drawEmpty();
    this.offer();
    this.remember();
    this.changed();
  }

  // The conversation as a text.
  markdown() {
    return this.turns.filter((turn) => turn.isSaid).map((turn) => turn.markdown()).join("\n");
  }

  get running() {
    return this.stopper !== undefined;
  }

  // Calls of the last answer that have no result yet.
  get open() {
    const calls = this.turns.findLast((turn) => turn.role === "assistant")?.calls ?? [];
    const answered = new Set(this.turns.map((turn) => turn.call));
    return calls.filter((call) => !answered.has(call.id));
  }

  clear() {
    this.stop();
    this.turns = [];
    this.drawEmpty();
    this.remember();
    this.changed();
  }

  drawEmpty() {
    const empty = make("div", { class: "empty" });
    if (!this.model) empty.append(make("strong", {}, this.waitsFor));
    else if (this.hasTemplate) {
      const starters = STARTERS.map((text) => make("li", {}, button(text, () => this.say(text), {})));
      empty.append(make("strong", {}, "What would you like to know?"), make("ul", {}, ...starters));
    } else empty.append(make("strong", {}, "This model has no chat template"), "It goes on with the text you give it.");
    this.log.replaceChildren(empty);
  }

  // A question, or the result of the first open call.
  say(text) {
    if (this.running || !text.trim() || !this.model) return;
    const [call] = this.open;
    this.add(new Turn(call ? { role: "tool", content: text, call: call.id } : { role: "user", content: text }));
    if (!this.open.length) this.answer();
    else this.changed();
  }

  add(turn) {
    this.problem?.remove();
    if (!this.turns.length) this.log.replaceChildren();
    this.turns.push(turn);
    this.log.append(turn.element);
    this.log.scrollTop = this.log.scrollHeight;
  }

  stop() {
    this.stopper?.abort();
  }

  retry() {
    while (this.turns.at(-1)?.role === "assistant") this.turns.pop().element.remove();
    this.answer();
  }

  request() {
    const { system, tools, probabilities, ...sampling } = this.settings();
    const common = { model: this.model, ...sampling, stream_options: { include_usage: true } };
    if (!this.hasTemplate) {
      const prompt = this.turns.at(-1).content;
      return ["v1/completions", { max_tokens: 256, ...common, prompt, ...(probabilities && { logprobs: ALTERNATIVES }) }];
    }
    const messages = this.turns.filter((turn) => turn.isSaid).map((turn) => turn.message());
    if (system) messages.unshift({ role: "system", content: system });
    const wishes = { ...(tools && { tools }), ...(probabilities && { logprobs: true, top_logprobs: ALTERNATIVES }) };
    return ["v1/chat/completions", { ...common, messages, ...wishes, truncation: "auto" }];
  }

  async answer() {
    const stopper = (this.stopper = new AbortController());
    const turn = new Turn({ role: "assistant" });
    for (const older of this.turns) older.allow({});
    try {
      const wanted = this.request();
      this.add(turn);
      this.changed();
      for await (const made of stream(...wanted, stopper.signal, (dropped) => (turn.dropped = dropped))) {
        const follows = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < NEAR;
        turn.take(made);
        if (follows) this.log.scrollTop = this.log.scrollHeight;
      }
      turn.end();
    } catch (error) {
      const isStopped = stopper.signal.aborted;
      turn.end(isStopped ? undefined : error);
      const isGone = isStopped && !this.turns.includes(turn); // by a new chat, or a question that is changed
      if (!turn.isSaid && !isGone) this.fail(isStopped ? undefined : error);
      if (error instanceof Refusal) this.refused(error);
    } finally {
      if (this.stopper === stopper) this.stopper = undefined;
      this.offer();
      this.remember();
      this.changed();
    }
  }

  // A question that got no answer is not said: its text goes back to where it was written.
  fail(error) {
    const asked = this.turns.findLastIndex((one) => one.role !== "assistant");
    const text = this.turns[asked]?.content ?? "";
    this.cut(asked);
    this.giveBack(text);
    if (!error) return;
    this.problem = problem(error);
    this.log.append(this.problem);
    this.log.scrollTop = this.log.scrollHeight;
  }
}

class Turn {
  constructor({ role, content = "", call }) {
    const isRunning = role === "assistant";
    Object.assign(this, { role, content, call, isRunning, reasoning: "", calls: [], began: performance.now() });
    this.body = make("div", { class: "content" });
    this.about = make("footer", { class: "about" });
    const who = make("div", { class: "who" }, WHO[role]);
    this.element = make("article", { class: `turn ${role}` }, who, this.body, this.about);
    this.mark();
    if (role === "assistant") this.body.append(make("span", { class: "wait" }, "Reading"));
    else this.body.append(content);
  }

  static from({ role, content, call, reasoning, calls, reason }) {
    const turn = new Turn({ role, content, call });
    if (role !== "assistant") return turn;
    Object.assign(turn, { reasoning, calls, reason, isRunning: false, isOld: true });
    turn.mark();
    turn.draw();
    return turn;
  }

  facts() {
    const { role, content, call, reasoning, calls, reason } = this;
    return { role, content, call, reasoning, calls, reason: this.isRunning ? "stopped" : reason };
  }

  markdown() {
    const calls = this.calls.map(({ name, text }) => `\`${name}(${text})\`\n`);
    return [`**${WHO[this.role]}**\n`, ...(this.content ? [`${this.content}\n`] : []), ...calls].join("\n");
  }

  // Whether it belongs to the conversation: an answer of which nothing came does not.
  get isSaid() {
    return this.role !== "assistant" || Boolean(this.content || this.calls.length);
  }

  mark() {
    this.element.classList.toggle("running", this.isRunning);
    this.element.setAttribute("aria-busy", String(this.isRunning));
  }

  message() {
    if (this.role === "tool") return { role: "tool", tool_call_id: this.call, content: this.content };
    const calls = this.calls.map(({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text } }));
    return { role: this.role, content: this.content, ...(calls.length && { tool_calls: calls }) };
  }

  take(made) {
    if (made.usage) this.usage = made.usage;
    const [choice] = made.choices;
    if (!choice) return;
    const delta = choice.delta ?? { content: choice.text };
    this.content += delta.content ?? "";
    this.reasoning += delta.reasoning ?? "";
    for (const change of delta.tool_calls ?? []) this.takeCall(change);
    const tokens = choice.logprobs && (choice.logprobs.content ?? fromLists(choice.logprobs));
    if (tokens?.length) this.takeTokens(tokens);
    if (choice.finish_reason) this.reason = choice.finish_reason;
    if (delta.content || delta.reasoning || delta.tool_calls || tokens?.length) this.first ??= performance.now();
    this.soon();
  }

  takeCall(change) {
    const call = (this.calls[change.index] ??= { id: change.id, name: "", text: "" });
    call.name += change.function?.name ?? "";
    call.text += change.function?.arguments ?? "";
  }

  takeTokens(tokens) {
    if (!this.tokens) {
      this.tokens = new TokenView();
      this.showsTokens = true;
    }
    this.tokens.add(tokens);
  }

  // Draws once a frame, however many pieces come.
  soon() {
    this.frame ??= requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.frame = undefined;
    if (!this.first && this.isRunning) return;
    const parts = this.showsTokens ? [this.tokens.element] : formatted(this.content);
    if (!parts.length && this.isRunning) parts.push(make("p", {}, ""));
    if (this.reasoning && !this.showsTokens) parts.unshift(this.thought());
    this.body.replaceChildren(...parts, ...this.calls.map(callCard), ...(this.problem ? [this.problem] : []));
  }

  thought() {
    this.details ??= make("details", { class: "reasoning", open: true }, make("summary", {}, "Reasoning"), make("p", {}));
    this.details.querySelector("p").textContent = this.reasoning.trim();
    return this.details;
  }

  end(error) {
    cancelAnimationFrame(this.frame);
    this.isRunning = false;
    this.last = performance.now();
    this.mark();
    this.tokens?.end();
    if (error) this.problem = problem(error);
    if (!error && !this.reason) this.reason = "stopped";
    this.draw();
    if (!this.body.childElementCount) this.body.append(this.reason === "stopped" ? "Stopped." : "An empty answer.");
  }

  // The line below a turn: what it took, and what can be done with it.
  allow({ retry, edit }) {
    if (this.role !== "assistant") {
      this.about.replaceChildren(...(edit ? [make("span", { class: "actions" }, button("Edit", edit))] : []));
      return;
    }
    const facts = [];
    const { completion_tokens: n, prompt_tokens_details: prompt } = this.usage ?? {};
    if (n) facts.push(`${n} tokens`);
    if (n > 1 && this.first) facts.push(`${((1000 * (n - 1)) / (this.last - this.first)).toFixed(1)} tokens/s`);
    if (this.first) facts.push(`first after ${seconds(this.first - this.began)}`);
    if (prompt?.cached_tokens) facts.push(`${prompt.cached_tokens} from the cache`);
    if (this.dropped) facts.push(`answered without the oldest ${this.dropped} messages: the context is full`);
    if (this.reason && this.reason !== "stop") facts.push(REASONS[this.reason] ?? this.reason);
    const pressed = { class: "quiet", "aria-pressed": String(Boolean(this.showsTokens)) };
    const actions = [
      this.tokens && button("Tokens", () => this.toggle({ retry }), pressed),
      this.content && button("Copy", () => navigator.clipboard.writeText(this.content)),
      retry && button("Retry", retry),
    ].filter(Boolean);
    this.about.replaceChildren(...facts.map((fact) => make("span", {}, fact)), make("span", { class: "actions" }, ...actions));
  }

  toggle(actions) {
    this.showsTokens = !this.showsTokens;
    this.draw();
    this.allow(actions);
  }
}

function button(text, onclick, attributes = { class: "quiet" }) {
  return make("button", { type: "button", ...attributes, onclick }, text);
}

function problem(error) {
  return make("div", { class: "problem", role: "alert" }, make("strong", {}, "No answer. "), told(error));
}

function callCard(call) {
  let text = call.text;
  try {
    text = JSON.stringify(JSON.parse(text), undefined, 2);
  } catch {} // still coming
  return make("section", { class: "call" }, make("header", {}, "calls ", make("code", {}, call.name)), make("pre", {}, text));
}

function seconds(ms) {
  return ms < 1000 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toFixed(2)} s`;
}

function told(error) {
  return error instanceof TypeError ? "The server cannot be reached." : error.message;
}
